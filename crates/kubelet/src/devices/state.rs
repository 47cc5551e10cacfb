//! The devices of the node and whose they are: values and decisions, no I/O.
//!
//! A *resource* is a name such as `example.com/gpu` with the devices that its plugin lists. Devices are chosen for a
//! container when its pod is admitted, and stay the container's until the pod has ended.

use ferrite_devices::deviceplugin::ContainerAllocateResponse;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::clock;

/// A plugin that is gone for longer is forgotten, as upstream.
pub(crate) const STOP_GRACE: Duration = Duration::from_secs(300);

/// Names of devices.
pub(crate) type Ids = BTreeSet<String>;

/// Devices by NUMA node; `-1` for those that are at none.
pub(crate) type PerNuma = BTreeMap<i64, Vec<String>>;

/// The node that stands for no node.
pub(crate) const NO_NUMA: i64 = -1;

/// One device as its plugin lists it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Device {
    pub healthy: bool,
    /// The NUMA nodes it is near to.
    pub nodes: Vec<i64>,
}

/// The state of a resource's plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Connected,
    /// Gone since then. Its devices count as unhealthy.
    Stopped(Timestamp),
    /// Gone for too long: the node has none of it.
    Removed,
}

#[derive(Debug, Clone)]
struct Resource {
    presence: Presence,
    /// The last list of the plugin.
    devices: BTreeMap<String, Device>,
    healthy: Ids,
    unhealthy: Ids,
}

/// The devices of one resource that a container got.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Given {
    pub devices: PerNuma,
    pub response: ContainerAllocateResponse,
}

impl Given {
    pub(crate) fn ids(&self) -> Ids {
        self.devices.values().flatten().cloned().collect()
    }
}

/// By resource.
pub(crate) type ContainerDevices = BTreeMap<String, Given>;
/// By UID of the pod and name of the container.
pub(crate) type PodDevices = BTreeMap<String, BTreeMap<String, ContainerDevices>>;

/// Why a container gets no devices. The texts are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error(
        "pod {pod:?} container {container:?} changed request for resource {resource:?} from {had} to {asked}"
    )]
    Changed { pod: String, container: String, resource: String, had: usize, asked: usize },
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    #[error("previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}")]
    NoLongerHealthy(String),
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {needed}, Available: {available}"
    )]
    Unavailable { resource: String, needed: usize, available: usize },
}

/// A question to the plugin: which `size` of the `available` devices, with those that must be among them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Query {
    pub resource: String,
    pub available: Ids,
    pub must_include: Ids,
    pub size: usize,
}

/// Answers of plugins. A resource whose plugin has no preference has none here.
pub(crate) type Preferences = BTreeMap<Query, Ids>;

/// A container's request for devices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish<'a> {
    pub pod: &'a str,
    pub container: &'a str,
    pub resource: &'a str,
    pub required: usize,
    /// Devices of the pod's init containers that have ended by then.
    pub reusable: &'a Ids,
    /// The NUMA nodes that the topology manager chose.
    pub affinity: Option<&'a BTreeSet<i64>>,
    /// The plugin may be asked which devices it prefers.
    pub has_preference: bool,
}

/// The decision about a request for devices.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    /// It has them already.
    Nothing,
    /// The plugin is asked first.
    Ask(Query),
    Devices(Ids),
}

#[derive(Debug, Default)]
pub(crate) struct DeviceState {
    resources: BTreeMap<String, Resource>,
    pods: PodDevices,
    /// Devices for which a plugin's answer is awaited.
    reserved: BTreeMap<(String, String, String), Ids>,
}

impl DeviceState {
    /// The state after a restart: no plugin is there yet, so that nothing can be allocated.
    pub(crate) fn restored(
        pods: PodDevices,
        registered: impl IntoIterator<Item = String>,
        now: Timestamp,
    ) -> Self {
        let stopped = || Resource {
            presence: Presence::Stopped(now),
            devices: BTreeMap::new(),
            healthy: Ids::new(),
            unhealthy: Ids::new(),
        };
        let resources = registered.into_iter().map(|name| (name, stopped())).collect();
        Self { resources, pods, reserved: BTreeMap::new() }
    }

    pub(crate) fn pods(&self) -> &PodDevices {
        &self.pods
    }

    /// Number of resources that have a plugin, or had one recently.
    pub(crate) fn resource_count(&self) -> usize {
        self.resources.len()
    }

    pub(crate) fn has_resource(&self, resource: &str) -> bool {
        self.resources.contains_key(resource)
    }

    /// The plugin has registered. It has not listed its devices yet: those of its predecessor stay.
    pub(crate) fn connected(&mut self, resource: &str) {
        let new = Resource {
            presence: Presence::Connected,
            devices: BTreeMap::new(),
            healthy: Ids::new(),
            unhealthy: Ids::new(),
        };
        self.resources.entry(resource.to_owned()).or_insert(new).presence = Presence::Connected;
    }

    pub(crate) fn disconnected(&mut self, resource: &str, now: Timestamp) {
        if let Some(one) = self.resources.get_mut(resource) {
            one.presence = Presence::Stopped(now);
            let healthy = std::mem::take(&mut one.healthy);
            one.unhealthy.extend(healthy);
        }
    }

    /// Takes the plugin's list. Returns the pods whose devices changed their health.
    pub(crate) fn update(&mut self, resource: &str, devices: BTreeMap<String, Device>) -> BTreeSet<String> {
        let Some(one) = self.resources.get_mut(resource) else { return BTreeSet::new() };
        let differs = |id: &String, device: &Device| {
            one.devices.get(id).is_none_or(|old| old.healthy != device.healthy)
        };
        let changed: Ids =
            devices.iter().filter(|(id, d)| differs(id, d)).map(|(id, _)| id.clone()).collect();
        let ids = |healthy: bool| -> Ids {
            devices.iter().filter(|(_, d)| d.healthy == healthy).map(|(id, _)| id.clone()).collect()
        };
        (one.healthy, one.unhealthy) = (ids(true), ids(false));
        one.devices = devices;
        let has = |containers: &BTreeMap<String, ContainerDevices>| {
            let given = containers.values().filter_map(|c| c.get(resource));
            given.flat_map(|given| given.devices.values().flatten()).any(|id| changed.contains(id))
        };
        self.pods.iter().filter(|(_, containers)| has(containers)).map(|(uid, _)| uid.clone()).collect()
    }

    /// When the next plugin that is gone is to be forgotten.
    pub(crate) fn next_expiry(&self) -> Option<Timestamp> {
        let stopped = self.resources.values().filter_map(|one| match one.presence {
            Presence::Stopped(since) => Some(clock::add(since, STOP_GRACE)),
            Presence::Connected | Presence::Removed => None,
        });
        stopped.min()
    }

    /// Forgets plugins that are gone for too long. Returns true if there were any.
    pub(crate) fn expire(&mut self, now: Timestamp) -> bool {
        let mut any = false;
        for one in self.resources.values_mut() {
            if matches!(one.presence, Presence::Stopped(since) if clock::since(since, now) >= STOP_GRACE) {
                one.presence = Presence::Removed;
                one.healthy.clear();
                one.unhealthy.clear();
                any = true;
            }
        }
        any
    }

    /// Capacity and allocatable amount of each resource.
    pub(crate) fn capacity(&self) -> BTreeMap<String, (usize, usize)> {
        let amounts = |one: &Resource| (one.healthy.len() + one.unhealthy.len(), one.healthy.len());
        self.resources.iter().map(|(name, one)| (name.clone(), amounts(one))).collect()
    }

    /// The healthy devices of each resource, as the checkpoint has them.
    pub(crate) fn registered(&self) -> BTreeMap<String, Vec<String>> {
        let there = self.resources.iter().filter(|(_, one)| one.presence != Presence::Removed);
        there.map(|(name, one)| (name.clone(), one.healthy.iter().cloned().collect())).collect()
    }

    /// The healthy devices of each resource, with the NUMA nodes they are near to.
    pub(crate) fn allocatable(&self) -> BTreeMap<String, BTreeMap<String, Device>> {
        let healthy = |one: &Resource| -> BTreeMap<String, Device> {
            let healthy = one.devices.iter().filter(|(id, _)| one.healthy.contains(*id));
            healthy.map(|(id, device)| (id.clone(), device.clone())).collect()
        };
        let there = self.resources.iter().filter(|(_, one)| one.presence != Presence::Removed);
        there.map(|(name, one)| (name.clone(), healthy(one))).collect()
    }

    /// True if plugins care for the resource; others are the cluster's own matter.
    pub(crate) fn is_device_resource(&self, resource: &str) -> bool {
        self.resources.get(resource).is_some_and(|one| one.presence != Presence::Removed)
            || self.pods.values().flat_map(BTreeMap::values).any(|given| given.contains_key(resource))
    }

    /// The devices of all resources that a container has.
    pub(crate) fn given(&self, pod: &str, container: &str) -> Option<&ContainerDevices> {
        self.pods.get(pod)?.get(container)
    }

    /// Health of a device that a container has. One that no plugin lists any longer counts as it was last seen.
    pub(crate) fn is_healthy(&self, resource: &str, device: &str) -> bool {
        self.resources.get(resource).and_then(|one| one.devices.get(device)).is_none_or(|d| d.healthy)
    }

    fn in_use(&self, resource: &str) -> Ids {
        let containers = self.pods.values().flat_map(BTreeMap::values);
        let given = containers.filter_map(|c| c.get(resource)).flat_map(Given::ids);
        let reserved = self.reserved.iter().filter(|((_, _, r), _)| r == resource);
        given.chain(reserved.flat_map(|(_, ids)| ids.iter().cloned())).collect()
    }

    /// Number of devices of each resource that pods use.
    pub(crate) fn in_use_counts(&self) -> BTreeMap<String, usize> {
        let containers = self.pods.values().flat_map(BTreeMap::values);
        let names: BTreeSet<&String> = containers.flat_map(BTreeMap::keys).collect();
        names.into_iter().map(|name| (name.clone(), self.in_use(name).len())).collect()
    }

    /// Devices that could be given to a container now, and all that the plugin lists.
    pub(crate) fn free(&self, resource: &str) -> (Ids, BTreeMap<String, Device>) {
        let Some(one) = self.resources.get(resource) else { return Default::default() };
        (one.healthy.difference(&self.in_use(resource)).cloned().collect(), one.devices.clone())
    }

    /// Chooses devices for a container, or the question that the plugin must answer first.
    pub(crate) fn select(
        &self,
        wish: &Wish<'_>,
        preferences: &Preferences,
    ) -> Result<Selection, DeviceError> {
        let name = wish.resource.to_owned();
        let had = self.given(wish.pod, wish.container).and_then(|c| c.get(wish.resource)).map(Given::ids);
        if let Some(had) = had.as_ref().filter(|had| had.len() != wish.required) {
            return Err(DeviceError::Changed {
                pod: wish.pod.to_owned(),
                container: wish.container.to_owned(),
                resource: name,
                had: had.len(),
                asked: wish.required,
            });
        }
        let there = self.resources.get(wish.resource).filter(|one| one.presence != Presence::Removed);
        let Some(resource) = there else { return Err(DeviceError::Unregistered(name)) };
        if resource.healthy.is_empty() {
            return Err(DeviceError::NoneHealthy(name));
        }
        if let Some(had) = had {
            return match had.is_subset(&resource.healthy) {
                true => Ok(Selection::Nothing),
                false => Err(DeviceError::NoLongerHealthy(name)),
            };
        }
        let mut chosen: Ids = wish.reusable.iter().take(wish.required).cloned().collect();
        let needed = wish.required - chosen.len();
        if needed == 0 {
            return Ok(Selection::Devices(chosen));
        }
        let used = self.in_use(wish.resource);
        let available: Ids = resource.healthy.difference(&used).cloned().collect();
        if available.len() < needed {
            let available = available.len();
            return Err(DeviceError::Unavailable { resource: name, needed, available });
        }
        let parts = by_affinity(&available, &resource.devices, wish.affinity);
        // If the nodes that were chosen have more than enough, the plugin says which; else they are taken first and
        // the plugin says which others.
        let asked = match needed < parts.aligned.len() {
            true => &parts.aligned,
            false => {
                take(&mut chosen, &parts.aligned, wish.required);
                &available
            }
        };
        if chosen.len() < wish.required && wish.has_preference {
            let query = Query {
                resource: name,
                available: asked.union(&chosen).cloned().collect(),
                must_include: chosen.clone(),
                size: wish.required,
            };
            let Some(preferred) = preferences.get(&query) else { return Ok(Selection::Ask(query)) };
            let preferred: Ids = preferred.intersection(asked).cloned().collect();
            take(&mut chosen, &preferred, wish.required);
        }
        for part in [&parts.aligned, &parts.unaligned, &parts.anywhere] {
            take(&mut chosen, part, wish.required);
        }
        Ok(Selection::Devices(chosen))
    }

    /// Keeps the devices for the container until the plugin has answered.
    pub(crate) fn reserve(&mut self, wish: &Wish<'_>, devices: &Ids) {
        let key = (wish.pod.to_owned(), wish.container.to_owned(), wish.resource.to_owned());
        self.reserved.insert(key, devices.clone());
    }

    /// The plugin refused.
    pub(crate) fn unreserve(&mut self, wish: &Wish<'_>) {
        self.reserved.remove(&(wish.pod.to_owned(), wish.container.to_owned(), wish.resource.to_owned()));
    }

    /// The devices are the container's from now on.
    pub(crate) fn give(&mut self, wish: &Wish<'_>, devices: &Ids, response: ContainerAllocateResponse) {
        self.unreserve(wish);
        let listed = self.resources.get(wish.resource).map(|one| &one.devices);
        let mut per_numa = PerNuma::new();
        for id in devices {
            let nodes = listed.and_then(|all| all.get(id)).map(|d| d.nodes.clone()).unwrap_or_default();
            let nodes = if nodes.is_empty() { vec![NO_NUMA] } else { nodes };
            for node in nodes {
                per_numa.entry(node).or_default().push(id.clone());
            }
        }
        let container = self.pods.entry(wish.pod.to_owned()).or_default();
        let resources = container.entry(wish.container.to_owned()).or_default();
        resources.insert(wish.resource.to_owned(), Given { devices: per_numa, response });
    }

    /// The pod has ended. Returns true if it had devices.
    pub(crate) fn release(&mut self, pod: &str) -> bool {
        self.reserved.retain(|(uid, _, _), _| uid != pod);
        self.pods.remove(pod).is_some()
    }

    /// Pods other than these do not exist any longer. Returns true if one of those had devices.
    pub(crate) fn retain(&mut self, live: &BTreeSet<String>) -> bool {
        let before = self.pods.len();
        self.pods.retain(|uid, _| live.contains(uid));
        self.pods.len() != before
    }
}

/// Takes devices in the order of their names until there are enough.
fn take(chosen: &mut Ids, from: &Ids, enough: usize) {
    for id in from {
        if chosen.len() >= enough {
            return;
        }
        chosen.insert(id.clone());
    }
}

struct Parts {
    /// At a node of the affinity.
    aligned: Ids,
    /// At other nodes only.
    unaligned: Ids,
    /// At no node, or there is no affinity.
    anywhere: Ids,
}

fn by_affinity(
    available: &Ids,
    devices: &BTreeMap<String, Device>,
    affinity: Option<&BTreeSet<i64>>,
) -> Parts {
    let mut parts = Parts { aligned: Ids::new(), unaligned: Ids::new(), anywhere: Ids::new() };
    // As upstream: without an affinity, or where no device is at a node, all are alike.
    let Some(affinity) = affinity.filter(|_| devices.values().any(|d| !d.nodes.is_empty())) else {
        parts.anywhere = available.clone();
        return parts;
    };
    for id in available {
        let nodes = devices.get(id).map(|d| d.nodes.as_slice()).unwrap_or_default();
        let part = if nodes.is_empty() {
            &mut parts.anywhere
        } else if nodes.iter().any(|node| affinity.contains(node)) {
            &mut parts.aligned
        } else {
            &mut parts.unaligned
        };
        part.insert(id.clone());
    }
    parts
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
