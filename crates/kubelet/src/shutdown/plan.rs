//! The order in which pods end when the machine shuts down, and how long each has.

use crate::pod::model::{self, PodId};
use k8s_openapi::api::core::v1::Pod;
use std::time::Duration;

/// Pods of this priority, up to that of the next period, end together and have this long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShutdownPeriod {
    pub priority: i32,
    pub grace: Duration,
}

/// Pods of system-cluster-critical and above.
const SYSTEM_CRITICAL: i32 = 2_000_000_000;

/// The periods of `shutdownGracePeriod`, of which the last part is for critical pods. None for a node that does not
/// delay shutdowns.
pub fn shutdown_periods(all: Duration, critical: Duration) -> Vec<ShutdownPeriod> {
    if all.is_zero() || critical > all {
        return Vec::new();
    }
    let whole = |time: Duration| Duration::from_secs(time.as_secs());
    vec![
        ShutdownPeriod { priority: 0, grace: whole(all - critical) },
        ShutdownPeriod { priority: SYSTEM_CRITICAL, grace: whole(critical) },
    ]
}

/// The delay that all periods need together.
pub(super) fn total(periods: &[ShutdownPeriod]) -> Duration {
    periods.iter().map(|period| period.grace).fold(Duration::ZERO, Duration::saturating_add)
}

/// Pods that end together.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ShutdownGroup {
    /// The time that the others wait for these.
    pub grace: Duration,
    /// UIDs, with how long each pod's containers have.
    pub pods: Vec<(String, Duration)>,
}

/// The groups in the order in which they end, those of low priority first. Groups without pods are left out: nobody
/// waits for them.
pub(super) fn plan(periods: &[ShutdownPeriod], pods: &[&Pod]) -> Vec<ShutdownGroup> {
    let mut periods = periods.to_vec();
    periods.sort_by_key(|period| period.priority);
    let mut groups: Vec<ShutdownGroup> =
        periods.iter().map(|period| ShutdownGroup { grace: period.grace, pods: Vec::new() }).collect();
    for pod in pods {
        let spec = model::spec(pod);
        let priority = spec.priority.unwrap_or(0);
        // Below the lowest period counts as the lowest.
        let index = periods.iter().rposition(|period| period.priority <= priority).unwrap_or(0);
        let Some(group) = groups.get_mut(index) else { continue };
        let own = spec.termination_grace_period_seconds.and_then(|s| u64::try_from(s).ok());
        let grace = own.map_or(group.grace, |own| Duration::from_secs(own).min(group.grace));
        group.pods.push((PodId::of(pod).uid, grace));
    }
    groups.retain(|group| !group.pods.is_empty());
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    const fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    fn period(priority: i32, grace: u64) -> ShutdownPeriod {
        ShutdownPeriod { priority, grace: seconds(grace) }
    }

    #[test]
    fn the_last_part_is_for_critical_pods() {
        for (all, critical, expected) in [
            (0, 0, vec![]),
            (30, 0, vec![period(0, 30), period(SYSTEM_CRITICAL, 0)]),
            (30, 10, vec![period(0, 20), period(SYSTEM_CRITICAL, 10)]),
            (10, 10, vec![period(0, 0), period(SYSTEM_CRITICAL, 10)]),
            (10, 20, vec![]),
        ] {
            let periods = shutdown_periods(seconds(all), seconds(critical));
            assert_eq!(periods, expected, "{all} {critical}");
            assert!(periods.is_empty() || total(&periods) == seconds(all));
        }
    }

    #[test]
    fn pods_end_by_priority() {
        let periods = [period(1000, 60), period(0, 10), period(2_000_000_000, 20)];
        // Name, priority, own grace period.
        let pods: Vec<Pod> = [
            ("negative", Some(-5), None),
            ("none", None, Some(30)),
            ("short", Some(0), Some(3)),
            ("below", Some(999), Some(0)),
            ("exact", Some(1000), Some(45)),
            ("between", Some(1_999_999_999), Some(90)),
            ("critical", Some(2_000_000_000), Some(30)),
            ("node", Some(2_000_001_000), None),
        ]
        .into_iter()
        .map(|(name, priority, grace)| {
            ferrite_json::from_value(json!({
                "metadata": {"name": name, "namespace": "d", "uid": name},
                "spec": {"containers": [], "priority": priority, "terminationGracePeriodSeconds": grace},
            }))
            .unwrap()
        })
        .collect();
        let all: Vec<&Pod> = pods.iter().collect();
        let found: Vec<String> = plan(&periods, &all)
            .into_iter()
            .map(|group| {
                let pods: Vec<String> =
                    group.pods.iter().map(|(name, grace)| format!("{name}:{}", grace.as_secs())).collect();
                format!("{}s {}", group.grace.as_secs(), pods.join(" "))
            })
            .collect();
        assert_eq!(
            found,
            ["10s negative:10 none:10 short:3 below:0", "60s exact:45 between:60", "20s critical:20 node:20"]
        );
        assert_eq!(plan(&periods, &all[4..5]).len(), 1, "nobody waits for nobody");
        assert!(plan(&[], &all).is_empty());
    }
}
