//! Sockets: UDP, and TCP with several queries on one connection.
//!
//! Queries for names of the cluster are answered where they are read. Only those for other names become tasks, so that a
//! slow resolver delays nobody else.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use ferrite_api::Cidr;
use ferrite_client::Scope;
use futures_util::stream::{FuturesUnordered, StreamExt};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use crate::answer::{Answer, Context, Zone};
use crate::cache::{Question, Reply};
use crate::forward::{Forwarder, Permit};
use crate::metrics::{Metrics, Transport, count};
use crate::records::Index;
use crate::wire::{self, Query, QuestionFlags, Rejected, Response};

/// Longer queries than this come over TCP.
const MAX_UDP_QUERY: usize = 4096;
/// Packets that one task answers before others get their turn.
const BATCH: usize = 64;
const MAX_CONNECTIONS: usize = 512;
const MAX_CONNECTIONS_PER_CLIENT: u32 = 64;
/// Queries of one connection that wait for a resolver.
const MAX_PIPELINED: usize = 64;
/// A connection without a complete query is closed after this.
const IDLE: Duration = Duration::from_secs(10);
/// A client that does not read its replies is closed after this.
const WRITE_TIME: Duration = Duration::from_secs(5);

/// A port that is free for UDP may be taken for TCP.
const ANY_PORT_ATTEMPTS: usize = 16;

/// Everything queries are answered from.
#[derive(Debug)]
pub struct Server {
    zone: Zone,
    index: RwLock<Index>,
    synced: AtomicBool,
    serial: AtomicU32,
    turn: AtomicUsize,
    forwarder: Forwarder,
    metrics: Metrics,
    connections: Arc<Semaphore>,
}

/// The action for a packet.
enum Step {
    Drop,
    Reply(Vec<u8>),
    Later(Box<Pending>),
}

/// A query that waits for a resolver.
struct Pending {
    query: Query,
    question: Question,
    /// Aliases that lead to the question.
    aliases: Vec<Record>,
    limit: u16,
    _permit: Permit,
}

impl Server {
    pub fn new(zone: Zone, forwarder: Forwarder) -> Self {
        Self {
            zone,
            index: RwLock::default(),
            synced: AtomicBool::new(false),
            serial: AtomicU32::new(1),
            turn: AtomicUsize::new(0),
            forwarder,
            metrics: Metrics::default(),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        }
    }

    /// Changes the index. Queries see all of the change or nothing of it.
    pub fn update(&self, serial: u32, change: impl FnOnce(&mut Index)) {
        change(&mut self.index.write().unwrap_or_else(PoisonError::into_inner));
        self.serial.store(serial, Ordering::Relaxed);
    }

    /// From now on a name that is not found does not exist.
    pub fn set_synced(&self) {
        self.synced.store(true, Ordering::Release);
    }

    pub fn render_metrics(&self) -> String {
        self.metrics.render(self.forwarder.cached_entries())
    }

    fn next_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    fn admits(&self, clients: &[Cidr], client: IpAddr) -> bool {
        let host = Cidr { address: client, bits: if client.is_ipv4() { 32 } else { 128 } };
        let admitted = clients.is_empty() || clients.iter().any(|range| range.contains(host));
        if !admitted {
            count(&self.metrics.refused_clients);
        }
        admitted
    }

    /// The reply to a packet if it can be given at once. For fuzzing and measurements.
    pub fn answer_now(&self, packet: &[u8], client: IpAddr) -> Option<Vec<u8>> {
        match self.begin(packet, client, Transport::Udp) {
            Step::Reply(bytes) => Some(bytes),
            Step::Drop | Step::Later(_) => None,
        }
    }

    fn begin(&self, packet: &[u8], client: IpAddr, transport: Transport) -> Step {
        let query = match wire::parse(packet) {
            Ok(query) => query,
            Err(Rejected::Drop) => return Step::Drop,
            Err(Rejected::Reply { code, bytes }) => {
                self.metrics.response(code);
                return Step::Reply(bytes);
            }
        };
        self.metrics.request(transport, client, query.kind);
        let limit = match transport {
            Transport::Udp => query.udp_limit(),
            Transport::Tcp => u16::MAX,
        };
        let answer = {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            let context = Context {
                zone: &self.zone,
                index: &index,
                synced: self.synced.load(Ordering::Acquire),
                serial: self.serial.load(Ordering::Relaxed),
                turn: self.next_turn(),
            };
            context.answer(&query)
        };
        let (aliases, name) = match answer {
            Answer::Local(response) => return self.reply(&query, &response, limit),
            Answer::Alias { records, target } => (records, target),
            Answer::Forward => (Vec::new(), query.name.to_lowercase()),
        };
        if self.forwarder.is_loop(&name, query.kind) {
            return self.reply(&query, &Response::code(ResponseCode::Refused), limit);
        }
        let flags = QuestionFlags {
            recursion_desired: query.recursion_desired,
            checking_disabled: query.checking_disabled,
            dnssec_ok: query.dnssec_ok(),
        };
        let question = Question { name, kind: query.kind, flags };
        if let Some(reply) = self.forwarder.cached(&question) {
            count(&self.metrics.cache_hits);
            return self.reply(&query, &shown(&query, &aliases, &reply, self.next_turn()), limit);
        }
        count(&self.metrics.cache_misses);
        match self.forwarder.permit(client) {
            Some(permit) => {
                Step::Later(Box::new(Pending { query, question, aliases, limit, _permit: permit }))
            }
            None => {
                count(&self.metrics.too_many);
                self.reply(&query, &Response::code(ResponseCode::Refused), limit)
            }
        }
    }

    fn reply(&self, query: &Query, response: &Response, limit: u16) -> Step {
        self.metrics.response(response.code);
        Step::Reply(wire::encode(query, response, limit))
    }

    async fn finish(&self, pending: Box<Pending>) -> Vec<u8> {
        let reply = self.forwarder.resolve(&pending.question).await;
        let response = shown(&pending.query, &pending.aliases, &reply, self.next_turn());
        self.metrics.response(response.code);
        wire::encode(&pending.query, &response, pending.limit)
    }

    /// Answers on the sockets until the scope ends.
    pub fn serve(self: &Arc<Self>, sockets: Sockets, scope: &Scope) {
        let (udp, clients) = (Arc::new(sockets.udp), sockets.clients);
        scope.spawn(Arc::clone(self).serve_udp(udp, clients.clone(), scope.clone()));
        scope.spawn(Arc::clone(self).serve_tcp(sockets.tcp, clients, scope.clone()));
    }

    async fn serve_udp(self: Arc<Self>, socket: Arc<UdpSocket>, admitted: Vec<Cidr>, scope: Scope) {
        let mut buffer = vec![0; MAX_UDP_QUERY];
        loop {
            if let Err(error) = socket.readable().await {
                tracing::error!(%error, "UDP socket of the DNS server");
                return;
            }
            for _ in 0..BATCH {
                // Errors are those of earlier replies, such as a client's closed port, and concern no other client.
                let (size, client) = match socket.try_recv_from(&mut buffer) {
                    Ok(received) => received,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => continue,
                };
                if client.port() == 0 || !self.admits(&admitted, client.ip()) {
                    continue;
                }
                match self.begin(&buffer[..size], client.ip(), Transport::Udp) {
                    Step::Drop => {}
                    // A full socket loses the reply, as a full network would: the client asks again.
                    Step::Reply(bytes) => drop(socket.try_send_to(&bytes, client)),
                    Step::Later(pending) => {
                        let (server, socket) = (Arc::clone(&self), Arc::clone(&socket));
                        scope.spawn(async move {
                            let bytes = server.finish(pending).await;
                            let _ = socket.send_to(&bytes, client).await;
                        });
                    }
                }
            }
            tokio::task::yield_now().await;
        }
    }

    async fn serve_tcp(self: Arc<Self>, listener: TcpListener, admitted: Vec<Cidr>, scope: Scope) {
        let clients = Arc::new(crate::limit::PerClient::new(MAX_CONNECTIONS_PER_CLIENT));
        loop {
            let (stream, client) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: others must give some back first.
                    tracing::warn!(%error, "cannot accept a DNS connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            if !self.admits(&admitted, client.ip()) {
                continue;
            }
            let Ok(total) = Arc::clone(&self.connections).try_acquire_owned() else { continue };
            let Some(share) = clients.take(client.ip()) else { continue };
            let server = Arc::clone(&self);
            scope.spawn(async move {
                // A client that goes away is no news.
                let _ = server.serve_connection(stream, client.ip()).await;
                drop((total, share));
            });
        }
    }

    /// Replies go out in the order in which they are ready; the client matches them by their ids.
    async fn serve_connection(&self, mut stream: TcpStream, client: IpAddr) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut input = BytesMut::with_capacity(1024);
        let mut pending = FuturesUnordered::new();
        let mut deadline = Instant::now() + IDLE;
        loop {
            let mut output = Vec::new();
            while pending.len() < MAX_PIPELINED
                && let Some(packet) = next_packet(&mut input)
            {
                deadline = Instant::now() + IDLE;
                match self.begin(&packet, client, Transport::Tcp) {
                    Step::Drop => return Ok(()),
                    Step::Reply(bytes) => push(&mut output, &bytes),
                    Step::Later(query) => pending.push(self.finish(query)),
                }
                if output.len() > usize::from(u16::MAX) {
                    break;
                }
            }
            if !output.is_empty() {
                timeout(WRITE_TIME, stream.write_all(&output)).await??;
                // There may be more queries in the buffer.
                continue;
            }
            let room = pending.len() < MAX_PIPELINED;
            tokio::select! {
                Some(bytes) = pending.next() => {
                    let mut output = Vec::new();
                    push(&mut output, &bytes);
                    timeout(WRITE_TIME, stream.write_all(&output)).await??;
                    deadline = Instant::now() + IDLE;
                }
                read = timeout_at(deadline, stream.read_buf(&mut input)), if room => match read {
                    // Replies that are still to come go out before an idle connection is closed.
                    Err(_) if !pending.is_empty() => deadline = Instant::now() + IDLE,
                    Err(_) => return Ok(()),
                    Ok(Ok(0)) if pending.is_empty() => return Ok(()),
                    Ok(Ok(0)) => {
                        while let Some(bytes) = pending.next().await {
                            let mut output = Vec::new();
                            push(&mut output, &bytes);
                            timeout(WRITE_TIME, stream.write_all(&output)).await??;
                        }
                        return Ok(());
                    }
                    Ok(read) => drop(read?),
                },
            }
        }
    }
}

/// The next whole packet, without its length.
fn next_packet(input: &mut BytesMut) -> Option<BytesMut> {
    let length = usize::from(u16::from_be_bytes([*input.first()?, *input.get(1)?]));
    if input.len() < 2 + length {
        input.reserve(2 + length - input.len());
        return None;
    }
    input.advance(2);
    Some(input.split_to(length))
}

fn push(output: &mut Vec<u8>, packet: &[u8]) {
    // Replies are never larger than their limit, which is 16 bits.
    let length = u16::try_from(packet.len()).unwrap_or(u16::MAX);
    output.extend_from_slice(&length.to_be_bytes());
    output.extend_from_slice(&packet[..usize::from(length)]);
}

/// A resolver's reply as a client sees it.
fn shown(query: &Query, aliases: &[Record], reply: &Reply, turn: usize) -> Response {
    let mut response = Response::clone(&reply.response);
    rotate_addresses(&mut response.answers, turn);
    let all = response.answers.iter_mut().chain(&mut response.authorities).chain(&mut response.additionals);
    for record in all {
        record.ttl = reply.ttl;
        // Written as the client wrote it, not with the case that we made up for the resolver.
        if record.name == query.name {
            record.name = query.name.clone();
        }
    }
    if !aliases.is_empty() {
        response.answers.splice(0..0, aliases.iter().cloned());
        response.authoritative = true;
        // As CoreDNS: the alias exists, whatever becomes of its target. A resolver's failure must be tried again.
        match response.code {
            ResponseCode::NoError => {}
            ResponseCode::NXDomain => response.code = ResponseCode::NoError,
            _ => response = Response::code(ResponseCode::ServFail),
        }
    }
    response
}

/// As CoreDNS's `loadbalance`: addresses take turns in their places, aliases stay before them.
fn rotate_addresses(records: &mut [Record], turn: usize) {
    let is_address = |record: &Record| matches!(record.record_type(), RecordType::A | RecordType::AAAA);
    let places: Vec<usize> = (0..records.len()).filter(|at| is_address(&records[*at])).collect();
    if places.len() < 2 {
        return;
    }
    let mut rotated: Vec<Record> = places.iter().map(|at| records[*at].clone()).collect();
    rotated.rotate_left(turn % places.len());
    for (at, record) in places.into_iter().zip(rotated) {
        records[at] = record;
    }
}

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    pub address: SocketAddr,
    /// Packets from other interfaces do not reach the socket.
    pub device: Option<String>,
    /// Ranges of clients; others are ignored. Empty means every client that can reach the socket.
    pub clients: Vec<Cidr>,
}

/// A UDP and a TCP socket of one address.
#[derive(Debug)]
pub struct Sockets {
    udp: UdpSocket,
    tcp: TcpListener,
    clients: Vec<Cidr>,
}

impl Sockets {
    /// Port zero is any port that is free for both.
    pub fn bind(listen: &Listen) -> io::Result<Self> {
        for _ in 0..ANY_PORT_ATTEMPTS {
            match Self::bind_once(listen) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && listen.address.port() == 0 => {}
                other => return other,
            }
        }
        Self::bind_once(listen)
    }

    fn bind_once(listen: &Listen) -> io::Result<Self> {
        use nix::sys::socket::SockType;
        let udp = crate::socket::bind(listen, SockType::Datagram)?;
        let udp = UdpSocket::from_std(udp.into())?;
        let listen = Listen { address: udp.local_addr()?, ..listen.clone() };
        let tcp = crate::socket::bind(&listen, SockType::Stream)?;
        Ok(Self { udp, tcp: TcpListener::from_std(tcp.into())?, clients: listen.clients })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.udp.local_addr()
    }
}

/// A TCP socket alone, with the same reach.
pub fn bind_tcp(listen: &Listen) -> io::Result<TcpListener> {
    let socket = crate::socket::bind(listen, nix::sys::socket::SockType::Stream)?;
    TcpListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::rr::rdata::{A, CNAME};
    use hickory_proto::rr::{Name, RData};

    #[test]
    fn addresses_of_others_take_turns_behind_their_alias() {
        let record = |data| Record::from_rdata(Name::root(), 1, data);
        let address = |last| record(RData::A(A([192, 0, 2, last].into())));
        let mut records = vec![record(RData::CNAME(CNAME(Name::root()))), address(1), address(2), address(3)];
        rotate_addresses(&mut records, 4);
        let shown: Vec<String> = records.iter().map(|r| r.data.to_string()).collect();
        assert_eq!(shown, [".", "192.0.2.2", "192.0.2.3", "192.0.2.1"]);
        rotate_addresses(&mut records[..2], 1);
        rotate_addresses(&mut [], 1);
        assert_eq!(records[1].data.to_string(), "192.0.2.2");
    }
}
