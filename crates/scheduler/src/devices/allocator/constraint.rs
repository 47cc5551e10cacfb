//! Constraints of a claim: attributes that its devices must, or must not, have in common.

use ferrite_cel::Attribute;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::inventory::Device;
use super::{AllocationError, key_of};

/// A constraint, with the values of the devices that were added.
#[derive(Debug, Clone)]
pub(super) struct Constraint<'a> {
    /// The requests it is about; all of them if there are none.
    requests: &'a [String],
    attribute: &'a str,
    is_distinct: bool,
    /// The last is removed first.
    values: Vec<Attribute<'a>>,
}

impl<'a> Constraint<'a> {
    pub fn of(claim: &'a ResourceClaim) -> Result<Vec<Self>, AllocationError> {
        let constraints = claim.spec.devices.as_ref().and_then(|devices| devices.constraints.as_ref());
        let new = |(index, constraint): (usize, &'a k8s_openapi::api::resource::v1::DeviceConstraint)| {
            let (attribute, is_distinct) = match (&constraint.match_attribute, &constraint.distinct_attribute)
            {
                (Some(name), _) => (name, false),
                (None, Some(name)) => (name, true),
                (None, None) => return Err(AllocationError::EmptyConstraint { claim: key_of(claim), index }),
            };
            let requests = constraint.requests.as_deref().unwrap_or_default();
            Ok(Self { requests, attribute, is_distinct, values: Vec::new() })
        };
        constraints.into_iter().flatten().enumerate().map(new).collect()
    }

    /// `request` is named alone or as `request/subrequest`.
    fn is_about(&self, request: &str) -> bool {
        let parent = request.split_once('/').map_or(request, |(parent, _)| parent);
        self.requests.is_empty() || self.requests.iter().any(|name| name == request || name == parent)
    }

    /// False if the device does not satisfy the constraint beside those that were added.
    pub fn add(&mut self, request: &str, device: &'a Device) -> bool {
        if !self.is_about(request) {
            return true;
        }
        let Some(value) = device.attribute(self.attribute) else { return false };
        let is_satisfied = if self.is_distinct {
            !self.values.contains(&value)
        } else {
            self.values.first().is_none_or(|first| *first == value)
        };
        if is_satisfied {
            self.values.push(value);
        }
        is_satisfied
    }

    /// Takes back the last device that was added for this request.
    pub fn remove(&mut self, request: &str) {
        if self.is_about(request) {
            self.values.pop();
        }
    }
}
