//! Accessors for claims, volumes and classes: annotations, classes, sizes, references.

use std::collections::BTreeMap;

use ferrite_api::quantity::Quantity;
use ferrite_client::ObjectKey;
use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec,
    PersistentVolumeSpec, Pod,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// A controller, and no user, chose the other half of the binding.
pub(crate) const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// The claim was bound; it is never bound to another volume.
pub(crate) const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
/// The provisioner that made the volume.
pub(crate) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// The provisioner that a claim waits for.
pub(crate) const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
pub(crate) const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";
/// The node that the scheduler chose for the first pod of a claim.
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// A CSI driver stands in for the plugin that made the volume.
pub(crate) const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
/// The size that the volume's file system has until a node has grown it.
pub(crate) const PRE_RESIZE_CAPACITY: &str = "volume.alpha.kubernetes.io/pre-resize-capacity";
/// The class of a claim or volume before there was a field for it.
const BETA_CLASS: &str = "volume.beta.kubernetes.io/storage-class";
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";
const BETA_DEFAULT_CLASS: &str = "storageclass.beta.kubernetes.io/is-default-class";

const STORAGE: &str = "storage";
const FILESYSTEM: &str = "Filesystem";

/// Index of pods by the keys of the claims that they use.
pub(crate) const PODS_BY_CLAIM: &str = "claim";

pub(crate) fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

pub(crate) fn name(metadata: &ObjectMeta) -> &str {
    metadata.name.as_deref().unwrap_or_default()
}

pub(crate) fn uid(metadata: &ObjectMeta) -> &str {
    metadata.uid.as_deref().unwrap_or_default()
}

fn amount(amounts: Option<&BTreeMap<String, Amount>>) -> Quantity {
    let text = amounts.and_then(|amounts| amounts.get(STORAGE)).map_or("0", |amount| amount.0.as_str());
    Quantity::parse(text).unwrap_or(Quantity::ZERO)
}

/// The size of a volume.
pub(crate) fn capacity(volume: &PersistentVolume) -> Quantity {
    amount(volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()))
}

/// The size that a claim asks for.
pub(crate) fn requested(claim: &PersistentVolumeClaim) -> Quantity {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    amount(resources.and_then(|resources| resources.requests.as_ref()))
}

/// The size that a claim has.
pub(crate) fn claim_capacity(claim: &PersistentVolumeClaim) -> Option<Quantity> {
    let capacity = claim.status.as_ref()?.capacity.as_ref()?;
    capacity.contains_key(STORAGE).then(|| amount(Some(capacity)))
}

/// The class of a claim; empty for none.
pub(crate) fn claim_class(claim: &PersistentVolumeClaim) -> &str {
    annotation(&claim.metadata, BETA_CLASS)
        .or_else(|| claim.spec.as_ref()?.storage_class_name.as_deref())
        .unwrap_or_default()
}

/// Returns true if a claim names a class, the empty one included.
pub(crate) fn has_class(claim: &PersistentVolumeClaim) -> bool {
    annotation(&claim.metadata, BETA_CLASS).is_some()
        || claim.spec.as_ref().is_some_and(|spec| spec.storage_class_name.is_some())
}

/// The class of a volume; empty for none.
pub(crate) fn volume_class(volume: &PersistentVolume) -> &str {
    annotation(&volume.metadata, BETA_CLASS)
        .or_else(|| volume.spec.as_ref()?.storage_class_name.as_deref())
        .unwrap_or_default()
}

/// The volume that a claim names; empty for none.
pub(crate) fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default()
}

pub(crate) fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

/// The claim that a volume names.
pub(crate) fn claim_key(reference: &ObjectReference) -> ObjectKey {
    ObjectKey::new(
        reference.namespace.as_deref().unwrap_or_default(),
        reference.name.as_deref().unwrap_or_default(),
    )
}

pub(crate) fn ref_uid(reference: &ObjectReference) -> &str {
    reference.uid.as_deref().unwrap_or_default()
}

/// Returns true if a volume is bound to the claim or reserved for it.
pub(crate) fn is_bound_to(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim_ref(volume).is_some_and(|reference| {
        let uid = ref_uid(reference);
        claim_key(reference) == ObjectKey::of(claim)
            && (uid.is_empty() || Some(uid) == claim.metadata.uid.as_deref())
    })
}

pub(crate) fn volume_phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

pub(crate) fn claim_phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

pub(crate) fn reclaim_policy(volume: &PersistentVolume) -> &str {
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    policy.unwrap_or("Retain")
}

pub(crate) fn same_mode(claim: &PersistentVolumeClaimSpec, volume: &PersistentVolumeSpec) -> bool {
    claim.volume_mode.as_deref().unwrap_or(FILESYSTEM) == volume.volume_mode.as_deref().unwrap_or(FILESYSTEM)
}

/// Returns true if the volume has every access mode that the claim asks for.
pub(crate) fn has_access_modes(claim: &PersistentVolumeClaimSpec, volume: &PersistentVolumeSpec) -> bool {
    let offered = volume.access_modes.as_deref().unwrap_or_default();
    claim.access_modes.iter().flatten().all(|mode| offered.contains(mode))
}

/// Returns true if claims of the class wait for their first pod.
pub(crate) fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

/// The class of claims that name none: of several defaults the newest, as upstream; of equally old ones the first by
/// name.
pub(crate) fn default_class<'a>(
    classes: impl IntoIterator<Item = &'a StorageClass>,
) -> Option<&'a StorageClass> {
    let is_default = |class: &StorageClass| {
        [DEFAULT_CLASS, BETA_DEFAULT_CLASS].iter().any(|key| annotation(&class.metadata, key) == Some("true"))
    };
    classes.into_iter().filter(|class| is_default(class)).min_by_key(|class| {
        let made = class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (std::cmp::Reverse(made), name(&class.metadata).to_owned())
    })
}

/// The claims that a pod uses: those it names, and those made for it.
pub(crate) fn claims_of(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
    let pod_name = name(&pod.metadata);
    volumes
        .iter()
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(source), _) => Some(source.claim_name.clone()),
            (None, Some(_)) => Some(format!("{pod_name}-{}", volume.name)),
            (None, None) => None,
        })
        .collect()
}

/// The claims that a pod uses, by their keys.
pub(crate) fn claim_keys(pod: &Pod) -> Vec<ObjectKey> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    claims_of(pod).into_iter().map(|claim| ObjectKey::new(namespace, claim)).collect()
}

/// The values of [`PODS_BY_CLAIM`].
pub(crate) fn claim_index(pod: &Pod) -> Vec<String> {
    claim_keys(pod).iter().map(ToString::to_string).collect()
}

/// Returns true if a pod has ended.
pub(crate) fn is_terminated(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

pub(crate) fn set_annotation(metadata: &mut ObjectMeta, key: &str, value: &str) {
    metadata.annotations.get_or_insert_default().insert(key.to_owned(), value.to_owned());
}

pub(crate) fn remove_annotation(metadata: &mut ObjectMeta, key: &str) {
    if let Some(annotations) = &mut metadata.annotations {
        annotations.remove(key);
        if annotations.is_empty() {
            metadata.annotations = None;
        }
    }
}
