//! The kubelet API on port 10250. The API server authenticates callers with a token, and authorizes every
//! caller.

mod auth;
mod checkpoint;
mod configz;
mod gate;
mod health;
mod log_query;
mod logs;
mod read_only;
mod running;
mod shares;
pub(crate) mod stats;
mod streaming;
mod system_logs;
mod zpages;

pub(crate) use health::{is_well, start as start_health};
pub(crate) use read_only::start as start_read_only;

use crate::config::Config;
use crate::pod::context::Context;
use auth::{Caller, Gatekeeper};
use bytes::Bytes;
use ferrite_client::Scope;
use ferrite_pki::ServerTls;
use gate::{Gate, Place, Stranger};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use jiff::Timestamp;
use shares::Shares;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// For a handshake, and for everything a caller says that may not use the API.
const STRANGER_LIMIT: Duration = Duration::from_secs(10);
/// Until a connection without a request is closed, as upstream.
const IDLE_LIMIT: Duration = Duration::from_secs(90);
/// The largest head of a request.
const MAX_HEADERS: usize = 64 * 1024;

/// Readers of logs of one namespace. Each has a connection for as long as it likes, and nobody may have them all.
const MAX_LOG_READERS: usize = gate::MAX_CALLERS / 8;

/// Areas that are closed without debugging handlers, as upstream.
const DEBUGGING: &[&str] =
    &["run", "exec", "attach", "portForward", "containerLogs", "runningpods", "debug", "logs"];

type Body = BoxBody<Bytes, io::Error>;
type Answer = Response<Body>;

pub(crate) struct Server {
    context: Arc<Context>,
    config: Arc<Config>,
    gatekeeper: Gatekeeper,
    started: Timestamp,
    scope: Scope,
    /// Logs that are being read, by namespace.
    log_readers: Shares,
}

/// Listens and serves until the scope ends. Returns the address it listens on.
pub(crate) async fn start(
    context: Arc<Context>,
    config: Arc<Config>,
    tls: watch::Receiver<Option<ServerTls>>,
    scope: &Scope,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(config.server_address).await?;
    let address = listener.local_addr()?;
    let gatekeeper = Gatekeeper::new(&config.node_name, config.access, context.client.clone());
    let server = Arc::new(Server {
        context,
        config,
        gatekeeper,
        started: Timestamp::now(),
        scope: scope.clone(),
        log_readers: Shares::new(MAX_LOG_READERS),
    });
    scope.spawn(accept(listener, tls, server));
    Ok(address)
}

async fn accept(listener: TcpListener, tls: watch::Receiver<Option<ServerTls>>, server: Arc<Server>) {
    let gate = Gate::default();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                tracing::warn!(error = %e, "could not accept a connection to the kubelet API");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // The cluster has not signed the certificate yet.
        let Some(tls) = tls.borrow().clone() else { continue };
        let (served, stranger) = (server.clone(), gate.enter(peer.ip()));
        server.scope.spawn(greet(stream, tls, served, stranger));
    }
}

/// Authenticates the caller and serves the call. A caller that is not authorized gets an error; until then
/// it has a time limit and can lose its place.
async fn greet(stream: TcpStream, tls: ServerTls, server: Arc<Server>, stranger: Stranger) {
    let _ = stream.set_nodelay(true);
    let handshake = tokio::time::timeout(STRANGER_LIMIT, TlsAcceptor::from(tls.config).accept(stream));
    let stream = tokio::select! {
        finished = handshake => match finished {
            Ok(Ok(stream)) => stream,
            _ => return,
        },
        () = stranger.evicted() => return,
    };
    let presented = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let caller = Caller::of(presented, &tls.clients, SystemTime::now());
    let place = Arc::new(Place::new(stranger));
    tokio::select! {
        () = serve(stream, server, caller, place.clone()) => {}
        () = place.lost(STRANGER_LIMIT) => {}
    }
}

async fn serve(stream: TlsStream<TcpStream>, server: Arc<Server>, caller: Option<Caller>, place: Arc<Place>) {
    let caller = Arc::new(caller);
    let service = service_fn(move |request: Request<Incoming>| {
        let (server, caller, place) = (server.clone(), caller.clone(), place.clone());
        async move {
            let (method, path) = (request.method(), request.uri().path());
            let checked =
                server.gatekeeper.check(caller.as_ref().as_ref(), request.headers(), method, path).await;
            Ok::<_, Infallible>(match checked {
                Err(refusal) => text(refusal.status, refusal.message),
                Ok(()) if !place.promote() => {
                    text(StatusCode::SERVICE_UNAVAILABLE, "too many connections to the kubelet\n")
                }
                Ok(()) => server.handle(request).await,
            })
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_LIMIT).max_buf_size(MAX_HEADERS);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(IDLE_LIMIT)
        .max_header_list_size(u32::try_from(MAX_HEADERS).unwrap_or(u32::MAX));
    if let Err(e) = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await {
        tracing::debug!(error = %e, "a connection to the kubelet API broke");
    }
}

impl Server {
    async fn handle(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().to_string();
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let reading = request.method() == Method::GET || request.method() == Method::HEAD;
        let posting = request.method() == Method::POST;
        let streaming = request.method() == Method::GET || posting;
        if reading
            && let Some(answer) =
                read_only::answer(&self.context, &parts, request.uri().query().unwrap_or_default()).await
        {
            return answer;
        }
        match parts.as_slice() {
            ["configz"] if reading => self.configz(),
            ["statusz"] if reading => zpages::statusz(accepted(&request), self.started, Timestamp::now()),
            ["flagz"] if reading => zpages::flagz(accepted(&request), &self.config.flags),
            [area, ..] if DEBUGGING.contains(area) && !self.config.debugging_handlers => {
                text(StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n")
            }
            ["runningpods"] if reading => self.running_pods().await,
            ["run", namespace, pod, container] | ["run", namespace, pod, _, container] if posting => {
                self.run(&request, namespace, pod, container).await
            }
            ["checkpoint", namespace, pod, container] if posting => {
                self.checkpoint(&request, namespace, pod, container).await
            }
            ["logs", ..] if !self.config.system_log_handler => {
                text(StatusCode::METHOD_NOT_ALLOWED, "logs endpoint is disabled.\n")
            }
            ["logs"] if reading && self.config.system_log_query && log_query::is_query(&query(&request)) => {
                log_query::serve(self.config.system_log_dir.clone(), &query(&request)).await
            }
            ["logs", ..] if reading => {
                let below = path.trim_start_matches('/').trim_start_matches("logs").to_owned();
                system_logs::serve(self.config.system_log_dir.clone(), &below).await
            }
            ["debug", "pprof", ..] => {
                text(StatusCode::METHOD_NOT_ALLOWED, "profiling endpoint is disabled.\n")
            }
            ["debug", "flags", "v"] => match self.config.set_verbosity {
                Some(set) => verbosity(request, set).await,
                None => text(StatusCode::METHOD_NOT_ALLOWED, "flags endpoint is disabled.\n"),
            },
            ["debug", "steps"] if reading => {
                let query = query(&request);
                let uids = query.iter().filter(|(key, _)| key == "uid").map(|(_, uid)| uid.as_str());
                json(&ferrite_component::steps::of(uids))
            }
            ["containerLogs", namespace, pod, container] if reading => {
                self.logs(&request, namespace, pod, container).await
            }
            ["exec", namespace, pod, container] | ["exec", namespace, pod, _, container] if streaming => {
                self.exec(request, namespace, pod, container).await
            }
            ["attach", namespace, pod, container] | ["attach", namespace, pod, _, container] if streaming => {
                self.attach(request, namespace, pod, container).await
            }
            ["portForward", namespace, pod] | ["portForward", namespace, pod, _] if streaming => {
                self.port_forward(request, namespace, pod).await
            }
            _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
        }
    }

    fn configz(&self) -> Answer {
        json(&configz::configuration(&self.config, self.context.cgroups.driver()))
    }
}

fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

fn answer(status: StatusCode, content_type: &'static str, body: Body) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, hyper::header::HeaderValue::from_static(content_type));
    answer
}

fn text(status: StatusCode, body: impl Into<String>) -> Answer {
    answer(status, "text/plain; charset=utf-8", full(body.into()))
}

fn json(value: &impl serde::Serialize) -> Answer {
    match ferrite_json::to_vec(value) {
        Ok(bytes) => answer(StatusCode::OK, "application/json", full(bytes)),
        Err(e) => text(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()),
    }
}

/// Sets how much is logged, as upstream: by a PUT of the number.
async fn verbosity(request: Request<Incoming>, set: fn(u8)) -> Answer {
    if request.method() != Method::PUT {
        return text(StatusCode::NOT_ACCEPTABLE, "unsupported http method\n");
    }
    let body = http_body_util::Limited::new(request.into_body(), 64).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let level = std::str::from_utf8(&body).ok().and_then(|text| text.trim().parse::<u8>().ok());
    match level {
        Some(level) => {
            set(level);
            text(StatusCode::OK, format!("successfully set klog.logging.verbosity to {level}"))
        }
        None => text(StatusCode::BAD_REQUEST, "the body is no level of logs between 0 and 255\n"),
    }
}

fn accepted(request: &Request<Incoming>) -> &str {
    request.headers().get(hyper::header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The query of a request, decoded, in order.
fn query(request: &Request<Incoming>) -> Vec<(String, String)> {
    let raw = request.uri().query().unwrap_or_default();
    raw.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(key), decode(value))
        })
        .collect()
}

fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let hex = bytes.get(i + 1..i + 3).and_then(|h| std::str::from_utf8(h).ok());
        match (bytes[i], hex.and_then(|h| u8::from_str_radix(h, 16).ok())) {
            (b'%', Some(byte)) => {
                out.push(byte);
                i += 3;
            }
            (b'+', _) => {
                out.push(b' ');
                i += 1;
            }
            (byte, _) => {
                out.push(byte);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod decode_tests;
#[cfg(test)]
mod tests;
