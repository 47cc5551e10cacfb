//! The history of a pod template, kept in ControllerRevisions: DaemonSets and StatefulSets have one each.
//!
//! The data of a revision is a strategic merge patch that puts its template back. Two revisions are equal if their
//! data is; the revision with the highest number is the one in force.

use std::collections::BTreeMap;

use ferrite_client::{
    Api, Informer, Object, ObjectKey, claim_all, controller_of, controller_reference, is_already_exists,
    is_not_found,
};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::serde_json::{self, json};
use kube::api::{DeleteParams, PostParams};
use kube::core::Selector;
use kube::{Client, Resource};

use crate::Context;
use crate::error::{During, SyncError};
use crate::hash::content_hash;
use crate::pods::{self, BY_CONTROLLER, ORPHANS};

/// The label of revisions and pods that names the revision.
pub(crate) const HASH: &str = "controller-revision-hash";
/// A longer name would leave no room for the hash.
const LONGEST_PREFIX: usize = 223;

/// A kind that keeps its history in ControllerRevisions.
pub(crate) trait Revisioned:
    Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>
{
}

impl<K: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>> Revisioned for K {}

/// The data of the revision that holds `template`.
pub(crate) fn data_of(template: &PodTemplateSpec) -> Result<RawExtension, SyncError> {
    let mut template = serde_json::to_value(template)
        .map_err(|error| SyncError::Other(format!("cannot encode the pod template: {error}")))?;
    if let Some(members) = template.as_object_mut() {
        members.insert("$patch".to_owned(), "replace".into());
    }
    Ok(RawExtension(json!({"spec": {"template": template}})))
}

/// The template that `revision` holds, if its data has the form that [`data_of`] gives.
pub(crate) fn template_of(revision: &ControllerRevision) -> Option<PodTemplateSpec> {
    let template = revision.data.as_ref()?.0.pointer("/spec/template")?;
    serde_json::from_value(template.clone()).ok()
}

/// The hash by which a revision of this data is named. A higher collision count gives another one.
pub(crate) fn data_hash(data: &RawExtension, collisions: Option<i32>) -> String {
    let mut text = data.0.to_string().into_bytes();
    if let Some(collisions) = collisions {
        text.extend(collisions.to_string().into_bytes());
    }
    content_hash(&text)
}

/// A revision of `owner` that is yet to be created.
pub(crate) fn revision<O: Revisioned>(
    owner: &O,
    template_labels: Option<&BTreeMap<String, String>>,
    data: RawExtension,
    number: i64,
    hash: &str,
) -> ControllerRevision {
    let mut labels = template_labels.cloned().unwrap_or_default();
    labels.insert(HASH.to_owned(), hash.to_owned());
    let prefix: String =
        owner.meta().name.as_deref().unwrap_or_default().chars().take(LONGEST_PREFIX).collect();
    ControllerRevision {
        metadata: ObjectMeta {
            name: Some(format!("{prefix}-{hash}")),
            namespace: owner.meta().namespace.clone(),
            labels: Some(labels),
            annotations: owner.meta().annotations.clone(),
            owner_references: Some(vec![controller_reference(owner)]),
            ..ObjectMeta::default()
        },
        data: Some(data),
        revision: number,
    }
}

/// Oldest first: by number, then by creation, then by name.
pub(crate) fn sort(revisions: &mut [ControllerRevision]) {
    let created =
        |revision: &ControllerRevision| revision.metadata.creation_timestamp.as_ref().map(|time| time.0);
    revisions.sort_by(|a, b| {
        (a.revision, created(a), &a.metadata.name).cmp(&(b.revision, created(b), &b.metadata.name))
    });
}

/// The number of the revision that follows all of `revisions`.
pub(crate) fn next_number(revisions: &[ControllerRevision]) -> i64 {
    revisions.iter().map(|revision| revision.revision).max().unwrap_or(0).max(0) + 1
}

pub(crate) fn name_of(revision: &ControllerRevision) -> &str {
    revision.metadata.name.as_deref().unwrap_or_default()
}

pub(crate) fn hash_of(revision: &ControllerRevision) -> &str {
    revision.metadata.labels.as_ref().and_then(|labels| labels.get(HASH)).map_or("", String::as_str)
}

/// The revisions to delete so that `limit` remain of `revisions`, which are sorted: the oldest that are not in use.
/// Those in use count towards the limit.
pub(crate) fn surplus(
    revisions: &[ControllerRevision],
    limit: usize,
    in_use: impl Fn(&ControllerRevision) -> bool,
) -> Vec<&ControllerRevision> {
    let count = revisions.len().saturating_sub(limit);
    revisions.iter().filter(|revision| !in_use(revision)).take(count).collect()
}

/// The outcome of a creation.
#[derive(Debug)]
pub(crate) enum Created {
    /// The revision of this data, made now or before.
    Revision(Box<ControllerRevision>),
    /// Another data has the same name: the collision count must grow.
    Collision,
}

/// Reads revisions from the shared copy and writes them as the controller.
pub(crate) struct History {
    client: Client,
    revisions: Informer<ControllerRevision>,
}

impl History {
    pub(crate) fn new(context: &Context) -> Self {
        let revisions: Informer<ControllerRevision> = context.informers.get();
        revisions.add_index(BY_CONTROLLER, pods::controller_index);
        revisions.add_index(ORPHANS, pods::orphan_index);
        Self { client: context.client.clone(), revisions }
    }

    pub(crate) fn informer(&self) -> &Informer<ControllerRevision> {
        &self.revisions
    }

    fn api(&self, namespace: &str) -> Api<ControllerRevision> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The revisions of `owner`, sorted, after adopting those that match its selector.
    pub(crate) async fn claim<O: Revisioned>(
        &self,
        owner: &O,
        selector: &Selector,
    ) -> Result<Vec<ControllerRevision>, SyncError> {
        let meta = owner.meta();
        let mut candidates = self.revisions.by_index(BY_CONTROLLER, meta.uid.as_deref().unwrap_or_default());
        candidates.extend(self.revisions.by_index(ORPHANS, meta.namespace.as_deref().unwrap_or_default()));
        let owned = claim_all(&self.client, owner, selector, candidates, |_| true).await?;
        let mut owned: Vec<_> = owned.iter().map(|revision| (**revision).clone()).collect();
        sort(&mut owned);
        Ok(owned)
    }

    pub(crate) async fn create(&self, revision: &ControllerRevision) -> Result<Created, SyncError> {
        let key = ObjectKey::of(revision);
        let api = self.api(&key.namespace);
        match api.create(&PostParams::default(), revision).await {
            Ok(created) => Ok(Created::Revision(Box::new(created))),
            Err(error) if is_already_exists(&error) => {
                let existing = api.get(&key.name).await.during(|| format!("read revision {key}"))?;
                // A revision of a predecessor of the same name is about to be collected: it is of no use.
                let owner = controller_of(&existing.metadata).map(|owner| &owner.uid);
                let ours = existing.data == revision.data
                    && owner.is_none_or(|uid| {
                        controller_of(&revision.metadata).is_some_and(|owner| owner.uid == *uid)
                    });
                Ok(if ours { Created::Revision(Box::new(existing)) } else { Created::Collision })
            }
            Err(error) => Err(error).during(|| format!("create revision {key}")),
        }
    }

    /// Gives the revision another number or another hash label.
    pub(crate) async fn update(
        &self,
        revision: &ControllerRevision,
    ) -> Result<ControllerRevision, SyncError> {
        let key = ObjectKey::of(revision);
        self.api(&key.namespace)
            .replace(&key.name, &PostParams::default(), revision)
            .await
            .during(|| format!("update revision {key}"))
    }

    pub(crate) async fn delete(&self, revision: &ControllerRevision) -> Result<(), SyncError> {
        let key = ObjectKey::of(revision);
        match self.api(&key.namespace).delete(&key.name, &DeleteParams::default()).await {
            Err(error) if !is_not_found(&error) => Err(error).during(|| format!("delete revision {key}")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::DaemonSet;

    use super::*;

    fn template(image: &str) -> PodTemplateSpec {
        serde_json::from_value(json!({"metadata": {"labels": {"app": "a"}},
            "spec": {"containers": [{"name": "c", "image": image}]}}))
        .unwrap()
    }

    fn made(name: &str, number: i64, created: &str) -> ControllerRevision {
        serde_json::from_value(
            json!({"metadata": {"name": name, "creationTimestamp": created}, "revision": number}),
        )
        .unwrap()
    }

    #[test]
    fn a_revision_holds_its_template_as_a_patch_that_replaces_it() {
        let owner: DaemonSet = serde_json::from_value(json!({"metadata": {"name": "d".repeat(250),
            "namespace": "ns", "uid": "u", "annotations": {"note": "x"}}}))
        .unwrap();
        let data = data_of(&template("a:1")).unwrap();
        assert_eq!(data.0["spec"]["template"]["$patch"], "replace");
        let hash = data_hash(&data, Some(0));
        let made =
            revision(&owner, template("a:1").metadata.unwrap().labels.as_ref(), data.clone(), 3, &hash);
        assert_eq!(template_of(&made), Some(template("a:1")));
        assert_eq!(made.metadata.labels.as_ref().unwrap()["app"], "a");
        assert_eq!(hash_of(&made), hash);
        assert_eq!(name_of(&made), format!("{}-{hash}", "d".repeat(223)));
        assert_eq!(made.metadata.annotations.as_ref().unwrap()["note"], "x");
        assert_eq!(controller_of(&made.metadata).unwrap().uid, "u");
        assert_ne!(
            data_hash(&data, Some(0)),
            data_hash(&data, Some(1)),
            "the collision count changes the name"
        );
        assert_ne!(data_hash(&data, None), data_hash(&data_of(&template("a:2")).unwrap(), None));
        assert_eq!(data, data_of(&template("a:1")).unwrap());
    }

    #[test]
    fn revisions_are_ordered_by_number_then_age_then_name() {
        let (early, late) = ("2024-01-01T00:00:00Z", "2024-01-02T00:00:00Z");
        let mut revisions =
            [made("d", 2, early), made("c", 1, late), made("b", 1, early), made("a", 1, late)];
        assert_eq!(next_number(&revisions), 3);
        sort(&mut revisions);
        assert_eq!(revisions.iter().map(name_of).collect::<Vec<_>>(), ["b", "a", "c", "d"]);
        assert_eq!(next_number(&[]), 1);
    }

    #[test]
    fn the_oldest_unused_revisions_are_surplus() {
        let revisions: Vec<_> =
            (1..=5).map(|number| made(&format!("r{number}"), number, "2024-01-01T00:00:00Z")).collect();
        for (limit, in_use, expected) in [
            (10, &[][..], &[][..]),
            (5, &[], &[]),
            (3, &[], &["r1", "r2"]),
            (3, &["r1"], &["r2", "r3"]),
            (0, &["r2", "r4"], &["r1", "r3", "r5"]),
        ] {
            let found = surplus(&revisions, limit, |revision| in_use.contains(&name_of(revision)));
            let found: Vec<_> = found.into_iter().map(name_of).collect();
            assert_eq!(found, expected, "limit {limit}, in use {in_use:?}");
        }
    }
}
