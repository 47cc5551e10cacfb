//! Connections that agents open to this server, over which the server reaches their kubelets and their pods.
//!
//! An agent asks for an upgrade at [`PATH`]. On the upgraded connection the roles are reversed: this server is the HTTP/2
//! client, each of its CONNECT requests is one stream to the kubelet or to a pod of the node, and the agent dials. TLS with
//! the kubelet goes on
//! inside the stream, so the agent's word is trusted for nothing. A tunnel belongs to the node that its user is; no request
//! can name another one. A node gets streams for addresses of its own range of pods only. Decision 0023 has the reasons.

mod pods;
mod room;

pub use room::{POD_STREAMS, STREAMS};

use crate::audit::Record;
use crate::auth::{self, User};
use crate::connections::Slot;
use crate::http::Response;
use crate::registry::View;
use crate::server::ApiServer;
use crate::stream::Guarded;
use crate::traffic::{Account, TooManyConnections};
use ::http::request::Parts;
use ::http::{HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use ferrite_api::{Cidr, Status};
use ferrite_component::metrics::{Gauge, registry};
use http_body_util::Empty;
use hyper::client::conn::http2::{self, SendRequest};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use pods::PodRanges;
use room::{Room, StreamPlace, Target};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Where agents open tunnels.
pub const PATH: &str = "/ferrite/v1/tunnel";
/// The protocol that the connection is upgraded to.
pub const PROTOCOL: &str = "ferrite-tunnel-v1";
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

/// The ranges of nodes are read this often at most.
const RANGES_KEPT: Duration = Duration::from_secs(1);

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
    #[error("the agent of node {node} cannot connect to the pod at {address}: {code}")]
    NoPod { node: String, address: SocketAddr, code: StatusCode },
    #[error(transparent)]
    TooMany(#[from] TooManyConnections),
}

/// Marks a request that is made as another user than its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Impersonated;

#[derive(Clone)]
struct Tunnel {
    id: u64,
    sender: SendRequest<Empty<Bytes>>,
    room: Arc<Room>,
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
pub(crate) struct Tunnels {
    table: Mutex<Table>,
    /// The ranges of all pods of the cluster. Without them no stream to a pod is asked for.
    cluster: Vec<Cidr>,
    /// The ranges of nodes, and the time when they were read.
    ranges: Mutex<Option<(Instant, Arc<PodRanges>)>>,
}

impl Tunnels {
    pub fn new(cluster: Vec<Cidr>) -> Self {
        Self { cluster, ..Self::default() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranges of nodes. They hardly ever change: a node keeps its range for life.
    fn ranges(&self, view: impl FnOnce() -> View) -> Arc<PodRanges> {
        let mut kept = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, ranges)) = kept.as_ref().filter(|(read, _)| read.elapsed() < RANGES_KEPT) {
            return Arc::clone(ranges);
        }
        let nodes = view().oldest_first("", "nodes");
        let ranges = Arc::new(PodRanges::of(&self.cluster, nodes.iter().map(|node| &**node)));
        *kept = Some((Instant::now(), Arc::clone(&ranges)));
        ranges
    }

    /// Adds a tunnel, which is the node's first choice from now on. The oldest of too many ends.
    fn add(&self, node: &str, sender: SendRequest<Empty<Bytes>>) -> Tunnel {
        let mut table = self.table();
        table.next += 1;
        let tunnel = Tunnel { id: table.next, sender, room: Room::new(), end: CancellationToken::new() };
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
        account: Option<&Account>,
        node: &str,
        kubelet: SocketAddr,
    ) -> Result<Option<TunnelStream>, TunnelError> {
        for tunnel in self.of(node) {
            match tunnel.connect(account, Target::Kubelet, kubelet).await {
                Ok(stream) => return Ok(Some(stream)),
                Err(error @ TunnelError::Broken(_)) => {
                    tracing::debug!(node, error = &error as &dyn std::error::Error, "a tunnel does not work");
                }
                Err(final_) => return Err(final_),
            }
        }
        Ok(None)
    }

    /// Opens a stream to a pod, through the agent of the node that has its address. None if no node with a tunnel has it, or
    /// if the agent leads nobody there, as agents of older versions. The caller limits the time.
    pub async fn connect_pod(
        &self,
        account: Option<&Account>,
        view: impl FnOnce() -> View,
        address: SocketAddr,
    ) -> Result<Option<TunnelStream>, TunnelError> {
        if self.cluster.is_empty() || self.table().nodes.is_empty() {
            return Ok(None);
        }
        let ranges = self.ranges(view);
        let Some(node) = ranges.node_of(address.ip()) else { return Ok(None) };
        for tunnel in self.of(node) {
            match tunnel.connect(account, Target::Pod, address).await {
                Ok(stream) => return Ok(Some(stream)),
                Err(TunnelError::Refused(StatusCode::FORBIDDEN)) => {
                    tracing::debug!(node, %address, "the agent leads nobody to this address");
                    return Ok(None);
                }
                Err(TunnelError::Refused(code)) => {
                    return Err(TunnelError::NoPod { node: node.to_owned(), address, code });
                }
                Err(error @ TunnelError::TooMany(_)) => return Err(error),
                Err(error) => {
                    tracing::debug!(node, error = &error as &dyn std::error::Error, "a tunnel does not work");
                }
            }
        }
        Ok(None)
    }
}

impl Tunnel {
    async fn connect(
        &self,
        account: Option<&Account>,
        target: Target,
        to: SocketAddr,
    ) -> Result<TunnelStream, TunnelError> {
        let place = self.room.enter(account, target).await?;
        let mut request = Request::new(Empty::new());
        *request.method_mut() = ::http::Method::CONNECT;
        let authority = to.to_string();
        *request.uri_mut() = authority.parse().expect("an address and a port are an authority");
        let mut sender = self.sender.clone();
        sender.ready().await.map_err(TunnelError::Broken)?;
        let response = sender.send_request(request).await.map_err(TunnelError::Broken)?;
        if response.status() != StatusCode::OK {
            return Err(TunnelError::Refused(response.status()));
        }
        let stream = hyper::upgrade::on(response).await.map_err(TunnelError::Broken)?;
        Ok(Guarded::new(TokioIo::new(stream), place))
    }
}

/// A stream to a kubelet or to a pod. It counts for the tunnel while it lasts.
pub(crate) type TunnelStream = Guarded<TokioIo<Upgraded>, StreamPlace>;

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

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::service::service_fn;
    use std::convert::Infallible;

    /// A tunnel whose agent answers with this code, and without one is gone.
    async fn agent(code: Option<StatusCode>) -> SendRequest<Empty<Bytes>> {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let service = service_fn(move |_: Request<hyper::body::Incoming>| async move {
            let mut answer = ::http::Response::new(Empty::<Bytes>::new());
            *answer.status_mut() = code.unwrap_or_default();
            Ok::<_, Infallible>(answer)
        });
        let serve = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(theirs), service);
        let serving = tokio::spawn(serve);
        let (mut sender, connection) = http2_client().handshake(TokioIo::new(ours)).await.unwrap();
        tokio::spawn(connection);
        sender.ready().await.unwrap();
        if code.is_none() {
            serving.abort();
        }
        sender
    }

    fn tunnels() -> Tunnels {
        let cluster = vec![Cidr::parse("10.244.0.0/16").unwrap()];
        let node = ferrite_json::json!({"metadata": {"name": "n"}, "spec": {"podCIDRs": ["10.244.1.0/24"]}});
        let ranges = Arc::new(PodRanges::of(&cluster, [&node]));
        Tunnels { ranges: Mutex::new(Some((Instant::now(), ranges))), ..Tunnels::new(cluster) }
    }

    /// The outcome of a connection to a pod: a stream, none and so a direct attempt, or an error.
    async fn outcome(tunnels: &Tunnels, address: &str) -> String {
        let kept = || unreachable!("the ranges were read just now");
        match tunnels.connect_pod(None, kept, address.parse().unwrap()).await {
            Ok(Some(_)) => "stream".to_owned(),
            Ok(None) => "direct".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[tokio::test]
    async fn a_pod_is_reached_through_a_tunnel_or_directly() {
        const POD: &str = "10.244.1.5:80";
        let no_pod = "the agent of node n cannot connect to the pod at 10.244.1.5:80: ";
        for (what, codes, expected) in [
            ("no tunnel", vec![], "direct".to_owned()),
            ("an agent that connects", vec![Some(StatusCode::OK)], "stream".to_owned()),
            ("an agent that leads nobody to pods", vec![Some(StatusCode::FORBIDDEN)], "direct".to_owned()),
            ("a pod that refuses", vec![Some(StatusCode::BAD_GATEWAY)], format!("{no_pod}502 Bad Gateway")),
            (
                "a pod that is silent",
                vec![Some(StatusCode::GATEWAY_TIMEOUT)],
                format!("{no_pod}504 Gateway Timeout"),
            ),
            ("a broken tunnel after a good one", vec![Some(StatusCode::OK), None], "stream".to_owned()),
            ("broken tunnels only", vec![None, None], "direct".to_owned()),
        ] {
            let tunnels = tunnels();
            for code in codes {
                tunnels.add("n", agent(code).await);
            }
            assert_eq!(outcome(&tunnels, POD).await, expected, "{what}");
            assert_eq!(outcome(&tunnels, "10.244.2.5:80").await, "direct", "{what}: another node's pod");
            assert_eq!(outcome(&tunnels, "192.0.2.5:80").await, "direct", "{what}: no pod");
        }
    }
}
