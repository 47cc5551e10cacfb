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
use k8s_openapi::api::core::v1::Pod;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::Notify;

/// An image the runtime has.
#[derive(Debug, Clone)]
pub(crate) struct PresentImage {
    /// The reference from which containers are created.
    pub reference: String,
    pub user: ImageUser,
}

/// Failed pulls of one pod.
#[derive(Debug, Default)]
pub(crate) struct PullState {
    backoff: BackOff,
    /// The last pull for a container that failed.
    failed: HashMap<String, FailedPull>,
}

impl PullState {
    /// When a pull may be tried again, for the container of that name.
    pub(crate) fn retry_at(&self, container: &str, now: Timestamp) -> Option<Timestamp> {
        let failed = self.failed.get(container)?;
        self.backoff.blocked(&failed.image, failed.at, now).map(|(_, until)| until)
    }
}

#[derive(Debug)]
struct FailedPull {
    at: Timestamp,
    image: String,
    why: String,
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

    /// Makes sure that the container's image is there, as its policy says. The error is the container's
    /// waiting reason.
    pub(crate) async fn ensure(
        &self,
        pod: &Pod,
        container: &PodContainer,
        keyring: &Keyring,
        sandbox: &PodSandboxConfig,
        state: &mut PullState,
    ) -> Result<PresentImage, WaitingReason> {
        let name = container.spec.image.as_deref().unwrap_or_default();
        let about = model::reference(pod, Some(container.field_path()));
        let event = |kind, reason: &str, message: String| self.recorder.event(&about, kind, reason, message);
        let Some(image) = reference::with_tag(name) else {
            let message = format!(
                "Failed to apply default image tag \"{name}\": couldn't parse image name \"{name}\": invalid reference format"
            );
            event(EventType::Warning, "InspectFailed", message.clone());
            return Err(WaitingReason::new("InvalidImageName", message));
        };
        let policy = container.spec.image_pull_policy.as_deref().unwrap_or(if image.ends_with(":latest") {
            "Always"
        } else {
            "IfNotPresent"
        });
        let present = self.find(&image, name).await.map_err(|e| {
            let message = format!("Failed to inspect image \"{image}\": {e}");
            event(EventType::Warning, "InspectFailed", message.clone());
            WaitingReason::new("ImageInspectError", message)
        })?;
        match (policy, present) {
            ("Always", _) | ("IfNotPresent", None) => {}
            (_, Some(found)) => {
                state.failed.remove(container.name());
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
        if let Some(FailedPull { at, why, .. }) = state.failed.get(container.name())
            && state.backoff.blocked(&image, *at, now).is_some()
        {
            let message = format!("Back-off pulling image \"{image}\"");
            event(EventType::Normal, "BackOff", message.clone());
            return Err(WaitingReason::new("ImagePullBackOff", format!("{message}: ErrImagePull: {why}")));
        }
        event(EventType::Normal, "Pulling", format!("Pulling image \"{image}\""));
        match self.pull(&image, pod, keyring, sandbox, container).await {
            Ok(reference) => {
                state.failed.remove(container.name());
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
                let failed = FailedPull { at: failed_at, image: image.clone(), why: e.to_string() };
                state.failed.insert(container.name().to_string(), failed);
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
        container: &PodContainer,
    ) -> ferrite_cri::Result<String> {
        let request = |auth| PullImageRequest {
            image: Some(ImageSpec {
                image: image.to_string(),
                user_specified_image: container.spec.image.clone().unwrap_or_default(),
                ..ImageSpec::default()
            }),
            auth,
            sandbox_config: Some(sandbox.clone()),
        };
        // As upstream: the pod's credentials come before the node's.
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
