//! The objects that every cluster has from the start: system namespaces and the `kubernetes` Service.

mod gated;
mod roles;

use crate::auth::{RequestHeader, User};
use crate::endpoints;
use crate::options::{DeleteOptions, WriteOptions};
use crate::registry::{Change, Update, Write, stored};
use crate::server::ApiServer;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_json::{Value, json};
use ferrite_store::WatchEnd;
use futures_util::{StreamExt, TryStreamExt, future};
use roles::Reconciled;
use std::time::Duration;

const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];
const SELF: &str = "system:apiserver";
/// Name of the server's own Service, and of the range of all Services.
const DEFAULT: &str = "kubernetes";
/// As upstream: the delay before a failed write is tried again.
const AGAIN: Duration = Duration::from_secs(10);

pub(crate) async fn run(server: &ApiServer) -> Result<(), Status> {
    // Independent objects are written in parallel: each write waits for the disk.
    let namespaces = NAMESPACES.map(|name| {
        let namespace = json!({"metadata": {"name": name}});
        ensure(server, "", "namespaces", "", namespace)
    });
    future::try_join_all(namespaces).await?;
    future::try_join3(policy(server), services(server), service_range(server)).await?;
    // As upstream: the server serves without them, and admission may refuse them (a quota that limits ConfigMaps).
    if let Err(error) = published(server).await {
        tracing::warn!(%error, "cannot publish how the server authenticates");
    }
    Ok(())
}

/// ConfigMaps that publish how this server authenticates: the authority of client certificates, the
/// settings of front proxies, and the time since which the use of old tokens is noted.
pub(crate) async fn published(server: &ApiServer) -> Result<(), Status> {
    let since = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
    let tracking = json!({
        "metadata": {"name": "kube-apiserver-legacy-service-account-token-tracking"},
        "data": {"since": since},
    });
    ensure(server, "", "configmaps", "kube-system", tracking).await?;
    let certificates = server.current_certificates();
    let authority = certificates.client_ca.iter().map(|authority| ("client-ca-file", authority.clone()));
    let proxies = certificates.request_header.iter().flat_map(RequestHeader::published);
    let data: Value =
        authority.chain(proxies).map(|(key, text)| (key.to_owned(), Value::from(text))).collect();
    if data.as_object().is_none_or(|data| data.is_empty()) {
        return Ok(());
    }
    let authentication = json!({"metadata": {"name": "extension-apiserver-authentication"}, "data": data});
    replace(server, "", "configmaps", "kube-system", authentication).await
}

/// Makes a namespace that somebody creates something in, if it is not there.
pub(crate) async fn provide_namespace(server: &ApiServer, name: &str) -> Result<(), Status> {
    ensure(server, "", "namespaces", "", json!({"metadata": {"name": name}})).await
}

/// The Service of the API server itself, and where it is.
async fn services(server: &ApiServer) -> Result<(), Status> {
    let port = server.config.advertise.port();
    let mut service = json!({
        "metadata": {"name": "kubernetes", "labels": {"component": "apiserver", "provider": "kubernetes"}},
        "spec": {
            "clusterIP": server.registry.services.first_address().map(|address| address.to_string()),
            "ports": [{"name": "https", "protocol": "TCP", "port": 443, "targetPort": port}],
        },
    });
    let node_port = server.config.kubernetes_service_node_port;
    if node_port != 0 {
        service["spec"]["type"] = "NodePort".into();
        service["spec"]["ports"][0]["nodePort"] = node_port.into();
    }
    ensure(server, "", "services", "default", service).await?;
    server.registry.repair_addresses().await?;
    endpoints::reconcile(server).await
}

/// The range of the cluster's Services as an object, which is ready from the start.
async fn service_range(server: &ApiServer) -> Result<(), Status> {
    let cidrs: Vec<String> = server.config.service_ranges.iter().map(|r| r.masked().to_string()).collect();
    let range = json!({"metadata": {"name": DEFAULT}, "spec": {"cidrs": &cidrs}});
    ensure(server, "networking.k8s.io", "servicecidrs", "", range).await?;
    let table = &server.registry.table;
    let Some(resource) = table.find("networking.k8s.io", "v1", "servicecidrs") else { return Ok(()) };
    // As upstream: a cluster may gain its second family. Any other difference is for somebody to resolve.
    let widen = |old: &Value| {
        let mut new = old.clone();
        let is = old.pointer("/spec/cidrs").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if cidrs.len() == 2 && is.len() == 1 && is[0] == *cidrs[0] {
            new["spec"]["cidrs"] = cidrs.clone().into();
        }
        Ok(new)
    };
    change(server, resource, ("", DEFAULT), None, &widen).await?;
    let now = crate::registry::metadata::time(jiff::Timestamp::now());
    let ready = |old: &Value| {
        let mut new = old.clone();
        let ours = old.pointer("/spec/cidrs") == Some(&json!(cidrs)) && !ferrite_api::meta::is_deleting(old);
        if ours && new.pointer("/status/conditions/0").is_none() {
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
    change(server, resource, ("", DEFAULT), Some("status"), &ready).await
}

/// Changes an object that is there, as the server itself.
pub(crate) async fn change(
    server: &ApiServer,
    resource: &Resource,
    (namespace, name): (&str, &str),
    subresource: Option<&str>,
    change: Change<'_>,
) -> Result<(), Status> {
    let user = User::new(SELF, ["system:masters"]);
    let options = options();
    let write = Write { resource, namespace, requested: "", user: &user, options: &options, copied: false };
    let update = Update { write, name, subresource, change, replaces: false, applied: None };
    server.registry.update(&update).await.map(drop)
}

/// Brings the server's Service and its range back when somebody deletes them, and records of addresses that are held.
pub(crate) async fn keep(server: &ApiServer) {
    let stopping = server.stopping();
    let kept = future::join4(
        keep_one(server, ("", "services", "default"), || services(server)),
        keep_one(server, ("networking.k8s.io", "servicecidrs", ""), || service_range(server)),
        server.registry.keep_addresses(),
        endpoints::keep(server),
    );
    tokio::select! {
        _ = kept => {}
        () = stopping.cancelled() => {}
    }
}

/// Makes the object called `kubernetes` again whenever it is gone, until the store closes.
async fn keep_one<F: Future<Output = Result<(), Status>>>(
    server: &ApiServer,
    (group, plural, namespace): (&str, &str, &str),
    make: impl Fn() -> F,
) {
    let registry = &server.registry;
    let Some(resource) = registry.table.find(group, "v1", plural) else { return };
    let key = stored::key(resource, namespace, DEFAULT);
    loop {
        let snapshot = registry.store.snapshot();
        if snapshot.get(key.as_bytes()).is_none()
            && let Err(status) = make().await
        {
            tracing::warn!(plural, error = status.message, "cannot make the server's own object again");
            tokio::time::sleep(AGAIN).await;
            continue;
        }
        match registry.store.watch(key.as_bytes(), snapshot.revision()) {
            Ok(mut watch) => match watch.next().await {
                Ok(_) | Err(WatchEnd::Compacted { .. }) => {}
                Err(WatchEnd::Closed) => return,
            },
            Err(WatchEnd::Compacted { .. }) => {}
            Err(WatchEnd::Closed) => return,
        }
    }
}

/// Upstream's default roles, bindings, priority classes and flow schemas, one object a line.
const DEFAULTS: &str = include_str!("bootstrap.jsonl");
/// Number of parallel writes: the store puts them into few writes to disk.
const AT_ONCE: usize = 64;

async fn policy(server: &ApiServer) -> Result<(), Status> {
    let objects = DEFAULTS.lines().filter_map(|line| ferrite_json::from_str::<Value>(line).ok());
    let gates = &server.config.feature_gates;
    let objects = objects
        .map(|mut object| {
            gated::add_rules(&mut object, gates);
            object
        })
        .chain(gated::objects(gates));
    let mounted = server.config.mounted.iter().flat_map(|group| group.roles());
    let objects: Box<dyn Iterator<Item = Value> + Send + '_> = Box::new(objects.chain(mounted));
    let writes = objects.filter_map(|object| {
        let api_version = object["apiVersion"].as_str()?;
        let (group, _) = api_version.split_once('/')?;
        let kind = object["kind"].as_str()?;
        let row = server.registry.table.rows().iter().find(|r| r.group == group && r.kind == kind)?;
        let plural = row.plural.to_string();
        let namespace = ferrite_api::meta::namespace(&object).to_owned();
        Some(async move {
            let group = group_of(&object);
            ensure(server, group, &plural, &namespace, object.clone()).await?;
            match group {
                RBAC => reconcile(server, &plural, &namespace, &object).await,
                _ => Ok(()),
            }
        })
    });
    futures_util::stream::iter(writes).buffer_unordered(AT_ONCE).try_collect::<()>().await
}

const RBAC: &str = "rbac.authorization.k8s.io";

/// Brings a default role or binding up to date.
async fn reconcile(
    server: &ApiServer,
    plural: &str,
    namespace: &str,
    expected: &Value,
) -> Result<(), Status> {
    let registry = &server.registry;
    let resource = registry.table.find(RBAC, "v1", plural).ok_or_else(Status::no_such_path)?;
    let name = ferrite_api::meta::name(expected);
    let existing = registry.read(resource, namespace, name)?;
    let user = User::new(SELF, ["system:masters"]);
    let options = options();
    let write = Write { resource, namespace, requested: name, user: &user, options: &options, copied: false };
    match roles::reconcile(&existing, expected) {
        Reconciled::Is(object) if object == existing => Ok(()),
        Reconciled::Is(_) => {
            let change = |old: &Value| match roles::reconcile(old, expected) {
                Reconciled::Is(object) => Ok(object),
                Reconciled::Recreate => Ok(old.clone()),
            };
            let update =
                Update { write, name, subresource: None, change: &change, replaces: false, applied: None };
            registry.update(&update).await.map(drop)
        }
        Reconciled::Recreate => {
            match registry.delete(&write, name, &DeleteOptions::default()).await {
                Err(status) if status.code != 404 => return Err(status),
                _ => {}
            }
            ensure(server, RBAC, plural, namespace, expected.clone()).await
        }
    }
}

fn group_of(object: &Value) -> &str {
    object["apiVersion"].as_str().and_then(|v| v.split_once('/')).map_or("", |(group, _)| group)
}

fn options() -> WriteOptions {
    WriteOptions { field_manager: "kube-apiserver".into(), ..WriteOptions::default() }
}

/// The options for objects of a group. As upstream: a part of the server with a name of its own makes flow control.
fn options_of(group: &str) -> WriteOptions {
    match group {
        "flowcontrol.apiserver.k8s.io" => WriteOptions {
            field_manager: "api-priority-and-fairness-config-producer-v1".into(),
            ..WriteOptions::default()
        },
        _ => options(),
    }
}

/// Creates the object unless there is one of its name.
pub(crate) async fn ensure(
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
    let options = options_of(group);
    let write = Write { resource, namespace, requested: "", user: &user, options: &options, copied: false };
    match server.registry.create(&write, object).await {
        Err(status) if status.reason == "AlreadyExists" => Ok(()),
        other => other.map(drop),
    }
}

/// As [`ensure`], but updates an existing object: the address may have changed.
async fn replace(
    server: &ApiServer,
    group: &str,
    plural: &str,
    namespace: &str,
    object: Value,
) -> Result<(), Status> {
    ensure(server, group, plural, namespace, object.clone()).await?;
    let merge = |old: &Value| {
        let mut new = old.clone();
        if let (Some(new), Some(wanted)) = (new.as_object_mut(), object.as_object()) {
            for (key, value) in wanted.iter().filter(|(k, _)| *k != "metadata") {
                new.insert(key.clone(), value.clone());
            }
        }
        Ok(new)
    };
    let resource = server.registry.table.find(group, "v1", plural).ok_or_else(Status::no_such_path)?;
    change(server, resource, (namespace, ferrite_api::meta::name(&object)), None, &merge).await
}

/// Deletes an object as the server itself. One that is gone already is fine.
pub(crate) async fn delete(
    server: &ApiServer,
    group: &str,
    plural: &str,
    namespace: &str,
    name: &str,
) -> Result<(), Status> {
    let resource = server.registry.table.find(group, "v1", plural).ok_or_else(Status::no_such_path)?;
    let user = User::new(SELF, ["system:masters"]);
    let options = options();
    let write = Write { resource, namespace, requested: name, user: &user, options: &options, copied: false };
    match server.registry.delete(&write, name, &DeleteOptions::default()).await {
        Err(status) if status.code != 404 => Err(status),
        _ => Ok(()),
    }
}

/// Ends leases when their time is over, which deletes old events.
pub(crate) async fn expire_leases(server: &ApiServer) {
    let stopping = server.stopping();
    tokio::select! {
        () = server.registry.store.expire_leases() => {}
        () = stopping.cancelled() => {}
    }
}
