//! Connections to endpoints, kept for the next request.

use crate::backends::Protocol;
use crate::body::Payload;
use crate::io::Guarded;
use crate::limits::Limits;
use ferrite_client::Scope;
use hyper::client::conn::{http1, http2};
use hyper::rt::Executor;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Connections of HTTP/1.1 that are kept: for an endpoint, and for all.
const KEPT_EACH: usize = 32;
const KEPT: usize = 1024;
/// Heads of answers are no larger, and have no more headers.
const HEAD: usize = 64 << 10;
const HEADERS: usize = 128;

/// Runs the tasks of HTTP/2 within a scope.
#[derive(Clone, Debug)]
pub(crate) struct InScope(pub Scope);

impl<F> Executor<F> for InScope
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, task: F) {
        self.0.spawn(async move {
            task.await;
        });
    }
}

/// Why an endpoint cannot be spoken to. Nothing of a request has been sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("no answer to the connection")]
    TimedOut,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

type Http1 = http1::SendRequest<Payload>;
type Http2 = http2::SendRequest<Payload>;

/// A connection that is ready for a request.
#[derive(Debug)]
pub(crate) enum Connection {
    Http1(Http1),
    Http2(Http2),
}

#[derive(Debug, Default)]
struct Kept {
    http1: HashMap<SocketAddr, Vec<(Http1, Instant)>>,
    count: usize,
    /// One connection carries all requests of an endpoint.
    http2: HashMap<SocketAddr, Http2>,
}

/// The connections of a proxy.
#[derive(Debug)]
pub(crate) struct Pool {
    kept: Mutex<Kept>,
    /// Somebody has given a connection back.
    filled: Notify,
    limits: Arc<Limits>,
    scope: Scope,
}

/// A connection of HTTP/1.1 in use. Dropped, it is closed.
#[derive(Debug)]
pub(crate) struct Lease {
    pool: Arc<Pool>,
    endpoint: SocketAddr,
    sender: Http1,
}

impl Lease {
    pub fn new(pool: &Arc<Pool>, endpoint: SocketAddr, sender: Http1) -> Self {
        Self { pool: Arc::clone(pool), endpoint, sender }
    }

    /// The answer is complete: the next request may use the connection.
    pub fn give_back(self) {
        if self.sender.is_closed() {
            return;
        }
        let mut kept = self.pool.kept();
        if kept.count >= KEPT {
            return;
        }
        let of_endpoint = kept.http1.entry(self.endpoint).or_default();
        if of_endpoint.len() >= KEPT_EACH {
            return;
        }
        of_endpoint.push((self.sender, Instant::now()));
        kept.count += 1;
        drop(kept);
        self.pool.filled.notify_one();
    }
}

impl Pool {
    pub fn start(limits: Arc<Limits>, scope: &Scope) -> Arc<Self> {
        let pool =
            Arc::new(Self { kept: Mutex::default(), filled: Notify::new(), limits, scope: scope.clone() });
        let swept = Arc::clone(&pool);
        scope.spawn(async move { swept.sweep().await });
        pool
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes connections that nobody has used for a while; sleeps while there are none.
    async fn sweep(&self) {
        loop {
            self.filled.notified().await;
            while self.kept().count > 0 {
                tokio::time::sleep(self.limits.idle).await;
                self.drop_older_than(self.limits.idle);
            }
        }
    }

    fn drop_older_than(&self, age: Duration) {
        let mut kept = self.kept();
        kept.http1.retain(|_, senders| {
            senders.retain(|(sender, since)| since.elapsed() < age && !sender.is_closed());
            !senders.is_empty()
        });
        kept.count = kept.http1.values().map(Vec::len).sum();
        kept.http2.retain(|_, sender| !sender.is_closed());
    }

    /// A kept connection that is ready at once.
    pub fn take(&self, endpoint: SocketAddr) -> Option<Http1> {
        let mut kept = self.kept();
        loop {
            let senders = kept.http1.get_mut(&endpoint)?;
            let Some((sender, _)) = senders.pop() else {
                kept.http1.remove(&endpoint);
                return None;
            };
            kept.count -= 1;
            if sender.is_ready() {
                return Some(sender);
            }
        }
    }

    /// A connection to the endpoint, kept or new.
    pub async fn connect(
        &self,
        endpoint: SocketAddr,
        protocol: Protocol,
    ) -> Result<Connection, ConnectError> {
        match protocol {
            Protocol::Http1 => Ok(Connection::Http1(self.connect_http1(endpoint).await?)),
            Protocol::Http2 => {
                let shared = self.kept().http2.get(&endpoint).filter(|sender| !sender.is_closed()).cloned();
                match shared {
                    Some(sender) => Ok(Connection::Http2(sender)),
                    None => Ok(Connection::Http2(self.connect_http2(endpoint).await?)),
                }
            }
        }
    }

    async fn open(&self, endpoint: SocketAddr) -> Result<TokioIo<Guarded<TcpStream>>, ConnectError> {
        let connecting = tokio::time::timeout(self.limits.connect, TcpStream::connect(endpoint));
        let stream = connecting.await.map_err(|_| ConnectError::TimedOut)??;
        stream.set_nodelay(true)?;
        Ok(TokioIo::new(Guarded::new(stream, None, self.limits.write)))
    }

    pub async fn connect_http1(&self, endpoint: SocketAddr) -> Result<Http1, ConnectError> {
        let stream = self.open(endpoint).await?;
        let mut builder = http1::Builder::new();
        builder.max_buf_size(HEAD).max_header_size(HEAD).max_headers(HEADERS);
        let (sender, connection) = builder.handshake(stream).await?;
        self.scope.spawn(async move {
            // The request that it carries gets the error.
            let _ = connection.with_upgrades().await;
        });
        Ok(sender)
    }

    async fn connect_http2(&self, endpoint: SocketAddr) -> Result<Http2, ConnectError> {
        let stream = self.open(endpoint).await?;
        let mut builder = http2::Builder::new(InScope(self.scope.clone()));
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.limits.idle)
            .keep_alive_timeout(self.limits.idle);
        builder.max_header_list_size(HEAD as u32);
        let (sender, connection) = builder.handshake(stream).await?;
        self.scope.spawn(async move {
            let _ = connection.await;
        });
        self.kept().http2.insert(endpoint, sender.clone());
        Ok(sender)
    }

    /// Forgets connections to endpoints that are gone. Requests that they carry go on.
    pub fn retain(&self, still_there: impl Fn(&SocketAddr) -> bool) {
        let mut kept = self.kept();
        kept.http1.retain(|endpoint, _| still_there(endpoint));
        kept.count = kept.http1.values().map(Vec::len).sum();
        kept.http2.retain(|endpoint, _| still_there(endpoint));
    }
}
