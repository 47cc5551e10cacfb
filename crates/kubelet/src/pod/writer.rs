//! Publishes a pod's status: the newest one only, one write at a time, and only changes.

use super::context::Context;
use super::model::PodId;
use crate::sources::LocalPods;
use ferrite_client::{Api, Backoff, Scope, is_conflict, is_not_found, message_of};
use ferrite_json::{Map, Value, json};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::{Patch, PatchParams};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Conditions this kubelet speaks for; all others belong to somebody else.
const OWNED: [&str; 7] = [
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    super::resize::PENDING,
    super::resize::IN_PROGRESS,
    super::restart_all::CONDITION,
];

#[derive(Clone, Default)]
pub(crate) struct Wanted {
    version: u64,
    /// The status, and the pod it was computed from.
    status: Option<(PodStatus, Arc<Pod>)>,
}

pub(crate) enum StatusWriter {
    Api {
        wanted: watch::Sender<Wanted>,
        written: watch::Receiver<u64>,
    },
    /// A static pod's status; its mirror shows it.
    Local {
        pods: Arc<LocalPods>,
        uid: String,
    },
}

impl StatusWriter {
    pub(crate) fn start(context: Arc<Context>, pod: PodId, scope: &Scope) -> Self {
        let (wanted, receiver) = watch::channel(Wanted::default());
        let (done, written) = watch::channel(0);
        scope.spawn(run(context, pod, receiver, done));
        Self::Api { wanted, written }
    }

    pub(crate) fn local(pods: Arc<LocalPods>, pod: &PodId) -> Self {
        Self::Local { pods, uid: pod.uid.clone() }
    }

    /// Publishes soon; a newer status replaces one that was not sent yet.
    pub(crate) fn publish(&self, status: PodStatus, pod: Arc<Pod>) {
        match self {
            Self::Api { wanted, .. } => wanted.send_modify(|w| {
                w.version += 1;
                w.status = Some((status, pod));
            }),
            Self::Local { pods, uid } => pods.publish(uid, status),
        }
    }

    /// Waits until the server has the last published status, or no longer has the pod.
    pub(crate) async fn flushed(&self) {
        let Self::Api { wanted, written } = self else { return };
        let version = wanted.borrow().version;
        let _ = written.clone().wait_for(|w| *w >= version).await;
    }
}

async fn run(
    context: Arc<Context>,
    pod: PodId,
    mut wanted: watch::Receiver<Wanted>,
    done: watch::Sender<u64>,
) {
    let api = Api::<Pod>::namespaced(context.client.clone(), &pod.namespace);
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10), 0.2);
    let mut answered: Option<Pod> = None;
    while wanted.changed().await.is_ok() {
        loop {
            let Wanted { version, status } = wanted.borrow_and_update().clone();
            let Some((status, seen)) = status else { break };
            let base = newest(&seen, answered.as_ref()).clone();
            match write(&api, &pod, status, base).await {
                Ok(answer) => {
                    answered = answer.or(answered);
                    backoff.reset();
                    let _ = done.send(version);
                    break;
                }
                Err(e) if is_not_found(&e) => {
                    let _ = done.send(version);
                    break;
                }
                Err(e) if is_conflict(&e) => match api.get_opt(&pod.name).await {
                    // The name belongs to another pod, or to none: nothing to report.
                    Ok(None) => {
                        let _ = done.send(version);
                        break;
                    }
                    Ok(Some(p)) if p.metadata.uid.as_deref() != Some(&pod.uid) => {
                        let _ = done.send(version);
                        break;
                    }
                    Ok(Some(p)) => answered = Some(p),
                    Err(e) => pause(&mut wanted, &mut backoff, &pod, &e).await,
                },
                Err(e) => pause(&mut wanted, &mut backoff, &pod, &e).await,
            }
        }
    }
}

async fn pause(
    wanted: &mut watch::Receiver<Wanted>,
    backoff: &mut Backoff,
    pod: &PodId,
    error: &kube::Error,
) {
    let delay = backoff.next_delay();
    tracing::warn!(%pod, error = %message_of(error), "could not publish the status; will try again");
    tokio::select! {
        () = tokio::time::sleep(delay) => {}
        _ = wanted.changed() => {}
    }
}

fn revision(pod: &Pod) -> u64 {
    pod.metadata.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(0)
}

fn newest<'a>(seen: &'a Pod, answered: Option<&'a Pod>) -> &'a Pod {
    match answered {
        Some(answered) if revision(answered) > revision(seen) => answered,
        _ => seen,
    }
}

/// Sends the difference. The revision it was computed against goes with it, so that nobody's condition is
/// lost when another writer was faster.
pub(crate) async fn write(
    api: &Api<Pod>,
    id: &PodId,
    mut status: PodStatus,
    base: Pod,
) -> kube::Result<Option<Pod>> {
    let before = base.status.clone().unwrap_or_default();
    keep_foreign_conditions(&mut status, &before);
    // Others say which claims a pod has; a node may not change it.
    status.resource_claim_statuses.clone_from(&before.resource_claim_statuses);
    status.extended_resource_claim_status.clone_from(&before.extended_resource_claim_status);
    let to_value = |s: &PodStatus| ferrite_json::to_value(s).unwrap_or(Value::Null);
    let Some(difference) = merge_difference(&to_value(&before), &to_value(&status)) else { return Ok(None) };
    let patch = json!({
        "metadata": {"uid": id.uid, "resourceVersion": base.metadata.resource_version},
        "status": difference,
    });
    api.patch_status(&id.name, &PatchParams::default(), &Patch::Merge(patch)).await.map(Some)
}

fn keep_foreign_conditions(status: &mut PodStatus, before: &PodStatus) {
    let conditions = status.conditions.get_or_insert_default();
    for theirs in before.conditions.iter().flatten().filter(|c| !OWNED.contains(&c.type_.as_str())) {
        match conditions.iter_mut().find(|c| c.type_ == theirs.type_) {
            Some(slot) => *slot = theirs.clone(),
            None => conditions.push(theirs.clone()),
        }
    }
}

/// The JSON merge patch from `before` to `after`, or nothing when they are equal.
pub(crate) fn merge_difference(before: &Value, after: &Value) -> Option<Value> {
    let (Value::Object(old), Value::Object(new)) = (before, after) else {
        return (before != after).then(|| after.clone());
    };
    let mut patch = Map::new();
    for (key, value) in new {
        match old.get(key) {
            None if value.is_null() => {}
            None => {
                patch.insert(key.clone(), value.clone());
            }
            Some(known) => {
                if let Some(difference) = merge_difference(known, value) {
                    patch.insert(key.clone(), difference);
                }
            }
        }
    }
    for key in old.keys().filter(|k| !new.contains_key(*k)) {
        patch.insert(key.clone(), Value::Null);
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_merge_patches() {
        for (before, after, patch) in [
            (json!({"a": 1}), json!({"a": 1}), None),
            (json!({"a": 1}), json!({"a": 2, "b": 3}), Some(json!({"a": 2, "b": 3}))),
            (json!({"a": 1, "b": 2}), json!({"a": 1}), Some(json!({"b": null}))),
            (json!({"l": [1, 2]}), json!({"l": [1]}), Some(json!({"l": [1]}))),
            (json!({"o": {"x": 1, "y": 2}}), json!({"o": {"x": 1}}), Some(json!({"o": {"y": null}}))),
        ] {
            assert_eq!(merge_difference(&before, &after), patch);
        }
    }
}
