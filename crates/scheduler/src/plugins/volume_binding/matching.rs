//! Finds a volume for a claim, or room to make one. Nothing here waits or writes.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrite_api::quantity::Quantity;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::core::{Selector, SelectorExt};

use crate::plugins::volumes::{claim_class, is_reachable, volume_class};

type Amounts = BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>;

fn storage(amounts: Option<&Amounts>) -> Quantity {
    let text = amounts.and_then(|amounts| amounts.get("storage"));
    text.and_then(|quantity| Quantity::parse(&quantity.0).ok()).unwrap_or(Quantity::ZERO)
}

/// The size that the claim asks for.
pub(super) fn requested(claim: &PersistentVolumeClaim) -> Quantity {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    storage(resources.and_then(|resources| resources.requests.as_ref()))
}

/// True if the volume refers to the claim, by name and, if it says so, by UID.
pub(super) fn refers_to(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    reference.is_some_and(|reference| {
        let uid = reference.uid.as_deref().filter(|uid| !uid.is_empty());
        reference.name == claim.metadata.name
            && reference.namespace == claim.metadata.namespace
            && (uid.is_none() || uid == claim.metadata.uid.as_deref())
    })
}

fn mode(mode: Option<&str>) -> &str {
    mode.filter(|mode| !mode.is_empty()).unwrap_or("Filesystem")
}

/// The volume for the claim on the node: the one that refers to it, else the smallest that suits. `taken` are the names of
/// volumes that other claims of the pod get.
pub(super) fn find<'a>(
    claim: &PersistentVolumeClaim,
    volumes: &'a [Arc<PersistentVolume>],
    node: &Node,
    taken: &[&str],
) -> Option<&'a Arc<PersistentVolume>> {
    let wanted = requested(claim);
    let spec = claim.spec.as_ref()?;
    let selector: Option<Selector> = match spec.selector.clone() {
        Some(selector) => Some(selector.try_into().ok()?),
        None => None,
    };
    let mut smallest: Option<(&Arc<PersistentVolume>, Quantity)> = None;
    for volume in volumes {
        let Some(has) = volume.spec.as_ref() else { continue };
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let is_for_claim = refers_to(volume, claim);
        let size = storage(has.capacity.as_ref());
        let class = |name: &Option<String>| name.clone().unwrap_or_default();
        if taken.contains(&name)
            || (has.claim_ref.is_some() && !is_for_claim)
            || size < wanted
            || mode(spec.volume_mode.as_deref()) != mode(has.volume_mode.as_deref())
            || class(&spec.volume_attributes_class_name) != class(&has.volume_attributes_class_name)
            || volume.metadata.deletion_timestamp.is_some()
        {
            continue;
        }
        let is_reachable = is_reachable(volume, node);
        if is_for_claim {
            // The claim will get this volume and no other, so that a node without it does not suit.
            return is_reachable.then_some(volume);
        }
        let empty = BTreeMap::new();
        let labels = volume.metadata.labels.as_ref().unwrap_or(&empty);
        let modes = has.access_modes.as_deref().unwrap_or_default();
        let suits = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Available")
            && selector.as_ref().is_none_or(|selector| selector.matches(labels))
            && volume_class(volume) == claim_class(claim)
            && is_reachable
            && spec.access_modes.iter().flatten().all(|mode| modes.contains(mode));
        if suits && smallest.as_ref().is_none_or(|(_, least)| size < *least) {
            smallest = Some((volume, size));
        }
    }
    smallest.map(|(volume, _)| volume)
}

/// True if the class makes volumes that the node can reach.
pub(super) fn allows(class: &StorageClass, node: &Node) -> bool {
    let terms = class.allowed_topologies.as_deref().unwrap_or_default();
    let empty = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
    terms.is_empty()
        || terms.iter().any(|term| {
            let expressions = term.match_label_expressions.as_deref().unwrap_or_default();
            !expressions.is_empty()
                && expressions.iter().all(|expression| {
                    labels.get(&expression.key).is_some_and(|value| expression.values.contains(value))
                })
        })
}

/// The largest volume that the storage can make; none if it does not say.
pub(super) fn volume_limit(capacity: &CSIStorageCapacity) -> Option<Quantity> {
    let limit = capacity.maximum_volume_size.as_ref().or(capacity.capacity.as_ref())?;
    Quantity::parse(&limit.0).ok()
}

/// True if some storage that the node reaches has room for the claim.
pub(super) fn has_room(
    capacities: &[Arc<CSIStorageCapacity>],
    class: &str,
    size: &Quantity,
    node: &Node,
) -> bool {
    let empty = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
    capacities.iter().any(|capacity| {
        let topology = capacity.node_topology.clone().and_then(|topology| Selector::try_from(topology).ok());
        capacity.storage_class_name == class
            && volume_limit(capacity).is_some_and(|limit| limit >= *size)
            && topology.is_some_and(|topology| topology.matches(labels))
    })
}
