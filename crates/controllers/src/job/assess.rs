//! The state of a Job and its pods, and the decision if it has succeeded or failed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{Job, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::backoff::{BackoffRecord, finished_at};
use super::indexes::Indexes;
use super::policy::{self, FailureAction};
use super::{
    FAILURE_TARGET, INDEX_FAILURES, INDEX_IGNORED_FAILURES, Rules, SUCCESS_CRITERIA_MET, SUSPENDED,
    completion_index, condition_of, ensure_condition, has_condition, has_finalizer, new_condition, number,
    uid,
};
use crate::pods::{is_active, is_finished, is_ready, is_terminating, phase};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Success,
    Failure,
}

/// The end of a Job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) outcome: Outcome,
    pub(super) reason: String,
    pub(super) message: String,
    /// True if the status already has the condition that announces it (`SuccessCriteriaMet` or `FailureTarget`).
    pub(super) announced: bool,
}

impl Verdict {
    fn new(outcome: Outcome, reason: &str, message: impl Into<String>) -> Self {
        Self { outcome, reason: reason.to_owned(), message: message.into(), announced: false }
    }

    fn failure(reason: &str, message: impl Into<String>) -> Self {
        Self::new(Outcome::Failure, reason, message)
    }
}

/// The knowledge about a Job in one sync. The status is the one to be written.
#[derive(Debug)]
pub(super) struct Assessment<'a> {
    pub(super) rules: Rules<'a>,
    pub(super) pods: Vec<Arc<Pod>>,
    /// UIDs of pods whose finalizer is gone although the pods in the cache have it still.
    pub(super) removed: &'a HashSet<String>,
    pub(super) status: JobStatus,
    pub(super) active: Vec<Arc<Pod>>,
    /// Numbers of pods once this sync has done its work.
    pub(super) active_count: usize,
    pub(super) ready: usize,
    pub(super) terminating: usize,
    /// Finished pods, counted or not. A failure that the policy ignores is none.
    pub(super) succeeded: i32,
    pub(super) failed: i32,
    /// The indexes that the status had, below the number of completions of now.
    pub(super) counted_indexes: Indexes,
    pub(super) succeeded_indexes: Indexes,
    /// With a back-off limit per index.
    pub(super) failed_indexes: Option<Indexes>,
    /// The last failed pod of each index that needs a new one: it keeps its finalizer until then, because it holds the
    /// number of failures of the index.
    pub(super) to_be_replaced: HashMap<usize, Arc<Pod>>,
    pub(super) backoff: BackoffRecord,
    pub(super) verdict: Option<Verdict>,
    /// When the deadline of the Job falls due.
    pub(super) deadline_in: Option<Duration>,
}

impl<'a> Assessment<'a> {
    pub(super) fn new(
        job: &'a Job,
        rules: Rules<'a>,
        pods: Vec<Arc<Pod>>,
        removed: &'a HashSet<String>,
        backoff: &BackoffRecord,
        now: Timestamp,
    ) -> Self {
        let mut status = job.status.clone().unwrap_or_default();
        let uncounted = status.uncounted_terminated_pods.get_or_insert_default();
        let counting =
            |uids: &Option<Vec<String>>| uids.iter().flatten().cloned().collect::<HashSet<String>>();
        let (counting_succeeded, counting_failed) =
            (counting(&uncounted.succeeded), counting(&uncounted.failed));
        if status.start_time.is_none() && !rules.suspended {
            status.start_time = Some(Time(now));
        }
        let active: Vec<_> = pods.iter().filter(|pod| is_active(pod)).cloned().collect();

        // Pods without the finalizer are in the status already.
        let new = |counting: &HashSet<String>, wanted: &dyn Fn(&Pod) -> bool| -> Vec<Arc<Pod>> {
            pods.iter()
                .filter(|pod| {
                    has_finalizer(pod) && !counting.contains(uid(pod)) && !removed.contains(uid(pod))
                })
                .filter(|pod| !rules.indexed || rules.index_of(pod).is_some())
                .filter(|pod| wanted(pod))
                .cloned()
                .collect()
        };
        let new_succeeded = new(&counting_succeeded, &|pod| phase(pod) == "Succeeded");
        let new_failed = new(&counting_failed, &|pod| rules.is_failed(pod));
        let not_ignored = new_failed.iter().filter(|pod| policy::counts(rules.failure_policy, pod)).count();

        let mut assessment = Self {
            active_count: active.len(),
            ready: active.iter().filter(|pod| is_ready(pod)).count(),
            terminating: pods.iter().filter(|pod| is_terminating(pod) && !is_finished(pod)).count(),
            succeeded: status.succeeded.unwrap_or(0) + number(new_succeeded.len() + counting_succeeded.len()),
            failed: status.failed.unwrap_or(0) + number(not_ignored + counting_failed.len()),
            counted_indexes: Indexes::default(),
            succeeded_indexes: Indexes::default(),
            failed_indexes: None,
            to_be_replaced: HashMap::new(),
            backoff: backoff.after(&new_succeeded, &new_failed),
            verdict: None,
            deadline_in: None,
            rules,
            removed,
            status,
            active,
            pods,
        };
        assessment.verdict = assessment.announced(job).or_else(|| assessment.limits_exceeded(now));
        if rules.indexed {
            assessment.assess_indexes();
        }
        assessment
    }

    /// An earlier sync has decided, or a pod fails the whole Job.
    fn announced(&self, job: &Job) -> Option<Verdict> {
        let found = [(SUCCESS_CRITERIA_MET, Outcome::Success), (FAILURE_TARGET, Outcome::Failure)]
            .into_iter()
            .find(|(kind, _)| has_condition(job, kind));
        if let Some((kind, outcome)) = found {
            let condition = condition_of(job, kind)?;
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            return Some(Verdict {
                outcome,
                reason: text(&condition.reason),
                message: text(&condition.message),
                announced: true,
            });
        }
        let failed = self.pods.iter().filter(|pod| self.rules.is_failed(pod));
        let mut actions = failed.filter_map(|pod| policy::failure_action(self.rules.failure_policy, pod));
        actions.find_map(|action| match action {
            FailureAction::FailJob(message) => Some(Verdict::failure("PodFailurePolicy", message)),
            _ => None,
        })
    }

    fn limits_exceeded(&mut self, now: Timestamp) -> Option<Verdict> {
        if self.failed > self.rules.backoff_limit || self.too_many_restarts() {
            return Some(Verdict::failure(
                "BackoffLimitExceeded",
                "Job has reached the specified backoff limit",
            ));
        }
        let deadline = self.rules.spec.active_deadline_seconds.filter(|_| !self.rules.suspended)?;
        let since = self.status.start_time.as_ref()?.0;
        let left = SignedDuration::from_secs(deadline).saturating_sub(now.duration_since(since));
        if left <= SignedDuration::ZERO {
            return Some(Verdict::failure(
                "DeadlineExceeded",
                "Job was active longer than specified deadline",
            ));
        }
        self.deadline_in = Duration::try_from(left).ok();
        None
    }

    /// Restarts of containers count as failures if it is the kubelet that restarts them.
    fn too_many_restarts(&self) -> bool {
        let template = self.rules.spec.template.spec.as_ref();
        if template.and_then(|spec| spec.restart_policy.as_deref()) != Some("OnFailure") {
            return false;
        }
        let running = self.pods.iter().filter(|pod| matches!(phase(pod), "Running" | "Pending"));
        let statuses = running.filter_map(|pod| pod.status.as_ref()).flat_map(|status| {
            let containers = status.container_statuses.iter().flatten();
            containers.chain(status.init_container_statuses.iter().flatten())
        });
        let restarts: i64 = statuses.map(|container| i64::from(container.restart_count)).sum();
        restarts > 0 && restarts >= i64::from(self.rules.backoff_limit)
    }

    fn assess_indexes(&mut self) {
        let rules = self.rules;
        let completions = rules.index_count();
        let text = self.status.completed_indexes.as_deref().unwrap_or_default();
        self.counted_indexes = Indexes::parse(text, completions);
        let with_finalizer = || {
            self.pods
                .iter()
                .filter(|pod| has_finalizer(pod))
                .filter_map(|pod| Some((rules.index_of(pod)?, pod)))
        };
        let succeeded = with_finalizer().filter(|(_, pod)| phase(pod) == "Succeeded").map(|(index, _)| index);
        self.succeeded_indexes = self.counted_indexes.with(succeeded);
        self.succeeded = number(self.succeeded_indexes.total());
        if let Some(limit) = rules.spec.backoff_limit_per_index {
            let text = self.status.failed_indexes.as_deref().unwrap_or_default();
            let failed = with_finalizer().filter(|(_, pod)| is_index_failed(&rules, limit, pod));
            let failed = Indexes::parse(text, completions).with(failed.map(|(index, _)| index));
            if self.verdict.is_none() {
                self.verdict = failed_indexes_verdict(&rules, failed.total(), self.succeeded_indexes.total());
            }
            self.to_be_replaced = self.last_failed_pods(&failed);
            self.failed_indexes = Some(failed);
        }
        if self.verdict.is_none() {
            self.verdict = policy::success(rules.success_policy, completions, &self.succeeded_indexes)
                .map(|message| Verdict::new(Outcome::Success, "SuccessPolicy", message));
        }
    }

    fn last_failed_pods(&self, failed: &Indexes) -> HashMap<usize, Arc<Pod>> {
        let active: HashSet<usize> = self.active.iter().filter_map(|pod| completion_index(pod)).collect();
        let mut last: HashMap<usize, Arc<Pod>> = HashMap::new();
        for pod in &self.pods {
            if !has_finalizer(pod) || self.removed.contains(uid(pod)) || !self.rules.is_failed(pod) {
                continue;
            }
            let Some(index) = self.rules.index_of(pod) else { continue };
            if self.succeeded_indexes.has(index) || failed.has(index) || active.contains(&index) {
                continue;
            }
            let is_later = last.get(&index).is_none_or(|known| {
                index_failures(known) <= index_failures(pod) && finished_at(pod) >= finished_at(known)
            });
            if is_later {
                last.insert(index, pod.clone());
            }
        }
        last
    }

    /// Takes note that active pods were deleted.
    pub(super) fn deleted(&mut self, count: usize, ready: usize) {
        self.active_count -= count;
        self.ready = self.ready.saturating_sub(ready);
        self.terminating += count;
    }

    /// Takes note that pods were created.
    pub(super) fn created(&mut self, count: usize) {
        self.active_count += count;
    }

    /// Ends the Job if enough pods have succeeded and none is active.
    pub(super) fn evaluate_completions(&mut self) {
        let enough = match self.rules.completions {
            // One success is enough; the others may finish.
            None => self.succeeded > 0,
            Some(completions) => self.succeeded >= completions,
        };
        if enough && self.active_count == 0 {
            let message = "Reached expected number of succeeded pods";
            self.verdict = Some(Verdict::new(Outcome::Success, "CompletionsReached", message));
        }
    }

    /// Says in the conditions whether the Job is suspended. Returns the reason and message of an event if that changed.
    pub(super) fn update_suspension(&mut self, now: Timestamp) -> Option<(&'static str, &'static str)> {
        let conditions = self.status.conditions.get_or_insert_default();
        let (status, reason, message, event) = if self.rules.suspended {
            ("True", "JobSuspended", "Job suspended", "Suspended")
        } else {
            ("False", "JobResumed", "Job resumed", "Resumed")
        };
        if !ensure_condition(conditions, new_condition(SUSPENDED, status, reason, message, now)) {
            return None;
        }
        // The deadline counts from the time of the resumption.
        self.status.start_time = (!self.rules.suspended).then_some(Time(now));
        Some((event, message))
    }
}

fn failed_indexes_verdict(rules: &Rules<'_>, failed: usize, succeeded: usize) -> Option<Verdict> {
    let too_many =
        rules.spec.max_failed_indexes.is_some_and(|max| failed > usize::try_from(max).unwrap_or(0));
    if too_many {
        let message = "Job has exceeded the specified maximal number of failed indexes";
        return Some(Verdict::failure("MaxFailedIndexesExceeded", message));
    }
    let all_done = failed > 0 && failed + succeeded >= rules.index_count();
    all_done.then(|| Verdict::failure("FailedIndexes", "Job has failed indexes"))
}

fn is_index_failed(rules: &Rules<'_>, limit: i32, pod: &Pod) -> bool {
    if !rules.is_failed(pod) {
        return false;
    }
    match policy::failure_action(rules.failure_policy, pod) {
        Some(FailureAction::FailIndex) => true,
        Some(FailureAction::Ignore) => false,
        _ => i64::from(annotated(pod, INDEX_FAILURES)) >= i64::from(limit),
    }
}

/// Number of earlier failed pods of this pod's index, including ignored failures.
pub(super) fn index_failures(pod: &Pod) -> u32 {
    annotated(pod, INDEX_FAILURES).saturating_add(annotated(pod, INDEX_IGNORED_FAILURES))
}

/// The failures that count and those that are ignored, for the pod that replaces this one.
pub(super) fn next_index_failures(rules: &Rules<'_>, replaced: Option<&Pod>) -> (u32, u32) {
    let Some(pod) = replaced else { return (0, 0) };
    let (counted, ignored) = (annotated(pod, INDEX_FAILURES), annotated(pod, INDEX_IGNORED_FAILURES));
    if policy::counts(rules.failure_policy, pod) { (counted + 1, ignored) } else { (counted, ignored + 1) }
}

/// Anybody may have written the annotation: only a number that fits is taken.
fn annotated(pod: &Pod, annotation: &str) -> u32 {
    let value = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(annotation));
    value.and_then(|value| value.parse::<i32>().ok()).and_then(|value| u32::try_from(value).ok()).unwrap_or(0)
}
