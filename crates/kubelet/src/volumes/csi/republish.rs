//! Volumes that their driver wants to publish again and again (`requiresRepublish`), for example to renew a token.
//!
//! This happens in the background: the pod runs, and a driver that hangs must not keep its containers from being restarted.

use super::ledger::VolumeId;
use super::mount::Publication;
use super::wanted::{Lifecycle, Wanted};
use super::{Csi, CsiError};
use crate::clock;
use crate::volumes::plugins::SetUp;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIDriver;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// As often as upstream's kubelet syncs its pods.
const PERIOD: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Progress {
    /// It succeeded at this time.
    Done(Timestamp),
    Running,
    Failed(String),
}

/// The last publication of each volume of each pod.
#[derive(Default)]
pub(super) struct Republished(Mutex<HashMap<(String, String), Progress>>);

/// The action for a volume that is published already.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Start,
    Wait,
    /// Say it, and start again.
    Report(String),
}

fn step(progress: Option<&Progress>, now: Timestamp) -> Step {
    match progress {
        // The kubelet restarted: nobody knows when it was published last.
        None => Step::Start,
        Some(Progress::Running) => Step::Wait,
        Some(Progress::Done(at)) if clock::add(*at, PERIOD) > now => Step::Wait,
        Some(Progress::Done(_)) => Step::Start,
        Some(Progress::Failed(problem)) => Step::Report(problem.clone()),
    }
}

impl Republished {
    fn change<T>(&self, change: impl FnOnce(&mut HashMap<(String, String), Progress>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The volume was published for the pod.
    pub(super) fn begin(&self, uid: &str, volume: &str, now: Timestamp) {
        self.set(uid, volume, Progress::Done(now));
    }

    fn set(&self, uid: &str, volume: &str, progress: Progress) {
        self.change(|all| all.insert((uid.to_owned(), volume.to_owned()), progress));
    }

    pub(super) fn end(&self, uid: &str, volume: &str) {
        self.change(|all| all.remove(&(uid.to_owned(), volume.to_owned())));
    }

    fn next(&self, uid: &str, volume: &str, now: Timestamp) -> Step {
        self.change(|all| {
            let key = (uid.to_owned(), volume.to_owned());
            let step = step(all.get(&key), now);
            if step != Step::Wait {
                all.insert(key, Progress::Running);
            }
            step
        })
    }
}

impl Csi {
    /// Publishes again when it is time. Returns the failure of the last attempt.
    pub(super) fn republish(
        &self,
        request: SetUp<'_>,
        wanted: &Wanted,
        id: &VolumeId,
        attach: bool,
        driver: Option<&CSIDriver>,
    ) -> Result<(), CsiError> {
        let uid = request.id.uid.clone();
        let problem = match self.shared.republished.next(&uid, &wanted.spec_name, request.now) {
            Step::Wait => return Ok(()),
            Step::Start => None,
            Step::Report(problem) => Some(problem),
        };
        let (csi, pod, now, group) = (self.clone(), request.pod.clone(), request.now, request.group);
        let (wanted, id, driver) = (wanted.clone(), id.clone(), driver.cloned());
        self.shared.scope.spawn(async move {
            let again = Again { uid: &uid, pod: &pod, now, group, attach };
            let done = csi.publish_again(again, &wanted, &id, driver.as_ref()).await;
            let progress = match done {
                Ok(()) => Progress::Done(now),
                Err(error) => Progress::Failed(error.to_string()),
            };
            // A pod that ended meanwhile is not remembered.
            csi.shared.republished.change(|all| {
                if let Some(entry) = all.get_mut(&(uid.clone(), wanted.spec_name.clone())) {
                    *entry = progress;
                }
            });
        });
        problem.map_or(Ok(()), |problem| Err(CsiError::Republish(problem)))
    }

    async fn publish_again(
        &self,
        again: Again<'_>,
        wanted: &Wanted,
        id: &VolumeId,
        driver: Option<&CSIDriver>,
    ) -> Result<(), CsiError> {
        let context = if again.attach { self.attached(id).await? } else { BTreeMap::new() };
        let service = self.shared.drivers.wait(&wanted.driver).await?;
        let _alone = self.exclusive(id).await;
        // The pod may have ended while this waited.
        let known = self
            .shared
            .republished
            .change(|all| all.contains_key(&(again.uid.to_owned(), wanted.spec_name.clone())));
        if !known {
            return Ok(());
        }
        let place = self.place(again.uid, wanted);
        let able = service.capabilities().await;
        let able = able.map_err(|source| CsiError::Call { step: "NodeGetCapabilities", source })?;
        let staging = (wanted.lifecycle == Lifecycle::Persistent && able.stage())
            .then(|| self.with_ledger(|ledger| ledger.stage_of(id)))
            .flatten();
        let publication =
            Publication { csi: self, wanted, uid: again.uid, place: &place, service, context, driver };
        let staging = staging.map(|stage| stage.path);
        publication.publish(&able, staging.as_deref(), again.group, again.pod, again.now).await
    }
}

/// The pod for which a volume is published again.
struct Again<'a> {
    uid: &'a str,
    pod: &'a Pod,
    now: Timestamp,
    group: Option<u32>,
    attach: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_publication_at_a_time_and_failures_are_told() {
        let now = Timestamp::from_second(1000).unwrap();
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        for (progress, expected) in [
            (None, Step::Start),
            (Some(Progress::Running), Step::Wait),
            (Some(Progress::Done(at(990))), Step::Wait),
            (Some(Progress::Done(at(900))), Step::Start),
            (Some(Progress::Failed("x".into())), Step::Report("x".into())),
        ] {
            assert_eq!(step(progress.as_ref(), now), expected, "{progress:?}");
        }
        let all = Republished::default();
        all.begin("u", "v", at(0));
        assert_eq!(all.next("u", "v", now), Step::Start);
        assert_eq!(all.next("u", "v", now), Step::Wait, "the first is under way");
        all.end("u", "v");
        assert_eq!(all.0.lock().unwrap().len(), 0);
    }
}
