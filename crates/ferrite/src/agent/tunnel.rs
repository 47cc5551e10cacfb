//! Tunnels from this node to every API server that it knows: the servers reach its kubelet and its pods through them.
//!
//! The node opens the connections, so no port of it has to be open. On a connection the server asks for streams with CONNECT
//! requests of HTTP/2, and each stream leads to the node's own kubelet or to a pod of the node, and nowhere else. Decision 0023
//! has the reasons.

use super::servers::ServerAddress;
use crate::apiserver::BoxError;
use bytes::Bytes;
use ferrite_apiserver::tunnel::{
    CONNECTION_WINDOW, PATH, PING_INTERVAL, PING_TIMEOUT, PROTOCOL, STREAM_WINDOW, STREAMS,
};
use ferrite_client::{Backoff, Scope};
use ferrite_network::{Addresses, Cidrs, IpFamily};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

/// Time limit of a connection to a server, with TLS and the upgrade.
const CONNECT: Duration = Duration::from_secs(10);
/// Time limit of a connection to the kubelet or to a pod of this node.
const DIAL: Duration = Duration::from_secs(5);
/// A tunnel that lasted so long was a good one: the next attempt comes soon.
const GOOD: Duration = Duration::from_secs(30);
/// Time that streams have to finish when a tunnel is replaced.
const FINISH: Duration = Duration::from_secs(4 * 60 * 60);
const SEND_BUFFER: usize = 128 << 10;

/// Why there is no tunnel to a server.
#[derive(Debug, thiserror::Error)]
enum TunnelError {
    #[error("no answer in time")]
    Late,
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    #[error("the server refuses a tunnel: {0}")]
    Refused(StatusCode),
    #[error("the connection broke")]
    Http(#[from] hyper::Error),
    #[error("cannot ask for a tunnel")]
    Request(#[from] http::Error),
}

/// The kubelet of this node.
#[derive(Debug, Clone, Copy)]
pub struct OwnKubelet {
    /// Where it listens.
    pub listens: SocketAddr,
    /// Addresses that servers know it by.
    pub addresses: Addresses,
}

impl OwnKubelet {
    /// Returns true if the server asks for this kubelet: one of the node's addresses, and the kubelet's port.
    fn is_meant(&self, asked: SocketAddr) -> bool {
        let own = |ip: IpAddr| self.addresses.iter().any(|address| *address == ip);
        asked.port() == self.listens.port() && own(asked.ip())
    }
}

/// The pods of this node.
#[derive(Debug, Clone, Copy)]
pub struct OwnPods {
    pub ranges: Cidrs,
    /// The node's own addresses among those of its pods.
    pub gateways: Addresses,
}

impl OwnPods {
    /// Returns true if a pod of this node may have the address. Pods that use the node's network have none of these: the
    /// node's own services are at such addresses, too.
    fn have(&self, asked: SocketAddr) -> bool {
        let ip = asked.ip();
        let Some(range) = self.ranges.of(IpFamily::of(ip)) else { return false };
        let is_end = ip == range.network() || (ip.is_ipv4() && ip == range.last());
        let is_own = self.gateways.iter().any(|gateway| *gateway == ip);
        asked.port() != 0 && range.contains(ip) && !is_end && !is_own && is_unicast(ip)
    }
}

/// Whatever range a node is given: these are no addresses of pods.
fn is_unicast(ip: IpAddr) -> bool {
    let local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local() || ip.to_ipv4_mapped().is_some(),
    };
    !local && !ip.is_loopback() && !ip.is_multicast() && !ip.is_unspecified()
}

/// The destinations of streams. Everything else is refused.
#[derive(Debug, Clone)]
struct Destinations {
    kubelet: OwnKubelet,
    /// None until the node has a range for its pods.
    pods: watch::Receiver<Option<OwnPods>>,
}

impl Destinations {
    /// The address to connect to for a stream that a server asks for.
    fn find(&self, authority: &str) -> Option<SocketAddr> {
        let asked: SocketAddr = authority.parse().ok()?;
        if self.kubelet.is_meant(asked) {
            return Some(self.kubelet.listens);
        }
        let pods = *self.pods.borrow();
        // Without the scope that an address may name.
        pods.filter(|pods| pods.have(asked)).map(|_| SocketAddr::new(asked.ip(), asked.port()))
    }
}

/// Tunnels to all servers.
pub struct Tunnels {
    /// The node's client certificate and the cluster's authority, as they are now.
    pub tls: watch::Receiver<Arc<rustls::ClientConfig>>,
    pub kubelet: OwnKubelet,
    pub pods: watch::Receiver<Option<OwnPods>>,
}

impl Tunnels {
    /// Keeps a tunnel to each server of the list, which changes.
    pub async fn keep(self, mut servers: watch::Receiver<Vec<ServerAddress>>, scope: Scope) {
        let tunnels = Arc::new(self);
        let mut kept: HashMap<ServerAddress, Scope> = HashMap::new();
        loop {
            let wanted = servers.borrow_and_update().clone();
            kept.retain(|server, scope| {
                let stays = wanted.contains(server);
                if !stays {
                    scope.cancel();
                }
                stays
            });
            for server in wanted {
                kept.entry(server.clone()).or_insert_with(|| {
                    let scope = scope.child();
                    scope.spawn(Arc::clone(&tunnels).keep_one(server, scope.clone()));
                    scope
                });
            }
            if servers.changed().await.is_err() {
                return;
            }
        }
    }

    async fn keep_one(self: Arc<Self>, server: ServerAddress, scope: Scope) {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10), 0.3);
        let mut predecessor = None;
        loop {
            let begun = Instant::now();
            match self.run_one(&server, &scope, &mut predecessor).await {
                Ok(End::Replaced) => continue,
                Ok(End::Closed) => tracing::info!(%server, "a tunnel to an API server has ended"),
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(%server, %error, cause, "no tunnel to an API server; will try again");
                }
            }
            if begun.elapsed() >= GOOD {
                backoff.reset();
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// Opens a tunnel and serves streams until it ends or the node's certificate was replaced. In the latter case the tunnel
    /// becomes the `predecessor` of the next one: it serves until the next is open, and lets its streams finish.
    async fn run_one(
        &self,
        server: &ServerAddress,
        scope: &Scope,
        predecessor: &mut Option<oneshot::Sender<()>>,
    ) -> Result<End, TunnelError> {
        let mut tls = self.tls.clone();
        let settings = Arc::clone(&tls.borrow_and_update());
        let opened =
            timeout(CONNECT, open(server, settings, scope)).await.map_err(|_| TunnelError::Late)??;
        tracing::info!(%server, "a tunnel to an API server is open");
        let destinations = Destinations { kubelet: self.kubelet, pods: self.pods.clone() };
        let streams = scope.child();
        let tasks = streams.clone();
        let service = service_fn(move |request| answer(request, destinations.clone(), tasks.clone()));
        let mut connection = Box::pin(http2_server(&streams).serve_connection(opened, service));
        if let Some(predecessor) = predecessor.take() {
            // It may have ended already.
            let _ = predecessor.send(());
        }
        let replaced = async {
            if tls.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            ended = connection.as_mut() => {
                streams.cancel();
                ended?;
                return Ok(End::Closed);
            }
            () = replaced => {}
        }
        let (retire, retired) = oneshot::channel();
        *predecessor = Some(retire);
        scope.spawn(async move {
            // An error is the end of the streams, which show it.
            tokio::select! {
                _ = connection.as_mut() => {}
                _ = retired => {
                    connection.as_mut().graceful_shutdown();
                    let _ = timeout(FINISH, connection).await;
                }
            }
            streams.cancel();
        });
        Ok(End::Replaced)
    }
}

/// The end of the time in which a tunnel was the newest one.
enum End {
    Closed,
    /// The node has another certificate.
    Replaced,
}

/// Connects to a server and has the connection upgraded.
async fn open(
    server: &ServerAddress,
    tls: Arc<rustls::ClientConfig>,
    scope: &Scope,
) -> Result<Upgraded, TunnelError> {
    let tcp = TcpStream::connect((server.host.as_str(), server.port)).await.map_err(TunnelError::Connect)?;
    tcp.set_nodelay(true).map_err(TunnelError::Connect)?;
    // As for all clients of the node: certificates of servers are good for loopback, and no others are.
    let name = ServerName::IpAddress(IpAddr::from(Ipv4Addr::LOCALHOST).into());
    let stream =
        tokio_rustls::TlsConnector::from(tls).connect(name, tcp).await.map_err(TunnelError::Connect)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    scope.spawn(async move {
        // An error shows up on the response as well.
        let _ = connection.with_upgrades().await;
    });
    let request = Request::get(PATH)
        .header(header::HOST, server.to_string())
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, PROTOCOL)
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    match response.status() {
        StatusCode::SWITCHING_PROTOCOLS => Ok(hyper::upgrade::on(response).await?),
        status => Err(TunnelError::Refused(status)),
    }
}

/// Runs the tasks of a connection in a scope.
#[derive(Clone)]
struct InScope(Scope);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for InScope {
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

fn http2_server(scope: &Scope) -> http2::Builder<InScope> {
    let mut builder = http2::Builder::new(InScope(scope.clone()));
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        // Clients of the server may all leave at once; that is no attack, and must not end the tunnel.
        .max_pending_accept_reset_streams(Some(STREAMS as usize))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// Answers a server's request for a stream.
async fn answer(
    request: Request<Incoming>,
    destinations: Destinations,
    scope: Scope,
) -> Result<Response<Empty<Bytes>>, Infallible> {
    let code = match dial(&request, &destinations).await {
        Ok(stream) => {
            scope.spawn(join(request, stream));
            StatusCode::OK
        }
        Err(code) => code,
    };
    let mut response = Response::new(Empty::new());
    *response.status_mut() = code;
    Ok(response)
}

/// Connects to the kubelet or to a pod, if the request asks for that.
async fn dial(request: &Request<Incoming>, destinations: &Destinations) -> Result<TcpStream, StatusCode> {
    if request.method() != Method::CONNECT {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    let asked = request.uri().authority().map(http::uri::Authority::as_str).unwrap_or_default();
    let Some(address) = destinations.find(asked) else {
        tracing::warn!(
            asked,
            "a server asks for a stream to an address that is neither the kubelet's nor a pod's"
        );
        return Err(StatusCode::FORBIDDEN);
    };
    match timeout(DIAL, TcpStream::connect(address)).await {
        Ok(Ok(stream)) if address != destinations.kubelet.listens && is_to_itself(&stream) => {
            tracing::warn!(%address, "a server asks for a pod at an address that this node has itself");
            Err(StatusCode::FORBIDDEN)
        }
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => {
            tracing::info!(%error, %address, "a stream does not reach its destination");
            Err(StatusCode::BAD_GATEWAY)
        }
        Err(_) => Err(StatusCode::GATEWAY_TIMEOUT),
    }
}

/// Returns true if a connection ends at this machine: the kernel connects to an address of its own from the same address.
fn is_to_itself(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(here), Ok(there)) => here.ip().to_canonical() == there.ip().to_canonical(),
        _ => true,
    }
}

async fn join(request: Request<Incoming>, mut destination: TcpStream) {
    let _ = destination.set_nodelay(true);
    let Ok(stream) = hyper::upgrade::on(request).await else { return };
    // Either side may simply go away.
    let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(stream), &mut destination).await;
}

/// The settings with which a node presents its certificate to servers. Upgrades need HTTP/1.1.
pub fn client_tls(ca: &str, identity: &ferrite_pki::Identity) -> Result<Arc<rustls::ClientConfig>, BoxError> {
    let mut tls = ferrite_pki::client_config(ca, Some(identity))?;
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(tls))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_lead_to_the_kubelet_and_to_pods_and_nowhere_else() {
        let (know_pods, pods) = watch::channel(None);
        let kubelet = OwnKubelet {
            listens: "192.0.2.7:10250".parse().unwrap(),
            addresses: "192.0.2.7,2001:db8::7".parse().unwrap(),
        };
        let destinations = Destinations { kubelet, pods };
        let own = ["192.0.2.7:10250", "[2001:db8::7]:10250"];
        let of_pods = ["10.244.3.9:8080", "10.244.3.254:1", "[fd00:3::9]:443"];
        let of_others = [
            "192.0.2.7:22",
            "192.0.2.8:10250",
            "127.0.0.1:10250",
            "[::ffff:192.0.2.7]:10250",
            "localhost:10250",
            "192.0.2.7",
            "",
            // The node itself among its pods, and the ends of the range.
            "10.244.3.1:53",
            "[fd00:3::1]:53",
            "10.244.3.0:80",
            "10.244.3.255:80",
            "[fd00:3::]:80",
            // Pods of other nodes, Services, other machines.
            "10.244.2.9:8080",
            "10.244.4.1:8080",
            "[fd00:4::9]:443",
            "10.96.0.1:443",
            "198.51.100.1:443",
            "169.254.169.254:80",
            "[fe80::1]:80",
            "[fe80::1%2]:80",
            "0.0.0.0:80",
            "[::]:80",
            "224.0.0.1:80",
            "[::ffff:10.244.3.9]:8080",
            "[::ffff:127.0.0.1]:8080",
            "10.244.3.9:0",
            "10.244.3.9",
            "web.default.svc:80",
            "user@10.244.3.9:80",
        ];
        for authority in of_pods.iter().chain(&of_others) {
            assert_eq!(destinations.find(authority), None, "{authority}: no pods yet");
        }
        let ranges = "10.244.3.0/24,fd00:3::/64".parse().unwrap();
        let gateways = "10.244.3.1,fd00:3::1".parse().unwrap();
        know_pods.send_replace(Some(OwnPods { ranges, gateways }));
        for authority in own {
            assert_eq!(destinations.find(authority), Some(kubelet.listens), "{authority}");
        }
        for authority in of_pods {
            assert_eq!(destinations.find(authority), authority.parse().ok(), "{authority}");
        }
        for authority in of_others {
            assert_eq!(destinations.find(authority), None, "{authority}");
        }
        // A range that no node should have opens nothing.
        let everything = OwnPods { ranges: "0.0.0.0/0,::/0".parse().unwrap(), gateways };
        for address in
            ["127.0.0.1:80", "[::1]:80", "169.254.169.254:80", "[fe80::1]:80", "[::ffff:127.0.0.1]:80"]
        {
            assert!(!everything.have(address.parse().unwrap()), "{address}");
        }
    }
}
