//! Serves the etcd v3 API over a store, on a unix socket or on TCP with TLS.

mod bolt;
mod convert;
mod kv;
mod lease;
mod maintenance;
mod watch;

use crate::proto::etcdserverpb::cluster_server::ClusterServer;
use crate::proto::etcdserverpb::kv_server::KvServer;
use crate::proto::etcdserverpb::lease_server::LeaseServer;
use crate::proto::etcdserverpb::maintenance_server::MaintenanceServer;
use crate::proto::etcdserverpb::watch_server::WatchServer;
use ferrite_store::{MAX_TXN, Store};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service as _;

/// A connection's bytes, whatever carries them.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Connections served at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;
/// Clients in the TLS handshake.
const MAX_STRANGERS: usize = 256;
/// Time limit of the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// After a connection that could not be taken.
const PAUSE: Duration = Duration::from_millis(100);

/// Clients that have not shown their certificates yet. They do not count as connections that are served, and the oldest
/// goes when there are too many: whoever has no certificate keeps nobody out.
#[derive(Debug, Default)]
struct Strangers(Mutex<VecDeque<CancellationToken>>);

impl Strangers {
    /// Lets a client in, for as long as its token is not cancelled.
    fn enter(&self) -> CancellationToken {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() >= MAX_STRANGERS
            && let Some(oldest) = waiting.pop_front()
        {
            oldest.cancel();
        }
        let token = CancellationToken::new();
        waiting.push_back(token.clone());
        token
    }
}

/// The TLS handshake with a client. None if it fails.
async fn secure(
    acceptor: Option<TlsAcceptor>,
    stream: TcpStream,
    peer: SocketAddr,
) -> Option<Box<dyn Stream>> {
    let _ = stream.set_nodelay(true);
    let Some(acceptor) = acceptor else { return Some(Box::new(stream)) };
    match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => return Some(Box::new(stream)),
        Ok(Err(error)) => tracing::debug!(%peer, %error, "a TLS handshake failed"),
        Err(_) => tracing::debug!(%peer, "a TLS handshake took too long"),
    }
    None
}

/// Out of descriptors, or a client that was gone at once: the next one may do better.
async fn not_taken(error: &io::Error) {
    tracing::warn!(%error, "a connection to the etcd API could not be taken");
    tokio::time::sleep(PAUSE).await;
}

/// The services over one store. Cloning shares everything.
#[derive(Debug, Clone)]
pub struct Service {
    store: Arc<Store>,
    /// The directory of the store's files, for reporting their size.
    dir: Option<PathBuf>,
    urls: Vec<String>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Service {
    /// `dir` is the directory of the store's files, `urls` are the client URLs in the member list.
    pub fn new(store: Arc<Store>, dir: Option<PathBuf>, urls: Vec<String>) -> Self {
        Self { store, dir, urls, stop: CancellationToken::new(), tasks: TaskTracker::new() }
    }

    /// Ends everything and waits for it.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Runs a task that ends with the service.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stop.cancelled() => {}
            }
        });
    }

    /// Deletes the keys of leases whose time is over, until the service is stopped.
    pub async fn expire_leases(&self) {
        tokio::select! {
            () = self.store.expire_leases() => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Serves on a unix socket at `path`, for the owner alone, until the service is stopped. A socket left behind
    /// is replaced.
    pub async fn serve_unix(&self, path: &Path) -> io::Result<()> {
        let listener = UnixListener::from_std(ferrite_hostfs::listen_private(path)?)?;
        let connect = |service: Self, (stream, _)| service.connection(Box::new(stream));
        self.accept(|| listener.accept(), connect).await;
        let _ = std::fs::remove_file(path);
        Ok(())
    }

    /// Serves on TCP until the service is stopped. Without `tls` any client that reaches the listener reads
    /// and writes everything: for loopback in tests.
    pub async fn serve_tcp(
        &self,
        listener: TcpListener,
        tls: Option<Arc<rustls::ServerConfig>>,
    ) -> io::Result<()> {
        let acceptor = tls.map(TlsAcceptor::from);
        let (strangers, limit) = (Strangers::default(), Arc::new(Semaphore::new(MAX_CONNECTIONS)));
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stop.cancelled() => return Ok(()),
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    not_taken(&error).await;
                    continue;
                }
            };
            let stranger = strangers.enter();
            let (service, acceptor, limit) = (self.clone(), acceptor.clone(), Arc::clone(&limit));
            self.spawn(async move {
                let secured = tokio::select! {
                    secured = secure(acceptor, stream, peer) => secured,
                    () = stranger.cancelled() => None,
                };
                // A client with a certificate waits for others that have one.
                if let (Some(stream), Ok(_permit)) = (secured, limit.acquire_owned().await) {
                    service.connection(stream).await;
                }
            });
        }
    }

    /// Serves every connection that `next` returns, `MAX_CONNECTIONS` at once, until the service is
    /// stopped.
    async fn accept<S, N, F>(&self, next: impl Fn() -> N, connect: impl Fn(Self, S) -> F)
    where
        N: Future<Output = io::Result<S>>,
        F: Future<Output = ()> + Send + 'static,
    {
        let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&limit).acquire_owned().await else { return };
            let accepted = tokio::select! {
                accepted = next() => accepted,
                () = self.stop.cancelled() => return,
            };
            match accepted {
                Ok(stream) => {
                    let served = connect(self.clone(), stream);
                    self.spawn(async move {
                        served.await;
                        drop(permit);
                    });
                }
                Err(error) => not_taken(&error).await,
            }
        }
    }

    /// Boxed, like its stream, so that the machine code of the server is made once and not for each kind of stream.
    fn connection(self, stream: Box<dyn Stream>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.answer(stream))
    }

    async fn answer(self, stream: Box<dyn Stream>) {
        // A request may be as large as a transaction, with some room for its frame.
        let most = MAX_TXN + (1 << 20);
        let kv =
            KvServer::new(self.clone()).max_decoding_message_size(most).max_encoding_message_size(usize::MAX);
        let watch = WatchServer::new(self.clone()).max_encoding_message_size(usize::MAX);
        let lease = LeaseServer::new(self.clone());
        let cluster = ClusterServer::new(self.clone());
        let maintenance = MaintenanceServer::new(self.clone());
        let dispatch = hyper::service::service_fn(move |request: http::Request<Incoming>| {
            let (mut kv, mut watch, mut lease) = (kv.clone(), watch.clone(), lease.clone());
            let (mut cluster, mut maintenance) = (cluster.clone(), maintenance.clone());
            async move {
                match request.uri().path().split('/').nth(1) {
                    Some("etcdserverpb.KV") => kv.call(request).await,
                    Some("etcdserverpb.Watch") => watch.call(request).await,
                    Some("etcdserverpb.Lease") => lease.call(request).await,
                    Some("etcdserverpb.Cluster") => cluster.call(request).await,
                    Some("etcdserverpb.Maintenance") => maintenance.call(request).await,
                    _ => Ok::<_, Infallible>(
                        tonic::Status::unimplemented("this service is not offered here").into_http(),
                    ),
                }
            }
        });
        let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), dispatch)
            .await;
        if let Err(error) = served {
            tracing::debug!(%error, "a connection to the etcd API ended");
        }
    }
}
