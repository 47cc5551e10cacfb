//! The defaults of every container.

use std::path::PathBuf;

use oci_spec::runtime::{LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType};

use super::GivenDevice;

pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const CHARACTER_DEVICES: &[(&str, i64, i64)] = &[
    ("/dev/null", 1, 3),
    ("/dev/zero", 1, 5),
    ("/dev/full", 1, 7),
    ("/dev/random", 1, 8),
    ("/dev/urandom", 1, 9),
    ("/dev/tty", 5, 0),
];

/// The device nodes to make: the usual ones and those asked for.
pub fn devices(extra: &[GivenDevice]) -> Vec<LinuxDevice> {
    let mut all: Vec<LinuxDevice> = CHARACTER_DEVICES
        .iter()
        .map(|(path, major, minor)| {
            let mut device = LinuxDevice::default();
            device
                .set_path(PathBuf::from(path))
                .set_typ(LinuxDeviceType::C)
                .set_major(*major)
                .set_minor(*minor)
                .set_file_mode(Some(0o666));
            device
        })
        .collect();
    for GivenDevice { node, .. } in extra {
        if !all.iter().any(|known| known.path() == node.path()) {
            all.push(node.clone());
        }
    }
    all
}

pub fn rule(
    allow: bool,
    typ: LinuxDeviceType,
    major: Option<i64>,
    minor: Option<i64>,
    access: &str,
) -> LinuxDeviceCgroup {
    let mut rule = LinuxDeviceCgroup::default();
    rule.set_allow(allow)
        .set_typ(Some(typ))
        .set_major(major)
        .set_minor(minor)
        .set_access(Some(access.to_owned()));
    rule
}

/// Which devices may be opened: everything may be made (`mknod`), few may be used.
pub fn device_rules(extra: &[GivenDevice], privileged: bool) -> Vec<LinuxDeviceCgroup> {
    use LinuxDeviceType::{A, B, C};
    if privileged {
        return vec![rule(true, A, None, None, "rwm")];
    }
    let mut rules = vec![
        rule(false, A, None, None, "rwm"),
        rule(true, C, None, None, "m"),
        rule(true, B, None, None, "m"),
    ];
    for (_, major, minor) in CHARACTER_DEVICES {
        rules.push(rule(true, C, Some(*major), Some(*minor), "rwm"));
    }
    // console, ptmx and every pseudo terminal
    rules.push(rule(true, C, Some(5), Some(1), "rwm"));
    rules.push(rule(true, C, Some(5), Some(2), "rwm"));
    rules.push(rule(true, C, Some(136), None, "rwm"));
    for GivenDevice { node, access } in extra {
        rules.push(rule(true, node.typ(), Some(node.major()), Some(node.minor()), access));
    }
    rules
}
