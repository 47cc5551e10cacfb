//! Takes back the announcement that a pod is about to be disrupted, if nothing follows.

use std::time::Duration;

use ferrite_client::{Api, Change, Informer, ObjectKey, is_conflict, is_not_found};
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{Patch, PatchParams};

use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{condition, is_finished, is_terminating};

const NAME: &str = "disruption-controller-stale-conditions";
const CONDITION: &str = "DisruptionTarget";
/// A pod that was announced and is not deleted so long after stays.
const STALE_AFTER: Duration = Duration::from_secs(120);

pub(super) fn start(context: &Context) {
    let pods: Informer<Pod> = context.informers.get();
    let client = context.client.clone();
    context
        .controller(NAME)
        .watches(&pods, |change, queue| {
            let (Change::Added(pod) | Change::Updated { new: pod, .. }) = change else { return };
            if stale_in(pod, Timestamp::now()).is_some() {
                queue.add(ObjectKey::of(&**pod));
            }
        })
        .run(move |key| {
            let pod = pods.get(&key);
            let client = client.clone();
            async move {
                let Some(pod) = pod else { return Ok(None) };
                match stale_in(&pod, Timestamp::now()) {
                    None => Ok(None),
                    Some(left) if !left.is_zero() => Ok(Some(left)),
                    Some(_) => take_back(&client, &key, &pod).await.map(|()| None),
                }
            }
        });
}

/// The time until the pod's announcement is stale; nothing if it has none that can be. The kubelet's never is: it may take
/// any time to end the pod.
fn stale_in(pod: &Pod, now: Timestamp) -> Option<Duration> {
    let condition = condition(pod, CONDITION).filter(|condition| condition.status == "True")?;
    if is_terminating(pod) || is_finished(pod) || condition.reason.as_deref() == Some("TerminationByKubelet")
    {
        return None;
    }
    let since = condition.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let elapsed = now.duration_since(since);
    Some(match elapsed.is_negative() {
        true => STALE_AFTER,
        false => STALE_AFTER.saturating_sub(elapsed.unsigned_abs()),
    })
}

async fn take_back(client: &Client, key: &ObjectKey, pod: &Pod) -> Result<(), SyncError> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &key.namespace);
    // The version makes sure that nobody announced anything since.
    let patch = json!({
        "metadata": {"uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version},
        "status": {"conditions": [{"type": CONDITION, "status": "False", "reason": null, "message": null,
            "observedGeneration": pod.metadata.generation, "lastTransitionTime": Time(Timestamp::now())}]},
    });
    match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        Ok(_) => Ok(()),
        // A change of the pod wakes us again.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
        Err(error) => Err(error).during(|| format!("take back the disruption of pod {key}")),
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    #[test]
    fn announcements_get_stale_after_two_minutes() {
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        let target = |status: &str, since: &str, reason: &str| json!([{"type": CONDITION, "status": status, "lastTransitionTime": since, "reason": reason}]);
        let pod = |conditions: Value, phase: &str, deleted: bool| -> Pod {
            let mut pod =
                json!({"metadata": {"name": "p"}, "status": {"phase": phase, "conditions": conditions}});
            if deleted {
                pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:09:00Z");
            }
            ferrite_json::from_value(pod).unwrap()
        };
        let (old, fresh) = ("2026-01-01T00:08:00Z", "2026-01-01T00:09:30Z");
        for (what, pod, expected) in [
            ("no condition", pod(json!([]), "Running", false), None),
            ("stale", pod(target("True", old, "PreemptionByScheduler"), "Running", false), Some(0)),
            ("fresh", pod(target("True", fresh, "EvictionByEvictionAPI"), "Running", false), Some(90)),
            ("of the future", pod(target("True", "2026-01-01T00:11:00Z", ""), "Running", false), Some(120)),
            ("taken back", pod(target("False", old, ""), "Running", false), None),
            ("the kubelet's", pod(target("True", old, "TerminationByKubelet"), "Running", false), None),
            ("finished", pod(target("True", old, ""), "Failed", false), None),
            ("being deleted", pod(target("True", old, ""), "Running", true), None),
        ] {
            assert_eq!(stale_in(&pod, now), expected.map(Duration::from_secs), "{what}");
        }
    }
}
