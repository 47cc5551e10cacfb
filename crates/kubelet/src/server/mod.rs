//! The kubelet API on port 10250: what the API server asks of a node. Every caller shows a certificate, and
//! only those the cluster trusts with its nodes are let in.

mod auth;
mod configz;
mod gate;
mod logs;
mod stats;
mod streaming;

use crate::config::Config;
use crate::pod::context::Context;
use auth::{Caller, Identity};
use bytes::Bytes;
use ferrite_client::Scope;
use ferrite_pki::ServerTls;
use gate::{Gate, Stranger};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use k8s_openapi::List;
use k8s_openapi::api::core::v1::Pod;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// For a handshake, and for everything a caller says that may not use the API.
const STRANGER_LIMIT: Duration = Duration::from_secs(10);
/// Until a connection without a request is closed, as upstream.
const IDLE_LIMIT: Duration = Duration::from_secs(90);
/// The largest head of a request.
const MAX_HEADERS: usize = 64 * 1024;

type Body = BoxBody<Bytes, io::Error>;
type Answer = Response<Body>;

pub(crate) struct Server {
    context: Arc<Context>,
    config: Arc<Config>,
    scope: Scope,
}

/// Listens and serves until the scope ends. Answers the address it listens on.
pub(crate) async fn start(
    context: Arc<Context>,
    config: Arc<Config>,
    tls: ServerTls,
    scope: &Scope,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(config.server_address).await?;
    let address = listener.local_addr()?;
    let server = Arc::new(Server { context, config, scope: scope.clone() });
    scope.spawn(accept(listener, tls, server));
    Ok(address)
}

async fn accept(listener: TcpListener, tls: ServerTls, server: Arc<Server>) {
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
        let (tls, served, stranger) = (tls.clone(), server.clone(), gate.enter(peer.ip()));
        server.scope.spawn(greet(stream, tls, served, stranger));
    }
}

/// Finds out who is calling, and serves the call. A stranger is told that it is one; that has its limit in time and
/// its place can be taken.
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
    let now = SystemTime::now();
    let caller = Caller::of(presented, &tls.clients, now);
    let identity = caller.as_ref().and_then(|caller| caller.identity(now));
    let known = identity.is_some_and(|i| i.may_use(&server.config.authorized_names));
    if known {
        if let Some(_place) = stranger.becomes_caller() {
            serve(stream, server, caller).await;
        }
        return;
    }
    tokio::select! {
        _ = tokio::time::timeout(STRANGER_LIMIT, serve(stream, server, caller)) => {}
        () = stranger.evicted() => {}
    }
}

async fn serve(stream: TlsStream<TcpStream>, server: Arc<Server>, caller: Option<Caller>) {
    let caller = Arc::new(caller);
    let service = service_fn(move |request| {
        let (server, caller) = (server.clone(), caller.clone());
        async move {
            let identity = caller.as_ref().as_ref().and_then(|caller| caller.identity(SystemTime::now()));
            Ok::<_, Infallible>(server.handle(request, identity).await)
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
    async fn handle(&self, request: Request<Incoming>, identity: Option<&Identity>) -> Answer {
        let Some(identity) = identity else { return text(StatusCode::UNAUTHORIZED, "Unauthorized\n") };
        if !identity.may_use(&self.config.authorized_names) {
            let message = format!(
                "Forbidden (user={}, verb={}, resource=nodes, subresource(s)=[proxy])\n",
                identity.name,
                request.method().as_str().to_lowercase()
            );
            return text(StatusCode::FORBIDDEN, message);
        }
        let path = request.uri().path().to_string();
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let reading = request.method() == Method::GET || request.method() == Method::HEAD;
        let streaming = request.method() == Method::GET || request.method() == Method::POST;
        match parts.as_slice() {
            ["healthz"] | ["healthz", "ping" | "log" | "syncloop"] if reading => text(StatusCode::OK, "ok"),
            ["pods"] if reading => self.pods(),
            ["configz"] if reading => self.configz(),
            ["stats", "summary"] if reading => stats::summary(&self.context).await,
            ["metrics"] if reading => stats::metrics(&self.context).await,
            ["metrics", "resource"] if reading => stats::resource_metrics(&self.context).await,
            ["metrics", "cadvisor"] if reading => stats::cadvisor(&self.context).await,
            ["metrics", "probes"] if reading => stats::probes(&self.context),
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

    fn pods(&self) -> Answer {
        let items = self.context.pods.list().iter().map(|p| (**p).clone()).collect();
        json(&List::<Pod> { items, ..List::default() })
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
