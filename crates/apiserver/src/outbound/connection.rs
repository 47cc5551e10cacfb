//! Connections to others, kept and shared.

use super::CallError;
use super::destination::Shared;
use crate::registry::View;
use crate::stream::Stream;
use crate::tunnel::Tunnels;
use ::http::{Request, Response};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A connection that nobody has used for so long is ended.
const IDLE: Duration = Duration::from_secs(90);
/// Connections of HTTP/1 that are kept for one address.
const KEPT: usize = 16;
/// Addresses that connections are kept for.
const ORIGINS: usize = 512;
/// The largest head of an answer.
const HEAD: usize = 64 << 10;

/// One end to talk to.
#[derive(Clone)]
pub(super) struct Origin {
    pub destination: Arc<Shared>,
    pub address: SocketAddr,
}

impl Origin {
    fn key(&self) -> (u64, SocketAddr) {
        (self.destination.identity(), self.address)
    }
}

enum Http {
    /// Any number of requests at once.
    Two(http2::SendRequest<Full<Bytes>>),
    /// One request at a time.
    One(http1::SendRequest<Full<Bytes>>),
}

/// Sends requests on a connection.
pub(super) struct Sender {
    http: Http,
    /// When the connection was used last.
    used: Arc<watch::Sender<Instant>>,
    /// The connection was there before this request.
    pub was_kept: bool,
}

impl Sender {
    pub fn is_shared(&self) -> bool {
        matches!(self.http, Http::Two(_))
    }

    fn is_alive(&self) -> bool {
        match &self.http {
            Http::Two(sender) => !sender.is_closed(),
            Http::One(sender) => !sender.is_closed(),
        }
    }

    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, hyper::Error> {
        self.used.send_replace(Instant::now());
        match &mut self.http {
            Http::Two(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
            Http::One(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }

    /// The same connection for another request, where it takes more than one.
    fn share(&self) -> Option<Self> {
        match &self.http {
            Http::Two(sender) => {
                Some(Self { http: Http::Two(sender.clone()), used: Arc::clone(&self.used), was_kept: true })
            }
            Http::One(_) => None,
        }
    }
}

/// All connections.
pub(super) struct Connections {
    tunnels: Arc<Tunnels>,
    kept: Mutex<HashMap<(u64, SocketAddr), Vec<Sender>>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Connections {
    pub fn new(tunnels: Arc<Tunnels>) -> Self {
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        Self { tunnels, kept: Mutex::default(), stop, tasks }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(u64, SocketAddr), Vec<Sender>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection: a kept one, unless it has to be fresh.
    pub async fn get(&self, view: &View, origin: &Origin, fresh: bool) -> Result<Sender, CallError> {
        if !fresh && let Some(sender) = self.take(origin) {
            return Ok(sender);
        }
        let sender = self.connect(view, origin).await?;
        if let Some(shared) = sender.share() {
            self.keep(origin, shared);
        }
        Ok(sender)
    }

    fn take(&self, origin: &Origin) -> Option<Sender> {
        let mut kept = self.lock();
        let senders = kept.get_mut(&origin.key())?;
        senders.retain(Sender::is_alive);
        let last = senders.last()?;
        match last.share() {
            Some(shared) => Some(shared),
            None => senders.pop(),
        }
    }

    fn keep(&self, origin: &Origin, mut sender: Sender) {
        sender.was_kept = true;
        let mut kept = self.lock();
        if kept.len() >= ORIGINS && !kept.contains_key(&origin.key()) {
            kept.retain(|_, senders| {
                senders.retain(Sender::is_alive);
                !senders.is_empty()
            });
            if kept.len() >= ORIGINS {
                return;
            }
        }
        let senders = kept.entry(origin.key()).or_default();
        if sender.is_shared() {
            // One is enough.
            senders.clear();
        }
        if senders.len() < KEPT {
            senders.push(sender);
        }
    }

    /// Keeps a connection whose request is done.
    pub fn put_back(&self, origin: &Origin, sender: Sender) {
        sender.used.send_replace(Instant::now());
        if !sender.is_shared() && sender.is_alive() {
            self.keep(origin, sender);
        }
    }

    /// The way to an address: through the tunnel of the node of a Service's pod, or else directly.
    async fn reach(&self, view: &View, origin: &Origin) -> Result<Box<dyn Stream>, CallError> {
        let address = origin.address;
        if origin.destination.is_service() {
            let tunnelled = self.tunnels.connect_pod(None, || view.clone(), address).await;
            if let Some(stream) = tunnelled.map_err(|source| CallError::Tunnel { address, source })? {
                return Ok(Box::new(stream));
            }
        }
        let failed = |source| CallError::Connect { address, source };
        let tcp = TcpStream::connect(address).await.map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        Ok(Box::new(tcp))
    }

    async fn connect(&self, view: &View, origin: &Origin) -> Result<Sender, CallError> {
        let transport = self.reach(view, origin).await?;
        let destination = &origin.destination;
        let connector = TlsConnector::from(Arc::clone(&destination.tls));
        let stream = connector.connect(destination.server_name.clone(), transport).await;
        let stream = stream.map_err(CallError::Tls)?;
        let two = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        let (used, watched) = watch::channel(Instant::now());
        let stream = TokioIo::new(stream);
        let http = if two {
            let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_header_list_size(u32::try_from(HEAD).unwrap_or(u32::MAX))
                .keep_alive_interval(Duration::from_secs(30))
                .keep_alive_timeout(Duration::from_secs(15))
                .handshake(stream)
                .await?;
            self.run(connection, watched);
            Http::Two(sender)
        } else {
            let (sender, connection) = http1::Builder::new().max_buf_size(HEAD).handshake(stream).await?;
            self.run(connection, watched);
            Http::One(sender)
        };
        Ok(Sender { http, used: Arc::new(used), was_kept: false })
    }

    /// Drives a connection until it ends, is idle, or the server stops.
    fn run(
        &self,
        connection: impl Future<Output = Result<(), hyper::Error>> + Send + 'static,
        mut used: watch::Receiver<Instant>,
    ) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            let idle = async {
                loop {
                    let until = *used.borrow_and_update() + IDLE;
                    tokio::select! {
                        () = tokio::time::sleep_until(until) => return,
                        changed = used.changed() => {
                            if changed.is_err() {
                                // Nobody can send on it any more.
                                std::future::pending::<()>().await;
                            }
                        }
                    }
                }
            };
            tokio::select! {
                // An error shows up on the request as well.
                _ = connection => {}
                () = idle => {}
                () = stop.cancelled() => {}
            }
        });
    }

    pub async fn close(&self) {
        self.stop.cancel();
        self.lock().clear();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
