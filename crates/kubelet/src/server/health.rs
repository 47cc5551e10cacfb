//! Port 10248: `/healthz` without TLS, for the service manager of the machine.

use super::{Answer, text};
use ferrite_client::Scope;
use ferrite_component::{PlainLimits, serve_plain};
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;

/// A watcher needs one connection.
const LIMITS: PlainLimits =
    PlainLimits { connections: 32, head: Duration::from_secs(10), connection: Duration::from_secs(10) };

pub(super) fn answer() -> Answer {
    text(StatusCode::OK, "ok")
}

/// Listens and answers until the scope ends.
pub(crate) async fn start(address: SocketAddr, scope: &Scope) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    scope.spawn(serve_plain(listener, LIMITS, healthz));
    Ok(address)
}

async fn healthz(request: Request<Incoming>) -> Answer {
    match request.uri().path() {
        "/healthz" | "/healthz/ping" | "/healthz/log" | "/healthz/syncloop" => answer(),
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}
