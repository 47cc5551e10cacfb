//! `nodeSelector` and node affinity.

mod added;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use ferrite_client::{matches_node, matches_term};
use k8s_openapi::api::core::v1::Node;
use serde::Deserialize;

use crate::cycle::normalize;
use crate::framework::{
    ClusterEvent, CycleState, Filter, Handle, Interest, Made, Plugin, PluginArgs, PreFilter, PreFiltered,
    PreScore, Rejection, Score,
};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Args {
    /// Added to the affinity of every pod.
    added_affinity: Option<k8s_openapi::api::core::v1::NodeAffinity>,
}

struct NodeAffinity {
    added: k8s_openapi::api::core::v1::NodeAffinity,
}

pub(super) fn new(args: &PluginArgs, _: &Handle) -> Made {
    let args = args.decode_valid(|args: &Args, path| {
        let added = args.added_affinity.as_ref();
        added.map(|added| added::validate(added, &path.child("addedAffinity"))).unwrap_or_default()
    })?;
    Ok(Arc::new(NodeAffinity { added: args.added_affinity.unwrap_or_default() }))
}

impl NodeAffinity {
    fn matches_added(&self, node: &Node) -> bool {
        let required = self.added.required_during_scheduling_ignored_during_execution.as_ref();
        required.is_none() || matches_node(None, required, node)
    }
}

fn affinity(pod: &PodInfo) -> Option<&k8s_openapi::api::core::v1::NodeAffinity> {
    pod.placement.node_affinity.as_deref()
}

/// True if the node satisfies the pod's `nodeSelector` and required node affinity.
pub(crate) fn matches_required(pod: &PodInfo, node: &Node) -> bool {
    let required = affinity(pod).and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    matches_node(pod.placement.node_selector.as_ref(), required, node)
}

/// The nodes that the required terms name by `metadata.name`, if each term names some. A DaemonSet's pod names one: no
/// other node is examined then.
fn named_nodes(pod: &PodInfo) -> Option<BTreeSet<String>> {
    let required = affinity(pod)?.required_during_scheduling_ignored_during_execution.as_ref()?;
    let mut all = BTreeSet::new();
    for term in &required.node_selector_terms {
        let mut named: Option<BTreeSet<&String>> = None;
        for field in term.match_fields.iter().flatten() {
            if field.key == "metadata.name" && field.operator == "In" {
                let values: BTreeSet<&String> = field.values.iter().flatten().collect();
                named = Some(match named {
                    None => values,
                    Some(known) => known.intersection(&values).copied().collect(),
                });
            }
        }
        // A term without a name leaves every node in.
        all.extend(named?.into_iter().cloned());
    }
    (!required.node_selector_terms.is_empty()).then_some(all)
}

impl Plugin for NodeAffinity {
    fn name(&self) -> &'static str {
        "NodeAffinity"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(node) => self.matches_added(node) && matches_required(pod, node),
            ClusterEvent::NodeUpdated { old, new } => {
                let matches = |node: &Node| self.matches_added(node) && matches_required(pod, node);
                !matches(old) && matches(new)
            }
            ClusterEvent::PodUpdated => true,
            _ => false,
        }
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }

    fn pre_score(&self) -> Option<&dyn PreScore> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }
}

impl PreFilter for NodeAffinity {
    fn pre_filter(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot) -> Result<PreFiltered, Rejection> {
        let selects = pod.placement.node_selector.is_some();
        let requires =
            affinity(pod).is_some_and(|a| a.required_during_scheduling_ignored_during_execution.is_some());
        let adds = self.added.required_during_scheduling_ignored_during_execution.is_some();
        if !selects && !requires && !adds {
            return Ok(PreFiltered::Skip);
        }
        match named_nodes(pod) {
            Some(nodes) if nodes.is_empty() => Err(Rejection::unresolvable("pod affinity terms conflict")),
            Some(nodes) => Ok(PreFiltered::Nodes(nodes)),
            None => Ok(PreFiltered::Needed),
        }
    }
}

impl Filter for NodeAffinity {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if !self.matches_added(&node.node) {
            return Err(Rejection::unresolvable("node(s) didn't match scheduler-enforced node affinity"));
        }
        if matches_required(pod, &node.node) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match Pod's node affinity/selector"))
    }

    fn is_local(&self, _pod: &PodInfo) -> bool {
        true
    }
}

impl PreScore for NodeAffinity {
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot, _: &[Arc<NodeInfo>]) -> Interest {
        let preferred =
            affinity(pod).and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
        let added = self.added.preferred_during_scheduling_ignored_during_execution.as_ref();
        let has_some = [preferred, added].into_iter().flatten().any(|terms| !terms.is_empty());
        if has_some { Interest::Needed } else { Interest::Skip }
    }
}

impl Score for NodeAffinity {
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let preferred =
            affinity(pod).and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
        let added = self.added.preferred_during_scheduling_ignored_during_execution.as_ref();
        let terms = preferred.into_iter().chain(added).flatten();
        terms
            .filter(|term| matches_term(&term.preference, &node.node))
            .map(|term| i64::from(term.weight))
            .sum()
    }

    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _nodes: &[Arc<NodeInfo>], scores: &mut [i64]) {
        normalize(scores, false);
    }
}
