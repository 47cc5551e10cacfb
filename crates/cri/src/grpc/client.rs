use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use super::MAX_MESSAGE;
use super::calls::{image_calls, runtime_calls};
use super::status::{from_status, never_sent};
use crate::v1::image_service_client::ImageServiceClient;
use crate::v1::runtime_service_client::RuntimeServiceClient;
use crate::v1::*;
use crate::{Code, ContainerEvents, Error, ImageService, Result, RuntimeService};

/// Why an endpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    #[error("container runtime endpoint {0:?} is not a unix socket: write unix:///path/to/socket")]
    NotUnix(String),
    #[error("container runtime endpoint {0:?} has no absolute path")]
    NotAbsolute(String),
}

/// A runtime behind a socket, e.g. containerd or CRI-O.
///
/// The connection is made at the first call and made anew after it broke; calls while the runtime is away
/// fail with [`crate::Code::Unavailable`] and name the socket.
#[derive(Clone)]
pub struct Client {
    socket: Arc<Path>,
    /// The longest that a call may take, apart from those that take as long as their work does.
    timeout: Option<Duration>,
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
}

/// The socket an endpoint names: `unix:///path`, `unix:/path` or a bare path.
fn socket_path(endpoint: &str) -> std::result::Result<PathBuf, EndpointError> {
    let path = match endpoint.strip_prefix("unix://").or_else(|| endpoint.strip_prefix("unix:")) {
        Some(path) => path,
        None if endpoint.contains("://") => return Err(EndpointError::NotUnix(endpoint.to_owned())),
        None => endpoint,
    };
    if path.starts_with('/') {
        Ok(PathBuf::from(path))
    } else {
        Err(EndpointError::NotAbsolute(endpoint.to_owned()))
    }
}

impl Client {
    /// Must be called within a tokio runtime. Does not touch the socket yet.
    pub fn new(endpoint: &str) -> std::result::Result<Self, EndpointError> {
        let socket: Arc<Path> = socket_path(endpoint)?.into();
        let path = socket.clone();
        // The address is never resolved: the connector knows where to go.
        let channel = Endpoint::from_static("http://localhost")
            .connect_timeout(Duration::from_secs(10))
            .connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
                let path = path.clone();
                async move { UnixStream::connect(&path).await.map(TokioIo::new) }
            }));
        Ok(Self {
            socket,
            timeout: None,
            runtime: RuntimeServiceClient::new(channel.clone())
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE),
            images: ImageServiceClient::new(channel)
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE),
        })
    }
}

impl Client {
    /// The same, with a limit of each call's time. As upstream: a sandbox may take twice as long, a container that is
    /// stopped and a command have their own time on top, and pulls have no limit.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    fn limit(&self, call: &str, request: &dyn Any) -> Option<Duration> {
        let timeout = self.timeout?;
        let seconds = |count: i64| Duration::from_secs(u64::try_from(count).unwrap_or(0));
        match call {
            "pull_image" | "exec" | "attach" | "port_forward" => None,
            "run_pod_sandbox" => Some(timeout * 2),
            "stop_container" => {
                let own = request.downcast_ref::<StopContainerRequest>().map_or(0, |r| r.timeout);
                Some(timeout.saturating_add(seconds(own)))
            }
            "exec_sync" => {
                let own = request.downcast_ref::<ExecSyncRequest>().map_or(0, |r| r.timeout);
                (own > 0).then(|| timeout.saturating_add(seconds(own)))
            }
            "checkpoint_container" => {
                let own = request.downcast_ref::<CheckpointContainerRequest>().map_or(0, |r| r.timeout);
                (own > 0).then(|| timeout.saturating_add(seconds(own)))
            }
            _ => Some(timeout),
        }
    }

    async fn within<T>(
        &self,
        limit: Option<Duration>,
        call: &'static str,
        answer: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let Some(limit) = limit else { return answer.await };
        match tokio::time::timeout(limit, answer).await {
            Ok(answer) => answer,
            Err(_) => {
                let message = format!("{call} did not end within {limit:?}");
                Err(Error::new(Code::DeadlineExceeded, message))
            }
        }
    }
}

/// One call. The connection may turn out to have ended while nobody used it: a request that was never sent
/// is sent again, on a new one.
macro_rules! ask {
    ($self:ident.$service:ident.$name:ident($request:ident)) => {{
        let limit = $self.limit(stringify!($name), &$request);
        let answer = async {
            let mut answer = $self.$service.clone().$name($request.clone()).await;
            if answer.as_ref().is_err_and(never_sent) {
                answer = $self.$service.clone().$name($request).await;
            }
            answer.map(tonic::Response::into_inner).map_err(|status| from_status(status, &$self.socket))
        };
        $self.within(limit, stringify!($name), answer).await
    }};
}

macro_rules! runtime_client {
    ($($name:ident $request:ident $response:ident;)*) => {
        #[async_trait]
        impl RuntimeService for Client {
            $(async fn $name(&self, request: $request) -> Result<$response> {
                ask!(self.runtime.$name(request))
            })*

            async fn get_container_events(&self, request: GetEventsRequest) -> Result<ContainerEvents> {
                let answer = self.runtime.clone().get_container_events(request).await;
                let stream = answer.map_err(|status| from_status(status, &self.socket))?.into_inner();
                // A broken stream ends; the reader lists and subscribes anew, and that call says why.
                let events = stream.take_while(|event| std::future::ready(event.is_ok()));
                Ok(events.filter_map(|event| std::future::ready(event.ok())).boxed())
            }
        }
    };
}

macro_rules! image_client {
    ($($name:ident $request:ident $response:ident;)*) => {
        #[async_trait]
        impl ImageService for Client {
            $(async fn $name(&self, request: $request) -> Result<$response> {
                ask!(self.images.$name(request))
            })*
        }
    };
}

runtime_calls!(runtime_client);
image_calls!(image_client);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn calls_have_their_times() {
        let client = Client::new("/run/x.sock").unwrap();
        assert_eq!(client.limit("status", &StatusRequest::default()), None, "none was asked for");
        let client = client.with_timeout(Duration::from_secs(120));
        let limit = |call: &str, request: &dyn Any| client.limit(call, request).map(|l| l.as_secs());
        assert_eq!(limit("status", &StatusRequest::default()), Some(120));
        assert_eq!(limit("run_pod_sandbox", &RunPodSandboxRequest::default()), Some(240));
        assert_eq!(limit("pull_image", &PullImageRequest::default()), None);
        let stop = StopContainerRequest { timeout: 30, ..Default::default() };
        assert_eq!(limit("stop_container", &stop), Some(150));
        let command = |timeout| ExecSyncRequest { timeout, ..Default::default() };
        assert_eq!(limit("exec_sync", &command(5)), Some(125));
        assert_eq!(limit("exec_sync", &command(0)), None, "a command without a limit has none here");
        let limit = Some(Duration::from_millis(1));
        let ended = client.within(limit, "status", std::future::pending::<Result<()>>()).await;
        assert_eq!(ended.unwrap_err().code, Code::DeadlineExceeded);
    }

    #[test]
    fn endpoints() {
        for (endpoint, expected) in [
            ("unix:///run/containerd/containerd.sock", Some("/run/containerd/containerd.sock")),
            ("unix:/run/crio/crio.sock", Some("/run/crio/crio.sock")),
            ("/run/x.sock", Some("/run/x.sock")),
            ("tcp://localhost:1", None),
            ("npipe:////./pipe/containerd", None),
            ("unix://run/x.sock", None),
            ("", None),
        ] {
            assert_eq!(socket_path(endpoint).ok(), expected.map(PathBuf::from), "{endpoint}");
        }
    }
}
