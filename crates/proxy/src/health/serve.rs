//! A small HTTP server: GET, one answer, no body read.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ferrite_client::Scope;
use ferrite_component::{PlainLimits, serve_plain};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::{Request, Response, StatusCode};
use tokio::net::{TcpListener, TcpSocket};

/// The limits of one listener. Load balancers ask seldom, and may keep a connection.
const LIMITS: PlainLimits =
    PlainLimits { connections: 64, head: Duration::from_secs(10), connection: Duration::from_secs(600) };

/// Connections that wait to be accepted by one listener.
const BACKLOG: u32 = 128;

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

/// Binds an address of one family: `[::]` does not answer for IPv4, so that a listener for `0.0.0.0` fits beside it.
pub fn bind_one_family(address: SocketAddr) -> io::Result<TcpListener> {
    use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if address.is_ipv6() {
        setsockopt(&socket, Ipv6V6Only, &true)?;
    }
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until `scope` ends, which ends open connections too.
pub fn serve(listener: TcpListener, handler: Handler, scope: &Scope) {
    scope.spawn(serve_plain(listener, LIMITS, move |request: Request<Incoming>| {
        let response = respond(&handler, &request);
        async move { response }
    }));
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
