//! Resources by which nodes are scored.

use serde::Deserialize;

use crate::snapshot::{NodeInfo, PodInfo};

/// A resource and its weight in a score, as a configuration has them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ResourceSpec {
    pub(super) name: String,
    #[serde(default)]
    pub(super) weight: i64,
}

impl ResourceSpec {
    /// CPU and memory if there are none; a weight of one where none is given.
    pub(super) fn with_defaults(given: Vec<Self>) -> Vec<Weighed> {
        if given.is_empty() {
            return [Resource::Cpu, Resource::Memory].map(|resource| Weighed { resource, weight: 1 }).into();
        }
        let weighed = given.into_iter().map(|Self { name, weight }| Weighed {
            resource: Resource::from(name),
            weight: if weight == 0 { 1 } else { weight },
        });
        weighed.collect()
    }
}

/// A resource that counts in a score. Thousands of nodes are scored for each pod: no name is compared then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Resource {
    Cpu,
    Memory,
    EphemeralStorage,
    Other(String),
}

impl From<String> for Resource {
    fn from(name: String) -> Self {
        match name.as_str() {
            "cpu" => Self::Cpu,
            "memory" => Self::Memory,
            "ephemeral-storage" => Self::EphemeralStorage,
            _ => Self::Other(name),
        }
    }
}

/// A resource and its weight in a score.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Weighed {
    pub(super) resource: Resource,
    pub(super) weight: i64,
}

/// Amounts of one resource. CPU is in thousandths.
pub(super) struct Amounts {
    pub(super) allocatable: i64,
    pub(super) used: i64,
    pub(super) wanted: i64,
}

/// The amounts of a resource on a node; none if the node has nothing of it, or if the pod does not ask for a resource
/// other than CPU, memory and ephemeral storage. Unless `exact`, each container without a CPU or memory request counts as
/// asking for a modest amount.
pub(super) fn amounts(resource: &Resource, pod: &PodInfo, node: &NodeInfo, exact: bool) -> Option<Amounts> {
    let (allocatable, used, wanted) = match resource {
        Resource::Cpu if exact => {
            (node.allocatable.milli_cpu, node.requested.milli_cpu, pod.requests.milli_cpu)
        }
        Resource::Memory if exact => (node.allocatable.memory, node.requested.memory, pod.requests.memory),
        Resource::Cpu => (node.allocatable.milli_cpu, node.non_zero_requested.0, pod.non_zero_requests.0),
        Resource::Memory => (node.allocatable.memory, node.non_zero_requested.1, pod.non_zero_requests.1),
        Resource::EphemeralStorage => (
            node.allocatable.ephemeral_storage,
            node.requested.ephemeral_storage,
            pod.requests.ephemeral_storage,
        ),
        Resource::Other(name) => {
            let wanted = pod.requests.scalar.get(name).copied().filter(|wanted| *wanted > 0)?;
            let of =
                |resources: &crate::resources::Resources| resources.scalar.get(name).copied().unwrap_or(0);
            (of(&node.allocatable), of(&node.requested), wanted)
        }
    };
    (allocatable > 0).then_some(Amounts { allocatable, used, wanted })
}
