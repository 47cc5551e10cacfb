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
mod discovery;
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
use crate::registry::{Change, Update, Write, stored};
use crate::server::ApiServer;
use crate::subresource::slices_of;
use availability::Verdict;
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use ferrite_store::{Watch, WatchEnd};
use futures_util::future;
use registration::Action;
use remote::Remote;
use services::{ApiService, Priority, Spec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

const GROUP: &str = "apiregistration.k8s.io";
const PLURAL: &str = "apiservices";
const MANAGER: &str = "kube-apiserver";
/// Interval between lookups of the Services behind APIServices.
const LOOK: Duration = Duration::from_secs(1);
/// As upstream: a server that answered is asked again after this.
const PROBE_AGAIN: Duration = Duration::from_secs(30);
/// A write that failed is tried again after this.
const WRITE_AGAIN: Duration = Duration::from_secs(1);

/// The APIServices as requests see them.
#[derive(Default)]
pub(crate) struct Aggregator {
    services: RwLock<Arc<ApiServices>>,
    /// By group and version.
    discovered: RwLock<Arc<BTreeMap<services::GroupVersion, Discovered>>>,
}

impl Aggregator {
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
    next: Instant,
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
                let pause = match self.sync().await {
                    Ok(()) if self.probed.is_empty() => None,
                    Ok(()) => Some(LOOK),
                    Err(status) => {
                        tracing::warn!(error = status.message, "cannot write an APIService");
                        Some(WRITE_AGAIN)
                    }
                };
                match self.wait(&mut watch, &mut tables, pause).await {
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
        pause: Option<Duration>,
    ) -> Result<(), WatchEnd> {
        let later = async {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => future::pending().await,
            }
        };
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
            () = later => Ok(()),
        }
    }

    /// Brings every APIService to its desired state.
    async fn sync(&mut self) -> Result<(), Status> {
        self.register().await?;
        let stored = self.stored();
        self.probe(&stored);
        let server = Arc::clone(&self.server);
        let verdicts = stored.iter().filter_map(|(name, object)| {
            let verdict = match self.probed.get(name) {
                Some(probed) => probed.verdict.clone()?,
                None => Verdict::local(),
            };
            availability::status(object, &verdict, jiff::Timestamp::now())?;
            Some((name.as_str(), verdict))
        });
        let writes = verdicts.map(|(name, verdict)| {
            let (server, resource) = (&server, &self.resource);
            async move {
                let change = |old: &Value| {
                    let mut new = old.clone();
                    if let Some(status) = availability::status(old, &verdict, jiff::Timestamp::now()) {
                        new["status"] = status;
                    }
                    Ok(new)
                };
                gone_or_changed(update(server, resource, name, Some("status"), &change).await)
            }
        });
        future::try_join_all(writes).await?;
        self.publish(&self.stored());
        Ok(())
    }

    /// Creates, updates and deletes the APIServices of this server's own groups.
    async fn register(&mut self) -> Result<(), Status> {
        let desired =
            registration::desired(&self.server.registry.tables.current(), &self.server.config.mounted);
        let stored = self.stored();
        let names: BTreeSet<&String> = desired.keys().chain(stored.keys()).collect();
        let writes = names.iter().filter_map(|&name| {
            let (at_start, synced) = (self.at_start.contains(name), self.synced.contains(name));
            let wanted = desired.get(name);
            let action = registration::decide(stored.get(name), wanted, synced, at_start);
            let (server, resource) = (&self.server, &self.resource);
            (action != Action::Keep).then_some(async move {
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
                gone_or_changed(written)
            })
        });
        future::try_join_all(writes).await?;
        self.synced.extend(names.into_iter().cloned());
        Ok(())
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
        for (name, object) in stored {
            let spec = Spec::of(object);
            let Some(service) = spec.service.clone() else { continue };
            if self.probed.get(name).is_none_or(|probed| probed.spec != spec) {
                let available = availability::is_available(object);
                let remote =
                    Arc::new(Remote::new(name, service.clone(), available, Arc::clone(&certificates)));
                let probed = Probed {
                    spec: spec.clone(),
                    endpoints: Vec::new(),
                    next: now,
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
                probed.verdict = Some(verdict);
                continue;
            }
            let endpoints = crate::subresource::endpoints_of(&view, place.0, place.1, place.2);
            let moved = probed.endpoints != endpoints;
            if probed.is_asked || (!moved && now < probed.next) {
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
                probed.next = now + PROBE_AGAIN;
                probed.verdict = Some(Verdict::passed());
                let version = (answered.spec.group, answered.spec.version);
                self.server.aggregator.set_discovered(version, Some(found));
            }
            Err(error) => {
                let pause = LOOK * 2u32.saturating_pow(probed.failures.min(5));
                probed.failures += 1;
                probed.next = now + pause.min(PROBE_AGAIN);
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

/// A write that came too late is made again when the change that was first is seen.
fn gone_or_changed(written: Result<(), Status>) -> Result<(), Status> {
    match written {
        Err(status) if matches!(status.code, 404 | 409) => Ok(()),
        other => other,
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
    let update = Update { write, name, subresource, change, replaces: false, applied: false };
    server.registry.update(&update).await.map(drop)
}

async fn delete(server: &ApiServer, resource: &Resource, name: &str) -> Result<(), Status> {
    let (user, options) = (itself(), options());
    let write =
        Write { resource, namespace: "", requested: name, user: &user, options: &options, copied: false };
    server.registry.delete(&write, name, &DeleteOptions::default()).await.map(drop)
}
