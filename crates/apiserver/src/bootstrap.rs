//! What every cluster has from the start: system namespaces and the `kubernetes` Service.

use crate::auth::User;
use crate::options::WriteOptions;
use crate::registry::{Update, Write};
use crate::server::ApiServer;
use ferrite_api::Status;
use futures_util::{StreamExt, TryStreamExt, future};
use serde_json::{Value, json};

const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];
const SELF: &str = "system:apiserver";

pub(crate) async fn run(server: &ApiServer) -> Result<(), Status> {
    // What does not need each other is written together: each write waits for the disk.
    let namespaces = NAMESPACES.map(|name| {
        let namespace = json!({"metadata": {"name": name}});
        ensure(server, "", "namespaces", "", namespace)
    });
    future::try_join_all(namespaces).await?;
    future::try_join3(policy(server), services(server), service_range(server)).await.map(drop)
}

/// The Service of the API server itself, and where it is.
async fn services(server: &ApiServer) -> Result<(), Status> {
    let port = server.config.advertise.port();
    let address = server.config.advertise.ip().to_string();
    let service = json!({
        "metadata": {"name": "kubernetes", "labels": {"component": "apiserver", "provider": "kubernetes"}},
        "spec": {
            "clusterIP": server.registry.services.first_address().to_string(),
            "ports": [{"name": "https", "protocol": "TCP", "port": 443, "targetPort": port}],
        },
    });
    ensure(server, "", "services", "default", service).await?;
    server.registry.repair_addresses().await?;
    if server.config.advertise.ip().is_loopback() {
        // Endpoints may not be loopback addresses: nobody but this machine could use them.
        return Ok(());
    }
    let endpoints = json!({
        "metadata": {
            "name": "kubernetes",
            "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"},
        },
        "subsets": [{
            "addresses": [{"ip": address}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        }],
    });
    replace(server, "", "endpoints", "default", endpoints).await?;
    let slice = json!({
        "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
    });
    replace(server, "discovery.k8s.io", "endpointslices", "default", slice).await
}

/// The range of the cluster's Services as an object, which is ready from the start.
async fn service_range(server: &ApiServer) -> Result<(), Status> {
    let (network, prefix) = server.config.service_network;
    let range =
        json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": [format!("{network}/{prefix}")]}});
    ensure(server, "networking.k8s.io", "servicecidrs", "", range).await?;
    let table = &server.registry.table;
    let Some(resource) = table.find("networking.k8s.io", "v1", "servicecidrs") else { return Ok(()) };
    let now = crate::registry::metadata::time(jiff::Timestamp::now());
    let change = |old: &Value| {
        let mut new = old.clone();
        if new.pointer("/status/conditions/0").is_none() {
            new["status"] = json!({"conditions": [{
                "type": "Ready",
                "status": "True",
                "lastTransitionTime": now,
                "reason": "",
                "message": "Kubernetes default Service CIDR is ready",
            }]});
        }
        Ok(new)
    };
    let user = User::new(SELF, ["system:masters"]);
    let options = options();
    let write = Write { resource, namespace: "", user: &user, options: &options };
    let update = Update {
        write,
        name: "kubernetes",
        subresource: Some("status"),
        change: &change,
        replaces: false,
        applied: false,
    };
    server.registry.update(&update).await.map(drop)
}

/// Upstream's default roles, bindings, priority classes and flow schemas, one object a line.
const DEFAULTS: &str = include_str!("bootstrap.jsonl");
/// So many are written at once: the store puts them into few writes.
const AT_ONCE: usize = 64;

async fn policy(server: &ApiServer) -> Result<(), Status> {
    let objects = DEFAULTS.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let writes = objects.filter_map(|object| {
        let api_version = object["apiVersion"].as_str()?;
        let (group, _) = api_version.split_once('/')?;
        let kind = object["kind"].as_str()?;
        let row = server.registry.table.rows().iter().find(|r| r.group == group && r.kind == kind)?;
        let plural = row.plural.to_string();
        let namespace = ferrite_api::meta::namespace(&object).to_owned();
        Some(async move { ensure(server, group_of(&object), &plural, &namespace, object.clone()).await })
    });
    futures_util::stream::iter(writes).buffer_unordered(AT_ONCE).try_collect::<()>().await
}

fn group_of(object: &Value) -> &str {
    object["apiVersion"].as_str().and_then(|v| v.split_once('/')).map_or("", |(group, _)| group)
}

fn options() -> WriteOptions {
    WriteOptions { field_manager: "kube-apiserver".into(), ..WriteOptions::default() }
}

async fn ensure(
    server: &ApiServer,
    group: &str,
    plural: &str,
    namespace: &str,
    mut object: Value,
) -> Result<(), Status> {
    let resource = server.registry.table.find(group, "v1", plural).ok_or_else(Status::no_such_path)?;
    object["kind"] = (*resource.kind).into();
    object["apiVersion"] = resource.api_version().into();
    if server.registry.get(resource, namespace, ferrite_api::meta::name(&object)).is_ok() {
        return Ok(());
    }
    let user = User::new(SELF, ["system:masters"]);
    let options = options();
    let write = Write { resource, namespace, user: &user, options: &options };
    match server.registry.create(&write, object).await {
        Err(status) if status.reason == "AlreadyExists" => Ok(()),
        other => other.map(drop),
    }
}

/// As [`ensure`], but an object that is there becomes what it should be: the address may have changed.
async fn replace(
    server: &ApiServer,
    group: &str,
    plural: &str,
    namespace: &str,
    object: Value,
) -> Result<(), Status> {
    ensure(server, group, plural, namespace, object.clone()).await?;
    let resource = server.registry.table.find(group, "v1", plural).ok_or_else(Status::no_such_path)?;
    let user = User::new(SELF, ["system:masters"]);
    let options = options();
    let change = |old: &Value| {
        let mut new = old.clone();
        if let (Some(new), Some(wanted)) = (new.as_object_mut(), object.as_object()) {
            for (key, value) in wanted.iter().filter(|(k, _)| *k != "metadata") {
                new.insert(key.clone(), value.clone());
            }
        }
        Ok(new)
    };
    let write = Write { resource, namespace, user: &user, options: &options };
    let name = ferrite_api::meta::name(&object);
    server
        .registry
        .update(&Update { write, name, subresource: None, change: &change, replaces: false, applied: false })
        .await
        .map(drop)
}

/// Ends leases when their time is over, which deletes old events.
pub(crate) async fn expire_leases(server: &ApiServer) {
    let stopping = server.stopping();
    tokio::select! {
        () = server.registry.store.expire_leases() => {}
        () = stopping.cancelled() => {}
    }
}
