//! The devices that drivers publish in ResourceSlices, with their amounts read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_api::quantity::Quantity;
use ferrite_cel::Attribute;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, Device as DeviceSpec, DeviceAttribute, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

use super::Amounts;

/// Answers of selectors that are remembered for each device.
const REMEMBERED: usize = 16;

/// A device's name in the whole cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DeviceId {
    pub driver: String,
    pub pool: String,
    pub device: String,
}

impl DeviceId {
    pub fn new(driver: &str, pool: &str, device: &str) -> Self {
        Self { driver: driver.to_owned(), pool: pool.to_owned(), device: device.to_owned() }
    }
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.driver, self.pool, self.device)
    }
}

/// A capacity of a device, and the amounts that a share may take of it.
#[derive(Debug, Clone)]
pub(crate) struct Capacity {
    pub value: Quantity,
    pub policy: Option<Policy>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Policy {
    pub default: Option<Quantity>,
    pub range: Option<Range>,
    pub values: Vec<Quantity>,
}

#[derive(Debug, Clone)]
pub(crate) struct Range {
    pub min: Quantity,
    pub max: Option<Quantity>,
    pub step: Option<Quantity>,
}

/// Nothing for text that is no quantity: the API refuses such.
pub(super) fn amount(text: &Text) -> Quantity {
    Quantity::parse(&text.0).unwrap_or(Quantity::ZERO)
}

impl Policy {
    fn new(policy: &CapacityRequestPolicy) -> Self {
        Self {
            default: policy.default.as_ref().map(amount),
            range: policy.valid_range.as_ref().map(|range| Range {
                min: amount(&range.min),
                max: range.max.as_ref().map(amount),
                step: range.step.as_ref().map(amount),
            }),
            values: policy.valid_values.iter().flatten().map(amount).collect(),
        }
    }
}

/// A device of a slice.
#[derive(Debug)]
pub(crate) struct Device {
    pub id: DeviceId,
    pub capacity: BTreeMap<String, Capacity>,
    /// Counters that it takes from its pool, by set.
    pub consumes: Vec<(String, Amounts)>,
    /// The device as selectors see it, or the reason why they cannot.
    pub selected: Result<ferrite_cel::Device, String>,
    slice: Arc<ResourceSlice>,
    position: usize,
    /// Answers of selectors: the device does not change, a slice that does is read anew.
    answers: Mutex<HashMap<Arc<str>, bool>>,
}

impl Device {
    pub fn spec(&self) -> &DeviceSpec {
        // The position was taken from this list, and the slice does not change.
        &self.slice.spec.devices.as_deref().unwrap_or_default()[self.position]
    }

    pub fn slice(&self) -> &ResourceSliceSpec {
        &self.slice.spec
    }

    pub fn allows_multiple(&self) -> bool {
        self.spec().allow_multiple_allocations == Some(true)
    }

    /// The attribute with this name and domain. A name without a domain is in the domain of the driver.
    pub fn attribute(&self, name: &str) -> Option<Attribute<'_>> {
        let attributes = self.spec().attributes.as_ref()?;
        let found = attributes.get(name).or_else(|| {
            let (domain, id) = name.split_once('/')?;
            (domain == self.id.driver).then(|| attributes.get(id))?
        });
        found.and_then(value_of)
    }

    /// The answer that a selector gave before.
    pub fn answer(&self, expression: &str) -> Option<bool> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).get(expression).copied()
    }

    pub fn remember(&self, expression: Arc<str>, answer: bool) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.len() >= REMEMBERED {
            answers.clear();
        }
        answers.insert(expression, answer);
    }
}

fn value_of(attribute: &DeviceAttribute) -> Option<Attribute<'_>> {
    if let Some(value) = attribute.int {
        return Some(Attribute::Int(value));
    }
    if let Some(value) = attribute.bool {
        return Some(Attribute::Bool(value));
    }
    if let Some(value) = &attribute.string {
        return Some(Attribute::String(value));
    }
    attribute.version.as_deref().map(Attribute::Version)
}

fn selected(driver: &str, device: &DeviceSpec) -> Result<ferrite_cel::Device, String> {
    let mut attributes = Vec::new();
    for (name, attribute) in device.attributes.iter().flatten() {
        // As upstream: a list of values stops scheduling until the slice changes, rather than schedule wrongly.
        let value =
            value_of(attribute).ok_or_else(|| format!("attribute {name}: unsupported attribute value"))?;
        attributes.push((name.as_str(), value));
    }
    let capacity = device.capacity.iter().flatten().map(|(name, of)| (name.as_str(), of.value.0.as_str()));
    let multiple = device.allow_multiple_allocations == Some(true);
    ferrite_cel::Device::new(driver, multiple, attributes, capacity).map_err(|error| error.to_string())
}

/// A ResourceSlice.
#[derive(Debug)]
pub(crate) struct Slice {
    pub name: String,
    pub devices: Vec<Device>,
    /// Counters that devices of the pool share, by set.
    pub counters: Vec<(String, Amounts)>,
    slice: Arc<ResourceSlice>,
}

impl Slice {
    pub fn new(slice: Arc<ResourceSlice>) -> Self {
        let spec = &slice.spec;
        let amounts = |counters: &BTreeMap<String, _>| -> Amounts {
            counters
                .iter()
                .map(|(name, counter): (_, &k8s_openapi::api::resource::v1::Counter)| {
                    (name.clone(), amount(&counter.value))
                })
                .collect()
        };
        let devices = spec.devices.iter().flatten().enumerate().map(|(position, device)| Device {
            id: DeviceId::new(&spec.driver, &spec.pool.name, &device.name),
            capacity: device
                .capacity
                .iter()
                .flatten()
                .map(|(name, of)| {
                    let policy = of.request_policy.as_ref().map(Policy::new);
                    (name.clone(), Capacity { value: amount(&of.value), policy })
                })
                .collect(),
            consumes: device
                .consumes_counters
                .iter()
                .flatten()
                .map(|consumed| (consumed.counter_set.clone(), amounts(&consumed.counters)))
                .collect(),
            selected: selected(&spec.driver, device),
            slice: slice.clone(),
            position,
            answers: Mutex::default(),
        });
        let counters = spec.shared_counters.iter().flatten();
        Self {
            name: slice.metadata.name.clone().unwrap_or_default(),
            devices: devices.collect(),
            counters: counters.map(|set| (set.name.clone(), amounts(&set.counters))).collect(),
            slice: slice.clone(),
        }
    }

    pub fn spec(&self) -> &ResourceSliceSpec {
        &self.slice.spec
    }

    pub fn generation(&self) -> i64 {
        self.slice.spec.pool.generation
    }
}

/// A pool's driver and name.
pub(super) type PoolKey = (String, String);

/// All slices of the cluster, by pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct Inventory {
    /// Slices by pool, then by name.
    pools: BTreeMap<PoolKey, BTreeMap<String, Arc<Slice>>>,
    /// The pool of each slice.
    places: HashMap<String, PoolKey>,
    /// Pools with devices for one node, by node.
    local: HashMap<String, BTreeSet<PoolKey>>,
    /// Pools with slices that are not for one node alone.
    wide: BTreeSet<PoolKey>,
}

/// The node that the slice is for, if it is for one alone. Counters are for all nodes of the pool.
fn only_node(slice: &Slice) -> Option<&str> {
    let name = slice.spec().node_name.as_deref().filter(|name| !name.is_empty());
    name.filter(|_| slice.counters.is_empty())
}

impl Inventory {
    pub fn insert(&mut self, slice: Slice) {
        self.remove(&slice.name);
        let key = (slice.spec().driver.clone(), slice.spec().pool.name.clone());
        match only_node(&slice) {
            Some(node) => {
                self.local.entry(node.to_owned()).or_default().insert(key.clone());
            }
            None => {
                self.wide.insert(key.clone());
            }
        }
        self.places.insert(slice.name.clone(), key.clone());
        self.pools.entry(key).or_default().insert(slice.name.clone(), Arc::new(slice));
    }

    pub fn remove(&mut self, name: &str) {
        let Some(key) = self.places.remove(name) else { return };
        let Some(slices) = self.pools.get_mut(&key) else { return };
        let Some(removed) = slices.remove(name) else { return };
        let node = only_node(&removed);
        if !slices.values().any(|slice| only_node(slice) == node) {
            match node {
                None => {
                    self.wide.remove(&key);
                }
                Some(node) => {
                    if let Some(keys) = self.local.get_mut(node) {
                        keys.remove(&key);
                        if keys.is_empty() {
                            self.local.remove(node);
                        }
                    }
                }
            }
        }
        if slices.is_empty() {
            self.pools.remove(&key);
        }
    }

    /// The pools that may have something for the node, with all their slices, in order.
    pub(super) fn pools_of(
        &self,
        node: &str,
    ) -> impl Iterator<Item = (&PoolKey, &BTreeMap<String, Arc<Slice>>)> {
        let local = self.local.get(node).into_iter().flatten();
        let keys: BTreeSet<&PoolKey> = local.chain(&self.wide).collect();
        keys.into_iter().filter_map(|key| self.pools.get_key_value(key))
    }
}
