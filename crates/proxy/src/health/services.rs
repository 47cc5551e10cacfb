//! Health-check node ports: a load balancer asks every node whether it has an endpoint of the Service.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrite_client::{ObjectKey, Scope};
use jiff::Timestamp;

use super::{Answer, ProxyHealth, bind, serve};

/// A port that listens.
struct Open {
    port: u16,
    local_endpoints: Arc<AtomicUsize>,
    scope: Scope,
}

/// The health-check node ports of this node.
pub struct ServiceHealth {
    /// Where to listen.
    addresses: Vec<IpAddr>,
    health: Arc<ProxyHealth>,
    scope: Scope,
    open: BTreeMap<ObjectKey, Open>,
}

/// A health-check node port and the number of ready endpoints on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub port: u16,
    pub local_endpoints: usize,
}

impl ServiceHealth {
    pub fn new(addresses: Vec<IpAddr>, health: Arc<ProxyHealth>, scope: &Scope) -> Self {
        Self { addresses, health, scope: scope.child(), open: BTreeMap::new() }
    }

    /// Makes the port of one Service listen, change its response, or close. A port that cannot be opened is
    /// an error; it is tried again when the Service changes.
    pub async fn update(&mut self, service: &ObjectKey, wanted: Option<Wanted>) -> std::io::Result<()> {
        if let Some(open) = self.open.get(service) {
            match wanted {
                Some(wanted) if wanted.port == open.port => {
                    open.local_endpoints.store(wanted.local_endpoints, Ordering::Relaxed);
                    return Ok(());
                }
                _ => {
                    open.scope.shutdown().await;
                    self.open.remove(service);
                }
            }
        }
        let Some(wanted) = wanted else { return Ok(()) };
        let scope = self.scope.child();
        let local_endpoints = Arc::new(AtomicUsize::new(wanted.local_endpoints));
        let mut listeners = Vec::new();
        for address in &self.addresses {
            listeners.push(bind(SocketAddr::new(*address, wanted.port)).await?);
        }
        for listener in listeners {
            let (service, health, count) =
                (service.clone(), Arc::clone(&self.health), Arc::clone(&local_endpoints));
            let answer = move |_: &str| {
                let healthy = health.is_healthy(Timestamp::now());
                Some(answer(&service, count.load(Ordering::Relaxed), healthy))
            };
            serve(listener, Arc::new(answer), &scope);
        }
        self.open.insert(service.clone(), Open { port: wanted.port, local_endpoints, scope });
        Ok(())
    }
}

/// Upstream's answer, on every path.
fn answer(service: &ObjectKey, local_endpoints: usize, proxy_healthy: bool) -> Answer {
    let (namespace, name) = (&service.namespace, &service.name);
    Answer {
        status: if local_endpoints > 0 && proxy_healthy { 200 } else { 503 },
        content_type: "application/json",
        headers: vec![("x-load-balancing-endpoint-weight", local_endpoints.to_string())],
        body: format!(
            "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{namespace}\",\n\t\t\"name\": \"{name}\"\n\t}},\n\t\"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": {proxy_healthy}\n}}\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn get(port: u16) -> std::io::Result<String> {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    }

    #[tokio::test]
    async fn a_port_opens_answers_and_closes() {
        let scope = Scope::new();
        let health = Arc::new(ProxyHealth::new(Duration::from_secs(60)));
        let mut services = ServiceHealth::new(vec![[127, 0, 0, 1].into()], health, &scope);
        let service = ObjectKey::new("ns", "web");
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        services.update(&service, Some(Wanted { port: free, local_endpoints: 2 })).await.unwrap();
        let text = get(free).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        assert!(text.contains("x-load-balancing-endpoint-weight: 2\r\n"), "{text}");
        assert!(text.ends_with("{\n\t\"service\": {\n\t\t\"namespace\": \"ns\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}\n"), "{text}");
        services.update(&service, Some(Wanted { port: free, local_endpoints: 0 })).await.unwrap();
        assert!(get(free).await.unwrap().starts_with("HTTP/1.1 503"));
        services.update(&service, None).await.unwrap();
        assert!(get(free).await.is_err());
        scope.shutdown().await;
    }
}
