//! The network door: TLS, HTTP/1.1 and HTTP/2.

use crate::auth::User;
use crate::http::BoxError;
use crate::server::ApiServer;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that does not finish its headers is not a client.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

impl ApiServer {
    /// Serves connections until the server stops.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, tls: Arc<rustls::ServerConfig>) {
        let acceptor = TlsAcceptor::from(tls);
        let stopping = self.stopping();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopping.cancelled() => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    let server = Arc::clone(&self);
                    let acceptor = acceptor.clone();
                    self.spawn(async move { server.connection(stream, acceptor).await });
                }
                Err(error) => {
                    // Out of descriptors or a connection that died in the queue: others must still get in.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, acceptor: TlsAcceptor) {
        // Small answers must not wait for larger ones.
        let _ = stream.set_nodelay(true);
        let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await else {
            return;
        };
        let user = stream
            .get_ref()
            .1
            .peer_certificates()
            .and_then(|chain| chain.first())
            .and_then(|certificate| User::from_certificate(certificate));
        let stopping = self.stopping();
        let service = service_fn(move |request: ::http::Request<Incoming>| {
            let server = Arc::clone(&self);
            let user = user.clone();
            async move {
                let request = request.map(|body| body.map_err(|e| -> BoxError { e.into() }).boxed_unsync());
                Ok::<_, std::convert::Infallible>(server.handle(user, request).await)
            }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
        builder.http2().timer(TokioTimer::new()).max_concurrent_streams(1000).keep_alive_interval(None);
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(error = %error, "a connection ended early");
                }
            }
            () = stopping.cancelled() => {
                connection.as_mut().graceful_shutdown();
                let _ = tokio::time::timeout(Duration::from_secs(2), connection).await;
            }
        }
    }
}
