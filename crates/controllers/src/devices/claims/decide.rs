//! Decides about a pod's entry, and about a claim whose consumers end.

use ferrite_client::controller_of;
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    ResourceClaim, ResourceClaimConsumerReference, ResourceClaimStatus, ResourceClaimTemplate,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::pods::{is_finished, is_terminating, node_name};
use ferrite_client::resource_claims::{Named, consumers, is_for_pod, is_pod};

/// Keeps an allocated claim until nobody uses it.
pub(super) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Says for which entry of its pod a claim was made.
pub(super) const POD_CLAIM: &str = "resource.kubernetes.io/pod-claim-name";
pub(super) const EXTENDED: &str = "resource.kubernetes.io/extended-resource-claim";

/// The need of an entry of `spec.resourceClaims`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Need<'a> {
    Nothing,
    /// A claim from the template of this name, unless an earlier attempt made one.
    Claim {
        template: &'a str,
    },
    /// The entry uses a field that is newer than this program.
    Unsupported,
}

/// Decides about one entry. `claim` is its claim, if that exists.
pub(super) fn need<'a>(pod: &Pod, entry: &'a PodResourceClaim, claim: Option<&ResourceClaim>) -> Need<'a> {
    match Named::of(pod, entry) {
        Named::Unsupported => return Need::Unsupported,
        Named::NotNeeded | Named::Given(_) => return Need::Nothing,
        // A claim that somebody deleted, or that is another pod's, is made anew.
        Named::Generated(_) if claim.is_some_and(|claim| is_for_pod(claim, pod)) => return Need::Nothing,
        Named::Generated(_) | Named::NotCreated => {}
    }
    let template = entry.resource_claim_template_name.as_deref();
    template.map_or(Need::Nothing, |template| Need::Claim { template })
}

/// True if the claim was made for this entry of the pod.
pub(super) fn is_made_for(claim: &ResourceClaim, pod: &Pod, entry: &PodResourceClaim) -> bool {
    let annotated = claim.metadata.annotations.as_ref().and_then(|all| all.get(POD_CLAIM));
    is_for_pod(claim, pod) && annotated == Some(&entry.name)
}

/// The claim of an entry, from its template.
pub(super) fn claim_for(
    pod: &Pod,
    entry: &PodResourceClaim,
    template: &ResourceClaimTemplate,
) -> ResourceClaim {
    let given = template.spec.metadata.clone().unwrap_or_default();
    let mut annotations = given.annotations.unwrap_or_default();
    annotations.insert(POD_CLAIM.into(), entry.name.clone());
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    ResourceClaim {
        metadata: ObjectMeta {
            generate_name: Some(generate_name(pod_name, &entry.name)),
            namespace: pod.metadata.namespace.clone(),
            labels: given.labels,
            annotations: Some(annotations),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Pod".into(),
                name: pod_name.into(),
                uid: pod.metadata.uid.clone().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: None,
            }]),
            ..ObjectMeta::default()
        },
        spec: template.spec.spec.clone(),
        status: None,
    }
}

/// `<pod>-<entry>-`. Both parts lose of their length in proportion if the server would have to cut the end, and with it the
/// entry's name.
fn generate_name(pod: &str, entry: &str) -> String {
    /// Leaves room for a hyphen and five characters in a label.
    const MAX: usize = 57;
    let whole = format!("{pod}-{entry}-");
    if whole.len() <= MAX {
        return whole;
    }
    // Names of pods and entries are ASCII: any place is good to cut.
    let cut = |part: &str| part.chars().take(part.len() * MAX / whole.len()).collect::<String>();
    format!("{}-{}", cut(pod), cut(entry))
}

/// True if no container of the pod runs or ever will.
pub(super) fn is_done(pod: &Pod) -> bool {
    is_finished(pod) || is_terminating(pod) && node_name(pod).is_none()
}

/// True if the reservation holds. `pod` is the pod of the reservation's name, if there is one.
pub(super) fn is_valid(consumer: &ResourceClaimConsumerReference, pod: Option<&Pod>) -> bool {
    !is_pod(consumer)
        || pod.is_some_and(|pod| pod.metadata.uid.as_ref() == Some(&consumer.uid) && !is_done(pod))
}

/// The writes that a claim needs, in this order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Release {
    pub(super) status: Option<ResourceClaimStatus>,
    /// [`FINALIZER`] goes.
    pub(super) finalizer: bool,
}

/// Decides about a claim of which the consumers `remaining` are left.
pub(super) fn release(claim: &ResourceClaim, remaining: Vec<ResourceClaimConsumerReference>) -> Release {
    let protected = claim.metadata.finalizers.as_ref().is_some_and(|all| all.iter().any(|f| f == FINALIZER));
    let unused = remaining.is_empty();
    let mut status = claim.status.clone().unwrap_or_default();
    if remaining.len() < consumers(claim).len() {
        // The last consumer takes the allocation with it: the next one may need devices of another node. A claim that
        // was allocated and never used keeps its devices. Without the finalizer, somebody else allocated it.
        if unused && protected {
            status.allocation = None;
        }
        status.reserved_for = (!unused).then_some(remaining);
        let finalizer = protected && status.allocation.is_none();
        return Release { status: Some(status), finalizer };
    }
    if protected && unused && claim.metadata.deletion_timestamp.is_some() {
        let allocated = status.allocation.take().is_some();
        return Release { status: allocated.then_some(status), finalizer: true };
    }
    Release::default()
}

/// True if the claim was made for a pod that will never use it again. `find` looks a pod up by its name; a pod that is
/// not known may be new, and the garbage collector deletes the objects of one that is gone.
pub(super) fn is_left_behind<P: AsRef<Pod>>(
    claim: &ResourceClaim,
    find: impl FnOnce(&str) -> Option<P>,
) -> bool {
    let Some(owner) = controller_of(&claim.metadata) else { return false };
    if owner.api_version != "v1" || owner.kind != "Pod" {
        return false;
    }
    find(&owner.name).is_some_and(|pod| {
        let pod = pod.as_ref();
        pod.metadata.uid.as_ref() != Some(&owner.uid) || is_done(pod)
    })
}

/// The labels of the metrics: "true" if devices are requested with admin access.
pub(super) fn admin_access(claim: &ResourceClaim) -> &'static str {
    let requests = claim.spec.devices.as_ref().and_then(|devices| devices.requests.as_ref());
    let admin = requests
        .into_iter()
        .flatten()
        .any(|request| request.exactly.as_ref().is_some_and(|exactly| exactly.admin_access == Some(true)));
    if admin { "true" } else { "false" }
}

/// The label of the metrics: the maker of the claim.
pub(super) fn source(claim: &ResourceClaim) -> &'static str {
    let annotation = |key: &str| {
        claim.metadata.annotations.as_ref().and_then(|all| all.get(key)).map_or("", String::as_str)
    };
    match (annotation(EXTENDED), annotation(POD_CLAIM)) {
        ("true", _) => "extended_resource",
        (_, "") => "",
        _ => "resource_claim_template",
    }
}
