//! The plugins, one module each; this table is the default profile, in its order.

mod balanced_allocation;
mod default_preemption;
mod inter_pod_affinity;
pub(crate) mod node_affinity;
mod node_name;
mod node_ports;
mod node_resources_fit;
mod node_unschedulable;
mod pod_topology_spread;
mod taint_toleration;

use std::sync::Arc;

use crate::framework::PluginEntry;

/// Every plugin there is. Cheap filters that reject often come first.
pub const PLUGINS: &[PluginEntry] = &[
    PluginEntry {
        name: "NodeUnschedulable",
        weight: 0,
        new: || Arc::new(node_unschedulable::NodeUnschedulable),
    },
    PluginEntry { name: "NodeName", weight: 0, new: || Arc::new(node_name::NodeName) },
    PluginEntry { name: "TaintToleration", weight: 3, new: || Arc::new(taint_toleration::TaintToleration) },
    PluginEntry { name: "NodeAffinity", weight: 2, new: || Arc::new(node_affinity::NodeAffinity) },
    PluginEntry { name: "NodePorts", weight: 0, new: || Arc::new(node_ports::NodePorts) },
    PluginEntry {
        name: "NodeResourcesFit",
        weight: 1,
        new: || Arc::new(node_resources_fit::NodeResourcesFit),
    },
    PluginEntry {
        name: "PodTopologySpread",
        weight: 2,
        new: || Arc::new(pod_topology_spread::PodTopologySpread),
    },
    PluginEntry {
        name: "InterPodAffinity",
        weight: 2,
        new: || Arc::new(inter_pod_affinity::InterPodAffinity),
    },
    PluginEntry {
        name: "DefaultPreemption",
        weight: 0,
        new: || Arc::new(default_preemption::DefaultPreemption),
    },
    PluginEntry {
        name: "NodeResourcesBalancedAllocation",
        weight: 1,
        new: || Arc::new(balanced_allocation::BalancedAllocation),
    },
];
