//! `nodeSelector` and node affinity.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm};

use crate::cycle::normalize;
use crate::framework::{
    ClusterEvent, CycleState, Filter, Interest, Plugin, PreFilter, PreScore, Rejection, Score,
};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

pub(super) struct NodeAffinity;

fn affinity(pod: &PodInfo) -> Option<&k8s_openapi::api::core::v1::NodeAffinity> {
    pod.placement.node_affinity.as_deref()
}

/// Whether the node satisfies the pod's `nodeSelector` and required node affinity.
pub(crate) fn matches_required(pod: &PodInfo, node: &Node) -> bool {
    static EMPTY: BTreeMap<String, String> = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&EMPTY);
    let selector = pod.placement.node_selector.as_ref();
    if !selector.into_iter().flatten().all(|(key, value)| labels.get(key) == Some(value)) {
        return false;
    }
    let required = affinity(pod).and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    required.is_none_or(|required| required.node_selector_terms.iter().any(|term| matches_term(term, node)))
}

/// A term with neither expressions nor fields matches no node.
fn matches_term(term: &NodeSelectorTerm, node: &Node) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let label =
        |key: &str| node.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    let field = |key: &str| if key == "metadata.name" { node.metadata.name.as_deref() } else { None };
    expressions.iter().all(|requirement| satisfies(requirement, label(&requirement.key)))
        && fields.iter().all(|requirement| satisfies(requirement, field(&requirement.key)))
}

fn satisfies(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let contains = |value: &str| values.iter().any(|known| known == value);
    let number = |text: &str| text.parse::<i64>().ok();
    match requirement.operator.as_str() {
        "In" => value.is_some_and(contains),
        "NotIn" => value.is_none_or(|value| !contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        operator @ ("Gt" | "Lt") => {
            let [bound] = values else { return false };
            match (value.and_then(number), number(bound)) {
                (Some(value), Some(bound)) if operator == "Gt" => value > bound,
                (Some(value), Some(bound)) => value < bound,
                _ => false,
            }
        }
        _ => false,
    }
}

impl Plugin for NodeAffinity {
    fn name(&self) -> &'static str {
        "NodeAffinity"
    }

    fn may_help(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(node) => matches_required(pod, node),
            ClusterEvent::NodeUpdated { old, new } => {
                !matches_required(pod, old) && matches_required(pod, new)
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
    fn pre_filter(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot) -> Result<Interest, Rejection> {
        let selects = pod.placement.node_selector.is_some();
        let requires =
            affinity(pod).is_some_and(|a| a.required_during_scheduling_ignored_during_execution.is_some());
        Ok(if selects || requires { Interest::Needed } else { Interest::Skip })
    }
}

impl Filter for NodeAffinity {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if matches_required(pod, &node.node) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match Pod's node affinity/selector"))
    }
}

impl PreScore for NodeAffinity {
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot, _: &[Arc<NodeInfo>]) -> Interest {
        let preferred =
            affinity(pod).and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
        if preferred.is_some_and(|terms| !terms.is_empty()) { Interest::Needed } else { Interest::Skip }
    }
}

impl Score for NodeAffinity {
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let preferred =
            affinity(pod).and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
        let terms = preferred.into_iter().flatten();
        terms
            .filter(|term| matches_term(&term.preference, &node.node))
            .map(|term| i64::from(term.weight))
            .sum()
    }

    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _nodes: &[Arc<NodeInfo>], scores: &mut [i64]) {
        normalize(scores, false);
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn requirements() {
        for (operator, values, value, expected) in [
            ("In", &["a", "b"][..], Some("a"), true),
            ("In", &["a"], None, false),
            ("NotIn", &["a"], Some("b"), true),
            ("NotIn", &["a"], None, true),
            ("Exists", &[], Some(""), true),
            ("DoesNotExist", &[], Some("x"), false),
            ("Gt", &["5"], Some("6"), true),
            ("Gt", &["5"], Some("5"), false),
            ("Lt", &["5"], Some("4"), true),
            ("Lt", &["5"], Some("x"), false),
            ("Nonsense", &[], Some("x"), false),
        ] {
            let requirement: NodeSelectorRequirement =
                ferrite_json::from_value(json!({"key": "k", "operator": operator, "values": values}))
                    .unwrap();
            assert_eq!(satisfies(&requirement, value), expected, "{operator} {values:?} {value:?}");
        }
    }

    #[test]
    fn an_empty_term_matches_nothing() {
        assert!(!matches_term(&NodeSelectorTerm::default(), &Node::default()));
    }
}
