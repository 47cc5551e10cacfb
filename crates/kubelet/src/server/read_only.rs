//! The paths that show the node and change nothing, and the port that serves them to everybody (`readOnlyPort`).

use super::{Answer, health, json, stats, text};
use crate::pod::context::Context;
use ferrite_client::Scope;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8s_openapi::List;
use k8s_openapi::api::core::v1::Pod;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections at the same time. Nobody on this port is authenticated.
const MAX_CONNECTIONS: usize = 64;
/// A whole connection: one that is idle must not keep its place.
const LIMIT: Duration = Duration::from_secs(60);
/// Until the head of a request is there.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
const MAX_HEADERS: usize = 64 * 1024;

/// Answers one of these paths; None for any other.
pub(super) async fn answer(context: &Context, parts: &[&str]) -> Option<Answer> {
    Some(match parts {
        ["healthz"] | ["healthz", "ping" | "log" | "syncloop"] => health::answer(),
        ["pods"] => {
            let items = context.pods.list().iter().map(|p| (**p).clone()).collect();
            json(&List::<Pod> { items, ..List::default() })
        }
        ["stats", "summary"] => stats::summary(context).await,
        ["metrics"] => stats::metrics(context).await,
        ["metrics", "resource"] => stats::resource_metrics(context).await,
        ["metrics", "cadvisor"] => stats::cadvisor(context).await,
        ["metrics", "probes"] => stats::probes(context),
        _ => return None,
    })
}

/// Listens and answers until the scope ends.
pub(crate) async fn start(
    context: Arc<Context>,
    address: SocketAddr,
    scope: &Scope,
) -> io::Result<SocketAddr> {
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
            let context = context.clone();
            owned.spawn(async move {
                let mut builder = http1::Builder::new();
                builder.timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).max_buf_size(MAX_HEADERS);
                let service = service_fn(move |request: Request<Incoming>| {
                    let context = context.clone();
                    async move { Ok::<_, Infallible>(respond(&context, &request).await) }
                });
                let connection = builder.serve_connection(TokioIo::new(stream), service);
                let _ = tokio::time::timeout(LIMIT, connection).await;
                drop(place);
            });
        }
    });
    Ok(address)
}

async fn respond(context: &Context, request: &Request<Incoming>) -> Answer {
    let reading = request.method() == Method::GET || request.method() == Method::HEAD;
    let parts: Vec<&str> = request.uri().path().trim_matches('/').split('/').collect();
    let answer = if reading { answer(context, &parts).await } else { None };
    answer.unwrap_or_else(|| text(StatusCode::NOT_FOUND, "404 page not found\n"))
}
