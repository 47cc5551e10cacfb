//! Which volume suits a claim.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrite_api::selector::LabelSelector;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use crate::volume::objects::{
    capacity, claim_class, has_access_modes, is_bound_to, requested, same_mode, volume_class, volume_phase,
};

/// Why a claim cannot have the volume that it names, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Mismatch {
    #[error("the volume is marked for deletion \"{0}\"")]
    Deleting(String),
    #[error("requested PV is too small")]
    TooSmall,
    #[error("storageClassName does not match")]
    Class,
    #[error("volumeAttributesClassName does not match")]
    AttributesClass,
    #[error("incompatible volumeMode")]
    Mode,
    #[error("incompatible accessMode")]
    AccessModes,
}

/// Fails when the claim asks for more than the volume offers, or for something else.
pub(crate) fn check(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), Mismatch> {
    if volume.metadata.deletion_timestamp.is_some() {
        return Err(Mismatch::Deleting(volume.metadata.name.clone().unwrap_or_default()));
    }
    // As upstream: whole bytes are compared here.
    if capacity(volume).value() < requested(claim).value() {
        return Err(Mismatch::TooSmall);
    }
    if volume_class(volume) != claim_class(claim) {
        return Err(Mismatch::Class);
    }
    let (wanted, offered) = (claim.spec.clone().unwrap_or_default(), volume.spec.clone().unwrap_or_default());
    if attributes(wanted.volume_attributes_class_name.as_ref())
        != attributes(offered.volume_attributes_class_name.as_ref())
    {
        return Err(Mismatch::AttributesClass);
    }
    if !same_mode(&wanted, &offered) {
        return Err(Mismatch::Mode);
    }
    if !has_access_modes(&wanted, &offered) {
        return Err(Mismatch::AccessModes);
    }
    Ok(())
}

fn attributes(class: Option<&String>) -> &str {
    class.map_or("", String::as_str)
}

/// The volume that suits the claim best: one with as few access modes as possible; among those one that is reserved for
/// the claim, else the smallest.
///
/// With `delayed` the scheduler chooses among free volumes, and only a reserved one is returned.
pub(crate) fn find(
    claim: &PersistentVolumeClaim,
    volumes: &[Arc<PersistentVolume>],
    delayed: bool,
) -> Option<Arc<PersistentVolume>> {
    let wanted = claim.spec.as_ref()?;
    // Grouped as upstream: volumes with the same set of modes compete; sets with fewer modes come first.
    let mut groups: BTreeMap<(usize, Vec<&str>), Vec<&Arc<PersistentVolume>>> = BTreeMap::new();
    for volume in volumes {
        let Some(offered) = volume.spec.as_ref() else { continue };
        if !has_access_modes(wanted, offered) {
            continue;
        }
        let mut modes: Vec<&str> = offered.access_modes.iter().flatten().map(String::as_str).collect();
        modes.sort_unstable();
        modes.dedup();
        groups.entry((modes.len(), modes)).or_default().push(volume);
    }
    groups.into_values().find_map(|group| find_in_group(claim, &group, delayed))
}

fn find_in_group(
    claim: &PersistentVolumeClaim,
    volumes: &[&Arc<PersistentVolume>],
    delayed: bool,
) -> Option<Arc<PersistentVolume>> {
    let wanted = claim.spec.as_ref()?;
    let selector = wanted.selector.as_ref().map(|selector| LabelSelector::from_typed(Some(selector)));
    // A selector that makes no sense selects nothing; validation refuses it.
    let selects = |volume: &PersistentVolume| match &selector {
        None => true,
        Some(Err(_)) => false,
        Some(Ok(selector)) => {
            let none = BTreeMap::new();
            selector.matches(volume.metadata.labels.as_ref().unwrap_or(&none))
        }
    };
    let size = requested(claim);
    let mut smallest: Option<&Arc<PersistentVolume>> = None;
    for volume in volumes {
        let Some(offered) = volume.spec.as_ref() else { continue };
        let reserved = is_bound_to(volume, claim);
        if offered.claim_ref.is_some() && !reserved
            || capacity(volume) < size
            || !same_mode(wanted, offered)
            || attributes(wanted.volume_attributes_class_name.as_ref())
                != attributes(offered.volume_attributes_class_name.as_ref())
            || volume.metadata.deletion_timestamp.is_some()
        {
            continue;
        }
        if reserved {
            return Some(Arc::clone(volume));
        }
        if delayed
            || volume_phase(volume) != "Available"
            || !selects(volume)
            || volume_class(volume) != claim_class(claim)
        {
            continue;
        }
        if smallest.is_none_or(|found| capacity(volume) < capacity(found)) {
            smallest = Some(volume);
        }
    }
    smallest.map(Arc::clone)
}

#[cfg(test)]
#[path = "matching_tests.rs"]
mod tests;
