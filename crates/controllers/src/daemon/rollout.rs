//! Replaces pods of older revisions, node by node.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::decide::{Plan, Reason, View, count, doomed};
use super::placement::Placement;
use super::{max_surge, max_unavailable};
use crate::pods::is_terminating;

/// The live pods of one node.
enum OnNode<'a> {
    None,
    Old(&'a Arc<Pod>),
    New(&'a Arc<Pod>),
    Both {
        old: &'a Arc<Pod>,
        new: &'a Arc<Pod>,
    },
    /// Several of one revision: first the surplus must go.
    Surplus,
}

impl<'a> View<'a> {
    /// The changes that bring nodes to the revision in force, within the limits of the update strategy. They rely on
    /// [`manage`](View::manage) to create the pods of nodes without one.
    pub(super) fn rolling_update(&self) -> Plan {
        let desired = self.desired();
        let surge = max_surge(self.set, desired);
        let mut unavailable = max_unavailable(self.set, desired);
        // An update that may do neither would never move.
        if surge == 0 && unavailable == 0 && desired > 0 {
            unavailable = 1;
        }
        if surge == 0 { self.replace(unavailable) } else { self.surge(surge, desired) }
    }

    fn on_node(&self, pods: &[&'a Arc<Pod>]) -> OnNode<'a> {
        let live = pods.iter().copied().filter(|pod| !is_terminating(pod));
        let (new, old): (Vec<_>, Vec<_>) = live.partition(|pod| self.is_updated(pod));
        match (&new[..], &old[..]) {
            ([], []) => OnNode::None,
            ([], [old]) => OnNode::Old(old),
            ([new], []) => OnNode::New(new),
            ([new], [old]) => OnNode::Both { old, new },
            _ => OnNode::Surplus,
        }
    }

    /// Deletes old pods while at most `max_unavailable` nodes are without an available pod. An old pod that is not
    /// available takes nothing away when it goes, so it always does.
    fn replace(&self, max_unavailable: i32) -> Plan {
        let mut plan = Plan::default();
        let mut candidates = Vec::new();
        let empty = self
            .nodes
            .iter()
            .filter(|(node, placement)| **placement == Placement::Run && !self.pods.contains_key(*node));
        let mut unavailable = count(empty.count());
        for (node, pods) in &self.pods {
            match self.on_node(pods) {
                OnNode::None | OnNode::Both { .. } | OnNode::Surplus => unavailable += 1,
                OnNode::New(pod) => unavailable += i32::from(!self.is_available(pod)),
                OnNode::Old(pod) if self.is_available(pod) => {
                    candidates.push(doomed(pod, node, Reason::Unwanted));
                }
                OnNode::Old(pod) => {
                    unavailable += 1;
                    plan.delete.push(doomed(pod, node, Reason::Unwanted));
                }
            }
        }
        let allowed = usize::try_from(max_unavailable - unavailable).unwrap_or(0);
        plan.delete.extend(candidates.into_iter().take(allowed));
        plan
    }

    /// Creates new pods beside old ones on at most `max_surge` nodes, and deletes an old pod when the new one is
    /// available. Where the old pod is not available, the new one comes at once.
    fn surge(&self, max_surge: i32, desired: i32) -> Plan {
        let mut plan = Plan::default();
        let (mut candidates, mut misplaced) = (Vec::new(), Vec::new());
        let (mut surging, mut available) = (0, 0);
        for (node, pods) in &self.pods {
            let should_run = self.nodes.get(node) == Some(&Placement::Run);
            match self.on_node(pods) {
                OnNode::Surplus => surging += 1,
                OnNode::None => {}
                OnNode::New(pod) => available += i32::from(self.is_available(pod)),
                OnNode::Old(pod) => {
                    let is_available = self.is_available(pod);
                    available += i32::from(is_available);
                    match (is_available, should_run) {
                        (true, true) => candidates.push((*node).to_owned()),
                        (true, false) => misplaced.push(doomed(pod, node, Reason::Unwanted)),
                        (false, true) => plan.create.push((*node).to_owned()),
                        (false, false) => plan.delete.push(doomed(pod, node, Reason::Unwanted)),
                    }
                }
                OnNode::Both { old, new } => {
                    available += i32::from(self.is_available(old));
                    if self.is_available(new) {
                        plan.delete.push(doomed(old, node, Reason::Unwanted));
                    } else {
                        surging += 1;
                    }
                }
            }
        }
        // Surge promises that no availability is lost: pods on nodes that left the set go only when others serve.
        let spare = usize::try_from(available - desired).unwrap_or(0);
        plan.delete.extend(misplaced.into_iter().take(spare));
        let allowed = usize::try_from(max_surge - surging).unwrap_or(0);
        plan.create.extend(candidates.into_iter().take(allowed));
        plan
    }
}
