//! Aggregation: groups that other servers serve, as if this server did.
//!
//! An APIService names the server of a group's version. One task, the [`Follower`], maintains the
//! APIServices of this server's own groups ([`registration`]), checks the servers behind the others
//! ([`availability`], [`discovery`]), and publishes a snapshot. A request takes the snapshot once: it goes
//! to the local
//! resources or, on behalf of its user, to the other server ([`proxy`]). Nothing that a request does waits for a
//! server other than its own.
//!
//! [`mounted`] is for groups that this process serves itself without storage.

mod availability;
mod backends;
mod discovery;
mod metrics;
pub(crate) mod mounted;
pub(crate) mod proxy;
mod registration;
mod remote;
mod services;

pub(crate) use discovery::Discovered;
pub use mounted::{MountedGroup, MountedRequest, MountedResource};
pub(crate) use services::ApiServices;

use crate::auth::User;
use crate::options::{DeleteOptions, WriteOptions};
use crate::registry::{Change, Update, View, Write, stored};
use crate::retries::{Retries, delay};
use crate::server::ApiServer;
use crate::subresource::slices_of;
use availability::Verdict;
use backends::BackendWatches;
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use ferrite_store::{Watch, WatchEnd};
use futures_util::future;
use registration::Action;
use remote::Remote;
use services::{ApiService, Priority, ServiceReference, Spec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

const GROUP: &str = "apiregistration.k8s.io";
const PLURAL: &str = "apiservices";
const MANAGER: &str = "kube-apiserver";
/// As upstream: a server that answered is asked again after this.
const PROBE_AGAIN: Duration = Duration::from_secs(30);

/// The APIServices as requests see them.
#[derive(Default)]
pub(crate) struct Aggregator {
    services: RwLock<Arc<ApiServices>>,
    /// By group and version.
    discovered: RwLock<Arc<BTreeMap<services::GroupVersion, Discovered>>>,
    registered: AtomicBool,
}

impl Aggregator {
    /// Returns true once the APIServices of this server's own groups were stored.
    pub fn is_registered(&self) -> bool {
        self.registered.load(Ordering::Acquire)
    }

    pub fn set_registered(&self) {
        self.registered.store(true, Ordering::Release);
    }

    /// The APIServices as they are now.
    pub fn services(&self) -> Arc<ApiServices> {
        Arc::clone(&self.services.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The discovery documents of all extension API servers.
    pub fn discovered(&self) -> Arc<BTreeMap<services::GroupVersion, Discovered>> {
        Arc::clone(&self.discovered.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn publish(&self, services: ApiServices) {
        *self.services.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(services);
    }

    fn set_discovered(&self, version: services::GroupVersion, found: Option<Discovered>) {
        let mut current = self.discovered.write().unwrap_or_else(PoisonError::into_inner);
        if current.get(&version) == found.as_ref() {
            return;
        }
        let mut all = BTreeMap::clone(&current);
        match found {
            Some(found) => drop(all.insert(version, found)),
            None => drop(all.remove(&version)),
        }
        *current = Arc::new(all);
    }
}

/// The state of one remote APIService between two probes.
struct Probed {
    spec: Spec,
    /// The endpoints that were there when it was last asked.
    endpoints: Vec<(std::net::IpAddr, u16)>,
    /// The time of the next probe; none while its Service cannot be used: a change of the Service ends that.
    next: Option<Instant>,
    failures: u32,
    is_asked: bool,
    /// None until it was asked for the first time.
    verdict: Option<Verdict>,
    remote: Arc<Remote>,
}

/// The end of a probe.
struct Answered {
    name: String,
    spec: Spec,
    outcome: Result<Discovered, discovery::DiscoveryError>,
}

/// Follows the APIServices of a server.
pub(crate) struct Follower {
    server: Arc<ApiServer>,
    resource: Arc<Resource>,
    at_start: BTreeSet<String>,
    synced: BTreeSet<String>,
    probed: BTreeMap<String, Probed>,
    probes: JoinSet<Answered>,
    backends: BackendWatches,
    /// The names that metrics have.
    measured: BTreeSet<String>,
    /// Back-off of the writes that keep the APIServices of this server's own groups.
    registering: Retries,
    /// Back-off of the writes of statuses.
    reporting: Retries,
}

impl Follower {
    /// None when APIServices are not served.
    pub fn new(server: &Arc<ApiServer>) -> Option<Self> {
        let resource = server.registry.table.find(GROUP, "v1", PLURAL)?;
        let mut follower = Self {
            server: Arc::clone(server),
            resource: Arc::clone(resource),
            at_start: BTreeSet::new(),
            synced: BTreeSet::new(),
            probed: BTreeMap::new(),
            probes: JoinSet::new(),
            backends: BackendWatches::default(),
            measured: BTreeSet::new(),
            registering: Retries::default(),
            reporting: Retries::default(),
        };
        let stored = follower.stored();
        follower.at_start = stored.keys().cloned().collect();
        follower.publish(&stored);
        Some(follower)
    }

    fn stored(&self) -> BTreeMap<String, Value> {
        let all = self.server.registry.view().objects(GROUP, PLURAL, "");
        all.map(|object| (meta::name(&object).to_owned(), object)).collect()
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
        let server = Arc::clone(&self.server);
        let mut tables = server.registry.tables.changes();
        let prefix = stored::prefix(&self.resource);
        loop {
            let revision = server.registry.store.snapshot().revision();
            let mut watch = match server.registry.store.watch(prefix.as_bytes(), revision) {
                Ok(watch) => watch,
                Err(WatchEnd::Compacted { .. }) => continue,
                Err(WatchEnd::Closed) => return,
            };
            loop {
                tables.mark_unchanged();
                self.sync().await;
                match self.wait(&mut watch, &mut tables).await {
                    Ok(()) => {}
                    Err(WatchEnd::Compacted { .. }) => break,
                    Err(WatchEnd::Closed) => return,
                }
            }
        }
    }

    /// Waits for anything that can change an APIService.
    async fn wait(
        &mut self,
        watch: &mut Watch,
        tables: &mut tokio::sync::watch::Receiver<u64>,
    ) -> Result<(), WatchEnd> {
        let later = crate::retries::until(self.next());
        tokio::select! {
            changes = watch.next() => changes.map(drop),
            // An error means that the server is gone, and with it this task.
            _ = tables.changed() => Ok(()),
            Some(answered) = self.probes.join_next() => {
                if let Ok(answered) = answered {
                    self.answered(answered);
                }
                Ok(())
            }
            () = self.backends.changed() => Ok(()),
            () = later => Ok(()),
        }
    }

    /// The time at which something is due without an event.
    fn next(&self) -> Option<Instant> {
        let idle = self.probed.values().filter(|probed| !probed.is_asked);
        let probes = idle.filter_map(|probed| probed.next);
        probes.chain(self.registering.next()).chain(self.reporting.next()).min()
    }

    /// Brings every APIService to its desired state. A write that fails is repeated later, and delays no other.
    async fn sync(&mut self) {
        self.register().await;
        let stored = self.stored();
        self.probe(&stored);
        let now = Instant::now();
        let server = Arc::clone(&self.server);
        let changed: Vec<(&str, Verdict)> = stored
            .iter()
            .filter_map(|(name, object)| {
                let verdict = match self.probed.get(name) {
                    Some(probed) => probed.verdict.clone()?,
                    None => Verdict::local(),
                };
                metrics::set_available(name, verdict.available);
                availability::status(object, &verdict, jiff::Timestamp::now())?;
                Some((name.as_str(), verdict))
            })
            .collect();
        self.measured
            .iter()
            .filter(|name| !stored.contains_key(*name))
            .for_each(|name| metrics::forget(name));
        self.measured = stored.keys().cloned().collect();
        self.reporting.keep(|name| changed.iter().any(|(changed, _)| *changed == name));
        let due = changed.iter().filter(|(name, _)| !self.reporting.waits(name, now));
        let writes: Vec<_> = due
            .map(|(name, verdict)| {
                let (server, resource, stored) = (&server, &self.resource, &stored);
                async move {
                    let change = |old: &Value| {
                        let mut new = old.clone();
                        if let Some(status) = availability::status(old, verdict, jiff::Timestamp::now()) {
                            new["status"] = status;
                        }
                        Ok(new)
                    };
                    let written = update(server, resource, name, Some("status"), &change).await;
                    if written.is_ok()
                        && !verdict.available
                        && stored.get(*name).is_some_and(availability::is_available)
                    {
                        metrics::became_unavailable(name, verdict.reason);
                    }
                    (*name, written)
                }
            })
            .collect();
        if !writes.is_empty() {
            // Admission may let writes wait. Requests see changed specifications meanwhile.
            self.publish(&stored);
        }
        for (name, written) in future::join_all(writes).await {
            note(&mut self.reporting, name, written);
        }
        self.publish(&self.stored());
    }

    /// Creates, updates and deletes the APIServices of this server's own groups.
    async fn register(&mut self) {
        let desired =
            registration::desired(&self.server.registry.tables.current(), &self.server.config.mounted);
        let stored = self.stored();
        let now = Instant::now();
        let names: BTreeSet<&String> = desired.keys().chain(stored.keys()).collect();
        let decided: Vec<_> = names
            .iter()
            .map(|&name| {
                let (at_start, synced) = (self.at_start.contains(name), self.synced.contains(name));
                let wanted = desired.get(name);
                (name, wanted, registration::decide(stored.get(name), wanted, synced, at_start))
            })
            .collect();
        let (kept, changed): (Vec<_>, Vec<_>) =
            decided.into_iter().partition(|(_, _, action)| *action == Action::Keep);
        self.registering.keep(|name| changed.iter().any(|(changed, _, _)| *changed == name));
        self.synced.extend(kept.into_iter().map(|(name, _, _)| name.clone()));
        let (server, resource) = (&self.server, &self.resource);
        let due = changed.into_iter().filter(|(name, _, _)| !self.registering.waits(name, now));
        let writes = due.map(|(name, wanted, action)| async move {
            let written = match (action, wanted) {
                (Action::Create, Some(wanted)) => create(server, resource, wanted.object(name)).await,
                (Action::Update, Some(wanted)) => {
                    let change = |old: &Value| {
                        let mut new = old.clone();
                        new["spec"] = wanted.spec.clone();
                        Ok(new)
                    };
                    update(server, resource, name, None, &change).await
                }
                _ => delete(server, resource, name).await,
            };
            (name, written)
        });
        let written = future::join_all(writes).await;
        for (name, written) in written {
            if note(&mut self.registering, name, written) {
                self.synced.insert(name.clone());
            }
        }
        if self.registering.next().is_none() {
            self.server.aggregator.set_registered();
        }
    }

    /// Starts to ask the servers that are due.
    fn probe(&mut self, stored: &BTreeMap<String, Value>) {
        let view = self.server.registry.view();
        let certificates = self.server.certificates();
        let now = Instant::now();
        let is_remote = |name: &String| stored.get(name).is_some_and(|o| Spec::of(o).service.is_some());
        let gone: Vec<String> = self.probed.keys().filter(|name| !is_remote(name)).cloned().collect();
        for name in gone {
            if let Some(probed) = self.probed.remove(&name) {
                let version = (probed.spec.group, probed.spec.version);
                self.server.aggregator.set_discovered(version, None);
            }
        }
        let mut backends = BTreeSet::new();
        for (name, object) in stored {
            let spec = Spec::of(object);
            let Some(service) = spec.service.clone() else { continue };
            backends.extend(followed(&view, &service));
            if self.probed.get(name).is_none_or(|probed| probed.spec != spec) {
                let available = availability::is_available(object);
                let remote =
                    Arc::new(Remote::new(name, service.clone(), available, Arc::clone(&certificates)));
                let probed = Probed {
                    spec: spec.clone(),
                    endpoints: Vec::new(),
                    next: Some(now),
                    failures: 0,
                    is_asked: false,
                    verdict: None,
                    remote,
                };
                self.probed.insert(name.clone(), probed);
            }
            let Some(probed) = self.probed.get_mut(name) else { continue };
            let found = view.get("", "services", &service.namespace, &service.name);
            let slices = slices_of(&view, &service.namespace, &service.name);
            let place = (service.namespace.as_str(), service.name.as_str(), service.port);
            if let Err(verdict) = availability::check_service(place, found.as_deref(), &slices) {
                probed.endpoints.clear();
                probed.next = None;
                probed.verdict = Some(verdict);
                continue;
            }
            let endpoints = crate::subresource::endpoints_of(&view, place.0, place.1, place.2);
            let moved = probed.endpoints != endpoints;
            if probed.is_asked || (!moved && probed.next.is_some_and(|next| now < next)) {
                continue;
            }
            probed.endpoints = endpoints;
            probed.is_asked = true;
            let (server, remote, name) = (Arc::clone(&self.server), Arc::clone(&probed.remote), name.clone());
            self.probes.spawn(async move {
                let outcome = discovery::discover(&server, &remote, &spec.group, &spec.version).await;
                Answered { name, spec, outcome }
            });
        }
        self.backends.follow(&self.server.registry.store, &backends, view.snapshot.revision());
    }

    /// Takes note of the end of a probe.
    fn answered(&mut self, answered: Answered) {
        let Some(probed) = self.probed.get_mut(&answered.name) else { return };
        probed.is_asked = false;
        if probed.spec != answered.spec {
            return;
        }
        let now = Instant::now();
        match answered.outcome {
            Ok(found) => {
                probed.failures = 0;
                probed.next = Some(now + PROBE_AGAIN);
                probed.verdict = Some(Verdict::passed());
                let version = (answered.spec.group, answered.spec.version);
                self.server.aggregator.set_discovered(version, Some(found));
            }
            Err(error) => {
                probed.failures += 1;
                probed.next = Some(now + delay(probed.failures).min(PROBE_AGAIN));
                probed.verdict = Some(Verdict::failed_discovery(error.to_string()));
            }
        }
    }

    /// Lets requests see the stored APIServices.
    fn publish(&self, stored: &BTreeMap<String, Value>) {
        let certificates = self.server.certificates();
        let before = self.server.aggregator.services();
        let all = stored.iter().map(|(name, object)| {
            let spec = Spec::of(object);
            let available = availability::is_available(object);
            let remote = spec.service.map(|service| {
                let known = before.remote_of(&spec.group, &spec.version);
                let same = known.filter(|known| known.service == service && known.available == available);
                same.cloned().unwrap_or_else(|| {
                    Arc::new(Remote::new(name, service, available, Arc::clone(&certificates)))
                })
            });
            let priority = Priority { group: spec.priority.0, version: spec.priority.1 };
            let mounted = self.server.config.mounted.iter().find(|mounted| {
                remote.is_none() && mounted.group() == spec.group && mounted.version() == spec.version
            });
            ApiService {
                mounted: mounted.cloned(),
                group: spec.group,
                version: spec.version,
                priority,
                remote,
            }
        });
        self.server.aggregator.publish(ApiServices::new(all));
    }
}

/// The keys below which a Service and its EndpointSlices lie.
fn followed(view: &View, service: &ServiceReference) -> impl Iterator<Item = String> {
    let services = view.resource("", "services").map(|services| {
        let key = stored::key(services, &service.namespace, &service.name);
        String::from_utf8_lossy(key.as_bytes()).into_owned()
    });
    let slices = view.resource("discovery.k8s.io", "endpointslices");
    let slices = slices.map(|slices| stored::prefix_in(slices, Some(&service.namespace)));
    services.into_iter().chain(slices)
}

/// Takes note of the end of a write. A write that came too late is made again when the change that was first is seen.
/// Returns true if nothing is left to write.
fn note(retries: &mut Retries, name: &str, written: Result<(), Status>) -> bool {
    match written {
        Err(status) if !matches!(status.code, 404 | 409) => {
            tracing::warn!(name, error = status.message, "cannot write an APIService");
            retries.failed(name, Instant::now());
            false
        }
        _ => {
            retries.succeeded(name);
            true
        }
    }
}

fn itself() -> User {
    User::new("system:apiserver", ["system:masters"])
}

fn options() -> WriteOptions {
    WriteOptions { field_manager: MANAGER.into(), ..WriteOptions::default() }
}

async fn create(server: &ApiServer, resource: &Resource, object: Value) -> Result<(), Status> {
    let (user, options) = (itself(), options());
    let write =
        Write { resource, namespace: "", requested: "", user: &user, options: &options, copied: false };
    server.registry.create(&write, object).await.map(drop)
}

async fn update(
    server: &ApiServer,
    resource: &Resource,
    name: &str,
    subresource: Option<&str>,
    change: Change<'_>,
) -> Result<(), Status> {
    let (user, options) = (itself(), options());
    let write =
        Write { resource, namespace: "", requested: name, user: &user, options: &options, copied: false };
    let update = Update { write, name, subresource, change, replaces: false, applied: None };
    server.registry.update(&update).await.map(drop)
}

async fn delete(server: &ApiServer, resource: &Resource, name: &str) -> Result<(), Status> {
    let (user, options) = (itself(), options());
    let write =
        Write { resource, namespace: "", requested: name, user: &user, options: &options, copied: false };
    server.registry.delete(&write, name, &DeleteOptions::default()).await.map(drop)
}
