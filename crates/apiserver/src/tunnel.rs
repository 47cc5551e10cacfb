//! Connections that agents open to this server, over which the server reaches their kubelets.
//!
//! An agent asks for an upgrade at [`PATH`]. On the upgraded connection the roles are reversed: this server is the HTTP/2
//! client, each of its CONNECT requests is one stream to the kubelet, and the agent dials. TLS with the kubelet goes on
//! inside the stream, so the agent's word is trusted for nothing. A tunnel belongs to the node that its user is; no request
//! can name another one. Decision 0023 has the reasons.

use crate::audit::Record;
use crate::auth::{self, User};
use crate::connections::Slot;
use crate::http::Response;
use crate::server::ApiServer;
use ::http::request::Parts;
use ::http::{HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use ferrite_api::Status;
use ferrite_component::metrics::{Gauge, registry};
use http_body_util::Empty;
use hyper::client::conn::http2::{self, SendRequest};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// Where agents open tunnels.
pub const PATH: &str = "/ferrite/v1/tunnel";
/// The protocol that the connection is upgraded to.
pub const PROTOCOL: &str = "ferrite-tunnel-v1";
/// Most streams of one tunnel at once.
pub const STREAMS: u32 = 256;
/// Most bytes of a stream that its reader has not taken yet.
pub const STREAM_WINDOW: u32 = 128 << 10;
/// The same of a connection: room for all its streams, so that those that nobody reads block no other.
pub const CONNECTION_WINDOW: u32 = STREAMS * STREAM_WINDOW;
/// Both sides ask this often whether the other lives, and wait so long for the answer.
pub const PING_INTERVAL: Duration = Duration::from_secs(10);
pub const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of the switch of protocols.
const UPGRADE: Duration = Duration::from_secs(10);
/// Tunnels of one node: an agent may reach this server by several names, and a new tunnel comes before the end of the
/// old one is noticed.
const EACH_NODE: usize = 4;
/// The largest head of an agent's response, and most bytes of a stream that wait to be sent.
const HEAD: u32 = 16 << 10;
const SEND_BUFFER: usize = 128 << 10;

static OPEN: LazyLock<Arc<Gauge>> = LazyLock::new(|| {
    registry().gauge("ferrite_apiserver_agent_tunnels", "Tunnels of agents that are open.", &[]).with(&[])
});

/// Why a stream through a tunnel did not come to be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TunnelError {
    #[error("the agent of the node answers with {0}")]
    Refused(StatusCode),
    #[error("the tunnel of the node's agent broke")]
    Broken(#[source] hyper::Error),
}

/// Marks a request that is made as another user than its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Impersonated;

#[derive(Clone)]
struct Tunnel {
    id: u64,
    sender: SendRequest<Empty<Bytes>>,
    /// Permits for streams.
    room: Arc<Semaphore>,
    /// Ends the connection.
    end: CancellationToken,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// By node; the newest is the last.
    nodes: HashMap<String, Vec<Tunnel>>,
}

/// The tunnels that are open.
#[derive(Default)]
pub(crate) struct Tunnels(Mutex<Table>);

impl Tunnels {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a tunnel, which is the node's first choice from now on. The oldest of too many ends.
    fn add(&self, node: &str, sender: SendRequest<Empty<Bytes>>) -> Tunnel {
        let mut table = self.table();
        table.next += 1;
        let room = Arc::new(Semaphore::new(STREAMS as usize));
        let tunnel = Tunnel { id: table.next, sender, room, end: CancellationToken::new() };
        let tunnels = table.nodes.entry(node.to_owned()).or_default();
        tunnels.push(tunnel.clone());
        if tunnels.len() > EACH_NODE {
            tunnels.remove(0).end.cancel();
        }
        tunnel
    }

    fn remove(&self, node: &str, id: u64) {
        let mut table = self.table();
        if let Some(tunnels) = table.nodes.get_mut(node) {
            tunnels.retain(|tunnel| tunnel.id != id);
            if tunnels.is_empty() {
                table.nodes.remove(node);
            }
        }
    }

    /// The tunnels of a node, the newest first.
    fn of(&self, node: &str) -> Vec<Tunnel> {
        let table = self.table();
        let tunnels = table.nodes.get(node).into_iter().flatten().rev();
        tunnels.filter(|tunnel| !tunnel.sender.is_closed()).cloned().collect()
    }

    /// Opens a stream to the kubelet of a node, at an address that the agent knows as its kubelet's. None if there is no
    /// tunnel that works. The caller limits the time.
    pub async fn connect(
        &self,
        node: &str,
        kubelet: SocketAddr,
    ) -> Result<Option<TunnelStream>, TunnelError> {
        for tunnel in self.of(node) {
            match tunnel.connect(kubelet).await {
                Ok(stream) => return Ok(Some(stream)),
                Err(refused @ TunnelError::Refused(_)) => return Err(refused),
                Err(error @ TunnelError::Broken(_)) => {
                    tracing::debug!(node, error = &error as &dyn std::error::Error, "a tunnel does not work");
                }
            }
        }
        Ok(None)
    }
}

impl Tunnel {
    async fn connect(&self, kubelet: SocketAddr) -> Result<TunnelStream, TunnelError> {
        let permit = Arc::clone(&self.room).acquire_owned().await.expect("the semaphore is never closed");
        let mut request = Request::new(Empty::new());
        *request.method_mut() = ::http::Method::CONNECT;
        let authority = kubelet.to_string();
        *request.uri_mut() = authority.parse().expect("an address and a port are an authority");
        let mut sender = self.sender.clone();
        sender.ready().await.map_err(TunnelError::Broken)?;
        let response = sender.send_request(request).await.map_err(TunnelError::Broken)?;
        if response.status() != StatusCode::OK {
            return Err(TunnelError::Refused(response.status()));
        }
        let stream = hyper::upgrade::on(response).await.map_err(TunnelError::Broken)?;
        Ok(TunnelStream { stream: TokioIo::new(stream), _permit: permit })
    }
}

/// A stream to a kubelet.
pub(crate) struct TunnelStream {
    stream: TokioIo<Upgraded>,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for TunnelStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for TunnelStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The node that a request opens a tunnel for: the one that its user is.
fn node_of<'a>(parts: &Parts, user: &'a User) -> Result<&'a str, Status> {
    let forbidden = |why: &str| Status::new(403, "Forbidden", format!("tunnels are for agents: {why}"));
    if parts.extensions.get::<Impersonated>().is_some() {
        return Err(forbidden("nobody can open one as somebody else"));
    }
    auth::node::name(user).ok_or_else(|| forbidden("this user is no node"))
}

/// Takes the connection of an agent as a tunnel to its node.
pub(crate) fn accept(server: &Arc<ApiServer>, mut parts: Parts, user: &User) -> Result<Response, Status> {
    let node = node_of(&parts, user)?.to_owned();
    let asked = parts.headers.get(header::UPGRADE).and_then(|value| value.to_str().ok());
    if asked != Some(PROTOCOL) {
        return Err(Status::bad_request(format!("ask for an upgrade to {PROTOCOL}")));
    }
    let Some(upgrade) = parts.extensions.remove::<OnUpgrade>() else {
        return Err(Status::bad_request("this connection cannot be upgraded; use HTTP/1.1"));
    };
    // The connection keeps its place among the others, and the audit of the request is complete, when the tunnel ends.
    let slot = parts.extensions.get::<Arc<Slot>>().cloned();
    let audit = parts.extensions.get::<Arc<Record>>().cloned();
    let running = Arc::clone(server);
    server.run_until_stopped(async move {
        let _audit = audit;
        let evicted = async {
            match &slot {
                Some(slot) => slot.evicted().cancelled_owned().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = run(&running, &node, upgrade) => {}
            () = evicted => {}
        }
    });
    let mut answer = Response::new(crate::http::full(Bytes::new()));
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    answer.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(PROTOCOL));
    Ok(answer)
}

/// Takes the tunnel out of the table when its connection ends, however it ends.
struct Entry<'a> {
    tunnels: &'a Tunnels,
    node: &'a str,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.tunnels.remove(self.node, self.id);
        OPEN.add(-1);
        tracing::info!(node = self.node, "a tunnel has ended");
    }
}

async fn run(server: &ApiServer, node: &str, upgrade: OnUpgrade) {
    let handshake = async { http2_client().handshake(upgrade.await?).await };
    let (sender, connection) = match tokio::time::timeout(UPGRADE, handshake).await {
        Ok(Ok(ready)) => ready,
        Ok(Err(error)) => return tracing::debug!(node, %error, "a tunnel did not come to be"),
        Err(_) => return tracing::debug!(node, "a tunnel did not come to be in time"),
    };
    let tunnel = server.tunnels.add(node, sender);
    OPEN.add(1);
    let entry = Entry { tunnels: &server.tunnels, node, id: tunnel.id };
    tracing::info!(node, "a tunnel is open");
    let end = tunnel.end.clone();
    // The table alone keeps the connection from here on.
    drop(tunnel);
    tokio::select! {
        ended = connection => {
            if let Err(error) = ended {
                tracing::debug!(node, %error, "a tunnel broke");
            }
        }
        () = end.cancelled() => {}
    }
    drop(entry);
}

fn http2_client() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(HEAD)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true);
    builder
}
