//! The registry: every resource's objects, behind one generic implementation of the verbs.
//!
//! A write goes decode → default → admit → validate → store; a kind adds its strategy, never a path of its own.

mod addresses;
mod allocator;
mod checks;
mod create;
mod decoded;
mod delete;
#[cfg(test)]
pub(crate) mod fixture;
mod hub;
mod list;
mod media;
pub(crate) mod metadata;
mod recent;
mod select;
pub(crate) mod stored;
mod text;
mod trigger;
mod update;
mod watch;

pub(crate) use allocator::ServiceAllocator;
pub(crate) use delete::{Deleted, check_delete_preconditions};
pub(crate) use hub::{Event, EventType, FrameKey};
pub(crate) use list::{Items, ListPage};
pub use media::StorageMedia;
pub(crate) use select::{Facts, Selectors};
pub use stored::places as storage_places;
pub(crate) use update::{Change, Update, beside_spec, precondition_failed};
pub(crate) use watch::{WatchEvent, WatchStream};

use crate::admission::Chain;
use crate::auth::{Mode, Rbac, User};
use crate::extensions::{Converter, ResourceTables};
use crate::metrics::StoreTimes;
use crate::options::{Query, WriteOptions};
use crate::outbound::Outbound;
use crate::request::Verb;
use ferrite_api::Status;
use ferrite_api::codec::{DecodeError, MAX_DEPTH, MAX_OBJECT_DEPTH};
use ferrite_api::kinds::core::pod::gated::drop_disabled;
use ferrite_api::resource::Resource;
use ferrite_component::FeatureGates;
use ferrite_component::steps::Timer;
use ferrite_json::Value;
use ferrite_store::{Entry, Key, Outcome, Revision, Snapshot, Store, StoreError, Txn};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Every resource served, by group, version and plural name.
pub(crate) struct ResourceMap {
    /// Tells tables apart: no two have the same.
    pub version: u64,
    rows: Vec<Arc<Resource>>,
    /// By plural name; few resources share one.
    by_name: HashMap<String, Vec<Arc<Resource>>>,
}

impl ResourceMap {
    pub fn new(resources: Vec<Resource>) -> Self {
        Self::of(resources.into_iter().map(Arc::new).collect())
    }

    /// This table with further rows. A name that is taken stays with the row that has it.
    pub fn with(&self, rows: impl Iterator<Item = Arc<Resource>>) -> Self {
        let mut all = self.rows.clone();
        all.extend(rows.filter(|row| self.find(&row.group, &row.version, &row.plural).is_none()));
        Self::of(all)
    }

    fn of(rows: Vec<Arc<Resource>>) -> Self {
        static VERSIONS: AtomicU64 = AtomicU64::new(0);
        let mut by_name: HashMap<String, Vec<Arc<Resource>>> = HashMap::new();
        for row in &rows {
            by_name.entry(row.plural.to_string()).or_default().push(Arc::clone(row));
        }
        Self { version: VERSIONS.fetch_add(1, Ordering::Relaxed), rows, by_name }
    }

    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Resource>> {
        self.by_name.get(plural)?.iter().find(|r| r.group == group && r.version == version)
    }

    pub fn rows(&self) -> &[Arc<Resource>] {
        &self.rows
    }

    /// Any version of a resource.
    fn any_version(&self, group: &str, plural: &str) -> Option<&Arc<Resource>> {
        self.by_name.get(plural)?.iter().find(|r| r.group == group)
    }
}

/// The state of the cluster at one instant, for readers.
#[derive(Clone)]
pub(crate) struct View {
    pub snapshot: Snapshot,
    table: Arc<ResourceMap>,
    decoded: Arc<decoded::DecodedObjects>,
    pub converter: Arc<Converter>,
}

impl View {
    /// True if a built-in resource is served.
    pub fn serves(&self, group: &str, plural: &str) -> bool {
        self.table.any_version(group, plural).is_some()
    }

    pub fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        let resource = self.table.any_version(group, plural)?;
        let key = stored::key(resource, namespace, name);
        self.decoded.get(resource, &key, self.snapshot.get(key.as_bytes())?)
    }

    /// An object in the version of `resource`.
    pub fn object(&self, resource: &Resource, namespace: &str, name: &str) -> Option<Arc<Value>> {
        let key = stored::key(resource, namespace, name);
        self.decoded.get(resource, &key, self.snapshot.get(key.as_bytes())?)
    }

    /// The objects in the version of `resource`, in a namespace or, if that is empty, in all.
    pub fn objects_of(&self, resource: &Resource, namespace: &str) -> Vec<Arc<Value>> {
        let prefix = stored::prefix_in(resource, Some(namespace));
        let entries = self.snapshot.range(prefix.as_bytes(), None);
        entries.filter_map(|(key, entry)| self.decoded.get(resource, key, entry)).collect()
    }

    /// As [`Self::object`], where a webhook may have to convert the object.
    pub async fn converted_object(
        &self,
        resource: &Resource,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<Value>>, Status> {
        if !crate::extensions::converts(resource) {
            return Ok(self.object(resource, namespace, name));
        }
        let key = stored::key(resource, namespace, name);
        let Some(entry) = self.snapshot.get(key.as_bytes()) else { return Ok(None) };
        let entry = self.converter.entry(resource, entry).await?;
        Ok(stored::decode(resource, &entry).map(Arc::new))
    }

    /// As [`Self::objects_of`], where a webhook may have to convert the objects.
    pub async fn converted_objects(
        &self,
        resource: &Resource,
        namespace: &str,
    ) -> Result<Vec<Arc<Value>>, Status> {
        if !crate::extensions::converts(resource) {
            return Ok(self.objects_of(resource, namespace));
        }
        let prefix = stored::prefix_in(resource, Some(namespace));
        let entries = self.snapshot.range(prefix.as_bytes(), None);
        let entries = entries.map(|(_, entry)| Arc::clone(entry)).collect();
        let entries = self.converter.entries(resource, entries).await?;
        Ok(entries.iter().filter_map(|entry| stored::decode(resource, entry)).map(Arc::new).collect())
    }

    /// The objects of a resource in a namespace, where there are few and they seldom change.
    pub fn few(
        &self,
        group: &str,
        plural: &str,
        namespace: &str,
    ) -> impl Iterator<Item = Arc<Value>> + use<> {
        let found: Vec<_> = match self.table.any_version(group, plural) {
            None => Vec::new(),
            Some(resource) => {
                let prefix = stored::prefix_in(resource, Some(namespace));
                let entries = self.snapshot.range(prefix.as_bytes(), None);
                entries.filter_map(|(key, entry)| self.decoded.get(resource, key, entry)).collect()
            }
        };
        found.into_iter()
    }

    /// The objects of a resource in all namespaces, in the order in which the store got them.
    pub fn oldest_first(&self, group: &str, plural: &str) -> Vec<Arc<Value>> {
        let Some(resource) = self.table.any_version(group, plural) else { return Vec::new() };
        let prefix = stored::prefix_in(resource, Some(""));
        let entries = self.snapshot.range(prefix.as_bytes(), None);
        let mut found: Vec<_> = entries
            .filter_map(|(key, entry)| Some((entry.created, self.decoded.get(resource, key, entry)?)))
            .collect();
        found.sort_by_key(|(created, _)| *created);
        found.into_iter().map(|(_, object)| object).collect()
    }

    /// The objects of a resource in a namespace. Each is decoded when it is asked for.
    pub fn objects(&self, group: &str, plural: &str, namespace: &str) -> impl Iterator<Item = Value> + use<> {
        self.entries(group, plural, namespace).map(|(_, object)| object)
    }

    /// The objects of a resource in a namespace whose text has each of these words. Objects without them are not
    /// decoded: that would take as long as their authors like.
    pub fn objects_with(
        &self,
        group: &str,
        plural: &str,
        namespace: &str,
        words: &[&str],
    ) -> impl Iterator<Item = Value> + use<> {
        let mut found = self.stored(group, plural, namespace);
        let words: Vec<_> = words.iter().map(|word| memchr::memmem::Finder::new(word.as_bytes())).collect();
        found.entries.retain(|entry| words.iter().all(|word| word.find(entry.plain()).is_some()));
        found.decoded().map(|(_, object)| object)
    }

    /// The objects of a resource in a namespace, each with the revision that wrote it.
    pub fn entries(
        &self,
        group: &str,
        plural: &str,
        namespace: &str,
    ) -> impl Iterator<Item = (Revision, Value)> + use<> {
        self.stored(group, plural, namespace).decoded()
    }

    /// The objects of a resource in a namespace as they are stored.
    fn stored(&self, group: &str, plural: &str, namespace: &str) -> StoredObjects {
        let resource = self.table.any_version(group, plural).cloned();
        let entries = resource.as_ref().map(|resource| {
            let prefix = stored::prefix_in(resource, Some(namespace));
            self.snapshot.range(prefix.as_bytes(), None).map(|(_, entry)| Arc::clone(entry)).collect()
        });
        StoredObjects { resource, entries: entries.unwrap_or_default() }
    }

    /// The resource of a kind.
    pub fn of_kind(&self, group: &str, version: &str, kind: &str) -> Option<&Arc<Resource>> {
        self.table.rows.iter().find(|r| r.group == group && r.version == version && r.kind == kind)
    }

    /// An object of one version of a resource as another one.
    pub async fn convert(&self, from: &Resource, to: &Resource, object: &Value) -> Result<Value, Status> {
        self.converter.convert(from, to, object).await
    }

    /// The other versions of a resource, and resources of other groups that share its objects.
    pub fn equivalents<'a>(&'a self, resource: &'a Resource) -> impl Iterator<Item = &'a Arc<Resource>> {
        let storage = resource.storage_gvr();
        self.table.rows.iter().filter(move |row| {
            // Most rows differ in their name, which costs least to compare.
            (row.plural == resource.plural || row.storage.is_some() || resource.storage.is_some())
                && (row.group != resource.group || row.version != resource.version)
                && {
                    let other = row.storage_gvr();
                    other.group == storage.group && other.resource == storage.resource
                }
        })
    }

    /// Any version of a resource.
    pub fn resource(&self, group: &str, plural: &str) -> Option<&Arc<Resource>> {
        self.table.any_version(group, plural)
    }
}

/// Objects of one resource that are not decoded yet.
struct StoredObjects {
    resource: Option<Arc<Resource>>,
    entries: Vec<Arc<Entry>>,
}

impl StoredObjects {
    fn decoded(self) -> impl Iterator<Item = (Revision, Value)> + use<> {
        let Self { resource, entries } = self;
        entries
            .into_iter()
            .filter_map(move |entry| Some((entry.modified, stored::decode(resource.as_ref()?, &entry)?)))
    }
}

/// Makes views for callers without a registry.
pub(crate) struct Viewer {
    store: Arc<Store>,
    /// The built-in resources.
    table: Arc<ResourceMap>,
    decoded: Arc<decoded::DecodedObjects>,
}

impl Viewer {
    pub fn view(&self, converter: &Arc<Converter>) -> View {
        View {
            snapshot: self.store.snapshot(),
            table: Arc::clone(&self.table),
            decoded: Arc::clone(&self.decoded),
            converter: Arc::clone(converter),
        }
    }
}

/// A write that was committed, as [`Registry::record`] takes it.
struct WriteStep<'a> {
    verb: &'static str,
    name: &'a str,
    uid: &'a str,
    timer: Timer,
    /// Time from the beginning to the commit.
    admitted: Duration,
    revision: Revision,
}

/// A write as all verbs share it.
pub(crate) struct Write<'a> {
    pub resource: &'a Resource,
    pub namespace: &'a str,
    /// The name in the request's path; empty when it has none, as that of a create.
    pub requested: &'a str,
    pub user: &'a User,
    pub options: &'a WriteOptions,
    /// The response is copied from the stored bytes: nobody asks for the object afterwards.
    pub copied: bool,
}

pub(crate) struct Registry {
    /// True if writers of objects on which nothing acts get a warning.
    pub warns_of_inert: bool,
    /// Resources of which they are not, because an optional part acts on them.
    pub acted_on: &'static [&'static str],
    pub feature_gates: FeatureGates,
    pub rbac: Arc<Rbac>,
    pub store: Arc<Store>,
    /// The built-in resources, which never change.
    pub table: Arc<ResourceMap>,
    /// Every resource, as it is now.
    pub tables: ResourceTables,
    /// Converts objects of custom kinds whose versions differ.
    pub converter: Arc<Converter>,
    decoded: Arc<decoded::DecodedObjects>,
    recent: Arc<recent::RecentWrites>,
    pub services: ServiceAllocator,
    hubs: hub::Hubs,
    /// Durations of the store's writes.
    pub times: StoreTimes,
    pub admission: Chain,
    /// Events are kept this long, in seconds.
    event_ttl: u64,
    event_lease: tokio::sync::Mutex<Option<ferrite_store::Lease>>,
    /// Watches begin after this revision or later.
    pub oldest_watch: AtomicU64,
}

impl Registry {
    pub fn new(
        store: Arc<Store>,
        table: Arc<ResourceMap>,
        services: ServiceAllocator,
        event_ttl: u64,
        admission: Chain,
        authorization: Vec<Mode>,
        outbound: Arc<Outbound>,
    ) -> Self {
        table.rows().iter().flat_map(|row| trigger::indexed_fields(row)).for_each(|field| store.index(field));
        let decoded = Arc::<decoded::DecodedObjects>::default();
        let viewer =
            Viewer { store: Arc::clone(&store), table: Arc::clone(&table), decoded: Arc::clone(&decoded) };
        Self {
            warns_of_inert: false,
            acted_on: &[],
            feature_gates: FeatureGates::default(),
            rbac: Arc::new(Rbac::new(Arc::clone(&store), Arc::clone(&table), authorization)),
            store,
            tables: ResourceTables::new(Arc::clone(&table)),
            table,
            converter: Arc::new(Converter::new(outbound, viewer)),
            decoded,
            recent: Arc::default(),
            services,
            hubs: hub::Hubs::default(),
            times: StoreTimes::default(),
            admission,
            event_ttl,
            event_lease: tokio::sync::Mutex::new(None),
            oldest_watch: AtomicU64::new(0),
        }
    }

    /// Drops decoded objects that no request needs, for as long as it is polled.
    pub async fn drop_unused(&self) {
        tokio::join!(self.decoded.drop_unused(), self.converter.drop_old());
    }

    /// Drops the records of a resource that is not served any more.
    pub fn forget(&self, group: &str, plural: &str) {
        hub::forget(group, plural);
        list::forget(group, plural);
        self.times.retain_served(&self.tables.current());
    }

    /// Waits until this server has every change that other servers of the same store acknowledged before
    /// the call, unless the client accepts less: anything (`0`), or a version that is known here.
    pub async fn catch_up(&self, verb: Verb, query: &Query) -> Result<(), Status> {
        let wanted = match verb {
            Verb::Get | Verb::List | Verb::Watch => query.get("resourceVersion").and_then(|v| v.parse().ok()),
            _ => None,
        };
        if wanted.is_some_and(|version: u64| version <= self.store.snapshot().revision().0) {
            return Ok(());
        }
        self.store.catch_up().await.map_err(store_status)
    }

    pub fn view(&self) -> View {
        View {
            snapshot: self.store.snapshot(),
            table: self.tables.current(),
            decoded: Arc::clone(&self.decoded),
            converter: Arc::clone(&self.converter),
        }
    }

    /// Commits a transaction that does `operation` to an object of a resource.
    async fn commit(
        &self,
        resource: &Resource,
        operation: &'static str,
        txn: Txn,
    ) -> Result<Outcome, Status> {
        crate::server::check_guard()?;
        let started = std::time::Instant::now();
        let outcome = self.store.commit(txn).await;
        self.times.observe(resource, operation, started.elapsed());
        outcome.map_err(store_status)
    }

    /// As [`Self::commit`], of two transactions. The second is done only if the first is.
    async fn commit_both(
        &self,
        resource: &Resource,
        operation: &'static str,
        first: Txn,
        second: Txn,
    ) -> Result<(Outcome, Option<Outcome>), Status> {
        crate::server::check_guard()?;
        let started = std::time::Instant::now();
        let outcomes = self.store.commit_both(first, second).await;
        let took = started.elapsed();
        self.times.observe(resource, operation, took);
        if matches!(outcomes, Ok((_, Some(_)))) {
            self.times.observe(resource, operation, took);
        }
        outcomes.map_err(store_status)
    }

    /// Records a write in the life of its object. Objects that do not last are left out: there are many of them.
    fn record(&self, write: &Write<'_>, step: WriteStep<'_>) {
        let WriteStep { verb, name, uid, timer, admitted, revision } = step;
        let resource = write.resource;
        if resource.hooks.ttl {
            return;
        }
        let durable = timer.elapsed().saturating_sub(admitted);
        timer.end(
            "apiserver",
            verb,
            uid,
            format_args!(
                "{} {name} by {}, revision {revision}, ready after {} µs, durable after {} µs more",
                resource.plural,
                write.user.name,
                admitted.as_micros(),
                durable.as_micros()
            ),
        );
    }

    /// The stored object.
    pub fn get(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Entry>, Status> {
        let key = stored::key(resource, namespace, name);
        let entry = self.store.snapshot().get(key.as_bytes()).cloned();
        let entry = entry.ok_or_else(|| Status::not_found(&resource.group, &resource.plural, name))?;
        self.check_readable(&key, &entry)?;
        Ok(entry)
    }

    /// Fails if the stored value cannot be decrypted.
    fn check_readable(&self, key: &Key, entry: &Entry) -> Result<(), Status> {
        match entry.is_unreadable() {
            false => Ok(()),
            true => Err(Status::internal(self.unreadable_why(key, entry))),
        }
    }

    fn unreadable_why(&self, key: &Key, entry: &Entry) -> String {
        let why = self.store.unreadable_why(key, entry);
        why.map_or_else(|| "the value was not readable a moment ago".to_owned(), |error| error.to_string())
    }

    /// Fails if a value below the prefix cannot be decrypted. As upstream: a list is whole or not at all.
    fn check_all_readable(&self, snapshot: &Snapshot, prefix: &str) -> Result<(), Status> {
        if !self.store.has_unreadable() {
            return Ok(());
        }
        let mut all = snapshot.range(prefix.as_bytes(), None);
        match all.find(|(_, entry)| entry.is_unreadable()) {
            None => Ok(()),
            Some((key, entry)) => {
                let why = self.unreadable_why(key, entry);
                Err(Status::internal(format!("unable to transform key {key:?}: {why}")))
            }
        }
    }

    /// The stored object, in the version of the resource.
    pub async fn load(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Entry>, Status> {
        self.converter.entry(resource, &self.get(resource, namespace, name)?).await
    }

    /// Encodes an object for storage, in the version in which it is stored.
    async fn encode(&self, resource: &Resource, object: &Value) -> Result<stored::Encoded, Status> {
        if !crate::extensions::converts(resource) {
            return Ok(stored::encode_for_answer(resource, object));
        }
        match Box::pin(self.converter.for_storage(resource, object)).await? {
            None => Ok(stored::encode_for_answer(resource, object)),
            Some((storage, converted)) => {
                Ok(stored::encode_for_answer(&storage, &converted).in_other_version())
            }
        }
    }

    /// Drops fields of pods whose features are off.
    fn drop_disabled(&self, resource: &Resource, new: &mut Value, old: Option<&Value>) {
        let Some(place) = resource.strategy.pod_spec() else { return };
        let Some(spec) = new.pointer_mut(place) else { return };
        let old = old.and_then(|old| old.pointer(place));
        drop_disabled(spec, old, |gate| self.feature_gates.enabled(gate));
    }

    fn inert_warning(&self, resource: &Resource) -> Option<String> {
        let warns = self.warns_of_inert && !self.acted_on.contains(&&*resource.plural);
        if warns { crate::inert::warning(resource, &self.feature_gates) } else { None }
    }

    /// The stored object, decoded.
    pub fn read(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Value, Status> {
        stored::decode(resource, &*self.get(resource, namespace, name)?)
            .ok_or_else(|| unreadable(resource, name))
    }
}

/// Brings an object to the form in which upstream would store it.
pub(crate) fn normalise(resource: &Resource, object: &mut Value) {
    match resource.schema {
        Some(type_) => ferrite_api::codec::normalise_for_storage(type_, object),
        None => ferrite_api::custom::normalise_metadata(object),
    }
}

/// Refuses an object that is nested too deeply for its readers: conversion, defaults, patches and
/// managedFields add levels to a decoded object.
fn check_depth(object: &Value) -> Result<(), Status> {
    let within = |value: &Value, levels: usize| value.count_within(levels).is_some();
    let metadata = |value: &Value| {
        value.as_object().is_none_or(|map| {
            map.iter().all(|(key, value)| {
                within(value, if key == "managedFields" { MAX_DEPTH - 2 } else { MAX_OBJECT_DEPTH - 2 })
            })
        })
    };
    let fits = object.as_object().is_none_or(|map| {
        map.iter().all(|(key, value)| match key.as_str() {
            "metadata" => metadata(value),
            _ => within(value, MAX_OBJECT_DEPTH - 1),
        })
    });
    if fits { Ok(()) } else { Err(Status::bad_request(DecodeError::TooDeep.to_string())) }
}

/// The largest object that is stored, as JSON. Upstream's etcd takes requests of 1.5 MiB, in a form that is shorter than
/// JSON: whatever fits there fits here.
const MAX_STORED: usize = 3 << 20;

/// Refuses an object that has become too large; one that was larger before may shrink.
fn check_size(value: &[u8], before: usize) -> Result<(), Status> {
    if value.len() <= MAX_STORED.max(before) {
        return Ok(());
    }
    // As upstream: it is the store that refuses, and it has no words for a client.
    Err(Status::new(500, "", "etcdserver: request is too large"))
}

pub(crate) fn unreadable(resource: &Resource, name: &str) -> Status {
    Status::internal(format!("the stored {} {name:?} is not valid JSON", resource.plural))
}

pub(crate) fn store_status(error: StoreError) -> Status {
    match error {
        StoreError::Compacted { .. } => Status::expired(
            "The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter.",
        ),
        StoreError::Write(_) | StoreError::Failed(_) | StoreError::Closed | StoreError::Unreachable(_) => {
            Status::unavailable(error.to_string())
        }
        other => Status::internal(other),
    }
}
