//! The server as a part of a cluster: informers feed the index, sockets are answered.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use ferrite_client::{Api, Change, Informer, ListSelector, Scope};
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use tokio::sync::watch;

use crate::answer::{BadDomain, Zone};
use crate::forward::{Forwarder, Patience};
use crate::resolvers::{Resolvers, StubDomain};
use crate::server::{Listen, Server, Sockets};

/// Settings of a DNS server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The cluster's domain, usually `cluster.local`.
    pub domain: String,
    pub listen: Vec<Listen>,
    /// Where clients on this node are answered if possible. Another cluster of this machine may have taken the address.
    pub listen_if_free: Vec<Listen>,
    /// The node's resolver configuration, which is read again when it changes.
    pub resolv_conf: PathBuf,
    pub stub_domains: Vec<StubDomain>,
    pub patience: Patience,
}

/// Why a DNS server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cluster domain")]
    Domain(#[from] BadDomain),
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// A DNS server that listens. Until it is fed, names of the cluster that it does not know fail instead of being denied.
#[derive(Debug)]
pub struct Dns {
    server: Arc<Server>,
    addresses: Vec<SocketAddr>,
    synced: watch::Sender<bool>,
}

impl Dns {
    /// Listens; the tasks belong to `scope`.
    pub fn start(config: Config, scope: &Scope) -> Result<Self, StartError> {
        let mut sockets = Vec::new();
        for listen in &config.listen {
            let fail = |source| StartError::Listen { address: listen.address, source };
            sockets.push(Sockets::bind(listen).map_err(fail)?);
        }
        for listen in &config.listen_if_free {
            match Sockets::bind(listen) {
                Ok(bound) => sockets.push(bound),
                Err(error) => tracing::warn!(address = %listen.address, %error, "DNS does not listen there"),
            }
        }
        let mut addresses: Vec<SocketAddr> = sockets.iter().filter_map(|s| s.address().ok()).collect();
        let mut own: Vec<IpAddr> = config.listen.iter().map(|listen| listen.address.ip()).collect();
        own.dedup();
        let zone = Zone::new(&config.domain, own.clone())?;
        // Loopback addresses of tests have other ports and are no loop.
        own.retain(|ip| !ip.is_loopback());
        let resolvers = Resolvers::new(config.resolv_conf, config.stub_domains, own);
        let server = Arc::new(Server::new(zone, Forwarder::new(resolvers, config.patience)));
        for bound in sockets {
            server.serve(bound, scope);
        }
        addresses.dedup();
        Ok(Self { server, addresses, synced: watch::Sender::new(false) })
    }

    /// Where the server listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Keeps the index as the API has it. The client needs to list and watch Services, EndpointSlices and Namespaces.
    pub async fn feed(&self, client: Client, scope: &Scope) {
        let everything = ListSelector::everything;
        let services = Informer::start_slim(Api::all(client.clone()), everything(), scope, slim_service);
        let slices = Informer::start_slim(Api::all(client.clone()), everything(), scope, slim_slice);
        let namespaces = Informer::start_slim(Api::all(client), everything(), scope, slim_namespace);
        let server = Arc::clone(&self.server);
        services.subscribe(move |change: &Change<Service>| {
            server.update(serial(), |index| match change {
                Change::Added(new) | Change::Updated { new, .. } => index.apply_service(new),
                Change::Deleted(old) => index.remove_service(old),
            });
        });
        let server = Arc::clone(&self.server);
        slices.subscribe(move |change: &Change<EndpointSlice>| {
            server.update(serial(), |index| match change {
                Change::Added(new) => index.apply_slice(new),
                Change::Updated { old, new } => {
                    index.remove_slice(old);
                    index.apply_slice(new);
                }
                Change::Deleted(old) => index.remove_slice(old),
            });
        });
        let server = Arc::clone(&self.server);
        namespaces.subscribe(move |change: &Change<Namespace>| {
            let name = change.object().metadata.name.as_deref().unwrap_or_default();
            server.update(serial(), |index| match change {
                Change::Added(_) | Change::Updated { .. } => index.apply_namespace(name),
                Change::Deleted(_) => index.remove_namespace(name),
            });
        });
        services.synced().await;
        slices.synced().await;
        namespaces.synced().await;
        self.server.set_synced();
        self.synced.send_replace(true);
    }

    /// Waits until the index holds everything.
    pub async fn synced(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.synced.subscribe().wait_for(|synced| *synced).await;
    }
}

/// The zone's serial number is the time of its last change, as CoreDNS's.
fn serial() -> u32 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u32::try_from(now.as_secs() & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

fn slim_meta(meta: &mut k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) {
    meta.managed_fields = None;
    meta.annotations = None;
    meta.owner_references = None;
    meta.finalizers = None;
    meta.generate_name = None;
}

/// Informers keep only the fields that the index needs.
fn slim_service(service: &mut Service) {
    slim_meta(&mut service.metadata);
    service.metadata.labels = None;
    service.status = None;
    if let Some(spec) = &mut service.spec {
        spec.selector = None;
        spec.external_ips = None;
        spec.load_balancer_source_ranges = None;
        spec.session_affinity_config = None;
    }
}

fn slim_slice(slice: &mut EndpointSlice) {
    slim_meta(&mut slice.metadata);
    for endpoint in slice.endpoints.iter_mut().flatten() {
        endpoint.target_ref = None;
        endpoint.deprecated_topology = None;
        endpoint.node_name = None;
        endpoint.zone = None;
        endpoint.hints = None;
    }
}

fn slim_namespace(namespace: &mut Namespace) {
    slim_meta(&mut namespace.metadata);
    namespace.metadata.labels = None;
    namespace.spec = None;
    namespace.status = None;
}
