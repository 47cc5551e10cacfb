//! The way from a pod to its ResourceClaims and back.

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};

use ferrite_client::controller_of;

/// Index of pods by the ResourceClaims that they use, as `namespace/name`.
pub(super) const PODS_BY_CLAIM: &str = "resource claim";

/// The ResourceClaim that stands behind an entry of `spec.resourceClaims`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Named<'a> {
    /// A claim that somebody made.
    Given(&'a str),
    /// The claim that was made for this pod. Its owner must be compared before it is used.
    Generated(&'a str),
    /// The status says that this entry needs no claim.
    NotNeeded,
    /// The claim has yet to be made from its template.
    NotCreated,
    /// The entry uses a field that is newer than this program.
    Unsupported,
}

impl<'a> Named<'a> {
    pub(super) fn of(pod: &'a Pod, claim: &'a PodResourceClaim) -> Self {
        if let Some(name) = &claim.resource_claim_name {
            return Self::Given(name);
        }
        if claim.resource_claim_template_name.is_none() {
            return Self::Unsupported;
        }
        let statuses = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
        match statuses.into_iter().flatten().find(|status| status.name == claim.name) {
            None => Self::NotCreated,
            Some(status) => status.resource_claim_name.as_deref().map_or(Self::NotNeeded, Self::Generated),
        }
    }

    /// The name, if there is one by now.
    pub(super) fn name(self) -> Option<&'a str> {
        match self {
            Self::Given(name) | Self::Generated(name) => Some(name),
            Self::NotNeeded | Self::NotCreated | Self::Unsupported => None,
        }
    }
}

/// The entries of `spec.resourceClaims`.
pub(super) fn entries(pod: &Pod) -> &[PodResourceClaim] {
    pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_deref()).unwrap_or_default()
}

/// The names of the claims behind the entries, as far as they exist.
pub(super) fn claim_names(pod: &Pod) -> impl Iterator<Item = &str> {
    entries(pod).iter().filter_map(|entry| Named::of(pod, entry).name())
}

/// The claim that the scheduler made for extended resources of the pod.
pub(super) fn extended_claim(pod: &Pod) -> Option<&str> {
    let status = pod.status.as_ref()?.extended_resource_claim_status.as_ref()?;
    Some(&status.resource_claim_name)
}

pub(super) fn claim_index(pod: &Pod) -> Vec<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut keys: Vec<String> = claim_names(pod).map(|name| format!("{namespace}/{name}")).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// True if the pod controls the claim, so that the claim was made for it.
pub(super) fn is_for_pod(claim: &ResourceClaim, pod: &Pod) -> bool {
    claim.metadata.namespace == pod.metadata.namespace
        && controller_of(&claim.metadata).is_some_and(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref())
}

pub(super) fn consumers(claim: &ResourceClaim) -> &[ResourceClaimConsumerReference] {
    claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default()
}

/// True for a reference to a pod. Others are left to their makers.
pub(super) fn is_pod(consumer: &ResourceClaimConsumerReference) -> bool {
    consumer.api_group.as_deref().unwrap_or_default().is_empty() && consumer.resource == "pods"
}

pub(super) fn is_reserved_for(claim: &ResourceClaim, pod: &Pod) -> bool {
    consumers(claim).iter().any(|consumer| Some(&consumer.uid) == pod.metadata.uid.as_ref())
}

pub(super) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn entries_lead_to_claims() {
        let pod: Pod = ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [], "resourceClaims": [
                {"name": "given", "resourceClaimName": "shared"},
                {"name": "made", "resourceClaimTemplateName": "t"},
                {"name": "skipped", "resourceClaimTemplateName": "t"},
                {"name": "missing", "resourceClaimTemplateName": "t"},
                {"name": "odd"},
            ]},
            "status": {
                "resourceClaimStatuses": [{"name": "made", "resourceClaimName": "p-made-x"}, {"name": "skipped"}],
                "extendedResourceClaimStatus": {"resourceClaimName": "ext", "requestMappings": []},
            },
        }))
        .unwrap();
        let found: Vec<Named<'_>> = entries(&pod).iter().map(|entry| Named::of(&pod, entry)).collect();
        assert_eq!(
            found,
            [
                Named::Given("shared"),
                Named::Generated("p-made-x"),
                Named::NotNeeded,
                Named::NotCreated,
                Named::Unsupported
            ]
        );
        assert_eq!(claim_index(&pod), ["ns/p-made-x", "ns/shared"]);
        assert_eq!(extended_claim(&pod), Some("ext"));
    }
}
