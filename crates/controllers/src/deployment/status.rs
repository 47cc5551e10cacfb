//! The status of a Deployment, and the decision if it is complete, progressing or stuck.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus, ReplicaSet};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{available_replicas, bounds, replicas, spec_replicas};

pub(super) const PROGRESSING: &str = "Progressing";
const AVAILABLE: &str = "Available";
const REPLICA_FAILURE: &str = "ReplicaFailure";
const NEW_AVAILABLE: &str = "NewReplicaSetAvailable";
pub(super) const TIMED_OUT: &str = "ProgressDeadlineExceeded";
pub(super) const PAUSED: &str = "DeploymentPaused";

pub(super) fn condition<'a>(status: &'a DeploymentStatus, kind: &str) -> Option<&'a DeploymentCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

pub(super) fn new_condition(
    kind: &str,
    status: &str,
    reason: &str,
    message: impl Into<String>,
    now: Timestamp,
) -> DeploymentCondition {
    DeploymentCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.into()),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

/// Puts `condition` in place. Same status and reason change nothing; same status keeps the transition time.
pub(super) fn set_condition(status: &mut DeploymentStatus, mut condition: DeploymentCondition) {
    if let Some(current) = self::condition(status, &condition.type_) {
        if current.status == condition.status && current.reason == condition.reason {
            return;
        }
        if current.status == condition.status {
            condition.last_transition_time = current.last_transition_time.clone();
        }
    }
    remove_condition(status, &condition.type_);
    status.conditions.get_or_insert_default().push(condition);
}

pub(super) fn remove_condition(status: &mut DeploymentStatus, kind: &str) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| condition.type_ != kind);
    }
    status.conditions = status.conditions.take().filter(|conditions| !conditions.is_empty());
}

pub(super) fn has_deadline(deployment: &Deployment) -> bool {
    deadline(deployment).is_some()
}

fn deadline(deployment: &Deployment) -> Option<i32> {
    deployment.spec.as_ref()?.progress_deadline_seconds.filter(|seconds| *seconds != i32::MAX)
}

/// Counts and the `Available` condition; the other conditions stay.
pub(super) fn calculate(
    deployment: &Deployment,
    sets: &[ReplicaSet],
    new: Option<&ReplicaSet>,
    now: Timestamp,
) -> DeploymentStatus {
    let previous = deployment.status.clone().unwrap_or_default();
    let sum = |of: fn(&ReplicaSet) -> i32| sets.iter().map(of).fold(0, i32::saturating_add);
    let actual = |set: &ReplicaSet| set.status.as_ref().map_or(0, |status| status.replicas);
    let available = sum(available_replicas);
    let unavailable = (sum(spec_replicas) - available).max(0);
    let terminating: Option<i32> =
        sets.iter().map(|set| set.status.as_ref().and_then(|status| status.terminating_replicas)).sum();
    let some = |count: i32| Some(count).filter(|count| *count != 0);
    let mut status = DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: some(sum(actual)),
        updated_replicas: some(new.map_or(0, actual)),
        ready_replicas: some(sum(|set| set.status.as_ref().and_then(|s| s.ready_replicas).unwrap_or(0))),
        available_replicas: some(available),
        unavailable_replicas: some(unavailable),
        terminating_replicas: terminating,
        collision_count: previous.collision_count,
        conditions: previous.conditions,
    };
    let enough = available >= replicas(deployment) - bounds(deployment).max_unavailable;
    let condition = if enough {
        new_condition(
            AVAILABLE,
            "True",
            "MinimumReplicasAvailable",
            "Deployment has minimum availability.",
            now,
        )
    } else {
        let message = "Deployment does not have minimum availability.";
        new_condition(AVAILABLE, "False", "MinimumReplicasUnavailable", message, now)
    };
    set_condition(&mut status, condition);
    status
}

/// Returns true if every pod runs the current template and is available.
pub(super) fn is_complete(deployment: &Deployment, status: &DeploymentStatus) -> bool {
    let wanted = replicas(deployment);
    status.updated_replicas.unwrap_or(0) == wanted
        && status.replicas.unwrap_or(0) == wanted
        && status.available_replicas.unwrap_or(0) == wanted
        && status.observed_generation.unwrap_or(0) >= deployment.metadata.generation.unwrap_or(0)
}

fn has_progressed(old: &DeploymentStatus, new: &DeploymentStatus) -> bool {
    let outdated =
        |status: &DeploymentStatus| status.replicas.unwrap_or(0) - status.updated_replicas.unwrap_or(0);
    new.updated_replicas.unwrap_or(0) > old.updated_replicas.unwrap_or(0)
        || outdated(new) < outdated(old)
        || new.ready_replicas.unwrap_or(0) > old.ready_replicas.unwrap_or(0)
        || new.available_replicas.unwrap_or(0) > old.available_replicas.unwrap_or(0)
}

fn has_timed_out(deployment: &Deployment, status: &DeploymentStatus, now: Timestamp) -> bool {
    let (Some(seconds), Some(condition)) = (deadline(deployment), condition(status, PROGRESSING)) else {
        return false;
    };
    match condition.reason.as_deref() {
        Some(NEW_AVAILABLE) => false,
        Some(TIMED_OUT) => true,
        _ => condition
            .last_update_time
            .as_ref()
            .is_some_and(|from| now.duration_since(from.0).as_secs() > i64::from(seconds)),
    }
}

/// The status while a rollout goes on: counts, `Available`, `Progressing` and `ReplicaFailure`.
pub(super) fn rollout(
    deployment: &Deployment,
    sets: &[ReplicaSet],
    new: Option<&ReplicaSet>,
    now: Timestamp,
) -> DeploymentStatus {
    let previous = deployment.status.clone().unwrap_or_default();
    let mut status = calculate(deployment, sets, new, now);
    let current = condition(&previous, PROGRESSING);
    if !has_deadline(deployment) {
        remove_condition(&mut status, PROGRESSING);
    }
    let settled = status.replicas == status.updated_replicas
        && current.is_some_and(|condition| condition.reason.as_deref() == Some(NEW_AVAILABLE));
    if has_deadline(deployment) && !settled {
        let what = match new {
            Some(set) => format!("ReplicaSet \"{}\"", set.metadata.name.as_deref().unwrap_or_default()),
            None => format!("Deployment \"{}\"", deployment.metadata.name.as_deref().unwrap_or_default()),
        };
        if is_complete(deployment, &status) {
            let message = format!("{what} has successfully progressed.");
            set_condition(&mut status, new_condition(PROGRESSING, "True", NEW_AVAILABLE, message, now));
        } else if has_progressed(&previous, &status) {
            let message = format!("{what} is progressing.");
            let mut condition = new_condition(PROGRESSING, "True", "ReplicaSetUpdated", message, now);
            if let Some(current) = current
                && current.status == "True"
            {
                condition.last_transition_time = current.last_transition_time.clone();
            }
            // Replaced even if the reason is the same: its update time is when the deadline starts anew.
            remove_condition(&mut status, PROGRESSING);
            set_condition(&mut status, condition);
        } else if has_timed_out(deployment, &status, now) {
            let message = format!("{what} has timed out progressing.");
            set_condition(&mut status, new_condition(PROGRESSING, "False", TIMED_OUT, message, now));
        }
    }
    match replica_failure(sets, new) {
        Some(failure) => set_condition(&mut status, failure),
        None => remove_condition(&mut status, REPLICA_FAILURE),
    }
    status
}

/// The new ReplicaSet's failure if it has one, else any other's.
fn replica_failure(sets: &[ReplicaSet], new: Option<&ReplicaSet>) -> Option<DeploymentCondition> {
    let failure = |set: &ReplicaSet| {
        let conditions = set.status.as_ref().and_then(|status| status.conditions.as_ref());
        conditions.into_iter().flatten().find(|condition| condition.type_ == REPLICA_FAILURE).cloned()
    };
    let failure = new.and_then(failure).or_else(|| sets.iter().find_map(failure))?;
    Some(DeploymentCondition {
        type_: failure.type_,
        status: failure.status,
        reason: failure.reason,
        message: failure.message,
        last_update_time: failure.last_transition_time.clone(),
        last_transition_time: failure.last_transition_time,
    })
}

/// Time until the check of a deadline that may pass without any event.
pub(super) fn deadline_due(
    deployment: &Deployment,
    status: &DeploymentStatus,
    now: Timestamp,
) -> Option<Duration> {
    let seconds = deadline(deployment)?;
    let condition = condition(status, PROGRESSING)?;
    if is_complete(deployment, status) || condition.reason.as_deref() == Some(TIMED_OUT) {
        return None;
    }
    let from = condition.last_update_time.as_ref()?.0;
    let left = i64::from(seconds) - now.duration_since(from).as_secs();
    Some(Duration::from_secs(left.max(0).unsigned_abs() + 1))
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn now() -> Timestamp {
        "2024-01-01T12:00:00Z".parse().unwrap()
    }

    fn deployment(status: Value) -> Deployment {
        ferrite_json::from_value(json!({
            "metadata": {"name": "web", "generation": 2},
            "spec": {"replicas": 3, "progressDeadlineSeconds": 600, "selector": {}, "template": {}},
            "status": status
        }))
        .unwrap()
    }

    fn set(name: &str, spec: i32, actual: i32, available: i32) -> ReplicaSet {
        ferrite_json::from_value(json!({
            "metadata": {"name": name}, "spec": {"replicas": spec, "selector": {}},
            "status": {"replicas": actual, "readyReplicas": available, "availableReplicas": available}
        }))
        .unwrap()
    }

    fn progressing(reason: &str, updated: &str) -> Value {
        json!([{"type": "Progressing", "status": "True", "reason": reason,
                "lastUpdateTime": updated, "lastTransitionTime": "2024-01-01T00:00:00Z"}])
    }

    #[test]
    fn progress_is_told_by_upstreams_reasons() {
        let recent = "2024-01-01T11:59:00Z";
        let long_ago = "2024-01-01T11:00:00Z";
        for (what, status, sets, reason, value, message) in [
            (
                "complete",
                json!({"replicas": 3, "updatedReplicas": 3, "conditions": progressing("ReplicaSetUpdated", recent)}),
                vec![set("web-new", 3, 3, 3)],
                NEW_AVAILABLE,
                "True",
                "ReplicaSet \"web-new\" has successfully progressed.",
            ),
            (
                "one more updated",
                json!({"replicas": 3, "conditions": progressing("NewReplicaSetCreated", recent)}),
                vec![set("web-new", 1, 1, 0), set("web-old", 3, 3, 3)],
                "ReplicaSetUpdated",
                "True",
                "ReplicaSet \"web-new\" is progressing.",
            ),
            (
                "nothing happened for too long",
                json!({"replicas": 4, "updatedReplicas": 1, "readyReplicas": 3, "availableReplicas": 3,
                       "conditions": progressing("ReplicaSetUpdated", long_ago)}),
                vec![set("web-new", 1, 1, 0), set("web-old", 3, 3, 3)],
                TIMED_OUT,
                "False",
                "ReplicaSet \"web-new\" has timed out progressing.",
            ),
        ] {
            let status = rollout(&deployment(status), &sets, Some(&sets[0]), now());
            let condition = condition(&status, PROGRESSING).unwrap();
            assert_eq!(condition.reason.as_deref(), Some(reason), "{what}");
            assert_eq!(condition.status, value, "{what}");
            assert_eq!(condition.message.as_deref(), Some(message), "{what}");
        }
    }

    #[test]
    fn a_settled_rollout_does_not_time_out_when_pods_fail_later() {
        let deployment = deployment(json!({"replicas": 3, "updatedReplicas": 3, "availableReplicas": 3,
            "conditions": progressing(NEW_AVAILABLE, "2023-01-01T00:00:00Z")}));
        let sets = [set("web-new", 3, 3, 1)];
        let status = rollout(&deployment, &sets, Some(&sets[0]), now());
        assert_eq!(condition(&status, PROGRESSING).unwrap().reason.as_deref(), Some(NEW_AVAILABLE));
        assert_eq!(
            condition(&status, AVAILABLE).unwrap().reason.as_deref(),
            Some("MinimumReplicasUnavailable")
        );
        assert_eq!((status.unavailable_replicas, status.available_replicas), (Some(2), Some(1)));
    }

    #[test]
    fn the_deadline_is_looked_at_again_when_it_falls_due() {
        let stuck = deployment(json!({"replicas": 1,
            "conditions": progressing("ReplicaSetUpdated", "2024-01-01T11:55:00Z")}));
        assert_eq!(
            deadline_due(&stuck, stuck.status.as_ref().unwrap(), now()),
            Some(Duration::from_secs(301))
        );
        let late = deployment(json!({"conditions": progressing(TIMED_OUT, "2024-01-01T11:55:00Z")}));
        assert_eq!(deadline_due(&late, late.status.as_ref().unwrap(), now()), None);
    }
}
