//! Prefers nodes on which CPU and memory would be used in equal shares.

use std::sync::Arc;

use crate::framework::{CycleState, Interest, MAX_SCORE, Plugin, PreScore, Score};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

pub(super) struct BalancedAllocation;

impl Plugin for BalancedAllocation {
    fn name(&self) -> &'static str {
        "NodeResourcesBalancedAllocation"
    }

    fn pre_score(&self) -> Option<&dyn PreScore> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }
}

impl PreScore for BalancedAllocation {
    /// A pod that asks for nothing changes no balance.
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot, _: &[Arc<NodeInfo>]) -> Interest {
        if pod.requests.milli_cpu == 0 && pod.requests.memory == 0 {
            Interest::Skip
        } else {
            Interest::Needed
        }
    }
}

impl Score for BalancedAllocation {
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let share = |used: i64, wanted: i64, has: i64| {
            (has > 0).then(|| (used.saturating_add(wanted) as f64 / has as f64).min(1.0))
        };
        let cpu = share(node.requested.milli_cpu, pod.requests.milli_cpu, node.allocatable.milli_cpu);
        let memory = share(node.requested.memory, pod.requests.memory, node.allocatable.memory);
        // For two values the standard deviation is half their distance.
        let deviation = match (cpu, memory) {
            (Some(cpu), Some(memory)) => (cpu - memory).abs() / 2.0,
            _ => 0.0,
        };
        ((1.0 - deviation) * MAX_SCORE as f64) as i64
    }
}
