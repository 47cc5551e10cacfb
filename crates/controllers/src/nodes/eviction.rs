//! Removes pods from nodes whose NoExecute taints they do not tolerate, or no longer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_client::{Api, Change, EventRecorder, EventType, Informer, ObjectKey, tolerates};
use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};
use kube::Client;
use tokio::time::Instant;

use super::taints::NO_EXECUTE;
use crate::Context;
use crate::error::SyncError;
use crate::evict::{self, Disruption};
use crate::pods::{self, BY_NODE, is_terminating, node_name};

const NAME: &str = "taint-eviction-controller";
const DISRUPTION: Disruption = Disruption {
    reason: "DeletionByTaintManager",
    message: "Taint manager: deleting due to NoExecute taint",
};

struct Evictor {
    client: Client,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    /// Since when a pod's time runs; later changes never put the end off.
    running: Mutex<HashMap<ObjectKey, Instant>>,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(Evictor {
        client: context.client.clone(),
        nodes: context.informers.get(),
        pods: context.informers.get(),
        running: Mutex::default(),
        recorder: context.events.recorder("taint-eviction-controller", None),
    });
    controller.pods.add_index(BY_NODE, pods::node_index);
    let known = controller.pods.clone();
    context
        .controller(NAME)
        .watches(&controller.pods, |change, queue| {
            let relevant = match change {
                Change::Updated { old, new } => {
                    node_name(old) != node_name(new) || tolerations(old) != tolerations(new)
                }
                _ => true,
            };
            if relevant && node_name(change.object()).is_some() {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        .watches(&controller.nodes, move |change, queue| {
            let (before, after) = match change {
                Change::Added(node) => (Vec::new(), no_execute(node)),
                Change::Updated { old, new } => (no_execute(old), no_execute(new)),
                Change::Deleted(_) => return,
            };
            if before != after {
                let name = change.object().metadata.name.as_deref().unwrap_or_default();
                for pod in known.by_index(BY_NODE, name) {
                    queue.add(ObjectKey::of(&*pod));
                }
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

fn no_execute(node: &Node) -> Vec<Taint> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    taints.iter().filter(|taint| taint.effect == NO_EXECUTE).cloned().collect()
}

fn tolerations(pod: &Pod) -> &[Toleration] {
    pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default()
}

/// The time that a pod may stay.
#[derive(Debug, PartialEq, Eq)]
enum Stay {
    ForEver,
    For(Duration),
    Leave,
}

fn decide(taints: &[Taint], tolerations: &[Toleration]) -> Stay {
    let mut shortest: Option<Duration> = None;
    for taint in taints {
        let matching: Vec<_> = tolerations.iter().filter(|toleration| tolerates(toleration, taint)).collect();
        if matching.is_empty() {
            return Stay::Leave;
        }
        for seconds in matching.iter().filter_map(|toleration| toleration.toleration_seconds) {
            if seconds <= 0 {
                return Stay::Leave;
            }
            let time = Duration::from_secs(seconds.unsigned_abs());
            shortest = Some(shortest.map_or(time, |known| known.min(time)));
        }
    }
    shortest.map_or(Stay::ForEver, Stay::For)
}

impl Evictor {
    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let pod = self.pods.get(&key).filter(|pod| !is_terminating(pod));
        let Some(pod) = pod else {
            self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
            return Ok(None);
        };
        let node = node_name(&pod).and_then(|name| self.nodes.get(&ObjectKey::cluster(name)));
        let taints = node.map(|node| no_execute(&node)).unwrap_or_default();
        let left = match decide(&taints, tolerations(&pod)) {
            Stay::ForEver => {
                let was_running =
                    self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&key).is_some();
                if was_running {
                    let message = format!("Cancelling deletion of Pod {key}");
                    self.recorder.event_for(&*pod, EventType::Normal, "TaintManagerEviction", message);
                }
                return Ok(None);
            }
            Stay::For(time) => {
                let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
                let since = *running.entry(key.clone()).or_insert_with(Instant::now);
                time.saturating_sub(since.elapsed())
            }
            Stay::Leave => Duration::ZERO,
        };
        if left.is_zero() { self.evict(&key, &pod).await.map(|()| None) } else { Ok(Some(left)) }
    }

    async fn evict(&self, key: &ObjectKey, pod: &Pod) -> Result<(), SyncError> {
        let message = format!("Marking for deletion Pod {key}");
        self.recorder.event_for(pod, EventType::Normal, "TaintManagerEviction", message);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        evict::mark_and_delete(&api, key, pod, &DISRUPTION).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn the_least_tolerant_toleration_decides() {
        let taint = |key: &str| Taint { key: key.into(), effect: NO_EXECUTE.into(), ..Taint::default() };
        let for_seconds = |key: &str, seconds: Option<i64>| -> Toleration {
            ferrite_json::from_value(json!({"key": key, "operator": "Exists", "effect": "NoExecute",
                                          "tolerationSeconds": seconds}))
            .unwrap()
        };
        for (what, taints, tolerations, expected) in [
            ("no taints", vec![], vec![], Stay::ForEver),
            ("not tolerated", vec![taint("a")], vec![], Stay::Leave),
            ("tolerated for ever", vec![taint("a")], vec![for_seconds("a", None)], Stay::ForEver),
            (
                "tolerated for a time",
                vec![taint("a")],
                vec![for_seconds("a", Some(300))],
                Stay::For(Duration::from_secs(300)),
            ),
            ("not at all", vec![taint("a")], vec![for_seconds("a", Some(0))], Stay::Leave),
            (
                "the shortest",
                vec![taint("a"), taint("b")],
                vec![for_seconds("a", Some(9)), for_seconds("b", Some(3)), for_seconds("b", None)],
                Stay::For(Duration::from_secs(3)),
            ),
            (
                "one of two not tolerated",
                vec![taint("a"), taint("b")],
                vec![for_seconds("a", None)],
                Stay::Leave,
            ),
        ] {
            assert_eq!(decide(&taints, &tolerations), expected, "{what}");
        }
    }
}
