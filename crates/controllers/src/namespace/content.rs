//! Deletes everything in a namespace, and counts the objects that remain.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_client::{Api, is_not_found, message_of};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams};
use kube::core::{ObjectMeta, PartialObjectMeta};
use tracing::debug;

use crate::discovery::{self, Served};

/// Pods as the conditions name them.
const PODS: &str = "pods.";
/// Usual time that pods take to stop, if they set none.
const DEFAULT_GRACE: i64 = 30;
/// As upstream: the time that finalizers are expected to take, in seconds.
const FINALIZER_ESTIMATE: i64 = 15;

type Metadata = PartialObjectMeta<DynamicObject>;

/// Objects that remain after deleting everything.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) discovery_failure: Option<String>,
    pub(super) failures: Vec<String>,
    /// Number of remaining objects of each resource, as `pods.` or `deployments.apps`.
    pub(super) remaining: BTreeMap<String, usize>,
    /// Number of remaining objects with each finalizer.
    pub(super) finalizers: BTreeMap<String, usize>,
    /// Longest time the remaining are expected to take, in seconds.
    pub(super) estimate: i64,
}

impl Content {
    pub(super) fn is_empty(&self) -> bool {
        self.error().is_none() && self.remaining.is_empty()
    }

    /// All that went wrong.
    pub(super) fn error(&self) -> Option<String> {
        let all: Vec<&str> =
            self.discovery_failure.iter().chain(&self.failures).map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }

    /// The time until the next look at content that remains, `since` after the deletion began. As upstream half the longest
    /// time that it may take, and a second. But nothing reports the end of objects other than pods, and most finalizers go at
    /// once: at first the pause is no longer than the deletion has taken.
    pub(super) fn pause(&self, since: SignedDuration) -> Duration {
        let longest = self.estimate.max(0).unsigned_abs() / 2 + 1;
        let seconds = match self.remaining.contains_key(PODS) {
            true => longest,
            false => longest.min(since.as_secs().max(1).unsigned_abs()),
        };
        Duration::from_secs(seconds)
    }

    /// Deletes the objects of a namespace whose deletion began `since` ago.
    pub(super) async fn delete(client: &Client, namespace: &str, since: SignedDuration) -> Self {
        let mut content = Self::default();
        let found = match discovery::discover(client).await {
            Ok(found) => found,
            Err(error) => {
                content.discovery_failure = Some(error.to_string());
                return content;
            }
        };
        // The resources that are known are deleted all the same.
        content.discovery_failure = found.failure().map(|failure| {
            format!("Discovery failed for some groups, {} failing: {failure}", found.stale.len())
        });
        let deletable =
            found.served.iter().filter(|served| served.is_namespaced() && served.can(&["delete"]));
        let (pods, others): (Vec<_>, Vec<_>) = deletable.partition(|served| is_pods(&served.resource));
        for served in pods {
            content.delete_all(client, namespace, served, since).await;
        }
        // Pods go first: objects that protect or serve them (policies, Services, Secrets) stay until the last
        // has ended.
        if !content.remaining.is_empty() {
            return content;
        }
        for served in others {
            content.delete_all(client, namespace, served, since).await;
        }
        content
    }

    async fn delete_all(&mut self, client: &Client, namespace: &str, served: &Served, since: SignedDuration) {
        match delete_all(client, namespace, served).await {
            Ok(left) => self.count(namespace, served, &left, since),
            Err(error) => self.failures.push(message_of(&error)),
        }
    }

    /// Counts the objects of a resource that are left, and estimates when they will be gone.
    pub(super) fn count(
        &mut self,
        namespace: &str,
        served: &Served,
        left: &[ObjectMeta],
        since: SignedDuration,
    ) {
        if left.is_empty() {
            return;
        }
        let resource = &served.resource;
        let name = format!("{}.{}", resource.plural, resource.group);
        debug!(namespace, resource = name, count = left.len(), "content remains");
        self.remaining.insert(name, left.len());
        let finalizers = left.iter().flat_map(|object| object.finalizers.iter().flatten());
        let mut has_finalizers = false;
        for finalizer in finalizers {
            has_finalizers = true;
            *self.finalizers.entry(finalizer.clone()).or_default() += 1;
        }
        let grace = match is_pods(resource) {
            true => left.iter().map(|pod| pod.deletion_grace_period_seconds.unwrap_or(DEFAULT_GRACE)).max(),
            false => None,
        };
        let estimate = match grace.filter(|grace| since.as_secs() < *grace) {
            Some(grace) => grace,
            None if has_finalizers => FINALIZER_ESTIMATE,
            None => {
                let (group, version, plural) = (&resource.group, &resource.version, &resource.plural);
                self.failures.push(format!(
                    "unexpected items still remain in namespace: {namespace} for gvr: {group}/{version}, Resource={plural}"
                ));
                0
            }
        };
        self.estimate = self.estimate.max(estimate);
    }
}

fn is_pods(resource: &ApiResource) -> bool {
    let pods = ApiResource::erase::<Pod>(&());
    (&resource.group, &resource.plural) == (&pods.group, &pods.plural)
}

/// Deletes all objects of a resource and returns the metadata of those that remain.
async fn delete_all(
    client: &Client,
    namespace: &str,
    served: &Served,
) -> Result<Vec<ObjectMeta>, kube::Error> {
    let resource = &served.resource;
    let params = DeleteParams::background();
    let objects: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, resource);
    let is_deleted = served.can(&["deletecollection"])
        && match objects.delete_collection(&params, &ListParams::default()).await {
            Ok(_) => true,
            Err(error) if is_unsupported(&error) => false,
            Err(error) => return Err(error),
        };
    if !is_deleted {
        for object in list(client, namespace, served).await? {
            match objects.delete(&object.name.unwrap_or_default(), &params).await {
                Ok(_) => {}
                Err(error) if is_unsupported(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    list(client, namespace, served).await
}

/// The objects of a resource. One that cannot be listed has none.
async fn list(client: &Client, namespace: &str, served: &Served) -> Result<Vec<ObjectMeta>, kube::Error> {
    if !served.can(&["list"]) {
        return Ok(Vec::new());
    }
    let metadata: Api<Metadata> = Api::namespaced_with(client.clone(), namespace, &served.resource);
    match metadata.list(&ListParams::default()).await {
        Ok(list) => Ok(list.items.into_iter().map(|object| object.metadata).collect()),
        Err(error) if is_unsupported(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns true if there is no such object, or the server does not do this with objects of the resource.
fn is_unsupported(error: &kube::Error) -> bool {
    is_not_found(error) || matches!(error, kube::Error::Api(status) if status.code == 405)
}
