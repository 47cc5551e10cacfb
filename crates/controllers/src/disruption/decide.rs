//! The arithmetic of budgets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

const ALLOWED: &str = "DisruptionAllowed";
/// A pod whose eviction was granted but that is still there after this will stay.
const DELETION_TIMEOUT: SignedDuration = SignedDuration::from_secs(120);

/// The status to write, if it changed, and the time of the next check.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub status: Option<PodDisruptionBudgetStatus>,
    pub recheck: Option<Duration>,
    /// Pods whose eviction was granted and that were not deleted in time.
    pub overdue: Vec<Arc<Pod>>,
}

/// Why it is not known how many pods a budget is about. The messages are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum BudgetError {
    #[error("found no controllers for pod {pod:?}")]
    NoController { pod: String },
    #[error("no matches for kind {kind:?} in version {version:?}")]
    NoKind { kind: String, version: String },
    #[error("{resource} does not implement the scale subresource")]
    NoScale { resource: String },
    /// The server did not say the size; it may later.
    #[error("{0}")]
    Unreadable(String),
    #[error("invalid value for IntOrString: invalid type: string is not a percentage")]
    NoPercentage,
}

/// Returns true if the number of allowed disruptions depends on the sizes of workloads.
pub(super) fn needs_sizes(budget: &PodDisruptionBudget) -> bool {
    budget.spec.as_ref().is_some_and(|spec| {
        spec.max_unavailable.is_some() || matches!(spec.min_available, Some(IntOrString::String(_)))
    })
}

/// The status of a budget for the pods it selects. `expected` is the sum of their workloads' sizes, or why
/// that is not known.
pub(super) fn decide(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    expected: Result<i32, BudgetError>,
    now: Timestamp,
) -> Plan {
    let old = budget.status.clone().unwrap_or_default();
    let generation = budget.metadata.generation;
    let (expected_pods, desired) = match wanted(budget, pods.len(), expected) {
        Ok(counts) => counts,
        Err(why) => {
            // Nothing may go while nobody knows how many there should be.
            let mut status = PodDisruptionBudgetStatus { disruptions_allowed: Some(0), ..old.clone() };
            status.observed_generation = generation;
            set_condition(&mut status, "False", "SyncFailed", &why.to_string(), generation, now);
            return Plan { status: (status != old).then_some(status), ..Plan::default() };
        }
    };
    let (disrupted, recheck, overdue) =
        still_disrupted(&old.disrupted_pods.clone().unwrap_or_default(), pods, now);
    let healthy = pods.iter().filter(|pod| is_healthy(pod, &disrupted)).count();
    let healthy = i32::try_from(healthy).unwrap_or(i32::MAX);
    let allowed = if expected_pods <= 0 { 0 } else { (healthy - desired).max(0) };
    let mut status = PodDisruptionBudgetStatus {
        current_healthy: Some(healthy),
        desired_healthy: Some(desired),
        expected_pods: Some(expected_pods),
        disruptions_allowed: Some(allowed),
        disrupted_pods: (!disrupted.is_empty()).then_some(disrupted),
        observed_generation: generation,
        ..old.clone()
    };
    let (value, reason) =
        if allowed > 0 { ("True", "SufficientPods") } else { ("False", "InsufficientPods") };
    set_condition(&mut status, value, reason, "", generation, now);
    Plan { status: (status != old).then_some(status), recheck, overdue }
}

/// The numbers of expected pods and of pods that must stay healthy.
fn wanted(
    budget: &PodDisruptionBudget,
    pods: usize,
    expected: Result<i32, BudgetError>,
) -> Result<(i32, i32), BudgetError> {
    let spec = budget.spec.clone().unwrap_or_default();
    let pods = i32::try_from(pods).unwrap_or(i32::MAX);
    match (&spec.max_unavailable, &spec.min_available) {
        (Some(most), _) => {
            let expected = expected?;
            Ok((expected, (expected - scaled(most, expected)?).max(0)))
        }
        (None, Some(IntOrString::Int(least))) => Ok((pods, *least)),
        (None, Some(least)) => {
            let expected = expected?;
            Ok((expected, scaled(least, expected)?))
        }
        (None, None) => Ok((pods, 0)),
    }
}

/// A number, or a percentage of `whole`, rounded up.
fn scaled(value: &IntOrString, whole: i32) -> Result<i32, BudgetError> {
    match value {
        IntOrString::Int(number) => Ok(*number),
        IntOrString::String(text) => {
            let percent: i64 = text
                .strip_suffix('%')
                .and_then(|number| number.parse().ok())
                .ok_or(BudgetError::NoPercentage)?;
            let scaled = (i64::from(whole) * percent + 99).div_euclid(100);
            Ok(i32::try_from(scaled).unwrap_or(i32::MAX))
        }
    }
}

/// Pods whose eviction was granted and that are still to go, the time until the first of them should have, and the pods
/// whose time is over.
fn still_disrupted(
    granted: &BTreeMap<String, Time>,
    pods: &[Arc<Pod>],
    now: Timestamp,
) -> (BTreeMap<String, Time>, Option<Duration>, Vec<Arc<Pod>>) {
    let mut still = BTreeMap::new();
    let mut overdue = Vec::new();
    let mut recheck: Option<Duration> = None;
    for pod in pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let Some(at) = granted.get(name) else { continue };
        let left = (at.0.saturating_add(DELETION_TIMEOUT).unwrap_or(now)).duration_since(now);
        let Some(left) = Duration::try_from(left).ok().filter(|left| !left.is_zero()) else {
            overdue.push(Arc::clone(pod));
            continue;
        };
        still.insert(name.to_owned(), at.clone());
        recheck = Some(recheck.map_or(left, |earlier| earlier.min(left)));
    }
    (still, recheck, overdue)
}

fn is_healthy(pod: &Pod, disrupted: &BTreeMap<String, Time>) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    pod.metadata.deletion_timestamp.is_none()
        && !disrupted.contains_key(pod.metadata.name.as_deref().unwrap_or_default())
        && conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

fn set_condition(
    status: &mut PodDisruptionBudgetStatus,
    value: &str,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) {
    let conditions = status.conditions.get_or_insert_default();
    let before = conditions.iter().find(|c| c.type_ == ALLOWED && c.status == value);
    let condition = Condition {
        type_: ALLOWED.into(),
        status: value.into(),
        reason: reason.into(),
        message: message.into(),
        observed_generation: generation,
        last_transition_time: before.map_or(Time(now), |c| c.last_transition_time.clone()),
    };
    match conditions.iter_mut().find(|c| c.type_ == ALLOWED) {
        Some(old) => *old = condition,
        None => conditions.push(condition),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    const NOW: &str = "2026-01-01T00:10:00Z";

    fn now() -> Timestamp {
        NOW.parse().unwrap()
    }

    fn budget(spec: Value, status: Value) -> PodDisruptionBudget {
        ferrite_json::from_value(
            json!({"metadata": {"name": "b", "generation": 1}, "spec": spec, "status": status}),
        )
        .unwrap()
    }

    fn pods(ready: usize, unready: usize) -> Vec<Arc<Pod>> {
        (0..ready + unready)
            .map(|i| {
                let ready = if i < ready { "True" } else { "False" };
                let pod = json!({
                    "metadata": {"name": format!("p{i}")},
                    "status": {"conditions": [{"type": "Ready", "status": ready}]},
                });
                Arc::new(ferrite_json::from_value(pod).unwrap())
            })
            .collect()
    }

    #[test]
    fn budgets_count_what_may_go() {
        for (spec, pods, expected, wanted) in [
            (json!({"minAvailable": 2}), pods(3, 0), 3, (3, 2, 3, 1)),
            (json!({"minAvailable": 3}), pods(3, 0), 3, (3, 3, 3, 0)),
            (json!({"minAvailable": "50%"}), pods(3, 0), 3, (3, 2, 3, 1)),
            (json!({"maxUnavailable": 1}), pods(2, 1), 3, (3, 2, 2, 0)),
            (json!({"maxUnavailable": "50%"}), pods(3, 0), 3, (3, 1, 3, 2)),
            (json!({"maxUnavailable": 5}), pods(3, 0), 3, (3, 0, 3, 3)),
            (json!({"maxUnavailable": 1}), pods(0, 0), 0, (0, 0, 0, 0)),
        ] {
            let budget = budget(spec.clone(), json!({}));
            let status = decide(&budget, &pods, Ok(expected), now()).status.unwrap();
            let found = [
                status.expected_pods,
                status.desired_healthy,
                status.current_healthy,
                status.disruptions_allowed,
            ];
            assert_eq!(found.map(Option::unwrap_or_default), <[i32; 4]>::from(wanted), "{spec}");
        }
    }

    #[test]
    fn a_granted_eviction_counts_until_its_time_is_over() {
        let granted = |at: &str| {
            let status = json!({"disruptedPods": {"p0": at}, "currentHealthy": 0, "desiredHealthy": 0,
                "expectedPods": 0, "disruptionsAllowed": 0});
            decide(&budget(json!({"minAvailable": 1}), status), &pods(2, 0), Ok(2), now())
        };
        let recent = granted("2026-01-01T00:09:00Z");
        let status = recent.status.unwrap();
        assert_eq!((status.current_healthy, status.disruptions_allowed), (Some(1), Some(0)));
        assert_eq!(recent.recheck, Some(Duration::from_secs(60)));
        let old = granted("2026-01-01T00:01:00Z");
        let status = old.status.unwrap();
        assert_eq!((status.current_healthy, status.disruptions_allowed), (Some(2), Some(1)));
        assert_eq!(old.recheck, None);
        assert_eq!((recent.overdue.len(), old.overdue.len()), (0, 1));
        assert_eq!(status.disrupted_pods, None);
    }

    #[test]
    fn what_is_true_is_not_written_again_and_what_is_not_known_stops_everything() {
        let spec = json!({"maxUnavailable": 1});
        let first = decide(&budget(spec.clone(), json!({})), &pods(2, 0), Ok(2), now()).status.unwrap();
        let mut settled = budget(spec, json!({}));
        settled.status = Some(first);
        assert_eq!(decide(&settled, &pods(2, 0), Ok(2), now()), Plan::default());
        let failed = decide(&settled, &pods(2, 0), Err(BudgetError::NoPercentage), now()).status.unwrap();
        let condition = &failed.conditions.unwrap()[0];
        assert_eq!(
            (condition.reason.as_str(), condition.message.as_str()),
            ("SyncFailed", "invalid value for IntOrString: invalid type: string is not a percentage")
        );
        assert_eq!(failed.disruptions_allowed, Some(0));
    }
}
