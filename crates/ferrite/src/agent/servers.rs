//! The API servers that a node knows, and a way to one that answers.
//!
//! All clients of the node connect to one port of its loopback, which leads to the current server. TLS is between client
//! and server: the forwarder sees nothing and is trusted with nothing. A server that refuses a connection, or does not answer
//! probes, is left for the next one, with all connections to it.

use crate::apiserver::BoxError;
use ferrite_client::{Api, Backoff, Change, Informer, ListSelector, Scope};
use ferrite_component::Places;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// A server that does not take a connection in this time is left for the next.
const CONNECT: Duration = Duration::from_secs(3);
/// Interval between probes of the current server, and the time limit of each.
const PROBE: Duration = Duration::from_secs(5);
/// Number of failed probes in a row after which the server counts as gone.
const MISSED: u32 = 2;
/// Connections of a port at once: a node has a few clients with a few connections each. Further ones take the place of the
/// oldest of the peer that has most: pods reach the port of a cluster with several control planes.
const CONNECTIONS: usize = 512;
/// More servers than this are not kept.
const MOST: usize = 64;

/// Where a server is: a host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ServerAddress {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The servers in the order in which they are tried; the first is the current one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ServerList(Vec<ServerAddress>);

impl ServerList {
    /// Those that were kept, and the one that the user names. The user's comes first if it is new.
    fn new(given: Option<ServerAddress>, kept: Vec<ServerAddress>) -> Self {
        let mut list = kept;
        if let Some(given) = given
            && !list.contains(&given)
        {
            list.insert(0, given);
        }
        list.truncate(MOST);
        Self(list)
    }

    /// Takes over the cluster's list. Servers that are still in it keep their order. Others are dropped: a server leaves the
    /// list when it ends, or when it cannot reach the store any more. Only `given` stays, which may be a name in front of
    /// all of them. An empty list changes nothing.
    fn learn(&self, told: &[ServerAddress], given: Option<&ServerAddress>) -> Self {
        if told.is_empty() {
            return self.clone();
        }
        let stays = |server: &&ServerAddress| told.contains(server) || Some(*server) == given;
        let mut list: Vec<ServerAddress> = self.0.iter().filter(stays).cloned().collect();
        for server in told {
            if !list.contains(server) {
                list.push(server.clone());
            }
        }
        list.truncate(MOST);
        Self(list)
    }

    /// The server failed: it is tried last.
    fn fail(&self, server: &ServerAddress) -> Self {
        let (failed, mut list): (Vec<_>, Vec<_>) = self.0.iter().cloned().partition(|s| s == server);
        list.extend(failed);
        Self(list)
    }
}

/// The servers that an EndpointSlice names.
fn servers_of(slice: &EndpointSlice) -> Vec<ServerAddress> {
    let port = slice.ports.as_deref().unwrap_or_default().iter().find_map(|port| port.port);
    let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else { return Vec::new() };
    let endpoints = slice.endpoints.as_deref().unwrap_or_default().iter();
    let ready = endpoints.filter(|endpoint| {
        endpoint.conditions.as_ref().is_none_or(|conditions| conditions.ready != Some(false))
    });
    let addresses = ready.flat_map(|endpoint| endpoint.addresses.iter());
    addresses.map(|address| ServerAddress { host: address.clone(), port }).collect()
}

/// The answer to a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProbeAnswer {
    Ready,
    /// The server says that it cannot work.
    Unready,
    Silent,
}

/// The probes of servers in a row.
#[derive(Debug, Default)]
struct Probes {
    missed: u32,
    /// Servers that were left in a row because they were not ready.
    unready: usize,
}

impl Probes {
    /// Returns true if the server is to be left for one of the others. When none of them is ready, nothing is gained by going
    /// round: the last one stays until a probe of it says something else.
    fn note(&mut self, answer: ProbeAnswer, others: usize) -> bool {
        match answer {
            ProbeAnswer::Ready => {
                *self = Self::default();
                return false;
            }
            ProbeAnswer::Unready if self.unready >= others => {
                self.missed = 0;
                return false;
            }
            ProbeAnswer::Unready | ProbeAnswer::Silent => self.missed += 1,
        }
        if self.missed < MISSED {
            return false;
        }
        self.missed = 0;
        self.unready = if answer == ProbeAnswer::Unready { self.unready + 1 } else { 0 };
        true
    }
}

struct State {
    list: ServerList,
    /// Ends the connections to the current server.
    current: CancellationToken,
}

/// The way to the servers. Clones share it.
#[derive(Clone)]
pub struct Servers {
    state: Arc<Mutex<State>>,
    /// The servers of the list, in no order that means anything.
    known: watch::Sender<Vec<ServerAddress>>,
    given: Option<ServerAddress>,
    port: u16,
    /// Interval between probes of the current server, and the time limit of each.
    probe: Duration,
}

impl Servers {
    /// Starts forwarding. `given` is the user's server; without it there must be a list in `file`.
    pub async fn start(file: &Path, given: Option<ServerAddress>, scope: &Scope) -> Result<Self, BoxError> {
        let kept = match ferrite_hostfs::read_head(file, 1 << 20) {
            Ok(bytes) => ferrite_json::from_slice(&bytes).unwrap_or_default(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(format!("cannot read {}: {e}", file.display()).into()),
        };
        let list = ServerList::new(given.clone(), kept);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let servers = Self { given, ..Self::of(list, port, PROBE) };
        scope.spawn(servers.clone().forward(listener, Places::new(CONNECTIONS), scope.clone()));
        Ok(servers)
    }

    /// Forwards connections of these listeners to servers that are always the same. `probe` is as for [`Servers::probe`].
    pub fn in_front_of(
        servers: Vec<ServerAddress>,
        listeners: Vec<TcpListener>,
        probe: Duration,
        scope: &Scope,
    ) -> std::io::Result<Self> {
        let port = match listeners.first() {
            Some(listener) => listener.local_addr()?.port(),
            None => 0,
        };
        let servers = Self::of(ServerList(servers), port, probe);
        for listener in listeners {
            scope.spawn(servers.clone().forward(listener, Places::new(CONNECTIONS), scope.clone()));
        }
        Ok(servers)
    }

    fn of(list: ServerList, port: u16, probe: Duration) -> Self {
        Self {
            known: watch::Sender::new(list.0.clone()),
            state: Arc::new(Mutex::new(State { list, current: CancellationToken::new() })),
            given: None,
            port,
            probe,
        }
    }

    /// Where clients of this node connect. Certificates of servers are good for it.
    pub fn url(&self) -> String {
        format!("https://{}:{}", Ipv4Addr::LOCALHOST, self.port)
    }

    /// The servers that are known, now and as they change.
    pub fn known(&self) -> watch::Receiver<Vec<ServerAddress>> {
        self.known.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn forward(self, listener: TcpListener, places: Places, scope: Scope) {
        loop {
            let Ok((client, peer)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (servers, place) = (self.clone(), places.enter(peer.ip()));
            scope.spawn(async move {
                tokio::select! {
                    () = servers.serve(client) => {}
                    () = place.evicted() => {}
                }
            });
        }
    }

    async fn serve(&self, mut client: TcpStream) {
        let Some((mut server, gone)) = self.connect().await else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        tokio::select! {
            () = join(&mut client, &mut server) => {}
            () = gone.cancelled() => {}
        }
    }

    /// Connects to the first server that takes a connection, and makes it the current one.
    async fn connect(&self) -> Option<(TcpStream, CancellationToken)> {
        let tries = self.lock().list.0.len();
        for _ in 0..tries {
            let (server, gone) = {
                let state = self.lock();
                (state.list.0.first()?.clone(), state.current.clone())
            };
            let connecting = TcpStream::connect((server.host.as_str(), server.port));
            match tokio::time::timeout(CONNECT, connecting).await {
                Ok(Ok(stream)) => return Some((stream, gone)),
                _ => self.fail(&server),
            }
        }
        None
    }

    /// Leaves a server for the next one, unless that has happened already.
    fn fail(&self, server: &ServerAddress) {
        let next = {
            let mut state = self.lock();
            if state.list.0.first() != Some(server) || state.list.0.len() < 2 {
                return;
            }
            state.list = state.list.fail(server);
            std::mem::take(&mut state.current).cancel();
            state.list.0.first().map(ToString::to_string)
        };
        tracing::warn!(%server, ?next, "an API server does not answer; going on with the next");
    }

    /// Asks the current server again and again if it is ready. A process that is stopped takes connections and never
    /// answers; one that has lost its store answers every request with an error.
    pub async fn probe(self, client: kube::Client) {
        let mut probes = Probes::default();
        let mut backoff = Backoff::new(self.probe, self.probe, 0.2);
        loop {
            tokio::time::sleep(backoff.next_delay()).await;
            let (asked, others) = {
                let state = self.lock();
                (state.list.0.first().cloned(), state.list.0.len().saturating_sub(1))
            };
            let Some(asked) = asked else { continue };
            let Ok(request) = http::Request::get("/readyz").body(Vec::new()) else { return };
            let answer = match tokio::time::timeout(self.probe, client.request_text(request)).await {
                Ok(Ok(_)) => ProbeAnswer::Ready,
                Ok(Err(kube::Error::Api(status))) if status.code >= 500 => ProbeAnswer::Unready,
                Ok(Err(kube::Error::Api(_))) => ProbeAnswer::Ready,
                Ok(Err(_)) | Err(_) => ProbeAnswer::Silent,
            };
            if probes.note(answer, others) {
                self.fail(&asked);
            }
        }
    }

    /// Learns the servers from the endpoints of the `kubernetes` Service, and keeps them in `file` for the next start.
    pub async fn follow(self, file: PathBuf, client: kube::Client, scope: Scope) {
        let selector = ListSelector::fields("metadata.name=kubernetes");
        let slices = Informer::<EndpointSlice>::start(Api::namespaced(client, "default"), selector, &scope);
        let (changed, mut seen) = tokio::sync::mpsc::channel(1);
        slices.subscribe(move |change: &Change<EndpointSlice>| {
            if !matches!(change, Change::Deleted(_)) {
                // One note is enough: the newest slice is read then.
                let _ = changed.try_send(());
            }
        });
        while seen.recv().await.is_some() {
            let told: Vec<ServerAddress> = slices.list().iter().flat_map(|slice| servers_of(slice)).collect();
            let list = {
                let mut state = self.lock();
                let before = state.list.0.first().cloned();
                state.list = state.list.learn(&told, self.given.as_ref());
                if before.as_ref() != state.list.0.first() {
                    tracing::warn!(?before, "an API server left the cluster's list; going on with the next");
                    std::mem::take(&mut state.current).cancel();
                }
                state.list.0.clone()
            };
            self.known.send_replace(list.clone());
            let target = file.clone();
            let kept = tokio::task::spawn_blocking(move || keep(&target, &list)).await;
            if let Ok(Err(error)) = kept {
                tracing::warn!(%error, file = %file.display(), "cannot keep the list of servers");
            }
        }
    }
}

fn keep(file: &Path, list: &[ServerAddress]) -> std::io::Result<()> {
    let temporary = file.with_extension("tmp");
    std::fs::write(&temporary, ferrite_json::to_vec_pretty(&list).map_err(std::io::Error::other)?)?;
    std::fs::rename(&temporary, file)
}

/// Passes bytes on until the server has closed the connection. A client that does not close its side then would keep its place
/// for ever.
async fn join(client: &mut TcpStream, server: &mut TcpStream) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.split(), server.split());
    let asks = async {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
        let _ = to_server.shutdown().await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
        () = asks => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn servers(names: &str) -> Vec<ServerAddress> {
        names.chars().map(|name| ServerAddress { host: name.to_string(), port: 6443 }).collect()
    }

    #[test]
    fn servers_are_learned_and_left() {
        let given = &servers("g")[0];
        let list = |names: &str| ServerList(servers(names));
        for (what, got, want) in [
            ("the first start", ServerList::new(Some(given.clone()), vec![]), "g"),
            ("a later start", ServerList::new(Some(given.clone()), servers("agb")), "agb"),
            ("another server is named", ServerList::new(Some(given.clone()), servers("ab")), "gab"),
            ("nothing is named", ServerList::new(None, servers("ab")), "ab"),
            ("the cluster tells", list("g").learn(&servers("abc"), Some(given)), "gabc"),
            ("a server is gone", list("agbc").learn(&servers("ac"), Some(given)), "agc"),
            ("the current one is gone", list("abc").learn(&servers("bc"), None), "bc"),
            ("the current one is the given one", list("gbc").learn(&servers("bc"), Some(given)), "gbc"),
            ("all are new", list("abc").learn(&servers("de"), None), "de"),
            ("the order stays", list("cab").learn(&servers("abcd"), None), "cabd"),
            ("nothing is told", list("ab").learn(&[], None), "ab"),
            ("the current one fails", list("abc").fail(&servers("a")[0]), "bca"),
            ("another one fails", list("abc").fail(&servers("b")[0]), "acb"),
        ] {
            assert_eq!(got, list(want), "{what}");
        }
        let many: String = ('a'..='z').chain('A'..='Z').chain('0'..='9').chain("-+*/".chars()).collect();
        assert_eq!(list("a").learn(&servers(&many), None).0.len(), MOST);
    }

    #[test]
    fn servers_that_are_not_ready_are_left_once_round() {
        use ProbeAnswer::{Ready, Silent, Unready};
        type Row<'a> = (&'a str, usize, &'a [ProbeAnswer], &'a [bool]);
        let rows: [Row; 6] = [
            ("a ready server stays", 2, &[Ready, Ready, Ready], &[false, false, false]),
            ("one miss is none", 2, &[Unready, Ready, Silent, Ready], &[false; 4]),
            ("a silent server is left", 1, &[Silent, Silent], &[false, true]),
            ("one that has lost its store is left", 1, &[Unready, Unready], &[false, true]),
            ("there is no other", 0, &[Unready, Unready, Unready], &[false; 3]),
            (
                "all have lost it",
                1,
                &[Unready, Unready, Unready, Unready, Unready, Ready, Unready, Unready],
                &[false, true, false, false, false, false, false, true],
            ),
        ];
        for (what, others, answers, want) in rows {
            let mut probes = Probes::default();
            let left: Vec<bool> = answers.iter().map(|answer| probes.note(*answer, others)).collect();
            assert_eq!(left, want, "{what}");
        }
    }

    #[test]
    fn slices_name_servers() {
        let slice = |value| -> EndpointSlice { ferrite_json::from_value(value).unwrap() };
        let ports = json!([{"name": "https", "port": 6443}]);
        let endpoints = json!([
            {"addresses": ["192.0.2.1"], "conditions": {"ready": true}},
            {"addresses": ["192.0.2.2"]},
            {"addresses": ["192.0.2.3"], "conditions": {"ready": false}},
        ]);
        let found = servers_of(&slice(
            json!({"metadata": {}, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}),
        ));
        let texts: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["192.0.2.1:6443", "192.0.2.2:6443"]);
        let none = slice(json!({"metadata": {}, "addressType": "IPv4", "endpoints": endpoints}));
        assert_eq!(servers_of(&none), []);
    }

    #[tokio::test]
    async fn a_connection_goes_to_a_server_that_answers_and_ends_with_it() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("servers.json");
        let at = |listener: &TcpListener| ServerAddress {
            host: "127.0.0.1".into(),
            port: listener.local_addr().unwrap().port(),
        };
        let (dead, one, two) = (
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
        );
        keep(&file, &[at(&dead), at(&one), at(&two)]).unwrap();
        drop(dead);
        let scope = Scope::new();
        let servers = Servers::start(&file, None, &scope).await.unwrap();
        let mut client = TcpStream::connect(("127.0.0.1", servers.port)).await.unwrap();
        let (mut accepted, _) = one.accept().await.unwrap();
        client.write_all(b"x").await.unwrap();
        assert_eq!(accepted.read_u8().await.unwrap(), b'x');
        servers.fail(&at(&one));
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0, "connections to a server that is left end");
        let _client = TcpStream::connect(("127.0.0.1", servers.port)).await.unwrap();
        two.accept().await.unwrap();
        scope.shutdown().await;
    }

    #[tokio::test]
    async fn idle_connections_keep_no_newcomer_out() {
        use tokio::io::AsyncReadExt;
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server_address =
            ServerAddress { host: "127.0.0.1".into(), port: server.local_addr().unwrap().port() };
        let (scope, places) = (Scope::new(), Places::new(4));
        let servers = Servers::of(ServerList(vec![server_address]), address.port(), PROBE);
        scope.spawn(servers.forward(listener, places.clone(), scope.clone()));
        let from = |host: u8| async move {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind((Ipv4Addr::new(127, 0, 0, host), 0).into()).unwrap();
            socket.connect(address).await.unwrap()
        };
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push((from(2).await, server.accept().await.unwrap().0));
        }
        let mut newcomer = from(3).await;
        let (mut accepted, _) =
            tokio::time::timeout(Duration::from_secs(20), server.accept()).await.expect("a place").unwrap();
        accepted.write_all(b"x").await.unwrap();
        assert_eq!(newcomer.read_u8().await.unwrap(), b'x');
        assert_eq!(held[0].0.read(&mut [0]).await.unwrap_or(0), 0, "the oldest of the other peer has ended");
        // A connection that the server has closed gives its place back, though the client keeps its side open.
        let before = places.taken();
        drop(accepted);
        assert_eq!(newcomer.read(&mut [0]).await.unwrap(), 0);
        let given_back = async {
            while places.taken() >= before {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), given_back).await.expect("the place is free");
        scope.shutdown().await;
    }
}
