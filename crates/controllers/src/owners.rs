//! Ownership between objects: controller references, adoption and release.

use ferrite_json::{Value, json};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use kube::core::{Selector, SelectorExt};

/// The owner that controls the object, if any.
pub(crate) fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// A controller reference to `owner`.
pub(crate) fn controller_reference<K: Resource<DynamicType = ()>>(owner: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: owner.meta().name.clone().unwrap_or_default(),
        uid: owner.meta().uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// What an owner does about an object it sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Another controls it, or it is none of the owner's business.
    Ignore,
    /// It is already the owner's.
    Keep,
    /// It matches and nobody controls it.
    Adopt,
    /// The owner controls it but it no longer matches.
    Release,
}

/// As upstream's reference manager: an owner that is being deleted takes and lets go of nothing, and an object
/// that is being deleted is not adopted.
pub(crate) fn claim(owner: &ObjectMeta, selector: &Selector, object: &ObjectMeta) -> Claim {
    let empty = Default::default();
    let matches = selector.matches(object.labels.as_ref().unwrap_or(&empty));
    let owner_is_deleting = owner.deletion_timestamp.is_some();
    match controller_of(object) {
        Some(reference) if Some(&reference.uid) != owner.uid.as_ref() => Claim::Ignore,
        Some(_) if matches => Claim::Keep,
        Some(_) if owner_is_deleting => Claim::Ignore,
        Some(_) => Claim::Release,
        None if matches && !owner_is_deleting && object.deletion_timestamp.is_none() => Claim::Adopt,
        None => Claim::Ignore,
    }
}

/// Strategic merge patch that makes `owner` the controller of the object with this UID.
pub(crate) fn adopt_patch(owner: &OwnerReference, uid: &str) -> Value {
    json!({"metadata": {"uid": uid, "ownerReferences": [owner]}})
}

/// Strategic merge patch that takes the owner with this UID away from the object.
pub(crate) fn release_patch(owner_uid: &str, uid: &str) -> Value {
    json!({"metadata": {"uid": uid, "ownerReferences": [{"$patch": "delete", "uid": owner_uid}]}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(uid: &str, label: &str, owner: Option<&str>, deleting: bool) -> ObjectMeta {
        ferrite_json::from_value(json!({
            "uid": uid,
            "labels": {"app": label},
            "deletionTimestamp": deleting.then_some("2024-01-01T00:00:00Z"),
            "ownerReferences": owner.map(|uid| json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x",
                                                      "uid": uid, "controller": true}])),
        }))
        .unwrap()
    }

    #[test]
    fn claims() {
        let selector: Selector = [("app".to_owned(), "web".to_owned())].into_iter().collect();
        let (live, dying) = (meta("me", "", None, false), meta("me", "", None, true));
        for (what, owner, object, expected) in [
            ("matching orphan", &live, meta("p", "web", None, false), Claim::Adopt),
            ("matching orphan that is being deleted", &live, meta("p", "web", None, true), Claim::Ignore),
            ("matching orphan of a dying owner", &dying, meta("p", "web", None, false), Claim::Ignore),
            ("other orphan", &live, meta("p", "db", None, false), Claim::Ignore),
            ("mine and matching", &live, meta("p", "web", Some("me"), false), Claim::Keep),
            ("mine, matching, owner dying", &dying, meta("p", "web", Some("me"), false), Claim::Keep),
            ("mine, no longer matching", &live, meta("p", "db", Some("me"), false), Claim::Release),
            (
                "mine, no longer matching, owner dying",
                &dying,
                meta("p", "db", Some("me"), false),
                Claim::Ignore,
            ),
            ("another's", &live, meta("p", "web", Some("you"), false), Claim::Ignore),
        ] {
            assert_eq!(claim(owner, &selector, &object), expected, "{what}");
        }
    }
}
