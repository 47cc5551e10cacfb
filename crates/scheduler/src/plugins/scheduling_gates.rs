//! Holds pods back that have scheduling gates.

use crate::framework::{ClusterEvent, Plugin, PreEnqueue, Rejection};
use crate::snapshot::PodInfo;

pub(super) struct SchedulingGates;

impl Plugin for SchedulingGates {
    fn name(&self) -> &'static str {
        "SchedulingGates"
    }

    fn queueing_hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
        matches!(event, ClusterEvent::PodUpdated)
    }

    fn pre_enqueue(&self) -> Option<&dyn PreEnqueue> {
        Some(self)
    }
}

impl PreEnqueue for SchedulingGates {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection> {
        if pod.placement.is_gated {
            return Err(Rejection::unresolvable("Scheduling is blocked due to non-empty scheduling gates"));
        }
        Ok(())
    }
}
