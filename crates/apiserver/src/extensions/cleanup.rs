//! A definition that is being deleted takes its objects with it.

use super::{MANAGER, write};
use crate::auth::User;
use crate::options::{DeleteOptions, WriteOptions};
use crate::registry::{Write, stored};
use crate::server::ApiServer;
use ferrite_api::custom::Definition;
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use ferrite_store::WatchEnd;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";

/// Deletes the objects of a definition, then takes its finalizer. One task does so for a definition at a time.
pub(super) fn begin(
    server: &Arc<ApiServer>,
    definitions: &Arc<Resource>,
    cleaning: &Arc<Mutex<BTreeSet<String>>>,
    definition: &Value,
) {
    if !meta::finalizers(definition).any(|finalizer| finalizer == CLEANUP) {
        return;
    }
    let lock = |set: &Mutex<BTreeSet<String>>, uid: &str, add: bool| {
        let mut set = set.lock().unwrap_or_else(PoisonError::into_inner);
        if add { set.insert(uid.to_owned()) } else { set.remove(uid) }
    };
    let uid = meta::uid(definition).to_owned();
    if !lock(cleaning, &uid, true) {
        return;
    }
    let (server, definitions, cleaning) = (Arc::clone(server), Arc::clone(definitions), Arc::clone(cleaning));
    let definition = definition.clone();
    let tasks = Arc::clone(&server);
    tasks.spawn(async move {
        let stopping = server.stopping();
        let name = meta::name(&definition).to_owned();
        loop {
            let done = tokio::select! {
                done = clean(&server, &definitions, &definition) => done,
                () = stopping.cancelled() => break,
            };
            match done {
                Ok(()) => break,
                Err(status) => {
                    tracing::warn!(name, error = status.message, "cannot remove the objects of a definition");
                    tokio::select! {
                        () = tokio::time::sleep(super::AGAIN) => {}
                        () = stopping.cancelled() => break,
                    }
                }
            }
        }
        lock(&cleaning, &uid, false);
    });
}

async fn clean(server: &ApiServer, definitions: &Resource, definition: &Value) -> Result<(), Status> {
    let mut accepted = definition.clone();
    if let Some(names) = definition.pointer("/status/acceptedNames").filter(|names| names["plural"] != "") {
        accepted["spec"]["names"] = names.clone();
    }
    begin_removal(server, definitions, definition).await?;
    // A definition that was never served has no objects.
    if let Ok(compiled) = Definition::compile(&accepted) {
        remove_objects(server, &compiled.storage_resource()).await?;
    }
    let uid = meta::uid(definition);
    let change = |old: &Value| {
        let mut new = old.clone();
        if meta::uid(old) == uid
            && let Some(finalizers) =
                meta::metadata_mut(&mut new).get_mut("finalizers").and_then(Value::as_array_mut)
        {
            finalizers.retain(|finalizer| finalizer != CLEANUP);
        }
        Ok(new)
    };
    match write(server, definitions, meta::name(definition), None, &change).await {
        Err(status) if status.code == 404 => Ok(()),
        other => other,
    }
}

/// Says in the definition's status that its objects are being deleted.
async fn begin_removal(server: &ApiServer, definitions: &Resource, definition: &Value) -> Result<(), Status> {
    let uid = meta::uid(definition);
    let change = |old: &Value| {
        let mut new = old.clone();
        let conditions = new.pointer_mut("/status/conditions").and_then(Value::as_array_mut);
        let mut conditions = conditions.into_iter().flatten();
        if meta::uid(old) == uid
            && let Some(terminating) = conditions.find(|condition| condition["type"] == "Terminating")
        {
            terminating["reason"] = "InstanceDeletionInProgress".into();
            terminating["message"] = "CustomResource deletion is in progress".into();
        }
        Ok(new)
    };
    match write(server, definitions, meta::name(definition), Some("status"), &change).await {
        Err(status) if status.code == 404 => Ok(()),
        other => other,
    }
}

/// Asks for the deletion of every object and waits until none is left: finalizers may hold some.
async fn remove_objects(server: &ApiServer, resource: &Resource) -> Result<(), Status> {
    let registry = &server.registry;
    let prefix = stored::prefix(resource);
    let user = User::new("system:apiserver", ["system:masters"]);
    // As upstream: nobody is asked about objects that go with their definition.
    let options = WriteOptions { field_manager: MANAGER.into(), within: true, ..WriteOptions::default() };
    loop {
        let snapshot = registry.store.snapshot();
        let mut left = 0;
        for (_, entry) in snapshot.range(prefix.as_bytes(), None) {
            left += 1;
            let Some(object) = stored::decode(resource, entry) else { continue };
            if meta::is_deleting(&object) {
                continue;
            }
            let (namespace, name) = (meta::namespace(&object), meta::name(&object));
            let write =
                Write { resource, namespace, requested: name, user: &user, options: &options, copied: false };
            match registry.delete(&write, name, &DeleteOptions::default()).await {
                Err(status) if status.code != 404 => return Err(status),
                _ => {}
            }
        }
        if left == 0 {
            return Ok(());
        }
        match registry.store.watch(prefix.as_bytes(), snapshot.revision()) {
            Ok(mut watch) => match watch.next().await {
                Ok(_) | Err(WatchEnd::Compacted { .. }) => {}
                Err(WatchEnd::Closed) => return Ok(()),
            },
            Err(WatchEnd::Compacted { .. }) => {}
            Err(WatchEnd::Closed) => return Ok(()),
        }
    }
}
