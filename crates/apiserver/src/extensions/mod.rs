//! CustomResourceDefinitions: the resources that they describe come and go while the server runs.
//!
//! One task follows the stored definitions. It decides which names a definition gets ([`names`]), puts its resources
//! into the table that requests read, and only then says in the definition's status that it is established. A
//! definition that is being deleted stays served, but not for creates, until its objects are gone ([`cleanup`]).

mod cleanup;
mod conditions;
mod conversion;
mod converted;
mod metrics;
mod names;

pub(crate) use conversion::{Converter, converts};

use crate::auth::User;
use crate::options::WriteOptions;
use crate::registry::{Registry, ResourceMap, Update, Write, stored};
use crate::retries::Retries;
use crate::server::ApiServer;
use ferrite_api::custom::Definition;
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};
use ferrite_store::WatchEnd;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(crate) const GROUP: &str = "apiextensions.k8s.io";
pub(crate) const PLURAL: &str = "customresourcedefinitions";
const MANAGER: &str = "kube-apiserver";

/// The resources of one definition.
struct Served {
    stamp: String,
    resources: Vec<Arc<Resource>>,
    /// Ends when the definition changes: its watches begin anew then.
    ended: CancellationToken,
}

/// Every resource served, built-in and custom. A request takes the table once and keeps it.
pub(crate) struct ResourceTables {
    built_in: Arc<ResourceMap>,
    custom: Mutex<BTreeMap<String, Served>>,
    current: RwLock<Arc<ResourceMap>>,
    /// The version of the current table.
    version: watch::Sender<u64>,
}

impl ResourceTables {
    pub fn new(built_in: Arc<ResourceMap>) -> Self {
        Self {
            current: RwLock::new(Arc::clone(&built_in)),
            version: watch::Sender::new(built_in.version),
            built_in,
            custom: Mutex::default(),
        }
    }

    /// Tells when the table changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// The table as it is now.
    pub fn current(&self) -> Arc<ResourceMap> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Served>> {
        self.custom.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a definition from now on, or no longer. Returns true if anything changed.
    fn set(&self, name: &str, definition: Option<&Definition>) -> bool {
        let mut custom = self.lock();
        let known = custom.get(name);
        match (known, definition) {
            (None, None) => return false,
            (Some(known), Some(definition)) if *known.stamp == *definition.0.stamp => return false,
            _ => {}
        }
        if let Some(known) = custom.remove(name) {
            known.ended.cancel();
        }
        if let Some(definition) = definition {
            custom.insert(
                name.to_owned(),
                Served {
                    stamp: definition.0.stamp.to_string(),
                    resources: definition.resources().into_iter().map(Arc::new).collect(),
                    ended: CancellationToken::new(),
                },
            );
        }
        let rows = custom.values().flat_map(|served| served.resources.iter().cloned());
        let table = Arc::new(self.built_in.with(rows));
        let version = table.version;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = table;
        self.version.send_replace(version);
        true
    }

    /// Ends when the definition of a custom resource changes; none of a built-in resource.
    pub fn ended(&self, resource: &Resource) -> Option<CancellationToken> {
        let custom = resource.custom.as_ref()?;
        let served = self.lock();
        match served.get(custom.kind.definition.as_str()) {
            Some(served) if *served.stamp == *custom.kind.stamp => Some(served.ended.clone()),
            // The definition has changed since the request took the table.
            _ => {
                let ended = CancellationToken::new();
                ended.cancel();
                Some(ended)
            }
        }
    }
}

/// The task's state of each definition.
#[derive(Default)]
struct Known(BTreeMap<String, Remembered>);

struct Remembered {
    group: String,
    accepted: Value,
    /// Some of its names are another's: it waits for them.
    waits: bool,
}

impl Known {
    /// The names that other definitions of a group have.
    fn rivals(&self, group: &str, name: &str) -> Vec<&Value> {
        let others = self.0.iter().filter(|(other, known)| *other != name && known.group == group);
        others.map(|(_, known)| &known.accepted).collect()
    }

    fn waiting(&self, group: &str) -> Vec<String> {
        let waiting = self.0.iter().filter(|(_, known)| known.waits && known.group == group);
        waiting.map(|(name, _)| name.clone()).collect()
    }
}

/// Follows the definitions of a server.
pub(crate) struct Follower {
    server: Arc<ApiServer>,
    resource: Arc<Resource>,
    known: Known,
    retries: Retries,
    cleaning: Arc<Mutex<BTreeSet<String>>>,
}

impl Follower {
    /// None when definitions are not served.
    pub fn new(server: &Arc<ApiServer>) -> Option<Self> {
        let resource = server.registry.table.find(GROUP, "v1", PLURAL)?;
        Some(Self {
            server: Arc::clone(server),
            resource: Arc::clone(resource),
            known: Known::default(),
            retries: Retries::default(),
            cleaning: Arc::default(),
        })
    }

    /// Serves the stored definitions. Nothing is written: requests that come after find every established
    /// kind.
    pub fn load(&mut self) {
        let server = Arc::clone(&self.server);
        let registry = &server.registry;
        let snapshot = registry.store.snapshot();
        let prefix = stored::prefix(&self.resource);
        for (_, entry) in snapshot.range(prefix.as_bytes(), None) {
            let Some(definition) = stored::decode(&self.resource, entry) else { continue };
            self.remember(&definition, false);
            if is_established(&definition)
                && let Err(why) = serve(registry, &definition)
            {
                tracing::warn!(name = meta::name(&definition), error = %why, "a definition cannot be served");
            }
        }
    }

    fn remember(&mut self, definition: &Value, waits: bool) {
        let group = definition.pointer("/spec/group").and_then(Value::as_str).unwrap_or_default().to_owned();
        let accepted = definition.pointer("/status/acceptedNames").cloned().unwrap_or_default();
        self.known.0.insert(meta::name(definition).to_owned(), Remembered { group, accepted, waits });
    }

    /// Follows until the server stops.
    pub async fn run(mut self) {
        let stopping = self.server.stopping();
        tokio::select! {
            () = self.follow() => {}
            () = stopping.cancelled() => {}
        }
    }

    async fn follow(&mut self) {
        loop {
            let store = Arc::clone(&self.server.registry.store);
            let prefix = stored::prefix(&self.resource);
            let snapshot = store.snapshot();
            let revision = snapshot.revision();
            let name_of = |key: &[u8]| {
                String::from_utf8_lossy(key.get(prefix.len()..).unwrap_or_default()).into_owned()
            };
            let mut names: BTreeSet<String> =
                snapshot.range(prefix.as_bytes(), None).map(|(key, _)| name_of(key.as_bytes())).collect();
            names.extend(self.known.0.keys().cloned());
            drop(snapshot);
            for name in names {
                self.sync(&name).await;
            }
            let mut watch = match store.watch(prefix.as_bytes(), revision) {
                Ok(watch) => watch,
                Err(WatchEnd::Compacted { .. }) => continue,
                Err(WatchEnd::Closed) => return,
            };
            loop {
                let names = tokio::select! {
                    changes = watch.next() => match changes {
                        Ok(changes) => changes.iter().map(|change| name_of(change.key.as_bytes())).collect(),
                        Err(WatchEnd::Compacted { .. }) => break,
                        Err(WatchEnd::Closed) => return,
                    },
                    () = self.retries.wait() => BTreeSet::from_iter(self.retries.due(Instant::now())),
                };
                for name in names {
                    self.sync(&name).await;
                }
            }
        }
    }

    /// Brings one definition to its desired state, and those that wait for its names.
    async fn sync(&mut self, name: &str) {
        let before = self.known.0.get(name).map(|known| (known.group.clone(), known.accepted.clone()));
        self.sync_one(name).await;
        let after = self.known.0.get(name).map(|known| (known.group.clone(), known.accepted.clone()));
        if before == after {
            return;
        }
        for (group, _) in before.into_iter().chain(after) {
            for waiting in self.known.waiting(&group) {
                if waiting != name {
                    self.sync_one(&waiting).await;
                }
            }
        }
    }

    /// A write that fails is repeated later: other definitions do not wait for it.
    async fn sync_one(&mut self, name: &str) {
        match self.try_sync(name).await {
            Ok(()) => self.retries.succeeded(name),
            Err(status) => {
                tracing::warn!(name, error = status.message, "cannot write a CustomResourceDefinition");
                self.retries.failed(name, Instant::now());
            }
        }
    }

    async fn try_sync(&mut self, name: &str) -> Result<(), Status> {
        let server = Arc::clone(&self.server);
        let registry = &server.registry;
        let definition = match registry.read(&self.resource, "", name) {
            Ok(definition) => definition,
            Err(status) if status.code == 404 => {
                if registry.tables.set(name, None) {
                    forget(&self.server, name);
                }
                self.known.0.remove(name);
                return Ok(());
            }
            Err(status) => return Err(status),
        };
        if meta::is_deleting(&definition) {
            if is_established(&definition) && serve(registry, &definition).is_err() {
                tracing::debug!(name, "a definition that is not served is being deleted");
            }
            self.remember(&definition, false);
            cleanup::begin(&self.server, &self.resource, &self.cleaning, &definition);
            return Ok(());
        }
        let group = definition.pointer("/spec/group").and_then(Value::as_str).unwrap_or_default();
        let decided = {
            let rivals = self.known.rivals(group, name);
            names::decide(&definition, &rivals, jiff::Timestamp::now())
        };
        let mut decided = match decided {
            Some(decided) => decided,
            None => definition["status"].clone(),
        };
        conditions::set_approval(&mut decided, &definition, jiff::Timestamp::now());
        let mut served = definition.clone();
        served["status"] = decided.clone();
        let waits = conditions::condition(&served, "NamesAccepted") != Some("True");
        if is_established(&served)
            && let Err(why) = serve(registry, &served)
            && conditions::condition(&definition, "Established") != Some("True")
        {
            names::refuse(&mut decided, &why.to_string(), jiff::Timestamp::now());
            served["status"] = decided.clone();
        }
        self.remember(&served, waits);
        if decided == definition["status"] {
            return Ok(());
        }
        let seen = meta::str(&definition, "resourceVersion").to_owned();
        let change = move |old: &Value| {
            let mut new = old.clone();
            // A newer state is on its way here.
            if meta::str(old, "resourceVersion") == seen {
                new["status"] = decided.clone();
            }
            Ok(new)
        };
        match write(&self.server, &self.resource, name, Some("status"), &change).await {
            Err(status) if matches!(status.code, 404 | 409) => Ok(()),
            other => other,
        }
    }
}

/// Drops the records of a removed definition's resources: otherwise they stay for as long as the server runs.
fn forget(server: &ApiServer, definition: &str) {
    // The name of a definition consists of its plural name and its group.
    if let Some((plural, group)) = definition.split_once('.') {
        server.registry.forget(group, plural);
    }
    server.metrics.retain_served(&server.registry.tables.current());
}

/// Puts the resources of a definition into the table.
fn serve(registry: &Registry, definition: &Value) -> Result<(), ferrite_api::custom::DefinitionError> {
    match Definition::compile(definition) {
        Ok(compiled) => {
            registry.tables.set(meta::name(definition), Some(&compiled));
            Ok(())
        }
        Err(why) => {
            registry.tables.set(meta::name(definition), None);
            Err(why)
        }
    }
}

fn is_established(definition: &Value) -> bool {
    conditions::condition(definition, "Established") == Some("True")
}

/// Writes a definition as the server itself.
async fn write(
    server: &ApiServer,
    resource: &Resource,
    name: &str,
    subresource: Option<&str>,
    change: crate::registry::Change<'_>,
) -> Result<(), Status> {
    let user = User::new("system:apiserver", ["system:masters"]);
    let options = WriteOptions { field_manager: MANAGER.into(), ..WriteOptions::default() };
    let write =
        Write { resource, namespace: "", requested: name, user: &user, options: &options, copied: false };
    let update = Update { write, name, subresource, change, replaces: false, applied: None };
    server.registry.update(&update).await.map(drop)
}

/// The OpenAPI schema of a custom resource, as its definition has it.
pub(crate) fn openapi_schema(registry: &Registry, resource: &Resource) -> Option<Value> {
    let custom = resource.custom.as_ref()?;
    let definitions = registry.table.find(GROUP, "v1", PLURAL)?;
    let definition = registry.read(definitions, "", &custom.kind.definition).ok()?;
    let versions = definition.pointer("/spec/versions")?.as_array()?;
    let version = versions.iter().find(|version| version["name"] == *resource.version)?;
    Some(version.pointer("/schema/openAPIV3Schema").cloned().unwrap_or_else(|| json!({})))
}
