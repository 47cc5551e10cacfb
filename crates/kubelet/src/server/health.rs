//! Port 10248: `/healthz` without TLS, for the service manager of the machine.

use super::{Answer, text};
use ferrite_client::Scope;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections at the same time: a watcher needs one.
const MAX_CONNECTIONS: usize = 32;
/// A whole connection.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) fn answer() -> Answer {
    text(StatusCode::OK, "ok")
}

/// Listens and answers until the scope ends.
pub(crate) async fn start(address: SocketAddr, scope: &Scope) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let owned = scope.clone();
    scope.spawn(async move {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            owned.spawn(async move {
                let mut builder = http1::Builder::new();
                builder.timer(TokioTimer::new()).header_read_timeout(LIMIT);
                let connection = builder.serve_connection(TokioIo::new(stream), service_fn(healthz));
                let _ = tokio::time::timeout(LIMIT, connection).await;
                drop(place);
            });
        }
    });
    Ok(address)
}

async fn healthz(request: Request<Incoming>) -> Result<Answer, Infallible> {
    Ok(match request.uri().path() {
        "/healthz" | "/healthz/ping" | "/healthz/log" | "/healthz/syncloop" => answer(),
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    })
}
