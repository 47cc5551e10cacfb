//! Devices as the API shows them: one entry for each device and NUMA node, as upstream.

use crate::devices::{ContainerDevices as Given, Device, NO_NUMA};
use crate::topology::MemoryBlock;
use ferrite_devices::podresources::{ContainerDevices, ContainerMemory, NumaNode, TopologyInfo};
use std::collections::BTreeMap;

fn entry(resource: &str, device: &str, node: Option<i64>) -> ContainerDevices {
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![device.to_owned()],
        topology: node.map(|id| TopologyInfo { nodes: vec![NumaNode { id }] }),
    }
}

/// The devices of a container.
pub(crate) fn of_container(given: &Given) -> Vec<ContainerDevices> {
    let mut shown = Vec::new();
    for (resource, one) in given {
        for (node, devices) in &one.devices {
            let node = (*node != NO_NUMA).then_some(*node);
            shown.extend(devices.iter().map(|device| entry(resource, device, node)));
        }
    }
    shown
}

/// The devices of the node.
pub(crate) fn allocatable(all: &BTreeMap<String, BTreeMap<String, Device>>) -> Vec<ContainerDevices> {
    let mut shown = Vec::new();
    for (resource, devices) in all {
        for (id, device) in devices {
            match device.nodes.is_empty() {
                true => shown.push(entry(resource, id, None)),
                false => shown.extend(device.nodes.iter().map(|node| entry(resource, id, Some(*node)))),
            }
        }
    }
    shown
}

/// Memory of NUMA nodes.
pub(crate) fn memory(blocks: &[MemoryBlock]) -> Vec<ContainerMemory> {
    let nodes = |block: &MemoryBlock| {
        let node = |id: &u32| NumaNode { id: i64::from(*id) };
        TopologyInfo { nodes: block.numa_affinity.iter().map(node).collect() }
    };
    let shown = |block: &MemoryBlock| ContainerMemory {
        memory_type: block.kind.clone(),
        size: block.size,
        topology: Some(nodes(block)),
    };
    blocks.iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_entry_for_each_device_and_node() {
        let device = |nodes: &[i64]| Device { healthy: true, nodes: nodes.to_vec() };
        let all = BTreeMap::from([(
            "r/x".to_owned(),
            BTreeMap::from([("a".to_owned(), device(&[])), ("b".to_owned(), device(&[0, 1]))]),
        )]);
        let expected = [entry("r/x", "a", None), entry("r/x", "b", Some(0)), entry("r/x", "b", Some(1))];
        assert_eq!(allocatable(&all), expected);
    }
}
