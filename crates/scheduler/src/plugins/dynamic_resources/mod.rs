//! Claims on devices: chooses devices for a pod's ResourceClaims together with its node, and writes them down before
//! the pod is bound.

mod bind;
mod extended;
mod filter;
mod readiness;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use ferrite_api::field::{FieldError, Path};
use ferrite_client::ObjectKey;
use ferrite_client::resource_claims::{is_allocated, is_owned_by};
use ferrite_component::GoDuration;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::Deserialize;

use crate::devices::Devices;
use crate::framework::{
    Action, ClusterEvent, Filter, Handle, Made, ObjectEvent, Plugin, PluginArgs, PostFilter, PreBind,
    PreEnqueue, PreFilter, PreScore, Rejection, Reserve, Score, Store,
};
use crate::snapshot::{PodClaim, PodInfo};

const NAME: &str = "DynamicResources";

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Args {
    /// The longest that the search for devices may take in one attempt to schedule a pod; zero is no limit.
    filter_timeout: GoDuration,
    /// The longest that devices may take to become ready.
    binding_timeout: GoDuration,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            filter_timeout: GoDuration(Duration::from_secs(10)),
            binding_timeout: GoDuration(Duration::from_secs(600)),
        }
    }
}

impl Args {
    fn validate(&self, path: &Path) -> Vec<FieldError> {
        if self.binding_timeout.0 >= Duration::from_secs(1) {
            return Vec::new();
        }
        let path = path.child("bindingTimeout");
        vec![FieldError::invalid(&path, self.binding_timeout.to_string(), "must be at least 1 second")]
    }
}

struct DynamicResources {
    args: Args,
    handle: Handle,
    devices: Arc<Devices>,
    pods: Store<Pod>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Made {
    let args = args.decode_valid(Args::validate)?;
    let (devices, pods) = (handle.devices(), handle.lister());
    Ok(Arc::new(DynamicResources { args, handle: handle.clone(), devices, pods }))
}

/// A claim of the pod that cannot be used. The messages are upstream's.
#[derive(Debug, thiserror::Error)]
enum ClaimError {
    #[error("pod \"{0}\": ResourceClaim not created yet")]
    NotCreated(ObjectKey),
    #[error("pod \"{0}\", spec.resourceClaim {1:?}: none of the supported fields are set")]
    Unsupported(ObjectKey, String),
    #[error("could not find ResourceClaim \"{0}\"")]
    NotFound(ObjectKey),
    #[error("resourceclaim {0:?} is being deleted")]
    Deleted(String),
    #[error("ResourceClaim {claim} was not created for Pod {pod} (Pod is not owner)")]
    NotOwned { claim: ObjectKey, pod: ObjectKey },
}

impl From<ClaimError> for Rejection {
    fn from(error: ClaimError) -> Self {
        Self::unresolvable(error.to_string())
    }
}

impl DynamicResources {
    /// The pod's claims, in the order of its spec.
    fn claims_of(&self, pod: &PodInfo) -> Result<Vec<Arc<ResourceClaim>>, ClaimError> {
        let mut claims = Vec::with_capacity(pod.resource_claims().len());
        for entry in pod.resource_claims() {
            let (name, must_own) = match entry {
                PodClaim::Given(name) => (name, false),
                PodClaim::Generated(name) => (name, true),
                PodClaim::NotCreated => return Err(ClaimError::NotCreated(pod.key.clone())),
                PodClaim::Unsupported(entry) => {
                    return Err(ClaimError::Unsupported(pod.key.clone(), entry.to_string()));
                }
            };
            let key = ObjectKey::new(pod.key.namespace.clone(), name.clone());
            let Some(claim) = self.devices.claim(&key) else { return Err(ClaimError::NotFound(key)) };
            if claim.metadata.deletion_timestamp.is_some() {
                return Err(ClaimError::Deleted(name.to_string()));
            }
            if must_own && !is_owned_by(&claim, pod.uid.as_deref().unwrap_or_default()) {
                return Err(ClaimError::NotOwned { claim: key, pod: pod.key.clone() });
            }
            claims.push(claim);
        }
        Ok(claims)
    }

    /// True if the pod asks for an extended resource that a DeviceClass stands behind.
    fn wants_extended(&self, pod: &PodInfo) -> bool {
        pod.requests.scalar.iter().any(|(name, amount)| {
            *amount > 0 && extended::is_extended(name) && self.devices.class_behind(name).is_some()
        })
    }

    fn claim_hint(&self, pod: &PodInfo, event: &ObjectEvent, claim: &ResourceClaim) -> bool {
        if event.action == Action::Deleted {
            // Claims give their devices back before they go. One that was forced away did not.
            return is_allocated(claim);
        }
        let Ok(claims) = self.claims_of(pod) else { return false };
        let old = event.old::<ResourceClaim>();
        if old.is_some_and(is_allocated) && !is_allocated(claim) {
            return true;
        }
        claims.iter().any(|own| own.metadata.uid == claim.metadata.uid)
            && old.is_none_or(|old| old.status != claim.status)
    }
}

fn differs(old: &Node, new: &Node) -> bool {
    let allocatable = |node: &Node| node.status.as_ref().and_then(|status| status.allocatable.clone());
    old.metadata.labels != new.metadata.labels || allocatable(old) != allocatable(new)
}

impl Plugin for DynamicResources {
    fn name(&self) -> &'static str {
        NAME
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) => true,
            ClusterEvent::NodeUpdated { old, new } => differs(old, new),
            ClusterEvent::PodUpdated => self.claims_of(pod).is_ok(),
            // A pod that was on its way to a node and did not get there gives its devices back.
            ClusterEvent::AssignedPodDeleted(other) => {
                !other.resource_claims().is_empty() || self.wants_extended(other)
            }
            ClusterEvent::Object(event) => {
                if let Some(claim) = event.object::<ResourceClaim>() {
                    return self.claim_hint(pod, event, claim);
                }
                let is_other =
                    event.object::<DeviceClass>().is_some() || event.object::<ResourceSlice>().is_some();
                is_other && event.action != Action::Deleted
            }
            ClusterEvent::NodeDeleted(_)
            | ClusterEvent::AssignedPodAdded(_)
            | ClusterEvent::AssignedPodRelabelled { .. }
            | ClusterEvent::Other => false,
        }
    }

    /// The authors of claims decide how long a search for devices takes.
    fn is_costly(&self, pod: &PodInfo) -> bool {
        let needs = |claims: Vec<Arc<ResourceClaim>>| claims.iter().any(|claim| !is_allocated(claim));
        self.wants_extended(pod) || self.claims_of(pod).is_ok_and(needs)
    }

    fn pre_enqueue(&self) -> Option<&dyn PreEnqueue> {
        Some(self)
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }

    fn post_filter(&self) -> Option<&dyn PostFilter> {
        Some(self)
    }

    fn pre_score(&self) -> Option<&dyn PreScore> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }

    fn reserve(&self) -> Option<&dyn Reserve> {
        Some(self)
    }

    fn pre_bind(&self) -> Option<&dyn PreBind> {
        Some(self)
    }
}

impl PreEnqueue for DynamicResources {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection> {
        self.claims_of(pod).map(drop).map_err(Rejection::from)
    }
}
