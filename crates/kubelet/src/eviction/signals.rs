//! The eviction signals and their thresholds.

use crate::quantity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use std::time::Duration;

/// A resource of the node that can run out. In the order in which it is dealt with: memory first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Signal {
    MemoryAvailable,
    AllocatableMemoryAvailable,
    NodeFsAvailable,
    NodeFsInodesFree,
    ImageFsAvailable,
    ImageFsInodesFree,
    ContainerFsAvailable,
    ContainerFsInodesFree,
    PidAvailable,
}

/// A condition of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pressure {
    Memory,
    Disk,
    Pid,
}

impl Pressure {
    /// The condition's type.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Pressure::Memory => "MemoryPressure",
            Pressure::Disk => "DiskPressure",
            Pressure::Pid => "PIDPressure",
        }
    }
}

impl Signal {
    const ALL: [(Signal, &'static str); 9] = [
        (Signal::MemoryAvailable, "memory.available"),
        (Signal::AllocatableMemoryAvailable, "allocatableMemory.available"),
        (Signal::NodeFsAvailable, "nodefs.available"),
        (Signal::NodeFsInodesFree, "nodefs.inodesFree"),
        (Signal::ImageFsAvailable, "imagefs.available"),
        (Signal::ImageFsInodesFree, "imagefs.inodesFree"),
        (Signal::ContainerFsAvailable, "containerfs.available"),
        (Signal::ContainerFsInodesFree, "containerfs.inodesFree"),
        (Signal::PidAvailable, "pid.available"),
    ];

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name)| *name == text).map(|(signal, _)| *signal)
    }

    pub(crate) fn pressure(self) -> Pressure {
        match self {
            Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable => Pressure::Memory,
            Signal::PidAvailable => Pressure::Pid,
            _ => Pressure::Disk,
        }
    }

    /// The resource that messages name.
    pub(crate) fn resource(self) -> &'static str {
        match self {
            Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable => "memory",
            Signal::NodeFsAvailable | Signal::ImageFsAvailable | Signal::ContainerFsAvailable => {
                "ephemeral-storage"
            }
            Signal::NodeFsInodesFree | Signal::ImageFsInodesFree | Signal::ContainerFsInodesFree => "inodes",
            Signal::PidAvailable => "pids",
        }
    }
}

/// An amount, or a share of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Amount {
    Units(i64),
    Percent(f64),
}

impl Amount {
    pub(crate) fn of(self, capacity: i64) -> i64 {
        match self {
            Amount::Units(units) => units,
            Amount::Percent(percent) => (capacity as f64 * percent / 100.0) as i64,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        if let Some(number) = text.strip_suffix('%') {
            let percent = number.trim().parse::<f64>().ok()?;
            return (0.0..=100.0).contains(&percent).then_some(Amount::Percent(percent));
        }
        let units = quantity::value(&Quantity(text.to_owned()))?;
        (units >= 0).then_some(Amount::Units(units))
    }
}

/// Below this the kubelet acts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Threshold {
    pub signal: Signal,
    pub amount: Amount,
    /// Nothing for a hard threshold, which acts at once.
    pub grace: Option<Duration>,
    /// Additional amount that must be free before the threshold counts as left.
    pub min_reclaim: Option<Amount>,
}

/// Eviction as KubeletConfiguration has it: amounts by the names of signals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvictionSettings {
    pub hard: BTreeMap<String, String>,
    pub soft: BTreeMap<String, String>,
    /// Grace period of each soft threshold.
    pub soft_grace: BTreeMap<String, Duration>,
    pub minimum_reclaim: BTreeMap<String, String>,
    /// Time that a condition stays after its threshold was last crossed.
    pub transition: Duration,
    /// The longest time that pods have to end at a soft threshold.
    pub max_pod_grace: Duration,
}

impl EvictionSettings {
    /// Upstream's hard thresholds.
    pub fn upstream() -> Self {
        let all = [
            ("memory.available", "100Mi"),
            ("nodefs.available", "10%"),
            ("nodefs.inodesFree", "5%"),
            ("imagefs.available", "15%"),
            ("imagefs.inodesFree", "5%"),
        ];
        let hard = all.into_iter().map(|(signal, amount)| (signal.to_owned(), amount.to_owned())).collect();
        Self { hard, ..Self::memory_only() }
    }

    /// Only memory is watched.
    pub fn memory_only() -> Self {
        let empty = BTreeMap::new;
        Self {
            hard: [("memory.available".to_owned(), "100Mi".to_owned())].into(),
            soft: empty(),
            soft_grace: BTreeMap::new(),
            minimum_reclaim: empty(),
            transition: Duration::from_secs(300),
            max_pod_grace: Duration::ZERO,
        }
    }
}

/// A threshold that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ThresholdError {
    #[error("unsupported eviction signal {0}")]
    Signal(String),
    #[error(
        "eviction threshold {signal}: {amount:?} is neither a quantity nor a percentage between 0% and 100%"
    )]
    Amount { signal: String, amount: String },
    #[error("grace period must be specified for the soft eviction threshold {0}")]
    NoGrace(String),
    #[error("{0} is watched by itself where memory.available is; leave it out")]
    Implied(String),
}

/// The thresholds that the settings name. One of 0% or 100% is none, as upstream.
pub(crate) fn thresholds(settings: &EvictionSettings) -> Result<Vec<Threshold>, ThresholdError> {
    let amount = |signal: &str, text: &str| {
        let bad = || ThresholdError::Amount { signal: signal.to_owned(), amount: text.to_owned() };
        Amount::parse(text).ok_or_else(bad)
    };
    let mut found = Vec::new();
    for name in settings.minimum_reclaim.keys() {
        Signal::parse(name).ok_or_else(|| ThresholdError::Signal(name.clone()))?;
    }
    let all = settings.hard.iter().map(|row| (row, false)).chain(settings.soft.iter().map(|row| (row, true)));
    for ((name, text), soft) in all {
        let signal = Signal::parse(name).ok_or_else(|| ThresholdError::Signal(name.clone()))?;
        if signal == Signal::AllocatableMemoryAvailable {
            return Err(ThresholdError::Implied(name.clone()));
        }
        let value = amount(name, text)?;
        if matches!(value, Amount::Percent(p) if p == 0.0 || p == 100.0) {
            continue;
        }
        let grace = match (soft, settings.soft_grace.get(name)) {
            (false, _) => None,
            (true, Some(grace)) => Some(*grace),
            (true, None) => return Err(ThresholdError::NoGrace(name.clone())),
        };
        let reclaim = settings.minimum_reclaim.get(name).map(|text| amount(name, text)).transpose()?;
        let threshold = Threshold { signal, amount: value, grace, min_reclaim: reclaim };
        found.push(threshold);
        if signal == Signal::MemoryAvailable && !soft {
            found.push(Threshold { signal: Signal::AllocatableMemoryAvailable, ..threshold });
        }
    }
    found.sort_by_key(|threshold| threshold.signal);
    Ok(found)
}

/// A number of bytes as upstream prints it: in the largest unit that leaves no remainder.
pub(super) fn binary(amount: i64) -> String {
    const UNITS: [(&str, i64); 4] = [("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
    match UNITS.iter().find(|(_, size)| amount != 0 && amount % size == 0) {
        Some((unit, size)) => format!("{}{unit}", amount / size),
        None => amount.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rows: &[(&str, &str)]) -> BTreeMap<String, String> {
        rows.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    #[test]
    fn settings_become_thresholds() {
        let mut settings = EvictionSettings::upstream();
        assert_eq!(thresholds(&settings).unwrap().len(), 6, "allocatable memory is watched with memory");
        settings.hard =
            map(&[("memory.available", "5%"), ("nodefs.available", "0%"), ("pid.available", "10")]);
        settings.soft = map(&[("nodefs.available", "20%")]);
        settings.soft_grace = [("nodefs.available".to_owned(), Duration::from_secs(90))].into();
        settings.minimum_reclaim = map(&[("nodefs.available", "1Gi")]);
        let found = thresholds(&settings).unwrap();
        let signals: Vec<Signal> = found.iter().map(|t| t.signal).collect();
        use Signal::*;
        assert_eq!(signals, [MemoryAvailable, AllocatableMemoryAvailable, NodeFsAvailable, PidAvailable]);
        assert_eq!(found[2].grace, Some(Duration::from_secs(90)));
        assert_eq!(found[2].min_reclaim, Some(Amount::Units(1 << 30)));
        assert_eq!(found[0].amount.of(1000), 50);
    }

    #[test]
    fn mistakes_are_named() {
        let with = |hard: &[(&str, &str)], soft: &[(&str, &str)]| {
            let settings =
                EvictionSettings { hard: map(hard), soft: map(soft), ..EvictionSettings::memory_only() };
            thresholds(&settings).unwrap_err().to_string()
        };
        assert_eq!(with(&[("memory.free", "1")], &[]), "unsupported eviction signal memory.free");
        assert!(with(&[("memory.available", "101%")], &[]).contains("neither a quantity nor"));
        assert!(with(&[("memory.available", "-1")], &[]).contains("neither a quantity nor"));
        assert!(with(&[("memory.available", "much")], &[]).contains("neither a quantity nor"));
        assert!(with(&[], &[("memory.available", "1Gi")]).contains("grace period must be specified"));
        assert!(with(&[("allocatableMemory.available", "1")], &[]).contains("leave it out"));
    }

    #[test]
    fn amounts_are_printed_as_upstream_does() {
        for (amount, expected) in
            [(0, "0"), (1, "1"), (1024, "1Ki"), (104_857_600, "100Mi"), (1 << 30, "1Gi"), (1025, "1025")]
        {
            assert_eq!(binary(amount), expected);
        }
    }
}
