//! Images: pull policy, credentials, back-off and the events people read.

mod credentials;
mod gc;
mod limits;
mod providers;
mod pulled;
mod reference;

pub(crate) use credentials::Keyring;
pub(crate) use gc::{ImageGc, ImageGcPolicy, SeenImages};
pub use limits::PullLimits;
pub(crate) use providers::{ApiAccounts, Providers};
pub use providers::{ConfigError, Plugins};
pub(crate) use pulled::PulledImages;
pub use pulled::{Allowlist, VerificationPolicy, VerificationPolicyError};

use crate::clock::{self, Clock};
use crate::container::security::ImageUser;
use crate::pod::backoff::BackOff;
use crate::pod::model::{self, PodContainer};
use crate::pod::status::WaitingReason;
use credentials::Credential;
use ferrite_client::{EventRecorder, EventType};
use ferrite_cri::ImageService;
use ferrite_cri::v1::{Image, ImageSpec, ImageStatusRequest, PodSandboxConfig, PullImageRequest};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use limits::{PullGate, PullQpsExceeded};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// An image the runtime has.
#[derive(Debug, Clone)]
pub(crate) struct PresentImage {
    /// The reference from which containers are created.
    pub reference: String,
    pub user: ImageUser,
}

/// Failed pulls of one pod that are remembered.
const MAX_FAILED: usize = 256;

/// Failed pulls of one pod.
#[derive(Debug, Default)]
pub(crate) struct PullState {
    backoff: BackOff,
    /// The last pull of an image for a container that failed, by the names of both.
    failed: HashMap<(String, String), FailedPull>,
}

impl PullState {
    /// When a pull may be tried again, for the container of that name.
    pub(crate) fn retry_at(&self, container: &str, now: Timestamp) -> Option<Timestamp> {
        let of_container = self.failed.iter().filter(|((name, _), _)| name == container);
        let until = |failed: &FailedPull, image: &str| self.backoff.blocked(image, failed.at, now);
        of_container.filter_map(|((_, image), failed)| until(failed, image)).map(|(_, until)| until).min()
    }
}

#[derive(Debug)]
struct FailedPull {
    at: Timestamp,
    reason: &'static str,
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
    pulled: PulledImages,
    gate: Arc<PullGate>,
}

impl Images {
    pub(crate) fn new(
        service: Arc<dyn ImageService>,
        recorder: EventRecorder,
        clock: Clock,
        changed: Arc<Notify>,
        pulled: PulledImages,
    ) -> Self {
        Self { service, recorder, clock, changed, providers: None, pulled, gate: Arc::default() }
    }

    /// The same, asking plugins for credentials.
    pub(crate) fn with_providers(self, providers: Option<Arc<Providers>>) -> Self {
        Self { providers, ..self }
    }

    /// The same, within limits of pulls.
    pub(crate) fn with_limits(self, limits: PullLimits) -> Self {
        Self { gate: Arc::new(PullGate::new(limits)), ..self }
    }

    /// Makes sure that the container's image is there, as its policy says. The error is what the container
    /// waits for.
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
        let key = (container.name().to_owned(), image.clone());
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
        if policy != "Always"
            && let Some(found) = present
            && self
                .pulled
                .may_use(name, &found.id, async || self.credentials(&image, pod, keyring).await)
                .await
        {
            state.failed.remove(&key);
            event(
                EventType::Normal,
                "Pulled",
                format!(
                    "Container image \"{name}\" already present on machine and can be accessed by the pod"
                ),
            );
            return Ok(present_image(&image, found));
        }
        if policy == "Never" {
            // The same for an image that the pod may not use: nobody learns that the node has it.
            let message = format!("Container image \"{name}\" is not present with pull policy of Never");
            event(EventType::Warning, "ErrImageNeverPull", message.clone());
            return Err(WaitingReason::new("ErrImageNeverPull", message));
        }
        let now = self.clock.now();
        if let Some(FailedPull { at, reason, why }) = state.failed.get(&key)
            && state.backoff.blocked(&image, *at, now).is_some()
        {
            let message = format!("Back-off pulling image \"{image}\"");
            event(EventType::Normal, "BackOff", message.clone());
            return Err(WaitingReason::new("ImagePullBackOff", format!("{message}: {reason}: {why}")));
        }
        event(EventType::Normal, "Pulling", format!("Pulling image \"{image}\""));
        match self.pull(&image, pod, keyring, sandbox, container).await {
            Ok(Pulled { reference, found, took: pulling }) => {
                state.failed.remove(&key);
                state.backoff.forget(&image);
                self.changed.notify_one();
                let pulling = clock::go_duration(pulling);
                let took = clock::go_duration(clock::since(now, self.clock.now()));
                let size = found.as_ref().map_or(0, |i| i.size);
                event(
                    EventType::Normal,
                    "Pulled",
                    format!(
                        "Successfully pulled image \"{image}\" in {pulling} ({took} including waiting). Image size: {size} bytes."
                    ),
                );
                let user = found.map(|f| present_image(&image, f).user).unwrap_or_default();
                Ok(PresentImage { reference, user })
            }
            Err(e) => {
                let failed_at = self.clock.now();
                state.backoff.next(&image, failed_at, failed_at);
                event(EventType::Warning, "Failed", format!("Failed to pull image \"{image}\": {e}"));
                let (reason, why) = pull_failure(name, &e.to_string());
                let failed = FailedPull { at: failed_at, reason, why: why.clone() };
                // A pod whose images are changed again and again begins anew.
                if state.failed.len() >= MAX_FAILED {
                    state.failed.clear();
                }
                state.failed.insert(key, failed);
                Err(WaitingReason::new(reason, why))
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

    /// The credentials that a pod may pull an image with.
    async fn credentials(&self, image: &str, pod: &Pod, keyring: &Keyring) -> Vec<Credential> {
        // As upstream: what the pod brings comes before what the node knows.
        let mut credentials = keyring.lookup(image);
        if let Some(providers) = &self.providers {
            let (host, path) = reference::registry_path(image);
            credentials.extend(providers.lookup(&format!("{host}/{path}"), pod).await);
        }
        credentials
    }

    /// Pulls an image and writes down what opened it.
    async fn pull(
        &self,
        image: &str,
        pod: &Pod,
        keyring: &Keyring,
        sandbox: &PodSandboxConfig,
        container: &PodContainer,
    ) -> Result<Pulled, PullError> {
        let as_written = container.spec.image.as_deref().unwrap_or_default();
        let request = |auth| PullImageRequest {
            image: Some(ImageSpec {
                image: image.to_string(),
                user_specified_image: as_written.to_string(),
                ..ImageSpec::default()
            }),
            auth,
            sandbox_config: Some(sandbox.clone()),
        };
        let credentials = self.credentials(image, pod, keyring).await;
        let begun = self.gate.enter().await?;
        // Not while the pull waits: a pod that ends meanwhile has pulled nothing.
        let flight = self.pulled.begin(as_written).await;
        let flight = flight.map_err(|source| PullError::Intent { image: as_written.to_owned(), source })?;
        // Without credentials the registry may still let anybody have the image.
        let attempts: Vec<Option<Credential>> = match credentials.is_empty() {
            true => vec![None],
            false => credentials.into_iter().map(Some).collect(),
        };
        let mut last = None;
        for used in attempts {
            match self.service.pull_image(request(used.as_ref().map(|c| c.auth.clone()))).await {
                Ok(answer) => {
                    let found = self.find(image, as_written).await.ok().flatten();
                    // The name that later looks at the image will find it by.
                    let id = found.as_ref().map_or(&answer.image_ref, |found| &found.id);
                    flight.succeeded(id, used.as_ref()).await;
                    return Ok(Pulled { reference: answer.image_ref, found, took: begun.elapsed() });
                }
                Err(e) => last = Some(e),
            }
        }
        flight.failed().await;
        Err(last.unwrap_or_else(|| ferrite_cri::Error::internal("no credentials")).into())
    }
}

/// An image that was pulled.
struct Pulled {
    /// The name for containers.
    reference: String,
    found: Option<Image>,
    /// Without the time in which the pull waited for others.
    took: Duration,
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
enum PullError {
    #[error(transparent)]
    Runtime(#[from] ferrite_cri::Error),
    #[error(transparent)]
    Rate(#[from] PullQpsExceeded),
    /// The image would later be taken for one that every pod may use.
    #[error("Failed to record image pull intent for container image {image:?}: {source}")]
    Intent { image: String, source: std::io::Error },
}

/// The reason and message of a container whose pull failed. Runtimes tell two kinds by the beginning of the message.
fn pull_failure(image: &str, error: &str) -> (&'static str, String) {
    let kinds = [
        ("RegistryUnavailable", "the registry is unavailable"),
        ("SignatureValidationFailed", "the signature validation failed"),
    ];
    for (reason, because) in kinds {
        if let Some(rest) = error.strip_prefix(reason) {
            return (reason, format!("image pull failed for {image} because {because}{rest}"));
        }
    }
    ("ErrImagePull", error.to_owned())
}

fn present_image(asked: &str, image: Image) -> PresentImage {
    // As upstream: an image that names no user runs as root.
    let root = image.username.is_empty().then_some(0);
    PresentImage {
        reference: if image.id.is_empty() { asked.to_string() } else { image.id },
        user: ImageUser { uid: image.uid.map(|u| u.value).or(root), name: image.username },
    }
}

#[cfg(test)]
mod tests;
