//! A small HTTP server: GET, one answer, no body read.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ferrite_client::Scope;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections of one listener at once. Load balancers ask seldom.
const CONNECTIONS: usize = 64;
/// A client must say what it wants in this time.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// The response to a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
}

/// Answers a path; `None` is 404.
pub type Handler = Arc<dyn Fn(&str) -> Option<Answer> + Send + Sync>;

pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves until `scope` ends, which ends open connections too.
pub fn serve(listener: TcpListener, handler: Handler, scope: &Scope) {
    let connections = scope.clone();
    scope.spawn(async move {
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            // The semaphore is never closed.
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely: others must close some first.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let handler = Arc::clone(&handler);
            connections.spawn(async move {
                let service = service_fn(move |request| {
                    let response = respond(&handler, &request);
                    async move { Ok::<_, Infallible>(response) }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_TIMEOUT)
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
                drop(permit);
            });
        }
    });
}

fn respond(handler: &Handler, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let answer = handler(request.uri().path()).unwrap_or_else(|| Answer {
        status: 404,
        content_type: "text/plain; charset=utf-8",
        headers: Vec::new(),
        body: "404 page not found\n".into(),
    });
    let mut response = Response::new(Full::new(Bytes::from(answer.body)));
    *response.status_mut() = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(answer.content_type));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    for (name, value) in answer.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    response
}
