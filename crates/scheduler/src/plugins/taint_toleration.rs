//! Keeps pods off nodes whose taints they do not tolerate, and prefers nodes with fewer soft ones.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Taint, Toleration};

use crate::cycle::normalize;
use crate::framework::{ClusterEvent, CycleState, Filter, Plugin, Rejection, Score};
use crate::snapshot::{NodeInfo, PodInfo};

pub(super) struct TaintToleration;

/// True if one of the tolerations covers the taint.
pub(super) fn tolerates(tolerations: &[Toleration], taint: &Taint) -> bool {
    tolerations.iter().any(|toleration| ferrite_client::tolerates(toleration, taint))
}

fn taints(node: &Node) -> &[Taint] {
    node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default()
}

fn keeps_off(node: &Node, pod: &PodInfo) -> bool {
    taints(node)
        .iter()
        .filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"))
        .any(|taint| !tolerates(pod.tolerations(), taint))
}

impl Plugin for TaintToleration {
    fn name(&self) -> &'static str {
        "TaintToleration"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(node) => !keeps_off(node, pod),
            ClusterEvent::NodeUpdated { old, new } => keeps_off(old, pod) && !keeps_off(new, pod),
            ClusterEvent::PodUpdated => true,
            _ => false,
        }
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }
}

impl Filter for TaintToleration {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if keeps_off(&node.node, pod) {
            return Err(Rejection::unresolvable("node(s) had untolerated taint(s)"));
        }
        Ok(())
    }

    fn is_local(&self, _pod: &PodInfo) -> bool {
        true
    }
}

impl Score for TaintToleration {
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let soft = taints(&node.node).iter().filter(|taint| taint.effect == "PreferNoSchedule");
        let count = soft.filter(|taint| !tolerates(pod.tolerations(), taint)).count();
        i64::try_from(count).unwrap_or(i64::MAX)
    }

    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _nodes: &[Arc<NodeInfo>], scores: &mut [i64]) {
        normalize(scores, true);
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn tolerations_match_as_specified() {
        let taint: Taint =
            ferrite_json::from_value(json!({"key": "k", "value": "v", "effect": "NoExecute"})).unwrap();
        for (toleration, expected) in [
            (json!({"key": "k", "value": "v", "effect": "NoExecute"}), true),
            (json!({"key": "k", "operator": "Equal", "value": "v"}), true),
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"key": "k", "value": "other"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
            (json!({"key": "k", "operator": "Exists", "effect": "NoSchedule"}), false),
        ] {
            let parsed: Toleration = ferrite_json::from_value(toleration.clone()).unwrap();
            assert_eq!(tolerates(&[parsed], &taint), expected, "{toleration}");
        }
        assert!(!tolerates(&[], &taint));
    }
}
