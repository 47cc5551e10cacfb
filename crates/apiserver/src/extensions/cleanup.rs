//! A definition that is being deleted takes its objects with it.

use super::conditions::set;
use super::{MANAGER, is_established, write};
use crate::auth::User;
use crate::options::{DeleteOptions, WriteOptions};
use crate::registry::{Write, stored};
use crate::retries::delay;
use crate::server::ApiServer;
use ferrite_api::custom::Definition;
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use ferrite_store::WatchEnd;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";
/// As upstream: objects that are still there after this time are reported in the definition's status.
const PATIENCE: Duration = Duration::from_secs(60);

/// The state of a removal, as condition `Terminating` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Removal {
    InProgress,
    /// Other objects of the server lie where those of the definition would.
    Overlaps,
    NeverEstablished,
    Failed(String),
    /// Some objects have not gone in time. They are still waited for.
    Unfinished,
    Completed,
}

impl Removal {
    fn condition(&self) -> (&'static str, &'static str, String) {
        match self {
            Self::InProgress => {
                ("True", "InstanceDeletionInProgress", "CustomResource deletion is in progress".into())
            }
            Self::Overlaps => (
                "False",
                "OverlappingBuiltInResource",
                "instances overlap with built-in resources in storage".into(),
            ),
            Self::NeverEstablished => ("False", "NeverEstablished", "resource was never established".into()),
            Self::Failed(why) => ("True", "InstanceDeletionFailed", why.clone()),
            Self::Unfinished => (
                "True",
                "InstanceDeletionCheck",
                "could not confirm zero CustomResources remaining: context deadline exceeded".into(),
            ),
            Self::Completed => ("False", "InstanceDeletionCompleted", "removed all instances".into()),
        }
    }
}

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
        let cleanup = Cleanup { server: &server, definitions: &definitions, definition: &definition };
        let mut failures = 0;
        loop {
            let done = tokio::select! {
                done = cleanup.run() => done,
                () = stopping.cancelled() => break,
            };
            match done {
                Ok(()) => break,
                Err(status) => {
                    let name = meta::name(&definition);
                    tracing::warn!(name, error = status.message, "cannot remove the objects of a definition");
                    failures += 1;
                    tokio::select! {
                        () = tokio::time::sleep(delay(failures)) => {}
                        () = stopping.cancelled() => break,
                    }
                }
            }
        }
        lock(&cleaning, &uid, false);
    });
}

/// The removal of one definition.
struct Cleanup<'a> {
    server: &'a ApiServer,
    definitions: &'a Resource,
    definition: &'a Value,
}

impl Cleanup<'_> {
    async fn run(&self) -> Result<(), Status> {
        self.report(&Removal::InProgress, false).await?;
        let removal = self.remove().await?;
        self.report(&removal, true).await
    }

    async fn remove(&self) -> Result<Removal, Status> {
        let compiled = match Definition::compile(self.definition) {
            Ok(compiled) => compiled.storage_resource(),
            // A definition that was never served has no objects.
            Err(_) if !is_established(self.definition) => return Ok(Removal::NeverEstablished),
            Err(why) => return self.fail(format!("could not list instances: {why}")).await,
        };
        // As upstream: objects of built-in kinds do not go with a definition of the same name.
        let prefix = stored::prefix(&compiled);
        if self.server.registry.table.rows().iter().any(|row| stored::prefix(row) == prefix) {
            return Ok(Removal::Overlaps);
        }
        if !is_established(self.definition) {
            return Ok(Removal::NeverEstablished);
        }
        match self.remove_objects(&compiled).await {
            Ok(()) => Ok(Removal::Completed),
            Err(status) => self.fail(format!("could not issue all deletes: {}", status.message)).await,
        }
    }

    /// Reports a failure before it is returned.
    async fn fail(&self, why: String) -> Result<Removal, Status> {
        self.report(&Removal::Failed(why.clone()), false).await?;
        Err(Status::internal(why))
    }

    /// Says in the definition's status how far the removal is. The last report takes the finalizer. As upstream it is a
    /// write of the status: the specification is not validated, and need not be valid any more.
    async fn report(&self, removal: &Removal, is_last: bool) -> Result<(), Status> {
        let uid = meta::uid(self.definition);
        let (status, reason, message) = removal.condition();
        let change = |old: &Value| {
            let mut new = old.clone();
            if meta::uid(old) != uid {
                return Ok(new);
            }
            set(&mut new["status"], "Terminating", status, reason, &message, jiff::Timestamp::now());
            let metadata = meta::metadata_mut(&mut new);
            if is_last && let Some(finalizers) = metadata.get_mut("finalizers").and_then(Value::as_array_mut)
            {
                finalizers.retain(|finalizer| finalizer != CLEANUP);
            }
            Ok(new)
        };
        let name = meta::name(self.definition);
        match write(self.server, self.definitions, name, Some("status"), &change).await {
            Err(status) if status.code == 404 => Ok(()),
            other => other,
        }
    }

    /// Asks for the deletion of every object and waits until none is left: finalizers may hold some.
    async fn remove_objects(&self, resource: &Resource) -> Result<(), Status> {
        let registry = &self.server.registry;
        let prefix = stored::prefix(resource);
        let user = User::new("system:apiserver", ["system:masters"]);
        // As upstream: nobody is asked about objects that go with their definition.
        let options = WriteOptions { field_manager: MANAGER.into(), within: true, ..WriteOptions::default() };
        let mut patience = Some(Instant::now() + PATIENCE);
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
                let write = Write {
                    resource,
                    namespace,
                    requested: name,
                    user: &user,
                    options: &options,
                    copied: false,
                };
                match registry.delete(&write, name, &DeleteOptions::default()).await {
                    Err(status) if status.code != 404 => return Err(status),
                    _ => {}
                }
            }
            if left == 0 {
                return Ok(());
            }
            let revision = snapshot.revision();
            drop(snapshot);
            let mut watch = match registry.store.watch(prefix.as_bytes(), revision) {
                Ok(watch) => watch,
                Err(WatchEnd::Compacted { .. }) => continue,
                Err(WatchEnd::Closed) => return Err(closed()),
            };
            tokio::select! {
                ended = watch.next() => if let Err(WatchEnd::Closed) = ended { return Err(closed()) },
                () = crate::retries::until(patience) => {
                    patience = None;
                    self.report(&Removal::Unfinished, false).await?;
                }
            }
        }
    }
}

fn closed() -> Status {
    Status::unavailable("the store is closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removals_that_go_on_are_true_and_others_false() {
        for (removal, status) in [
            (Removal::InProgress, "True"),
            (Removal::Failed("why".into()), "True"),
            (Removal::Unfinished, "True"),
            (Removal::Overlaps, "False"),
            (Removal::NeverEstablished, "False"),
            (Removal::Completed, "False"),
        ] {
            assert_eq!(removal.condition().0, status, "{removal:?}");
        }
    }
}
