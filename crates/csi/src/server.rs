//! A gRPC service on a socket of this node.

use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;

/// Connections beyond this wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// Calls at a time on one connection.
const MAX_STREAMS: u32 = 32;

/// Serves until `closing`, and returns when every connection has ended. Calls under way are cut off.
pub async fn serve<S, F>(listener: UnixListener, service: S, closing: CancellationToken)
where
    S: Fn(http::Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Result<http::Response<Body>, Infallible>> + Send + 'static,
{
    let connections = TaskTracker::new();
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = async {
            let permit = room.clone().acquire_owned().await.map_err(std::io::Error::other)?;
            listener.accept().await.map(|(socket, _)| (socket, permit))
        };
        let accepted = tokio::select! {
            () = closing.cancelled() => break,
            accepted = accepted => accepted,
        };
        let (socket, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                // Out of descriptors, most likely: do not spin until some are free.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (service, closing) = (service.clone(), closing.clone());
        connections.spawn(async move {
            let service = hyper::service::service_fn(service);
            let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(MAX_STREAMS)
                .serve_connection(TokioIo::new(socket), service);
            tokio::select! {
                ended = connection => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a connection ended badly");
                    }
                }
                () = closing.cancelled() => {}
            }
            drop(permit);
        });
    }
    connections.close();
    connections.wait().await;
}
