//! What every controller is given.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Controller, Events, Informers, Scope};
use ferrite_pki::{Authority, TokenSigner};
use jiff::SignedDuration;
use kube::Client;

use crate::{AutoscalingConfig, NodeCertificates, NodeCidrs};

/// Settings of the controller manager.
#[derive(Debug, Clone)]
pub struct Config {
    /// PEM bundle published to every namespace as `kube-root-ca.crt`; nothing is published without it.
    pub root_ca: Option<String>,
    /// Signs certificates that were approved; without it none are.
    pub authority: Option<Arc<Authority>>,
    /// How long certificates last that are signed for others, at most.
    pub signing_duration: Duration,
    /// Signs tokens that are kept in secrets; without it there are none.
    pub tokens: Option<Arc<TokenSigner>>,
    /// The ranges that pod CIDRs of nodes are cut from; without them nodes get none.
    pub node_cidrs: Option<NodeCidrs>,
    /// What nodes may be certified as beyond upstream's rules; without it nothing more is approved.
    pub node_certificates: Option<NodeCertificates>,
    /// How long a node that was Ready may be silent before it is taken for lost.
    pub node_monitor_grace: Duration,
    /// The same for a node that has never reported.
    pub node_startup_grace: Duration,
    /// Finished pods beyond this many are removed, oldest first; 0 keeps all.
    pub terminated_pod_threshold: usize,
    /// A ServiceCIDR without addresses is let go so long after its deletion: all servers know of it by then.
    pub service_range_grace: Duration,
    pub autoscaling: AutoscalingConfig,
    /// Tokens in secrets that nobody used for so long are marked invalid, and deleted after as long again.
    pub legacy_token_period: SignedDuration,
    /// Keys of one controller worked on at once.
    pub workers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            root_ca: None,
            authority: None,
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
            workers: 5,
        }
    }
}

/// Who a controller acts as, with the rights that upstream's bootstrap policy gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// The manager itself: it reads everything and writes events and tokens.
    Manager,
    /// A service account of this name in `kube-system`.
    ServiceAccount(&'static str),
    /// The API server, for what upstream's server does itself.
    Server,
}

/// Makes a client that acts as somebody.
pub type Clients = Arc<dyn Fn(Identity) -> Client + Send + Sync>;

/// The API, the shared copies of it, and the scope that owns every task. Cloning is cheap.
#[derive(Clone)]
pub struct Context {
    /// Acts as the controller.
    pub client: Client,
    /// Reads as the manager does, who may list and watch everything. For writing there is `client`.
    pub reader: Client,
    clients: Clients,
    pub informers: Informers,
    pub events: Events,
    pub scope: Scope,
    pub config: Arc<Config>,
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
        }
    }

    /// A controller to declare, with the configured number of workers.
    pub(crate) fn controller(&self, name: &'static str) -> Controller {
        Controller::new(name, self.config.workers, &self.scope)
    }

    /// The same for a controller that acts as `identity`.
    pub(crate) fn acting_as(&self, identity: Identity) -> Self {
        Self { client: (self.clients)(identity), ..self.clone() }
    }
}
