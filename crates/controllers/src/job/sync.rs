//! Carries out the decisions of [`super::plan`] and [`super::tracking`].

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_client::{EventType, ObjectKey, is_not_found};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;

use super::assess::{Assessment, Outcome};
use super::measures::{self, Action};
use super::memory::Memory;
use super::plan::{self, Plan};
use super::tracking::{Tracking, count_finalized};
use super::{Rules, has_finalizer, name, uid};
use crate::error::{During, SyncError, is_namespace_terminating};
use crate::pod_control::{in_parallel, slow_start};
use crate::pods::is_ready;

/// Pod events of one Job within this time cause one sync.
pub(super) const BATCH: Duration = Duration::from_secs(1);
/// The rest of a large Job follows as soon as the informer can have shown the first part.
const NEXT_PART: Duration = Duration::from_millis(50);

/// The writes of a sync.
pub(super) trait Writes: Send + Sync {
    fn create_pod(&self, job: &Job, pod: &Pod) -> impl Future<Output = Result<(), kube::Error>> + Send;
    fn delete_pod(&self, job: &Job, pod: &Pod) -> impl Future<Output = Result<(), kube::Error>> + Send;
    fn remove_finalizer(&self, pod: &Pod) -> impl Future<Output = Result<(), kube::Error>> + Send;
    fn update_status(&self, job: &Job) -> impl Future<Output = Result<Job, kube::Error>> + Send;
    fn event(&self, job: &Job, kind: EventType, reason: &str, message: &str);
}

/// The state that a sync starts from.
pub(super) struct Seen {
    pub(super) job: Arc<Job>,
    pub(super) pods: Vec<Arc<Pod>>,
    /// See [`Memory::removed`]; from before the pods were read.
    pub(super) removed: std::collections::HashSet<String>,
    /// True if the pods are complete as far as the controller knows, and may be added to.
    pub(super) satisfied: bool,
}

/// Brings the pods and the status of a Job in line. Returns the delay of the next sync without an event.
pub(super) async fn sync<W: Writes>(
    writes: &W,
    memory: &Memory,
    key: &ObjectKey,
    seen: Seen,
    now: Timestamp,
) -> Result<Option<Duration>, SyncError> {
    let (began, job) = (Instant::now(), Arc::clone(&seen.job));
    let mut action = Action::Reconciling;
    let result = sync_measured(writes, memory, key, seen, now, &mut action).await;
    measures::synced(&job, action, result.is_ok(), began.elapsed());
    result
}

async fn sync_measured<W: Writes>(
    writes: &W,
    memory: &Memory,
    key: &ObjectKey,
    seen: Seen,
    now: Timestamp,
    action: &mut Action,
) -> Result<Option<Duration>, SyncError> {
    let job = seen.job;
    let Some(rules) = Rules::of(&job) else { return Ok(None) };
    let mut assessment = Assessment::new(&job, rules, seen.pods, &seen.removed, &memory.backoff(key), now);
    let syncing = Syncing { writes, memory, key, job: &job };
    let mut again = Again(assessment.deadline_in);
    let mut changed = false;
    let mut problem = None;
    if assessment.verdict.is_some() {
        problem = syncing.delete_active(&mut assessment, seen.satisfied).await;
    } else {
        let manages = seen.satisfied && !rules.deleting;
        if manages {
            problem = syncing.manage(&mut assessment, &mut again, now, action).await;
        }
        assessment.evaluate_completions();
        if assessment.verdict.is_none()
            && manages
            && let Some((reason, message)) = assessment.update_suspension(now)
        {
            changed = true;
            writes.event(&job, EventType::Normal, reason, message);
        }
    }
    changed |= assessment.update_numbers();
    let mut tracking = assessment.track(now);
    tracking.changed |= changed;
    if tracking.more {
        again.within(NEXT_PART);
    }
    syncing.count(&mut assessment, tracking, now).await?;
    problem.map_or(Ok(again.0), Err)
}

/// The soonest time of several.
struct Again(Option<Duration>);

impl Again {
    fn within(&mut self, delay: Duration) {
        self.0 = Some(self.0.map_or(delay, |known| known.min(delay)));
    }
}

struct Syncing<'a, W> {
    writes: &'a W,
    memory: &'a Memory,
    key: &'a ObjectKey,
    job: &'a Job,
}

impl<W: Writes> Syncing<'_, W> {
    /// Deletes the pods of a Job that has ended; their finalizers stay until they are counted.
    async fn delete_active(&self, assessment: &mut Assessment<'_>, satisfied: bool) -> Option<SyncError> {
        let deletions = assessment.active.iter().map(|pod| async {
            match self.writes.delete_pod(self.job, pod).await {
                Err(error) if !is_not_found(&error) => Err(error),
                _ => Ok(is_ready(pod)),
            }
        });
        let results = in_parallel(deletions).await;
        let deleted = results.iter().filter(|result| result.is_ok()).count();
        let ready = results.iter().filter(|result| matches!(result, Ok(true))).count();
        if deleted < assessment.active.len() || !satisfied {
            // Pods may be left, or may exist that the informer has not shown: too early to end the Job.
            assessment.verdict = None;
        }
        assessment.deleted(deleted, ready);
        first_error(results, || format!("delete pods of {}", self.key))
    }

    async fn manage(
        &self,
        assessment: &mut Assessment<'_>,
        again: &mut Again,
        now: Timestamp,
        action: &mut Action,
    ) -> Option<SyncError> {
        let plan = plan::plan(assessment, now);
        *action = match plan {
            Plan::Nothing | Plan::Wait(_) => Action::Tracking,
            Plan::Delete(_) => Action::PodsDeleted,
            Plan::Create { .. } => Action::PodsCreated,
        };
        match plan {
            Plan::Nothing => None,
            Plan::Wait(delay) => {
                again.within(delay.max(BATCH));
                None
            }
            Plan::Delete(victims) => self.delete(assessment, &victims).await,
            Plan::Create { indexes, more } => {
                if more {
                    again.within(NEXT_PART);
                }
                self.create(assessment, &indexes).await
            }
        }
    }

    /// Deletes pods that are too many. They are not counted, so their finalizers go first.
    async fn delete(&self, assessment: &mut Assessment<'_>, victims: &[Arc<Pod>]) -> Option<SyncError> {
        let expectations = &self.memory.expectations;
        expectations.expect_deletions(self.key, victims.iter().map(|pod| name(pod).to_owned()));
        let with_finalizer = victims.iter().filter(|pod| has_finalizer(pod));
        self.memory.expect_removals(self.key, with_finalizer.map(|pod| uid(pod).to_owned()));
        let deletions = victims.iter().map(|pod| async {
            let deleted = async {
                if has_finalizer(pod) {
                    let removed = self.writes.remove_finalizer(pod).await;
                    removed.inspect_err(|_| self.memory.removal_observed(self.key, uid(pod)))?;
                }
                self.writes.delete_pod(self.job, pod).await
            };
            let result = deleted.await;
            if result.is_err() {
                // No event will come for it.
                expectations.deletion_observed(self.key, name(pod));
            }
            match result {
                Err(error) if !is_not_found(&error) => Err(error),
                _ => Ok(is_ready(pod)),
            }
        });
        let results = in_parallel(deletions).await;
        let deleted = results.iter().filter(|result| result.is_ok()).count();
        let ready = results.iter().filter(|result| matches!(result, Ok(true))).count();
        assessment.deleted(deleted, ready);
        first_error(results, || format!("delete pods of {}", self.key))
    }

    /// Creates pods in growing batches until one batch has a failure.
    async fn create(&self, assessment: &mut Assessment<'_>, indexes: &[Option<usize>]) -> Option<SyncError> {
        let expectations = &self.memory.expectations;
        let template = plan::template_pod(self.job, assessment);
        expectations.expect_creations(self.key, indexes.len());
        let mut rest = indexes;
        for batch in slow_start(indexes.len()) {
            let (now, later) = rest.split_at(batch.min(rest.len()));
            rest = later;
            let creations = now.iter().map(|index| {
                let indexed = index.map(|index| plan::indexed_pod(self.job, assessment, &template, index));
                let template = &template;
                async move { self.writes.create_pod(self.job, indexed.as_ref().unwrap_or(template)).await }
            });
            let results = in_parallel(creations).await;
            let failed = results.iter().filter(|result| result.is_err()).count();
            assessment.created(now.len() - failed);
            if failed > 0 {
                // No event will come for these, nor for those not tried.
                expectations.creations_observed(self.key, failed + rest.len());
                let ours = results.into_iter().filter(|result| {
                    result.as_ref().err().is_none_or(|error| !is_namespace_terminating(error))
                });
                return first_error(ours, || format!("create pods of {}", self.key));
            }
        }
        None
    }

    /// Writes the uncounted pods, removes their finalizers, counts them, and ends the Job if that was the last.
    async fn count(
        &self,
        assessment: &mut Assessment<'_>,
        mut tracking: Tracking,
        now: Timestamp,
    ) -> Result<(), SyncError> {
        let mut job = self.job.clone();
        let mut changed = false;
        if tracking.changed {
            job = self.write_status(&job, assessment).await?;
            self.memory.set_backoff(self.key, assessment.backoff.clone());
        }
        let problem = self.remove_finalizers(&mut tracking).await;
        changed |= count_finalized(&mut assessment.status, &tracking.with_finalizer);
        if let Some(problem) = problem {
            if changed {
                self.write_status(&job, assessment).await?;
            }
            return Err(problem);
        }
        let finished = !tracking.more && assessment.finish(now);
        if changed || finished {
            job = self.write_status(&job, assessment).await?;
        }
        if finished {
            self.report_end(&job, assessment);
        }
        Ok(())
    }

    async fn write_status(&self, job: &Job, assessment: &mut Assessment<'_>) -> Result<Job, SyncError> {
        let mut updated = job.clone();
        updated.status = Some(assessment.status.clone());
        let written =
            self.writes.update_status(&updated).await.during(|| format!("update status of {}", self.key))?;
        self.memory.wrote(self.key, &written);
        measures::counted(job, job.status.as_ref(), written.status.as_ref());
        Ok(written)
    }

    async fn remove_finalizers(&self, tracking: &mut Tracking) -> Option<SyncError> {
        let pods = std::mem::take(&mut tracking.finalized);
        if pods.is_empty() {
            return None;
        }
        self.memory.expect_removals(self.key, pods.iter().map(|pod| uid(pod).to_owned()));
        let removals = pods.iter().map(|pod| async {
            let result = self.writes.remove_finalizer(pod).await;
            if result.is_err() {
                self.memory.removal_observed(self.key, uid(pod));
            }
            match result {
                Err(error) if !is_not_found(&error) => Err(error),
                _ => Ok(()),
            }
        });
        let results = in_parallel(removals).await;
        for (pod, result) in pods.iter().zip(&results) {
            if result.is_ok() {
                tracking.with_finalizer.remove(uid(pod));
            }
        }
        first_error(results, || format!("remove the finalizer from pods of {}", self.key))
    }

    fn report_end(&self, job: &Job, assessment: &Assessment<'_>) {
        let Some(verdict) = &assessment.verdict else { return };
        measures::finished(job, verdict);
        match verdict.outcome {
            Outcome::Success => {
                let succeeded = assessment.status.succeeded.unwrap_or(0);
                if assessment.rules.completions.is_some_and(|completions| succeeded > completions) {
                    let message = "Too many succeeded pods running after completion count reached";
                    self.writes.event(job, EventType::Warning, "TooManySucceededPods", message);
                }
                self.writes.event(job, EventType::Normal, "Completed", "Job completed");
            }
            Outcome::Failure => {
                self.writes.event(job, EventType::Warning, &verdict.reason, &verdict.message);
            }
        }
    }
}

fn first_error<T>(
    results: impl IntoIterator<Item = Result<T, kube::Error>>,
    action: impl FnOnce() -> String,
) -> Option<SyncError> {
    let error = results.into_iter().find_map(Result::err)?;
    Some(SyncError::Api { action: action(), error })
}
