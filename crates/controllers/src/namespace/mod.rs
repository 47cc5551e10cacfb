//! Empties a namespace that is being deleted, and then removes its finalizer.

mod conditions;
mod content;
#[cfg(test)]
mod tests;

use std::time::Duration;

use ferrite_client::{
    Api, Change, Controller, Informer, ObjectKey, RateLimits, is_conflict, is_not_found, message_of,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, NamespaceCondition, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::PostParams;
use tracing::debug;

use self::conditions::conditions;
use self::content::Content;
use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "namespace-controller";
const FINALIZER: &str = "kubernetes";
/// As upstream: a namespace that cannot be emptied is tried again every minute at least.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

pub(crate) fn is_active(namespace: &Namespace) -> bool {
    namespace.metadata.deletion_timestamp.is_none()
        && namespace.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Terminating")
}

pub(crate) fn start(context: &Context) {
    let namespaces: Informer<Namespace> = context.informers.get();
    let pods: Informer<Pod> = context.informers.get();
    let (client, known) = (context.client.clone(), namespaces.clone());
    let limits = RateLimits { cap: LONGEST_RETRY, ..RateLimits::default() };
    let kit: Controller = context.declared(NAME, context.workers(NAME), limits);
    kit.watches(&namespaces, |change, queue| {
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
    let deleted_at = namespace.metadata.deletion_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |at| at.0);
    let since = Timestamp::now().duration_since(deleted_at);
    let content = Content::delete(client, name, since).await;
    let namespace = write_conditions(&api, namespace, &content).await?;
    if let Some(error) = content.error() {
        return Err(SyncError::Other(error));
    }
    if content.is_empty() {
        return finalize(client, namespace).await;
    }
    Ok(Some(content.pause(since)))
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
