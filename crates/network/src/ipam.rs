//! Which sandbox has which addresses, kept on disk.
//!
//! A sandbox has one place, and the address at that place in the range of each family. One file per place in use, named
//! by the address of the primary family, holding the sandbox id. A file appears by rename
//! and goes by unlink, each followed by a sync of the directory, so that after a crash an address is
//! either reserved or free, never half of both. The directory is small and read once, when opened.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::state::{sync_dir, write_atomic};
use crate::{Addresses, Cidrs, NetworkError};

/// The name of the file that remembers where the round-robin search goes on.
const CURSOR: &str = "last";

/// Which index to try first and which are taken: the pure half of the allocator.
#[derive(Debug)]
struct Pool {
    ranges: Cidrs,
    /// By address of the primary family.
    taken: BTreeMap<IpAddr, String>,
    by_sandbox: HashMap<String, IpAddr>,
    /// The address handed out last; the search starts after it so that a released address rests for as
    /// long as possible (peers may still send to it, connection tracking may still know it).
    last: Option<IpAddr>,
}

/// Hardware addresses are made of 32 bits of the place.
const MOST: u128 = 1 << 32;

impl Pool {
    /// Pods may have index 2 up to the one before the last of the smallest range: 0 is the network, 1 the gateway, the
    /// last is IPv4's broadcast address.
    fn capacity(&self) -> u128 {
        self.ranges.iter().map(|range| range.size()).min().unwrap_or(0).min(MOST).saturating_sub(3)
    }

    /// The addresses of all families at the place of the primary one.
    fn addresses(&self, primary: IpAddr) -> Option<Addresses> {
        let index = self.ranges.primary().index_of(primary)?;
        self.ranges.try_map(|range| range.nth(index))
    }

    fn next_free(&self) -> Option<IpAddr> {
        let capacity = self.capacity();
        let start = self
            .last
            .and_then(|last| self.ranges.primary().index_of(last))
            .map_or(0, |index| (index + 1).saturating_sub(2) % capacity.max(1));
        (0..capacity)
            .filter_map(|step| self.ranges.primary().nth(2 + (start + step) % capacity))
            .find(|address| !self.taken.contains_key(address))
    }

    /// An address somebody chose, if it is one of ours and free.
    fn check_wanted(&self, wanted: IpAddr) -> Result<IpAddr, NetworkError> {
        let range = *self.ranges.primary();
        let usable = range.index_of(wanted).is_some_and(|index| (2..2 + self.capacity()).contains(&index));
        if !usable {
            return Err(NetworkError::Conflict(format!("{wanted} is no address for a pod of {range}")));
        }
        if self.taken.contains_key(&wanted) {
            return Err(NetworkError::Conflict("Address already in use".into()));
        }
        Ok(wanted)
    }

    fn insert(&mut self, address: IpAddr, sandbox: &str) {
        self.taken.insert(address, sandbox.to_owned());
        self.by_sandbox.insert(sandbox.to_owned(), address);
    }

    fn remove(&mut self, sandbox: &str) -> Option<IpAddr> {
        let address = self.by_sandbox.remove(sandbox)?;
        self.taken.remove(&address);
        Some(address)
    }
}

/// The node's addresses. Calls block on the disk for a moment.
#[derive(Debug)]
pub(crate) struct Ipam {
    dir: PathBuf,
    pool: Pool,
}

impl Ipam {
    /// Reads the reservations under `dir`, making it if needed. Files that are no reservation of the primary range
    /// (another range's, or left by an interrupted write) are removed.
    pub(crate) fn open(dir: PathBuf, ranges: Cidrs) -> Result<Self, NetworkError> {
        let fail = |what| {
            let path = dir.clone();
            move |source| NetworkError::State { path, what, source }
        };
        fs::create_dir_all(&dir).map_err(fail("create"))?;
        let mut pool = Pool { ranges, taken: BTreeMap::new(), by_sandbox: HashMap::new(), last: None };
        for entry in fs::read_dir(&dir).map_err(fail("list"))? {
            let entry = entry.map_err(fail("list"))?;
            let name = entry.file_name();
            if name == CURSOR {
                let text = fs::read_to_string(entry.path()).map_err(fail("read the cursor"))?;
                pool.last = text.trim().parse().ok();
                continue;
            }
            let address = name
                .to_str()
                .and_then(|n| n.parse::<IpAddr>().ok())
                .filter(|a| ranges.primary().contains(*a));
            let sandbox = fs::read_to_string(entry.path()).map_err(fail("read a reservation"))?;
            match address {
                // A second address of one sandbox can only come from outside; keep the first read.
                Some(address) if is_sandbox_id(&sandbox) && !pool.by_sandbox.contains_key(&sandbox) => {
                    pool.insert(address, &sandbox);
                }
                _ => fs::remove_file(entry.path()).map_err(fail("remove a stale file"))?,
            }
        }
        Ok(Self { dir, pool })
    }

    #[cfg(test)]
    fn reserve(&mut self, sandbox: &str) -> Result<Addresses, NetworkError> {
        self.reserve_wanted(sandbox, None)
    }

    /// The addresses of `sandbox`: those it has, or the wanted one of the primary family, or free ones; reserved on disk
    /// before they are returned.
    pub(crate) fn reserve_wanted(
        &mut self,
        sandbox: &str,
        wanted: Option<IpAddr>,
    ) -> Result<Addresses, NetworkError> {
        let primary = self.reserve_primary(sandbox, wanted)?;
        let outside = || NetworkError::Conflict(format!("{primary} is not in {}", self.pool.ranges));
        self.pool.addresses(primary).ok_or_else(outside)
    }

    fn reserve_primary(&mut self, sandbox: &str, wanted: Option<IpAddr>) -> Result<IpAddr, NetworkError> {
        if !is_sandbox_id(sandbox) {
            return Err(NetworkError::BadSandbox(sandbox.chars().take(64).collect()));
        }
        match (self.pool.by_sandbox.get(sandbox), wanted) {
            (Some(address), None) => return Ok(*address),
            (Some(address), Some(wanted)) if *address == wanted => return Ok(wanted),
            (Some(_), Some(_)) => self.release(sandbox)?,
            (None, _) => {}
        }
        let address = match wanted {
            Some(wanted) => self.pool.check_wanted(wanted)?,
            None => self.pool.next_free().ok_or_else(|| NetworkError::Exhausted {
                range: self.pool.ranges.to_string(),
                capacity: self.pool.capacity(),
            })?,
        };
        write_atomic(&self.dir.join(address.to_string()), sandbox.as_bytes())?;
        if wanted.is_none() {
            // Losing the cursor in a crash costs only fairness; the reservation's own sync orders it anyway.
            write_atomic(&self.dir.join(CURSOR), address.to_string().as_bytes())?;
            self.pool.last = Some(address);
        }
        self.pool.insert(address, sandbox);
        Ok(address)
    }

    /// Frees the address of `sandbox`, if it has one.
    pub(crate) fn release(&mut self, sandbox: &str) -> Result<(), NetworkError> {
        let Some(address) = self.pool.by_sandbox.get(sandbox) else { return Ok(()) };
        let path = self.dir.join(address.to_string());
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(NetworkError::State { path, what: "remove", source }),
        }
        sync_dir(&self.dir)?;
        self.pool.remove(sandbox);
        Ok(())
    }

    /// The sandboxes that hold addresses, each with them.
    pub(crate) fn reservations(&self) -> Vec<(String, Addresses)> {
        let taken = self.pool.taken.iter();
        taken.filter_map(|(first, sandbox)| Some((sandbox.clone(), self.pool.addresses(*first)?))).collect()
    }

    /// The sandboxes that hold an address.
    pub(crate) fn sandboxes(&self) -> Vec<String> {
        self.pool.taken.values().cloned().collect()
    }
}

/// Returns true if a text may name a sandbox: it is written to disk and shown in link aliases.
pub(crate) fn is_sandbox_id(text: &str) -> bool {
    (1..=128).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn open(dir: &Path, range: &str) -> Ipam {
        Ipam::open(dir.to_owned(), range.parse().unwrap()).unwrap()
    }

    #[test]
    fn round_robin_and_reuse() {
        let dir = tempfile::tempdir().unwrap();
        let mut ipam = open(dir.path(), "10.1.0.0/29");
        let got: Vec<_> = ["a", "b", "c"].iter().map(|s| ipam.reserve(s).unwrap().to_string()).collect();
        assert_eq!(got, ["10.1.0.2", "10.1.0.3", "10.1.0.4"]);
        ipam.release("b").unwrap();
        assert_eq!(ipam.reserve("d").unwrap().to_string(), "10.1.0.5", "a freed address rests");
        assert_eq!(ipam.reserve("e").unwrap().to_string(), "10.1.0.6");
        assert_eq!(ipam.reserve("f").unwrap().to_string(), "10.1.0.3", "wraps to what is free");
        let error = ipam.reserve("g").unwrap_err();
        assert!(matches!(error, NetworkError::Exhausted { capacity: 5, .. }), "{error}");
        assert_eq!(ipam.reserve("a").unwrap().to_string(), "10.1.0.2", "the same sandbox keeps its address");
    }

    #[test]
    fn addresses_by_choice() {
        let dir = tempfile::tempdir().unwrap();
        let mut ipam = open(dir.path(), "10.1.0.0/29");
        let mut wanted = |sandbox: &str, address: &str| {
            ipam.reserve_wanted(sandbox, Some(address.parse().unwrap())).map(|address| address.to_string())
        };
        assert_eq!(wanted("a", "10.1.0.5").unwrap(), "10.1.0.5");
        assert_eq!(wanted("a", "10.1.0.5").unwrap(), "10.1.0.5", "the same again");
        for taken in ["10.1.0.5", "10.1.0.0", "10.1.0.1", "10.1.0.7", "10.2.0.2"] {
            assert!(matches!(wanted("b", taken), Err(NetworkError::Conflict(_))), "{taken}");
        }
        assert_eq!(wanted("a", "10.1.0.4").unwrap(), "10.1.0.4", "another choice frees the first");
        assert_eq!(wanted("b", "10.1.0.5").unwrap(), "10.1.0.5");
        assert_eq!(ipam.reserve("c").unwrap().to_string(), "10.1.0.2", "what was chosen moves no cursor");
    }

    #[test]
    fn survives_restart() {
        let dir = tempfile::tempdir().unwrap();
        let mut ipam = open(dir.path(), "10.1.0.0/24");
        let a = ipam.reserve("a").unwrap();
        ipam.reserve("b").unwrap();
        ipam.release("b").unwrap();
        drop(ipam);
        let mut ipam = open(dir.path(), "10.1.0.0/24");
        assert_eq!(ipam.reserve("a").unwrap(), a);
        assert_eq!(ipam.reserve("c").unwrap().to_string(), "10.1.0.4", "the cursor is durable too");
        assert_eq!(ipam.sandboxes(), ["a", "c"]);
    }

    #[test]
    fn foreign_files_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in
            [("10.2.0.9", "x"), ("10.1.0.5.tmp", "half"), ("10.1.0.7", "not/an id"), ("junk", "")]
        {
            fs::write(dir.path().join(name), text).unwrap();
        }
        fs::write(dir.path().join("10.1.0.6"), "live").unwrap();
        let ipam = open(dir.path(), "10.1.0.0/24");
        assert_eq!(ipam.sandboxes(), ["live"]);
        assert_eq!(fs::read_dir(&ipam.dir).unwrap().count(), 1);
    }

    #[test]
    fn tiny_ranges_are_exhausted_not_broken() {
        for range in ["10.1.0.0/32", "10.1.0.0/31", "10.1.0.0/30"] {
            let dir = tempfile::tempdir().unwrap();
            let mut ipam = open(dir.path(), range);
            let first = ipam.reserve("a");
            assert_eq!(first.is_ok(), range.ends_with("/30"), "{range}");
            assert!(matches!(ipam.reserve("b"), Err(NetworkError::Exhausted { .. })), "{range}");
        }
    }

    #[test]
    fn both_families_share_a_place() {
        for (ranges, first, capacity) in [
            ("10.1.0.0/29,fd00:1::/64", "10.1.0.2,fd00:1::2", 5),
            ("fd00:1::/64,10.1.0.0/29", "fd00:1::2,10.1.0.2", 5),
            ("fd00:1::/125", "fd00:1::2", 5),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut ipam = open(dir.path(), ranges);
            assert_eq!(ipam.reserve("a").unwrap().to_string(), first);
            for index in 1..capacity {
                ipam.reserve(&index.to_string()).unwrap();
            }
            assert!(matches!(ipam.reserve("more"), Err(NetworkError::Exhausted { .. })), "{ranges}");
            drop(ipam);
            let mut ipam = open(dir.path(), ranges);
            assert_eq!(ipam.reserve("a").unwrap().to_string(), first, "after a restart");
            assert_eq!(ipam.reservations().len(), capacity);
        }
    }

    #[test]
    fn a_whole_subnet_of_ipv6_is_no_endless_search() {
        let dir = tempfile::tempdir().unwrap();
        let mut ipam = open(dir.path(), "fd00:1::/64");
        ipam.pool.last = "fd00:1::ffff:fffe".parse().ok();
        assert_eq!(ipam.reserve("a").unwrap().to_string(), "fd00:1::2", "wraps where hardware addresses do");
    }

    #[test]
    fn hostile_sandbox_ids() {
        let dir = tempfile::tempdir().unwrap();
        let mut ipam = open(dir.path(), "10.1.0.0/24");
        for id in ["", "../x", "a/b", "a\nb", &"x".repeat(129)] {
            assert!(matches!(ipam.reserve(id), Err(NetworkError::BadSandbox(_))), "{id:?}");
        }
    }
}
