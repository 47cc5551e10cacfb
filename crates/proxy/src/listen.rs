//! The HTTP servers of the proxy itself.

use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_client::Scope;
use jiff::Timestamp;

use crate::config::{ProxyConfig, ProxyError};
use crate::health::{Answer, ProxyHealth, bind, serve};
use crate::metrics::Metrics;

/// Binds, or says why not.
async fn bind_for(
    what: &'static str,
    address: Option<SocketAddr>,
    hard_fail: bool,
) -> Result<Option<tokio::net::TcpListener>, ProxyError> {
    let Some(address) = address else { return Ok(None) };
    match bind(address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(source) if hard_fail => Err(ProxyError::Listen { address, what, source }),
        Err(error) => {
            tracing::error!(%error, %address, "cannot listen for {what}");
            Ok(None)
        }
    }
}

/// Serves health and metrics where the configuration says.
pub(crate) async fn listen(
    config: &ProxyConfig,
    health: &Arc<ProxyHealth>,
    metrics: &Arc<Metrics>,
    scope: &Scope,
) -> Result<(), ProxyError> {
    let hard = config.bind_address_hard_fail;
    if let Some(listener) = bind_for("health", config.healthz_bind_address, hard).await? {
        let health = Arc::clone(health);
        let handler = move |path: &str| match path {
            "/healthz" => Some(health.healthz(Timestamp::now())),
            "/livez" => Some(health.livez(Timestamp::now())),
            _ => None,
        };
        serve(listener, Arc::new(handler), scope);
    }
    if let Some(listener) = bind_for("metrics", config.metrics_bind_address, hard).await? {
        let metrics = Arc::clone(metrics);
        let text = |body: String| Answer {
            status: 200,
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            headers: Vec::new(),
            body,
        };
        let handler = move |path: &str| match path {
            "/metrics" => Some(text(metrics.render())),
            "/proxyMode" => Some(text("nftables".into())),
            "/healthz" => Some(text("ok".into())),
            _ => None,
        };
        serve(listener, Arc::new(handler), scope);
    }
    Ok(())
}
