//! Images: pull policy, credentials, back-off and the events people read.

mod credentials;
mod gc;
mod providers;
mod reference;

pub(crate) use credentials::Keyring;
pub(crate) use gc::{ImageGc, SeenImages};
pub(crate) use providers::{ApiAccounts, Providers};
pub use providers::{ConfigError, Plugins};

use crate::clock::{self, Clock};
use crate::container::security::ImageUser;
use crate::pod::backoff::BackOff;
use crate::pod::model::{self, PodContainer};
use crate::pod::status::WaitingReason;
use ferrite_client::{EventRecorder, EventType};
use ferrite_cri::ImageService;
use ferrite_cri::v1::{Image, ImageSpec, ImageStatusRequest, PodSandboxConfig, PullImageRequest};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::Notify;

/// An image the runtime has.
#[derive(Debug, Clone)]
pub(crate) struct PresentImage {
    /// What containers are created from.
    pub reference: String,
    pub user: ImageUser,
}

/// Failed pulls of one pod.
#[derive(Debug, Default)]
pub(crate) struct PullState {
    backoff: BackOff,
    /// When the last pull for a container failed, and how.
    failed: HashMap<String, (Timestamp, String)>,
}

impl PullState {
    /// When a pull may be tried again, for the container of that name.
    pub(crate) fn retry_at(&self, container: &str, image: &str, now: Timestamp) -> Option<Timestamp> {
        let (at, _) = self.failed.get(container)?;
        self.backoff.blocked(image, *at, now).map(|(_, until)| until)
    }
}

#[derive(Clone)]
pub(crate) struct Images {
    service: Arc<dyn ImageService>,
    recorder: EventRecorder,
    clock: Clock,
    /// Told when an image came.
    changed: Arc<Notify>,
    /// Plugins that know credentials.
    providers: Option<Arc<Providers>>,
}

/// An image that a container needs: its own, or one that it mounts.
pub(crate) struct ImageRequest<'a> {
    /// As it is written in the pod.
    pub image: &'a str,
    pub policy: Option<&'a str>,
    /// Under which its failures are counted.
    pub key: String,
    /// What its events are about.
    pub about: ObjectReference,
}

impl<'a> ImageRequest<'a> {
    /// The container's own image.
    pub(crate) fn of(pod: &Pod, container: &'a PodContainer) -> Self {
        Self {
            image: container.spec.image.as_deref().unwrap_or_default(),
            policy: container.spec.image_pull_policy.as_deref(),
            key: container.name().to_owned(),
            about: model::reference(pod, Some(container.field_path())),
        }
    }
}

impl Images {
    pub(crate) fn new(
        service: Arc<dyn ImageService>,
        recorder: EventRecorder,
        clock: Clock,
        changed: Arc<Notify>,
    ) -> Self {
        Self { service, recorder, clock, changed, providers: None }
    }

    /// The same, asking plugins for credentials.
    pub(crate) fn with_providers(self, providers: Option<Arc<Providers>>) -> Self {
        Self { providers, ..self }
    }

    /// Makes sure that an image is there, as its policy says. The error is what the container waits for.
    pub(crate) async fn ensure(
        &self,
        pod: &Pod,
        wanted: &ImageRequest<'_>,
        keyring: &Keyring,
        sandbox: &PodSandboxConfig,
        state: &mut PullState,
    ) -> Result<PresentImage, WaitingReason> {
        let ImageRequest { image: name, policy, key, about } = wanted;
        let event = |kind, reason: &str, message: String| self.recorder.event(about, kind, reason, message);
        let Some(image) = reference::with_tag(name) else {
            let message = format!(
                "Failed to apply default image tag \"{name}\": couldn't parse image name \"{name}\": invalid reference format"
            );
            event(EventType::Warning, "InspectFailed", message.clone());
            return Err(WaitingReason::new("InvalidImageName", message));
        };
        let policy = policy.unwrap_or(if image.ends_with(":latest") { "Always" } else { "IfNotPresent" });
        let present = self.find(&image, name).await.map_err(|e| {
            let message = format!("Failed to inspect image \"{image}\": {e}");
            event(EventType::Warning, "InspectFailed", message.clone());
            WaitingReason::new("ImageInspectError", message)
        })?;
        match (policy, present) {
            ("Always", _) | ("IfNotPresent", None) => {}
            (_, Some(found)) => {
                state.failed.remove(key);
                event(
                    EventType::Normal,
                    "Pulled",
                    format!("Container image \"{image}\" already present on machine"),
                );
                return Ok(present_image(&image, found));
            }
            (_, None) => {
                let message = format!("Container image \"{image}\" is not present with pull policy of Never");
                event(EventType::Warning, "ErrImageNeverPull", message.clone());
                return Err(WaitingReason::new("ErrImageNeverPull", message));
            }
        }
        let now = self.clock.now();
        if let Some((at, why)) = state.failed.get(key)
            && state.backoff.blocked(&image, *at, now).is_some()
        {
            let message = format!("Back-off pulling image \"{image}\"");
            event(EventType::Normal, "BackOff", message.clone());
            return Err(WaitingReason::new("ImagePullBackOff", format!("{message}: ErrImagePull: {why}")));
        }
        event(EventType::Normal, "Pulling", format!("Pulling image \"{image}\""));
        match self.pull(&image, pod, keyring, sandbox, name).await {
            Ok(reference) => {
                state.failed.remove(key);
                state.backoff.forget(&image);
                self.changed.notify_one();
                let took = clock::go_duration(clock::since(now, self.clock.now()));
                let found = self.find(&image, name).await.ok().flatten();
                let size = found.as_ref().map_or(0, |i| i.size);
                event(
                    EventType::Normal,
                    "Pulled",
                    format!(
                        "Successfully pulled image \"{image}\" in {took} ({took} including waiting). Image size: {size} bytes."
                    ),
                );
                let user = found.map(|f| present_image(&image, f).user).unwrap_or_default();
                Ok(PresentImage { reference, user })
            }
            Err(e) => {
                let failed_at = self.clock.now();
                state.backoff.next(&image, failed_at, failed_at);
                state.failed.insert(key.clone(), (failed_at, e.to_string()));
                event(EventType::Warning, "Failed", format!("Failed to pull image \"{image}\": {e}"));
                Err(WaitingReason::new("ErrImagePull", e.to_string()))
            }
        }
    }

    async fn find(&self, image: &str, as_written: &str) -> ferrite_cri::Result<Option<Image>> {
        let spec = ImageSpec {
            image: image.to_string(),
            user_specified_image: as_written.to_string(),
            ..ImageSpec::default()
        };
        let answer =
            self.service.image_status(ImageStatusRequest { image: Some(spec), verbose: false }).await?;
        Ok(answer.image)
    }

    async fn pull(
        &self,
        image: &str,
        pod: &Pod,
        keyring: &Keyring,
        sandbox: &PodSandboxConfig,
        as_written: &str,
    ) -> ferrite_cri::Result<String> {
        let request = |auth| PullImageRequest {
            image: Some(ImageSpec {
                image: image.to_string(),
                user_specified_image: as_written.to_string(),
                ..ImageSpec::default()
            }),
            auth,
            sandbox_config: Some(sandbox.clone()),
        };
        // As upstream: what the pod brings comes before what the node knows.
        let mut credentials = keyring.lookup(image);
        if let Some(providers) = &self.providers {
            let (host, path) = reference::registry_path(image);
            credentials.extend(providers.lookup(&format!("{host}/{path}"), pod).await);
        }
        if credentials.is_empty() {
            return Ok(self.service.pull_image(request(None)).await?.image_ref);
        }
        let mut last = None;
        for auth in credentials {
            match self.service.pull_image(request(Some(auth))).await {
                Ok(answer) => return Ok(answer.image_ref),
                Err(e) => last = Some(e),
            }
        }
        Err(last.unwrap_or_else(|| ferrite_cri::Error::internal("no credentials")))
    }
}

fn present_image(asked: &str, image: Image) -> PresentImage {
    // As upstream: an image that names no user runs as root.
    let root = image.username.is_empty().then_some(0);
    PresentImage {
        reference: if image.id.is_empty() { asked.to_string() } else { image.id },
        user: ImageUser { uid: image.uid.map(|u| u.value).or(root), name: image.username },
    }
}

/// The name under which pulls of an image are counted.
pub(crate) fn tagged(image: &str) -> String {
    reference::with_tag(image).unwrap_or_else(|| image.to_string())
}
