//! The backoff of a Job before it replaces failed pods.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use crate::pods::condition;

/// The delay after the first failure; it doubles with each further one.
const FIRST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(600);

/// The failures of a Job's pods since the last success.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct BackoffRecord {
    failures: u32,
    last_failure: Option<Timestamp>,
}

impl BackoffRecord {
    /// The record after these pods finished, too.
    pub(super) fn after(&self, succeeded: &[Arc<Pod>], failed: &[Arc<Pod>]) -> Self {
        let last_success = succeeded.iter().map(|pod| finished_at(pod)).max();
        let failures = failed.iter().map(|pod| finished_at(pod));
        let counted: Vec<Timestamp> = match last_success {
            None => failures.collect(),
            Some(success) => failures.filter(|failure| *failure > success).collect(),
        };
        let number = u32::try_from(counted.len()).unwrap_or(u32::MAX);
        let last = counted.into_iter().max();
        match last_success {
            None => Self {
                failures: self.failures.saturating_add(number),
                last_failure: last.or(self.last_failure),
            },
            Some(_) => Self { failures: number, last_failure: last },
        }
    }

    /// Remaining delay at `now`.
    pub(super) fn remaining(&self, now: Timestamp) -> Duration {
        self.last_failure.map_or(Duration::ZERO, |last| remaining(self.failures, last, now))
    }
}

/// Remaining delay at `now` after `failures` failures, the last of them at `last`.
pub(super) fn remaining(failures: u32, last: Timestamp, now: Timestamp) -> Duration {
    if failures == 0 {
        return Duration::ZERO;
    }
    let factor = 1u32.checked_shl(failures - 1).unwrap_or(u32::MAX);
    let delay = FIRST.saturating_mul(factor).min(LONGEST);
    let delay = SignedDuration::try_from(delay).unwrap_or(SignedDuration::ZERO);
    Duration::try_from(delay - now.duration_since(last)).unwrap_or(Duration::ZERO)
}

/// When a pod finished, from the best witness there is.
pub(super) fn finished_at(pod: &Pod) -> Timestamp {
    containers_finished_at(pod)
        .or_else(|| {
            let ready = condition(pod, "Ready").filter(|condition| condition.status == "False")?;
            Some(ready.last_transition_time.as_ref()?.0)
        })
        .or_else(|| {
            let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
            let deleted = pod.metadata.deletion_timestamp.as_ref()?.0;
            deleted.checked_sub(SignedDuration::from_secs(grace)).ok()
        })
        .or_else(|| Some(pod.metadata.creation_timestamp.as_ref()?.0))
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

/// When the last container ended; none if one has not, or does not say. Sidecars end after the others.
fn containers_finished_at(pod: &Pod) -> Option<Timestamp> {
    let (spec, status) = (pod.spec.as_ref()?, pod.status.as_ref()?);
    let is_sidecar = |name: &str| {
        let mut containers = spec.init_containers.iter().flatten();
        containers.any(|c| c.name == name && c.restart_policy.as_deref() == Some("Always"))
    };
    let sidecars =
        status.init_container_statuses.iter().flatten().filter(|container| is_sidecar(&container.name));
    let ended = |container: &ContainerStatus| {
        Some(container.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref()?.0)
    };
    let containers = status.container_statuses.iter().flatten().chain(sidecars);
    let times: Option<Vec<Timestamp>> = containers.map(ended).collect();
    times?.into_iter().max()
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).unwrap()
    }

    fn pod(value: &Value) -> Arc<Pod> {
        Arc::new(ferrite_json::from_value(value.clone()).unwrap())
    }

    fn ended(second: i64) -> Arc<Pod> {
        pod(&json!({"metadata": {}, "spec": {"containers": []}, "status": {"containerStatuses": [
            {"name": "a", "ready": false, "restartCount": 0, "image": "", "imageID": "",
             "state": {"terminated": {"exitCode": 1, "finishedAt": time(second)}}}]}}))
    }

    #[test]
    fn delays_double_up_to_ten_minutes_and_a_success_resets_them() {
        for (failures, seconds) in [(0, 0), (1, 10), (2, 20), (3, 40), (6, 320), (7, 600), (99, 600)] {
            assert_eq!(remaining(failures, time(0), time(0)).as_secs(), seconds, "{failures}");
        }
        assert_eq!(remaining(1, time(0), time(4)).as_secs(), 6);
        assert_eq!(remaining(1, time(0), time(11)).as_secs(), 0);

        let first = BackoffRecord::default().after(&[], &[ended(0), ended(5)]);
        assert_eq!(first, BackoffRecord { failures: 2, last_failure: Some(time(5)) });
        assert_eq!(first.after(&[], &[]), first);
        assert_eq!(first.after(&[], &[ended(9)]).failures, 3);
        assert_eq!(first.after(&[ended(6)], &[]), BackoffRecord::default());
        let mixed = first.after(&[ended(6)], &[ended(4), ended(6), ended(8), ended(7)]);
        assert_eq!(mixed, BackoffRecord { failures: 2, last_failure: Some(time(8)) });
    }

    #[test]
    fn the_end_of_a_pod_is_taken_from_the_best_witness() {
        let base = json!({
            "metadata": {"creationTimestamp": time(1), "deletionTimestamp": time(50), "deletionGracePeriodSeconds": 30},
            "spec": {"containers": [], "initContainers": [{"name": "side", "restartPolicy": "Always"}, {"name": "init"}]},
            "status": {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": time(10)}],
                "containerStatuses": [
                    {"name": "a", "ready": false, "restartCount": 0, "image": "", "imageID": "",
                     "state": {"terminated": {"exitCode": 0, "finishedAt": time(3)}}}],
                "initContainerStatuses": [
                    {"name": "side", "ready": false, "restartCount": 0, "image": "", "imageID": "",
                     "state": {"terminated": {"exitCode": 0, "finishedAt": time(5)}}},
                    {"name": "init", "ready": false, "restartCount": 0, "image": "", "imageID": "",
                     "state": {"terminated": {"exitCode": 0, "finishedAt": time(99)}}}]}});
        assert_eq!(finished_at(&pod(&base)), time(5));
        let mut value = base;
        value["status"]["containerStatuses"][0]["state"] = json!({"running": {}});
        assert_eq!(finished_at(&pod(&value)), time(10));
        value["status"]["conditions"] = json!([]);
        assert_eq!(finished_at(&pod(&value)), time(20));
        value["metadata"] = json!({"creationTimestamp": time(1)});
        assert_eq!(finished_at(&pod(&value)), time(1));
    }
}
