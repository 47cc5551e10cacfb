//! The owners of a claim, which decide when the garbage collector deletes it.
//!
//! | whenScaled | whenDeleted | pod in range | pod scaled away |
//! |---|---|---|---|
//! | Retain | Retain | none | none |
//! | Retain | Delete | the set | the set |
//! | Delete | Retain | none | the pod |
//! | Delete | Delete | the set | the pod |

use ferrite_client::controller_reference;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Resource;

use super::identity::ordinal;
use super::in_range;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Policy {
    delete_when_scaled: bool,
    delete_when_deleted: bool,
}

fn policy(set: &StatefulSet) -> Policy {
    let given = set.spec.as_ref().and_then(|spec| spec.persistent_volume_claim_retention_policy.as_ref());
    let deletes = |value: Option<&String>| value.is_some_and(|value| value == "Delete");
    Policy {
        delete_when_scaled: deletes(given.and_then(|policy| policy.when_scaled.as_ref())),
        delete_when_deleted: deletes(given.and_then(|policy| policy.when_deleted.as_ref())),
    }
}

/// Returns true if the reference names an object of this kind and name, whatever its UID.
fn names<K: Resource<DynamicType = ()>>(reference: &OwnerReference, owner: &K) -> bool {
    reference.api_version == K::api_version(&())
        && reference.kind == K::kind(&())
        && Some(&reference.name) == owner.meta().name.as_ref()
}

fn is_to<K: Resource<DynamicType = ()>>(reference: &OwnerReference, owner: &K) -> bool {
    owner.meta().uid.as_ref() == Some(&reference.uid)
}

fn references(claim: &PersistentVolumeClaim) -> &[OwnerReference] {
    claim.metadata.owner_references.as_deref().unwrap_or_default()
}

/// Returns true if the claim belongs to a predecessor of the same name: the garbage collector will delete
/// it.
fn is_of_predecessor<K: Resource<DynamicType = ()>>(claim: &PersistentVolumeClaim, owner: &K) -> bool {
    references(claim).iter().find(|reference| names(reference, owner)).is_some_and(|held| !is_to(held, owner))
}

/// Returns true if the claim is about to be deleted with an earlier pod of the same name. A new pod must
/// wait for that.
pub(super) fn is_stale(set: &StatefulSet, pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    policy(set).delete_when_scaled && is_of_predecessor(claim, pod)
}

/// Returns true if an object other than the set and the pod controls the claim. Then the set does not
/// manage its retention.
pub(super) fn has_other_controller(set: &StatefulSet, pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let policy = policy(set);
    if !policy.delete_when_scaled && !policy.delete_when_deleted {
        return false;
    }
    references(claim).iter().any(|reference| {
        if names(reference, set) {
            !is_to(reference, set)
        } else if names(reference, pod) {
            !is_to(reference, pod)
        } else {
            reference.controller == Some(true)
        }
    })
}

/// The owners that the claim should have, if it has others.
pub(super) fn wanted_owners(
    set: &StatefulSet,
    pod: &Pod,
    claim: &PersistentVolumeClaim,
) -> Option<Vec<OwnerReference>> {
    if is_of_predecessor(claim, set) || is_of_predecessor(claim, pod) {
        return None;
    }
    let held = references(claim);
    let mut wanted: Vec<_> =
        held.iter().filter(|reference| !names(reference, set) && !names(reference, pod)).cloned().collect();
    if !has_other_controller(set, pod, claim) {
        let policy = policy(set);
        let scaled_away = ordinal(set, pod).is_some_and(|ordinal| !in_range(set, ordinal));
        if policy.delete_when_scaled && scaled_away {
            wanted.push(controller_reference(pod));
        } else if policy.delete_when_deleted {
            wanted.push(controller_reference(set));
        }
    }
    let controls = |references: &[OwnerReference]| {
        let mut ours: Vec<_> = references
            .iter()
            .filter(|reference| is_to(reference, set) || is_to(reference, pod))
            .map(|reference| (reference.uid.clone(), reference.controller == Some(true)))
            .collect();
        ours.sort();
        ours
    };
    (controls(held) != controls(&wanted)).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn set(scaled: &str, deleted: &str) -> StatefulSet {
        ferrite_json::from_value(json!({"metadata": {"name": "web", "uid": "set"},
            "spec": {"replicas": 2, "selector": {}, "template": {},
                "persistentVolumeClaimRetentionPolicy": {"whenScaled": scaled, "whenDeleted": deleted}}}))
        .unwrap()
    }

    fn pod(ordinal: i32) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": format!("web-{ordinal}"), "uid": "pod"}}))
            .unwrap()
    }

    fn claim(owners: &[Value]) -> PersistentVolumeClaim {
        ferrite_json::from_value(json!({"metadata": {"name": "data-web-0", "ownerReferences": owners}}))
            .unwrap()
    }

    fn of_set(uid: &str, controller: bool) -> Value {
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": uid, "controller": controller})
    }

    fn of_pod(ordinal: i32, uid: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "name": format!("web-{ordinal}"), "uid": uid, "controller": true})
    }

    fn other(controller: bool) -> Value {
        json!({"apiVersion": "v1", "kind": "Backup", "name": "b", "uid": "other", "controller": controller})
    }

    /// The UIDs of the owners that the claim should have; none if they need no change.
    fn wanted(scaled: &str, deleted: &str, ordinal: i32, owners: &[Value]) -> Option<Vec<String>> {
        let wanted = wanted_owners(&set(scaled, deleted), &pod(ordinal), &claim(owners))?;
        Some(wanted.into_iter().map(|reference| reference.uid).collect())
    }

    #[test]
    fn owners_follow_the_policy() {
        let some = |uids: &[&str]| Some(uids.iter().map(|uid| (*uid).to_owned()).collect::<Vec<_>>());
        for (what, scaled, deleted, ordinal, owners, expected) in [
            ("retained", "Retain", "Retain", 0, &[][..], None),
            ("no longer deleted", "Retain", "Retain", 0, &[of_set("set", true)], some(&[])),
            ("no longer deleted with the pod", "Retain", "Retain", 3, &[of_pod(3, "pod")], some(&[])),
            ("deleted with the set", "Retain", "Delete", 0, &[], some(&["set"])),
            ("already", "Retain", "Delete", 0, &[of_set("set", true)], None),
            ("deleted with the set, also if scaled away", "Retain", "Delete", 3, &[], some(&["set"])),
            ("in range", "Delete", "Retain", 0, &[], None),
            ("scaled away", "Delete", "Retain", 3, &[], some(&["pod"])),
            ("both, in range", "Delete", "Delete", 0, &[], some(&["set"])),
            ("both, scaled away", "Delete", "Delete", 3, &[of_set("set", true)], some(&["pod"])),
            ("both, back in range", "Delete", "Delete", 0, &[of_pod(0, "pod")], some(&["set"])),
            ("owner, not controller", "Retain", "Delete", 0, &[of_set("set", false)], some(&["set"])),
            ("another owner stays", "Retain", "Delete", 0, &[other(false)], some(&["other", "set"])),
            ("another controller", "Retain", "Delete", 0, &[other(true)], None),
            (
                "another controller beside the set",
                "Retain",
                "Delete",
                0,
                &[other(true), of_set("set", false)],
                some(&["other"]),
            ),
            ("of an earlier set", "Retain", "Delete", 0, &[of_set("old", true)], None),
            ("of an earlier pod", "Delete", "Delete", 0, &[of_pod(0, "old")], None),
        ] {
            assert_eq!(wanted(scaled, deleted, ordinal, owners), expected, "{what}");
        }
    }

    #[test]
    fn a_claim_of_an_earlier_pod_is_stale_if_it_goes_with_the_pod() {
        let held = claim(&[of_pod(0, "old")]);
        assert!(is_stale(&set("Delete", "Retain"), &pod(0), &held));
        assert!(!is_stale(&set("Retain", "Retain"), &pod(0), &held));
        assert!(!is_stale(&set("Delete", "Retain"), &pod(0), &claim(&[])));
        assert!(!is_stale(&set("Delete", "Retain"), &pod(0), &claim(&[of_pod(0, "pod")])));
        let mut unborn = pod(0);
        unborn.metadata.uid = None;
        assert!(is_stale(&set("Delete", "Retain"), &unborn, &held), "a pod that is yet to be created");
    }
}
