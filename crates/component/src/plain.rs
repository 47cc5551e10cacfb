//! A small port without TLS: health checks and metrics that everybody may read.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::places::Places;

/// The pause after a connection could not be accepted: others must close descriptors first.
const PAUSE: Duration = Duration::from_millis(100);
/// Buffer of one connection, and so the largest head of a request.
const MAX_HEAD: usize = 64 * 1024;

/// The limits of a port on which nobody is authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlainLimits {
    /// Connections at the same time. Further ones take the place of the oldest of the peer that has most.
    pub connections: usize,
    /// Until the head of a request is there.
    pub head: Duration,
    /// A whole connection: one that is idle must not keep its place.
    pub connection: Duration,
}

/// Serves HTTP/1.1 until the future is dropped, which ends open connections, too.
pub async fn serve_plain<A, R, B>(listener: TcpListener, limits: PlainLimits, answer: A)
where
    A: Fn(Request<Incoming>) -> R + Clone + Send + 'static,
    R: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    let places = Places::new(limits.connections);
    let mut connections = JoinSet::new();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        let (answer, place) = (answer.clone(), places.enter(peer.ip()));
        connections.spawn(async move {
            let service = service_fn(move |request| {
                let response = answer(request);
                async move { Ok::<_, Infallible>(response.await) }
            });
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(MAX_HEAD);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                _ = tokio::time::timeout(limits.connection, connection) => {}
                () = place.evicted() => {}
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use http_body_util::Full;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn ask(stream: &mut TcpStream) -> String {
        stream.write_all(b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn idle_connections_keep_nobody_out_and_end_with_the_server() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = PlainLimits {
            connections: 4,
            head: Duration::from_secs(60),
            connection: Duration::from_secs(60),
        };
        let answer = |request: Request<Incoming>| async move {
            Response::new(Full::<Bytes>::from(request.uri().path().to_owned()))
        };
        let server = tokio::spawn(serve_plain(listener, limits, answer));
        let mut idle = Vec::new();
        for _ in 0..8 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let mut caller = TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut caller).await.ends_with("/x"), "the oldest of them has left its place");
        assert_eq!(idle[0].read(&mut [0]).await.unwrap_or(0), 0);
        let mut third = TcpStream::connect(address).await.unwrap();
        third.write_all(b"GET").await.unwrap();
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        let mut rest = Vec::new();
        // A reset counts as an end, too.
        let _ = third.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
    }

    #[tokio::test]
    async fn a_silent_connection_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = PlainLimits {
            connections: 1,
            head: Duration::from_millis(1),
            connection: Duration::from_millis(1),
        };
        let answer = |_: Request<Incoming>| async { Response::new(Full::<Bytes>::default()) };
        let _server = tokio::spawn(serve_plain(listener, limits, answer));
        let mut silent = TcpStream::connect(address).await.unwrap();
        let mut rest = Vec::new();
        let _ = silent.read_to_end(&mut rest).await;
    }
}
