//! Serving over the network: TLS, HTTP/1.1 and HTTP/2.

use crate::auth::RefusedCertificate;
use crate::certificates::{PeerCertificates, ServingTls};
use crate::coalescing::{CoalescingWriter, InlineExecutor, driven};
use crate::connections::{Connections, Slot};
use crate::http::{BoxError, held};
use crate::idle::Activity;
use crate::server::{ApiServer, Serving};
use futures_util::future::BoxFuture;
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rand::RngExt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that does not finish its headers is not a client.
const HEADER_TIMEOUT: Duration = Duration::from_secs(32);
const MAX_HEADERS: usize = 1 << 20;
/// Most bodies fit into one frame.
const STREAM_WINDOW: u32 = 256 << 10;
/// A peer that does not answer is gone, and so are its watches.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(15);

/// Where a request came from, among its extensions. Requests of this process come from nowhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub IpAddr);

impl ApiServer {
    /// Serves connections until the server stops.
    pub fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        tls: impl Into<ServingTls>,
    ) -> BoxFuture<'static, ()> {
        self.accept_boxed(listener, tls.into())
    }

    fn accept_boxed(self: Arc<Self>, listener: TcpListener, tls: ServingTls) -> BoxFuture<'static, ()> {
        Box::pin(self.accept_all(listener, tls))
    }

    async fn accept_all(self: Arc<Self>, listener: TcpListener, tls: ServingTls) {
        let stopping = self.stopping();
        let connections = Connections::new(self.config.serving.connections);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopping.cancelled() => return,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let slot = Arc::new(connections.admit());
                    let (server, tls) = (Arc::clone(&self), tls.clone());
                    self.spawn(async move {
                        let evicted = slot.evicted();
                        tokio::select! {
                            () = server.connection(stream, peer.ip(), tls, slot) => {}
                            () = evicted.cancelled() => {}
                        }
                    });
                }
                Err(error) => {
                    // Out of descriptors or a connection that died in the queue: others must still get in.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, peer: IpAddr, tls: ServingTls, slot: Arc<Slot>) {
        // Small answers must not wait for larger ones.
        let _ = stream.set_nodelay(true);
        let handshake = TlsAcceptor::from(Arc::clone(&tls.current().config)).accept(stream);
        let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await else {
            self.metrics.handshake_errors.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let presented = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let client = PeerCertificates::new(&self, presented, tls);
        if let Some(name) = client.name(&self) {
            slot.belongs_to(&name);
        }
        // An upgraded HTTP/1.1 connection goes on without us, so no data may wait there.
        let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        let stream = CoalescingWriter::new(stream, http2);
        let out = stream.clone();
        let builder = builder(&self.config.serving);
        let (stopping, aborting) = (self.stopping(), self.aborting());
        let (activity, idle) = (Activity::new(), self.config.serving.idle_timeout);
        let busy_with = Arc::clone(&activity);
        let leave = Arc::new(Notify::new());
        let told = Arc::clone(&leave);
        let service = service_fn(move |mut request: ::http::Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            request.extensions_mut().insert(Arc::clone(&slot));
            let server = Arc::clone(&self);
            let user = client.user(&self, request.headers());
            if let Err(RefusedCertificate) = user {
                request.extensions_mut().insert(RefusedCertificate);
            }
            let busy = busy_with.begin();
            let chance = server.config.serving.goaway_chance;
            if request.version() == ::http::Version::HTTP_2
                && chance > 0.0
                && rand::rng().random::<f64>() < chance
            {
                leave.notify_one();
            }
            async move {
                let request = request.map(|body| body.map_err(|e| -> BoxError { e.into() }).boxed_unsync());
                let answer = server.handle(user.unwrap_or_default(), request).await;
                // A complete body counts as sent. A stream counts as activity until it ends.
                Ok::<_, std::convert::Infallible>(match answer.body().size_hint().exact() {
                    Some(_) => answer,
                    None => answer.map(|body| held(body, busy)),
                })
            }
        });
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            result = driven(connection.as_mut(), &out) => Some(result),
            () = stopping.cancelled() => None,
            () = told.notified() => None,
            () = activity.idle_for(idle) => None,
        };
        // Finish the requests in progress and accept no new ones.
        let ended = match ended {
            Some(result) => result,
            None => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    result = driven(connection, &out) => result,
                    () = aborting.cancelled() => return,
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(error = %error, "a connection ended early");
        }
    }
}

/// Limits of a connection, as upstream's.
fn builder(serving: &Serving) -> auto::Builder<InlineExecutor> {
    let mut builder = auto::Builder::new(InlineExecutor);
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(MAX_HEADERS);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(serving.http2_max_streams)
        .max_header_list_size(MAX_HEADERS as u32)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW.saturating_mul(serving.http2_max_streams.clamp(1, 100)))
        .max_frame_size(STREAM_WINDOW)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}
