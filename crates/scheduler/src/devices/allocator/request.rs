//! The requests of claims, checked and made ready for the search.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClass, DeviceSelector, DeviceToleration, ResourceClaim,
};

use super::constraint::Constraint;
use super::inventory::{Device, amount};
use super::pools::{Content, Pool, is_for_node};
use super::{
    AllocationError, Allocator, Amounts, RESULTS_MAX, RequestProblem, SelectorError, SelectorOwner, capacity,
    key_of,
};

/// A claim with its requests.
#[derive(Debug)]
pub(super) struct ClaimPlan<'a> {
    pub claim: &'a ResourceClaim,
    pub requests: Vec<RequestPlan<'a>>,
    pub constraints: Vec<Constraint<'a>>,
}

/// A request: one way to meet it, or several of which the first that works is taken.
#[derive(Debug)]
pub(super) struct RequestPlan<'a> {
    pub name: &'a str,
    pub alternatives: Vec<Alternative<'a>>,
    pub has_subrequests: bool,
}

/// A request or a subrequest.
#[derive(Debug)]
pub(super) struct Alternative<'a> {
    /// `request`, or `request/subrequest`.
    pub reference: String,
    pub class: Arc<DeviceClass>,
    pub tolerations: Option<&'a Vec<DeviceToleration>>,
    pub requested: Amounts,
    pub is_admin: bool,
    pub wanted: Wanted,
    selectors: &'a [DeviceSelector],
}

#[derive(Debug)]
pub(super) enum Wanted {
    Count(usize),
    /// All devices that can be selected: positions among the candidates.
    All(Vec<usize>),
}

impl Wanted {
    pub fn count(&self) -> usize {
        match self {
            Self::Count(count) => *count,
            Self::All(devices) => devices.len(),
        }
    }
}

/// The parts that requests and subrequests have in common.
struct Asked<'a> {
    reference: String,
    class: &'a str,
    mode: Option<&'a str>,
    count: Option<i64>,
    selectors: Option<&'a Vec<DeviceSelector>>,
    tolerations: Option<&'a Vec<DeviceToleration>>,
    capacity: Option<&'a CapacityRequirements>,
    is_admin: bool,
}

/// Checks the claims. Fails if a request cannot be met on any node.
pub(super) fn plan<'a>(
    allocator: &Allocator<'_>,
    node: &Node,
    claims: &[&'a ResourceClaim],
    pools: &[Pool],
) -> Result<Vec<ClaimPlan<'a>>, AllocationError> {
    claims.iter().map(|claim| plan_claim(allocator, node, claim, pools)).collect()
}

fn plan_claim<'a>(
    allocator: &Allocator<'_>,
    node: &Node,
    claim: &'a ResourceClaim,
    pools: &[Pool],
) -> Result<ClaimPlan<'a>, AllocationError> {
    let mut requests = Vec::new();
    let mut least = 0usize;
    let asked = claim.spec.devices.as_ref().and_then(|devices| devices.requests.as_ref());
    for request in asked.into_iter().flatten() {
        let exactly = request.exactly.as_ref().map(|exactly| Asked {
            reference: request.name.clone(),
            class: &exactly.device_class_name,
            mode: exactly.allocation_mode.as_deref(),
            count: exactly.count,
            selectors: exactly.selectors.as_ref(),
            tolerations: exactly.tolerations.as_ref(),
            capacity: exactly.capacity.as_ref(),
            is_admin: exactly.admin_access == Some(true),
        });
        let subrequests = request.first_available.iter().flatten().map(|sub| Asked {
            reference: format!("{}/{}", request.name, sub.name),
            class: &sub.device_class_name,
            mode: sub.allocation_mode.as_deref(),
            count: sub.count,
            selectors: sub.selectors.as_ref(),
            tolerations: sub.tolerations.as_ref(),
            capacity: sub.capacity.as_ref(),
            is_admin: false,
        });
        let mut alternatives = Vec::new();
        for asked in exactly.into_iter().chain(subrequests) {
            alternatives.push(plan_alternative(allocator, node, claim, asked, pools)?);
        }
        let fewest = alternatives.iter().map(|alternative| alternative.wanted.count()).min();
        let Some(fewest) = fewest else {
            let problem = RequestProblem::NoClass;
            return Err(AllocationError::Request {
                claim: key_of(claim),
                request: request.name.clone(),
                problem,
            });
        };
        least = least.saturating_add(fewest);
        let has_subrequests = request.exactly.is_none();
        requests.push(RequestPlan { name: &request.name, alternatives, has_subrequests });
    }
    if least > RESULTS_MAX {
        return Err(AllocationError::TooMany { claim: key_of(claim), count: least });
    }
    Ok(ClaimPlan { claim, requests, constraints: Constraint::of(claim)? })
}

fn plan_alternative<'a>(
    allocator: &Allocator<'_>,
    node: &Node,
    claim: &'a ResourceClaim,
    asked: Asked<'a>,
    pools: &[Pool],
) -> Result<Alternative<'a>, AllocationError> {
    let fail = |problem| {
        let request = asked.reference.rsplit('/').next().unwrap_or_default().to_owned();
        AllocationError::Request { claim: key_of(claim), request, problem }
    };
    if asked.class.is_empty() {
        return Err(fail(RequestProblem::NoClass));
    }
    let Some(class) = (allocator.classes)(asked.class) else {
        return Err(fail(RequestProblem::ClassNotFound(asked.class.to_owned())));
    };
    let requested = asked.capacity.and_then(|capacity| capacity.requests.as_ref());
    let requested = requested.into_iter().flatten().map(|(name, of)| (name.clone(), amount(of))).collect();
    let mut alternative = Alternative {
        reference: asked.reference.clone(),
        class,
        tolerations: asked.tolerations,
        requested,
        is_admin: asked.is_admin,
        wanted: Wanted::Count(0),
        selectors: asked.selectors.map(Vec::as_slice).unwrap_or_default(),
    };
    alternative.wanted = match asked.mode.unwrap_or("ExactCount") {
        "ExactCount" => {
            let count = asked.count.unwrap_or(1);
            Wanted::Count(usize::try_from(count).map_err(|_| fail(RequestProblem::Count(count)))?)
        }
        "All" => {
            for pool in pools {
                match pool.content {
                    Content::Incomplete => return Err(fail(RequestProblem::IncompletePool(pool.id.clone()))),
                    Content::Invalid => return Err(fail(RequestProblem::InvalidPool(pool.id.clone()))),
                    Content::Usable { .. } => {}
                }
            }
            let mut all = Vec::new();
            for (position, device) in pools.iter().flat_map(Pool::devices).enumerate() {
                if (allocator.is_over)() {
                    return Err(AllocationError::OutOfTime);
                }
                let shares = allocator.allocated.shared.get(&device.id);
                if is_selectable(allocator, node, claim, &alternative, device)?
                    && capacity::has_room(device, &alternative.requested, &Vec::from_iter(shares))
                {
                    all.push(position);
                }
            }
            Wanted::All(all)
        }
        mode => return Err(fail(RequestProblem::Mode(mode.to_owned()))),
    };
    Ok(alternative)
}

/// True if the selectors of class and request choose the device, and the node can use it.
pub(super) fn is_selectable(
    allocator: &Allocator<'_>,
    node: &Node,
    claim: &ResourceClaim,
    alternative: &Alternative<'_>,
    device: &Device,
) -> Result<bool, AllocationError> {
    let class = &alternative.class;
    let of_class = class.spec.selectors.as_deref().unwrap_or_default();
    let class_name = || SelectorOwner::Class(class.metadata.name.clone().unwrap_or_default());
    let claim_name = || SelectorOwner::Claim(key_of(claim));
    let matches = |selectors: &[DeviceSelector], owner: &dyn Fn() -> SelectorOwner| {
        for (index, selector) in selectors.iter().enumerate() {
            let answer = match &selector.cel {
                Some(cel) => allocator.selectors.matches(&cel.expression, device),
                None => Err(SelectorError::Empty),
            };
            match answer {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(problem) => return Err(AllocationError::Selector { of: owner(), index, problem }),
            }
        }
        Ok(true)
    };
    if !matches(of_class, &class_name)? || !matches(alternative.selectors, &claim_name)? {
        return Ok(false);
    }
    let spec = device.spec();
    Ok(device.slice().per_device_node_selection != Some(true)
        || is_for_node(node, spec.node_name.as_deref(), spec.all_nodes, spec.node_selector.as_ref()))
}
