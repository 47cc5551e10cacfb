//! Claims and volumes, as the plugins about storage need them.

use std::collections::BTreeMap;

use ferrite_client::{ObjectKey, controller_of, matches_node};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};

use crate::framework::{ClusterEvent, Rejection};
use crate::snapshot::PodInfo;

const BETA_CLASS: &str = "volume.beta.kubernetes.io/storage-class";
const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";

type Annotations = Option<BTreeMap<String, String>>;

pub(super) fn annotation<'a>(annotations: &'a Annotations, name: &str) -> Option<&'a str> {
    annotations.as_ref()?.get(name).map(String::as_str)
}

/// The name of the claim's class; empty if it has none.
pub(super) fn claim_class(claim: &PersistentVolumeClaim) -> &str {
    let spec = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    annotation(&claim.metadata.annotations, BETA_CLASS).or(spec).unwrap_or_default()
}

/// The name of the volume's class; empty if it has none.
pub(super) fn volume_class(volume: &PersistentVolume) -> &str {
    let spec = volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    annotation(&volume.metadata.annotations, BETA_CLASS).or(spec).unwrap_or_default()
}

/// The name of the volume that the claim has; empty if it has none.
pub(super) fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default()
}

/// True if the claim has its volume, and both sides say so.
pub(super) fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    !volume_name(claim).is_empty() && annotation(&claim.metadata.annotations, BIND_COMPLETED).is_some()
}

/// True if the volume can be used from the node.
pub(super) fn is_reachable(volume: &PersistentVolume, node: &Node) -> bool {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required.as_ref());
    required.is_none() || matches_node(None, required, node)
}

/// The claim was made for the pod: a claim of that name that somebody else made is not its.
pub(super) fn check_owner(pod: &PodInfo, claim: &PersistentVolumeClaim) -> Result<(), String> {
    let owner = controller_of(&claim.metadata);
    if owner.is_some_and(|owner| pod.uid.as_deref() == Some(owner.uid.as_str())) {
        return Ok(());
    }
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    Err(format!("PVC {}/{name} was not created for pod {} (pod is not owner)", pod.key.namespace, pod.key))
}

/// The rejection of a pod whose object of this kind does not exist.
pub(super) fn not_found(kind: &str, name: &str) -> Rejection {
    Rejection::unresolvable(format!("{kind} {name:?} not found"))
}

pub(super) fn claim_key(pod: &PodInfo, name: &str) -> ObjectKey {
    ObjectKey::new(pod.key.namespace.clone(), name)
}

/// True if the event is about a claim that the pod has.
pub(super) fn concerns_claim_of(pod: &PodInfo, event: &ClusterEvent) -> Option<bool> {
    let ClusterEvent::Object(event) = event else { return None };
    let claim = event.object::<PersistentVolumeClaim>()?;
    let is_here = claim.metadata.namespace.as_deref() == Some(pod.key.namespace.as_str());
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    Some(is_here && pod.claim_names().any(|(claim, _)| claim == name))
}
