//! Limits of a group, and the control files that hold them.
//!
//! A new limit is a field of [`Limits`] and a line in each of `v1` and `v2`; where systemd owns the groups, also a
//! property in the systemd crate.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::{DeviceKind, DeviceRule, Version};

/// The length of a period, in microseconds, unless a limit says otherwise.
const PERIOD: u64 = 100_000;

/// The range of CPU shares.
const MIN_SHARES: u64 = 2;
const MAX_SHARES: u64 = 262_144;

/// Limits as the kernel counts them. `None` leaves a limit unchanged; a negative number removes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes.
    pub memory: Option<i64>,
    /// Bytes of memory and swap together, as version 1 counts. Version 2 has a limit of swap alone: see [`swap`].
    pub memory_and_swap: Option<i64>,
    /// As version 1 counts them (2..262144, 1024 by default). Version 2 has a weight: see [`cpu_weight`].
    pub cpu_shares: Option<u64>,
    /// Microseconds of processor time in each period.
    pub cpu_quota: Option<i64>,
    /// Microseconds.
    pub cpu_period: Option<u64>,
    /// Processes and threads.
    pub pids: Option<i64>,
    /// Lists such as `0-3,7`.
    pub cpus: Option<String>,
    pub memory_nodes: Option<String>,
    pub huge_pages: Vec<HugePages>,
    /// As version 1 counts it (10..1000, 500 by default).
    pub io_weight: Option<u16>,
    /// Control files of version 2 by name. They override the values above.
    pub unified: BTreeMap<String, String>,
    /// The devices that may be used. An empty list forbids them all.
    pub devices: Option<Vec<DeviceRule>>,
}

/// A limit of huge pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HugePages {
    /// The size of a page in the kernel's spelling: `2MB`.
    pub size: String,
    /// Bytes.
    pub limit: i64,
}

/// One value for one control file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    pub controller: &'static str,
    pub file: Cow<'static, str>,
    pub value: String,
    /// True if the container must not run when the kernel refuses the value.
    pub required: bool,
}

impl Setting {
    pub(crate) fn required(
        controller: &'static str,
        file: impl Into<Cow<'static, str>>,
        value: impl ToString,
    ) -> Self {
        Self { controller, file: file.into(), value: value.to_string(), required: true }
    }

    fn optional(controller: &'static str, file: impl Into<Cow<'static, str>>, value: impl ToString) -> Self {
        Self { required: false, ..Self::required(controller, file, value) }
    }
}

impl Limits {
    /// The control files to write, in order.
    pub(crate) fn settings(&self, version: Version) -> Vec<Setting> {
        match version {
            Version::V1 => self.v1().collect(),
            Version::V2 => self.v2().collect(),
        }
    }

    fn cpusets(&self) -> impl Iterator<Item = Setting> {
        let files = [("cpuset.cpus", &self.cpus), ("cpuset.mems", &self.memory_nodes)];
        files.into_iter().filter_map(|(file, list)| Some(Setting::required("cpuset", file, list.as_ref()?)))
    }

    fn v1(&self) -> impl Iterator<Item = Setting> {
        use Setting as S;
        let cpu = [
            self.cpu_shares.map(|shares| S::required("cpu", "cpu.shares", shares)),
            self.cpu_period.map(|period| S::required("cpu", "cpu.cfs_period_us", period)),
            self.cpu_quota.map(|quota| S::required("cpu", "cpu.cfs_quota_us", quota)),
        ];
        let others = [
            self.memory.map(|limit| S::required("memory", "memory.limit_in_bytes", limit)),
            self.memory_and_swap.map(|limit| S::optional("memory", "memory.memsw.limit_in_bytes", limit)),
            self.pids.map(|limit| S::required("pids", "pids.max", amount(limit))),
        ];
        let huge_pages = self
            .huge_pages
            .iter()
            .map(|huge| S::optional("hugetlb", format!("hugetlb.{}.limit_in_bytes", huge.size), huge.limit));
        let io = self.io_weight.map(|weight| S::optional("blkio", "blkio.weight", weight));
        let devices = self.devices.iter().flatten().map(|rule| {
            let file = if rule.allow { "devices.allow" } else { "devices.deny" };
            S::required("devices", file, device_line(rule))
        });
        let cpu = cpu.into_iter().flatten().chain(self.cpusets());
        cpu.chain(others.into_iter().flatten()).chain(huge_pages).chain(io).chain(devices)
    }

    fn v2(&self) -> impl Iterator<Item = Setting> {
        use Setting as S;
        let period = self.cpu_period.unwrap_or(PERIOD);
        let quota = |quota: i64| format!("{} {period}", amount(quota));
        let cpu = [
            self.cpu_shares.map(|shares| S::required("cpu", "cpu.weight", cpu_weight(shares))),
            self.cpu_quota.map(|limit| S::required("cpu", "cpu.max", quota(limit))),
        ];
        let swap = self.memory.zip(self.memory_and_swap).map(|(memory, both)| swap(memory, both));
        let others = [
            self.memory.map(|limit| S::required("memory", "memory.max", amount(limit))),
            swap.map(|limit| S::optional("memory", "memory.swap.max", amount(limit))),
            self.pids.map(|limit| S::required("pids", "pids.max", amount(limit))),
        ];
        let huge_pages = self.huge_pages.iter();
        let huge_pages =
            huge_pages.map(|huge| S::optional("hugetlb", format!("hugetlb.{}.max", huge.size), huge.limit));
        let io = self.io_weight.map(|weight| S::optional("io", "io.weight", io_weight(weight)));
        let by_name = self.unified.iter().map(|(file, value)| S::required("", file.clone(), value));
        let cpu = cpu.into_iter().flatten().chain(self.cpusets());
        cpu.chain(others.into_iter().flatten()).chain(huge_pages).chain(io).chain(by_name)
    }
}

/// A limit in the words of version 2.
fn amount(limit: i64) -> String {
    if limit < 0 { "max".to_owned() } else { limit.to_string() }
}

fn device_line(rule: &DeviceRule) -> String {
    let kind = match rule.kind {
        DeviceKind::All => "a",
        DeviceKind::Block => "b",
        DeviceKind::Character => "c",
    };
    let number = |number: Option<u32>| number.map_or("*".to_owned(), |number| number.to_string());
    format!("{kind} {}:{} {}", number(rule.major), number(rule.minor), rule.access)
}

/// The limit of swap alone, as version 2 counts it. Negative for none.
fn swap(memory: i64, memory_and_swap: i64) -> i64 {
    if memory_and_swap < 0 { memory_and_swap } else { memory_and_swap.saturating_sub(memory).max(0) }
}

/// CPU shares (2..262144) as weight (1..10000), by the conversion of runc and crun: the smallest, the largest and
/// the default (1024 and 100) are each other's. Pods and containers have the same conversion, so that a
/// group's share beside services of the system does not depend on its maker.
pub fn cpu_weight(shares: u64) -> u64 {
    match shares {
        0..=MIN_SHARES => 1,
        MAX_SHARES.. => 10_000,
        _ => {
            let power = (shares as f64).log2();
            10f64.powf((power * power + 125.0 * power) / 612.0 - 7.0 / 34.0).ceil() as u64
        }
    }
}

/// The fewest CPU shares that [`cpu_weight`] makes this weight of.
pub(crate) fn shares_of_weight(weight: u64) -> u64 {
    let (mut low, mut high) = (MIN_SHARES, MAX_SHARES);
    while low < high {
        let middle = low.midpoint(high);
        if cpu_weight(middle) < weight {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

/// Weight of input and output on version 1 (10..1000) as that of version 2 (1..10000).
fn io_weight(weight: u16) -> u64 {
    1 + (u64::from(weight.clamp(10, 1000)) - 10) * 9999 / 990
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(limits: &Limits, version: Version) -> String {
        let show = |s: Setting| format!("{}={}{}", s.file, s.value, if s.required { "" } else { "?" });
        limits.settings(version).into_iter().map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn files() {
        let limits = Limits {
            cpu_shares: Some(102),
            cpu_quota: Some(50_000),
            cpu_period: Some(100_000),
            cpus: Some("0-1".into()),
            memory: Some(64 << 20),
            memory_and_swap: Some(64 << 20),
            pids: Some(100),
            ..Limits::default()
        };
        assert_eq!(
            show(&limits, Version::V1),
            "cpu.shares=102 cpu.cfs_period_us=100000 cpu.cfs_quota_us=50000 cpuset.cpus=0-1 \
             memory.limit_in_bytes=67108864 memory.memsw.limit_in_bytes=67108864? pids.max=100"
        );
        assert_eq!(
            show(&limits, Version::V2),
            "cpu.weight=17 cpu.max=50000 100000 cpuset.cpus=0-1 memory.max=67108864 memory.swap.max=0? \
             pids.max=100"
        );
    }

    #[test]
    fn no_limit() {
        let none = Limits {
            cpu_quota: Some(-1),
            memory: Some(-1),
            memory_and_swap: Some(-1),
            pids: Some(-1),
            ..Limits::default()
        };
        assert_eq!(
            show(&none, Version::V1),
            "cpu.cfs_quota_us=-1 memory.limit_in_bytes=-1 memory.memsw.limit_in_bytes=-1? pids.max=max"
        );
        assert_eq!(
            show(&none, Version::V2),
            "cpu.max=max 100000 memory.max=max memory.swap.max=max? pids.max=max"
        );
        for version in [Version::V1, Version::V2] {
            assert_eq!(show(&Limits::default(), version), "", "unchanged");
        }
    }

    #[test]
    fn huge_pages_and_files_by_name() {
        let unified = [("memory.high".to_owned(), "1000".to_owned()), ("io.weight".into(), "50".into())];
        let limits = Limits {
            huge_pages: vec![HugePages { size: "2MB".into(), limit: 4 << 20 }],
            unified: unified.into(),
            ..Limits::default()
        };
        assert_eq!(show(&limits, Version::V1), "hugetlb.2MB.limit_in_bytes=4194304?");
        assert_eq!(show(&limits, Version::V2), "hugetlb.2MB.max=4194304? io.weight=50 memory.high=1000");
    }

    #[test]
    fn devices() {
        let rule = |allow, kind, major, minor, access: &str| DeviceRule {
            allow,
            kind,
            major,
            minor,
            access: access.into(),
        };
        let rules = vec![
            rule(false, DeviceKind::All, None, None, "rwm"),
            rule(true, DeviceKind::Character, Some(1), Some(3), "rw"),
            rule(true, DeviceKind::Block, Some(8), None, "r"),
        ];
        let limits = Limits { devices: Some(rules), ..Limits::default() };
        let lines = "devices.deny=a *:* rwm devices.allow=c 1:3 rw devices.allow=b 8:* r";
        assert_eq!(show(&limits, Version::V1), lines);
        assert_eq!(show(&limits, Version::V2), "", "a program");
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
            assert_eq!(cpu_weight(shares), expected, "{shares}");
            let fewest = shares_of_weight(expected);
            assert!(fewest <= shares.max(MIN_SHARES) && cpu_weight(fewest) == expected, "{shares}");
        }
        for (weight, expected) in [(0, 1), (10, 1), (500, 4950), (1000, 10_000)] {
            assert_eq!(io_weight(weight), expected, "{weight}");
        }
    }
}
