//! The doors: connections of clients.

use crate::body::Payload;
use crate::certificates::{TlsError, server_config};
use crate::forward::answer;
use crate::headers::Origin;
use crate::io::Guarded;
use crate::limits::{Connections, Limits, Slot};
use crate::metrics;
use crate::pool::{InScope, Pool};
use crate::table::Tables;
use ferrite_client::Scope;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// A request's head is no larger, and has no more headers.
const HEAD: usize = 64 << 10;
const HEADERS: usize = 128;
/// Requests that one connection of HTTP/2 has under way, and those that it may abandon before it is closed.
const STREAMS: u32 = 128;
const RESETS: usize = 64;
/// Bytes of a response buffered for an HTTP/2 client that does not read.
const SEND_BUFFER: usize = 64 << 10;
const PING: Duration = Duration::from_secs(30);
/// When accepting fails, descriptors are short; they come back.
const PAUSE: Duration = Duration::from_millis(100);

/// A proxy and everything that its connections share.
#[derive(Debug)]
pub struct Proxy {
    pub(crate) tables: Arc<Tables>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) scope: Scope,
    connections: Arc<Connections>,
    tls: Arc<ServerConfig>,
}

/// A socket that clients come in by.
#[derive(Debug)]
pub struct Entrance {
    pub listener: TcpListener,
    pub tls: bool,
}

impl Proxy {
    /// A proxy that answers from `tables`; its tasks belong to `scope`.
    pub fn new(tables: Arc<Tables>, limits: Limits, scope: &Scope) -> Result<Arc<Self>, TlsError> {
        let limits = Arc::new(limits);
        Ok(Arc::new(Self {
            tls: server_config(Arc::clone(&tables))?,
            tables,
            pool: Pool::start(Arc::clone(&limits), scope),
            connections: Arc::default(),
            limits,
            scope: scope.clone(),
        }))
    }

    /// Accepts clients for as long as the scope lasts.
    pub fn serve(self: &Arc<Self>, entrance: Entrance) {
        let proxy = Arc::clone(self);
        self.scope.spawn(async move {
            loop {
                let Ok((stream, client)) = entrance.listener.accept().await else {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                let Some(slot) = proxy.connections.admit(client.ip(), &proxy.limits) else {
                    metrics::refused();
                    continue;
                };
                let served = Arc::clone(&proxy).connection(stream, client, entrance.tls, Arc::new(slot));
                proxy.scope.spawn(served);
            }
        });
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, client: SocketAddr, tls: bool, slot: Arc<Slot>) {
        let Ok(port) = stream.local_addr().map(|address| address.port()) else { return };
        // Without it an answer waits for the client's acknowledgement; nothing else changes.
        let _ = stream.set_nodelay(true);
        let origin = Origin { client, port, tls };
        let stream = Guarded::new(stream, None, self.limits.write);
        if !tls {
            return self.http1(stream, origin, slot).await;
        }
        let accepting = TlsAcceptor::from(Arc::clone(&self.tls)).accept(stream);
        // A client that does not finish its handshake, or fails in it, is no news.
        let Ok(Ok(stream)) = tokio::time::timeout(self.limits.handshake, accepting).await else { return };
        match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => self.http2(stream, origin, slot).await,
            _ => self.http1(stream, origin, slot).await,
        }
    }

    async fn respond(
        self: Arc<Self>,
        request: Request<Incoming>,
        origin: Origin,
        slot: Arc<Slot>,
    ) -> Result<Response<Payload>, Infallible> {
        Ok(answer(self, request, origin, slot).await)
    }

    async fn http1<S>(self: Arc<Self>, stream: S, origin: Origin, slot: Arc<Slot>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head)
            .max_buf_size(HEAD)
            .max_header_size(HEAD)
            .max_headers(HEADERS);
        let service = service_fn(|request| Arc::clone(&self).respond(request, origin, Arc::clone(&slot)));
        // Clients come and go; errors of their connections are theirs.
        let _ = builder.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
    }

    async fn http2<S>(self: Arc<Self>, stream: S, origin: Origin, slot: Arc<Slot>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = http2::Builder::new(InScope(self.scope.clone()));
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(PING)
            .keep_alive_timeout(self.limits.head)
            .max_concurrent_streams(STREAMS)
            .max_pending_accept_reset_streams(RESETS)
            .max_local_error_reset_streams(RESETS)
            .max_header_list_size(HEAD as u32)
            .max_send_buf_size(SEND_BUFFER);
        let service = service_fn(|request| Arc::clone(&self).respond(request, origin, Arc::clone(&slot)));
        let _ = builder.serve_connection(TokioIo::new(stream), service).await;
    }

    /// Lets connections to endpoints go that no Service has any more.
    pub(crate) fn forget_endpoints(&self) {
        let Some(table) = self.tables.current() else { return };
        let live: std::collections::HashSet<SocketAddr> = table
            .backends
            .values()
            .filter_map(|backend| backend.endpoints.as_ref().ok())
            .flat_map(|endpoints| endpoints.addresses.iter().copied())
            .collect();
        self.pool.retain(|endpoint| live.contains(endpoint));
    }
}
