//! Keeps pods off cordoned nodes.

use k8s_openapi::api::core::v1::{Node, Taint};

use super::taint_toleration::tolerates;
use crate::framework::{ClusterEvent, CycleState, Filter, Plugin, Rejection};
use crate::snapshot::{NodeInfo, PodInfo};

pub(super) struct NodeUnschedulable;

fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false)
}

impl Plugin for NodeUnschedulable {
    fn name(&self) -> &'static str {
        "NodeUnschedulable"
    }

    fn queueing_hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(node) => !is_cordoned(node),
            ClusterEvent::NodeUpdated { old, new } => is_cordoned(old) && !is_cordoned(new),
            ClusterEvent::PodUpdated => true,
            _ => false,
        }
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }
}

impl Filter for NodeUnschedulable {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if !is_cordoned(&node.node) {
            return Ok(());
        }
        let taint = Taint {
            key: "node.kubernetes.io/unschedulable".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        if tolerates(pod.tolerations(), &taint) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) were unschedulable"))
    }

    fn is_local(&self, _pod: &PodInfo) -> bool {
        true
    }
}
