//! Keeps apart pods that want the same host port.

use crate::framework::{ClusterEvent, CycleState, Filter, Plugin, PreFilter, PreFiltered, Rejection};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

pub(super) struct NodePorts;

fn conflict(wanted: &PodInfo, present: &PodInfo) -> bool {
    wanted.host_ports.iter().any(|port| present.host_ports.iter().any(|taken| port.conflicts_with(taken)))
}

impl Plugin for NodePorts {
    fn name(&self) -> &'static str {
        "NodePorts"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated => true,
            ClusterEvent::AssignedPodDeleted(gone) => conflict(pod, gone),
            _ => false,
        }
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }
}

impl PreFilter for NodePorts {
    fn pre_filter(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot) -> Result<PreFiltered, Rejection> {
        Ok(if pod.host_ports.is_empty() { PreFiltered::Skip } else { PreFiltered::Needed })
    }
}

impl Filter for NodePorts {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if node.pods.iter().any(|present| conflict(pod, present)) {
            return Err(Rejection::unschedulable(
                "node(s) didn't have free ports for the requested pod ports",
            ));
        }
        Ok(())
    }

    fn is_local(&self, _pod: &PodInfo) -> bool {
        true
    }
}
