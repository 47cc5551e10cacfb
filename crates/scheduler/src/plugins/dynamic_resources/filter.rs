//! The way to a node: PreFilter, Filter, Score and the remedy when no node fits.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ferrite_client::resource_claims::{allocation, consumers, is_allocated, results};
use ferrite_client::{ObjectKey, matches_node};
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerExtendedResourceRequest, Node};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

use super::readiness::{Readiness, is_timed_out, readiness};
use super::{DynamicResources, NAME, extended};
use crate::cycle::normalize;
use crate::devices::allocator::{Allocated, AllocationError, Allocator, Inventory};
use crate::framework::{
    CycleState, FailedSearch, Filter, Interest, PluginError, PostFilter, PostFiltered, PreFilter,
    PreFiltered, PreScore, Rejection, Remedy, Score,
};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

/// The most subrequests of a request.
const SUBREQUESTS_MAX: usize = 8;

/// A pod's claims in one cycle.
#[derive(Clone)]
pub(super) struct PodClaims(pub(super) Arc<Cycle>);

/// The devices that claims had when the results of a search were confirmed.
#[derive(Clone)]
struct Since(Arc<Allocated>);

pub(super) struct Cycle {
    /// The claims of the pod's spec, as they were when the cycle began.
    pub claims: Vec<Arc<ResourceClaim>>,
    /// The claim of the pod's extended resources, in memory only unless an earlier attempt has written it.
    pub extended: Option<Arc<ResourceClaim>>,
    inventory: Arc<Inventory>,
    allocated: Allocated,
    /// The end of the search, for all nodes together.
    deadline: Option<Instant>,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    /// Positions of claims that are allocated and kept some node out.
    unavailable: BTreeSet<usize>,
    nodes: HashMap<String, Arc<NodeAllocation>>,
}

/// The devices for the pod on one node.
pub(super) struct NodeAllocation {
    /// For each claim that had no devices: its position, and its devices.
    pub claims: Vec<(usize, Arc<AllocationResult>)>,
    pub extended: Option<ExtendedAllocation>,
}

/// The claim of extended resources on one node.
#[derive(Clone)]
pub(super) struct ExtendedAllocation {
    pub claim: Arc<ResourceClaim>,
    pub devices: Arc<AllocationResult>,
    pub mappings: Vec<ContainerExtendedResourceRequest>,
}

impl Cycle {
    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn on_node(&self, node: &str) -> Option<Arc<NodeAllocation>> {
        self.found().nodes.get(node).cloned()
    }

    /// Rejects the node if other claims got devices of the same pools since the search: they may have taken the devices, or
    /// the counters and the capacity that these need.
    fn still_holds(&self, node: &str, since: &Allocated) -> Result<(), Rejection> {
        let Some(found) = self.on_node(node) else {
            // A node that has the extended resources from a device plugin needs no devices of claims.
            return match self.claims.iter().all(|claim| is_allocated(claim)) {
                true => Ok(()),
                false => Err(Rejection::unresolvable("no devices were found on the node")),
            };
        };
        let of_extended = found.extended.iter().map(|extended| &extended.devices);
        let chosen = found.claims.iter().map(|(_, devices)| devices).chain(of_extended);
        let pools: BTreeSet<(&str, &str)> = chosen
            .flat_map(|devices| results(devices))
            .map(|result| (result.driver.as_str(), result.pool.as_str()))
            .collect();
        if since.adds_to(&self.allocated, |driver, pool| pools.contains(&(driver, pool))) {
            return Err(Rejection::unresolvable("other claims got devices of the same pools"));
        }
        Ok(())
    }

    fn needs_devices(&self) -> bool {
        self.extended.is_some() || self.claims.iter().any(|claim| !is_allocated(claim))
    }
}

fn key_of(claim: &ResourceClaim) -> ObjectKey {
    ObjectKey::of(claim)
}

impl PreFilter for DynamicResources {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection> {
        if let Some(PodClaims(cycle)) = state.get() {
            let cycle = cycle.clone();
            return self.confirm(state, pod, &cycle);
        }
        let claims = self.claims_of(pod)?;
        let extended = self.wants_extended(pod).then(|| self.extended_claim(pod));
        if claims.is_empty() && extended.is_none() {
            return Ok(PreFiltered::Skip);
        }
        for claim in claims.iter().filter(|claim| !is_allocated(claim)) {
            if self.devices.is_pending(claim.metadata.uid.as_deref().unwrap_or_default()) {
                let problem =
                    format!("resource claim {} is in the process of being allocated", key_of(claim));
                return Err(Rejection::unresolvable(problem));
            }
            self.check_classes(claim)?;
        }
        let (inventory, allocated) = self.devices.snapshot();
        let limit = self.args.filter_timeout.0;
        let deadline = (!limit.is_zero()).then(|| Instant::now().checked_add(limit)).flatten();
        let found = Mutex::default();
        state.put(PodClaims(Arc::new(Cycle { claims, extended, inventory, allocated, deadline, found })));
        Ok(PreFiltered::Needed)
    }
}

impl DynamicResources {
    /// The search is over, and time has passed: the claims must be as they were. [`Filter`] checks the devices.
    fn confirm(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cycle: &Cycle,
    ) -> Result<PreFiltered, Rejection> {
        let claims = self.claims_of(pod)?;
        let version = |claim: &Arc<ResourceClaim>| {
            (claim.metadata.uid.clone(), claim.metadata.resource_version.clone())
        };
        let is_pending = |claim: &Arc<ResourceClaim>| {
            !is_allocated(claim) && self.devices.is_pending(claim.metadata.uid.as_deref().unwrap_or_default())
        };
        if !claims.iter().map(version).eq(cycle.claims.iter().map(version)) || claims.iter().any(is_pending) {
            return Err(Rejection::unresolvable("claims of the pod have changed"));
        }
        let (_, allocated) = self.devices.snapshot();
        state.put(Since(Arc::new(allocated)));
        Ok(PreFiltered::Needed)
    }

    /// The claim that an earlier attempt made for the pod's extended resources, or a new one.
    fn extended_claim(&self, pod: &PodInfo) -> Arc<ResourceClaim> {
        let uid = pod.uid.as_deref().unwrap_or_default();
        let claims = self.devices.claims_in(&pod.key.namespace);
        let known = claims.into_iter().find(|claim| extended::is_of_pod(claim, &pod.key.name, uid));
        known
            .unwrap_or_else(|| Arc::new(extended::new_claim(&pod.key, uid, uuid::Uuid::new_v4().to_string())))
    }

    fn check_classes(&self, claim: &ResourceClaim) -> Result<(), Rejection> {
        let requests = claim.spec.devices.as_ref().and_then(|devices| devices.requests.as_ref());
        for request in requests.into_iter().flatten() {
            let subrequests = request.first_available.as_deref().unwrap_or_default();
            let subrequests = subrequests
                .iter()
                .map(|sub| (format!("{}/{}", request.name, sub.name), sub.device_class_name.as_str()));
            let exactly = request.exactly.as_ref();
            let exactly = exactly.map(|exactly| (request.name.clone(), exactly.device_class_name.as_str()));
            let mut is_known = false;
            for (name, class) in exactly.into_iter().chain(subrequests) {
                is_known = true;
                if self.devices.class(class).is_none() {
                    let problem = format!("request {name}: device class {class} does not exist");
                    return Err(Rejection::unresolvable(problem));
                }
            }
            if !is_known {
                let (claim, name) = (key_of(claim), &request.name);
                let problem = format!("resource claim {claim}, request {name}: unknown request type");
                return Err(Rejection::unresolvable(problem));
            }
        }
        Ok(())
    }

    /// The claim for the extended resources that the node does not have from a device plugin; `None` if it has all.
    fn extended_on(
        &self,
        cycle: &Cycle,
        pod: &PodInfo,
        node: &NodeInfo,
    ) -> Result<Option<(ResourceClaim, extended::Requests)>, Rejection> {
        let Some(claim) = &cycle.extended else { return Ok(None) };
        // It is from an earlier attempt: PostFilter deletes it, and the pod is tried anew.
        if claim.metadata.name.as_deref() != Some(extended::IN_MEMORY) {
            return Err(Rejection::unresolvable("cannot schedule extended resource claim"));
        }
        let mut resources = BTreeMap::new();
        for (name, amount) in &pod.requests.scalar {
            if *amount == 0 || !extended::is_extended(name) {
                continue;
            }
            let allocatable = node.allocatable.scalar.get(name);
            match self.devices.class_behind(name) {
                Some(class) if allocatable.copied().unwrap_or(0) == 0 => {
                    resources.insert(name.clone(), class.metadata.name.clone().unwrap_or_default());
                }
                _ if allocatable.is_none() => return Err(Rejection::unresolvable("cannot fit resource")),
                _ => {}
            }
        }
        if resources.is_empty() {
            return Ok(None);
        }
        let Some(object) = self.pods.get(&pod.key) else {
            return Err(Rejection::unresolvable("the pod is gone"));
        };
        let requests = extended::requests(&object, &resources);
        Ok(Some((requests.claim(claim), requests)))
    }

    /// Positions of the allocated claims that cannot be used on the node.
    fn unavailable(&self, cycle: &Cycle, node: &Node) -> Vec<usize> {
        let now = Timestamp::now();
        let is_unavailable = |claim: &ResourceClaim| {
            let Some(allocation) = allocation(claim) else { return false };
            let selector = allocation.node_selector.as_ref();
            if selector.is_some_and(|selector| !matches_node(None, Some(selector), node)) {
                return true;
            }
            match readiness(claim) {
                Readiness::Failed(_) => true,
                Readiness::Pending => is_timed_out(claim, self.args.binding_timeout.0, now),
                Readiness::Ready => false,
            }
        };
        let claims = cycle.claims.iter().enumerate();
        claims.filter(|(_, claim)| is_unavailable(claim)).map(|(position, _)| position).collect()
    }

    fn allocate(
        &self,
        cycle: &Cycle,
        node: &Node,
        claims: &[&ResourceClaim],
    ) -> Result<Vec<AllocationResult>, Rejection> {
        let is_over =
            || self.handle.is_ended() || cycle.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let allocator = Allocator {
            inventory: &cycle.inventory,
            allocated: &cycle.allocated,
            classes: &|name| self.devices.class(name),
            selectors: &self.devices.selectors,
            is_over: &is_over,
            new_share_id: &|| uuid::Uuid::new_v4().to_string(),
        };
        let name = node.metadata.name.as_deref().unwrap_or_default();
        match allocator.allocate(node, claims) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err(Rejection::unresolvable("cannot allocate all claims")),
            Err(error @ AllocationError::InvalidPools) => Err(Rejection::unresolvable(error.to_string())),
            // Another attempt may have more luck. It comes after a back-off.
            Err(error @ AllocationError::OutOfTime) => {
                Err(PluginError::new("Filter", NAME, format!("node {name}: {error}")).into())
            }
            Err(error) => Err(PluginError::new("Filter", NAME, error).into()),
        }
    }
}

impl Filter for DynamicResources {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(PodClaims(cycle)) = state.get() else { return Ok(()) };
        if let Some(Since(allocated)) = state.get() {
            return cycle.still_holds(node.name(), allocated);
        }
        let extended = self.extended_on(cycle, pod, node)?;
        if extended.is_none() && cycle.claims.is_empty() {
            return Ok(());
        }
        let unavailable = self.unavailable(cycle, &node.node);
        if cycle.needs_devices() {
            let user = cycle.claims.iter().enumerate().filter(|(_, claim)| !is_allocated(claim));
            let (positions, mut claims): (Vec<usize>, Vec<&ResourceClaim>) =
                user.map(|(position, claim)| (position, &**claim)).unzip();
            claims.extend(extended.as_ref().map(|(claim, _)| claim));
            let mut found = self.allocate(cycle, &node.node, &claims)?;
            let devices = (found.len() > positions.len()).then(|| found.pop()).flatten();
            let extended = extended.zip(devices).map(|((claim, requests), devices)| ExtendedAllocation {
                claim: Arc::new(claim),
                devices: Arc::new(devices),
                mappings: requests.mappings,
            });
            if unavailable.is_empty() {
                let claims = positions.into_iter().zip(found.into_iter().map(Arc::new)).collect();
                let found = Arc::new(NodeAllocation { claims, extended });
                cycle.found().nodes.insert(node.name().to_owned(), found);
            }
        }
        if unavailable.is_empty() {
            return Ok(());
        }
        cycle.found().unavailable.extend(unavailable);
        Err(Rejection::unresolvable("resourceclaim not available on the node"))
    }
}

impl PostFilter for DynamicResources {
    /// Takes devices from a claim that nobody else uses, so that the pod can get others.
    fn post_filter<'a>(
        &'a self,
        search: FailedSearch<'a>,
    ) -> BoxFuture<'a, Result<PostFiltered, PluginError>> {
        let answer = |message: &str, remedy| {
            let answer = PostFiltered { message: message.to_owned(), remedy, ..PostFiltered::default() };
            Box::pin(std::future::ready(Ok(answer)))
        };
        let Some(PodClaims(cycle)) = search.state.get() else {
            return answer("no new claims to deallocate", None);
        };
        let uid = search.pod.uid.as_deref().unwrap_or_default();
        let is_own = |claim: &ResourceClaim| match consumers(claim) {
            [] => true,
            [only] => only.uid == uid,
            _ => false,
        };
        let unavailable = cycle.found().unavailable.clone();
        let idle =
            unavailable.into_iter().map(|position| &cycle.claims[position]).find(|claim| is_own(claim));
        if let Some(claim) = idle {
            return answer("deallocation of ResourceClaim completed", self.deallocation(claim));
        }
        if let Some(claim) = cycle
            .extended
            .as_ref()
            .filter(|claim| claim.metadata.name.as_deref() != Some(extended::IN_MEMORY))
        {
            return answer("deletion of ResourceClaim completed", self.deletion(claim));
        }
        answer("still not schedulable", None)
    }
}

impl DynamicResources {
    fn deallocation(&self, claim: &Arc<ResourceClaim>) -> Option<Remedy> {
        let (client, claim) = (self.handle.client()?.clone(), claim.clone());
        Some(Remedy::new(move || {
            let (client, claim) = (client.clone(), claim.clone());
            Box::pin(async move {
                super::bind::deallocate(&client, &claim)
                    .await
                    .map_err(|error| PluginError::new("PostFilter", NAME, error))
            })
        }))
    }

    fn deletion(&self, claim: &Arc<ResourceClaim>) -> Option<Remedy> {
        let (client, claim) = (self.handle.client()?.clone(), claim.clone());
        Some(Remedy::new(move || {
            let (client, claim) = (client.clone(), claim.clone());
            Box::pin(async move {
                super::bind::delete(&client, &claim)
                    .await
                    .map_err(|error| PluginError::new("PostFilter", NAME, error))
            })
        }))
    }
}

impl PreScore for DynamicResources {
    fn pre_score(
        &self,
        state: &mut CycleState,
        _pod: &PodInfo,
        _snapshot: &Snapshot,
        _feasible: &[Arc<NodeInfo>],
    ) -> Interest {
        if state.get::<PodClaims>().is_some() { Interest::Needed } else { Interest::Skip }
    }
}

/// A node where earlier subrequests were met is better.
pub(super) fn score(claim: &ResourceClaim, allocation: &AllocationResult) -> i64 {
    let requests = claim.spec.devices.as_ref().and_then(|devices| devices.requests.as_ref());
    let has = |reference: &str| results(allocation).iter().any(|result| result.request == reference);
    let mut score = 0;
    for request in requests.into_iter().flatten().filter(|request| request.exactly.is_none()) {
        for (position, sub) in request.first_available.iter().flatten().enumerate() {
            if has(&format!("{}/{}", request.name, sub.name)) {
                score += i64::try_from(SUBREQUESTS_MAX.saturating_sub(position)).unwrap_or(0);
            }
        }
    }
    score
}

impl Score for DynamicResources {
    fn score(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(PodClaims(cycle)) = state.get() else { return 0 };
        let Some(found) = cycle.on_node(node.name()) else { return 0 };
        let mut total = 0;
        for (position, claim) in cycle.claims.iter().enumerate() {
            let new =
                found.claims.iter().find(|(other, _)| *other == position).map(|(_, devices)| &**devices);
            total += new.or_else(|| allocation(claim)).map_or(0, |devices| score(claim, devices));
        }
        total
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, _: &[Arc<NodeInfo>], scores: &mut [i64]) {
        normalize(scores, false);
    }
}
