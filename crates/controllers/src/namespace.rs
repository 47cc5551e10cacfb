//! Empties a namespace that is being deleted, and then removes its finalizer.

use std::time::Duration;

use ferrite_client::{Api, Change, Informer, ObjectKey, is_conflict, is_not_found, message_of};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, NamespaceCondition, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{DeleteParams, DynamicObject, ListParams, PostParams};
use kube::core::PartialObjectMeta;
use std::collections::BTreeMap;
use tracing::debug;

use crate::Context;
use crate::discovery::{self, Served};
use crate::error::{During, SyncError};

const NAME: &str = "namespace-controller";
const FINALIZER: &str = "kubernetes";
/// Usual time that pods take to stop, if they set none.
const DEFAULT_GRACE: i64 = 30;

pub(crate) fn is_active(namespace: &Namespace) -> bool {
    namespace.metadata.deletion_timestamp.is_none()
        && namespace.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Terminating")
}

pub(crate) fn start(context: &Context) {
    let namespaces: Informer<Namespace> = context.informers.get();
    let pods: Informer<Pod> = context.informers.get();
    let (client, known) = (context.client.clone(), namespaces.clone());
    context
        .controller(NAME)
        .watches(&namespaces, |change, queue| {
            if change.object().metadata.deletion_timestamp.is_some() {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        // A namespace usually waits for its last pod to stop.
        .watches(&pods, move |change, queue| {
            if let Change::Deleted(pod) = change {
                let key = ObjectKey::cluster(pod.metadata.namespace.clone().unwrap_or_default());
                if known.get(&key).is_some_and(|namespace| !is_active(&namespace)) {
                    queue.add(key);
                }
            }
        })
        .run(move |key| {
            let known = namespaces.get(&key);
            let client = client.clone();
            async move {
                match known {
                    Some(namespace) => sync(&client, &namespace).await,
                    None => Ok(None),
                }
            }
        });
}

async fn sync(client: &Client, known: &Namespace) -> Result<Option<Duration>, SyncError> {
    let name = known.metadata.name.as_deref().unwrap_or_default();
    let api: Api<Namespace> = Api::all(client.clone());
    let namespace = match api.get(name).await {
        Ok(namespace) => namespace,
        Err(error) if is_not_found(&error) => return Ok(None),
        Err(error) => return Err(error).during(|| format!("read namespace {name}")),
    };
    let finalizers = namespace.spec.as_ref().and_then(|spec| spec.finalizers.clone()).unwrap_or_default();
    if namespace.metadata.uid != known.metadata.uid
        || namespace.metadata.deletion_timestamp.is_none()
        || finalizers.is_empty()
    {
        return Ok(None);
    }
    let content = empty(client, name).await;
    let namespace = write_conditions(&api, namespace, &content).await?;
    if !content.is_empty() {
        return match content.failures.first() {
            Some(failure) => Err(SyncError::Other(failure.clone())),
            // As upstream: sync again after half the longest grace period, and a second.
            None => Ok(Some(Duration::from_secs(content.estimate.max(0).unsigned_abs() / 2 + 1))),
        };
    }
    finalize(client, namespace).await
}

/// Objects that remain after deleting everything.
#[derive(Debug, Default)]
struct Content {
    discovery_failure: Option<String>,
    failures: Vec<String>,
    /// Number of remaining objects of each resource, as `pods.` or `deployments.apps`.
    remaining: BTreeMap<String, usize>,
    /// Number of remaining objects with each finalizer.
    finalizers: BTreeMap<String, usize>,
    /// Longest time the remaining are expected to take, in seconds.
    estimate: i64,
}

impl Content {
    fn is_empty(&self) -> bool {
        self.discovery_failure.is_none() && self.failures.is_empty() && self.remaining.is_empty()
    }
}

async fn empty(client: &Client, namespace: &str) -> Content {
    let mut content = Content::default();
    let served = match discovery::served(client).await {
        Ok(served) => served,
        Err(error) => {
            content.discovery_failure = Some(error.to_string());
            content.failures.push(error.to_string());
            return content;
        }
    };
    let deletable = served.iter().filter(|served| served.is_namespaced() && served.can(&["delete", "list"]));
    let (pods, others): (Vec<_>, Vec<_>) =
        deletable.partition(|served| served.resource.group.is_empty() && served.resource.plural == "pods");
    for served in pods {
        if let Err(error) = empty_one(client, namespace, served, &mut content).await {
            content.failures.push(error.to_string());
        }
    }
    // Pods go first: objects that protect or serve them (policies, Services, Secrets) stay until the last
    // has ended.
    if !content.remaining.is_empty() {
        return content;
    }
    for served in others {
        if let Err(error) = empty_one(client, namespace, served, &mut content).await {
            content.failures.push(error.to_string());
        }
    }
    content
}

async fn empty_one(
    client: &Client,
    namespace: &str,
    served: &Served,
    content: &mut Content,
) -> Result<(), SyncError> {
    let resource = &served.resource;
    let what = format!("{}.{}", resource.plural, resource.group);
    let api: Api<PartialObjectMeta<DynamicObject>> =
        Api::namespaced_with(client.clone(), namespace, resource);
    let list = |what: &str| format!("list {what} in {namespace}");
    let params = DeleteParams::background();
    if served.can(&["deletecollection"]) {
        let all: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, resource);
        match all.delete_collection(&params, &ListParams::default()).await {
            Ok(_) => {}
            // Not there, or not deletable: then there is nothing of it.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 405) => return Ok(()),
            Err(error) => return Err(error).during(|| format!("delete all {what} in {namespace}")),
        }
    } else {
        for object in api.list(&ListParams::default()).await.during(|| list(&what))?.items {
            let name = object.metadata.name.unwrap_or_default();
            let one: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, resource);
            match one.delete(&name, &params).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => {}
                Err(error) => return Err(error).during(|| format!("delete {what} {namespace}/{name}")),
            }
        }
    }
    let left = api.list(&ListParams::default()).await.during(|| list(&what))?.items;
    for object in &left {
        for finalizer in object.metadata.finalizers.iter().flatten() {
            *content.finalizers.entry(finalizer.clone()).or_default() += 1;
        }
        if resource.plural == "pods" {
            let grace = object.metadata.deletion_grace_period_seconds.unwrap_or(DEFAULT_GRACE);
            content.estimate = content.estimate.max(grace);
        }
    }
    if !left.is_empty() {
        debug!(namespace, what, count = left.len(), "content remains");
        content.remaining.insert(what, left.len());
    }
    Ok(())
}

/// The conditions by which a namespace says why it is still there.
fn conditions(content: &Content) -> Vec<(&'static str, bool, &'static str, String)> {
    let counted = |counts: &BTreeMap<String, usize>, has: &str| {
        let parts: Vec<_> = counts.iter().map(|(what, count)| format!("{what} {has} {count}")).collect();
        parts.join(", ")
    };
    let remaining = if content.remaining.is_empty() {
        "All content successfully removed".to_owned()
    } else {
        format!("Some resources are remaining: {} resource instances", counted(&content.remaining, "has"))
    };
    let finalizers = if content.finalizers.is_empty() {
        "All content-preserving finalizers finished".to_owned()
    } else {
        format!(
            "Some content in the namespace has finalizers remaining: {} resource instances",
            counted(&content.finalizers, "in")
        )
    };
    let failed = |failure: Option<&String>, fine: &str| failure.cloned().unwrap_or_else(|| fine.to_owned());
    let discovery = content.discovery_failure.as_ref();
    let deletion = content.failures.first().filter(|_| discovery.is_none());
    vec![
        (
            "NamespaceDeletionDiscoveryFailure",
            discovery.is_some(),
            if discovery.is_some() { "DiscoveryFailed" } else { "ResourcesDiscovered" },
            failed(discovery, "All resources successfully discovered"),
        ),
        (
            "NamespaceDeletionGroupVersionParsingFailure",
            false,
            "ParsedGroupVersions",
            "All legacy kube types successfully parsed".to_owned(),
        ),
        (
            "NamespaceDeletionContentFailure",
            deletion.is_some(),
            if deletion.is_some() { "ContentDeletionFailed" } else { "ContentDeleted" },
            failed(deletion, "All content successfully deleted, may be waiting on finalization"),
        ),
        (
            "NamespaceContentRemaining",
            !content.remaining.is_empty(),
            if content.remaining.is_empty() { "ContentRemoved" } else { "SomeResourcesRemain" },
            remaining,
        ),
        (
            "NamespaceFinalizersRemaining",
            !content.finalizers.is_empty(),
            if content.finalizers.is_empty() { "ContentHasNoFinalizers" } else { "SomeFinalizersRemain" },
            finalizers,
        ),
    ]
}

async fn write_conditions(
    api: &Api<Namespace>,
    mut namespace: Namespace,
    content: &Content,
) -> Result<Namespace, SyncError> {
    let status = namespace.status.get_or_insert_default();
    let held = status.conditions.get_or_insert_default();
    let mut changed = false;
    for (kind, holds, reason, message) in conditions(content) {
        let value = if holds { "True" } else { "False" };
        let known = held.iter_mut().find(|condition| condition.type_ == kind);
        let same = known.as_ref().is_some_and(|known| {
            known.status == value
                && known.reason.as_deref() == Some(reason)
                && known.message.as_deref() == Some(message.as_str())
        });
        if same {
            continue;
        }
        changed = true;
        let since =
            known.as_ref().filter(|known| known.status == value).and_then(|k| k.last_transition_time.clone());
        let updated = NamespaceCondition {
            type_: kind.to_owned(),
            status: value.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message),
            last_transition_time: since.or_else(|| Some(Time(Timestamp::now()))),
        };
        match known {
            Some(known) => *known = updated,
            None => held.push(updated),
        }
    }
    // Not worth a write when the namespace goes away anyway.
    if !changed || content.is_empty() {
        return Ok(namespace);
    }
    let name = namespace.metadata.name.clone().unwrap_or_default();
    match api.replace_status(&name, &PostParams::default(), &namespace).await {
        Ok(written) => Ok(written),
        Err(error) if is_conflict(&error) || is_not_found(&error) => {
            debug!(name, error = message_of(&error), "conditions not written");
            Ok(namespace)
        }
        Err(error) => Err(error).during(|| format!("update status of namespace {name}")),
    }
}

/// Takes away the finalizer in `spec` through its own subresource; the server then drops the namespace.
async fn finalize(client: &Client, mut namespace: Namespace) -> Result<Option<Duration>, SyncError> {
    let name = namespace.metadata.name.clone().unwrap_or_default();
    if let Some(finalizers) = namespace.spec.as_mut().and_then(|spec| spec.finalizers.as_mut()) {
        finalizers.retain(|finalizer| finalizer != FINALIZER);
    }
    let body = ferrite_json::to_vec(&namespace).map_err(|error| SyncError::Other(error.to_string()))?;
    let request = http::Request::put(format!("/api/v1/namespaces/{name}/finalize"))
        .header("content-type", "application/json")
        .body(body)
        .map_err(|error| SyncError::Other(error.to_string()))?;
    match client.request::<ferrite_json::Value>(request).await {
        Ok(_) => Ok(None),
        Err(error) if is_not_found(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("finalize namespace {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_say_what_is_left() {
        let told = |content: &Content| -> Vec<String> {
            conditions(content)
                .into_iter()
                .filter(|(_, holds, _, _)| *holds)
                .map(|(kind, _, reason, message)| format!("{kind} {reason}: {message}"))
                .collect()
        };
        assert!(told(&Content::default()).is_empty());
        let content = Content {
            remaining: BTreeMap::from([("pods.".to_owned(), 2)]),
            finalizers: BTreeMap::from([("example.com/hold".to_owned(), 1)]),
            ..Content::default()
        };
        assert_eq!(
            told(&content),
            [
                "NamespaceContentRemaining SomeResourcesRemain: \
                 Some resources are remaining: pods. has 2 resource instances",
                "NamespaceFinalizersRemaining SomeFinalizersRemain: \
                 Some content in the namespace has finalizers remaining: example.com/hold in 1 resource instances",
            ]
        );
    }
}
