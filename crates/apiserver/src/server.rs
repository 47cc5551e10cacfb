//! The server: every request, whichever door it comes through, goes the same way.

use crate::admission::{AdmissionPlugins, Chain};
use crate::auth::{self, FrontProxies, RequestHeader, User};
use crate::call::Call;
use crate::components::{Component, Hosted};
use crate::connections::{ConnectionLimits, Slot};
use crate::http::{self, Answer, Body, BoxError};
use crate::metrics::{Metrics, RequestKind};
use crate::negotiate::{self, Format, PLAIN_JSON, Representation, Shape};
use crate::options::{Query, go_duration};
use crate::registry::{Registry, ServiceAllocator, Table};
use crate::request::{self, Health, Route, Target, Verb};
use crate::subresource::token::Rejected;
use crate::trim::Trim;
use crate::{
    bootstrap, compress, discovery, encode, health, metrics, openapi, profiling, subresource, verbs, version,
};
use ::http::{HeaderName, HeaderValue, Request, header};
use bytes::Bytes;
use ferrite_api::resource::Resource;
use ferrite_api::{Cidr, Status};
use ferrite_pki::TokenSigner;
use ferrite_store::{Revision, Store};
use futures_util::FutureExt;
use http_body_util::BodyExt;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const AUDIT_ID: HeaderName = HeaderName::from_static("audit-id");
/// Connections have this long to send what is left of their answers once no request is in flight.
const FLUSH: Duration = Duration::from_secs(2);

/// How requests are taken in and how the server ends. The default is upstream's.
#[derive(Debug, Clone)]
pub struct Serving {
    /// Requests that read, served at once; zero is no limit. Streams do not count.
    pub max_requests_inflight: usize,
    /// Requests that write, served at once; zero is no limit.
    pub max_mutating_requests_inflight: usize,
    /// A request that is not a stream ends after this.
    pub request_timeout: Duration,
    /// Watches without a timeout of their own end after this to twice this.
    pub min_request_timeout: Duration,
    /// How often, between 0 and 1, a request on HTTP/2 makes its client connect anew: with several servers behind
    /// a balancer, clients spread out again.
    pub goaway_chance: f64,
    /// Requests served at once on one connection of HTTP/2.
    pub http2_max_streams: u32,
    /// A connection on which nothing is going on for so long is ended.
    pub idle_timeout: Duration,
    /// Whether `/debug/pprof/` answers.
    pub profiling: bool,
    /// How many connections there may be.
    pub connections: ConnectionLimits,
    /// The server goes on serving for this long after it has said that it is not ready any more.
    pub shutdown_delay: Duration,
}

impl Default for Serving {
    fn default() -> Self {
        Self {
            max_requests_inflight: 400,
            max_mutating_requests_inflight: 200,
            request_timeout: Duration::from_secs(60),
            min_request_timeout: Duration::from_secs(1800),
            goaway_chance: 0.0,
            http2_max_streams: 100,
            idle_timeout: Duration::from_secs(90),
            profiling: false,
            connections: ConnectionLimits::default(),
            shutdown_delay: Duration::ZERO,
        }
    }
}

/// How a server is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where clients reach this server; told in discovery and in the `kubernetes` Service's endpoints.
    pub advertise: SocketAddr,
    /// Addresses of Services: one range, or one of each family. The first is of the primary family.
    pub service_ranges: Vec<Cidr>,
    pub node_ports: RangeInclusive<u16>,
    /// How the server shows itself to kubelets. Without it, logs and exec are refused.
    pub kubelet_client: Option<Arc<rustls::ClientConfig>>,
    /// Versions and resources turned on or off, as upstream's `--runtime-config`: `api/all`, `apps/v1`,
    /// `apps/v1/deployments`.
    pub runtime_config: BTreeMap<String, bool>,
    /// Who tokens of service accounts say that they are from, and whom they are for.
    pub service_account_issuer: String,
    /// The key that signs them, as PEM. Without it there are no tokens.
    pub service_account_key: Option<String>,
    /// The authority of client certificates, as PEM: published for servers that check them too.
    pub client_ca: Option<String>,
    /// Front proxies that authenticate users for this server. Published, too.
    pub request_header: Option<RequestHeader>,
    /// Whether tokens that admission mounts into pods live for a year instead of an hour, for clients that never read
    /// them again.
    pub extend_token_expiration: bool,
    /// Events are kept this long.
    pub event_ttl_seconds: u64,
    pub serving: Serving,
    pub admission: AdmissionPlugins,
    /// Whether writers of objects on which nothing of ours acts are warned: on where the cluster is meant to be whole.
    pub warns_of_inert: bool,
    /// Whether secrets of type `bootstrap.kubernetes.io/token` let their bearers in.
    pub bootstrap_tokens: bool,
}

impl Config {
    /// A server for clients at `advertise`, with upstream's defaults and nothing that needs a key.
    pub fn new(advertise: SocketAddr) -> Self {
        Self {
            advertise,
            service_ranges: vec![Cidr { address: Ipv4Addr::new(10, 0, 0, 0).into(), bits: 16 }],
            node_ports: 30000..=32767,
            kubelet_client: None,
            runtime_config: BTreeMap::new(),
            service_account_issuer: "https://kubernetes.default.svc".into(),
            client_ca: None,
            request_header: None,
            service_account_key: None,
            extend_token_expiration: true,
            event_ttl_seconds: 3600,
            serving: Serving::default(),
            admission: AdmissionPlugins::default(),
            warns_of_inert: false,
            bootstrap_tokens: false,
        }
    }

    /// Whether a resource's version is on: by `--runtime-config`, the narrower key first, else by default.
    fn serves(&self, resource: &ferrite_api::resource::Resource) -> bool {
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
    pub(crate) openapi: openapi::Documents,
    pub(crate) tokens: Option<TokenSigner>,
    pub(crate) front_proxies: Option<FrontProxies>,
    pub(crate) metrics: Metrics,
    pub(crate) hosted: Hosted,
    trim: Trim,
    ready: AtomicBool,
    /// Set as soon as the server is told to stop.
    draining: AtomicBool,
    stop: CancellationToken,
    abort: CancellationToken,
    tasks: TaskTracker,
}

impl ApiServer {
    /// Starts a server on a store and brings what every cluster has into being.
    pub async fn start(store: Arc<Store>, config: Config) -> Result<Arc<Self>, Status> {
        let fresh = store.usage().revision == Revision::default();
        let served = ferrite_api::kinds::built_in().into_iter().filter(|r| config.serves(r)).collect();
        let table = Arc::new(Table::new(served));
        let ranges = config.service_ranges.iter().map(|range| range.masked()).collect();
        let allocator = ServiceAllocator::new(ranges, config.node_ports.clone());
        let admission = Chain::new(&config.admission).map_err(Status::internal)?;
        let mut registry =
            Registry::new(store, Arc::clone(&table), allocator, config.event_ttl_seconds, admission);
        registry.warns_of_inert = config.warns_of_inert;
        let tokens = match &config.service_account_key {
            Some(pem) => {
                Some(TokenSigner::new(pem, &config.service_account_issuer).map_err(Status::internal)?)
            }
            None => None,
        };
        let front_proxies = config.request_header.as_ref().map(FrontProxies::new).transpose();
        let server = Arc::new(Self {
            tokens,
            front_proxies: front_proxies.map_err(Status::internal)?,
            hosted: Hosted::default(),
            trim: Trim::default(),
            metrics: Metrics::new(
                config.serving.max_requests_inflight,
                config.serving.max_mutating_requests_inflight,
            ),
            registry,
            config,
            openapi: openapi::Documents::default(),
            ready: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        bootstrap::run(&server).await?;
        if fresh {
            // Nobody has seen a version from before there was anything. As upstream: it is too old for a watch.
            let store = &server.registry.store;
            store.compact(store.usage().revision).map_err(Status::internal)?;
        }
        if let Some(mut definitions) = crate::extensions::Follower::new(&server) {
            definitions.load();
            server.spawn(definitions.run());
        }
        let expiring = Arc::clone(&server);
        server.spawn(async move { bootstrap::expire_leases(&expiring).await });
        let keeping = Arc::clone(&server);
        server.spawn(async move { bootstrap::keep(&keeping).await });
        server.ready.store(true, Ordering::Release);
        Ok(server)
    }

    /// How the server is set up.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire) && !self.draining.load(Ordering::Acquire)
    }

    /// Ends the server as upstream ends: it stops being ready, serves on for the shutdown delay, then takes no more
    /// connections and ends watches, lets the requests in flight finish, and waits for all that.
    pub async fn shutdown(&self) {
        self.draining.store(true, Ordering::Release);
        tokio::time::sleep(self.config.serving.shutdown_delay).await;
        self.stop.cancel();
        self.tasks.close();
        let finish = async {
            self.metrics.idle().await;
            let _ = tokio::time::timeout(FLUSH, self.tasks.wait()).await;
        };
        let _ = tokio::time::timeout(self.config.serving.request_timeout, finish).await;
        self.abort.cancel();
        self.tasks.wait().await;
    }

    /// Ends when the server stops: no more connections, and streams end.
    pub(crate) fn stopping(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Ends when the server will not wait for anybody any longer.
    pub(crate) fn aborting(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Runs a task that belongs to the server: [`ApiServer::shutdown`] waits for it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
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

    /// A door for a component in this process: no socket and no TLS, but the same identity, authorization and
    /// admission as for everybody else.
    pub fn door(self: &Arc<Self>, user: User) -> Door {
        // Who writes is told by the user agent; components in this process have none but their name.
        let agent = HeaderValue::from_str(user.name.strip_prefix("system:").unwrap_or(&user.name)).ok();
        Door { server: Arc::clone(self), user: Arc::new(user), agent }
    }

    /// Answers a request. Never panics and never fails: every problem is an API Status.
    pub async fn handle(self: Arc<Self>, user: Option<Arc<User>>, request: Request<Body>) -> Answer {
        let audit_id = request.headers().get(&AUDIT_ID).cloned().or_else(new_audit_id);
        if self.trim.note() {
            let server = Arc::clone(&self);
            self.spawn(async move {
                tokio::select! {
                    () = server.trim.after_burst() => {}
                    () = server.stop.cancelled() => {}
                }
            });
        }
        let mut answer = self.counted(user, request).await;
        let headers = answer.headers_mut();
        if let Some(id) = audit_id {
            headers.insert(AUDIT_ID, id);
        }
        headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache, private"));
        answer
    }

    /// Takes a request in unless there are too many, and counts it.
    async fn counted(self: Arc<Self>, user: Option<Arc<User>>, request: Request<Body>) -> Answer {
        let started = tokio::time::Instant::now();
        let method = request.method().clone();
        let uri = request.uri().clone();
        let asked = Asked::new(request.method(), &uri);
        let kind =
            RequestKind::of(&method, &asked.route, asked.verb, &self.registry.tables.current(), uri.query());
        let compress = compress::wanted(request.headers());
        let body = http_body::Body::size_hint(request.body()).exact();
        let privileged = user.as_ref().is_some_and(|u| u.is_master());
        let Some(_running) = self.metrics.enter(&kind, privileged) else {
            self.metrics.terminated(&kind, 429);
            return too_many();
        };
        let long = kind.is_long_running();
        let serving = &self.config.serving;
        let answer = match deadline(started, serving.request_timeout, &asked.query, long) {
            Err(status) => error(&status, PLAIN_JSON),
            Ok(deadline) => {
                let work = AssertUnwindSafe(Arc::clone(&self).route(user, request, asked, deadline));
                let work = work.catch_unwind();
                let handled = match long {
                    true => work.await,
                    false => tokio::time::timeout_at(deadline, work).await.unwrap_or_else(|_| {
                        self.metrics.terminated(&kind, 504);
                        let status = Status::timeout("request did not complete within the allotted timeout");
                        Ok(Err((status, PLAIN_JSON)))
                    }),
                };
                match handled {
                    Ok(Ok(answer)) => answer,
                    Ok(Err((status, representation))) => error(&status, representation),
                    Err(_) => {
                        tracing::error!(%method, path = uri.path(), "a request handler panicked");
                        let bug = "the server has a bug; the request was not completed";
                        error(&Status::internal(bug), PLAIN_JSON)
                    }
                }
            }
        };
        let code = answer.status().as_u16();
        let length = http_body::Body::size_hint(answer.body()).exact();
        self.metrics.record(&kind, code, started.elapsed(), length, body);
        tracing::debug!(%method, path = uri.path(), code, elapsed = ?started.elapsed(), "request");
        match (long, compress) {
            (true, _) => {
                let streaming = Metrics::streaming(&self, &kind);
                answer.map(|body| http::held(body, streaming))
            }
            (false, true) => compress::gzip(answer),
            (false, false) => answer,
        }
    }

    async fn route(
        self: Arc<Self>,
        user: Option<Arc<User>>,
        request: Request<Body>,
        asked: Asked,
        deadline: tokio::time::Instant,
    ) -> Result<Answer, (Status, Representation)> {
        let (mut parts, body) = request.into_parts();
        if asked.route == Route::Incomplete {
            // Found out before anybody asks who the client is.
            return Ok(incomplete(parts.uri.path()));
        }
        let accept = parts.headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let accept = accept.to_owned();
        let for_errors = negotiate::for_errors(&accept);
        let plain = |status: Status| (status, for_errors);
        let asked_at = std::time::Instant::now();
        let user = self.authenticate(user, &parts);
        self.metrics.access.authenticated(user.as_deref().ok(), asked_at.elapsed());
        let user = user.map_err(plain)?;
        if let Some(connection) = parts.extensions.get::<Arc<Slot>>().filter(|_| !user.is_anonymous()) {
            connection.belongs_to(&user.name);
        }
        auth::forget_front_proxy(&mut parts.headers, self.front_proxies.as_ref());
        let Asked { route, query, verb } = asked;
        // A look at one object is done where it stands; whatever is more makes room for its neighbours on the
        // connection first.
        if !matches!((&route, verb), (Route::Resource(_), Some(Verb::Get))) {
            tokio::task::yield_now().await;
        }
        let asked_at = std::time::Instant::now();
        let user = if user.is_master() && !auth::impersonates(&parts.headers) {
            self.metrics.access.authorized(true, asked_at.elapsed());
            user
        } else {
            let view = self.registry.view();
            let action = auth::Action::of(&route, verb, &parts.method, parts.uri.path(), &query);
            let rbac = &self.registry.rbac;
            let user = auth::impersonate(rbac, &view, user, &parts.headers, &action).map_err(plain)?;
            let asked_at = std::time::Instant::now();
            let allowed = auth::authorize(rbac, &view, &user, &action);
            self.metrics.access.authorized(allowed.is_ok(), asked_at.elapsed());
            allowed.map_err(plain)?;
            auth::forget_impersonation(&mut parts.headers);
            user
        };
        let not_allowed = || (Status::not_allowed(), for_errors);
        let Route::Resource(target) = &route else {
            // A version that is not there is missed whatever is to be done with it.
            let is_known = match &route {
                Route::Resources { group, version } => {
                    self.registry.table.rows().iter().any(|r| r.group == *group && r.version == *version)
                }
                _ => true,
            };
            if is_known && !route.takes(&parts.method, verb, false) {
                return Err(not_allowed());
            }
            let answer = self.document(&route, &parts, &query, &accept).await;
            return answer.map_err(|s| (s, for_errors));
        };
        let table = self.registry.tables.current();
        let Some(resource) = table.find(&target.group, &target.version, &target.resource) else {
            // As upstream: whoever asks for a group that nobody has meets no part of the server.
            let known = table.rows().iter().any(|row| row.group == target.group && row.custom.is_none());
            return if known { Err((Status::no_such_path(), for_errors)) } else { Ok(page_not_found()) };
        };
        // A namespaced object needs its namespace, and a cluster-wide one has none.
        if target.namespace.is_some() != resource.is_namespaced()
            && (target.name.is_some() || target.namespace.is_some())
        {
            if resource.custom.is_some() {
                return Ok(page_not_found());
            }
            return Err((Status::no_such_path(), for_errors));
        }
        // A part that the kind does not have is missed whatever is to be done with it.
        if let Some(part) = &target.subresource
            && (resource.subresource(part).is_none() || (part != "proxy" && !target.rest.is_empty()))
        {
            if resource.custom.is_some() {
                let name = target.name.as_deref().unwrap_or_default();
                return Err((Status::not_found(&resource.group, &resource.plural, name), for_errors));
            }
            return Err((Status::no_such_path(), for_errors));
        }
        let watchable = target.subresource.is_none() && resource.verbs.contains(&"watch");
        if (target.subresource.is_none() && !is_served(resource, target))
            || (target.watch_prefix && !watchable)
        {
            return Err((Status::no_such_path(), for_errors));
        }
        if !route.takes(&parts.method, verb, resource.is_namespaced()) {
            return Err(not_allowed());
        }
        let Route::Resource(target) = route else { return Err(not_allowed()) };
        // Whoever may do everything may also ask the far side of a proxy for its options.
        let asks_options =
            parts.method == ::http::Method::OPTIONS && target.subresource.as_deref() == Some("proxy");
        let Some(verb) = verb.or(asks_options.then_some(Verb::Get)) else { return Err(not_allowed()) };
        check_segments(&target).map_err(plain)?;
        // Streams to a kubelet or a backend are in the far side's words.
        let connects =
            matches!(target.subresource.as_deref(), Some("exec" | "attach" | "portforward" | "proxy"));
        let representation = match connects {
            true => for_errors,
            false => {
                let part = target.subresource.as_deref();
                let lists = matches!(verb, Verb::List | Verb::Watch);
                if part != Some("log") && (verb != Verb::Patch || crate::patch::is_patch(&parts.headers)) {
                    negotiate::check_route(&accept, lists).map_err(plain)?;
                }
                let has_table = has_table(resource, part);
                let found = negotiate::accept(&accept, |format, shape| match shape {
                    Shape::Table { .. } => has_table && format != Format::Protobuf,
                    shape => shape != Shape::AggregatedDiscovery,
                });
                match (found, verb) {
                    (Some(found), _) => found,
                    (None, Verb::Watch) => return Err(plain(Status::not_acceptable(negotiate::WATCHED))),
                    (None, _) => return Err(plain(Status::not_acceptable(negotiate::ACCEPTED))),
                }
            }
        };
        if resource.custom.is_some()
            && representation.format == Format::Protobuf
            && representation.shape == Shape::AsIs
            && target.subresource.as_deref() != Some("scale")
        {
            let why = "object *unstructured.Unstructured does not implement the protobuf marshalling interface and cannot be encoded to a protobuf message";
            return Err(plain(Status::new(406, "NotAcceptable", why)));
        }
        let call = Call {
            server: Arc::clone(&self),
            user,
            resource: Arc::clone(resource),
            target,
            verb,
            query,
            parts,
            body: std::sync::Mutex::new(Some(body)),
            representation,
            deadline,
            warnings: Vec::new(),
            admission: crate::options::Warnings::default(),
        };
        verbs::handle(call).await.map_err(|s| (s, for_errors))
    }

    /// The user of a request: a certificate's, else a token's, else the anonymous one. A certificate that was refused
    /// leaves only the token, as upstream.
    fn authenticate(
        &self,
        user: Option<Arc<User>>,
        parts: &::http::request::Parts,
    ) -> Result<Arc<User>, Status> {
        if let Some(user) = user {
            return Ok(user);
        }
        let Some(token) = parts.headers.get(header::AUTHORIZATION).and_then(auth::bearer_token) else {
            return match parts.extensions.get::<auth::RefusedCertificate>() {
                Some(auth::RefusedCertificate) => Err(Status::unauthorized()),
                None => Ok(Arc::new(User::anonymous())),
            };
        };
        let issuer = self.config.service_account_issuer.as_str();
        let known = self.token_user(token, &[issuer]).ok();
        known.map(|(user, _)| Arc::new(user)).ok_or_else(Status::unauthorized)
    }

    /// Those of `wanted` that are this server. A token that names no audience is meant for it alone.
    pub(crate) fn own_audiences<'a>(&self, wanted: &[&'a str]) -> Vec<&'a str> {
        wanted.iter().copied().filter(|audience| *audience == self.config.service_account_issuer).collect()
    }

    /// Whose a bearer token is, and for which of `wanted` it is meant: an account's, or one that lets a node in.
    pub(crate) fn token_user<'a>(
        &self,
        token: &str,
        wanted: &[&'a str],
    ) -> Result<(User, Vec<&'a str>), Rejected> {
        let bootstrap = || {
            let view = self.registry.view();
            let user = auth::bootstrap_token::user_of(&view, token, jiff::Timestamp::now());
            let user = user.filter(|_| self.config.bootstrap_tokens)?;
            Some(self.own_audiences(wanted)).filter(|own| !own.is_empty()).map(|own| (user, own))
        };
        match subresource::token::user_of(self, token, wanted) {
            Err(Rejected::Unknown) => bootstrap().ok_or(Rejected::Unknown),
            known => known,
        }
    }

    /// Looks at what the asked checks are about, and at nothing else: a check of the store may take a while.
    async fn health(&self, endpoint: Health, check: Option<&str>, query: &Query) -> Answer {
        let store = match health::asks_store(check, query) {
            true => self.registry.store.check().await.map_err(|error| error.to_string()),
            false => Ok(()),
        };
        if let Err(error) = &store {
            tracing::warn!(%error, endpoint = endpoint.as_str(), "the store is not well");
        }
        let state = health::State {
            started: self.ready.load(Ordering::Acquire),
            draining: self.draining.load(Ordering::Acquire),
            store,
        };
        health::answer(endpoint, check, query, &state)
    }

    /// Everything that is not a resource.
    async fn document(
        &self,
        route: &Route,
        parts: &::http::request::Parts,
        query: &Query,
        accept: &str,
    ) -> Result<Answer, Status> {
        let table = &*self.registry.tables.current();
        let schema_of = |resource: &ferrite_api::resource::Resource| {
            crate::extensions::openapi_schema(&self.registry, resource)
        };
        let unacceptable = || Status::not_acceptable(negotiate::ACCEPTED);
        let plain = || negotiate::accept(accept, |_, _| false).ok_or_else(unacceptable);
        let address = self.config.advertise.to_string();
        match route {
            Route::Version => {
                negotiate::check_only(accept, "application/json")?;
                Ok(http::json(200, &version::info()))
            }
            Route::Health { endpoint, check } => Ok(self.health(*endpoint, check.as_deref(), query).await),
            Route::CoreVersions | Route::Groups => {
                let core = *route == Route::CoreVersions;
                if core {
                    negotiate::check_route(accept, false)?;
                }
                // As upstream: with a slash at the end it is another handler, which knows no shapes.
                let aggregates = core || !parts.uri.path().ends_with('/');
                let as_ =
                    negotiate::accept(accept, |_, shape| aggregates && shape == Shape::AggregatedDiscovery)
                        .ok_or_else(unacceptable)?;
                if as_.shape == Shape::AggregatedDiscovery {
                    let mut answer = encode::value(200, &discovery::aggregated(table, core), as_)?;
                    let content_type = discovery::aggregated_type(as_.format);
                    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
                    return Ok(answer);
                }
                let value =
                    if core { discovery::core_versions(&address) } else { discovery::group_list(table) };
                encode::value(200, &value, as_)
            }
            Route::Group(name) => {
                let value = discovery::group(table, name);
                value.map_or_else(|| Ok(page_not_found()), |value| encode::value(200, &value, plain()?))
            }
            Route::Resources { group, version } => {
                if discovery::group(table, group).is_none() && !group.is_empty() {
                    return Ok(page_not_found());
                }
                let listed = discovery::resources(table, group, version);
                let built_in = table.rows().iter().any(|row| row.group == *group && row.custom.is_none());
                if listed.is_none() && !built_in {
                    return Ok(page_not_found());
                }
                let value = listed.ok_or_else(Status::no_such_path)?;
                negotiate::check_route(accept, false)?;
                encode::value(200, &value, plain()?)
            }
            Route::OpenApiV2 => Ok(self.openapi.v2(table, &schema_of, &parts.headers)),
            Route::OpenApiV3 => Ok(self.openapi.root(table, &schema_of)),
            Route::OpenApiV3Document(path) => {
                Ok(self.openapi.document(table, &schema_of, path, &parts.headers, query))
            }
            Route::Metrics => {
                let mut text = self.metrics.text();
                // Queues and clients of this process, and the gates.
                text.push_str(&ferrite_component::metrics::registry().text());
                self.registry.times.put(&mut text);
                self.registry.admission.times.put(&mut text);
                let usage = self.registry.store.usage();
                metrics::put_storage(&mut text, table, &self.registry.view().snapshot, &usage);
                Ok(http::answer(200, metrics::CONTENT_TYPE, text))
            }
            Route::Profile(profile) if self.config.serving.profiling => Ok(profiling::answer(profile)),
            Route::Root => Ok(http::json(200, &ferrite_json::json!({"paths": root_paths(table)}))),
            Route::OpenIdConfiguration => Ok(self
                .tokens
                .as_ref()
                .map_or_else(page_not_found, |t| http::json(200, &t.configuration(&address)))),
            Route::JsonWebKeys => {
                negotiate::check_only(accept, "application/jwk-set+json")?;
                Ok(self.tokens.as_ref().map_or_else(page_not_found, |t| {
                    http::answer(200, "application/jwk-set+json", t.keys().to_string())
                }))
            }
            Route::Profile(_) | Route::Unknown | Route::Incomplete | Route::Resource(_) => {
                Ok(page_not_found())
            }
        }
    }
}

/// Whether objects of a kind, or of one of its parts, can be told as a table: upstream's reviews and the other
/// questions that are answered and not stored have no columns.
fn has_table(resource: &ferrite_api::resource::Resource, part: Option<&str>) -> bool {
    let asks = crate::reviews::is_review(&resource.group)
        || (resource.group.is_empty() && resource.plural == "bindings");
    !asks && !matches!(part, Some("eviction" | "binding" | "token"))
}

/// Refuses names that no object can have because no path can name them.
fn check_segments(target: &request::Target) -> Result<(), Status> {
    let refuse = |what: &str, name: &str| {
        let why = match name {
            "." | ".." => format!("may not be '{name}'"),
            name if name.contains('/') => "may not contain '/'".to_owned(),
            name if name.contains('%') => "may not contain '%'".to_owned(),
            _ => return Ok(()),
        };
        Err(Status::bad_request(format!("{what} parameter invalid: {name:?}: {why}")))
    };
    match (target.namespace.as_deref(), target.name.as_deref()) {
        (_, Some("")) => return Err(Status::bad_request("name must be provided")),
        (Some(""), Some(_)) => return Err(Status::bad_request("Namespace parameter required.")),
        _ => {}
    }
    refuse("Namespace", target.namespace.as_deref().unwrap_or_default())?;
    refuse("Name", target.name.as_deref().unwrap_or_default())
}

/// What a request asks for, read before anything is done about it.
struct Asked {
    route: Route,
    query: Query,
    /// None for a method we do not know.
    verb: Option<Verb>,
}

impl Asked {
    fn new(method: &::http::Method, uri: &::http::Uri) -> Self {
        let route = request::route(uri.path());
        let query = Query::parse(uri.query());
        let verb = match &route {
            Route::Resource(target) => {
                let watch = target.watch_prefix || (query.flag("watch") && target.subresource.is_none());
                let has_name = target.name.is_some();
                Verb::of(method, has_name, watch && (!has_name || target.watch_prefix))
            }
            _ => Verb::of(method, true, false),
        };
        Self { route, query, verb }
    }
}

fn new_audit_id() -> Option<HeaderValue> {
    HeaderValue::from_str(crate::ids::random().hyphenated().encode_lower(&mut uuid::Uuid::encode_buffer()))
        .ok()
}

/// When a request has to be done: after its own `timeout`, but not after the server's. What streams say is not read.
fn deadline(
    started: tokio::time::Instant,
    longest: Duration,
    query: &Query,
    long_running: bool,
) -> Result<tokio::time::Instant, Status> {
    let asked = match query.get("timeout").filter(|t| !t.is_empty() && !long_running) {
        None => None,
        Some(text) => Some(go_duration(text).map_err(|why| {
            Status::bad_request(format!("invalid timeout specified in the request URL - {why}"))
        })?),
    };
    // Zero asks for nothing in particular, as upstream.
    let asked = asked.filter(|asked| !asked.is_zero());
    Ok(started + asked.map_or(longest, |asked| asked.min(longest)))
}

/// As upstream: plain text, said before anything is known about the request.
fn too_many() -> Answer {
    let mut answer = http::text(429, "Too many requests, please try again later.\n");
    answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

fn root_paths(table: &Table) -> Vec<String> {
    let mut paths: Vec<String> = [
        "/.well-known/openid-configuration",
        "/api",
        "/api/v1",
        "/apis",
        "/apis/",
        "/flagz",
        "/metrics",
        "/metrics/slis",
        "/openapi/v2",
        "/openapi/v3",
        "/openapi/v3/",
        "/openid/v1/jwks",
        "/statusz",
        "/version",
    ]
    .map(str::to_owned)
    .to_vec();
    for endpoint in [Health::Healthz, Health::Livez, Health::Readyz] {
        paths.push(format!("/{}", endpoint.as_str()));
        paths.extend(health::checks(endpoint).iter().map(|c| format!("/{}/{c}", endpoint.as_str())));
    }
    for resource in table.rows().iter().filter(|r| !r.group.is_empty()) {
        paths.push(format!("/apis/{}", resource.group));
        paths.push(format!("/apis/{}/{}", resource.group, resource.version));
    }
    paths.sort();
    paths.dedup();
    paths
}

/// Whether anything can be done at the path of a resource: at one object, at the objects of a namespace, or at those of
/// all namespaces.
fn is_served(resource: &Resource, target: &Target) -> bool {
    let verbs: &[&str] = match (&target.name, &target.namespace) {
        (Some(_), _) => &["get", "update", "patch", "delete", "watch"],
        (None, None) if resource.is_namespaced() => &["list", "watch"],
        (None, _) => &["list", "watch", "create", "deletecollection"],
    };
    resource.verbs.iter().any(|verb| verbs.contains(verb))
}

/// As upstream: a path that names no resource where one must stand is a failure of the server.
fn incomplete(path: &str) -> Answer {
    let why = "failed to create RequestInfo: unable to determine kind and namespace from url,";
    let mut answer = http::text(500, format!("Internal Server Error: {path:?}: {why} {path}\n"));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

fn page_not_found() -> Answer {
    http::text(404, "404 page not found\n")
}

/// A Status in the representation of the request, or JSON where it cannot be had.
pub(crate) fn error(status: &Status, as_: Representation) -> Answer {
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

/// The in-process client side of a server, with a fixed identity.
#[derive(Clone)]
pub struct Door {
    server: Arc<ApiServer>,
    user: Arc<User>,
    agent: Option<HeaderValue>,
}

impl Door {
    /// The same door for a component that is known by another name than its user's.
    pub fn with_agent(self, agent: &'static str) -> Self {
        Self { agent: Some(HeaderValue::from_static(agent)), ..self }
    }
}

impl<B> tower::Service<Request<B>> for Door
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Answer;
    type Error = BoxError;
    type Future = futures_util::future::BoxFuture<'static, Result<Answer, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let server = Arc::clone(&self.server);
        let user = Arc::clone(&self.user);
        let mut request = request.map(|body| body.map_err(Into::into).boxed_unsync());
        if let Some(agent) = self.agent.clone() {
            request.headers_mut().entry(header::USER_AGENT).or_insert(agent);
        }
        async move { Ok(server.handle(Some(user), request).await) }.boxed()
    }
}
