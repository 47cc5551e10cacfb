//! The server: every request, over the network or from this process, goes the same way.

use crate::admission::{self, AdmissionPlugins, Chain};
use crate::aggregation::{self, Aggregator, MountedGroup};
use crate::audit::{self, AuditConfig, Auditor};
use crate::auth::{
    self, Authorization, JwtAuthentication, JwtAuthenticator, LegacyTokens, RequestHeader, StaticTokens,
    TokenWebhook, TokenWebhookAuthenticator, User,
};
use crate::certificates::ActiveCertificates;
use crate::components::{Component, Hosted};
use crate::connections::ConnectionLimits;
use crate::endpoints::{self, EndpointReconciler};
use crate::filters::{self, CorsOrigins, InFlight, InProcess, TransportSecurity};
use crate::flowcontrol::{self, FlowControl};
use crate::health::HealthCheck;
use crate::http::{self, Body, BoxError, Response};
use crate::metrics::Metrics;
use crate::negotiate::Representation;
use crate::outbound::Outbound;
use crate::registry::{Registry, ResourceMap, ServiceAllocator};
use crate::traffic::Traffic;
use crate::tunnel::Tunnels;
use crate::{bootstrap, encode, identity_lease, openapi, subresource};
use ::http::{HeaderValue, Request, header};
use bytes::Bytes;
use ferrite_api::{Cidr, Status};
use ferrite_component::FeatureGates;
use ferrite_pki::{Identity, TokenSigner, VerifyingKey};
use ferrite_store::{Revision, Store};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections have this long to send the rest of their responses once no request is in flight.
const FLUSH: Duration = Duration::from_secs(2);

/// The server's limits for requests and its shutdown. The default is upstream's.
#[derive(Debug, Clone)]
pub struct Serving {
    /// Requests that read, served at once; zero is no limit. Streams do not count.
    pub max_requests_inflight: usize,
    /// Requests that write, served at once; zero is no limit.
    pub max_mutating_requests_inflight: usize,
    /// True if FlowSchemas and PriorityLevelConfigurations divide the requests that may be served at once.
    pub flow_control: bool,
    /// A request that is not a stream ends after this.
    pub request_timeout: Duration,
    /// Watches without a timeout of their own end after this to twice this.
    pub min_request_timeout: Duration,
    /// Chance, between 0 and 1, that a request on HTTP/2 makes its client connect anew: with several
    /// servers behind a balancer, clients spread out again.
    pub goaway_chance: f64,
    /// Requests served at once on one connection of HTTP/2.
    pub http2_max_streams: u32,
    /// A connection on which nothing is going on for so long is ended.
    pub idle_timeout: Duration,
    /// Origins whose pages may read responses.
    pub cors_origins: CorsOrigins,
    /// The directives for browsers to use TLS only.
    pub transport_security: TransportSecurity,
    /// True if `/debug/pprof/` is served.
    pub profiling: bool,
    /// Limits for the number of connections.
    pub connections: ConnectionLimits,
    /// The server goes on serving for this long after it has said that it is not ready any more.
    pub shutdown_delay: Duration,
}

impl Default for Serving {
    fn default() -> Self {
        Self {
            max_requests_inflight: 400,
            max_mutating_requests_inflight: 200,
            flow_control: true,
            request_timeout: Duration::from_secs(60),
            min_request_timeout: Duration::from_secs(1800),
            goaway_chance: 0.0,
            http2_max_streams: 100,
            idle_timeout: Duration::from_secs(90),
            cors_origins: CorsOrigins::default(),
            transport_security: TransportSecurity::default(),
            profiling: false,
            connections: ConnectionLimits::default(),
            shutdown_delay: Duration::ZERO,
        }
    }
}

/// The settings of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address at which clients reach this server; published in discovery and in the `kubernetes` Service's
    /// endpoints.
    pub advertise: SocketAddr,
    /// Addresses of Services: one range, or one of each family. The first is of the primary family.
    pub service_ranges: Vec<Cidr>,
    pub node_ports: RangeInclusive<u16>,
    /// Addresses of pods: one range, or one of each family. Without them, pods are reached by routes and not through the
    /// tunnels of agents.
    pub pod_ranges: Vec<Cidr>,
    /// The server's client certificate for kubelets. Without it, logs and exec are refused.
    pub kubelet_client: Option<Arc<rustls::ClientConfig>>,
    /// Versions and resources turned on or off, as upstream's `--runtime-config`: `api/all`, `apps/v1`,
    /// `apps/v1/deployments`.
    pub runtime_config: BTreeMap<String, bool>,
    /// Features that are on or off.
    pub feature_gates: FeatureGates,
    /// The issuer of service account tokens, and their audience.
    pub service_account_issuer: String,
    /// The key that signs them, as PEM. Without it there are no tokens.
    pub service_account_key: Option<String>,
    /// Other keys and issuers whose tokens are accepted.
    pub other_token_keys: Vec<VerifyingKey>,
    pub other_issuers: Vec<String>,
    /// The audiences that stand for this server; the issuer when empty.
    pub api_audiences: Vec<String>,
    /// The longest life of a token that somebody asks for.
    pub max_token_seconds: Option<i64>,
    /// Where the keys that verify tokens are found; this server when it is not said.
    pub keys_url: Option<String>,
    /// Checks of `/healthz` beside those that every server has.
    pub health_checks: Vec<HealthCheck>,
    /// Users by tokens of foreign issuers.
    pub jwt: JwtAuthentication,
    /// A webhook that knows the users of tokens which nothing else knows.
    pub token_webhook: Option<TokenWebhook>,
    /// Users by tokens from a file.
    pub static_tokens: StaticTokens,
    /// True if requests without credentials are those of `system:anonymous`; else they are refused.
    pub anonymous_auth: bool,
    /// The authorizers that are asked, in their order.
    pub authorization: Authorization,
    /// Types of nodes' addresses, the one to use first.
    pub kubelet_addresses: Vec<String>,
    /// The authority of client certificates, as PEM: published for servers that check them too.
    pub client_ca: Option<String>,
    /// Front proxies that authenticate users for this server. Published, too.
    pub request_header: Option<RequestHeader>,
    /// The server's client certificate for extension API servers. Without it, they cannot know the user of
    /// a request.
    pub proxy_client: Option<Identity>,
    /// True if tokens that admission mounts into pods live for a year instead of an hour, for clients that
    /// never read them again.
    pub extend_token_expiration: bool,
    /// Events are kept this long.
    pub event_ttl_seconds: u64,
    pub serving: Serving,
    pub admission: AdmissionPlugins,
    /// True if writers of objects on which nothing of ours acts get a warning: on where the cluster is
    /// meant to be whole.
    pub warns_of_inert: bool,
    /// Resources (their plurals) of that kind on which an optional part of this cluster acts.
    pub acted_on: &'static [&'static str],
    /// Groups that this process serves without storage.
    pub mounted: Vec<Arc<dyn MountedGroup>>,
    /// True if secrets of type `bootstrap.kubernetes.io/token` authenticate their bearers.
    pub bootstrap_tokens: bool,
    pub endpoint_reconciler: EndpointReconciler,
    /// The name of this machine, as the server's Lease has it. Without a name there is no Lease.
    pub host_name: String,
    /// The host in addresses of this server that clients see; the advertised address when empty.
    pub external_host: String,
    /// The port that the Service `kubernetes` opens on every node; zero for none.
    pub kubernetes_service_node_port: u16,
    /// True if redirects of extension API servers are refused; else clients get them.
    pub rejects_redirects: bool,
    /// The audit settings. None turns auditing off.
    pub audit: Option<AuditConfig>,
}

impl Config {
    /// A server for clients at `advertise`, with upstream's defaults and nothing that needs a key.
    pub fn new(advertise: SocketAddr) -> Self {
        Self {
            advertise,
            service_ranges: vec![Cidr { address: Ipv4Addr::new(10, 0, 0, 0).into(), bits: 16 }],
            pod_ranges: Vec::new(),
            node_ports: 30000..=32767,
            kubelet_client: None,
            runtime_config: BTreeMap::new(),
            feature_gates: FeatureGates::default(),
            service_account_issuer: "https://kubernetes.default.svc".into(),
            client_ca: None,
            request_header: None,
            proxy_client: None,
            service_account_key: None,
            other_token_keys: Vec::new(),
            other_issuers: Vec::new(),
            api_audiences: Vec::new(),
            max_token_seconds: None,
            keys_url: None,
            health_checks: Vec::new(),
            jwt: JwtAuthentication::default(),
            token_webhook: None,
            static_tokens: StaticTokens::default(),
            anonymous_auth: true,
            authorization: auth::usual_modes().into(),
            kubelet_addresses: vec!["InternalIP".to_owned(), "ExternalIP".to_owned()],
            extend_token_expiration: true,
            event_ttl_seconds: 3600,
            serving: Serving::default(),
            admission: AdmissionPlugins::default(),
            warns_of_inert: false,
            acted_on: &[],
            mounted: Vec::new(),
            bootstrap_tokens: false,
            endpoint_reconciler: EndpointReconciler::default(),
            host_name: String::new(),
            external_host: String::new(),
            kubernetes_service_node_port: 0,
            rejects_redirects: true,
            audit: None,
        }
    }

    /// Host and port of this server as clients see them.
    pub(crate) fn external_address(&self) -> String {
        let host = self.external_host.as_str();
        match host.parse::<IpAddr>() {
            _ if host.is_empty() => self.advertise.to_string(),
            Ok(address) => SocketAddr::new(address, self.advertise.port()).to_string(),
            // The host may come with a port of its own.
            Err(_) if host.contains(':') => host.to_owned(),
            Err(_) => format!("{host}:{}", self.advertise.port()),
        }
    }

    /// The audiences that stand for this server.
    pub(crate) fn audiences(&self) -> Vec<&str> {
        match self.api_audiences.is_empty() {
            true => vec![&self.service_account_issuer],
            false => self.api_audiences.iter().map(String::as_str).collect(),
        }
    }

    /// Returns true if a resource's version is on: by `--runtime-config`, the narrower key first, else by
    /// default. A resource with a feature gate needs that, too.
    fn serves(&self, resource: &ferrite_api::resource::Resource) -> bool {
        if resource.hooks.gate.is_some_and(|gate| !self.feature_gates.enabled(gate)) {
            return false;
        }
        let version = resource.api_version();
        let keys = [
            format!("{version}/{}", resource.plural),
            version.clone(),
            match () {
                () if resource.version.contains("alpha") => "api/alpha".into(),
                () if resource.version.contains("beta") => "api/beta".into(),
                () => "api/ga".into(),
            },
            "api/all".into(),
        ];
        let told = keys.iter().find_map(|key| self.runtime_config.get(key).copied());
        told.unwrap_or(resource.on_by_default)
    }
}

pub struct ApiServer {
    pub(crate) registry: Registry,
    pub(crate) config: Config,
    pub(crate) aggregator: Aggregator,
    pub(crate) openapi: openapi::Documents,
    pub(crate) tokens: Option<TokenSigner>,
    pub(crate) legacy_tokens: LegacyTokens,
    pub(crate) jwt: JwtAuthenticator,
    pub(crate) token_webhook: Option<TokenWebhookAuthenticator>,
    pub(crate) certificates: RwLock<Arc<ActiveCertificates>>,
    pub(crate) metrics: Metrics,
    pub(crate) hosted: Hosted,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) traffic: Arc<Traffic>,
    /// None if all requests are served alike.
    pub(crate) flow_control: Option<Arc<FlowControl>>,
    pub(crate) audit: Option<Arc<Auditor>>,
    pub(crate) started: Timestamp,
    ready: AtomicBool,
    /// Set as soon as the server begins to shut down.
    draining: AtomicBool,
    stop: CancellationToken,
    abort: CancellationToken,
    tasks: TaskTracker,
    /// Calls to webhooks and other servers.
    pub(crate) outbound: Arc<Outbound>,
    /// Ways to kubelets and pods that agents have opened.
    pub(crate) tunnels: Arc<Tunnels>,
}

impl ApiServer {
    /// Starts a server on a store and makes the objects that every cluster has.
    pub fn start(store: Arc<Store>, config: Config) -> BoxFuture<'static, Result<Arc<Self>, Status>> {
        Box::pin(Self::start_parts(store, config))
    }

    async fn start_parts(store: Arc<Store>, config: Config) -> Result<Arc<Self>, Status> {
        let fresh = store.usage().revision == Revision::default();
        let served = ferrite_api::kinds::built_in().into_iter().filter(|r| config.serves(r)).collect();
        let table = Arc::new(ResourceMap::new(served));
        let ranges = config.service_ranges.iter().map(|range| range.masked()).collect();
        let allocator = ServiceAllocator::new(ranges, config.node_ports.clone());
        let tunnels = Arc::new(Tunnels::new(config.pod_ranges.iter().map(|range| range.masked()).collect()));
        let outbound = Arc::new(Outbound::new(Arc::clone(&tunnels)));
        let image_policy = admission::open_image_policy(&config.admission).await.map_err(|error| {
            Status::internal(format!("admission plugin ImagePolicyWebhook cannot be turned on: {error}"))
        })?;
        let admission =
            Chain::new(&config.admission, &outbound, image_policy.as_ref()).map_err(Status::internal)?;
        let mut registry = Registry::new(
            store,
            Arc::clone(&table),
            allocator,
            config.event_ttl_seconds,
            admission,
            config.authorization.modes.clone(),
            Arc::clone(&outbound),
        );
        registry.warns_of_inert = config.warns_of_inert;
        registry.acted_on = config.acted_on;
        registry.feature_gates = config.feature_gates.clone();
        let tokens = match &config.service_account_key {
            Some(pem) => {
                let signer = TokenSigner::new(pem, &config.service_account_issuer);
                let (keys, issuers) = (config.other_token_keys.clone(), config.other_issuers.clone());
                Some(signer.map_err(Status::internal)?.accepting(keys, issuers))
            }
            None => None,
        };
        let certificates = ActiveCertificates::of_config(&config).map_err(Status::internal)?;
        audit::register_metrics();
        let audit = config.audit.as_ref().map(Auditor::start).transpose();
        let audit = audit.map_err(|why| Status::internal(format!("cannot open the audit log: {why}")))?;
        let serving = &config.serving;
        let (reading, mutating) = (serving.max_requests_inflight, serving.max_mutating_requests_inflight);
        // Zero is no limit, and there is nothing to divide.
        let limited = serving.flow_control && reading > 0 && mutating > 0;
        let flow_control = limited.then(|| Arc::new(FlowControl::new(reading + mutating)));
        let server = Arc::new(Self {
            tokens,
            legacy_tokens: LegacyTokens::default(),
            jwt: JwtAuthenticator::new(&config.jwt),
            token_webhook: config.token_webhook.as_ref().map(TokenWebhookAuthenticator::new),
            certificates: RwLock::new(Arc::new(certificates)),
            audit,
            hosted: Hosted::default(),
            metrics: Metrics::default(),
            traffic: Arc::new(Traffic::new(config.serving.connections)),
            in_flight: match flow_control {
                Some(_) => InFlight::new(0, 0),
                None => InFlight::new(reading, mutating),
            },
            flow_control,
            registry,
            config,
            aggregator: Aggregator::default(),
            openapi: openapi::Documents::default(),
            started: Timestamp::now(),
            ready: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            tasks: TaskTracker::new(),
            outbound,
            tunnels,
        });
        bootstrap::run(&server).await?;
        if fresh {
            // Nobody has seen a version from before there was anything. As upstream: it is too old for a watch.
            let registry = &server.registry;
            registry.oldest_watch.store(registry.store.usage().revision.0, Ordering::Relaxed);
        }
        if let Some(mut definitions) = crate::extensions::Follower::new(&server) {
            definitions.load();
            server.spawn(definitions.run());
        }
        match aggregation::Follower::new(&server) {
            Some(services) => server.spawn(services.run()),
            None => server.aggregator.set_registered(),
        }
        if let Some(flow) = &server.flow_control {
            let (store, table) = (Arc::clone(&server.registry.store), Arc::clone(&server.registry.table));
            server.run_until_stopped(flowcontrol::Follower::new(Arc::clone(flow), store, table).run());
        }
        let expiring = Arc::clone(&server);
        server.spawn(async move { bootstrap::expire_leases(&expiring).await });
        let caching = Arc::clone(&server);
        server.run_until_stopped(async move {
            tokio::join!(caching.openapi.drop_unused(), caching.registry.drop_unused());
        });
        let noting = Arc::clone(&server);
        server.run_until_stopped(async move { noting.legacy_tokens.run(&noting).await });
        let asking = Arc::clone(&server);
        server.run_until_stopped(async move { asking.jwt.run(&asking).await });
        let reloading = Arc::clone(&server);
        server.run_until_stopped(async move { auth::reload_authorization(&reloading).await });
        let keeping = Arc::clone(&server);
        server.spawn(async move { bootstrap::keep(&keeping).await });
        if !server.config.host_name.is_empty() {
            let living = Arc::clone(&server);
            server.run_until_stopped(async move { identity_lease::run(&living).await });
        }
        server.ready.store(true, Ordering::Release);
        Ok(server)
    }

    /// The server's settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn is_ready(&self) -> bool {
        self.has_started() && !self.is_draining()
    }

    /// Ends the server as upstream ends: it stops being ready, serves on for the shutdown delay, then takes no more
    /// connections and ends watches, lets the requests in flight finish, and waits for all that.
    pub async fn shutdown(&self) {
        self.draining.store(true, Ordering::Release);
        endpoints::remove(self).await;
        tokio::time::sleep(self.config.serving.shutdown_delay).await;
        self.stop.cancel();
        self.tasks.close();
        if !self.config.host_name.is_empty() && self.registry.store.is_remote() {
            identity_lease::remove(self).await;
        }
        let finish = async {
            self.in_flight.idle().await;
            let _ = tokio::time::timeout(FLUSH, self.tasks.wait()).await;
        };
        let _ = tokio::time::timeout(self.config.serving.request_timeout, finish).await;
        self.abort.cancel();
        self.outbound.close().await;
        self.tasks.wait().await;
        // Last, so that the audit has the events of all others.
        if let Some(audit) = &self.audit {
            audit.stop().await;
        }
    }

    /// Ends when the server stops: no more connections, and streams end.
    pub(crate) fn stopping(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Ends when the server will not wait for anybody any longer.
    pub(crate) fn aborting(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Runs `task` until it ends or the server stops; [`ApiServer::shutdown`] waits for it.
    pub fn run_until_stopped(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopping = self.stopping();
        let task: BoxFuture<'static, ()> = Box::pin(task);
        self.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stopping.cancelled() => {}
            }
        });
    }

    /// Reads `path` of a node's kubelet, as this server: at most `limit` bytes. The caller limits the time.
    pub async fn read_kubelet(&self, node: &str, path: &str, limit: usize) -> Result<Bytes, Status> {
        subresource::read_kubelet(self, node, path, limit).await
    }

    /// Runs a task that belongs to the server: [`ApiServer::shutdown`] waits for it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let task: BoxFuture<'static, ()> = Box::pin(task);
        self.tasks.spawn(task);
    }

    /// Says that a component runs in this process, and how to find out whether it is well. Clients see it as a
    /// ComponentStatus.
    pub fn hosts(
        &self,
        component: Component,
        check: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) {
        self.hosted.add(component, Arc::new(check));
    }

    /// A client for a component in this process: no socket and no TLS, but the same identity, authorization and
    /// admission as for everybody else.
    pub fn in_process_client(self: &Arc<Self>, user: User) -> InProcessClient {
        // The user agent names the writer; components in this process have only their user name.
        let agent = HeaderValue::from_str(user.name.strip_prefix("system:").unwrap_or(&user.name)).ok();
        InProcessClient { server: Arc::clone(self), user: Arc::new(user), agent, guard: None }
    }

    /// Answers a request. Never panics and never fails: every problem is an API Status.
    pub async fn handle(self: Arc<Self>, user: Option<Arc<User>>, request: Request<Body>) -> Response {
        filters::handle(self, user, request).await
    }

    /// Returns true if all objects that a cluster always has were made.
    pub(crate) fn has_started(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Returns true if the server is shutting down.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

/// A Status in the representation of the request, or JSON if that is not possible.
pub(crate) fn error(status: &Status, as_: Representation) -> Response {
    let value = status.to_value();
    let mut answer =
        encode::value(status.code, &value, as_).unwrap_or_else(|_| http::json(status.code, &value));
    let retry = match &status.details {
        Some(details) => details.get("retryAfterSeconds").and_then(|s| s.as_u64()),
        None => (status.code == 429).then_some(1),
    };
    if let Some(seconds) = retry {
        answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    answer
}

/// Returns true if a client may still write.
pub type WriteGuard = Arc<dyn Fn() -> bool + Send + Sync>;

tokio::task_local! {
    /// The guard of the client whose request is served.
    static GUARD: WriteGuard;
}

/// Fails if the request's client may not write any more. Asked last before a change is committed: the process may
/// have been stopped since the request began.
pub(crate) fn check_guard() -> Result<(), Status> {
    match GUARD.try_with(|guard| guard()) {
        Ok(false) => Err(Status::unavailable("the client does not lead any more")),
        _ => Ok(()),
    }
}

/// The in-process client side of a server, with a fixed identity.
#[derive(Clone)]
pub struct InProcessClient {
    server: Arc<ApiServer>,
    user: Arc<User>,
    agent: Option<HeaderValue>,
    guard: Option<WriteGuard>,
}

impl InProcessClient {
    /// The same client for a leader: nothing is written once `guard` says no.
    pub fn guarded(self, guard: WriteGuard) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// The same client for a component that is known by another name than its user's.
    pub fn with_agent(self, agent: &'static str) -> Self {
        Self { agent: Some(HeaderValue::from_static(agent)), ..self }
    }
}

impl<B> tower::Service<Request<B>> for InProcessClient
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response;
    type Error = BoxError;
    type Future = futures_util::future::BoxFuture<'static, Result<Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let server = Arc::clone(&self.server);
        let user = Arc::clone(&self.user);
        let mut request = request.map(|body| body.map_err(Into::into).boxed_unsync());
        request.extensions_mut().insert(InProcess);
        if let Some(agent) = self.agent.clone() {
            request.headers_mut().entry(header::USER_AGENT).or_insert(agent);
        }
        let handled = async move { Ok(server.handle(Some(user), request).await) };
        match self.guard.clone() {
            Some(guard) => GUARD.scope(guard, handled).boxed(),
            None => handled.boxed(),
        }
    }
}
