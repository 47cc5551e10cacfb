//! Health-check node ports: a load balancer asks every node whether it has an endpoint of the Service.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrite_client::{ObjectKey, Scope};
use jiff::Timestamp;

use super::serve::bind_one_family;
use super::{Answer, ProxyHealth, serve};
use crate::model::IpFamily;

/// A port that listens.
struct Open {
    port: u16,
    /// As upstream: the listeners of a family answer with the endpoints of that family.
    local_endpoints: BTreeMap<IpFamily, Arc<AtomicUsize>>,
    scope: Scope,
}

/// The health-check node ports of this node.
pub struct ServiceHealth {
    /// The addresses to listen at.
    addresses: Vec<IpAddr>,
    health: Arc<ProxyHealth>,
    scope: Scope,
    open: BTreeMap<ObjectKey, Open>,
    /// Ports that could not be opened.
    failed: BTreeMap<ObjectKey, Wanted>,
}

/// A health-check node port, and the number of ready endpoints on this node in each family of the Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub port: u16,
    pub local_endpoints: BTreeMap<IpFamily, usize>,
}

impl ServiceHealth {
    pub fn new(addresses: Vec<IpAddr>, health: Arc<ProxyHealth>, scope: &Scope) -> Self {
        Self { addresses, health, scope: scope.child(), open: BTreeMap::new(), failed: BTreeMap::new() }
    }

    /// Makes the port of one Service listen, change its response, or close. A port that cannot be opened is
    /// an error; [`retry`](Self::retry) tries it again.
    pub async fn update(&mut self, service: &ObjectKey, wanted: Option<Wanted>) -> std::io::Result<()> {
        self.failed.remove(service);
        if let Some(open) = self.open.get(service) {
            match &wanted {
                Some(wanted)
                    if wanted.port == open.port
                        && wanted.local_endpoints.keys().eq(open.local_endpoints.keys()) =>
                {
                    for (family, count) in &wanted.local_endpoints {
                        if let Some(shown) = open.local_endpoints.get(family) {
                            shown.store(*count, Ordering::Relaxed);
                        }
                    }
                    return Ok(());
                }
                _ => {
                    open.scope.shutdown().await;
                    self.open.remove(service);
                }
            }
        }
        let Some(wanted) = wanted else { return Ok(()) };
        self.open(service, &wanted).inspect_err(|_| {
            self.failed.insert(service.clone(), wanted);
        })
    }

    /// Returns true if a port could not be opened.
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Tries ports again that could not be opened.
    pub fn retry(&mut self) {
        for (service, wanted) in std::mem::take(&mut self.failed) {
            if self.open(&service, &wanted).is_err() {
                self.failed.insert(service, wanted);
            }
        }
    }

    fn open(&mut self, service: &ObjectKey, wanted: &Wanted) -> std::io::Result<()> {
        let counts: BTreeMap<IpFamily, Arc<AtomicUsize>> = wanted
            .local_endpoints
            .iter()
            .map(|(family, count)| (*family, Arc::new(AtomicUsize::new(*count))))
            .collect();
        let mut listeners = Vec::new();
        for address in &self.addresses {
            if let Some(count) = counts.get(&IpFamily::of(*address)) {
                let listener = bind_one_family(SocketAddr::new(*address, wanted.port))?;
                listeners.push((listener, Arc::clone(count)));
            }
        }
        let scope = self.scope.child();
        for (listener, count) in listeners {
            let (service, health) = (service.clone(), Arc::clone(&self.health));
            let answer = move |_: &str| {
                let healthy = health.is_healthy(Timestamp::now());
                Some(answer(&service, count.load(Ordering::Relaxed), healthy))
            };
            serve(listener, Arc::new(answer), &scope);
        }
        self.open.insert(service.clone(), Open { port: wanted.port, local_endpoints: counts, scope });
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
            "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{namespace}\",\n\t\t\"name\": \"{name}\"\n\t}},\n\t\"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": {proxy_healthy}\n}}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn get(address: &str, port: u16) -> std::io::Result<String> {
        let mut stream = tokio::net::TcpStream::connect((address, port)).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    }

    fn wanted(port: u16, counts: &[(IpFamily, usize)]) -> Option<Wanted> {
        Some(Wanted { port, local_endpoints: counts.iter().copied().collect() })
    }

    fn services(addresses: &[&str], scope: &Scope) -> ServiceHealth {
        let health = Arc::new(ProxyHealth::new(Duration::from_secs(60)));
        ServiceHealth::new(addresses.iter().map(|ip| ip.parse().unwrap()).collect(), health, scope)
    }

    fn free_port() -> (std::net::TcpListener, u16) {
        let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    #[tokio::test]
    async fn a_port_opens_answers_and_closes() {
        let scope = Scope::new();
        let mut services = services(&["127.0.0.1"], &scope);
        let service = ObjectKey::new("ns", "web");
        let free = free_port().1;
        services.update(&service, wanted(free, &[(IpFamily::V4, 2)])).await.unwrap();
        let text = get("127.0.0.1", free).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        assert!(text.contains("x-load-balancing-endpoint-weight: 2\r\n"), "{text}");
        assert!(text.ends_with("{\n\t\"service\": {\n\t\t\"namespace\": \"ns\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}"), "{text}");
        services.update(&service, wanted(free, &[(IpFamily::V4, 0)])).await.unwrap();
        assert!(get("127.0.0.1", free).await.unwrap().starts_with("HTTP/1.1 503"));
        services.update(&service, None).await.unwrap();
        assert!(get("127.0.0.1", free).await.is_err());
        scope.shutdown().await;
    }

    #[tokio::test]
    async fn each_family_answers_with_its_own_endpoints() {
        let scope = Scope::new();
        let mut services = services(&["0.0.0.0", "::"], &scope);
        let service = ObjectKey::new("ns", "web");
        let free = free_port().1;
        let counts = [(IpFamily::V4, 1), (IpFamily::V6, 0)];
        services.update(&service, wanted(free, &counts)).await.unwrap();
        assert!(get("127.0.0.1", free).await.unwrap().contains("\"localEndpoints\": 1"));
        assert!(get("::1", free).await.unwrap().contains("\"localEndpoints\": 0"));
        services.update(&service, wanted(free, &counts[..1])).await.unwrap();
        assert!(get("127.0.0.1", free).await.is_ok());
        assert!(get("::1", free).await.is_err(), "the Service has no address of IPv6 any more");
        scope.shutdown().await;
    }

    #[tokio::test]
    async fn a_busy_port_opens_when_it_is_free() {
        let scope = Scope::new();
        let mut services = services(&["127.0.0.1"], &scope);
        let service = ObjectKey::new("ns", "web");
        let (holder, port) = free_port();
        assert!(services.update(&service, wanted(port, &[(IpFamily::V4, 1)])).await.is_err());
        services.retry();
        assert!(services.has_failed(), "somebody has the port still");
        drop(holder);
        services.retry();
        assert!(!services.has_failed());
        assert!(get("127.0.0.1", port).await.unwrap().starts_with("HTTP/1.1 200"));
        scope.shutdown().await;
    }
}
