//! Decides which nodes get a pod, which pods go, and the status.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetStatus};
use k8s_openapi::api::core::v1::Pod;

use super::placement::{Placement, target_node};
use super::placements::Verdicts;
use super::{GENERATION_LABEL, allows_surge, min_ready_seconds, template_generation};
use crate::history::HASH;
use crate::pods::{is_available, is_finished, is_ready, is_terminating, node_name, phase};

/// Why a pod is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// It failed: it is deleted with a growing delay.
    Failed,
    /// It ended, though daemons should not.
    Succeeded,
    /// The node should have no pod of the set, or fewer.
    Unwanted,
}

/// A pod to delete.
#[derive(Debug, Clone)]
pub(super) struct Doomed {
    pub(super) pod: Arc<Pod>,
    pub(super) node: String,
    pub(super) reason: Reason,
}

/// The changes to make.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Nodes that get a pod.
    pub(super) create: Vec<String>,
    pub(super) delete: Vec<Doomed>,
}

/// A DaemonSet with the nodes and pods of one moment.
pub(super) struct View<'a> {
    pub(super) set: &'a DaemonSet,
    /// The hash of the revision in force.
    pub(super) hash: &'a str,
    pub(super) now: Timestamp,
    generation: Option<String>,
    /// The verdict on each node.
    pub(super) nodes: &'a Verdicts,
    /// The pods of each node that has one or should have had one.
    pub(super) pods: BTreeMap<&'a str, Vec<&'a Arc<Pod>>>,
}

impl<'a> View<'a> {
    pub(super) fn new(
        set: &'a DaemonSet,
        hash: &'a str,
        nodes: &'a Verdicts,
        pods: &'a [Arc<Pod>],
        now: Timestamp,
    ) -> Self {
        let mut by_node: HashMap<&str, Vec<&Arc<Pod>>> = HashMap::new();
        for pod in pods {
            // A pod that ended and is being deleted holds nothing on its node: its successor need not wait.
            if is_finished(pod) && is_terminating(pod) {
                continue;
            }
            if let Some(node) = target_node(pod) {
                by_node.entry(node).or_default().push(pod);
            }
        }
        let pods = by_node.into_iter().collect();
        Self { set, hash, now, generation: template_generation(set), nodes, pods }
    }

    pub(super) fn is_available(&self, pod: &Pod) -> bool {
        is_available(pod, min_ready_seconds(self.set), self.now)
    }

    /// Returns true if the pod has the current revision.
    pub(super) fn is_updated(&self, pod: &Pod) -> bool {
        let label = |key: &str| pod.metadata.labels.as_ref().and_then(|labels| labels.get(key));
        label(HASH).is_some_and(|hash| hash == self.hash)
            || self.generation.is_some() && label(GENERATION_LABEL) == self.generation.as_ref()
    }

    /// The number of nodes that should have a pod.
    pub(super) fn desired(&self) -> i32 {
        count(self.nodes.values().filter(|placement| **placement == Placement::Run).count())
    }

    /// The changes that give each node the pods it should have, whatever their revision.
    pub(super) fn manage(&self) -> Plan {
        let mut plan = Plan::default();
        for (node, placement) in self.nodes {
            self.manage_node(node, *placement, &mut plan);
        }
        // The node of a pod that was never scheduled is gone: the scheduler cannot place it, and no kubelet ends it.
        for (node, pods) in self.pods.iter().filter(|(node, _)| !self.nodes.contains_key(**node)) {
            let unscheduled = pods.iter().filter(|pod| node_name(pod).is_none() && !is_terminating(pod));
            plan.delete.extend(unscheduled.map(|pod| doomed(pod, node, Reason::Unwanted)));
        }
        plan
    }

    fn manage_node(&self, node: &str, placement: Placement, plan: &mut Plan) {
        let Some(pods) = self.pods.get(node) else {
            if placement == Placement::Run {
                plan.create.push(node.to_owned());
            }
            return;
        };
        let live = pods.iter().copied().filter(|pod| !is_terminating(pod));
        if placement == Placement::Leave {
            plan.delete.extend(live.map(|pod| doomed(pod, node, Reason::Unwanted)));
            return;
        }
        let mut running = Vec::new();
        for pod in live {
            match phase(pod) {
                "Failed" => plan.delete.push(doomed(pod, node, Reason::Failed)),
                "Succeeded" => plan.delete.push(doomed(pod, node, Reason::Succeeded)),
                _ => running.push(pod),
            }
        }
        if running.is_empty() {
            // Without surge the node waits until its last pod is gone.
            if placement == Placement::Run && allows_surge(self.set) {
                plan.create.push(node.to_owned());
            }
            return;
        }
        running.sort_by(|a, b| scheduled_and_oldest_first(a, b));
        let surplus =
            if allows_surge(self.set) { self.surplus_of_surge(&running) } else { running.split_off(1) };
        plan.delete.extend(surplus.into_iter().map(|pod| doomed(pod, node, Reason::Unwanted)));
    }

    /// With surge a node keeps one old pod beside one new pod until the new one is available or the old one fails.
    fn surplus_of_surge(&self, running: &[&'a Arc<Pod>]) -> Vec<&'a Arc<Pod>> {
        if running.len() < 2 {
            return Vec::new();
        }
        let is_new = |pod: &Pod| {
            pod.metadata.labels.as_ref().and_then(|labels| labels.get(HASH)).map(String::as_str)
                == Some(self.hash)
        };
        let (new, old): (Vec<_>, Vec<_>) = running.iter().copied().partition(|pod| is_new(pod));
        let mut surplus: Vec<_> = new.iter().skip(1).chain(old.iter().skip(1)).copied().collect();
        if let (Some(new), Some(old)) = (new.first(), old.first())
            && (!is_ready(old) || self.is_available(new))
        {
            surplus.push(old);
        }
        surplus
    }

    /// The status to report. `observed` is false while earlier changes are not seen: the generation is then
    /// not yet acted on.
    pub(super) fn status(&self, observed: bool) -> DaemonSetStatus {
        let previous = self.set.status.clone().unwrap_or_default();
        let mut status = DaemonSetStatus {
            collision_count: previous.collision_count,
            conditions: previous.conditions,
            observed_generation: if observed {
                self.set.metadata.generation
            } else {
                previous.observed_generation
            },
            ..DaemonSetStatus::default()
        };
        let (mut available, mut updated) = (0, 0);
        for (node, placement) in self.nodes {
            // The pod that counts is the oldest that is scheduled.
            let pods = self.pods.get(&**node).into_iter().flatten();
            let pod = pods.min_by(|a, b| scheduled_and_oldest_first(a, b));
            if *placement != Placement::Run {
                status.number_misscheduled += i32::from(pod.is_some());
                continue;
            }
            status.desired_number_scheduled += 1;
            let Some(pod) = pod else { continue };
            status.current_number_scheduled += 1;
            if is_ready(pod) {
                status.number_ready += 1;
                available += i32::from(self.is_available(pod));
            }
            updated += i32::from(self.is_updated(pod));
        }
        // Zero is written as absence, as Go does.
        let some = |number: i32| (number != 0).then_some(number);
        status.number_available = some(available);
        status.number_unavailable = some(status.desired_number_scheduled - available);
        status.updated_number_scheduled = some(updated);
        status
    }
}

pub(super) fn count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

pub(super) fn doomed(pod: &Arc<Pod>, node: &str, reason: Reason) -> Doomed {
    Doomed { pod: pod.clone(), node: node.to_owned(), reason }
}

fn scheduled_and_oldest_first(a: &Pod, b: &Pod) -> Ordering {
    let created = |pod: &Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    (node_name(a).is_none(), created(a), &a.metadata.name).cmp(&(
        node_name(b).is_none(),
        created(b),
        &b.metadata.name,
    ))
}
