//! The four writes of a binding as pure changes of objects. Each returns nothing when there is nothing to write.
//!
//! Upstream's order, so that an interruption between any two of them is finished by the next sync: the volume, its phase,
//! the claim, its status.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;

use ferrite_api::quantity::Quantity;

use crate::volume::objects::{
    BETA_STORAGE_PROVISIONER, BIND_COMPLETED, BOUND_BY_CONTROLLER, PRE_RESIZE_CAPACITY, STORAGE_PROVISIONER,
    annotation, capacity, claim_capacity, claim_phase, claim_ref, is_bound_to, name, ref_uid,
    remove_annotation, set_annotation, uid, volume_name, volume_phase,
};

const STORAGE: &str = "storage";

/// The volume with the claim in its `claimRef`.
pub(crate) fn volume_for_claim(
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
) -> Option<PersistentVolume> {
    let reserved = is_bound_to(volume, claim);
    let complete = reserved && claim_ref(volume).is_some_and(|r| ref_uid(r) == uid(&claim.metadata));
    let marked = reserved || annotation(&volume.metadata, BOUND_BY_CONTROLLER).is_some();
    if complete && marked {
        return None;
    }
    let mut bound = volume.clone();
    if !complete {
        bound.spec.get_or_insert_default().claim_ref = Some(ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("PersistentVolumeClaim".into()),
            namespace: claim.metadata.namespace.clone(),
            name: claim.metadata.name.clone(),
            uid: claim.metadata.uid.clone(),
            resource_version: claim.metadata.resource_version.clone(),
            ..ObjectReference::default()
        });
    }
    if !marked {
        set_annotation(&mut bound.metadata, BOUND_BY_CONTROLLER, "yes");
    }
    Some(bound)
}

/// The claim with the volume's name.
pub(crate) fn claim_for_volume(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Option<PersistentVolumeClaim> {
    let named = volume_name(claim) == name(&volume.metadata);
    if named && annotation(&claim.metadata, BIND_COMPLETED).is_some() {
        return None;
    }
    let mut bound = claim.clone();
    if !named {
        bound.spec.get_or_insert_default().volume_name = volume.metadata.name.clone();
        set_annotation(&mut bound.metadata, BOUND_BY_CONTROLLER, "yes");
    }
    set_annotation(&mut bound.metadata, BIND_COMPLETED, "yes");
    Some(bound)
}

/// The volume in that phase.
pub(crate) fn volume_in_phase(
    volume: &PersistentVolume,
    phase: &str,
    message: &str,
) -> Option<PersistentVolume> {
    if volume_phase(volume) == phase {
        return None;
    }
    let mut changed = volume.clone();
    let status = changed.status.get_or_insert_default();
    status.phase = Some(phase.to_owned());
    status.message = (!message.is_empty()).then(|| message.to_owned());
    Some(changed)
}

/// The claim in that phase, with the data of its volume, or without any.
pub(crate) fn claim_in_phase(
    claim: &PersistentVolumeClaim,
    phase: &str,
    volume: Option<&PersistentVolume>,
) -> Option<PersistentVolumeClaim> {
    let before = claim.status.clone().unwrap_or_default();
    let mut status = before.clone();
    let entered = claim_phase(claim) != phase;
    status.phase = Some(phase.to_owned());
    match volume {
        None => {
            status.access_modes = None;
            status.capacity = None;
            status.current_volume_attributes_class_name = None;
        }
        Some(volume) => {
            let spec = volume.spec.clone().unwrap_or_default();
            status.access_modes = spec.access_modes;
            // Only when the claim becomes Bound: later a smaller size means a file system that has yet to grow.
            if entered {
                let before_resize = annotation(&volume.metadata, PRE_RESIZE_CAPACITY);
                if let Some(size) = before_resize.filter(|text| Quantity::parse(text).is_ok()) {
                    status.capacity.get_or_insert_default().insert(STORAGE.into(), Amount(size.to_owned()));
                } else if claim_capacity(claim) != Some(capacity(volume)) {
                    status.capacity = spec.capacity;
                }
                if matches!(claim_phase(claim), "" | "Pending") {
                    status.current_volume_attributes_class_name = spec.volume_attributes_class_name;
                }
            }
        }
    }
    if status == before {
        return None;
    }
    let mut changed = claim.clone();
    changed.status = Some(status);
    Some(changed)
}

/// The volume without its claim; one that a user reserved stays reserved.
pub(crate) fn unbound(volume: &PersistentVolume) -> PersistentVolume {
    let mut changed = volume.clone();
    let spec = changed.spec.get_or_insert_default();
    if annotation(&volume.metadata, BOUND_BY_CONTROLLER).is_some() {
        spec.claim_ref = None;
        remove_annotation(&mut changed.metadata, BOUND_BY_CONTROLLER);
    } else if let Some(reference) = &mut spec.claim_ref {
        reference.uid = None;
    }
    changed
}

/// The claim as its provisioner waits for it.
pub(crate) fn handed_over(claim: &PersistentVolumeClaim, provisioner: &str) -> Option<PersistentVolumeClaim> {
    let keys = [BETA_STORAGE_PROVISIONER, STORAGE_PROVISIONER];
    if keys.iter().all(|key| annotation(&claim.metadata, key) == Some(provisioner)) {
        return None;
    }
    let mut changed = claim.clone();
    keys.iter().for_each(|key| set_annotation(&mut changed.metadata, key, provisioner));
    Some(changed)
}
