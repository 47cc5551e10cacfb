//! Ownership between objects: controller references, adoption and release, as upstream's ControllerRefManager.

use std::sync::Arc;

use ferrite_json::{Value, json};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Patch, PatchParams};
use kube::core::{Selector, SelectorExt};
use kube::{Client, Resource};

use crate::{Api, Object, ObjectKey, is_conflict, is_not_found, message_of};

/// The owner that controls the object, if any.
pub fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// A controller reference to `owner`.
pub fn controller_reference<K: Resource<DynamicType = ()>>(owner: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: owner.meta().name.clone().unwrap_or_default(),
        uid: owner.meta().uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// The relation between an owner and an object it sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Another owner controls it, or the selector does not match it.
    Ignore,
    /// The owner controls it already.
    Keep,
    /// It matches and nobody controls it.
    Adopt,
    /// The owner controls it but it no longer matches.
    Release,
}

/// As upstream: an owner that is being deleted adopts and releases nothing, and an object that is being deleted is not
/// adopted.
pub fn claim(owner: &ObjectMeta, selector: &Selector, object: &ObjectMeta) -> Claim {
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

/// Strategic merge patch that makes `owner` the controller of the object with this UID, and adds its finalizer.
fn adopt_patch(owner: &OwnerReference, uid: &str, finalizer: Option<&str>) -> Value {
    let mut patch = json!({"metadata": {"uid": uid, "ownerReferences": [owner]}});
    if let Some(finalizer) = finalizer {
        patch["metadata"]["finalizers"] = json!([finalizer]);
    }
    patch
}

/// Strategic merge patch that takes the owner with this UID away from the object, and its finalizer.
fn release_patch(owner_uid: &str, uid: &str, finalizer: Option<&str>) -> Value {
    let mut patch =
        json!({"metadata": {"uid": uid, "ownerReferences": [{"$patch": "delete", "uid": owner_uid}]}});
    if let Some(finalizer) = finalizer {
        patch["metadata"]["$deleteFromPrimitiveList/finalizers"] = json!([finalizer]);
    }
    patch
}

/// A claim that could not be made good.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("cannot {action} {object}: {}", message_of(error))]
    Api { action: &'static str, object: ObjectKey, error: kube::Error },
    /// The owner in the cache is not the one the server has.
    #[error("{owner} is gone, not adopting")]
    OwnerGone { owner: ObjectKey },
}

/// The objects among `candidates` that `owner` controls, after adopting those that match and that `may_adopt` allows,
/// and releasing those that no longer match.
pub async fn claim_all<O, K>(
    client: &Client,
    owner: &O,
    selector: &Selector,
    candidates: Vec<Arc<K>>,
    may_adopt: impl Fn(&K) -> bool + Send,
) -> Result<Vec<Arc<K>>, ClaimError>
where
    O: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    K: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    claim_all_with_finalizer(client, owner, selector, candidates, may_adopt, None).await
}

/// [`claim_all`] for an owner that keeps `finalizer` on its objects: adoption adds it, release removes it.
pub async fn claim_all_with_finalizer<O, K>(
    client: &Client,
    owner: &O,
    selector: &Selector,
    candidates: Vec<Arc<K>>,
    may_adopt: impl Fn(&K) -> bool + Send,
    finalizer: Option<&str>,
) -> Result<Vec<Arc<K>>, ClaimError>
where
    O: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    K: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    let key = ObjectKey::of(owner);
    let api: Api<K> = Api::namespaced(client.clone(), &key.namespace);
    let mut owned = Vec::with_capacity(candidates.len());
    let mut verified = false;
    for object in candidates {
        let meta = object.meta();
        let (name, uid) = (meta.name.as_deref().unwrap_or_default(), meta.uid.as_deref().unwrap_or_default());
        let failed = |action, error| ClaimError::Api { action, object: ObjectKey::of(&*object), error };
        match claim(owner.meta(), selector, meta) {
            Claim::Keep => owned.push(object),
            Claim::Ignore => {}
            Claim::Adopt => {
                if !may_adopt(&object) {
                    continue;
                }
                // Once per sync, not from the cache: an owner deleted and made again must not take the objects.
                if !verified {
                    verify(client, owner, &key).await?;
                    verified = true;
                }
                let patch = Patch::Strategic(adopt_patch(&controller_reference(owner), uid, finalizer));
                match api.patch(name, &PatchParams::default(), &patch).await {
                    Ok(adopted) => owned.push(Arc::new(adopted)),
                    Err(error) if is_not_found(&error) => {}
                    Err(error) => return Err(failed("adopt", error)),
                }
            }
            Claim::Release => {
                let owner_uid = owner.meta().uid.as_deref().unwrap_or_default();
                let patch = Patch::Strategic(release_patch(owner_uid, uid, finalizer));
                match api.patch(name, &PatchParams::default(), &patch).await {
                    Ok(_) => {}
                    // Gone, or another object under the same name by now.
                    Err(error) if is_not_found(&error) || is_conflict(&error) => {}
                    Err(error) => return Err(failed("release", error)),
                }
            }
        }
    }
    Ok(owned)
}

/// Fails unless the server has the same owner and does not delete it.
async fn verify<O>(client: &Client, owner: &O, key: &ObjectKey) -> Result<(), ClaimError>
where
    O: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    let live = Api::<O>::namespaced(client.clone(), &key.namespace)
        .get(&key.name)
        .await
        .map_err(|error| ClaimError::Api { action: "recheck", object: key.clone(), error })?;
    if live.meta().uid != owner.meta().uid || live.meta().deletion_timestamp.is_some() {
        return Err(ClaimError::OwnerGone { owner: key.clone() });
    }
    Ok(())
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
