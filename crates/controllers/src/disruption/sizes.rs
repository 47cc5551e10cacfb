//! The sizes of the workloads whose pods a budget is about.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Informer, ObjectKey, is_not_found, message_of, path_segment, read_document};
use ferrite_json::Value;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Client;

use super::decide::BudgetError;
use crate::kinds::Discovery;

/// As upstream: kinds are looked up anew after this time.
const KEEP_KINDS: Duration = Duration::from_secs(30);
/// A Scale is small.
const LARGEST_SCALE: usize = 1 << 20;

/// The workloads whose size is the expected number of pods.
pub(super) struct Workloads {
    pub(super) deployments: Informer<Deployment>,
    pub(super) replica_sets: Informer<ReplicaSet>,
    pub(super) stateful_sets: Informer<StatefulSet>,
    pub(super) replication_controllers: Informer<ReplicationController>,
    client: Client,
    kinds: Discovery,
}

/// The pods that workloads should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Expected {
    pub(super) pods: i32,
    /// Some pod has no controller, and is not counted.
    pub(super) has_unmanaged: bool,
}

/// A workload by its UID, and its size.
type Sized = (String, i32);

fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// Splits the API version of a reference.
fn group_version(reference: &OwnerReference) -> (&str, &str) {
    reference.api_version.split_once('/').unwrap_or(("", &reference.api_version))
}

impl Workloads {
    pub(super) fn new(client: Client, informers: &ferrite_client::Informers) -> Self {
        Self {
            deployments: informers.get(),
            replica_sets: informers.get(),
            stateful_sets: informers.get(),
            replication_controllers: informers.get(),
            kinds: Discovery::new(client.clone(), KEEP_KINDS),
            client,
        }
    }

    /// Sum of the replicas that the workloads of these pods want.
    pub(super) async fn expected(&self, pods: &[Arc<Pod>]) -> Result<Expected, BudgetError> {
        let mut wanted: HashMap<String, i32> = HashMap::new();
        // The owners of pods that are counted with a workload above them.
        let mut seen: HashMap<&str, ()> = HashMap::new();
        let mut has_unmanaged = false;
        for pod in pods {
            let Some(owner) = controller(&pod.metadata) else {
                has_unmanaged = true;
                continue;
            };
            if seen.insert(&owner.uid, ()).is_some() {
                continue;
            }
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let known = match self.known(namespace, owner) {
                Some(known) => Some(known),
                None => self.scale(namespace, owner).await?,
            };
            let pod = || pod.metadata.name.clone().unwrap_or_default();
            let (uid, replicas) = known.ok_or_else(|| BudgetError::NoController { pod: pod() })?;
            wanted.insert(uid, replicas);
        }
        let pods = wanted.values().fold(0, |sum: i32, size| sum.saturating_add(*size));
        Ok(Expected { pods, has_unmanaged })
    }

    /// The size of an owner of a kind of ours, or of its own owner.
    fn known(&self, namespace: &str, owner: &OwnerReference) -> Option<Sized> {
        let key = ObjectKey::new(namespace, owner.name.clone());
        let of = |metadata: &ObjectMeta, replicas: Option<i32>| {
            (metadata.uid.as_deref() == Some(&owner.uid)).then(|| (owner.uid.clone(), replicas.unwrap_or(1)))
        };
        match (group_version(owner).0, owner.kind.as_str()) {
            ("apps" | "extensions", "ReplicaSet") => {
                let set = self.replica_sets.get(&key)?;
                let size = of(&set.metadata, set.spec.as_ref().and_then(|s| s.replicas))?;
                match controller(&set.metadata).filter(|parent| parent.kind == "Deployment") {
                    Some(parent) => self.known(namespace, parent),
                    None => Some(size),
                }
            }
            ("apps" | "extensions", "Deployment") => {
                let found = self.deployments.get(&key)?;
                of(&found.metadata, found.spec.as_ref().and_then(|s| s.replicas))
            }
            ("apps", "StatefulSet") => {
                let found = self.stateful_sets.get(&key)?;
                of(&found.metadata, found.spec.as_ref().and_then(|s| s.replicas))
            }
            ("", "ReplicationController") => {
                let found = self.replication_controllers.get(&key)?;
                of(&found.metadata, found.spec.as_ref().and_then(|s| s.replicas))
            }
            _ => None,
        }
    }

    /// The size of an owner of any kind that has a scale.
    async fn scale(&self, namespace: &str, owner: &OwnerReference) -> Result<Option<Sized>, BudgetError> {
        let unreadable = |error: kube::Error| BudgetError::Unreadable(message_of(&error));
        let kinds = self.kinds.kinds().await.map_err(unreadable)?;
        let (group, version) = group_version(owner);
        let Some(mapping) = kinds.mapping(group, version, &owner.kind) else {
            return Err(BudgetError::NoKind { kind: owner.kind.clone(), version: owner.api_version.clone() });
        };
        let name = path_segment(&owner.name).map_err(unreadable)?;
        let path = format!("{}/{name}/scale", mapping.path(namespace));
        match read_document(&self.client, &path, "application/json", LARGEST_SCALE).await {
            Ok(scale) => Ok(size_of(&scale, owner)),
            Err(error) if is_not_found(&error) && mapping.has_scale => Ok(None),
            Err(error) if is_not_found(&error) => {
                Err(BudgetError::NoScale { resource: mapping.group_resource() })
            }
            Err(error) => Err(unreadable(error)),
        }
    }
}

/// The size in a Scale, if it is the owner's.
fn size_of(scale: &Value, owner: &OwnerReference) -> Option<Sized> {
    let replicas = scale["spec"]["replicas"].as_i64().unwrap_or(0);
    let replicas = i32::try_from(replicas).unwrap_or(i32::MAX).max(0);
    (scale["metadata"]["uid"].as_str() == Some(&owner.uid)).then(|| (owner.uid.clone(), replicas))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_client::{Informers, Scope};
    use ferrite_json::json;
    use kube::client::Body;
    use std::convert::Infallible;

    /// A server of Widgets, of which `w` has a scale of three, and of Gadgets without a scale.
    fn server() -> Client {
        let service = tower::service_fn(|request: http::Request<Body>| {
            let resource = |name: &str, kind: &str, parts: Value| json!({"resource": name, "responseKind": {"kind": kind}, "subresources": parts});
            let (code, answer) = match request.uri().path() {
                "/api" => (200, json!({"items": []})),
                "/apis" => (
                    200,
                    json!({"items": [{"metadata": {"name": "a.example"}, "versions": [{"version": "v1", "resources": [
                    resource("widgets", "Widget", json!([{"subresource": "scale"}])),
                    resource("gadgets", "Gadget", json!([]))]}]}]}),
                ),
                "/apis/a.example/v1/namespaces/ns/widgets/w/scale" => {
                    (200, json!({"metadata": {"name": "w", "uid": "w"}, "spec": {"replicas": 3}}))
                }
                _ => (
                    404,
                    json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "message": "", "code": 404}),
                ),
            };
            async move {
                let bytes = ferrite_json::to_vec(&answer).expect("an answer");
                let response = http::Response::builder().status(code).body(Body::from(bytes));
                Ok::<_, Infallible>(response.expect("a response"))
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn any_workload_with_a_scale_is_counted() {
        let scope = Scope::new();
        let workloads = Workloads::new(server(), &Informers::new(server(), scope.clone()));
        let pod = |kind: &str, name: &str, uid: &str| -> Arc<Pod> {
            let owner = json!({"apiVersion": "a.example/v1", "kind": kind, "name": name, "uid": uid, "controller": true});
            let owners = if kind.is_empty() { json!([]) } else { json!([owner]) };
            let pod = json!({"metadata": {"name": "p", "namespace": "ns", "ownerReferences": owners}});
            Arc::new(ferrite_json::from_value(pod).unwrap())
        };
        let widget = pod("Widget", "w", "w");
        for (case, pods, expected) in [
            ("counted once", vec![widget.clone(), widget.clone()], Ok((3, false))),
            ("with one of nobody", vec![pod("", "", ""), widget], Ok((3, true))),
            (
                "another one of that name",
                vec![pod("Widget", "w", "x")],
                Err("found no controllers for pod \"p\""),
            ),
            ("gone", vec![pod("Widget", "gone", "x")], Err("found no controllers for pod \"p\"")),
            (
                "no scale",
                vec![pod("Gadget", "g", "g")],
                Err("gadgets.a.example does not implement the scale subresource"),
            ),
            (
                "no kind",
                vec![pod("Thing", "t", "t")],
                Err("no matches for kind \"Thing\" in version \"a.example/v1\""),
            ),
            // Names of ours in another group are not ours.
            (
                "no set of ours",
                vec![pod("ReplicaSet", "r", "r")],
                Err("no matches for kind \"ReplicaSet\" in version \"a.example/v1\""),
            ),
        ] {
            let found = workloads.expected(&pods).await;
            let found = found
                .map(|expected| (expected.pods, expected.has_unmanaged))
                .map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{case}");
        }
        scope.cancel();
    }
}
