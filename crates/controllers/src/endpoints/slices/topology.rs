//! Hints of Services that ask for topology-aware routing with an annotation: the endpoints are shared out among the zones in the
//! proportion of the zones' CPUs.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrite_api::quantity::Quantity as Amount;
use ferrite_client::ObjectKey;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, EndpointSlice, ForZone};

use super::decide::zone;

/// As upstream: the share by which the endpoints of a zone may get more than their part of the traffic.
const OVERLOAD: f64 = 0.2;
/// The older name of the annotation comes first.
const ANNOTATIONS: [&str; 2] =
    ["service.kubernetes.io/topology-aware-hints", "service.kubernetes.io/topology-mode"];
/// Nodes with one of these labels do not count.
const EXCLUDED: [&str; 2] = ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];

/// Numbers by zone.
pub(super) type Zones<T> = BTreeMap<String, T>;

/// Returns true if the Service asks for hints by annotation.
pub(super) fn is_auto(service: &Service) -> bool {
    let annotations = service.metadata.annotations.as_ref();
    let value = ANNOTATIONS.iter().find_map(|key| annotations?.get(*key));
    value.is_some_and(|value| value == "Auto" || value == "auto")
}

/// The reason why a Service has no hints, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("Insufficient Node information: allocatable CPU or zone not specified on one or more nodes")]
    Nodes,
    #[error("Insufficient number of endpoints ({endpoints} endpoints, {zones} zones)")]
    TooFew { endpoints: usize, zones: usize },
    #[error(
        "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold ({endpoints} endpoints, {zones} zones)"
    )]
    Overload { endpoints: usize, zones: usize },
    #[error("One or more endpoints do not have a zone specified")]
    NoZone,
}

/// The share of each zone in the CPUs of all nodes that count. `None` if it is not known, or there is one zone.
pub(super) fn ratios<'a>(nodes: impl Iterator<Item = &'a Node>) -> Option<Zones<f64>> {
    let mut cpus: Zones<i64> = Zones::new();
    for node in nodes.filter(|node| counts(node)) {
        let zone = zone(node).filter(|zone| !zone.is_empty())?;
        let cpu = cpu(node).filter(|cpu| *cpu > 0)?;
        let all = cpus.entry(zone).or_default();
        *all = all.saturating_add(cpu);
    }
    let total: i64 = cpus.values().fold(0, |sum: i64, cpu| sum.saturating_add(*cpu));
    (cpus.len() > 1).then(|| cpus.into_iter().map(|(zone, cpu)| (zone, cpu as f64 / total as f64)).collect())
}

fn counts(node: &Node) -> bool {
    let labels = node.metadata.labels.as_ref();
    !EXCLUDED.iter().any(|label| labels.is_some_and(|labels| labels.contains_key(*label))) && is_ready(node)
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Thousandths of a CPU.
fn cpu(node: &Node) -> Option<i64> {
    let amount = node.status.as_ref()?.allocatable.as_ref()?.get("cpu")?;
    Amount::parse(&amount.0).ok().map(|amount| amount.milli_value())
}

/// Returns true if a change of a node may change the shares.
pub(super) fn differs(old: &Node, new: &Node) -> bool {
    (counts(old), zone(old), cpu(old)) != (counts(new), zone(new), cpu(new))
}

/// The endpoints that a zone should have.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Allocation {
    maximum: usize,
    desired: f64,
}

fn minimum(desired: f64) -> usize {
    (desired * (1.0 / (1.0 + OVERLOAD))).ceil().max(0.0) as usize
}

fn allocations(ratios: Option<&Zones<f64>>, endpoints: usize) -> Result<Zones<Allocation>, Refusal> {
    let ratios = ratios.ok_or(Refusal::Nodes)?;
    let zones = ratios.len();
    if zones > endpoints {
        return Err(Refusal::TooFew { endpoints, zones });
    }
    let least: Zones<(usize, f64)> = ratios
        .iter()
        .map(|(zone, ratio)| {
            let desired = ratio * endpoints as f64;
            (zone.clone(), (minimum(desired), desired))
        })
        .collect();
    let total: usize = least.values().map(|(minimum, _)| minimum).sum();
    let spare = endpoints.checked_sub(total).ok_or(Refusal::Overload { endpoints, zones })?;
    let allocation = |(minimum, desired): (usize, f64)| Allocation {
        maximum: minimum + spare,
        desired: desired.max(minimum as f64),
    };
    Ok(least.into_iter().map(|(zone, least)| (zone, allocation(least))).collect())
}

/// The slices of one address family of a Service.
#[derive(Debug, Default)]
pub(super) struct Slices {
    pub(super) create: Vec<EndpointSlice>,
    pub(super) update: Vec<EndpointSlice>,
    pub(super) unchanged: Vec<EndpointSlice>,
}

fn is_endpoint_ready(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(false)
}

fn endpoints(slice: &EndpointSlice) -> &[Endpoint] {
    slice.endpoints.as_deref().unwrap_or_default()
}

fn for_zone(zone: &str) -> Option<EndpointHints> {
    let for_zones = Some(vec![ForZone { name: zone.to_owned() }]);
    Some(EndpointHints { for_zones, ..EndpointHints::default() })
}

impl Slices {
    /// Gives every ready endpoint a hint, changing as few slices as possible, or takes all hints away. Returns the number of
    /// hints for each zone.
    pub(super) fn add_hints(&mut self, ratios: Option<&Zones<f64>>) -> Result<Zones<usize>, Refusal> {
        let added = self.try_add(ratios);
        if added.is_err() {
            self.remove_hints();
        }
        added
    }

    fn try_add(&mut self, ratios: Option<&Zones<f64>>) -> Result<Zones<usize>, Refusal> {
        let all = self.create.iter().chain(&self.update).chain(&self.unchanged);
        let ready = all.flat_map(endpoints).filter(|endpoint| is_endpoint_ready(endpoint)).count();
        let allocations = allocations(ratios, ready)?;
        let mut hinted = self.keep(&allocations);
        // Each endpoint serves its own zone first.
        for endpoint in self.changing().filter(|endpoint| is_endpoint_ready(endpoint)) {
            let zone = endpoint.zone.clone().filter(|zone| !zone.is_empty()).ok_or(Refusal::NoZone)?;
            endpoint.hints = for_zone(&zone);
            *hinted.entry(zone).or_default() += 1;
        }
        // Then zones with too many give some to those with too few.
        let (mut giving, mut receiving) = exchange(&allocations, &hinted);
        for endpoint in self.changing() {
            if !is_endpoint_ready(endpoint) {
                endpoint.hints = None;
                continue;
            }
            let own = endpoint.zone.clone().unwrap_or_default();
            let Some(gives) = giving.get_mut(&own).filter(|gives| **gives > 0) else { continue };
            let Some((zone, receives)) = receiving.iter_mut().find(|(_, receives)| **receives > 0) else {
                break;
            };
            endpoint.hints = for_zone(zone);
            *gives -= 1;
            *receives -= 1;
            *hinted.entry(zone.clone()).or_default() += 1;
            if let Some(count) = hinted.get_mut(&own) {
                *count -= 1;
            }
        }
        Ok(hinted)
    }

    /// The endpoints of slices that are written anyway.
    fn changing(&mut self) -> impl Iterator<Item = &mut Endpoint> {
        self.create.iter_mut().chain(&mut self.update).flat_map(|slice| slice.endpoints.iter_mut().flatten())
    }

    /// Keeps the hints of slices that do not change, where they fit. The other slices change, too.
    fn keep(&mut self, allocations: &Zones<Allocation>) -> Zones<usize> {
        let mut hinted: Zones<usize> = Zones::new();
        for slice in std::mem::take(&mut self.unchanged) {
            match fitting(&slice, &hinted, allocations) {
                Some(more) => {
                    more.into_iter().for_each(|(zone, count)| *hinted.entry(zone).or_default() += count);
                    self.unchanged.push(slice);
                }
                None => self.update.push(slice),
            }
        }
        hinted
    }

    fn remove_hints(&mut self) {
        self.changing().for_each(|endpoint| endpoint.hints = None);
        let has_hints =
            |slice: &EndpointSlice| endpoints(slice).iter().any(|endpoint| endpoint.hints.is_some());
        let (changed, unchanged) = std::mem::take(&mut self.unchanged).into_iter().partition(has_hints);
        self.unchanged = unchanged;
        self.update.extend(changed.into_iter().map(|mut slice: EndpointSlice| {
            slice.endpoints.iter_mut().flatten().for_each(|endpoint| endpoint.hints = None);
            slice
        }));
    }
}

/// The hints of a slice by zone, if every endpoint has one and no zone gets too many with those that are `hinted`.
fn fitting(
    slice: &EndpointSlice,
    hinted: &Zones<usize>,
    allocations: &Zones<Allocation>,
) -> Option<Zones<usize>> {
    let mut own: Zones<usize> = Zones::new();
    for endpoint in endpoints(slice).iter().filter(|endpoint| is_endpoint_ready(endpoint)) {
        let zones = endpoint.hints.as_ref()?.for_zones.as_deref().filter(|zones| !zones.is_empty())?;
        for zone in zones {
            allocations.get(&zone.name)?;
            *own.entry(zone.name.clone()).or_default() += 1;
        }
    }
    let fits = own.iter().all(|(zone, count)| {
        let all = count + hinted.get(zone).copied().unwrap_or(0);
        allocations.get(zone).is_some_and(|allocation| all <= allocation.maximum)
    });
    fits.then_some(own)
}

/// The numbers of endpoints that zones give and receive.
fn exchange(allocations: &Zones<Allocation>, hinted: &Zones<usize>) -> (Zones<usize>, Zones<usize>) {
    let (mut surplus, mut lack): (Zones<f64>, Zones<f64>) = Default::default();
    for (zone, allocation) in allocations {
        let over = hinted.get(zone).copied().unwrap_or(0) as f64 - allocation.desired;
        let (zones, amount) = if over > 0.0 { (&mut surplus, over) } else { (&mut lack, -over) };
        zones.insert(zone.clone(), amount);
    }
    let most = |zones: &Zones<f64>| {
        let best = zones.iter().max_by(|a, b| a.1.total_cmp(b.1));
        best.filter(|(_, amount)| **amount > 0.0).map(|(zone, amount)| (zone.clone(), *amount))
    };
    let (mut giving, mut receiving): (Zones<usize>, Zones<usize>) = Default::default();
    while let (Some((giver, gives)), Some((receiver, receives))) = (most(&surplus), most(&lack)) {
        if (gives < 1.0 && receives < 1.0) || gives < 0.5 || receives < 0.5 {
            break;
        }
        *giving.entry(giver.clone()).or_default() += 1;
        *receiving.entry(receiver.clone()).or_default() += 1;
        surplus.insert(giver, gives - 1.0);
        lack.insert(receiver, receives - 1.0);
    }
    (giving, receiving)
}

/// Returns true if some zone has too few of a Service's endpoints.
fn is_overloaded(hinted: &Zones<usize>, ratios: Option<&Zones<f64>>) -> bool {
    let total: usize = hinted.values().sum();
    match ratios {
        _ if hinted.is_empty() => false,
        None => true,
        Some(ratios) => ratios
            .iter()
            .any(|(zone, ratio)| hinted.get(zone).is_none_or(|count| *count < minimum(total as f64 * ratio))),
    }
}

/// The hints of all Services, and the shares of the zones.
#[derive(Debug, Default)]
pub(super) struct Topology(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The shares of the zones, if they have been calculated since the last change.
    ratios: Option<Option<Zones<f64>>>,
    /// The number of hints for each zone, by Service and address family.
    hinted: HashMap<ObjectKey, BTreeMap<&'static str, Zones<usize>>>,
}

impl Topology {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shares of the zones, calculated where they are not known.
    pub(super) fn ratios(&self, calculate: impl FnOnce() -> Option<Zones<f64>>) -> Option<Zones<f64>> {
        if let Some(known) = &self.state().ratios {
            return known.clone();
        }
        let ratios = calculate();
        self.state().ratios = Some(ratios.clone());
        ratios
    }

    /// Notes that nodes have changed, and returns the Services that need other hints now. While no Service has hints,
    /// nothing is calculated.
    pub(super) fn changed(&self, calculate: impl FnOnce() -> Option<Zones<f64>>) -> Vec<ObjectKey> {
        if self.state().hinted.is_empty() {
            self.state().ratios = None;
            return Vec::new();
        }
        let ratios = calculate();
        let mut state = self.state();
        let overloaded = state
            .hinted
            .iter()
            .filter(|(_, families)| families.values().any(|hinted| is_overloaded(hinted, ratios.as_ref())));
        let overloaded = overloaded.map(|(key, _)| key.clone()).collect();
        state.ratios = Some(ratios);
        overloaded
    }

    /// Notes the hints of one family. Returns true if the Service had none so far.
    pub(super) fn set_hints(&self, key: &ObjectKey, family: &'static str, hinted: Zones<usize>) -> bool {
        let mut state = self.state();
        let is_new = !state.hinted.contains_key(key);
        state.hinted.entry(key.clone()).or_default().insert(family, hinted);
        is_new
    }

    /// Notes that one family has no hints. Returns true if the Service had some.
    pub(super) fn remove_hints(&self, key: &ObjectKey, family: &str) -> bool {
        let mut state = self.state();
        let Some(families) = state.hinted.get_mut(key) else { return false };
        families.remove(family);
        if families.is_empty() {
            state.hinted.remove(key);
        }
        true
    }

    pub(super) fn forget(&self, key: &ObjectKey) {
        self.state().hinted.remove(key);
    }
}

#[cfg(test)]
#[path = "topology_tests.rs"]
mod tests;
