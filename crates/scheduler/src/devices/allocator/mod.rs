//! Chooses devices for claims on one node. Nothing here reads a clock, writes or waits.
//!
//! [`inventory`] has the devices that drivers publish, [`pools`] those that one node can use, [`request`] the requests of
//! claims, [`search`] tries combinations of devices, [`constraint`] and [`capacity`] are the rules between devices, and
//! [`result`] writes down a combination that works.

mod capacity;
mod constraint;
mod inventory;
mod pools;
mod request;
mod result;
mod search;

#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use ferrite_api::quantity::Quantity;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim};

pub(crate) use inventory::{Device, DeviceId, Inventory, Slice};

/// The most devices that one claim can have.
pub(crate) const RESULTS_MAX: usize = 32;

/// Amounts by name.
pub(crate) type Amounts = BTreeMap<String, Quantity>;

/// The devices that claims have already.
#[derive(Debug, Clone, Default)]
pub(crate) struct Allocated {
    /// Devices that belong to one claim.
    pub devices: HashSet<DeviceId>,
    /// Devices that several claims share, with the capacity that these consume together.
    pub shared: HashMap<DeviceId, Amounts>,
}

impl Allocated {
    /// Adds the devices of an allocation. Access for administration takes no device from others.
    pub fn add(&mut self, allocation: &AllocationResult) {
        let results = allocation.devices.as_ref().and_then(|devices| devices.results.as_ref());
        for result in results.into_iter().flatten().filter(|result| result.admin_access != Some(true)) {
            let id = DeviceId::new(&result.driver, &result.pool, &result.device);
            if result.share_id.is_none() {
                self.devices.insert(id);
                continue;
            }
            let consumed = self.shared.entry(id).or_default();
            for (name, amount) in result.consumed_capacity.iter().flatten() {
                add_to(consumed, name, inventory::amount(amount));
            }
        }
    }

    /// True if there is a device in one of these pools that is not in `earlier`, or of which more is consumed.
    pub fn adds_to(&self, earlier: &Self, is_of: impl Fn(&str, &str) -> bool) -> bool {
        let concerns = |id: &DeviceId| is_of(&id.driver, &id.pool);
        let is_new = |id: &DeviceId| concerns(id) && !earlier.devices.contains(id);
        self.devices.iter().any(is_new)
            || self.shared.iter().filter(|(id, _)| concerns(id)).any(|(id, amounts)| {
                earlier.shared.get(id).is_none_or(|before| {
                    amounts.iter().any(|(name, amount)| before.get(name).is_none_or(|b| amount > b))
                })
            })
    }

    fn has(&self, id: &DeviceId) -> bool {
        self.devices.contains(id) || self.shared.contains_key(id)
    }
}

fn add_to(amounts: &mut Amounts, name: &str, amount: Quantity) {
    match amounts.get_mut(name) {
        Some(held) => *held = *held + amount,
        None => {
            amounts.insert(name.to_owned(), amount);
        }
    }
}

/// No devices were chosen, for a reason that is none of the node's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AllocationError {
    #[error("timed out trying to allocate devices")]
    OutOfTime,
    /// The node's other pools do not suffice.
    #[error("invalid resource pools were encountered")]
    InvalidPools,
    #[error("claim {claim}, request {request}: {problem}")]
    Request { claim: String, request: String, problem: RequestProblem },
    #[error("claim {claim}: number of requested devices {count} exceeds the claim limit of {RESULTS_MAX}")]
    TooMany { claim: String, count: usize },
    #[error("claim {claim}, constraint #{index}: empty constraint (unsupported constraint type?)")]
    EmptyConstraint { claim: String, index: usize },
    #[error("{of}: selector #{index}: {problem}")]
    Selector { of: SelectorOwner, index: usize, problem: SelectorError },
}

/// A request that cannot be met anywhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestProblem {
    #[error("missing device class name (unsupported request type?)")]
    NoClass,
    #[error("could not retrieve device class {0}: deviceclass.resource.k8s.io \"{0}\" not found")]
    ClassNotFound(String),
    #[error("asks for all devices, but resource pool {0} is currently being updated")]
    IncompletePool(String),
    #[error("asks for all devices, but resource pool {0} is currently invalid")]
    InvalidPool(String),
    #[error("unsupported count mode {0}")]
    Mode(String),
    #[error("exact count {0} is too large")]
    Count(i64),
    #[error("cannot add device {0} because a claim constraint would not be satisfied")]
    Constraint(DeviceId),
}

/// The object that a selector belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SelectorOwner {
    Class(String),
    Claim(String),
}

impl std::fmt::Display for SelectorOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Class(name) => write!(f, "class {name}"),
            Self::Claim(name) => write!(f, "claim {name}"),
        }
    }
}

/// A selector gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SelectorError {
    #[error("CEL expression empty (unsupported selector type?)")]
    Empty,
    #[error("CEL compile error: {0}")]
    Compile(String),
    #[error("CEL runtime error: {0}")]
    Evaluate(String),
}

/// Evaluates selectors of devices.
pub(crate) trait Selectors {
    fn matches(&self, expression: &str, device: &Device) -> Result<bool, SelectorError>;
}

/// Everything that a choice depends on, apart from the node and the claims.
pub(crate) struct Allocator<'a> {
    pub inventory: &'a Inventory,
    pub allocated: &'a Allocated,
    pub classes: &'a dyn Fn(&str) -> Option<Arc<DeviceClass>>,
    pub selectors: &'a dyn Selectors,
    /// True when the search has to end. It is asked now and then.
    pub is_over: &'a dyn Fn() -> bool,
    /// Makes the identity of a share of a device.
    pub new_share_id: &'a dyn Fn() -> String,
}

impl Allocator<'_> {
    /// Devices for all claims, in the order of the claims; `None` if the node does not have them. The first
    /// combination that works is chosen.
    pub fn allocate(
        &self,
        node: &Node,
        claims: &[&ResourceClaim],
    ) -> Result<Option<Vec<AllocationResult>>, AllocationError> {
        let pools = pools::gather(self.inventory, node);
        let plans = request::plan(self, node, claims, &pools)?;
        let Some(found) = search::search(self, node, &plans, &pools)? else {
            // As upstream: the error is told only if nothing else helped.
            if pools.iter().any(pools::Pool::is_invalid) {
                return Err(AllocationError::InvalidPools);
            }
            return Ok(None);
        };
        let results = plans.iter().zip(&found).map(|(plan, found)| result::write(plan, found, node));
        Ok(Some(results.collect()))
    }
}

/// `namespace/name`, as messages have it.
fn key_of(claim: &ResourceClaim) -> String {
    let metadata = &claim.metadata;
    format!(
        "{}/{}",
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default()
    )
}
