//! The two state machines: decisions about a claim, and decisions about a volume.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::matching::{self, Mismatch};
use crate::volume::objects::{
    BIND_COMPLETED, BOUND_BY_CONTROLLER, MIGRATED_TO, PROVISIONED_BY, SELECTED_NODE, annotation, claim_class,
    claim_key, claim_ref, default_class, has_class, is_bound_to, name, reclaim_policy, ref_uid, same_mode,
    uid, volume_name, volume_phase, waits_for_consumer,
};

/// Provisioners of this prefix were built into upstream's controller manager; there is nobody to wait for.
const IN_TREE: &str = "kubernetes.io/";

/// Inputs for deciding about a claim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClaimView<'a> {
    /// The volume that the claim names.
    pub named: Option<&'a Arc<PersistentVolume>>,
    /// Free volumes, and volumes reserved for the claim.
    pub candidates: &'a [Arc<PersistentVolume>],
    pub classes: &'a [Arc<StorageClass>],
    /// Claims are handed to the provisioners of their classes.
    pub provisions: bool,
}

/// The next step for a claim.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ClaimStep {
    /// Binds both halves.
    Bind(Arc<PersistentVolume>),
    /// Gives the claim the default class.
    AssignClass(String),
    /// Waits for a pod that uses the claim to be scheduled.
    WaitForConsumer,
    /// Hands the claim to the provisioner of its class.
    Provision {
        provisioner: String,
    },
    /// Cannot be provisioned. The claim keeps its status, as upstream.
    CannotProvision(String),
    /// Stays Pending without an event: the volume that it names may still come.
    Wait,
    /// Stays Pending: no volume suits and no class is set.
    NoVolume,
    /// Stays Pending: the volume that it names does not suit.
    Mismatch {
        volume: String,
        mismatch: Mismatch,
    },
    /// Stays Pending: the volume that it names is another claim's.
    Taken {
        volume: String,
        retry: bool,
    },
    Lost {
        reason: &'static str,
        message: &'static str,
    },
}

/// Decides what happens to a claim.
pub(crate) fn claim_step(claim: &PersistentVolumeClaim, view: ClaimView<'_>) -> ClaimStep {
    if annotation(&claim.metadata, BIND_COMPLETED).is_some() {
        return bound_claim_step(claim, view);
    }
    if volume_name(claim).is_empty() {
        return unbound_claim_step(claim, view);
    }
    let Some(volume) = view.named else { return ClaimStep::Wait };
    let name = name(&volume.metadata).to_owned();
    if claim_ref(volume).is_none() {
        return match matching::check(volume, claim) {
            Ok(()) => ClaimStep::Bind(Arc::clone(volume)),
            Err(mismatch) => ClaimStep::Mismatch { volume: name, mismatch },
        };
    }
    if is_bound_to(volume, claim) {
        return ClaimStep::Bind(Arc::clone(volume));
    }
    // The controller itself never names a volume of somebody else: that claim was tampered with.
    let retry = annotation(&claim.metadata, BOUND_BY_CONTROLLER).is_some();
    ClaimStep::Taken { volume: name, retry }
}

fn unbound_claim_step(claim: &PersistentVolumeClaim, view: ClaimView<'_>) -> ClaimStep {
    let class_name = claim_class(claim);
    let class = view.classes.iter().find(|class| name(&class.metadata) == class_name);
    let delayed = class.is_some_and(|class| waits_for_consumer(class));
    if let Some(volume) = matching::find(claim, view.candidates, delayed) {
        return ClaimStep::Bind(volume);
    }
    if !has_class(claim)
        && let Some(default) = default_class(view.classes.iter().map(|class| &**class))
    {
        return ClaimStep::AssignClass(name(&default.metadata).to_owned());
    }
    if delayed && annotation(&claim.metadata, SELECTED_NODE).is_none() {
        return ClaimStep::WaitForConsumer;
    }
    if class_name.is_empty() || !view.provisions {
        return ClaimStep::NoVolume;
    }
    let Some(class) = class else {
        return ClaimStep::CannotProvision(format!("storageclass.storage.k8s.io \"{class_name}\" not found"));
    };
    if class.provisioner.starts_with(IN_TREE) {
        return ClaimStep::CannotProvision("no volume plugin matched".into());
    }
    ClaimStep::Provision { provisioner: class.provisioner.clone() }
}

fn bound_claim_step(claim: &PersistentVolumeClaim, view: ClaimView<'_>) -> ClaimStep {
    if volume_name(claim).is_empty() {
        return ClaimStep::Lost {
            reason: "ClaimLost",
            message: "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!",
        };
    }
    let Some(volume) = view.named else {
        return ClaimStep::Lost {
            reason: "ClaimLost",
            message: "Bound claim has lost its PersistentVolume. Data on the volume is lost!",
        };
    };
    match claim_ref(volume) {
        Some(reference) if ref_uid(reference) != uid(&claim.metadata) => ClaimStep::Lost {
            reason: "ClaimMisbound",
            message: "Two claims are bound to the same volume, this one is bound incorrectly",
        },
        _ => ClaimStep::Bind(Arc::clone(volume)),
    }
}

/// The next step for a volume.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum VolumeStep {
    /// Sets the phase, unless it is that already.
    Phase(&'static str),
    /// The claim will be bound by its own sync.
    WakeClaim,
    /// The claim that names it has another mode.
    ModeMismatch,
    /// Frees the volume of a claim that is bound elsewhere.
    Unbind,
    /// The claim is gone: Released, then the reclaim policy.
    Reclaim(Reclaim),
}

/// The action for a volume without a claim.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reclaim {
    /// It stays as it is, or its maker deletes it.
    LeaveAlone,
    /// Nobody can carry out the policy.
    Fail { reason: &'static str, message: String },
}

/// Decides what happens to a volume. `claim` is the claim of the name that the volume has in its `claimRef`, as the API
/// server has it now: a claim that is merely not known yet must not cost its data.
pub(crate) fn volume_step(volume: &PersistentVolume, claim: Option<&PersistentVolumeClaim>) -> VolumeStep {
    let Some(reference) = claim_ref(volume) else { return VolumeStep::Phase("Available") };
    if ref_uid(reference).is_empty() {
        return VolumeStep::Phase("Available");
    }
    let Some(claim) = claim.filter(|claim| uid(&claim.metadata) == ref_uid(reference)) else {
        return VolumeStep::Reclaim(reclaim(volume));
    };
    let named = volume_name(claim);
    if named.is_empty() {
        return match (&claim.spec, &volume.spec) {
            (Some(wanted), Some(offered)) if !same_mode(wanted, offered) => VolumeStep::ModeMismatch,
            _ => VolumeStep::WakeClaim,
        };
    }
    if named == name(&volume.metadata) {
        return VolumeStep::Phase("Bound");
    }
    let provisioned = annotation(&volume.metadata, PROVISIONED_BY).is_some();
    if provisioned && reclaim_policy(volume) == "Delete" {
        // Made for this claim, which found another volume meanwhile.
        return VolumeStep::Reclaim(reclaim(volume));
    }
    VolumeStep::Unbind
}

fn reclaim(volume: &PersistentVolume) -> Reclaim {
    if annotation(&volume.metadata, MIGRATED_TO).is_some_and(|driver| !driver.is_empty()) {
        return Reclaim::LeaveAlone;
    }
    match reclaim_policy(volume) {
        "Retain" => Reclaim::LeaveAlone,
        "Recycle" => Reclaim::Fail {
            reason: "VolumeFailedRecycle",
            message: "No recycler plugin found for the volume!".into(),
        },
        "Delete" => match annotation(&volume.metadata, PROVISIONED_BY) {
            // Its provisioner deletes it.
            Some(provisioner) if !provisioner.is_empty() && !provisioner.starts_with(IN_TREE) => {
                Reclaim::LeaveAlone
            }
            // A CSI volume is deleted by its driver, as upstream, even if nobody says which provisioner made it.
            _ if volume.spec.as_ref().is_some_and(|spec| spec.csi.is_some()) => Reclaim::LeaveAlone,
            _ => Reclaim::Fail {
                reason: "VolumeFailedDelete",
                message: format!(
                    "error getting deleter volume plugin for volume \"{}\": no deletable volume plugin matched",
                    name(&volume.metadata)
                ),
            },
        },
        _ => Reclaim::Fail {
            reason: "VolumeUnknownReclaimPolicy",
            message: "Volume has unrecognized PersistentVolumeReclaimPolicy".into(),
        },
    }
}

/// Returns true if a volume is already known to be without a claim.
pub(crate) fn is_released(volume: &PersistentVolume) -> bool {
    matches!(volume_phase(volume), "Released" | "Failed")
}

/// The claim that a volume names.
pub(crate) fn claim_of(volume: &PersistentVolume) -> Option<ferrite_client::ObjectKey> {
    claim_ref(volume).map(claim_key)
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
