//! The port on which a component answers for itself: health, metrics, configuration.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ferrite_json::Value;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use crate::health::{self, Check};
use crate::metrics;
use crate::pages::Pages;
use crate::places::Places;

/// Connections at the same time: the callers are a few scrapers and probes. Further ones take the place of the oldest of
/// the peer that has most.
const MAX_CONNECTIONS: usize = 64;
/// A connection that has not sent a request for so long is closed.
const HEADERS: Duration = Duration::from_secs(10);
const HANDSHAKE: Duration = Duration::from_secs(10);
/// No connection is kept longer than this.
const LONGEST: Duration = Duration::from_secs(600);

/// The reason why a caller is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denied {
    /// The caller has no credentials, or false ones.
    Unauthenticated,
    /// The caller may not; the message says so in upstream's words.
    Forbidden(String),
    /// It cannot be found out now.
    Unavailable(String),
}

/// Decides if a caller may read a path. The paths that everybody may read never come here.
pub trait Access: Send + Sync {
    /// `token` is the bearer token of the request, `verb` that of a non-resource request (`get`, `post`, …).
    fn check<'a>(
        &'a self,
        token: Option<&'a str>,
        verb: &'a str,
        path: &'a str,
    ) -> Pin<Box<dyn Future<Output = Result<(), Denied>> + Send + 'a>>;
}

/// The answers of a component.
#[derive(Debug, Default)]
pub struct EndpointOptions {
    /// Run for `/healthz` and `/livez`.
    pub live: Vec<Check>,
    /// Run for `/readyz`, after those of `live`.
    pub ready: Vec<Check>,
    /// The configuration in use, for `/configz`, by the name of its group.
    pub config: Option<Value>,
    /// Pages that parts of the component add.
    pub pages: Pages,
    /// Paths that everybody may read; `/*` at the end stands for everything below.
    pub always_allow_paths: Vec<String>,
}

/// Serves a component's own port.
pub struct Endpoint {
    options: EndpointOptions,
    access: Arc<dyn Access>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Endpoint {
    pub fn new(options: EndpointOptions, access: Arc<dyn Access>) -> Arc<Self> {
        Arc::new(Self { options, access })
    }

    /// Accepts connections until `stop`, then waits until the ones under way have ended.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        tls: Arc<ServerConfig>,
        stop: CancellationToken,
    ) {
        let tls = TlsAcceptor::from(tls);
        let places = Places::new(MAX_CONNECTIONS);
        let connections = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    debug!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let place = places.enter(peer.ip());
            let (endpoint, tls, stop) = (self.clone(), tls.clone(), stop.clone());
            connections.spawn(async move {
                let connection = async {
                    let stream = tokio::time::timeout(HANDSHAKE, tls.accept(stream)).await.ok()?.ok()?;
                    let service = service_fn(|request| {
                        let endpoint = endpoint.clone();
                        async move { Ok::<_, Infallible>(endpoint.answer(request).await) }
                    });
                    let mut builder = auto::Builder::new(TokioExecutor::new());
                    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADERS);
                    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(16);
                    builder.serve_connection(TokioIo::new(stream), service).await.ok()
                };
                tokio::select! {
                    _ = connection => {}
                    () = tokio::time::sleep(LONGEST) => {}
                    () = place.evicted() => {}
                    () = stop.cancelled() => {}
                }
            });
        }
        connections.close();
        connections.wait().await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        if !self.is_always_allowed(path) {
            let token = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
            let token = token.and_then(|value| value.strip_prefix("Bearer ")).map(str::trim);
            let verb = request.method().as_str().to_ascii_lowercase();
            match self.access.check(token, &verb, path).await {
                Ok(()) => {}
                Err(Denied::Unauthenticated) => return text(StatusCode::UNAUTHORIZED, "Unauthorized"),
                Err(Denied::Forbidden(message)) => return text(StatusCode::FORBIDDEN, message),
                Err(Denied::Unavailable(message)) => return text(StatusCode::SERVICE_UNAVAILABLE, message),
            }
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
        }
        let query = request.uri().query().unwrap_or_default();
        if let Some(found) = self.options.pages.find(path) {
            let query = query.to_owned();
            // A page may be as large as the component's memory of the cluster.
            let made =
                tokio::task::spawn_blocking(move || (found.content_type, (found.render)(&query))).await;
            return match made {
                Ok((content_type, body)) => page(StatusCode::OK, content_type, body),
                Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "the page could not be made"),
            };
        }
        self.page(path, query)
    }

    fn is_always_allowed(&self, path: &str) -> bool {
        self.options.always_allow_paths.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(prefix) => path.starts_with(prefix),
            None => path == allowed,
        })
    }

    fn page(&self, path: &str, query: &str) -> Response<Full<Bytes>> {
        let (first, rest) = match path.trim_start_matches('/').split_once('/') {
            Some((first, rest)) => (first, Some(rest)),
            None => (path.trim_start_matches('/'), None),
        };
        match (first, rest) {
            ("healthz" | "livez" | "readyz", single) => {
                let mut checks = self.options.live.clone();
                if first == "readyz" {
                    checks.extend(self.options.ready.iter().cloned());
                }
                let report = health::respond(first, &checks, single, query);
                text(
                    StatusCode::from_u16(report.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
                    report.body,
                )
            }
            ("metrics", None) => page(StatusCode::OK, metrics::CONTENT_TYPE, metrics::registry().text()),
            ("metrics", Some("slis")) => page(StatusCode::OK, metrics::CONTENT_TYPE, health::results()),
            ("configz", None) if self.options.config.is_some() => {
                let body =
                    self.options.config.as_ref().and_then(|config| ferrite_json::to_string(config).ok());
                page(StatusCode::OK, "application/json", body.unwrap_or_default())
            }
            _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
        }
    }
}

fn text(code: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    page(code, "text/plain; charset=utf-8", body)
}

fn page(code: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response.headers_mut().insert("x-content-type-options", header::HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nobody;

    impl Access for Nobody {
        fn check<'a>(
            &'a self,
            _: Option<&'a str>,
            _: &'a str,
            _: &'a str,
        ) -> Pin<Box<dyn Future<Output = Result<(), Denied>> + Send + 'a>> {
            Box::pin(async { Err(Denied::Unauthenticated) })
        }
    }

    #[test]
    fn paths_are_open_only_as_listed() {
        let options = EndpointOptions {
            always_allow_paths: ["/healthz", "/livez/*"].map(str::to_owned).to_vec(),
            ..EndpointOptions::default()
        };
        let endpoint = Endpoint::new(options, Arc::new(Nobody));
        for (path, open) in [
            ("/healthz", true),
            ("/healthz/", false),
            ("/livez/ping", true),
            ("/livez", false),
            ("/metrics", false),
        ] {
            assert_eq!(endpoint.is_always_allowed(path), open, "{path}");
        }
    }

    #[tokio::test]
    async fn idle_connections_keep_nobody_out() {
        use tokio::io::AsyncReadExt;
        use tokio_rustls::rustls::server::ResolvesServerCertUsingSni;
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let tls =
            ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let none = Arc::new(ResolvesServerCertUsingSni::new());
        let tls = Arc::new(tls.with_no_client_auth().with_cert_resolver(none));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let endpoint = Endpoint::new(EndpointOptions::default(), Arc::new(Nobody));
        let serving = tokio::spawn(endpoint.serve(listener, tls, stop.clone()));
        let mut idle = Vec::new();
        for _ in 0..=MAX_CONNECTIONS {
            idle.push(tokio::net::TcpStream::connect(address).await.unwrap());
        }
        // The first loses its place to the last, whose hello is answered: nobody has a certificate here.
        assert_eq!(idle[0].read(&mut [0]).await.unwrap_or(0), 0);
        let mut last = idle.pop().unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut last, b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        assert_eq!(last.read(&mut [0]).await.unwrap(), 1, "an alert");
        stop.cancel();
        serving.await.unwrap();
    }

    #[test]
    fn pages() {
        let options = EndpointOptions {
            live: vec![Check::ping()],
            ready: vec![Check::new("informers", || Err("not synced".to_owned()))],
            config: Some(ferrite_json::json!({"example.config.k8s.io": {"port": 1}})),
            ..EndpointOptions::default()
        };
        let endpoint = Endpoint::new(options, Arc::new(Nobody));
        for (path, query, code) in [
            ("/healthz", "", 200),
            ("/healthz/ping", "", 200),
            ("/healthz/informers", "", 404),
            ("/readyz", "", 500),
            ("/readyz", "exclude=informers", 200),
            ("/metrics", "", 200),
            ("/configz", "", 200),
            ("/", "", 404),
            ("/metrics/x", "", 404),
        ] {
            assert_eq!(endpoint.page(path, query).status().as_u16(), code, "{path}?{query}");
        }
    }
}
