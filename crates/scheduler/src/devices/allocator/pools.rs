//! The pools of devices that one node can use.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use ferrite_client::matches_node;
use k8s_openapi::api::core::v1::{Node, NodeSelector};

use super::inventory::{Device, Inventory, Slice};
use super::{Allocated, Amounts};

/// A pool as one node sees it.
#[derive(Debug)]
pub(super) struct Pool {
    /// `driver/pool`.
    pub id: String,
    pub content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    /// Some slices of the newest generation are missing.
    Incomplete,
    /// Two devices have one name, or counters do not fit together.
    Invalid,
    Usable {
        /// Slices with devices for the node, by name.
        slices: Vec<Arc<Slice>>,
        /// Slices with devices for other nodes only: these may consume counters of the pool.
        elsewhere: Vec<Arc<Slice>>,
        counters: BTreeMap<String, Amounts>,
    },
}

impl Pool {
    pub fn is_invalid(&self) -> bool {
        matches!(self.content, Content::Invalid)
    }

    /// The devices for the node, in the order in which they are tried.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        let slices = match &self.content {
            Content::Usable { slices, .. } => slices.as_slice(),
            Content::Incomplete | Content::Invalid => &[],
        };
        slices.iter().flat_map(|slice| &slice.devices)
    }

    /// The counters that allocated devices have left, by set. An amount below zero is none.
    pub fn available(&self, allocated: &Allocated) -> BTreeMap<String, Amounts> {
        let Content::Usable { slices, elsewhere, counters } = &self.content else { return BTreeMap::new() };
        let mut available = counters.clone();
        let devices = slices.iter().chain(elsewhere).flat_map(|slice| &slice.devices);
        for device in devices.filter(|device| allocated.has(&device.id)) {
            for (set, consumed) in &device.consumes {
                let Some(left) = available.get_mut(set) else { continue };
                for (name, amount) in consumed {
                    if let Some(held) = left.get_mut(name) {
                        *held = *held - *amount;
                    }
                }
            }
        }
        available
    }

    fn has_binding_conditions(&self) -> bool {
        self.devices().any(|device| device.spec().binding_conditions.is_some())
    }
}

/// True if devices with this selection of nodes are for `node`.
pub(super) fn is_for_node(
    node: &Node,
    name: Option<&str>,
    all: Option<bool>,
    selector: Option<&NodeSelector>,
) -> bool {
    match name.filter(|name| !name.is_empty()) {
        Some(name) => node.metadata.name.as_deref() == Some(name),
        None => {
            all == Some(true) || selector.is_some_and(|selector| matches_node(None, Some(selector), node))
        }
    }
}

fn is_relevant(slice: &Slice, node: &Node) -> bool {
    let spec = slice.spec();
    // Counters are needed wherever their devices are.
    if !slice.counters.is_empty() {
        return true;
    }
    if spec.per_device_node_selection == Some(true) {
        return slice.devices.iter().any(|device| {
            let device = device.spec();
            is_for_node(node, device.node_name.as_deref(), device.all_nodes, device.node_selector.as_ref())
        });
    }
    is_for_node(node, spec.node_name.as_deref(), spec.all_nodes, spec.node_selector.as_ref())
}

/// The pools with something for the node: by driver and name, those with binding conditions last.
pub(super) fn gather(inventory: &Inventory, node: &Node) -> Vec<Pool> {
    let mut pools = Vec::new();
    let node_name = node.metadata.name.as_deref().unwrap_or_default();
    for ((driver, name), slices) in inventory.pools_of(node_name) {
        let relevant: Vec<&Arc<Slice>> = slices.values().filter(|slice| is_relevant(slice, node)).collect();
        let Some(generation) = relevant.iter().map(|slice| slice.generation()).max() else { continue };
        let relevant: Vec<Arc<Slice>> =
            relevant.into_iter().filter(|slice| slice.generation() == generation).cloned().collect();
        let expected = relevant[0].spec().pool.resource_slice_count;
        let is_complete = |count: usize| i64::try_from(count) == Ok(expected);
        let id = format!("{driver}/{name}");
        let content = if is_complete(relevant.len()) {
            usable(relevant, Vec::new())
        } else if slices.values().any(|slice| slice.generation() > generation) {
            // The driver is about to replace this generation, and the next has nothing for the node so far.
            continue;
        } else {
            let all = slices.values().filter(|slice| slice.generation() == generation);
            if is_complete(all.clone().count()) {
                let elsewhere = all.filter(|slice| !relevant.iter().any(|known| known.name == slice.name));
                let elsewhere = elsewhere.cloned().collect();
                usable(relevant, elsewhere)
            } else {
                Content::Incomplete
            }
        };
        pools.push(Pool { id, content });
    }
    // A stable sort: within both parts the order of the inventory stays.
    pools.sort_by_key(Pool::has_binding_conditions);
    pools
}

fn usable(relevant: Vec<Arc<Slice>>, elsewhere: Vec<Arc<Slice>>) -> Content {
    let (with_counters, slices): (Vec<_>, Vec<_>) =
        relevant.into_iter().partition(|slice| !slice.counters.is_empty());
    let mut names = HashSet::new();
    let mut devices = slices.iter().flat_map(|slice| &slice.devices);
    if !devices.all(|device| names.insert(device.id.device.as_str())) {
        return Content::Invalid;
    }
    let mut counters = BTreeMap::new();
    for (set, amounts) in with_counters.iter().flat_map(|slice| &slice.counters) {
        if counters.insert(set.clone(), amounts.clone()).is_some() {
            return Content::Invalid;
        }
    }
    let mut consumed =
        slices.iter().chain(&elsewhere).flat_map(|slice| &slice.devices).flat_map(|device| &device.consumes);
    let is_known = |(set, amounts): &(String, Amounts)| {
        counters.get(set).is_some_and(|known| amounts.keys().all(|name| known.contains_key(name)))
    };
    if !consumed.all(is_known) {
        return Content::Invalid;
    }
    Content::Usable { slices, elsewhere, counters }
}
