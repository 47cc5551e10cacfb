//! The limits of a unit, as systemd's properties.

use crate::wire::{Property, Value};
use ferrite_cgroup::{Limits, Version, cpu_weight};

/// systemd knows no finer share of a CPU than this: a hundredth.
const QUOTA_STEP: u64 = 10_000;
const SECOND: u64 = 1_000_000;
/// systemd's word for no limit.
const INFINITY: u64 = u64::MAX;
/// The first version with `CPUQuotaPeriodUSec`, and with `AllowedCPUs`.
const WITH_PERIOD: u32 = 242;
const WITH_CPUSETS: u32 = 244;

/// The limits that systemd has to know of a unit, for a version of control groups and a version of systemd. systemd
/// leaves the others alone.
pub(crate) fn properties(limits: &Limits, cgroups: Version, systemd: u32) -> Vec<Property> {
    let mut out = Vec::new();
    let bound = |limit: i64| u64::try_from(limit).unwrap_or(INFINITY);
    if let Some(memory) = limits.memory {
        let name = if cgroups == Version::V1 { "MemoryLimit" } else { "MemoryMax" };
        out.push((name, Value::U64(bound(memory))));
    }
    if let Some(shares) = limits.cpu_shares {
        out.push(match cgroups {
            Version::V1 => ("CPUShares", Value::U64(shares)),
            Version::V2 => ("CPUWeight", Value::U64(cpu_weight(shares))),
        });
    }
    if let Some(quota) = limits.cpu_quota {
        let period = limits.cpu_period.filter(|period| *period > 0).unwrap_or(SECOND / 10);
        let per_second = match u64::try_from(quota) {
            // Rounded up: a limit must not be below the requested one.
            Ok(quota) if quota > 0 => {
                quota.saturating_mul(SECOND).div_ceil(period).next_multiple_of(QUOTA_STEP)
            }
            _ => INFINITY,
        };
        out.push(("CPUQuotaPerSecUSec", Value::U64(per_second)));
        if systemd >= WITH_PERIOD {
            out.push(("CPUQuotaPeriodUSec", Value::U64(period)));
        }
    }
    if let Some(pids) = limits.pids {
        out.push(("TasksMax", Value::U64(bound(pids))));
    }
    if cgroups == Version::V2 && systemd >= WITH_CPUSETS {
        for (name, list) in [("AllowedCPUs", &limits.cpus), ("AllowedMemoryNodes", &limits.memory_nodes)] {
            if let Some(mask) = list.as_deref().and_then(mask) {
                out.push((name, Value::Bytes(mask)));
            }
        }
    }
    out
}

/// A list of CPUs as bits, the lowest first. `None` when it is no list.
fn mask(list: &str) -> Option<Vec<u8>> {
    /// More than any machine has.
    const MOST: usize = 1 << 16;
    let mut out: Vec<u8> = Vec::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (low, high): (usize, usize) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
        if low > high || high >= MOST {
            return None;
        }
        out.resize(out.len().max(high / 8 + 1), 0);
        (low..=high).for_each(|number| out[number / 8] |= 1 << (number % 8));
    }
    (!out.is_empty()).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_in_systemds_words() {
        let all = Limits {
            memory: Some(64 << 20),
            cpu_shares: Some(512),
            cpu_quota: Some(12_345),
            cpu_period: Some(100_000),
            pids: Some(100),
            cpus: Some("0-1,9".into()),
            memory_nodes: Some("0".into()),
            ..Limits::default()
        };
        let number = |name, value| (name, Value::U64(value));
        assert_eq!(
            properties(&all, Version::V1, 252),
            [
                number("MemoryLimit", 64 << 20),
                number("CPUShares", 512),
                number("CPUQuotaPerSecUSec", 130_000),
                number("CPUQuotaPeriodUSec", 100_000),
                number("TasksMax", 100),
            ]
        );
        assert_eq!(
            properties(&all, Version::V2, 252),
            [
                number("MemoryMax", 64 << 20),
                number("CPUWeight", 59),
                number("CPUQuotaPerSecUSec", 130_000),
                number("CPUQuotaPeriodUSec", 100_000),
                number("TasksMax", 100),
                ("AllowedCPUs", Value::Bytes(vec![3, 2])),
                ("AllowedMemoryNodes", Value::Bytes(vec![1])),
            ]
        );
        assert_eq!(
            properties(&all, Version::V2, 241).len(),
            4,
            "an older systemd is not asked for what it does not know"
        );
        let none = Limits { memory: Some(-1), cpu_quota: Some(-1), pids: Some(-1), ..Limits::default() };
        let without: Vec<Value> =
            properties(&none, Version::V1, 241).into_iter().map(|(_, value)| value).collect();
        assert_eq!(without, vec![Value::U64(u64::MAX); 3]);
        assert_eq!(properties(&Limits::default(), Version::V2, 252), []);
    }

    #[test]
    fn lists_of_cpus() {
        for (list, bits) in [
            ("0", Some(vec![1])),
            ("0-7", Some(vec![255])),
            ("8", Some(vec![0, 1])),
            ("1,3, 5", Some(vec![0b10_1010])),
            ("", None),
            ("3-1", None),
            ("a", None),
            ("999999999", None),
        ] {
            assert_eq!(mask(list), bits, "{list}");
        }
    }
}
