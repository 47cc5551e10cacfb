use std::io;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};
use tower::ServiceExt;

use super::MAX_MESSAGE;
use super::calls::{image_calls, runtime_calls};
use super::status::to_status;
use crate::v1::image_service_server::{self, ImageServiceServer};
use crate::v1::runtime_service_server::{self, RuntimeServiceServer};
use crate::v1::*;
use crate::{ImageService, RuntimeService};

/// Connections beyond this wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;
/// Number of objects in one message of a streamed list.
const BATCH: usize = 256;

/// CRI on a socket.
pub struct Server {
    listener: UnixListener,
    runtime: RuntimeServiceServer<OfferedRuntime>,
    images: ImageServiceServer<OfferedImages>,
}

/// Wraps the offered service, so that gRPC's traits can be implemented for it.
struct OfferedRuntime(Arc<dyn RuntimeService>);
struct OfferedImages(Arc<dyn ImageService>);

impl Server {
    /// Listens on a socket only root may use. A socket nobody answers on is replaced; one that is in use
    /// is an error.
    ///
    /// Must be called within a tokio runtime.
    pub fn bind(
        path: &Path,
        runtime: Arc<dyn RuntimeService>,
        images: Arc<dyn ImageService>,
    ) -> io::Result<Self> {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            let message = format!("{} is in use by another runtime", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
        }
        Ok(Self {
            listener: UnixListener::from_std(ferrite_hostfs::listen_private(path)?)?,
            runtime: RuntimeServiceServer::new(OfferedRuntime(runtime))
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE),
            images: ImageServiceServer::new(OfferedImages(images))
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE),
        })
    }

    /// Serves until `closing` is cancelled; returns when every connection has ended. Calls in progress are
    /// cut off: the runtime finishes what it has begun, and the caller asks again.
    pub fn serve(self, closing: CancellationToken) -> BoxFuture<'static, ()> {
        Box::pin(self.accept_all(closing))
    }

    async fn accept_all(self, closing: CancellationToken) {
        let connections = TaskTracker::new();
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let accepted = tokio::select! {
                () = closing.cancelled() => break,
                accepted = accept(&self.listener, &room) => accepted,
            };
            let (socket, permit) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "CRI connection not accepted");
                    // Out of descriptors, most likely: do not spin until some are free.
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                }
            };
            let (runtime, images, closing) = (self.runtime.clone(), self.images.clone(), closing.clone());
            connections.spawn(async move {
                let service = hyper::service::service_fn(move |request| {
                    route(runtime.clone(), images.clone(), request)
                });
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(socket), service);
                tokio::select! {
                    ended = connection => {
                        if let Err(error) = ended {
                            tracing::debug!(%error, "CRI connection ended badly");
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
}

async fn accept(
    listener: &UnixListener,
    room: &Arc<Semaphore>,
) -> io::Result<(UnixStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = room.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (socket, _) = listener.accept().await?;
    Ok((socket, permit))
}

/// Paths are `/<package>.<service>/<call>`. Either service answers "unimplemented" to any other path.
async fn route(
    runtime: RuntimeServiceServer<OfferedRuntime>,
    images: ImageServiceServer<OfferedImages>,
    request: http::Request<hyper::body::Incoming>,
) -> Result<http::Response<tonic::body::Body>, std::convert::Infallible> {
    if request.uri().path().starts_with("/runtime.v1.ImageService/") {
        images.oneshot(request).await
    } else {
        runtime.oneshot(request).await
    }
}

type Batches<T> = BoxStream<'static, Result<T, Status>>;

/// A list in messages of bounded size. An empty list is an empty stream.
fn batches<T: Send + 'static, M: Send + 'static>(
    items: Vec<T>,
    message: impl Fn(Vec<T>) -> M + Send + 'static,
) -> Response<Batches<M>> {
    let mut items = items.into_iter();
    let messages = std::iter::from_fn(move || {
        let batch: Vec<T> = items.by_ref().take(BATCH).collect();
        (!batch.is_empty()).then(|| Ok(message(batch)))
    });
    Response::new(stream::iter(messages).boxed())
}

macro_rules! serve_runtime {
    ($($name:ident $request:ident $response:ident;)*) => {
        #[async_trait]
        impl runtime_service_server::RuntimeService for OfferedRuntime {
            $(async fn $name(&self, request: Request<$request>) -> Result<Response<$response>, Status> {
                self.0.$name(request.into_inner()).await.map(Response::new).map_err(to_status)
            })*

            type GetContainerEventsStream = Batches<ContainerEventResponse>;
            async fn get_container_events(
                &self,
                request: Request<GetEventsRequest>,
            ) -> Result<Response<Self::GetContainerEventsStream>, Status> {
                let events = self.0.get_container_events(request.into_inner()).await.map_err(to_status)?;
                Ok(Response::new(events.map(Ok).boxed()))
            }

            type StreamPodSandboxesStream = Batches<StreamPodSandboxesResponse>;
            async fn stream_pod_sandboxes(
                &self,
                request: Request<StreamPodSandboxesRequest>,
            ) -> Result<Response<Self::StreamPodSandboxesStream>, Status> {
                let list = ListPodSandboxRequest { filter: request.into_inner().filter };
                let list = self.0.list_pod_sandbox(list).await.map_err(to_status)?;
                Ok(batches(list.items, |pod_sandboxes| StreamPodSandboxesResponse { pod_sandboxes }))
            }

            type StreamContainersStream = Batches<StreamContainersResponse>;
            async fn stream_containers(
                &self,
                request: Request<StreamContainersRequest>,
            ) -> Result<Response<Self::StreamContainersStream>, Status> {
                let list = ListContainersRequest { filter: request.into_inner().filter };
                let list = self.0.list_containers(list).await.map_err(to_status)?;
                Ok(batches(list.containers, |containers| StreamContainersResponse { containers }))
            }

            type StreamContainerStatsStream = Batches<StreamContainerStatsResponse>;
            async fn stream_container_stats(
                &self,
                request: Request<StreamContainerStatsRequest>,
            ) -> Result<Response<Self::StreamContainerStatsStream>, Status> {
                let list = ListContainerStatsRequest { filter: request.into_inner().filter };
                let list = self.0.list_container_stats(list).await.map_err(to_status)?;
                Ok(batches(list.stats, |container_stats| StreamContainerStatsResponse { container_stats }))
            }

            type StreamPodSandboxStatsStream = Batches<StreamPodSandboxStatsResponse>;
            async fn stream_pod_sandbox_stats(
                &self,
                request: Request<StreamPodSandboxStatsRequest>,
            ) -> Result<Response<Self::StreamPodSandboxStatsStream>, Status> {
                let list = ListPodSandboxStatsRequest { filter: request.into_inner().filter };
                let list = self.0.list_pod_sandbox_stats(list).await.map_err(to_status)?;
                Ok(batches(list.stats, |pod_sandbox_stats| StreamPodSandboxStatsResponse { pod_sandbox_stats }))
            }

            type StreamPodSandboxMetricsStream = Batches<StreamPodSandboxMetricsResponse>;
            async fn stream_pod_sandbox_metrics(
                &self,
                _request: Request<StreamPodSandboxMetricsRequest>,
            ) -> Result<Response<Self::StreamPodSandboxMetricsStream>, Status> {
                let list = self.0.list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).await;
                let list = list.map_err(to_status)?.pod_metrics;
                Ok(batches(list, |pod_sandbox_metrics| StreamPodSandboxMetricsResponse { pod_sandbox_metrics }))
            }
        }
    };
}

macro_rules! serve_images {
    ($($name:ident $request:ident $response:ident;)*) => {
        #[async_trait]
        impl image_service_server::ImageService for OfferedImages {
            $(async fn $name(&self, request: Request<$request>) -> Result<Response<$response>, Status> {
                self.0.$name(request.into_inner()).await.map(Response::new).map_err(to_status)
            })*

            type StreamImagesStream = Batches<StreamImagesResponse>;
            async fn stream_images(
                &self,
                request: Request<StreamImagesRequest>,
            ) -> Result<Response<Self::StreamImagesStream>, Status> {
                let list = ListImagesRequest { filter: request.into_inner().filter };
                let list = self.0.list_images(list).await.map_err(to_status)?;
                Ok(batches(list.images, |images| StreamImagesResponse { images }))
            }
        }
    };
}

runtime_calls!(serve_runtime);
image_calls!(serve_images);
