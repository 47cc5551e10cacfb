//! Holds a pod to the node it names.

use crate::framework::{ClusterEvent, CycleState, Filter, Plugin, Rejection};
use crate::snapshot::{NodeInfo, PodInfo};

pub(super) struct NodeName;

impl Plugin for NodeName {
    fn name(&self) -> &'static str {
        "NodeName"
    }

    fn queueing_hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
        matches!(event, ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }
}

impl Filter for NodeName {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let named = pod.node_name.as_deref().unwrap_or_default();
        if named.is_empty() || named == node.name() {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match the requested node name"))
    }

    fn is_local(&self, pod: &PodInfo) -> bool {
        pod.node_name.is_none()
    }
}
