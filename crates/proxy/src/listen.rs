//! The HTTP servers of the proxy itself.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::Scope;
use jiff::Timestamp;

use crate::config::{ProxyConfig, ProxyError};
use crate::health::{Answer, Handler, ProxyHealth, bind, serve};
use crate::metrics::Metrics;

/// A busy port is tried again after this time, as upstream.
const RETRY: Duration = Duration::from_secs(5);

/// Serves at an address. A port that is busy is an error with `hard_fail`; else it is tried again until it is free.
async fn serve_at(
    what: &'static str,
    address: Option<SocketAddr>,
    hard_fail: bool,
    retry: Duration,
    handler: Handler,
    scope: &Scope,
) -> Result<(), ProxyError> {
    let Some(address) = address else { return Ok(()) };
    match bind(address).await {
        Ok(listener) => serve(listener, handler, scope),
        Err(source) if hard_fail => return Err(ProxyError::Listen { address, what, source }),
        Err(error) => {
            tracing::error!(%error, %address, "cannot listen for {what}; trying again");
            let served = scope.clone();
            scope.spawn(async move {
                let listener = loop {
                    tokio::time::sleep(retry).await;
                    match bind(address).await {
                        Ok(listener) => break listener,
                        Err(error) => tracing::debug!(%error, %address, "cannot listen for {what}"),
                    }
                };
                tracing::info!(%address, "listening for {what}");
                serve(listener, handler, &served);
            });
        }
    }
    Ok(())
}

/// Serves health and metrics where the configuration says.
pub(crate) async fn listen(
    config: &ProxyConfig,
    health: &Arc<ProxyHealth>,
    metrics: &Arc<Metrics>,
    scope: &Scope,
) -> Result<(), ProxyError> {
    let hard = config.bind_address_hard_fail;
    let health = Arc::clone(health);
    let handler = move |path: &str| match path {
        "/healthz" => Some(health.healthz(Timestamp::now())),
        "/livez" => Some(health.livez(Timestamp::now())),
        _ => None,
    };
    serve_at("health", config.healthz_bind_address, hard, RETRY, Arc::new(handler), scope).await?;
    let (metrics, configz) = (Arc::clone(metrics), config.configz.clone());
    let answer = |content_type, body: String| Answer { status: 200, content_type, headers: Vec::new(), body };
    let text = move |body: String| answer("text/plain; version=0.0.4; charset=utf-8", body);
    let handler = move |path: &str| match path {
        "/metrics" => Some(text(metrics.render())),
        "/proxyMode" => Some(text("nftables".into())),
        "/healthz" => Some(text("ok".into())),
        "/configz" => configz.clone().map(|body| answer("application/json", body)),
        _ => None,
    };
    serve_at("metrics", config.metrics_bind_address, hard, RETRY, Arc::new(handler), scope).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_busy_port_is_served_when_it_is_free() {
        let holder = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = holder.local_addr().unwrap();
        let scope = Scope::new();
        let handler: Handler = Arc::new(|_: &str| None);
        let serve_here = |hard| {
            serve_at("health", Some(address), hard, Duration::from_millis(1), Arc::clone(&handler), &scope)
        };
        assert!(matches!(serve_here(true).await, Err(ProxyError::Listen { .. })));
        serve_here(false).await.unwrap();
        drop(holder);
        let connect = async {
            while tokio::net::TcpStream::connect(address).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), connect).await.unwrap();
        scope.shutdown().await;
    }
}
