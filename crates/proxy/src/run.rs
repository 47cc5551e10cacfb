//! The running proxy: informers in front, one table for each IP family behind.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_client::{Events, Informer, Informers, ListSelector, ObjectKey, Scope};
use ferrite_nft::{Change, KernelError, Monitor, OwnGenerations, Table};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::config::{ProxyConfig, ProxyError};
use crate::conntrack;
use crate::health::{NodeEligibility, ProxyHealth, ServiceHealth, WantedHealthPort};
use crate::layout::LayoutConfig;
use crate::lent::{Lent, LentError};
use crate::listen::listen;
use crate::metrics::Metrics;
use crate::model::{Cidr, IpFamily, NodeFacts, Protocol, ServicePortName};
use crate::sync::{FamilyProxy, ServedPort, Synced, served_ports};

/// Services without this label and with a ClusterIP are for a proxy of this kind, as upstream. A Service that a user
/// labels headless is one of them.
const SERVICE_LABELS: &str = "!service.kubernetes.io/service-proxy-name";
const SERVICE_FIELDS: &str = "spec.clusterIP!=None";
/// The EndpointSlices of other Services than headless ones. Their own labels do not name a proxy.
const SLICE_LABELS: &str = "!service.kubernetes.io/headless";
const SERVICE_NAME: &str = "kubernetes.io/service-name";
const ZONE: &str = "topology.kubernetes.io/zone";
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";
/// The index of EndpointSlices by Service.
const BY_SERVICE: &str = "service";
/// A table that somebody else keeps changing is not made again more often than this.
const HEAL_PERIOD: Duration = Duration::from_secs(1);

/// The comment of the table.
const PURPOSE: &str = "rules for Services";

/// The changes since the last synchronisation.
#[derive(Default)]
struct Pending {
    services: BTreeSet<ObjectKey>,
    /// Facts of the node or ranges of Services changed.
    everything: bool,
    /// The state of the kernel's tables, which may have to be made again.
    tables: TableDoubt,
}

/// The certainty that the kernel's tables are ours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum TableDoubt {
    #[default]
    AsProgrammed,
    /// Make them again if they are not ours any more.
    Unknown,
    /// Make them again.
    Wrong,
}

impl Pending {
    fn doubt(&mut self, doubt: TableDoubt) {
        self.tables = self.tables.max(doubt);
    }
}

struct Shared {
    pending: Mutex<Pending>,
    wake: Notify,
    health: Arc<ProxyHealth>,
    families: Vec<IpFamily>,
}

impl Shared {
    fn note(&self, note: impl FnOnce(&mut Pending)) {
        note(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        let now = Timestamp::now();
        self.families.iter().for_each(|family| self.health.queued(*family, now));
        self.wake.notify_one();
    }

    fn take(&self) -> Pending {
        std::mem::take(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A running proxy. Its tasks belong to the scope it was started with; the rules stay when they end, so that Services
/// work while the proxy restarts.
pub struct Proxy {
    first_sync: watch::Receiver<Option<bool>>,
}

impl Proxy {
    /// Starts the proxy in the network namespace of the calling thread.
    pub fn start(
        config: ProxyConfig,
        client: kube::Client,
        scope: &Scope,
    ) -> Pin<Box<dyn Future<Output = Result<Self, ProxyError>> + Send + '_>> {
        Box::pin(Self::start_parts(config, client, scope))
    }

    async fn start_parts(
        config: ProxyConfig,
        client: kube::Client,
        scope: &Scope,
    ) -> Result<Self, ProxyError> {
        let health = Arc::new(ProxyHealth::new(config.sync_period * 2));
        let metrics = Arc::new(Metrics::default());
        listen(&config, &health, &metrics, scope).await?;
        let addresses = crate::config::node_addresses().await?;
        let own = OwnGenerations::default();
        let mut monitor = Monitor::open(&config.table, None, own.clone())?;
        if config.families.is_empty() {
            return Err(ProxyError::NoFamily);
        }
        let (layouts, name) = (config.layouts(&addresses), config.table.clone());
        let tables = Lent::new(move || {
            let open = |layout: &LayoutConfig| {
                let table = Table::open(layout.family, &name, None, own.clone())?.for_purpose(PURPOSE);
                Ok(FamilyProxy::new(layout.clone(), table))
            };
            layouts.iter().map(open).collect()
        })?;
        let shared = Arc::new(Shared {
            pending: Mutex::default(),
            wake: Notify::new(),
            health: Arc::clone(&health),
            families: config.families.clone(),
        });
        let sources = Sources::start(&client, &config.node_name, &shared, scope);
        let health_addresses = config.health_check_addresses(&addresses);
        let worker = Worker {
            services_health: ServiceHealth::new(health_addresses, Arc::clone(&health), scope),
            events: Events::start(client, scope),
            shared: Arc::clone(&shared),
            tables,
            flows: BTreeMap::new(),
            served: HashMap::new(),
            service_cidrs: Vec::new(),
            node: NodeFacts { name: config.node_name.clone(), zone: String::new() },
            metrics,
            sources,
            config,
        };
        let (done, first_sync) = watch::channel(None);
        scope.spawn(async move {
            loop {
                let doubt = match monitor.changed().await {
                    Change::Foreign => {
                        tracing::warn!(
                            "somebody else changed the nftables table of Services; making it again"
                        );
                        TableDoubt::Wrong
                    }
                    // Notices were lost, perhaps those of our own large transaction.
                    Change::Unknown => TableDoubt::Unknown,
                };
                shared.note(|pending| pending.doubt(doubt));
                tokio::time::sleep(HEAL_PERIOD).await;
            }
        });
        scope.spawn(worker.run(done));
        Ok(Self { first_sync })
    }

    /// Waits until the proxy has sent all Services that existed at the start to the kernel, and returns
    /// true if the kernel took them. A proxy that fails tries again.
    pub async fn first_sync(&self) -> bool {
        let mut first = self.first_sync.clone();
        first.wait_for(Option::is_some).await.is_ok_and(|synced| *synced == Some(true))
    }
}

/// Removes the tables of a proxy that does not run any more.
pub async fn remove_tables(table: &str, families: &[IpFamily]) -> Result<(), KernelError> {
    let (name, families) = (table.to_owned(), families.to_vec());
    let work = move || {
        families
            .iter()
            .try_for_each(|family| Table::open(*family, &name, None, OwnGenerations::default())?.remove())
    };
    tokio::task::spawn_blocking(work).await.unwrap_or(Ok(()))
}

/// The informers.
struct Sources {
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    nodes: Informer<Node>,
    cidrs: Informer<ServiceCIDR>,
}

impl Sources {
    fn start(client: &kube::Client, node: &str, shared: &Arc<Shared>, scope: &Scope) -> Self {
        let informers = Informers::new(client.clone(), scope.clone());
        let sources = Self {
            services: informers.get_selected(ListSelector {
                labels: Some(SERVICE_LABELS.into()),
                fields: Some(SERVICE_FIELDS.into()),
            }),
            slices: informers.get_selected(ListSelector::labels(SLICE_LABELS)),
            nodes: informers.get_selected(ListSelector::fields(format!("metadata.name={node}"))),
            cidrs: informers.get(),
        };
        sources
            .slices
            .add_index(BY_SERVICE, |slice| service_of(slice).iter().map(ToString::to_string).collect());
        let note = Arc::clone(shared);
        sources.services.subscribe(move |change| {
            let key = ObjectKey::of(change.object().as_ref());
            note.note(|pending| {
                pending.services.insert(key);
            });
        });
        let note = Arc::clone(shared);
        sources.slices.subscribe(move |change| {
            if let Some(key) = service_of(change.object()) {
                note.note(|pending| {
                    pending.services.insert(key);
                });
            }
        });
        let note = Arc::clone(shared);
        sources.nodes.subscribe(move |change| {
            // A node's status changes all the time.
            let facts = |node: &Node| (zone(node), eligibility(Some(node)));
            if !matches!(change, ferrite_client::Change::Updated { old, new } if facts(old) == facts(new)) {
                note.note(|pending| pending.everything = true);
            }
        });
        let note = Arc::clone(shared);
        sources.cidrs.subscribe(move |_| note.note(|pending| pending.everything = true));
        sources
    }

    async fn synced(&self) {
        self.services.synced().await;
        self.slices.synced().await;
        self.nodes.synced().await;
        self.cidrs.synced().await;
    }

    fn slices_of(&self, service: &ObjectKey) -> Vec<Arc<EndpointSlice>> {
        self.slices.by_index(BY_SERVICE, &service.to_string())
    }
}

fn service_of(slice: &EndpointSlice) -> Option<ObjectKey> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME).filter(|name| !name.is_empty())?;
    Some(ObjectKey::new(slice.metadata.namespace.clone().unwrap_or_default(), name.clone()))
}

/// The task that synchronises.
struct Worker {
    config: ProxyConfig,
    shared: Arc<Shared>,
    sources: Sources,
    tables: Lent<Vec<FamilyProxy>>,
    /// Ports of UDP that changed since connection tracking was last cleaned.
    flows: BTreeMap<(Arc<ServicePortName>, IpFamily), ServedPort>,
    served: HashMap<ObjectKey, Arc<[ServedPort]>>,
    service_cidrs: Vec<Cidr>,
    node: NodeFacts,
    services_health: ServiceHealth,
    events: Events,
    metrics: Arc<Metrics>,
}

impl Worker {
    async fn run(mut self, first: watch::Sender<Option<bool>>) {
        self.sources.synced().await;
        let now = Timestamp::now();
        self.config.families.iter().for_each(|family| self.shared.health.updated(*family, now));
        self.shared.note(|pending| pending.everything = true);
        loop {
            tokio::select! {
                () = self.shared.wake.notified() => {}
                () = tokio::time::sleep(self.config.sync_period), if self.services_health.has_failed() => {}
            }
            self.services_health.retry();
            let started = Instant::now();
            match self.synchronise().await {
                Ok(()) => {
                    first.send_if_modified(|first| first.replace(true) != Some(true));
                    tokio::time::sleep_until(started + self.config.min_sync_period).await;
                }
                Err(error) => {
                    let cause =
                        std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                    tracing::error!(%error, cause, "Services are not up to date in the kernel; trying again");
                    self.config.families.iter().for_each(|family| self.metrics.failed(*family));
                    first.send_if_modified(|first| first.replace(false).is_none());
                    self.shared.note(|pending| pending.doubt(TableDoubt::Wrong));
                    tokio::time::sleep(self.config.sync_period.min(Duration::from_secs(5))).await;
                }
            }
        }
    }

    async fn synchronise(&mut self) -> Result<(), LentError> {
        let mut pending = self.shared.take();
        if self.tables.ensure()? {
            // New tables know no Service.
            self.served.clear();
            pending.everything = true;
        }
        if pending.everything {
            self.read_cluster();
            pending
                .services
                .extend(self.sources.services.list().iter().map(|service| ObjectKey::of(service.as_ref())));
            pending.services.extend(self.served.keys().cloned());
        }
        let mut updates = Vec::new();
        for key in pending.services {
            let ports = self.serve(&key);
            let before = self.served.get(&key).map(AsRef::as_ref);
            if before == Some(&*ports) || (before.is_none() && ports.is_empty()) {
                continue;
            }
            // A transaction may fail: the flows are looked at after the one that succeeds.
            for port in udp_changes(before, &ports) {
                let family = IpFamily::of(port.port.cluster_ip);
                self.flows.insert((Arc::clone(&port.name), family), port);
            }
            self.update_health(&key, &ports).await;
            updates.push((key.clone(), Arc::clone(&ports)));
            match ports.is_empty() {
                true => self.served.remove(&key),
                false => self.served.insert(key, ports),
            };
        }
        let synced = self.apply(updates, pending.tables).await?;
        let now = Timestamp::now();
        for (family, synced) in &synced {
            self.shared.health.updated(*family, now);
            self.metrics.synced(*family, synced, now);
        }
        let flows = std::mem::take(&mut self.flows).into_values();
        let flows: Vec<ServedPort> = flows.map(|port| self.at_its_own_addresses(port)).collect();
        if !flows.is_empty() {
            remove_stale_flows(flows).await;
        }
        Ok(())
    }

    /// Takes the facts that all Services depend on.
    fn read_cluster(&mut self) {
        let node = self.sources.nodes.get(&ObjectKey::cluster(self.config.node_name.clone()));
        self.node.zone = node.as_deref().map(zone).unwrap_or_default();
        self.shared.health.set_node(eligibility(node.as_deref()));
        let mut ranges: Vec<Cidr> = Vec::new();
        for cidr in self.sources.cidrs.list() {
            let texts = cidr.spec.as_ref().and_then(|spec| spec.cidrs.as_ref());
            ranges.extend(texts.into_iter().flatten().filter_map(|text| text.parse::<Cidr>().ok()));
        }
        self.service_cidrs = crate::model::without_overlap(ranges);
    }

    /// The ports of a Service in all families.
    fn serve(&self, key: &ObjectKey) -> Arc<[ServedPort]> {
        let Some(service) = self.sources.services.get(key) else { return Arc::default() };
        let slices = self.sources.slices_of(key);
        let ports =
            self.config.families.iter().flat_map(|family| {
                served_ports(&service, slices.iter().map(AsRef::as_ref), *family, &self.node)
            });
        ports.collect()
    }

    /// The port without the addresses that another Service has: flows to those are not its own.
    fn at_its_own_addresses(&self, mut served: ServedPort) -> ServedPort {
        let family = IpFamily::of(served.port.cluster_ip);
        let tables = self.tables.get().into_iter().flatten();
        let has = |ip: &IpAddr| {
            tables
                .clone()
                .find(|table| table.config().family == family)
                .is_some_and(|table| table.has_frontend(&served.name, *ip, served.port.port))
        };
        let of = |addresses: &[IpAddr]| addresses.iter().copied().filter(has).collect();
        let (external_ips, vips) = (of(&served.port.external_ips), of(&served.port.load_balancer_vips));
        served.port.external_ips = external_ips;
        served.port.load_balancer_vips = vips;
        served
    }

    async fn update_health(&mut self, key: &ObjectKey, ports: &[ServedPort]) {
        let port = ports.iter().find_map(|served| served.port.health_check_node_port);
        let wanted = port.map(|port| WantedHealthPort { port, local_endpoints: local_endpoints(ports) });
        let Err(error) = self.services_health.update(key, wanted).await else { return };
        let port = port.unwrap_or_default();
        let text = format!(
            "node {} failed to start healthcheck \"{key}\" on port {port}: {error}",
            self.config.node_name
        );
        tracing::error!("{text}");
        if let Some(service) = self.sources.services.get(key) {
            let recorder = self.events.recorder("kube-proxy", Some(&self.config.node_name));
            recorder.event_for(
                service.as_ref(),
                ferrite_client::EventType::Warning,
                "FailedToStartServiceHealthcheck",
                text,
            );
        }
    }

    /// Changes the tables on a thread that may block.
    async fn apply(
        &mut self,
        updates: Vec<(ObjectKey, Arc<[ServedPort]>)>,
        doubt: TableDoubt,
    ) -> Result<Vec<(IpFamily, Synced)>, LentError> {
        let service_cidrs = self.service_cidrs.clone();
        self.tables.work(move |tables| apply(tables, &updates, &service_cidrs, doubt)).await
    }
}

/// The ready endpoints on this node, by family. Ports of one endpoint count once.
fn local_endpoints(ports: &[ServedPort]) -> BTreeMap<IpFamily, usize> {
    let mut local: BTreeMap<IpFamily, BTreeSet<IpAddr>> = BTreeMap::new();
    for served in ports {
        let own = local.entry(IpFamily::of(served.port.cluster_ip)).or_default();
        own.extend(served.local_ready.iter().map(|endpoint| endpoint.ip));
    }
    local.into_iter().map(|(family, own)| (family, own.len())).collect()
}

/// Away from the async workers: the kernel lists all that it tracks.
async fn remove_stale_flows(ports: Vec<ServedPort>) {
    let remove = move || conntrack::remove_stale(ports.iter(), None);
    if let Ok(Err(error)) = tokio::task::spawn_blocking(remove).await {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        tracing::warn!(%error, cause, "UDP clients may stay with endpoints that are gone");
    }
}

fn apply(
    tables: &mut [FamilyProxy],
    updates: &[(ObjectKey, Arc<[ServedPort]>)],
    service_cidrs: &[Cidr],
    doubt: TableDoubt,
) -> Result<Vec<(IpFamily, Synced)>, KernelError> {
    let mut done = Vec::new();
    for table in tables.iter_mut() {
        table.set_config(LayoutConfig { service_cidrs: service_cidrs.to_vec(), ..table.config().clone() });
        for (key, ports) in updates {
            table.update(&key.namespace, &key.name, ports);
        }
        let wrong = match doubt {
            TableDoubt::AsProgrammed => false,
            TableDoubt::Unknown => !table.table_is_ours()?,
            TableDoubt::Wrong => true,
        };
        if wrong {
            table.invalidate();
        }
    }
    for table in tables {
        done.push((table.config().family, table.sync()?));
    }
    Ok(done)
}

/// Ports of UDP whose serving endpoints or addresses changed: flows may be stale.
fn udp_changes(before: Option<&[ServedPort]>, after: &[ServedPort]) -> Vec<ServedPort> {
    let udp = after.iter().filter(|served| served.port.protocol == Protocol::Udp);
    let changed = udp.filter(|served| {
        let old = before.into_iter().flatten().find(|old| old.name == served.name && old.port == served.port);
        old.is_none_or(|old| old.serving != served.serving)
    });
    changed.cloned().collect()
}

fn zone(node: &Node) -> String {
    node.metadata.labels.as_ref().and_then(|labels| labels.get(ZONE)).cloned().unwrap_or_default()
}

fn eligibility(node: Option<&Node>) -> NodeEligibility {
    let Some(node) = node else { return NodeEligibility::Ineligible };
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    let leaving = taints.into_iter().flatten().any(|taint| taint.key == TO_BE_DELETED);
    match node.metadata.deletion_timestamp.is_some() || leaving {
        true => NodeEligibility::Ineligible,
        false => NodeEligibility::Eligible,
    }
}
