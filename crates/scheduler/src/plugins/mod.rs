//! The plugins, one module each; this table is the default profile, in its order.

mod balanced_allocation;
pub(crate) mod default_binder;
mod default_preemption;
mod dynamic_resources;
mod image_locality;
#[cfg(test)]
mod incremental_tests;
mod inter_pod_affinity;
pub(crate) mod node_affinity;
mod node_declared_features;
mod node_name;
mod node_ports;
mod node_resources_fit;
mod node_unschedulable;
mod node_volume_limits;
mod pod_topology_spread;
mod priority_sort;
mod resource_amounts;
mod scheduling_gates;
mod taint_toleration;
mod volume_binding;
mod volume_restrictions;
mod volume_zone;
pub(crate) mod volumes;

use std::sync::Arc;

use crate::framework::{PluginArgs, PluginArgsError, PluginEntry};

/// Arguments of a plugin that takes none.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct NoArgs {}

fn no_args(args: &PluginArgs) -> Result<(), PluginArgsError> {
    args.decode::<NoArgs>().map(|_| ())
}

/// Every plugin there is. Cheap filters that reject often come first.
pub const PLUGINS: &[PluginEntry] = &[
    PluginEntry {
        name: "SchedulingGates",
        weight: 0,
        new: |args, _| no_args(args).map(|()| Arc::new(scheduling_gates::SchedulingGates) as _),
    },
    PluginEntry {
        name: "PrioritySort",
        weight: 0,
        new: |args, _| no_args(args).map(|()| Arc::new(priority_sort::PrioritySort) as _),
    },
    PluginEntry {
        name: "NodeUnschedulable",
        weight: 0,
        new: |args, _| no_args(args).map(|()| Arc::new(node_unschedulable::NodeUnschedulable) as _),
    },
    PluginEntry {
        name: "NodeName",
        weight: 0,
        new: |args, _| no_args(args).map(|()| Arc::new(node_name::NodeName) as _),
    },
    PluginEntry {
        name: "TaintToleration",
        weight: 3,
        new: |args, _| no_args(args).map(|()| Arc::new(taint_toleration::TaintToleration) as _),
    },
    PluginEntry { name: "NodeAffinity", weight: 2, new: node_affinity::new },
    PluginEntry {
        name: "NodePorts",
        weight: 0,
        new: |args, _| no_args(args).map(|()| Arc::new(node_ports::NodePorts) as _),
    },
    PluginEntry { name: "NodeResourcesFit", weight: 1, new: node_resources_fit::new },
    PluginEntry { name: "VolumeRestrictions", weight: 0, new: volume_restrictions::new },
    PluginEntry { name: "NodeVolumeLimits", weight: 0, new: node_volume_limits::new },
    PluginEntry { name: "VolumeBinding", weight: 0, new: volume_binding::new },
    PluginEntry { name: "VolumeZone", weight: 0, new: volume_zone::new },
    PluginEntry { name: "PodTopologySpread", weight: 2, new: pod_topology_spread::new },
    PluginEntry { name: "InterPodAffinity", weight: 2, new: inter_pod_affinity::new },
    // Before preemption: an idle claim gives its devices back before a pod that may be at work has to go.
    PluginEntry { name: "DynamicResources", weight: 2, new: dynamic_resources::new },
    PluginEntry { name: "DefaultPreemption", weight: 0, new: default_preemption::new },
    PluginEntry { name: "NodeResourcesBalancedAllocation", weight: 1, new: balanced_allocation::new },
    PluginEntry { name: "ImageLocality", weight: 1, new: image_locality::new },
    PluginEntry {
        name: "DefaultBinder",
        weight: 0,
        new: |args, handle| {
            let client = handle.client().cloned();
            no_args(args).map(|()| Arc::new(default_binder::DefaultBinder { client }) as _)
        },
    },
    PluginEntry { name: "NodeDeclaredFeatures", weight: 0, new: node_declared_features::new },
];
