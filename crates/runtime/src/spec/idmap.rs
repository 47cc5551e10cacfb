//! Identities of a user namespace.

use ferrite_cri::v1::{IdMapping, UserNamespace};
use oci_spec::runtime::{LinuxIdMapping, LinuxIdMappingBuilder};

use super::SpecError;

/// The kernel takes no more ranges than this.
const MAX_RANGES: usize = 340;

/// Which identities of the host a user namespace's identities are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdMap {
    pub uids: Vec<LinuxIdMapping>,
    pub gids: Vec<LinuxIdMapping>,
}

impl IdMap {
    pub fn new(user: &UserNamespace) -> Result<Self, SpecError> {
        Ok(Self { uids: ranges("uids", &user.uids)?, gids: ranges("gids", &user.gids)? })
    }

    /// Returns true if a mount has exactly these mappings: others would need a namespace of their own.
    pub fn matches(&self, uids: &[IdMapping], gids: &[IdMapping]) -> bool {
        let same = |ours: &[LinuxIdMapping], theirs: &[IdMapping]| {
            ours.len() == theirs.len()
                && ours.iter().zip(theirs).all(|(a, b)| {
                    (a.container_id(), a.host_id(), a.size()) == (b.container_id, b.host_id, b.length)
                })
        };
        same(&self.uids, uids) && same(&self.gids, gids)
    }

    /// The host's number for a user; `None` when it is not mapped.
    pub fn host_uid(&self, uid: u32) -> Option<u32> {
        to_host(&self.uids, uid)
    }

    /// The host's number for a group; `None` when it is not mapped.
    pub fn host_gid(&self, gid: u32) -> Option<u32> {
        to_host(&self.gids, gid)
    }
}

/// The content of `uid_map` or `gid_map`.
pub fn map_file(ranges: &[LinuxIdMapping]) -> String {
    ranges.iter().map(|r| format!("{} {} {}\n", r.container_id(), r.host_id(), r.size())).collect()
}

fn to_host(ranges: &[LinuxIdMapping], id: u32) -> Option<u32> {
    ranges.iter().find_map(|range| {
        let offset = id.checked_sub(range.container_id())?;
        (offset < range.size()).then(|| range.host_id() + offset)
    })
}

fn ranges(what: &str, given: &[IdMapping]) -> Result<Vec<LinuxIdMapping>, SpecError> {
    let wrong = |message: String| Err(SpecError::UserNamespace(format!("{what}: {message}")));
    if given.is_empty() || given.len() > MAX_RANGES {
        return wrong(format!("{} ranges given, 1 to {MAX_RANGES} are possible", given.len()));
    }
    let mut out = Vec::with_capacity(given.len());
    for range in given {
        let fits = |start: u32| range.length > 0 && start.checked_add(range.length).is_some();
        if !fits(range.container_id) || !fits(range.host_id) {
            let (inside, host, length) = (range.container_id, range.host_id, range.length);
            return wrong(format!("range {inside} {host} {length} is empty or too long"));
        }
        let mapping = LinuxIdMappingBuilder::default()
            .container_id(range.container_id)
            .host_id(range.host_id)
            .size(range.length)
            .build();
        // Every field has a default: building cannot fail.
        out.push(mapping.unwrap_or_default());
    }
    if to_host(&out, 0).is_none() {
        return wrong("root (0) must be mapped".into());
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(ranges: &[(u32, u32, u32)]) -> UserNamespace {
        let list: Vec<IdMapping> = ranges
            .iter()
            .map(|(inside, host, length)| IdMapping {
                container_id: *inside,
                host_id: *host,
                length: *length,
            })
            .collect();
        UserNamespace { mode: 0, uids: list.clone(), gids: list }
    }

    #[test]
    fn numbers() {
        let map = IdMap::new(&user(&[(0, 65536, 1000), (2000, 100, 1)])).unwrap();
        for (inside, host) in
            [(0, Some(65536)), (999, Some(66535)), (1000, None), (2000, Some(100)), (2001, None)]
        {
            assert_eq!(map.host_uid(inside), host, "{inside}");
        }
        assert_eq!(map_file(&map.gids), "0 65536 1000\n2000 100 1\n");
        let same = user(&[(0, 65536, 1000), (2000, 100, 1)]);
        assert!(map.matches(&same.uids, &same.gids));
        assert!(!map.matches(&same.uids, &[]));
    }

    #[test]
    fn wrong_ranges_are_refused() {
        for ranges in [&[][..], &[(0, 1, 0)], &[(5, 1000, 10)], &[(0, u32::MAX, 2)], &[(0, 0, 1); 400]] {
            assert!(matches!(IdMap::new(&user(ranges)), Err(SpecError::UserNamespace(_))), "{ranges:?}");
        }
    }
}
