//! The inputs that every controller gets.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Controller, Events, Informers, RateLimits, Scope};
use ferrite_component::{FeatureGates, Pages};
use ferrite_pki::TokenSigner;
use jiff::SignedDuration;
use kube::Client;

use crate::{AutoscalingConfig, EvictionRates, NodeCertificates, NodeCidrs, Signers};
use crate::{endpoints, queues};

/// Settings of the controller manager.
#[derive(Debug, Clone)]
pub struct Config {
    /// PEM bundle published to every namespace as `kube-root-ca.crt`; nothing is published without it.
    pub root_ca: Option<String>,
    /// Features that are on or off.
    pub feature_gates: FeatureGates,
    /// Sign certificates that were approved; without them none are.
    pub signers: Signers,
    /// The lifetime of certificates whose requests do not ask for less.
    pub signing_duration: Duration,
    /// Signs tokens that are kept in secrets; without it there are none.
    pub tokens: Option<Arc<TokenSigner>>,
    /// The ranges that pod CIDRs of nodes are cut from; without them nodes get none.
    pub node_cidrs: Option<NodeCidrs>,
    /// Rules for approving node certificates beyond upstream's; without them nothing more is approved.
    pub node_certificates: Option<NodeCertificates>,
    /// Time without a heartbeat after which a Ready node counts as lost.
    pub node_monitor_grace: Duration,
    /// The same for a node that has never reported.
    pub node_startup_grace: Duration,
    /// Finished pods beyond this many are removed, oldest first; 0 keeps all.
    pub terminated_pod_threshold: usize,
    /// A ServiceCIDR without addresses loses its finalizer this long after its deletion: by then all
    /// servers know of it.
    pub service_range_grace: Duration,
    pub autoscaling: AutoscalingConfig,
    /// Tokens in secrets that nobody used for so long are marked invalid, and deleted after as long again.
    pub legacy_token_period: SignedDuration,
    /// The pages that controllers add to the manager's port, if it has one.
    pub pages: Pages,
    /// The rates at which silent nodes lose their pods.
    pub evictions: EvictionRates,
    /// Endpoints in one EndpointSlice at most.
    pub endpoints_per_slice: usize,
    /// Addresses of one subset of Endpoints that are mirrored at most.
    pub mirrored_endpoints_per_subset: usize,
    /// Claims without a volume are handed to the provisioners of their classes.
    pub dynamic_provisioning: bool,
    /// A volume is taken from a node that does not answer for long.
    pub force_detach: bool,
    /// Quotas are counted anew so often even if nothing changed.
    pub quota_resync: Duration,
    /// Keys of a controller worked on at once, by its name, where that is not `workers`.
    pub concurrency: BTreeMap<&'static str, usize>,
    /// Keys of one controller worked on at once.
    pub workers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            root_ca: None,
            feature_gates: FeatureGates::default(),
            signers: Signers::default(),
            signing_duration: Duration::from_secs(365 * 24 * 3600),
            tokens: None,
            node_cidrs: None,
            node_certificates: None,
            node_monitor_grace: Duration::from_secs(50),
            node_startup_grace: Duration::from_secs(60),
            terminated_pod_threshold: 12500,
            service_range_grace: Duration::from_secs(10),
            autoscaling: AutoscalingConfig::default(),
            legacy_token_period: SignedDuration::from_hours(365 * 24),
            pages: Pages::default(),
            evictions: EvictionRates::default(),
            endpoints_per_slice: endpoints::SLICE_CAPACITY,
            mirrored_endpoints_per_subset: endpoints::MIRROR_CAPACITY,
            dynamic_provisioning: true,
            force_detach: true,
            quota_resync: Duration::from_secs(300),
            concurrency: BTreeMap::new(),
            workers: 5,
        }
    }
}

/// The user that a controller acts as, with the rights of upstream's bootstrap policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// The manager itself: it reads everything and writes events and tokens.
    Manager,
    /// A service account of this name in `kube-system`.
    ServiceAccount(&'static str),
    /// The API server, for controllers that upstream's server runs itself.
    Server,
}

/// Makes a client that acts as somebody.
pub type Clients = Arc<dyn Fn(Identity) -> Client + Send + Sync>;

/// The API, the shared copies of it, and the scope that owns every task. Cloning is cheap.
#[derive(Clone)]
pub struct Context {
    /// Acts as the controller.
    pub client: Client,
    /// Reads as the manager, which may list and watch everything. For writing there is `client`.
    pub reader: Client,
    clients: Clients,
    pub informers: Informers,
    pub events: Events,
    pub scope: Scope,
    pub config: Arc<Config>,
    /// The names whose workers were looked up.
    #[cfg(test)]
    asked: Arc<std::sync::Mutex<Vec<String>>>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Context {
    /// Informers and events that live as long as `scope`. They are the manager's, shared by all controllers.
    pub fn new(clients: Clients, scope: Scope, config: Config) -> Self {
        let informers = Informers::new(clients(Identity::Manager), scope.clone());
        Self::with_informers(clients, informers, scope, config)
    }

    /// The same with informers that others read through, too. They may outlive `scope`.
    pub fn with_informers(clients: Clients, informers: Informers, scope: Scope, config: Config) -> Self {
        let client = clients(Identity::Manager);
        Self {
            informers,
            events: Events::start(client.clone(), &scope),
            reader: client.clone(),
            client,
            clients,
            scope,
            config: Arc::new(config),
            #[cfg(test)]
            asked: Arc::default(),
        }
    }

    /// A controller to declare, with the configured number of workers.
    pub(crate) fn controller(&self, name: &'static str) -> Controller {
        self.declared(name, self.workers(name), RateLimits::default())
    }

    /// A controller to declare, whose metrics have upstream's names.
    pub(crate) fn declared<T>(&self, name: &'static str, workers: usize, limits: RateLimits) -> Controller<T>
    where
        T: Clone + Eq + Hash + Display + Send + Sync + 'static,
    {
        Controller::with_queue_name(name, queues::name_of(name), workers, &self.scope, limits)
    }

    /// The number of workers that a controller has.
    pub(crate) fn workers(&self, name: &str) -> usize {
        #[cfg(test)]
        self.asked.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(name.to_owned());
        self.config.concurrency.get(name).copied().unwrap_or(self.config.workers).max(1)
    }

    /// The same for a controller that acts as `identity`.
    pub(crate) fn acting_as(&self, identity: Identity) -> Self {
        Self { client: (self.clients)(identity), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CONTROLLERS;
    use kube::client::Body;
    use std::convert::Infallible;

    /// Controllers with a number of workers of their own, and those that a setting starts which is not set here.
    const SILENT: &[&str] = &[
        "horizontal-pod-autoscaler-controller",
        "serviceaccount-token-controller",
        "node-certificate-approving-controller",
        "certificatesigningrequest-signing-controller",
        "kube-apiserver-serving-clustertrustbundle-publisher-controller",
        "root-ca-certificate-publisher-controller",
        "persistentvolume-binder-controller",
        "node-ipam-controller",
    ];

    #[tokio::test]
    async fn workers_are_looked_up_by_the_name_of_the_controller() {
        let service = tower::service_fn(|_: http::Request<Body>| {
            std::future::pending::<Result<http::Response<Body>, Infallible>>()
        });
        let client = Client::new(service, "default");
        let scope = Scope::new();
        let context = Context::new(Arc::new(move |_| client.clone()), scope.clone(), Config::default());
        let mut silent = Vec::new();
        for entry in CONTROLLERS {
            (entry.start)(&context.acting_as(entry.identity));
            let asked = std::mem::take(&mut *context.asked.lock().unwrap());
            // The second queue of the controller of disruptions.
            for name in asked.iter().filter(|name| *name != "disruption-controller-stale-conditions") {
                assert_eq!(name, entry.name);
            }
            if asked.is_empty() {
                silent.push(entry.name);
            }
        }
        assert_eq!(silent, SILENT);
        scope.cancel();
    }
}
