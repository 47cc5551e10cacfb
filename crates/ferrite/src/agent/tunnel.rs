//! Tunnels from this node to every API server that it knows: the servers reach its kubelet through them.
//!
//! The node opens the connections, so no port of it has to be open. On a connection the server asks for streams with CONNECT
//! requests of HTTP/2, and each stream leads to the node's own kubelet and nowhere else. Decision 0023 has the reasons.

use super::servers::ServerAddress;
use crate::apiserver::BoxError;
use bytes::Bytes;
use ferrite_apiserver::tunnel::{
    CONNECTION_WINDOW, PATH, PING_INTERVAL, PING_TIMEOUT, PROTOCOL, STREAM_WINDOW, STREAMS,
};
use ferrite_client::{Backoff, Scope};
use ferrite_network::Addresses;
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
/// Time limit of a connection to the kubelet of this node.
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
    fn is_meant(&self, authority: &str) -> bool {
        let asked = authority.parse::<SocketAddr>();
        let own = |ip: IpAddr| self.addresses.iter().any(|address| *address == ip);
        asked.is_ok_and(|asked| asked.port() == self.listens.port() && own(asked.ip()))
    }
}

/// Tunnels to all servers.
pub struct Tunnels {
    /// The node's client certificate and the cluster's authority, as they are now.
    pub tls: watch::Receiver<Arc<rustls::ClientConfig>>,
    pub kubelet: OwnKubelet,
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
        let (kubelet, streams) = (self.kubelet, scope.child());
        let tasks = streams.clone();
        let service = service_fn(move |request| answer(request, kubelet, tasks.clone()));
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
    kubelet: OwnKubelet,
    scope: Scope,
) -> Result<Response<Empty<Bytes>>, Infallible> {
    let code = match dial(&request, kubelet).await {
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

/// Connects to the kubelet, if the request asks for it.
async fn dial(request: &Request<Incoming>, kubelet: OwnKubelet) -> Result<TcpStream, StatusCode> {
    if request.method() != Method::CONNECT {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    let asked = request.uri().authority().map(http::uri::Authority::as_str).unwrap_or_default();
    if !kubelet.is_meant(asked) {
        tracing::warn!(asked, "a server asks for a stream to another address than the kubelet's");
        return Err(StatusCode::FORBIDDEN);
    }
    match timeout(DIAL, TcpStream::connect(kubelet.listens)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => {
            tracing::warn!(%error, kubelet = %kubelet.listens, "a stream does not reach the kubelet");
            Err(StatusCode::BAD_GATEWAY)
        }
        Err(_) => Err(StatusCode::GATEWAY_TIMEOUT),
    }
}

async fn join(request: Request<Incoming>, mut kubelet: TcpStream) {
    let _ = kubelet.set_nodelay(true);
    let Ok(stream) = hyper::upgrade::on(request).await else { return };
    // Either side may simply go away.
    let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(stream), &mut kubelet).await;
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
    fn streams_lead_to_the_kubelet_and_nowhere_else() {
        let kubelet = OwnKubelet {
            listens: "192.0.2.7:10250".parse().unwrap(),
            addresses: "192.0.2.7,2001:db8::7".parse().unwrap(),
        };
        for (authority, meant) in [
            ("192.0.2.7:10250", true),
            ("[2001:db8::7]:10250", true),
            ("192.0.2.7:22", false),
            ("192.0.2.8:10250", false),
            ("127.0.0.1:10250", false),
            ("[::ffff:192.0.2.7]:10250", false),
            ("localhost:10250", false),
            ("192.0.2.7", false),
            ("", false),
        ] {
            assert_eq!(kubelet.is_meant(authority), meant, "{authority}");
        }
    }
}
