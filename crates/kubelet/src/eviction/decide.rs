//! Decides from observations: conditions of the node, and the threshold to act on.

use super::signals::{Pressure, Signal, Threshold};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The available amount and the capacity of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Observation {
    pub available: i64,
    pub capacity: i64,
}

pub(crate) type Observations = BTreeMap<Signal, Observation>;

/// State kept between two checks.
#[derive(Debug, Default)]
pub(crate) struct EvictionState {
    /// Thresholds that were acted on.
    met: Vec<Threshold>,
    first_crossed: Vec<(Threshold, Timestamp)>,
    last_seen: BTreeMap<Pressure, Timestamp>,
}

/// The outcome of one look.
#[derive(Debug, PartialEq)]
pub(crate) struct Findings {
    pub pressures: BTreeSet<Pressure>,
    /// Thresholds that must be acted on, the most urgent first.
    pub due: Vec<Threshold>,
}

pub(crate) fn is_crossed(threshold: &Threshold, observed: &Observations, with_reclaim: bool) -> bool {
    let Some(observation) = observed.get(&threshold.signal) else { return false };
    let reclaim = threshold.min_reclaim.filter(|_| with_reclaim).map_or(0, |r| r.of(observation.capacity));
    threshold.amount.of(observation.capacity).saturating_add(reclaim) > observation.available
}

impl EvictionState {
    pub(crate) fn look(
        &mut self,
        thresholds: &[Threshold],
        observed: &Observations,
        transition: Duration,
        now: Timestamp,
    ) -> Findings {
        let mut crossed: Vec<Threshold> =
            thresholds.iter().filter(|t| is_crossed(t, observed, false)).copied().collect();
        // One that was acted on is left only when the minimum reclaim is free as well.
        for threshold in &self.met {
            if is_crossed(threshold, observed, true) && !crossed.contains(threshold) {
                crossed.push(*threshold);
            }
        }
        let since = |threshold: &Threshold| {
            self.first_crossed.iter().find(|(t, _)| t == threshold).map_or(now, |(_, at)| *at)
        };
        let first_crossed: Vec<(Threshold, Timestamp)> = crossed.iter().map(|t| (*t, since(t))).collect();
        for threshold in &crossed {
            self.last_seen.insert(threshold.signal.pressure(), now);
        }
        let elapsed = |from: Timestamp| crate::clock::since(from, now);
        self.last_seen.retain(|_, at| elapsed(*at) < transition || *at == now);
        let mut due: Vec<Threshold> = first_crossed
            .iter()
            .filter(|(t, at)| t.grace.is_none_or(|grace| elapsed(*at) >= grace))
            .map(|(t, _)| *t)
            .collect();
        // Memory first; and hard thresholds before soft ones.
        due.sort_by_key(|t| (t.signal, t.grace.is_some()));
        self.first_crossed = first_crossed;
        self.met.clone_from(&due);
        Findings { pressures: self.last_seen.keys().copied().collect(), due }
    }
}

#[cfg(test)]
mod tests {
    use super::super::signals::Amount;
    use super::*;

    fn threshold(signal: Signal, amount: i64, grace: Option<u64>, reclaim: Option<i64>) -> Threshold {
        Threshold {
            signal,
            amount: Amount::Units(amount),
            grace: grace.map(Duration::from_secs),
            min_reclaim: reclaim.map(Amount::Units),
        }
    }

    /// Each row: seconds, memory and disk left; the conditions, and the signals that are due.
    fn run(thresholds: &[Threshold], rows: &[(i64, i64, i64, &str, &str)]) {
        let mut state = EvictionState::default();
        for (at, memory, disk, conditions, due) in rows {
            let observed = Observations::from([
                (Signal::MemoryAvailable, Observation { available: *memory, capacity: 1000 }),
                (Signal::NodeFsAvailable, Observation { available: *disk, capacity: 1000 }),
            ]);
            let now = Timestamp::from_second(1_000_000 + at).unwrap();
            let found = state.look(thresholds, &observed, Duration::from_secs(300), now);
            let names: Vec<&str> = found.pressures.iter().map(|p| p.name()).collect();
            assert_eq!(names.join(" "), *conditions, "conditions at {at}");
            let signals: Vec<String> = found.due.iter().map(|t| t.signal.resource().to_owned()).collect();
            assert_eq!(signals.join(" "), *due, "due at {at}");
        }
    }

    #[test]
    fn hard_thresholds_act_at_once_and_conditions_stay_for_a_while() {
        run(
            &[
                threshold(Signal::MemoryAvailable, 100, None, None),
                threshold(Signal::NodeFsAvailable, 50, None, None),
            ],
            &[
                (0, 500, 500, "", ""),
                (10, 100, 500, "", ""),
                (20, 99, 500, "MemoryPressure", "memory"),
                (30, 99, 49, "MemoryPressure DiskPressure", "memory ephemeral-storage"),
                (40, 500, 49, "MemoryPressure DiskPressure", "ephemeral-storage"),
                (50, 500, 500, "MemoryPressure DiskPressure", ""),
                (329, 500, 500, "MemoryPressure DiskPressure", ""),
                (331, 500, 500, "DiskPressure", ""),
                (341, 500, 500, "", ""),
            ],
        );
    }

    #[test]
    fn soft_thresholds_have_a_grace_that_starts_anew() {
        run(
            &[threshold(Signal::MemoryAvailable, 300, Some(30), None)],
            &[
                (0, 200, 500, "MemoryPressure", ""),
                (20, 200, 500, "MemoryPressure", ""),
                (30, 200, 500, "MemoryPressure", "memory"),
                (40, 400, 500, "MemoryPressure", ""),
                (50, 200, 500, "MemoryPressure", ""),
                (79, 200, 500, "MemoryPressure", ""),
                (80, 200, 500, "MemoryPressure", "memory"),
            ],
        );
    }

    #[test]
    fn a_minimum_is_reclaimed_before_it_is_over() {
        run(
            &[threshold(Signal::NodeFsAvailable, 100, None, Some(50))],
            &[
                (0, 500, 120, "", ""),
                (10, 500, 90, "DiskPressure", "ephemeral-storage"),
                (20, 500, 120, "DiskPressure", "ephemeral-storage"),
                (30, 500, 150, "DiskPressure", ""),
                (40, 500, 120, "DiskPressure", ""),
            ],
        );
    }

    #[test]
    fn what_is_not_measured_is_not_crossed() {
        let mut state = EvictionState::default();
        let found = state.look(
            &[threshold(Signal::PidAvailable, 100, None, None)],
            &Observations::new(),
            Duration::ZERO,
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(found, Findings { pressures: BTreeSet::new(), due: Vec::new() });
    }
}
