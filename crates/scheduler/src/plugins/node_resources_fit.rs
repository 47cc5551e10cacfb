//! Fits requests into what nodes have left, and prefers nodes with most left.

use k8s_openapi::api::core::v1::Node;

use crate::framework::{ClusterEvent, CycleState, Filter, MAX_SCORE, Plugin, Reason, Rejection, Score};
use crate::resources::Resources;
use crate::snapshot::{NodeInfo, PodInfo};

pub(super) struct NodeResourcesFit;

fn allocatable(node: &Node) -> Resources {
    Resources::from_list(node.status.as_ref().and_then(|status| status.allocatable.as_ref()))
}

/// Whether an empty node of this size would do.
fn could_fit(pod: &PodInfo, node: &Node) -> bool {
    let allocatable = allocatable(node);
    let requests = &pod.requests;
    allocatable.pods > 0
        && requests.milli_cpu <= allocatable.milli_cpu
        && requests.memory <= allocatable.memory
        && requests.ephemeral_storage <= allocatable.ephemeral_storage
        && requests
            .scalar
            .iter()
            .all(|(name, amount)| *amount <= allocatable.scalar.get(name).copied().unwrap_or(0))
}

impl Plugin for NodeResourcesFit {
    fn name(&self) -> &'static str {
        "NodeResourcesFit"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(node) => could_fit(pod, node),
            ClusterEvent::NodeUpdated { old, new } => {
                allocatable(old) != allocatable(new) && could_fit(pod, new)
            }
            ClusterEvent::AssignedPodDeleted(_) | ClusterEvent::PodUpdated => true,
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

impl Filter for NodeResourcesFit {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let mut reasons: Vec<Reason> = Vec::new();
        // More than the whole node has: removing pods would not help.
        let mut hopeless = false;
        let held = i64::try_from(node.pods.len()).unwrap_or(i64::MAX);
        if held + 1 > node.allocatable.pods {
            reasons.push("Too many pods".into());
        }
        let mut check = |name: &'static str, wanted: i64, used: i64, has: i64| {
            if wanted > 0 && wanted > has.saturating_sub(used) {
                reasons.push(name.into());
                hopeless |= wanted > has;
            }
        };
        let (wanted, used, has) = (&pod.requests, &node.requested, &node.allocatable);
        check("Insufficient cpu", wanted.milli_cpu, used.milli_cpu, has.milli_cpu);
        check("Insufficient memory", wanted.memory, used.memory, has.memory);
        check(
            "Insufficient ephemeral-storage",
            wanted.ephemeral_storage,
            used.ephemeral_storage,
            has.ephemeral_storage,
        );
        for (name, wanted) in &wanted.scalar {
            let amount = |resources: &Resources| resources.scalar.get(name).copied().unwrap_or(0);
            if *wanted > 0 && *wanted > amount(has).saturating_sub(amount(used)) {
                reasons.push(format!("Insufficient {name}").into());
                hopeless |= *wanted > amount(has);
            }
        }
        match (reasons.is_empty(), hopeless) {
            (true, _) => Ok(()),
            (false, true) => Err(Rejection::UnschedulableAndUnresolvable(reasons)),
            (false, false) => Err(Rejection::Unschedulable(reasons)),
        }
    }
}

impl Score for NodeResourcesFit {
    /// Mean of the free shares of CPU and memory, with the pod in place.
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let (cpu, memory) = pod.requests.non_zero();
        let shares = [
            (node.non_zero_requested.0.saturating_add(cpu), node.allocatable.milli_cpu),
            (node.non_zero_requested.1.saturating_add(memory), node.allocatable.memory),
        ];
        let (mut sum, mut count) = (0, 0);
        for (used, has) in shares {
            if has > 0 {
                sum += if used > has { 0 } else { (has - used).saturating_mul(MAX_SCORE) / has };
                count += 1;
            }
        }
        if count == 0 { 0 } else { sum / count }
    }
}
