//! Containers in control groups: limits of the OCI specification, groups that are systemd's scopes.

pub mod systemd;

use std::io;

use ferrite_cgroup::{DeviceKind, DeviceRule, HugePages, Layout, Limits};
use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType, LinuxResources};

/// The limits of an OCI specification. Zero is its word for unset.
pub fn limits_of(resources: &LinuxResources) -> Limits {
    let cpu = resources.cpu().as_ref();
    let memory = resources.memory().as_ref();
    let list = |list: &Option<String>| list.clone().filter(|list| !list.is_empty());
    let huge = resources.hugepage_limits().iter().flatten();
    Limits {
        memory: memory.and_then(|memory| memory.limit()).filter(|limit| *limit != 0),
        memory_and_swap: memory.and_then(|memory| memory.swap()).filter(|limit| *limit != 0),
        cpu_shares: cpu.and_then(|cpu| cpu.shares()).filter(|shares| *shares > 0),
        cpu_quota: cpu.and_then(|cpu| cpu.quota()).filter(|quota| *quota != 0),
        cpu_period: cpu.and_then(|cpu| cpu.period()).filter(|period| *period > 0),
        pids: resources.pids().map(|pids| if pids.limit() > 0 { pids.limit() } else { -1 }),
        cpus: cpu.and_then(|cpu| list(cpu.cpus())),
        memory_nodes: cpu.and_then(|cpu| list(cpu.mems())),
        huge_pages: huge
            .map(|huge| HugePages { size: huge.page_size().clone(), limit: huge.limit() })
            .collect(),
        io_weight: resources.block_io().as_ref().and_then(|io| io.weight()).filter(|weight| *weight > 0),
        unified: resources.unified().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect(),
        devices: resources.devices().as_ref().map(|rules| rules.iter().filter_map(device_rule).collect()),
    }
}

/// `None` for a rule that names no device: a pipe, or a number that no device has.
fn device_rule(rule: &LinuxDeviceCgroup) -> Option<DeviceRule> {
    let kind = match rule.typ() {
        None | Some(LinuxDeviceType::A) => DeviceKind::All,
        Some(LinuxDeviceType::B) => DeviceKind::Block,
        Some(LinuxDeviceType::C | LinuxDeviceType::U) => DeviceKind::Character,
        Some(LinuxDeviceType::P) => return None,
    };
    let number = |number: Option<i64>| match number {
        Some(number) if number >= 0 => u32::try_from(number).ok().map(Some),
        _ => Some(None),
    };
    Some(DeviceRule {
        allow: rule.allow(),
        kind,
        major: number(rule.major())?,
        minor: number(rule.minor())?,
        access: rule.access().clone().unwrap_or_else(|| "rwm".into()),
    })
}

/// Removes a group and everything below it; systemd ends the group first if it is a scope. Absent groups are fine.
pub fn remove(layout: &Layout, path: &str) -> io::Result<()> {
    forget_scope(layout, path);
    layout.remove(path)
}

/// As [`remove`], where the group has neither processes nor children; keeps it where it has.
pub fn remove_if_empty(layout: &Layout, path: &str) {
    forget_scope(layout, path);
    layout.remove_if_empty(path);
}

/// Asks systemd to end a group that systemd made. The caller then removes the rest, or the whole group
/// if systemd does not answer.
fn forget_scope(layout: &Layout, path: &str) {
    if let Some(scope) = systemd::Scope::of(path)
        && let Err(error) = scope.stop(layout)
    {
        tracing::warn!(path, %error, "systemd did not end a scope");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::device_rule as oci_rule;
    use oci_spec::runtime::{LinuxBlockIo, LinuxCpu, LinuxHugepageLimit, LinuxMemory, LinuxPids};

    #[test]
    fn limits() {
        let mut cpu = LinuxCpu::default();
        cpu.set_shares(Some(1024)).set_quota(Some(50_000)).set_period(Some(100_000));
        cpu.set_cpus(Some("0-1".into())).set_mems(Some(String::new()));
        let mut memory = LinuxMemory::default();
        memory.set_limit(Some(64 << 20)).set_swap(Some(96 << 20));
        let mut pids = LinuxPids::default();
        pids.set_limit(100);
        let mut huge = LinuxHugepageLimit::default();
        huge.set_page_size("2MB".into()).set_limit(4 << 20);
        let mut io = LinuxBlockIo::default();
        io.set_weight(Some(500));
        let mut all = LinuxResources::default();
        all.set_cpu(Some(cpu))
            .set_memory(Some(memory))
            .set_pids(Some(pids))
            .set_hugepage_limits(Some(vec![huge]))
            .set_block_io(Some(io))
            .set_unified(Some([("memory.high".to_owned(), "1000".to_owned())].into()))
            .set_devices(None);
        let expected = Limits {
            memory: Some(64 << 20),
            memory_and_swap: Some(96 << 20),
            cpu_shares: Some(1024),
            cpu_quota: Some(50_000),
            cpu_period: Some(100_000),
            pids: Some(100),
            cpus: Some("0-1".into()),
            memory_nodes: None,
            huge_pages: vec![HugePages { size: "2MB".into(), limit: 4 << 20 }],
            io_weight: Some(500),
            unified: [("memory.high".to_owned(), "1000".to_owned())].into(),
            devices: None,
        };
        assert_eq!(limits_of(&all), expected);
    }

    #[test]
    fn zero_is_unset() {
        let mut cpu = LinuxCpu::default();
        cpu.set_shares(Some(0)).set_quota(Some(0)).set_period(Some(0));
        let mut memory = LinuxMemory::default();
        memory.set_limit(Some(0)).set_swap(Some(0));
        let mut resources = LinuxResources::default();
        resources.set_cpu(Some(cpu)).set_memory(Some(memory)).set_devices(None);
        assert_eq!(limits_of(&resources), Limits::default());
        resources.set_pids(Some(LinuxPids::default()));
        assert_eq!(limits_of(&resources).pids, Some(-1), "but of processes it allows any number");
    }

    #[test]
    fn devices() {
        use LinuxDeviceType::{A, B, C, P, U};
        let rule =
            |kind, major| DeviceRule { allow: true, kind, major, minor: None, access: "rwm".to_owned() };
        for (kind, major, expected) in [
            (A, None, Some(rule(DeviceKind::All, None))),
            (B, Some(8), Some(rule(DeviceKind::Block, Some(8)))),
            (B, Some(-1), Some(rule(DeviceKind::Block, None))),
            (C, Some(1), Some(rule(DeviceKind::Character, Some(1)))),
            (U, Some(1), Some(rule(DeviceKind::Character, Some(1)))),
            (C, Some(1 << 40), None),
            (P, None, None),
        ] {
            assert_eq!(
                device_rule(&oci_rule(true, kind, major, None, "rwm")),
                expected,
                "{kind:?} {major:?}"
            );
        }
    }
}
