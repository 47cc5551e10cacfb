//! Credentials that opened images: a pod may use an image of the node that another pod's secret opened only if it has
//! credentials that opened it, too.
//!
//! Before a pull an intent is written, after it a record of what opened the image. `policy` and `record` decide;
//! `files` stores. A pull whose end nobody saw leaves its intent: the image, should it be there, then counts as pulled
//! in a way that is not known, and every pod has to show credentials to the registry.

mod files;
mod policy;
mod record;

pub use policy::{Allowlist, VerificationPolicy, VerificationPolicyError};
pub(crate) use record::Coordinates;

use super::credentials::Credential;
use super::reference;
use crate::clock::Clock;
use ferrite_component::metrics::{Counter, Family, registry};
use ferrite_cri::ImageService;
use ferrite_cri::v1::{ImageSpec, ImageStatusRequest};
use files::{Found, RecordFiles};
use jiff::Timestamp;
use record::{ImagePullCredentials, ImagePulledRecord, Look};
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A runtime that goes on with a pull that nobody waits for has this much time; then its outcome is looked at.
const LOST_PULL: Duration = Duration::from_secs(3600);

/// Pulls of one image name.
#[derive(Debug, Default)]
struct Flights {
    count: usize,
    /// Since when there is a pull whose end nobody saw.
    lost: Option<Timestamp>,
}

/// The images that the kubelet pulled, and what opened them.
#[derive(Clone)]
pub(crate) struct PulledImages {
    policy: Arc<VerificationPolicy>,
    shared: Arc<Shared>,
    clock: Clock,
}

struct Shared {
    /// One at a time reads a record and writes it.
    files: Mutex<RecordFiles>,
    flights: Mutex<HashMap<String, Flights>>,
}

impl Shared {
    fn files(&self) -> MutexGuard<'_, RecordFiles> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn flights(&self) -> MutexGuard<'_, HashMap<String, Flights>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(
        files: &RecordFiles,
        image: &str,
        image_ref: &str,
        opened: Option<ImagePullCredentials>,
        now: Timestamp,
    ) -> io::Result<()> {
        let repository = reference::repository(image).unwrap_or(image);
        let known = match files.record(image_ref) {
            Found::Record(record) => Some(record),
            Found::Nothing | Found::Damaged => None,
        };
        match record::merged(known.as_deref(), image_ref, repository, opened, now) {
            Some(record) => files.write_record(&record),
            None => Ok(()),
        }
    }
}

/// The answer to a pod that finds its image on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckResult {
    CredentialPolicyAllowed,
    CredentialRecordFound,
    MustAuthenticate,
    Error,
}

impl CheckResult {
    fn name(self) -> &'static str {
        match self {
            Self::CredentialPolicyAllowed => "credentialPolicyAllowed",
            Self::CredentialRecordFound => "credentialRecordFound",
            Self::MustAuthenticate => "mustAuthenticate",
            Self::Error => "error",
        }
    }
}

static CHECKS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Times that the kubelet checked if credentials have to be verified before a pod uses an image of the node";
    registry().counter("kubelet_imagemanager_image_mustpull_checks_total", help, &["result"])
});

impl PulledImages {
    pub(crate) fn open(root: &Path, policy: VerificationPolicy, clock: Clock) -> io::Result<Self> {
        let files = RecordFiles::open(root)?;
        let now = clock.now();
        // Also where the runtime cannot be asked yet, nothing takes these for preloaded.
        let lost = |image| (image, Flights { count: 0, lost: Some(now) });
        let flights = files.intents()?.into_iter().map(lost).collect();
        let shared = Shared { files: Mutex::new(files), flights: Mutex::new(flights) };
        Ok(Self { policy: Arc::new(policy), shared: Arc::new(shared), clock })
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> io::Result<T> {
        let shared = self.shared.clone();
        tokio::task::spawn_blocking(move || work(&shared)).await.map_err(io::Error::other)
    }

    /// True if a pod may use an image that the node has, without asking the registry. The pod's credentials are looked
    /// up only if they are needed.
    pub(crate) async fn may_use(
        &self,
        image: &str,
        image_ref: &str,
        credentials: impl AsyncFnOnce() -> Vec<Credential>,
    ) -> bool {
        let result = self.check(image, image_ref, credentials).await.unwrap_or_else(|error| {
            tracing::error!(image, %error, "Unable to access cache records about image pulls");
            CheckResult::Error
        });
        CHECKS.with(&[result.name()]).increment();
        matches!(result, CheckResult::CredentialPolicyAllowed | CheckResult::CredentialRecordFound)
    }

    async fn check(
        &self,
        image: &str,
        image_ref: &str,
        credentials: impl AsyncFnOnce() -> Vec<Credential>,
    ) -> io::Result<CheckResult> {
        let (name, id) = (image.to_owned(), image_ref.to_owned());
        let found = self.blocking(move |shared| {
            let files = shared.files();
            let flying = shared.flights().contains_key(&name);
            match files.record(&id) {
                Found::Record(record) => Ok((true, Some(record))),
                Found::Damaged => Ok((true, None)),
                Found::Nothing => Ok((flying || files.has_intent(&name)?, None)),
            }
        });
        let (pulled, record): (bool, Option<Box<ImagePulledRecord>>) =
            found.await?.map_err(|e: io::Error| e)?;
        let repository = reference::repository(image).unwrap_or(image);
        match record::look(&self.policy, image, repository, pulled, record.as_deref()) {
            Look::PolicyAllows => return Ok(CheckResult::CredentialPolicyAllowed),
            Look::Accessible => return Ok(CheckResult::CredentialRecordFound),
            Look::MustAuthenticate => return Ok(CheckResult::MustAuthenticate),
            Look::Compare => {}
        }
        let Some(known) = record.as_ref().and_then(|record| record.credential_mapping.get(repository)) else {
            return Ok(CheckResult::MustAuthenticate);
        };
        let Ok(new) = record::compare(known, &credentials().await) else {
            return Ok(CheckResult::MustAuthenticate);
        };
        if let Some(secret) = new {
            let opened = ImagePullCredentials { kubernetes_secrets: vec![secret], ..Default::default() };
            self.record(image, image_ref, Some(opened)).await.unwrap_or_else(|error| {
                tracing::error!(image, %error, "failed to write an image pulled record");
            });
        }
        Ok(CheckResult::CredentialRecordFound)
    }

    async fn record(
        &self,
        image: &str,
        image_ref: &str,
        opened: Option<ImagePullCredentials>,
    ) -> io::Result<()> {
        let (image, id, now) = (image.to_owned(), image_ref.to_owned(), self.clock.now());
        self.blocking(move |shared| Shared::add(&shared.files(), &image, &id, opened, now)).await?
    }

    /// Writes down that a pull begins.
    pub(crate) async fn begin(&self, image: &str) -> io::Result<PullInFlight> {
        let (image, images) = (image.to_owned(), self.clone());
        self.blocking(move |shared| {
            let files = shared.files();
            files.write_intent(&image)?;
            shared.flights().entry(image.clone()).or_default().count += 1;
            Ok(PullInFlight { images, image, ended: false })
        })
        .await?
    }

    /// Makes records of images whose pulls were under way when the kubelet ended.
    pub(crate) async fn recover(&self, service: &dyn ImageService) {
        self.settle(service, Timestamp::MAX).await;
    }

    /// Looks at the outcome of pulls that were lost before `until`.
    async fn settle(&self, service: &dyn ImageService, until: Timestamp) {
        let lost: Vec<String> = {
            let flights = self.shared.flights();
            let lost = |f: &Flights| f.count == 0 && f.lost.is_some_and(|since| since <= until);
            flights.iter().filter(|(_, f)| lost(f)).map(|(image, _)| image.clone()).collect()
        };
        for image in lost {
            let name = reference::with_tag(&image).unwrap_or_else(|| image.clone());
            let spec = ImageSpec { image: name, user_specified_image: image.clone(), ..ImageSpec::default() };
            let answer = service.image_status(ImageStatusRequest { image: Some(spec), verbose: false }).await;
            let id = match answer {
                Ok(answer) => answer.image.map(|image| image.id),
                Err(error) => {
                    tracing::warn!(image, %error, "cannot look at the outcome of a pull; its intent stays");
                    continue;
                }
            };
            let now = self.clock.now();
            let settled = self.blocking(move |shared| {
                let files = shared.files();
                // A runtime may still be at it shortly after a start: an image that is not there is looked at again.
                let Some(id) = id.or((until != Timestamp::MAX).then(String::new)) else { return Ok(()) };
                if !id.is_empty() {
                    Shared::add(&files, &image, &id, None, now)?;
                }
                let mut flights = shared.flights();
                if flights.get(&image).is_some_and(|f| f.count == 0) {
                    files.remove_intent(&image)?;
                    flights.remove(&image);
                }
                Ok::<_, io::Error>(())
            });
            if let Err(error) = settled.await.and_then(|done| done) {
                tracing::warn!(%error, "cannot settle the record of a pull");
            }
        }
    }

    /// Removes records of images that the node no longer has. `present` are the images as they were at `since`: newer
    /// records stay.
    pub(crate) async fn prune(&self, present: HashSet<String>, since: Timestamp, service: &dyn ImageService) {
        let pruned = self.blocking(move |shared| {
            let files = shared.files();
            for record in files.records()? {
                // Records have whole seconds.
                let older = record.last_updated_time.as_second() < since.as_second();
                if older && !present.contains(&record.image_ref) {
                    files.remove_record(&record.image_ref)?;
                }
            }
            Ok::<_, io::Error>(())
        });
        if let Err(error) = pruned.await.and_then(|done| done) {
            tracing::warn!(%error, "cannot remove records of images");
        }
        let until = since.checked_sub(LOST_PULL).unwrap_or(Timestamp::MIN);
        self.settle(service, until).await;
    }
}

/// A pull that is under way. Dropped before its end it leaves its intent.
pub(crate) struct PullInFlight {
    images: PulledImages,
    image: String,
    ended: bool,
}

impl PullInFlight {
    /// The pull succeeded, with these credentials.
    pub(crate) async fn succeeded(mut self, image_ref: &str, used: Option<&Credential>) {
        self.ended = true;
        let (image, id, opened) = (self.image.clone(), image_ref.to_owned(), record::opened_by(used));
        let now = self.images.clock.now();
        let recorded = self.images.blocking(move |shared| {
            let files = shared.files();
            let added = Shared::add(&files, &image, &id, Some(opened), now);
            let mut flights = shared.flights();
            let flight = flights.entry(image.clone()).or_default();
            flight.count = flight.count.saturating_sub(1);
            match added {
                Err(error) => {
                    flight.lost = Some(now);
                    Err(error)
                }
                Ok(()) if flight.count == 0 => {
                    flights.remove(&image);
                    files.remove_intent(&image)
                }
                Ok(()) => Ok(()),
            }
        });
        if let Err(error) = recorded.await.and_then(|done| done) {
            tracing::error!(image = self.image, %error, "failed to write image pulled record");
        }
    }

    /// The runtime said that there is no image.
    pub(crate) async fn failed(mut self) {
        self.ended = true;
        let image = self.image.clone();
        let recorded = self.images.blocking(move |shared| {
            let files = shared.files();
            let mut flights = shared.flights();
            let flight = flights.entry(image.clone()).or_default();
            flight.count = flight.count.saturating_sub(1);
            match flight {
                Flights { count: 0, lost: None } => {
                    flights.remove(&image);
                    files.remove_intent(&image)
                }
                _ => Ok(()),
            }
        });
        if let Err(error) = recorded.await.and_then(|done| done) {
            tracing::error!(image = self.image, %error, "failed to remove image pull intent");
        }
    }
}

impl Drop for PullInFlight {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let now = self.images.clock.now();
        let mut flights = self.images.shared.flights();
        let flight = flights.entry(self.image.clone()).or_default();
        flight.count = flight.count.saturating_sub(1);
        flight.lost.get_or_insert(now);
    }
}

#[cfg(test)]
mod tests;
