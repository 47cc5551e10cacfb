//! The running cluster's own interface for `ferrite` commands: HTTP on a unix socket that only root may open.
//!
//! The cluster's process owns its image store, so commands that change images ask that process.

use crate::apiserver::BoxError;
use crate::paths::Paths;
use bytes::Bytes;
use ferrite_cri::ImageService;
use ferrite_cri::v1::{ImageSpec, RemoveImageRequest};
use ferrite_runtime::Runtime;
use ferrite_runtime::image::cri::Images;
use ferrite_runtime::image::{Auth, Platform, Progress, ProgressEvent, Reference, RegistryConfig};
use futures_util::StreamExt;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::io::{StreamReader, SyncIoBridge};

/// An image as `ferrite image list` shows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ImageRow {
    pub names: Vec<String>,
    pub id: String,
    pub size: u64,
    pub pinned: bool,
}

/// Progress of a pull, one JSON text per line.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PullLine {
    Downloading { digest: String, done: u64, total: u64 },
    Done { id: String },
    Error { message: String },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PullRequest {
    pub name: String,
    pub insecure: Vec<String>,
}

pub fn socket(paths: &Paths) -> PathBuf {
    paths.run.join("control.sock")
}

/// Everything that the interface gives access to.
#[derive(Clone)]
pub struct Control {
    pub images: Arc<Images>,
    pub runtime: Arc<Runtime>,
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

fn text(code: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(text.into()).boxed_unsync());
    *response.status_mut() = code;
    response
}

impl Control {
    /// Serves until the task is dropped. A socket left by a process that died is replaced.
    pub fn listen(self, paths: &Paths) -> Result<impl Future<Output = ()> + Send + use<>, BoxError> {
        let path = socket(paths);
        let listener = ferrite_hostfs::listen_private(&path)
            .and_then(UnixListener::from_std)
            .map_err(|e| format!("cannot listen on {}: {e}", path.display()))?;
        Ok(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                while connections.try_join_next().is_some() {}
                let control = self.clone();
                connections.spawn(async move {
                    let service = service_fn(move |request| {
                        let control = control.clone();
                        async move { Ok::<_, Infallible>(control.handle(request).await) }
                    });
                    // A command that is interrupted simply goes away.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        })
    }

    async fn handle(&self, request: Request<Incoming>) -> Response<Body> {
        let result = match (request.method(), request.uri().path()) {
            (&Method::GET, "/images") => self.list().await,
            (&Method::POST, "/images/import") => self.import(request.into_body()).await,
            (&Method::POST, "/images/pull") => self.pull(request.into_body()).await,
            (&Method::POST, "/images/remove") => self.remove(request.into_body()).await,
            _ => return text(StatusCode::NOT_FOUND, "no such command"),
        };
        result.unwrap_or_else(|e| text(StatusCode::BAD_REQUEST, crate::chain(&*e)))
    }

    async fn list(&self) -> Result<Response<Body>, BoxError> {
        Ok(text(StatusCode::OK, ferrite_json::to_vec(&list(&self.images)?)?))
    }

    async fn import(&self, body: Incoming) -> Result<Response<Body>, BoxError> {
        let frames = BodyStream::new(body).filter_map(|frame| async move {
            match frame {
                Ok(frame) => frame.into_data().ok().map(Ok),
                Err(error) => Some(Err(io::Error::other(error))),
            }
        });
        let reader = SyncIoBridge::new(StreamReader::new(Box::pin(frames)));
        let names = self.images.store().import(reader, Arc::new(|_| {})).await?;
        Ok(text(StatusCode::OK, ferrite_json::to_vec(&names)?))
    }

    async fn pull(&self, body: Incoming) -> Result<Response<Body>, BoxError> {
        let request: PullRequest = ferrite_json::from_slice(&body.collect().await?.to_bytes())?;
        let (lines, mut received) = tokio::sync::mpsc::channel::<PullLine>(64);
        let images = Arc::clone(&self.images);
        let stream = async_stream(async move { pull(&images, &request, lines).await }, move |cx| {
            received.poll_recv(cx)
        });
        let body = StreamBody::new(stream.map(|line| {
            let mut bytes = ferrite_json::to_vec(&line).unwrap_or_default();
            bytes.push(b'\n');
            Ok::<_, Infallible>(Frame::data(Bytes::from(bytes)))
        }));
        Ok(Response::new(BodyExt::boxed_unsync(body)))
    }

    async fn remove(&self, body: Incoming) -> Result<Response<Body>, BoxError> {
        let name: String = ferrite_json::from_slice(&body.collect().await?.to_bytes())?;
        let image = Some(ImageSpec { image: name, ..ImageSpec::default() });
        self.runtime.remove_image(RemoveImageRequest { image }).await?;
        Ok(text(StatusCode::OK, "null"))
    }
}

/// Drives `work` for as long as somebody reads its output.
fn async_stream<T>(
    work: impl Future<Output = ()> + Send + 'static,
    mut next: impl FnMut(&mut std::task::Context<'_>) -> std::task::Poll<Option<T>> + Send + 'static,
) -> impl futures_util::Stream<Item = T> + Send + 'static {
    let mut work = Some(Box::pin(work));
    futures_util::stream::poll_fn(move |cx| {
        if let Some(running) = &mut work
            && running.as_mut().poll(cx).is_ready()
        {
            work = None;
        }
        next(cx)
    })
}

pub fn list(images: &Images) -> Result<Vec<ImageRow>, BoxError> {
    let records = images.store().list()?;
    let row = |r: ferrite_runtime::image::ImageRecord| ImageRow {
        names: if r.repo_tags.is_empty() { r.repo_digests } else { r.repo_tags },
        id: r.id.to_string(),
        size: r.size,
        pinned: r.pinned,
    };
    Ok(records.into_iter().map(row).collect())
}

/// Pulls and reports the progress; the last line is the outcome.
pub async fn pull(images: &Images, request: &PullRequest, lines: tokio::sync::mpsc::Sender<PullLine>) {
    let said = lines.clone();
    let progress: Progress = Arc::new(move |event| {
        if let ProgressEvent::Downloading { digest, done, total } = event {
            // A reader that is slow misses intermediate numbers, nothing else.
            let _ = said.try_send(PullLine::Downloading { digest: digest.to_string(), done, total });
        }
    });
    let result = async {
        let reference: Reference = request.name.parse()?;
        let registry = RegistryConfig { plain_http: request.insecure.clone(), ..RegistryConfig::default() };
        images.store().pull(&reference, Auth::Anonymous, &Platform::host(), &registry, progress).await
    }
    .await;
    let last = match result {
        Ok(record) => PullLine::Done { id: record.id.to_string() },
        Err(error) => PullLine::Error { message: crate::chain(&error) },
    };
    let _ = lines.send(last).await;
}

/// A connection to the process that runs the cluster; none when it does not run.
pub struct Client {
    sender: hyper::client::conn::http1::SendRequest<UnsyncBoxBody<Bytes, BoxError>>,
}

impl Client {
    pub async fn connect(paths: &Paths) -> Result<Option<Self>, BoxError> {
        let stream = match UnixStream::connect(socket(paths)).await {
            Ok(stream) => stream,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            Err(e) => return Err(format!("cannot reach the cluster's process: {e}").into()),
        };
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Some(Self { sender }))
    }

    pub async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: UnsyncBoxBody<Bytes, BoxError>,
    ) -> Result<Incoming, BoxError> {
        let request = Request::builder().method(method).uri(path).header("host", "ferrite").body(body)?;
        let response = self.sender.send_request(request).await?;
        if response.status().is_success() {
            return Ok(response.into_body());
        }
        let message = response.into_body().collect().await?.to_bytes();
        Err(String::from_utf8_lossy(&message).into_owned().into())
    }

    /// Sends a small JSON body and reads a JSON answer.
    pub async fn call<T: serde::de::DeserializeOwned>(
        &mut self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, BoxError> {
        let body = Full::new(Bytes::from(ferrite_json::to_vec(body)?))
            .map_err(|never| match never {})
            .boxed_unsync();
        let answer = self.send(method, path, body).await?.collect().await?.to_bytes();
        Ok(ferrite_json::from_slice(&answer)?)
    }
}
