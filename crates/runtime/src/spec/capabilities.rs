//! Capabilities: the default set, additions and drops.

use std::collections::BTreeSet;
use std::str::FromStr;

use ferrite_cri::v1::LinuxContainerSecurityContext;
use oci_spec::runtime::Capability;

use super::SpecError;

/// Names in the order of their numbers.
const NAMES: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

const DEFAULT: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// The capabilities of a container, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sets {
    pub bounding: BTreeSet<u32>,
    pub ambient: BTreeSet<u32>,
}

/// The kernel's number of a capability.
pub fn capability_number(capability: &Capability) -> Option<u32> {
    number(&capability.to_string())
}

/// The capability of a number.
pub fn capability(number: u32) -> Option<Capability> {
    NAMES.get(number as usize).and_then(|name| Capability::from_str(name).ok())
}

fn number(name: &str) -> Option<u32> {
    let upper = name.to_ascii_uppercase();
    let bare = upper.strip_prefix("CAP_").unwrap_or(&upper);
    NAMES.iter().position(|known| *known == bare).map(|position| position as u32)
}

fn parse(name: &str) -> Result<u32, SpecError> {
    number(name).ok_or_else(|| SpecError::Capability(name.to_owned()))
}

/// The capabilities of a container. Privileged means all; otherwise `ALL` applies first, then single names
/// override it.
pub fn capabilities(security: &LinuxContainerSecurityContext) -> Result<Sets, SpecError> {
    let all = || (0..NAMES.len() as u32).collect::<BTreeSet<_>>();
    if security.privileged {
        return Ok(Sets { bounding: all(), ambient: BTreeSet::new() });
    }
    let given = security.capabilities.clone().unwrap_or_default();
    let is_all = |name: &String| name.eq_ignore_ascii_case("ALL");
    let mut bounding: BTreeSet<u32> = DEFAULT.iter().filter_map(|name| number(name)).collect();
    if given.add_capabilities.iter().any(is_all) {
        bounding = all();
    }
    if given.drop_capabilities.iter().any(is_all) {
        bounding.clear();
    }
    for name in given.add_capabilities.iter().filter(|name| !is_all(name)) {
        bounding.insert(parse(name)?);
    }
    for name in given.drop_capabilities.iter().filter(|name| !is_all(name)) {
        bounding.remove(&parse(name)?);
    }
    let mut ambient = BTreeSet::new();
    for name in &given.add_ambient_capabilities {
        let number = parse(name)?;
        ambient.insert(number);
        bounding.insert(number);
    }
    Ok(Sets { bounding, ambient })
}

/// Every capability there is.
pub fn all_capabilities() -> impl Iterator<Item = Capability> {
    (0..NAMES.len() as u32).filter_map(capability)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cri::v1;

    #[test]
    fn every_name_has_a_capability_and_a_number() {
        for (index, name) in NAMES.iter().enumerate() {
            let found = capability(index as u32).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(capability_number(&found), Some(index as u32), "{name}");
        }
    }

    #[test]
    fn add_and_drop() {
        let count = |add: &[&str], drop: &[&str]| {
            let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
            let security = LinuxContainerSecurityContext {
                capabilities: Some(v1::Capability {
                    add_capabilities: owned(add),
                    drop_capabilities: owned(drop),
                    add_ambient_capabilities: vec![],
                }),
                ..Default::default()
            };
            capabilities(&security).map(|sets| sets.bounding.len())
        };
        assert_eq!(count(&[], &[]), Ok(14));
        assert_eq!(count(&[], &["ALL"]), Ok(0));
        assert_eq!(count(&["ALL"], &["SYS_ADMIN"]), Ok(40));
        assert_eq!(count(&["NET_BIND_SERVICE"], &["all"]), Ok(1));
        assert_eq!(count(&["CAP_SYS_PTRACE"], &["chown"]), Ok(14));
        assert_eq!(count(&["FLY"], &[]), Err(SpecError::Capability("FLY".into())));
    }
}
