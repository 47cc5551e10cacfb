//! `/containerLogs`.

use super::{Answer, Server, answer, query, text};
use crate::logs::{self, LogEnd, LogOptions};
use crate::pod::labels;
use crate::pod::model;
use crate::pod::observe::observe;
use crate::pod::runtime_pod::{Instance, RunState};
use bytes::Bytes;
use ferrite_client::ObjectKey;
use ferrite_cri::RuntimeService;
use ferrite_cri::v1::{ContainerState, ContainerStatusRequest, GetEventsRequest};
use futures_util::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, StatusCode};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

impl Server {
    pub(super) async fn logs(
        &self,
        request: &Request<Incoming>,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Answer {
        let pairs = query(request);
        let pairs = pairs.iter().map(|(k, v)| (k.as_str(), v.as_str()));
        let options = match LogOptions::from_query(pairs, self.context.clock.now()) {
            Ok(options) => options,
            Err(e) => return text(StatusCode::BAD_REQUEST, format!("{e}\n")),
        };
        let (instance, path) = match self.find_log(namespace, pod, container, &options).await {
            Ok(found) => found,
            Err((status, message)) => return text(status, message),
        };
        let Some(share) = self.log_readers.enter(namespace) else {
            let message = format!("too many logs of namespace {namespace:?} are being read; end some\n");
            return text(StatusCode::TOO_MANY_REQUESTS, message);
        };
        let (sender, receiver) = mpsc::channel::<Bytes>(16);
        let end = Box::new(ContainerEnd { runtime: self.context.runtime.clone(), id: instance.id });
        self.scope.spawn(async move {
            if let Err(e) = logs::stream(path.clone(), options, end, sender).await {
                tracing::warn!(path = %path.display(), error = %e, "could not read a container's log");
            }
        });
        let frames = futures_util::stream::unfold((receiver, share), |(mut receiver, share)| async move {
            receiver.recv().await.map(|bytes| (Ok(Frame::data(bytes)), (receiver, share)))
        });
        answer(
            StatusCode::OK,
            "text/plain; charset=utf-8",
            BodyExt::boxed(StreamBody::new(SyncStream::new(frames))),
        )
    }

    async fn find_log(
        &self,
        namespace: &str,
        pod_name: &str,
        container: &str,
        options: &LogOptions,
    ) -> Result<(Instance, PathBuf), (StatusCode, String)> {
        let context = &self.context;
        let pod = context
            .pods
            .get(&ObjectKey::new(namespace, pod_name))
            .ok_or_else(|| (StatusCode::NOT_FOUND, format!("pod \"{pod_name}\" does not exist\n")))?;
        if !model::containers(&pod).iter().any(|c| c.name() == container) {
            let message = format!("container \"{container}\" not found in pod \"{pod_name}\"\n");
            return Err((StatusCode::NOT_FOUND, message));
        }
        let id = model::PodId::of(&pod);
        let runtime = observe(&*context.runtime, &id.uid)
            .await
            .map_err(|e| (StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")))?;
        let latest = runtime.latest(container);
        let found = match (options.previous, latest) {
            (true, Some(latest)) => runtime.previous(container, latest).ok_or_else(|| {
                format!("previous terminated container \"{container}\" in pod \"{pod_name}\" not found\n")
            }),
            (true, None) => Err(format!(
                "previous terminated container \"{container}\" in pod \"{pod_name}\" not found\n"
            )),
            (false, Some(latest)) if latest.state != RunState::Created => Ok(latest),
            (false, Some(latest)) => {
                runtime.previous(container, latest).ok_or_else(|| waiting(&pod, container))
            }
            (false, None) => Err(waiting(&pod, container)),
        };
        let instance = found.map_err(|message| (StatusCode::BAD_REQUEST, message))?.clone();
        let mut path = PathBuf::from(&instance.log_path);
        if !path.is_absolute() {
            path = context.log_dir.join(id.log_directory()).join(&instance.log_path);
        }
        Ok((instance, path))
    }
}

fn waiting(pod: &k8s_openapi::api::core::v1::Pod, container: &str) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let all =
        [status.container_statuses, status.init_container_statuses, status.ephemeral_container_statuses];
    let reason = all
        .iter()
        .flatten()
        .flatten()
        .find(|s| s.name == container)
        .and_then(|s| s.state.as_ref()?.waiting.as_ref()?.reason.clone())
        .unwrap_or_else(|| "ContainerCreating".into());
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    format!("container \"{container}\" in pod \"{name}\" is waiting to start: {reason}\n")
}

/// Ends when the runtime says that the container has.
struct ContainerEnd {
    runtime: Arc<dyn RuntimeService>,
    id: String,
}

#[async_trait::async_trait]
impl LogEnd for ContainerEnd {
    async fn ended(&mut self) {
        loop {
            // Subscribe before looking, so that an end in between is not missed.
            let events = self.runtime.get_container_events(GetEventsRequest {}).await;
            let request = ContainerStatusRequest { container_id: self.id.clone(), verbose: false };
            match self.runtime.container_status(request).await {
                Ok(answer)
                    if answer
                        .status
                        .as_ref()
                        .is_some_and(|s| s.state() == ContainerState::ContainerRunning) => {}
                Ok(_) => return,
                Err(e) if e.is_not_found() => return,
                Err(_) => {}
            }
            let Ok(mut events) = events else {
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            };
            while let Some(event) = events.next().await {
                let about_us = event.container_id == self.id
                    || event
                        .containers_statuses
                        .iter()
                        .any(|c| c.id == self.id && c.labels.contains_key(labels::POD_UID));
                if about_us {
                    break;
                }
            }
        }
    }
}

/// Lets a stream that is polled by one task at a time pass where `Sync` is asked for.
pub(super) struct SyncStream<S>(std::sync::Mutex<std::pin::Pin<Box<S>>>);

impl<S> SyncStream<S> {
    pub(super) fn new(stream: S) -> Self {
        Self(std::sync::Mutex::new(Box::pin(stream)))
    }
}

impl<S: futures_util::Stream> futures_util::Stream for SyncStream<S> {
    type Item = S::Item;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let inner = self.get_mut().0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        inner.as_mut().poll_next(cx)
    }
}
