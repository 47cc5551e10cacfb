//! The paths that show the node and change nothing, and the port that serves them to everybody (`readOnlyPort`).

use super::{Answer, health, json, stats, text};
use crate::pod::context::Context;
use ferrite_client::Scope;
use ferrite_component::{PlainLimits, serve_plain};
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use k8s_openapi::List;
use k8s_openapi::api::core::v1::Pod;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

const LIMITS: PlainLimits =
    PlainLimits { connections: 64, head: Duration::from_secs(10), connection: Duration::from_secs(60) };

/// Answers one of these paths; None for any other.
pub(super) async fn answer(context: &Arc<Context>, parts: &[&str], query: &str) -> Option<Answer> {
    Some(match parts {
        ["healthz"] => health::answer(context, None, query),
        ["healthz", single] => health::answer(context, Some(single), query),
        ["metrics", "slis"] => stats::slis(),
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
    scope.spawn(serve_plain(listener, LIMITS, move |request: Request<Incoming>| {
        let context = context.clone();
        async move { respond(&context, &request).await }
    }));
    Ok(address)
}

async fn respond(context: &Arc<Context>, request: &Request<Incoming>) -> Answer {
    let reading = request.method() == Method::GET || request.method() == Method::HEAD;
    let query = request.uri().query().unwrap_or_default();
    let parts: Vec<&str> = request.uri().path().trim_matches('/').split('/').collect();
    let answer = if reading { answer(context, &parts, query).await } else { None };
    answer.unwrap_or_else(|| text(StatusCode::NOT_FOUND, "404 page not found\n"))
}
