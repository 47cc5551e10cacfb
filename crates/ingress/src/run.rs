//! Follows the objects and keeps the table.

use crate::backends::endpoints;
use crate::certificates::{TlsError, certified};
use crate::limits::Limits;
use crate::routes::{BackendRef, Finding, build};
use crate::serve::{Entrance, Proxy};
use crate::shares;
use crate::status;
use crate::table::{Backend, Table, Tables};
use ferrite_client::{
    Api, EventRecorder, EventType, Events, Informer, Informers, ListSelector, ObjectKey, Scope,
};
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use rustls::sign::CertifiedKey;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;

const SERVICE_NAME: &str = "kubernetes.io/service-name";
const BY_SERVICE: &str = "ingress/service";
/// Every Secret that an Ingress names is watched by itself. Of more, each namespace has its share.
const MAX_SECRETS: usize = 1000;

/// Where the proxy reads from.
#[derive(Debug, Clone)]
pub struct Sources {
    ingresses: Informer<Ingress>,
    classes: Informer<IngressClass>,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
}

impl Sources {
    /// Shares the copies that other parts of the process have.
    pub fn shared(informers: &Informers) -> Self {
        Self {
            ingresses: informers.get(),
            classes: informers.get(),
            services: informers.get(),
            slices: informers.get(),
        }
    }

    async fn synced(&self) {
        self.classes.synced().await;
        self.ingresses.synced().await;
        self.services.synced().await;
        self.slices.synced().await;
    }
}

/// Settings of the controller.
#[derive(Debug)]
pub struct Config {
    /// Where clients come in.
    pub entrances: Vec<Entrance>,
    /// The addresses that Ingresses show.
    pub addresses: Vec<IpAddr>,
    pub limits: Limits,
}

/// Why the controller did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IngressError {
    #[error("the ingress proxy cannot serve TLS")]
    Tls(#[from] TlsError),
}

/// Starts the controller. `client` reads the Secrets that Ingresses name, writes their status and their events, and
/// needs no other right.
pub fn start(
    config: Config,
    sources: Sources,
    client: &kube::Client,
    scope: &Scope,
) -> Result<(), IngressError> {
    let tables = Arc::new(Tables::default());
    let proxy = Proxy::new(Arc::clone(&tables), config.limits, scope)?;
    for entrance in config.entrances {
        proxy.serve(entrance);
    }
    let addresses: Arc<[IpAddr]> = config.addresses.into();
    status::start(&sources.ingresses, &sources.classes, client.clone(), addresses, scope);
    let follower = Follower {
        dirty: Arc::default(),
        secrets: BTreeMap::new(),
        parsed: HashMap::new(),
        reported: HashSet::new(),
        table: Table::default(),
        events: Events::start(client.clone(), scope).recorder("ferrite-ingress", None),
        scope: scope.clone(),
        client: client.clone(),
        sources,
        tables,
        proxy,
    };
    scope.spawn(follower.follow());
    Ok(())
}

/// The changes since the table was made.
#[derive(Debug, Default)]
struct Changes {
    routes: bool,
    secrets: bool,
    services: BTreeSet<ObjectKey>,
}

#[derive(Debug, Default)]
struct Dirty {
    changes: Mutex<Changes>,
    wake: Notify,
}

impl Dirty {
    fn note(&self, change: impl FnOnce(&mut Changes)) {
        change(&mut self.changes.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_one();
    }

    async fn next(&self) -> Changes {
        self.wake.notified().await;
        std::mem::take(&mut *self.changes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A watch of one Secret.
struct WatchedSecret {
    informer: Informer<Secret>,
    scope: Scope,
}

/// A certificate, or why there is none, of a version of a Secret.
type Parsed = (String, Result<Arc<CertifiedKey>, String>);

struct Follower {
    sources: Sources,
    client: kube::Client,
    tables: Arc<Tables>,
    proxy: Arc<Proxy>,
    events: EventRecorder,
    scope: Scope,
    dirty: Arc<Dirty>,
    table: Table,
    secrets: BTreeMap<ObjectKey, WatchedSecret>,
    parsed: HashMap<ObjectKey, Parsed>,
    /// Findings already reported in events of their Ingresses.
    reported: HashSet<(ObjectKey, String)>,
}

impl Follower {
    async fn follow(mut self) {
        self.subscribe();
        self.sources.synced().await;
        loop {
            let changes = self.dirty.next().await;
            let mut findings = None;
            if changes.routes {
                findings = Some(self.rebuild());
            }
            for service in &changes.services {
                self.refresh(service);
            }
            if changes.routes || changes.secrets {
                let problems = self.read_certificates();
                findings.get_or_insert_with(Vec::new).extend(problems);
            }
            self.tables.replace(self.table.clone());
            self.proxy.forget_endpoints();
            if let Some(findings) = findings {
                self.report(findings, changes.routes);
            }
        }
    }

    fn subscribe(&self) {
        self.sources
            .slices
            .add_index(BY_SERVICE, |slice| service_of(slice).iter().map(ToString::to_string).collect());
        let dirty = Arc::clone(&self.dirty);
        self.sources.ingresses.subscribe(move |_| dirty.note(|changes| changes.routes = true));
        let dirty = Arc::clone(&self.dirty);
        self.sources.classes.subscribe(move |_| dirty.note(|changes| changes.routes = true));
        let dirty = Arc::clone(&self.dirty);
        self.sources.services.subscribe(move |change| {
            let key = ObjectKey::of(&**change.object());
            dirty.note(|changes| {
                changes.services.insert(key);
            });
        });
        let dirty = Arc::clone(&self.dirty);
        self.sources.slices.subscribe(move |change| {
            let mut keys: Vec<ObjectKey> = service_of(change.object()).into_iter().collect();
            if let ferrite_client::Change::Updated { old, .. } = change {
                keys.extend(service_of(old));
            }
            dirty.note(|changes| changes.services.extend(keys));
        });
        // Without any object there is a table, too: an empty one.
        self.dirty.note(|changes| changes.routes = true);
    }

    /// Makes the routes anew. Backends that stay are not looked up again.
    fn rebuild(&mut self) -> Vec<Finding> {
        let (routes, findings) = build(&self.sources.ingresses.list(), &self.sources.classes.list());
        let mut backends = imbl::HashMap::new();
        for reference in &routes.backends {
            let there = self.table.backends.get(reference).cloned();
            backends.insert(Arc::clone(reference), there.unwrap_or_else(|| self.look_up(reference, None)));
        }
        self.table.backends = backends;
        self.table.routes = Arc::new(routes);
        findings
    }

    /// Looks the ports of a Service up again, if a rule names it.
    fn refresh(&mut self, service: &ObjectKey) {
        let first = BackendRef { service: service.clone(), port: crate::routes::PortRef::Number(i32::MIN) };
        let routes = Arc::clone(&self.table.routes);
        for reference in routes.backends.range(first..).take_while(|reference| reference.service == *service)
        {
            let backend = self.look_up(reference, self.table.backends.get(reference));
            self.table.backends.insert(Arc::clone(reference), backend);
        }
    }

    fn look_up(&self, reference: &BackendRef, before: Option<&Arc<Backend>>) -> Arc<Backend> {
        let service = self.sources.services.get(&reference.service);
        let slices = self.sources.slices.by_index(BY_SERVICE, &reference.service.to_string());
        let found = endpoints(service.as_deref(), &slices, &reference.port);
        match before {
            Some(before) if before.endpoints == found => Arc::clone(before),
            _ => Arc::new(Backend::new(found)),
        }
    }

    /// Watches the Secrets that the routes name, and reads their certificates.
    fn read_certificates(&mut self) -> Vec<Finding> {
        let routes = Arc::clone(&self.table.routes);
        let named: BTreeSet<&ObjectKey> = routes.certificates.values().collect();
        let is_there = |key: &ObjectKey| {
            self.secrets.get(key).is_some_and(|watched| watched.informer.get(key).is_some())
        };
        let all = named;
        let named = shares::chosen(&all, MAX_SECRETS, is_there);
        self.secrets.retain(|key, watched| {
            let kept = named.contains(key);
            if !kept {
                watched.scope.cancel();
            }
            kept
        });
        self.parsed.retain(|key, _| named.contains(key));
        for key in &named {
            if !self.secrets.contains_key(*key) {
                self.secrets.insert((*key).clone(), self.watch(key));
            }
        }
        let mut certificates = HashMap::new();
        let mut problems: HashMap<&ObjectKey, String> = HashMap::new();
        for (key, watched) in &self.secrets {
            let Some(secret) = watched.informer.get(key) else {
                self.parsed.remove(key);
                if watched.informer.has_synced() {
                    problems.insert(key, format!("Secret {} does not exist", key.name));
                }
                continue;
            };
            let version = secret.metadata.resource_version.clone().unwrap_or_default();
            let fresh = |(of, _): &Parsed| *of == version;
            if !self.parsed.get(key).is_some_and(fresh) {
                let read = certified(&secret).map(Arc::new).map_err(|error| error.to_string());
                self.parsed.insert(key.clone(), (version, read));
            }
            match self.parsed.get(key) {
                Some((_, Ok(certificate))) => {
                    certificates.insert(key.clone(), Arc::clone(certificate));
                }
                Some((_, Err(why))) => {
                    problems.insert(key, format!("Secret {} has no certificate: {why}", key.name));
                }
                None => {}
            }
        }
        let mut findings = self.about_secrets(&problems);
        findings.extend(self.about_unread(&all.difference(&named).copied().collect()));
        self.table.certificates = Arc::new(certificates);
        findings
    }

    fn watch(&self, key: &ObjectKey) -> WatchedSecret {
        let scope = self.scope.child();
        let api = Api::<Secret>::namespaced(self.client.clone(), &key.namespace);
        let selector = ListSelector::fields(format!("metadata.name={}", key.name));
        let informer = Informer::start(api, selector, &scope);
        let dirty = Arc::clone(&self.dirty);
        informer.subscribe(move |_| dirty.note(|changes| changes.secrets = true));
        let (dirty, synced) = (Arc::clone(&self.dirty), informer.clone());
        scope.spawn(async move {
            // A Secret that does not exist is no change.
            synced.synced().await;
            dirty.note(|changes| changes.secrets = true);
        });
        WatchedSecret { informer, scope }
    }

    /// Findings for the Ingresses that name a Secret with a problem.
    fn about_secrets(&self, problems: &HashMap<&ObjectKey, String>) -> Vec<Finding> {
        if problems.is_empty() {
            return Vec::new();
        }
        let mut findings = Vec::new();
        for ingress in self.sources.ingresses.list() {
            let key = ObjectKey::of(&*ingress);
            let tls = ingress.spec.iter().flat_map(|spec| spec.tls.iter().flatten());
            for name in tls.filter_map(|tls| tls.secret_name.as_deref()) {
                if let Some(message) = problems.get(&ObjectKey::new(key.namespace.as_str(), name)) {
                    let (ingress, message) = (key.clone(), message.clone());
                    findings.push(Finding { ingress, reason: "NoCertificate", message });
                }
            }
        }
        findings
    }

    /// Findings for the Ingresses with Secrets that are not read: one for each, however many Secrets it names.
    fn about_unread(&self, unread: &HashSet<&ObjectKey>) -> Vec<Finding> {
        if unread.is_empty() {
            return Vec::new();
        }
        let names_one = |ingress: &Ingress, namespace: &str| {
            let tls = ingress.spec.iter().flat_map(|spec| spec.tls.iter().flatten());
            let mut names = tls.filter_map(|tls| tls.secret_name.as_deref());
            names.any(|name| unread.contains(&ObjectKey::new(namespace, name)))
        };
        let ingresses = self.sources.ingresses.list();
        let keys = ingresses.iter().filter_map(|ingress| {
            let key = ObjectKey::of(&**ingress);
            names_one(ingress, &key.namespace).then_some(key)
        });
        let message = format!(
            "Secrets are not read: all Ingresses name more than {MAX_SECRETS}, and namespaces have equal shares; \
             name fewer Secrets in this namespace"
        );
        keys.map(|ingress| Finding { ingress, reason: "TooManyCertificates", message: message.clone() })
            .collect()
    }

    /// Reports findings to the authors of Ingresses, once.
    fn report(&mut self, findings: Vec<Finding>, all: bool) {
        let current: HashSet<(ObjectKey, String)> =
            findings.iter().map(|finding| (finding.ingress.clone(), finding.message.clone())).collect();
        for Finding { ingress, reason, message } in findings {
            if self.reported.contains(&(ingress.clone(), message.clone())) {
                continue;
            }
            if let Some(object) = self.sources.ingresses.get(&ingress) {
                self.events.event_for(&*object, EventType::Warning, reason, message);
            }
        }
        match all {
            true => self.reported = current,
            false => self.reported.extend(current),
        }
    }
}

/// The Service of a slice.
fn service_of(slice: &EndpointSlice) -> Option<ObjectKey> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(ObjectKey::new(slice.metadata.namespace.as_deref().unwrap_or_default(), name.as_str()))
}
