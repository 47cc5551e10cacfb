//! Rates from two samples. Pure.

use crate::sample::{Counters, PodKey, Sample};
use jiff::Timestamp;
use std::time::Duration;

/// Usage at a moment, averaged over the window before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Billionths of a processor.
    pub nanocores: u64,
    /// Bytes.
    pub memory: u64,
    pub at: Timestamp,
    pub window: Duration,
}

/// The usage between two samples of the same container or node; none if the first was of another one.
pub(crate) fn usage(earlier: &Counters, later: &Counters) -> Option<Usage> {
    if let (Some(before), Some(now)) = (earlier.started, later.started)
        && now > before
    {
        return None;
    }
    let (before, now) = (earlier.cpu?, later.cpu?);
    let window = Duration::try_from(now.at.duration_since(before.at)).ok().filter(|w| !w.is_zero())?;
    // A counter that went down began anew.
    let used = u128::from(now.nanoseconds.checked_sub(before.nanoseconds)?);
    let nanocores = used * 1_000_000_000 / window.as_nanos();
    let nanocores = u64::try_from(nanocores).unwrap_or(u64::MAX);
    Some(Usage { nanocores, memory: later.memory?, at: now.at, window })
}

/// The usage of every container of a pod. As metrics-server: none unless all of them have one.
pub(crate) fn of_pod(earlier: &Sample, later: &Sample, pod: &PodKey) -> Option<Vec<(String, Usage)>> {
    let (before, now) = (earlier.pods.get(pod)?, later.pods.get(pod)?);
    now.iter().map(|(name, counters)| Some((name.clone(), usage(before.get(name)?, counters)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::parse;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    fn container(cpu: f64, started: Option<i64>) -> String {
        let labels = "{container=\"c\",namespace=\"n\",pod=\"p\"}";
        let started = started.map(|at| format!("container_start_time_seconds{labels} {at}\n"));
        format!(
            "container_cpu_usage_seconds_total{labels} {cpu}\ncontainer_memory_working_set_bytes{labels} 1000\n{}",
            started.unwrap_or_default()
        )
    }

    #[test]
    fn rates_are_of_one_container_only() {
        // Name; earlier text and time; later text and time; rate.
        let rows = [
            ("half a processor", container(10.0, None), 100, container(15.0, None), 110, Some(500_000_000)),
            ("idle", container(10.0, Some(5)), 100, container(10.0, Some(5)), 115, Some(0)),
            ("another container", container(1.0, Some(5)), 100, container(9.0, Some(103)), 110, None),
            ("the counter began anew", container(10.0, None), 100, container(1.0, None), 110, None),
            ("the same moment", container(10.0, None), 100, container(11.0, None), 100, None),
            ("time went back", container(10.0, None), 100, container(11.0, None), 90, None),
            ("new", String::new(), 100, container(11.0, None), 110, None),
            ("gone", container(10.0, None), 100, String::new(), 110, None),
        ];
        for (name, earlier, first, later, second, rate) in rows {
            let (earlier, later) = (parse(&earlier, at(first)), parse(&later, at(second)));
            let found = of_pod(&earlier, &later, &("n".into(), "p".into()));
            let found = found.map(|all| all[0].1);
            assert_eq!(found.map(|usage| usage.nanocores), rate, "{name}");
            if let Some(usage) = found {
                assert_eq!(
                    (usage.memory, usage.at, i64::try_from(usage.window.as_secs())),
                    (1000, at(second), Ok(second - first))
                );
            }
        }
    }

    #[test]
    fn a_pod_without_all_its_containers_has_no_usage() {
        let two = |first: &str, second: &str| {
            let line = |name: &str, cpu: &str| {
                format!(
                    "container_cpu_usage_seconds_total{{container=\"{name}\",namespace=\"n\",pod=\"p\"}} {cpu}\ncontainer_memory_working_set_bytes{{container=\"{name}\",namespace=\"n\",pod=\"p\"}} 1\n"
                )
            };
            let second = if second.is_empty() { String::new() } else { line("b", second) };
            format!("{}{second}", line("a", first))
        };
        let key = ("n".into(), "p".into());
        let look = |text: &str, time: i64| parse(text, at(time));
        assert_eq!(of_pod(&look(&two("1", ""), 0), &look(&two("2", "1"), 10), &key), None);
        assert_eq!(
            of_pod(&look(&two("1", "1"), 0), &look(&two("2", "1"), 10), &key).map(|all| all.len()),
            Some(2)
        );
    }
}
