//! Questions to other resolvers.
//!
//! An attacker who is not on the way must guess a source port, an id and the letter case of the name, all random for
//! every question; packets that guess wrong make us ask over TCP, where guessing is of no use.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant as Deadline, timeout, timeout_at};

use crate::cache::{Cache, Lifetime, Question, Reply};
use crate::limit::{PerClient, Share};
use crate::resolvers::{Resolvers, Upstream};
use crate::wire::{BadReply, Case, Extension, Response, UPSTREAM_UDP, encode_question, parse_reply};

/// As kubeadm's Corefile: `max_concurrent 1000`.
const MAX_CONCURRENT: usize = 1000;
/// One client leaves room for others.
const MAX_PER_CLIENT: u32 = 250;
const ROUNDS: usize = 2;
/// Packets that are no reply to the question before it goes over TCP.
const MAX_WRONG: usize = 3;

/// Time limits for resolvers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For one attempt.
    pub attempt: Duration,
    /// For all attempts for one question together.
    pub total: Duration,
}

impl Default for Patience {
    /// As CoreDNS's `forward`.
    fn default() -> Self {
        Self { attempt: Duration::from_secs(2), total: Duration::from_secs(5) }
    }
}

/// Why there is no reply.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    #[error("there is no resolver to ask")]
    NoResolver,
    #[error("no resolver answered in time")]
    Timeout,
    #[error("resolver {server}")]
    Exchange {
        server: SocketAddr,
        #[source]
        source: ExchangeError,
    },
}

/// The error of one resolver.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    #[error("cannot be reached")]
    Io(#[from] io::Error),
    #[error("did not answer in time")]
    Timeout,
    #[error("sent a bad reply")]
    Bad(#[from] BadReply),
    #[error("the question cannot be written")]
    Question,
}

type InFlight = HashMap<Question, watch::Receiver<Option<Reply>>>;

/// Asks other resolvers, each question once however many clients have it.
#[derive(Debug)]
pub struct Forwarder {
    resolvers: Resolvers,
    patience: Patience,
    cache: Mutex<Cache>,
    in_flight: Mutex<InFlight>,
    total: Arc<Semaphore>,
    clients: Arc<PerClient>,
    probe: Mutex<Option<(Name, Arc<Upstream>)>>,
}

/// Room for one client's question.
#[derive(Debug)]
pub struct Permit {
    _total: OwnedSemaphorePermit,
    _share: Share,
}

/// Ends the wait of others when the asker is dropped.
struct Asking<'a> {
    in_flight: &'a Mutex<InFlight>,
    question: &'a Question,
    done: watch::Sender<Option<Reply>>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner).remove(self.question);
    }
}

impl Forwarder {
    pub fn new(resolvers: Resolvers, patience: Patience) -> Self {
        Self {
            resolvers,
            patience,
            cache: Mutex::default(),
            in_flight: Mutex::default(),
            total: Arc::new(Semaphore::new(MAX_CONCURRENT)),
            clients: Arc::new(PerClient::new(MAX_PER_CLIENT)),
            probe: Mutex::default(),
        }
    }

    pub fn cached(&self, question: &Question) -> Option<Reply> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(question, Instant::now())
    }

    /// Number of cached answers and denials.
    pub fn cached_entries(&self) -> (usize, usize) {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// None when the client, or all together, wait for too many replies already.
    pub fn permit(&self, client: IpAddr) -> Option<Permit> {
        let total = Arc::clone(&self.total).try_acquire_owned().ok()?;
        let share = self.clients.take(client)?;
        Some(Permit { _total: total, _share: share })
    }

    /// Returns true if a client's query is the probe that we sent to a resolver: then the resolver forwards
    /// to us.
    pub fn is_loop(&self, name: &Name, kind: RecordType) -> bool {
        if kind != RecordType::HINFO {
            return false;
        }
        let mut probe = self.probe.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, upstream)) = probe.take_if(|(sent, _)| sent == name) else { return false };
        if upstream.set_looping() {
            tracing::error!(
                resolver = %upstream.address,
                "the resolver sends questions back to this DNS server; it is not asked any more: name another resolver"
            );
        }
        true
    }

    /// The reply of a resolver, or of the cache. A failure of all resolvers is a reply as well.
    pub async fn resolve(&self, question: &Question) -> Reply {
        loop {
            if let Some(reply) = self.cached(question) {
                return reply;
            }
            let waiting = {
                let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
                match in_flight.get(question) {
                    Some(other) => Err(other.clone()),
                    None => {
                        let (done, wait) = watch::channel(None);
                        in_flight.insert(question.clone(), wait);
                        Ok(Asking { in_flight: &self.in_flight, question, done })
                    }
                }
            };
            match waiting {
                Ok(asking) => {
                    let reply = self.ask(question).await;
                    asking.done.send_replace(Some(reply.clone()));
                    return reply;
                }
                Err(mut other) => {
                    if let Ok(reply) = other.wait_for(Option::is_some).await
                        && let Some(reply) = reply.clone()
                    {
                        return reply;
                    }
                    // The client that asked has gone away, and its question with it.
                }
            }
        }
    }

    async fn ask(&self, question: &Question) -> Reply {
        let (response, size) = match self.ask_all(question).await {
            Ok((message, size)) => (response_of(message), size),
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::debug!(name = %question.name, kind = %question.kind, %error, cause, "not resolved");
                (Response::code(ResponseCode::ServFail), 0)
            }
        };
        let response = Arc::new(response);
        let ttl = Lifetime::of(&response).ttl();
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.insert(question.clone(), Arc::clone(&response), size, Instant::now());
        Reply { response, ttl }
    }

    async fn ask_all(&self, question: &Question) -> Result<(Message, usize), ForwardError> {
        let deadline = Deadline::now() + self.patience.total;
        let mut last = ForwardError::NoResolver;
        let mut servfail = None;
        for _ in 0..ROUNDS {
            for upstream in self.resolvers.for_name(&question.name) {
                match timeout_at(deadline, exchange(upstream.address, question, self.patience.attempt)).await
                {
                    Err(_) => {
                        upstream.failed();
                        self.suspect_loop(&upstream).await;
                        return servfail.ok_or(ForwardError::Timeout);
                    }
                    // Another resolver may be able to.
                    Ok(Ok((message, size)))
                        if matches!(
                            message.metadata.response_code,
                            ResponseCode::ServFail | ResponseCode::Refused | ResponseCode::NotImp
                        ) =>
                    {
                        servfail = Some((message, size));
                    }
                    Ok(Ok(reply)) => {
                        upstream.succeeded();
                        return Ok(reply);
                    }
                    Ok(Err(source)) => {
                        upstream.failed();
                        if matches!(source, ExchangeError::Timeout) {
                            self.suspect_loop(&upstream).await;
                        }
                        last = ForwardError::Exchange { server: upstream.address, source };
                    }
                }
            }
            if let Some(reply) = servfail {
                return Ok(reply);
            }
        }
        Err(last)
    }

    /// A resolver on this machine that does not answer may be waiting for us. A question that only we can have asked
    /// shows it, if it comes back.
    async fn suspect_loop(&self, upstream: &Arc<Upstream>) {
        // Our sockets hear nothing from other machines. An address that can be bound is one of this machine.
        let local = UdpSocket::bind((upstream.address.ip(), 0)).await.is_ok();
        if !local || upstream.is_looping() {
            return;
        }
        let number = || rand::random::<u64>().to_string();
        let Ok(mut name) = Name::from_labels([number().as_bytes(), number().as_bytes()]) else { return };
        name.set_fqdn(true);
        *self.probe.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((name.clone(), Arc::clone(upstream)));
        let flags = crate::wire::QuestionFlags {
            recursion_desired: true,
            checking_disabled: false,
            dnssec_ok: false,
        };
        let Some(packet) = encode_question(rand::random(), &name, RecordType::HINFO, flags, Extension::None)
        else {
            return;
        };
        if let Ok(socket) = connected(upstream.address).await {
            // Nobody waits for the reply: the probe itself is the news.
            let _ = socket.send(&packet).await;
        }
    }
}

/// A reply without the parts that are only between us and the resolver.
fn response_of(message: Message) -> Response {
    let keep = |mut records: Vec<hickory_proto::rr::Record>| {
        records.retain(|record| !matches!(record.record_type(), RecordType::TSIG | RecordType::SIG));
        records
    };
    Response {
        code: message.metadata.response_code,
        authoritative: message.metadata.authoritative,
        recursion_available: message.metadata.recursion_available,
        authentic_data: message.metadata.authentic_data,
        answers: keep(message.answers),
        authorities: keep(message.authorities),
        additionals: keep(message.additionals),
    }
}

/// A socket with a random port that takes packets of this resolver alone.
async fn connected(server: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    Ok(socket)
}

/// One resolver's reply and its size. Old resolvers know no EDNS and say that they cannot read the question.
async fn exchange(
    server: SocketAddr,
    question: &Question,
    attempt: Duration,
) -> Result<(Message, usize), ExchangeError> {
    let reply = exchange_with(server, question, attempt, Extension::Edns).await?;
    let code = reply.0.metadata.response_code;
    if matches!(code, ResponseCode::FormErr | ResponseCode::NotImp) && reply.0.edns.is_none() {
        return exchange_with(server, question, attempt, Extension::None).await;
    }
    Ok(reply)
}

/// Over TCP if UDP is not enough or not safe.
async fn exchange_with(
    server: SocketAddr,
    question: &Question,
    attempt: Duration,
    extension: Extension,
) -> Result<(Message, usize), ExchangeError> {
    let id: u16 = rand::random();
    let mut name = question.name.clone();
    name.randomize_label_case();
    let packet = encode_question(id, &name, question.kind, question.flags, extension)
        .ok_or(ExchangeError::Question)?;
    let udp = timeout(attempt, over_udp(server, &packet, id, &name, question.kind));
    match udp.await.map_err(|_| ExchangeError::Timeout)?? {
        Some((message, size)) if !message.metadata.truncation => Ok((message, size)),
        _ => {
            let tcp = timeout(attempt, over_tcp(server, &packet, id, &question.name, question.kind));
            tcp.await.map_err(|_| ExchangeError::Timeout)?
        }
    }
}

/// None when TCP should be tried: packets came that are not the reply.
async fn over_udp(
    server: SocketAddr,
    packet: &[u8],
    id: u16,
    name: &Name,
    kind: RecordType,
) -> Result<Option<(Message, usize)>, ExchangeError> {
    let socket = connected(server).await?;
    socket.send(packet).await?;
    // More than was offered is cut, cannot be read, and comes over TCP.
    let mut buffer = vec![0; usize::from(UPSTREAM_UDP)];
    for _ in 0..MAX_WRONG {
        let size = socket.recv(&mut buffer).await?;
        match parse_reply(&buffer[..size], id, name, kind, Case::Exact) {
            Ok(message) => return Ok(Some((message, size))),
            Err(BadReply::Mismatch) => {}
            // A resolver that does not keep the case is believed over TCP.
            Err(BadReply::Case | BadReply::Unreadable) => return Ok(None),
        }
    }
    Ok(None)
}

async fn over_tcp(
    server: SocketAddr,
    packet: &[u8],
    id: u16,
    name: &Name,
    kind: RecordType,
) -> Result<(Message, usize), ExchangeError> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(packet.len()).map_err(|_| ExchangeError::Question)?;
    stream.write_all(&[&length.to_be_bytes(), packet].concat()).await?;
    let size = usize::from(stream.read_u16().await?);
    let mut buffer = vec![0; size];
    stream.read_exact(&mut buffer).await?;
    // Over TCP the case protects nothing, and some resolvers do not keep it.
    Ok((parse_reply(&buffer, id, name, kind, Case::Any)?, size))
}
