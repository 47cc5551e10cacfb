//! Brings cache and queue up to date with the API.

use std::sync::{Arc, PoisonError};

use ferrite_client::Change;
use k8s_openapi::api::core::v1::{Node, Pod};
use tokio::time::Instant;

use super::Scheduler;
use crate::framework::ClusterEvent;
use crate::snapshot::PodInfo;

fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

fn nominated_node(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.nominated_node_name.as_deref().filter(|name| !name.is_empty())
}

fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Heartbeats change nothing that scheduling depends on.
fn differs(old: &Node, new: &Node) -> bool {
    let allocatable = |node: &Node| node.status.as_ref().and_then(|status| status.allocatable.clone());
    let features = |node: &Node| node.status.as_ref().and_then(|status| status.declared_features.clone());
    old.metadata.labels != new.metadata.labels
        || old.spec != new.spec
        || allocatable(old) != allocatable(new)
        || features(old) != features(new)
}

impl Scheduler {
    pub(super) fn watch(self: &Arc<Self>) {
        let scheduler = self.clone();
        self.handle.send_events_to(move |event| scheduler.happened(event));
        let scheduler = self.clone();
        self.nodes.subscribe(move |change| scheduler.node_changed(change));
        let scheduler = self.clone();
        self.pods.subscribe(move |change| scheduler.pod_changed(change));
    }

    fn node_changed(&self, change: &Change<Node>) {
        match change {
            Change::Added(node) => {
                self.cache().set_node(node.clone());
                self.happened(ClusterEvent::NodeAdded(node.clone()));
            }
            Change::Updated { old, new } => {
                self.cache().set_node(new.clone());
                if differs(old, new) {
                    self.happened(ClusterEvent::NodeUpdated { old: old.get().clone(), new: new.clone() });
                }
            }
            Change::Deleted(node) => {
                self.cache().remove_node(node.metadata.name.as_deref().unwrap_or_default());
                self.happened(ClusterEvent::NodeDeleted(node.clone()));
            }
        }
    }

    fn pod_changed(&self, change: &Change<Pod>) {
        let object = change.object();
        let pod = Arc::new(self.shapes.lock().unwrap_or_else(PoisonError::into_inner).pod(object));
        let gone = matches!(change, Change::Deleted(_)) || is_finished(object);
        self.track(change, pod.clone(), gone);
        // After the cache: a preemptor that goes on finds the room.
        if gone || pod.is_terminating() {
            self.departures.seen(&pod.key);
        }
    }

    /// Brings cache and queue up to date with one pod.
    fn track(&self, change: &Change<Pod>, pod: Arc<PodInfo>, gone: bool) {
        let object = change.object();
        match node_name(object) {
            _ if gone => {
                self.queue().remove(&pod.key);
                let held_room = {
                    let mut cache = self.cache();
                    let was_nominated = cache.remove_nomination(&pod.key);
                    let was_placed = cache.is_placed(&pod.key);
                    cache.remove_pod(&pod.key);
                    was_placed || was_nominated
                };
                self.stop_binding(&pod);
                if held_room {
                    self.happened(ClusterEvent::AssignedPodDeleted(pod));
                }
            }
            Some(node) => {
                self.queue().remove(&pod.key);
                let known = {
                    let mut cache = self.cache();
                    cache.remove_nomination(&pod.key);
                    let known = cache.confirmed(&pod.key).cloned();
                    if known.as_ref().is_some_and(|known| known.is_same(&pod)) {
                        // Most conditions are not the scheduler's concern, and what it knows of the node stays true.
                        return;
                    }
                    cache.set_pod(pod.clone(), node);
                    known
                };
                let Some(old) = known else {
                    return self.happened(ClusterEvent::AssignedPodAdded(pod));
                };
                let has_shrunk = pod.requests.has_less_than(&old.requests);
                if old.labels() != pod.labels() {
                    self.happened(ClusterEvent::AssignedPodRelabelled { old, new: pod.clone() });
                }
                if has_shrunk {
                    // Room that a resize gives back is room that a deletion gives back.
                    self.happened(ClusterEvent::AssignedPodDeleted(pod));
                }
            }
            None if self.profile_of(&pod).is_none() => {}
            None if pod.is_terminating() => {
                if self.queue().remove(&pod.key) || matches!(change, Change::Added(_)) {
                    self.report_skipped(&pod);
                }
                let held_room = {
                    let mut cache = self.cache();
                    let was_assumed = cache.forget(&pod.key);
                    cache.remove_nomination(&pod.key) || was_assumed
                };
                self.stop_binding(&pod);
                if held_room {
                    self.happened(ClusterEvent::AssignedPodDeleted(pod));
                }
            }
            None => {
                let left = self.nomination_changed(change, &pod);
                self.queue().set(pod.clone(), Instant::now());
                if left {
                    // The room that was kept for it on its former node is free.
                    self.happened(ClusterEvent::AssignedPodDeleted(pod));
                }
                self.wake.notify_one();
            }
        }
    }

    /// Follows the nomination in the pod's status. True if the pod left the node it was nominated to.
    fn nomination_changed(&self, change: &Change<Pod>, pod: &Arc<PodInfo>) -> bool {
        let old = match change {
            Change::Updated { old, .. } if old.may_have("nominatedNodeName") => nominated_node(old),
            _ => None,
        };
        let new = nominated_node(change.object());
        let mut cache = self.cache();
        // A pod that is assumed on a node holds its room there.
        if cache.is_placed(&pod.key) {
            return false;
        }
        match new {
            Some(node) => cache.nominate(pod.clone(), node),
            None if old.is_some() => {
                cache.remove_nomination(&pod.key);
            }
            // The status may lag behind a nomination that was just made.
            None => {
                if let Some(node) = cache.nomination_of(&pod.key).cloned() {
                    cache.nominate(pod.clone(), &node);
                }
            }
        }
        old.is_some() && old != new
    }

    /// A pod that is gone, or about to go, is not bound: nobody waits for its permission or its volumes any longer.
    pub(super) fn stop_binding(&self, pod: &PodInfo) {
        let waiting = self.handle.waiting_pods.get(&pod.key);
        if let Some(waiting) = waiting.filter(|waiting| waiting.pod.uid == pod.uid) {
            waiting.reject("", "the pod was deleted");
        }
        self.pre_binds.cancel(pod, "the pod was deleted");
    }
}
