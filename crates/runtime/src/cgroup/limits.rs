//! From the OCI description of limits to control files.

use std::borrow::Cow;

use oci_spec::runtime::{LinuxDeviceType, LinuxResources};

use super::Layout;

/// One value for one control file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub controller: &'static str,
    pub file: Cow<'static, str>,
    pub value: String,
    /// True if the container must not run when the kernel refuses the value.
    pub required: bool,
}

fn required(controller: &'static str, file: impl Into<Cow<'static, str>>, value: impl ToString) -> Setting {
    Setting { controller, file: file.into(), value: value.to_string(), required: true }
}

fn optional(controller: &'static str, file: impl Into<Cow<'static, str>>, value: impl ToString) -> Setting {
    Setting { controller, file: file.into(), value: value.to_string(), required: false }
}

/// The control files to write, in order.
pub fn settings(layout: &Layout, resources: &LinuxResources) -> Vec<Setting> {
    match layout {
        Layout::V1(_) => v1(resources),
        Layout::V2(_) => v2(resources),
    }
}

fn v1(resources: &LinuxResources) -> Vec<Setting> {
    let mut out = Vec::new();
    if let Some(cpu) = resources.cpu() {
        if let Some(shares) = cpu.shares().filter(|v| *v > 0) {
            out.push(required("cpu", "cpu.shares", shares));
        }
        if let Some(period) = cpu.period().filter(|v| *v > 0) {
            out.push(required("cpu", "cpu.cfs_period_us", period));
        }
        if let Some(quota) = cpu.quota().filter(|v| *v != 0) {
            out.push(required("cpu", "cpu.cfs_quota_us", quota));
        }
        if let Some(cpus) = cpu.cpus().as_ref().filter(|v| !v.is_empty()) {
            out.push(required("cpuset", "cpuset.cpus", cpus));
        }
        if let Some(mems) = cpu.mems().as_ref().filter(|v| !v.is_empty()) {
            out.push(required("cpuset", "cpuset.mems", mems));
        }
    }
    if let Some(memory) = resources.memory() {
        if let Some(limit) = memory.limit().filter(|v| *v != 0) {
            out.push(required("memory", "memory.limit_in_bytes", limit));
        }
        if let Some(swap) = memory.swap().filter(|v| *v != 0) {
            out.push(optional("memory", "memory.memsw.limit_in_bytes", swap));
        }
    }
    if let Some(limit) = resources.pids().map(|pids| pids.limit()) {
        out.push(required("pids", "pids.max", if limit > 0 { limit.to_string() } else { "max".into() }));
    }
    for huge in resources.hugepage_limits().iter().flatten() {
        let file = format!("hugetlb.{}.limit_in_bytes", huge.page_size());
        out.push(optional("hugetlb", file, huge.limit()));
    }
    if let Some(weight) = resources.block_io().as_ref().and_then(|io| io.weight()).filter(|v| *v > 0) {
        out.push(optional("blkio", "blkio.weight", weight));
    }
    for rule in resources.devices().iter().flatten() {
        let kind = match rule.typ() {
            None | Some(LinuxDeviceType::A) => "a",
            Some(LinuxDeviceType::B) => "b",
            Some(LinuxDeviceType::P) => continue,
            Some(_) => "c",
        };
        let number = |n: Option<i64>| n.filter(|n| *n >= 0).map_or("*".to_owned(), |n| n.to_string());
        let file = if rule.allow() { "devices.allow" } else { "devices.deny" };
        let access = rule.access().clone().unwrap_or_else(|| "rwm".into());
        let value = format!("{kind} {}:{} {access}", number(rule.major()), number(rule.minor()));
        out.push(required("devices", file, value));
    }
    out
}

fn v2(resources: &LinuxResources) -> Vec<Setting> {
    let mut out = Vec::new();
    if let Some(cpu) = resources.cpu() {
        if let Some(shares) = cpu.shares().filter(|v| *v > 0) {
            out.push(required("cpu", "cpu.weight", weight(shares)));
        }
        let period = cpu.period().filter(|v| *v > 0).unwrap_or(100_000);
        match cpu.quota() {
            Some(quota) if quota > 0 => out.push(required("cpu", "cpu.max", format!("{quota} {period}"))),
            Some(quota) if quota < 0 => out.push(required("cpu", "cpu.max", format!("max {period}"))),
            _ => {}
        }
        if let Some(cpus) = cpu.cpus().as_ref().filter(|v| !v.is_empty()) {
            out.push(required("cpuset", "cpuset.cpus", cpus));
        }
        if let Some(mems) = cpu.mems().as_ref().filter(|v| !v.is_empty()) {
            out.push(required("cpuset", "cpuset.mems", mems));
        }
    }
    if let Some(memory) = resources.memory() {
        let amount = |v: i64| if v < 0 { "max".to_owned() } else { v.to_string() };
        let limit = memory.limit().filter(|v| *v != 0);
        if let Some(limit) = limit {
            out.push(required("memory", "memory.max", amount(limit)));
        }
        // Version 1 counts memory and swap together, version 2 swap alone.
        if let (Some(limit), Some(swap)) = (limit, memory.swap().filter(|v| *v != 0)) {
            let swap = if swap < 0 { swap } else { (swap - limit).max(0) };
            out.push(optional("memory", "memory.swap.max", amount(swap)));
        }
    }
    if let Some(limit) = resources.pids().map(|pids| pids.limit()) {
        out.push(required("pids", "pids.max", if limit > 0 { limit.to_string() } else { "max".into() }));
    }
    for huge in resources.hugepage_limits().iter().flatten() {
        out.push(optional("hugetlb", format!("hugetlb.{}.max", huge.page_size()), huge.limit()));
    }
    if let Some(weight) = resources.block_io().as_ref().and_then(|io| io.weight()).filter(|v| *v > 0) {
        out.push(optional("io", "io.weight", io_weight(weight)));
    }
    // Last: files written by name override derived values.
    let mut unified: Vec<_> = resources.unified().iter().flatten().collect();
    unified.sort();
    for (file, value) in unified {
        out.push(required("", file.clone(), value));
    }
    out
}

/// CPU shares (2..262144) as weight (1..10000), by the conversion the OCI runtimes agreed on: the smallest,
/// the largest and the default (1024) are each other's.
pub(super) fn weight(shares: u64) -> u64 {
    match shares {
        0..=2 => 1,
        262_144.. => 10_000,
        _ => {
            let power = (shares as f64).log2();
            10f64.powf((power * power + 125.0 * power) / 612.0 - 7.0 / 34.0).ceil() as u64
        }
    }
}

/// Weight of input and output on version 1 (10..1000) as that of version 2 (1..10000).
fn io_weight(weight: u16) -> u64 {
    1 + (u64::from(weight.clamp(10, 1000)) - 10) * 9999 / 990
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::{LinuxCpu, LinuxMemory, LinuxPids};

    #[test]
    fn files() {
        let mut resources = LinuxResources::default();
        let mut cpu = LinuxCpu::default();
        cpu.set_shares(Some(102)).set_quota(Some(50_000)).set_period(Some(100_000));
        let mut memory = LinuxMemory::default();
        memory.set_limit(Some(64 << 20)).set_swap(Some(64 << 20));
        let mut pids = LinuxPids::default();
        pids.set_limit(100);
        resources.set_cpu(Some(cpu)).set_memory(Some(memory)).set_pids(Some(pids)).set_devices(None);
        let show = |layout: &Layout| {
            settings(layout, &resources)
                .into_iter()
                .map(|s| format!("{}={}", s.file, s.value))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            show(&Layout::V1(vec![])),
            "cpu.shares=102 cpu.cfs_period_us=100000 cpu.cfs_quota_us=50000 \
             memory.limit_in_bytes=67108864 memory.memsw.limit_in_bytes=67108864 pids.max=100"
        );
        assert_eq!(
            show(&Layout::V2("/c".into())),
            "cpu.weight=17 cpu.max=50000 100000 memory.max=67108864 memory.swap.max=0 pids.max=100"
        );
    }

    #[test]
    fn huge_pages_and_files_by_name() {
        let mut huge = oci_spec::runtime::LinuxHugepageLimit::default();
        huge.set_page_size("2MB".into()).set_limit(4 << 20);
        let mut resources = LinuxResources::default();
        let unified = [("memory.high".to_owned(), "1000".to_owned()), ("io.weight".into(), "50".into())];
        resources
            .set_devices(None)
            .set_hugepage_limits(Some(vec![huge]))
            .set_unified(Some(unified.into_iter().collect()));
        let show = |layout: &Layout| {
            let settings = settings(layout, &resources);
            let show = |s: Setting| format!("{}={}{}", s.file, s.value, if s.required { "!" } else { "" });
            settings.into_iter().map(show).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(show(&Layout::V1(vec![])), "hugetlb.2MB.limit_in_bytes=4194304");
        assert_eq!(show(&Layout::V2("/c".into())), "hugetlb.2MB.max=4194304 io.weight=50! memory.high=1000!");
    }

    #[test]
    fn weights() {
        for (shares, expected) in [
            (0, 1),
            (2, 1),
            (3, 2),
            (102, 17),
            (512, 59),
            (1024, 100),
            (2048, 174),
            (262_143, 10_000),
            (262_144, 10_000),
            (1 << 30, 10_000),
        ] {
            assert_eq!(weight(shares), expected, "{shares}");
        }
        for (weight, expected) in [(0, 1), (10, 1), (500, 4950), (1000, 10_000)] {
            assert_eq!(io_weight(weight), expected, "{weight}");
        }
    }
}
