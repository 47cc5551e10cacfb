//! Watches DaemonSets, their pods and revisions, and nodes, and wakes the DaemonSet concerned.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Change, EventRecorder, Informer, ObjectKey, WorkQueue, controller_of};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::core::Selector;

use super::failed_pods::FailedPods;
use super::min_ready_seconds;
use super::placement::{Eligibility, Placement};
use super::placements::Placements;
use crate::Context;
use crate::error::SyncError;
use crate::history::History;
use crate::pod_owners::{PodOwner, PodOwners};
use crate::pods::{self, BY_NODE};

const NAME: &str = "daemonset-controller";

impl PodOwner for DaemonSet {
    const CLOCK_SLACK: Duration = Duration::from_secs(1);

    fn selector(&self) -> Option<Selector> {
        self.spec.as_ref()?.selector.clone().try_into().ok()
    }

    fn min_ready_seconds(&self) -> i32 {
        min_ready_seconds(self)
    }

    fn joins_changes(&self) -> bool {
        true
    }
}

pub(super) struct DaemonSetController {
    pub(super) client: Client,
    pub(super) sets: PodOwners<DaemonSet>,
    pub(super) nodes: Informer<Node>,
    pub(super) placements: Placements,
    pub(super) history: History,
    pub(super) failed: FailedPods,
    pub(super) recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let controller = Arc::new(DaemonSetController {
        client: context.client.clone(),
        sets: PodOwners::new(context, kit.queue().clone()),
        nodes: context.informers.get(),
        placements: Placements::default(),
        history: History::new(context),
        failed: FailedPods::new(),
        recorder: context.events.recorder(NAME, None),
    });
    controller.sets.pods.add_index(BY_NODE, pods::node_index);
    let [by_set, by_pod, by_revision, by_node] = std::array::from_fn(|_| controller.clone());
    kit.about(&controller.sets.owners)
        .watches(&controller.sets.owners, move |change, _| by_set.set_changed(change))
        .watches(&controller.sets.pods, move |change, _| by_pod.sets.pod_changed(change))
        .watches(controller.history.informer(), move |change, _| by_revision.revision_changed(change))
        .reads(&controller.nodes)
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
    // Nodes have a queue of their own: a change of one concerns few of the DaemonSets, which a worker finds out.
    context
        .controller(NAME)
        .watches(&controller.nodes, move |change, queue| by_node.node_changed(change, queue))
        .reads(&controller.sets.owners)
        .reads(&controller.sets.pods)
        .run_with(controller.clone(), |controller, key| async move {
            controller.sync_node(&key);
            Ok::<_, SyncError>(None)
        });
}

impl DaemonSetController {
    fn set_changed(&self, change: &Change<DaemonSet>) {
        if let Change::Deleted(set) = change {
            self.placements.forget(set);
        }
        self.sets.owner_changed(change);
    }

    fn revision_changed(&self, change: &Change<ControllerRevision>) {
        let wake = |revision: &ControllerRevision| {
            let owner = self.sets.owner_of(&revision.metadata);
            owner.into_iter().for_each(|set| self.sets.queue.add(ObjectKey::of(&*set)));
        };
        match change {
            // A revision that has its owner was made by this controller, which knows of it.
            Change::Added(revision) => self.sets.wake_adopters(&revision.metadata),
            Change::Updated { old, new } => {
                if controller_of(&old.metadata) != controller_of(&new.metadata) {
                    wake(old);
                }
                wake(new);
                self.sets.wake_adopters(&new.metadata);
            }
            Change::Deleted(revision) => wake(revision),
        }
    }

    fn node_changed(&self, change: &Change<Node>, queue: &WorkQueue<ObjectKey>) {
        match change {
            Change::Updated { old, new } => {
                let taints = |node: &Node| node.spec.as_ref().and_then(|spec| spec.taints.clone());
                if old.metadata.labels != new.metadata.labels || taints(old) != taints(new) {
                    self.placements.node_changed(new, &self.sets.owners.list());
                    queue.add(ObjectKey::of(&**new));
                }
            }
            Change::Added(node) => {
                self.placements.node_changed(node, &self.sets.owners.list());
                queue.add(ObjectKey::of(&**node));
            }
            // The status of the sets that ran there counts one node less.
            Change::Deleted(node) => {
                self.placements.node_deleted(node.metadata.name.as_deref().unwrap_or_default());
                for set in self.sets.owners.list() {
                    if Eligibility::new(&set).of(node) != Placement::Leave {
                        self.sets.queue.add(ObjectKey::of(&*set));
                    }
                }
            }
        }
    }

    /// Wakes the DaemonSets that want a pod on the node and have none, or have one there and should not.
    fn sync_node(&self, key: &ObjectKey) {
        let Some(node) = self.nodes.get(key) else { return };
        let pods = self.sets.pods.by_index(BY_NODE, &key.name);
        for set in self.sets.owners.list() {
            let uid = set.metadata.uid.as_ref();
            let has_pod = pods
                .iter()
                .any(|pod| controller_of(&pod.metadata).is_some_and(|owner| Some(&owner.uid) == uid));
            let misscheduled = set.status.as_ref().is_some_and(|status| status.number_misscheduled > 0);
            let concerned = match Eligibility::new(&set).of(&node) {
                Placement::Run => !has_pod || misscheduled,
                Placement::Stay => has_pod && misscheduled,
                Placement::Leave => has_pod,
            };
            if concerned {
                self.sets.queue.add(ObjectKey::of(&*set));
            }
        }
    }
}
