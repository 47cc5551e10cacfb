//! The built-in kinds: one file each, one row each in [`built_in`].

pub(crate) mod access;
mod binding;
mod check;
mod configmap;
mod deployment;
mod endpoints;
mod endpointslice;
mod event;
mod lease;
mod namespace;
mod node;
pub mod pod;
mod replicaset;
mod secret;
mod service;
mod serviceaccount;
mod workload;

use crate::resource::{Column, Resource, Scope, Strategy, Subresource};
use std::borrow::Cow;
use std::sync::Arc;

const ALL_VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
/// Namespaces are not deleted in bulk.
const NAMESPACE_VERBS: &[&str] = &["create", "delete", "get", "list", "patch", "update", "watch"];
const CREATE: &[&str] = &["create"];
const CREATE_GET: &[&str] = &["create", "get"];
const GET: &[&str] = &["get"];
const UPDATE: &[&str] = &["update"];
const GET_PATCH_UPDATE: &[&str] = &["get", "patch", "update"];
const PROXY: &[&str] = &["create", "delete", "get", "patch", "update"];

/// Every resource compiled into the server, in discovery's order.
pub fn built_in() -> Vec<Resource> {
    vec![
        Row::core("Binding", "bindings", "binding").verbs(CREATE).build(binding::Bindings),
        Row::core("ConfigMap", "configmaps", "configmap").short(&["cm"]).build(configmap::ConfigMaps),
        Row::core("Endpoints", "endpoints", "endpoints").short(&["ep"]).build(endpoints::Endpoints),
        Row::core("Event", "events", "event").short(&["ev"]).build(event::Events),
        Row::core("Namespace", "namespaces", "namespace")
            .cluster()
            .verbs(NAMESPACE_VERBS)
            .short(&["ns"])
            .subresources(&[sub("finalize", UPDATE), sub("status", GET_PATCH_UPDATE)])
            .build(namespace::Namespaces),
        Row::core("Node", "nodes", "node")
            .cluster()
            .short(&["no"])
            .subresources(&[
                body("proxy", PROXY, "", "v1", "NodeProxyOptions"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(node::Nodes),
        Row::core("Pod", "pods", "pod")
            .short(&["po"])
            .all()
            .subresources(&[
                body("attach", CREATE_GET, "", "v1", "PodAttachOptions"),
                body("binding", CREATE, "", "v1", "Binding"),
                sub("ephemeralcontainers", GET_PATCH_UPDATE),
                body("eviction", CREATE, "policy", "v1", "Eviction"),
                body("exec", CREATE_GET, "", "v1", "PodExecOptions"),
                sub("log", GET),
                body("portforward", CREATE_GET, "", "v1", "PodPortForwardOptions"),
                body("proxy", PROXY, "", "v1", "PodProxyOptions"),
                sub("resize", GET_PATCH_UPDATE),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(pod::Pods),
        Row::core("Secret", "secrets", "secret").build(secret::Secrets),
        Row::core("ServiceAccount", "serviceaccounts", "serviceaccount")
            .short(&["sa"])
            .subresources(&[body("token", CREATE, "authentication.k8s.io", "v1", "TokenRequest")])
            .build(serviceaccount::ServiceAccounts),
        Row::core("Service", "services", "service")
            .short(&["svc"])
            .all()
            .subresources(&[
                body("proxy", PROXY, "", "v1", "ServiceProxyOptions"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(service::Services),
        Row::new("apps", "v1", "Deployment", "deployments", "deployment")
            .short(&["deploy"])
            .all()
            .subresources(&[
                body("scale", GET_PATCH_UPDATE, "autoscaling", "v1", "Scale"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(deployment::Deployments),
        Row::new("apps", "v1", "ReplicaSet", "replicasets", "replicaset")
            .short(&["rs"])
            .all()
            .subresources(&[
                body("scale", GET_PATCH_UPDATE, "autoscaling", "v1", "Scale"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(replicaset::ReplicaSets),
        Row::new("coordination.k8s.io", "v1", "Lease", "leases", "lease").build(lease::Leases),
        Row::new("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", "endpointslice")
            .build(endpointslice::EndpointSlices),
    ]
}

/// A row of the table while it is being written: most resources differ from the usual in little.
struct Row(Resource);

impl Row {
    fn new(
        group: &'static str,
        version: &'static str,
        kind: &'static str,
        plural: &'static str,
        singular: &'static str,
    ) -> Self {
        Self(Resource {
            group: Cow::Borrowed(group),
            version: Cow::Borrowed(version),
            kind: Cow::Borrowed(kind),
            plural: Cow::Borrowed(plural),
            singular: Cow::Borrowed(singular),
            short_names: Cow::Borrowed(&[]),
            categories: Cow::Borrowed(&[]),
            scope: Scope::Namespaced,
            verbs: Cow::Borrowed(ALL_VERBS),
            subresources: Cow::Borrowed(&[]),
            strategy: Arc::new(Plain),
        })
    }

    fn core(kind: &'static str, plural: &'static str, singular: &'static str) -> Self {
        Self::new("", "v1", kind, plural, singular)
    }

    fn cluster(mut self) -> Self {
        self.0.scope = Scope::Cluster;
        self
    }

    fn verbs(mut self, verbs: &'static [&'static str]) -> Self {
        self.0.verbs = Cow::Borrowed(verbs);
        self
    }

    fn short(mut self, names: &'static [&'static str]) -> Self {
        self.0.short_names = Cow::Borrowed(names);
        self
    }

    /// Shown by `kubectl get all`.
    fn all(mut self) -> Self {
        self.0.categories = Cow::Borrowed(&["all"]);
        self
    }

    fn subresources(mut self, subresources: &[Subresource]) -> Self {
        self.0.subresources = Cow::Owned(subresources.to_vec());
        self
    }

    fn build(mut self, strategy: impl Strategy) -> Resource {
        self.0.strategy = Arc::new(strategy);
        self.0
    }
}

/// The behaviour of a kind without specialities.
struct Plain;

impl Strategy for Plain {}

const fn sub(name: &'static str, verbs: &'static [&'static str]) -> Subresource {
    Subresource { name, verbs, body: None }
}

const fn body(
    name: &'static str,
    verbs: &'static [&'static str],
    group: &'static str,
    version: &'static str,
    kind: &'static str,
) -> Subresource {
    Subresource { name, verbs, body: Some((group, version, kind)) }
}

/// The column that names the object.
const NAME: Column = Column { name: "Name", type_: "string", format: "name", priority: 0 };

/// A text column that is always shown.
const fn shown(name: &'static str) -> Column {
    Column { name, type_: "string", format: "", priority: 0 }
}

/// A text column of `-o wide`.
const fn wide(name: &'static str) -> Column {
    Column { name, type_: "string", format: "", priority: 1 }
}

/// A number that is always shown.
const fn number(name: &'static str) -> Column {
    Column { name, type_: "integer", format: "", priority: 0 }
}

#[cfg(test)]
mod tests;
