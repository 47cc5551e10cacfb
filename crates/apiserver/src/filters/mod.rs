//! The filters that every request passes, in the order of [`CHAIN`], over the network and from inside the process.
//!
//! A filter is one file and one row. `before` runs on the way in: it adds to the [`Exchange`] or refuses the request.
//! `after` runs on the way out, in reverse order, for the filters whose `before` let the request pass. A row that
//! stands higher therefore sees the response of every row below it.

mod audit;
mod audit_id;
mod authentication;
mod authorization;
mod cache_control;
mod compression;
mod cors;
mod deadline;
mod flow_control;
mod hsts;
mod impersonation;
mod in_flight;
mod request_info;
mod request_metrics;
mod times;
mod traffic;

use crate::audit::Record;
use crate::auth::{Action, User};
use crate::dispatch;
use crate::flowcontrol::{Schema, Seat};
use crate::http::{Body, Response};
use crate::metrics::RequestKind;
use crate::negotiate::{self, PLAIN_JSON, Representation};
use crate::options::Query;
use crate::request::{self, Route, Verb};
use crate::server::{ApiServer, error};
use crate::traffic::Account;
use ::http::{HeaderValue, Method, Request, Uri, header, request::Parts};
use ferrite_api::Status;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::time::Instant;

pub use cors::{CorsOrigins, CorsOriginsError};
pub(crate) use flow_control::InProcess;
pub use hsts::{TransportSecurity, TransportSecurityError};
pub(crate) use in_flight::{InFlight, Place};

/// One step of the chain.
struct Filter {
    before: Before,
    after: fn(&Facts, Response) -> Response,
}

/// The end of a filter's wait.
type Wait<'a> = BoxFuture<'a, Result<(), Refusal>>;

/// A filter's part on the way in.
enum Before {
    AtOnce(fn(&mut Exchange) -> Result<(), Refusal>),
    /// Returns a future if the request has to wait.
    Waits(fn(&mut Exchange) -> Result<Option<Wait<'_>>, Refusal>),
}

impl Filter {
    const fn before(before: fn(&mut Exchange) -> Result<(), Refusal>) -> Self {
        Self { before: Before::AtOnce(before), after: |_, answer| answer }
    }

    const fn after(after: fn(&Facts, Response) -> Response) -> Self {
        Self { before: Before::AtOnce(|_| Ok(())), after }
    }

    const fn both(
        before: fn(&mut Exchange) -> Result<(), Refusal>,
        after: fn(&Facts, Response) -> Response,
    ) -> Self {
        Self { before: Before::AtOnce(before), after }
    }

    const fn waiting(
        before: fn(&mut Exchange) -> Result<Option<Wait<'_>>, Refusal>,
        after: fn(&Facts, Response) -> Response,
    ) -> Self {
        Self { before: Before::Waits(before), after }
    }
}

const CHAIN: &[Filter] = &[
    // Every response has an id for reports, whichever filter refused the request.
    Filter::both(audit_id::before, audit_id::after),
    Filter::after(cache_control::after),
    Filter::after(hsts::after),
    // A server with too much to do spends nothing more on a request.
    Filter::before(in_flight::before),
    // The filters below see the response before it is compressed.
    Filter::after(compression::after),
    // Requests are counted from here on, also those that a filter below refuses.
    Filter::after(request_metrics::after),
    Filter::before(request_info::before),
    // The filters below may refuse the request before its user is known.
    Filter::both(audit::arrived, audit::refused),
    Filter::before(deadline::before),
    // A browser's question about another origin shows no credentials.
    Filter::both(cors::before, cors::after),
    Filter::waiting(authentication::before, |_, answer| answer),
    // Users are told apart, and one that reads or sends nothing of what it began is refused before it costs more.
    Filter::both(traffic::before, traffic::after),
    // The audit tells who asks, not whom they impersonate, and sees every response from here on.
    Filter::waiting(audit::before, audit::after),
    // Authorization is about the user that the request is made as.
    Filter::waiting(impersonation::before, |_, answer| answer),
    // As upstream: also a request that will be forbidden takes its turn.
    Filter::waiting(flow_control::before, flow_control::after),
    Filter::waiting(authorization::before, |_, answer| answer),
];

/// A response that ends a request before it is dispatched.
pub(crate) enum Refusal {
    /// Encoded as the client accepts it.
    Status(Status),
    Response(Response),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// A request on its way in.
pub(crate) struct Exchange {
    pub facts: Facts,
    pub asked: Asked,
}

/// The part of a request that is known before it is dispatched and still needed afterwards.
pub(crate) struct Facts {
    pub server: Arc<ApiServer>,
    pub started: Instant,
    pub method: Method,
    pub uri: Uri,
    pub kind: RequestKind,
    pub audit_id: Option<HeaderValue>,
    pub accepts_gzip: bool,
    /// Length of the request's body, where it is known beforehand.
    pub body_length: Option<u64>,
    /// A request that is no stream ends then.
    pub deadline: Instant,
    /// Held until the response is made. None for streams.
    pub place: Option<Place>,
    pub flow_schema: Option<Arc<Schema>>,
    /// Held until the response is made, or a watch has begun.
    pub seat: Option<Arc<Seat>>,
    /// Where the bytes of the request and the response count.
    pub account: Option<Account>,
    /// The origin of the page that makes the request, if such pages may read the response.
    pub cors_origin: Option<HeaderValue>,
    /// None if the request is not audited. Handlers find it among the request's extensions.
    pub audit: Option<Arc<Record>>,
}

/// The request itself, consumed by its handler.
pub(crate) struct Asked {
    pub parts: Parts,
    pub body: Body,
    pub route: Route,
    pub query: Query,
    /// None for a method we do not know.
    pub verb: Option<Verb>,
    /// The user by certificate or of an in-process client; after authentication, always a user.
    pub user: Option<Arc<User>>,
    /// The seat of a write, which it gives up while its body is on the way.
    pub seat: Option<Arc<Seat>>,
}

impl Asked {
    pub fn accept(&self) -> &str {
        self.parts.headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default()
    }

    /// The representation of errors, from before the route is known to serve another one.
    pub fn for_errors(&self) -> Representation {
        negotiate::for_errors(self.accept())
    }

    /// The audit of the request, if it is audited.
    pub fn audit(&self) -> Option<&Arc<Record>> {
        self.parts.extensions.get()
    }

    /// The request in the words of authorization.
    pub fn action(&self) -> Action {
        Action::of(&self.route, self.verb, &self.parts.method, self.parts.uri.path(), &self.query)
    }
}

impl Exchange {
    fn new(server: Arc<ApiServer>, user: Option<Arc<User>>, request: Request<Body>) -> Self {
        let started = Instant::now();
        let (parts, body) = request.into_parts();
        let route = request::route(parts.uri.path());
        let query = Query::parse(parts.uri.query());
        let verb = verb_of(&parts.method, &route, &query);
        let table = server.registry.tables.current();
        let content_type = parts.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        let kind = RequestKind::of(&parts.method, &route, verb, &table, parts.uri.query(), content_type);
        Self {
            facts: Facts {
                kind,
                started,
                method: parts.method.clone(),
                uri: parts.uri.clone(),
                audit_id: None,
                accepts_gzip: compression::is_accepted(&parts.headers),
                body_length: http_body::Body::size_hint(&body).exact(),
                deadline: started,
                place: None,
                flow_schema: None,
                seat: None,
                account: None,
                cors_origin: None,
                audit: None,
                server,
            },
            asked: Asked { parts, body, route, query, verb, user, seat: None },
        }
    }
}

fn verb_of(method: &Method, route: &Route, query: &Query) -> Option<Verb> {
    match route {
        Route::Resource(target) => {
            // As upstream: such a path is about a watch whatever the method.
            if target.watch_prefix {
                return Some(Verb::Watch);
            }
            let has_name = target.name.is_some();
            Verb::of(method, has_name, query.flag("watch") && target.subresource.is_none() && !has_name)
        }
        _ => Verb::of(method, true, false),
    }
}

/// Takes a request through the chain to its handler, and the response back. Never panics and never fails: every
/// problem is an API Status.
pub(crate) async fn handle(
    server: Arc<ApiServer>,
    user: Option<Arc<User>>,
    request: Request<Body>,
) -> Response {
    let mut exchange = Exchange::new(server, user, request);
    let mut passed = 0;
    let admitted = AssertUnwindSafe(admit(&mut exchange, &mut passed)).catch_unwind().await;
    let for_errors = exchange.asked.for_errors();
    let Exchange { facts, asked } = exchange;
    let answer = match admitted {
        Ok(Ok(())) => dispatched(&facts, asked).await,
        Ok(Err(Refusal::Status(status))) => error(&status, for_errors),
        Ok(Err(Refusal::Response(answer))) => answer,
        Err(_) => bug(&facts),
    };
    let answer = CHAIN[..passed].iter().rev().fold(answer, |answer, filter| (filter.after)(&facts, answer));
    if let Some(record) = &facts.audit {
        record.written().await;
    }
    answer
}

/// Takes a request through the filters, and counts those that it passed.
async fn admit(exchange: &mut Exchange, passed: &mut usize) -> Result<(), Refusal> {
    for filter in CHAIN {
        match filter.before {
            Before::AtOnce(before) => before(exchange)?,
            Before::Waits(before) => {
                if let Some(wait) = before(exchange)? {
                    wait.await?;
                }
            }
        }
        *passed += 1;
    }
    Ok(())
}

/// Runs the handler of a request until its deadline.
async fn dispatched(facts: &Facts, asked: Asked) -> Response {
    let work = AssertUnwindSafe(dispatch::handle(Arc::clone(&facts.server), asked, facts.deadline));
    let work = work.catch_unwind();
    let handled = match facts.kind.is_long_running() {
        true => work.await,
        false => match tokio::time::timeout_at(facts.deadline, work).await {
            Ok(handled) => handled,
            Err(_) => {
                facts.server.metrics.terminated(&facts.kind, 504);
                let status = Status::timeout("request did not complete within the allotted timeout");
                return error(&status, PLAIN_JSON);
            }
        },
    };
    match handled {
        Ok(Ok(answer)) => answer,
        Ok(Err((status, representation))) => error(&status, representation),
        Err(_) => bug(facts),
    }
}

fn bug(facts: &Facts) -> Response {
    if let Some(record) = &facts.audit {
        record.panicked();
    }
    tracing::error!(method = %facts.method, path = facts.uri.path(), "a request handler panicked");
    error(&Status::internal("the server has a bug; the request was not completed"), PLAIN_JSON)
}
