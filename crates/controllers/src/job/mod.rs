//! Runs the pods of Jobs until enough of them have succeeded.
//!
//! Every pod of a Job carries a finalizer, and a finished pod is counted in three writes: its UID goes into
//! `status.uncountedTerminatedPods`, the finalizer is removed, and the UID is replaced by a higher counter. So a pod is
//! counted once, whichever write is the last before a crash. [`assess`] and [`plan`] decide, [`tracking`] counts,
//! [`sync`] writes, and [`controller`] wakes the Job concerned.

mod assess;
mod backoff;
mod controller;
mod indexes;
mod measures;
mod memory;
mod orphans;
mod plan;
mod policy;
#[cfg(test)]
mod simulation;
mod sync;
#[cfg(test)]
mod tests;
mod tracking;

pub(crate) use controller::start;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, PodFailurePolicy, SuccessPolicy};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::pods::{is_terminating, phase};

const NAME: &str = "job-controller";
/// The `spec.managedBy` of a Job that is for this controller.
const MANAGER: &str = "kubernetes.io/job-controller";
const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
/// Annotation and label.
const COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";
const INDEX_FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
const INDEX_IGNORED_FAILURES: &str = "batch.kubernetes.io/job-index-ignored-failure-count";

const COMPLETE: &str = "Complete";
const FAILED: &str = "Failed";
const FAILURE_TARGET: &str = "FailureTarget";
const SUCCESS_CRITERIA_MET: &str = "SuccessCriteriaMet";
const SUSPENDED: &str = "Suspended";

/// The parts of a specification that decisions need, with upstream's defaults.
#[derive(Debug, Clone, Copy)]
struct Rules<'a> {
    spec: &'a JobSpec,
    completions: Option<i32>,
    parallelism: i32,
    backoff_limit: i32,
    indexed: bool,
    suspended: bool,
    /// True if the Job is being deleted.
    deleting: bool,
    /// True if a pod is replaced only once it has failed, not already when it is being deleted.
    only_replaces_failed: bool,
    failure_policy: Option<&'a PodFailurePolicy>,
    success_policy: Option<&'a SuccessPolicy>,
}

impl<'a> Rules<'a> {
    fn of(job: &'a Job) -> Option<Self> {
        let spec = job.spec.as_ref()?;
        let failure_policy = spec.pod_failure_policy.as_ref();
        Some(Self {
            spec,
            completions: spec.completions,
            parallelism: spec.parallelism.unwrap_or(1),
            backoff_limit: spec.backoff_limit.unwrap_or(6),
            indexed: spec.completion_mode.as_deref() == Some("Indexed"),
            suspended: spec.suspend == Some(true),
            deleting: job.metadata.deletion_timestamp.is_some(),
            only_replaces_failed: failure_policy.is_some()
                || spec.pod_replacement_policy.as_deref() == Some("Failed"),
            failure_policy,
            success_policy: spec.success_policy.as_ref(),
        })
    }

    /// The number of indexes of an indexed Job.
    fn index_count(&self) -> usize {
        usize::try_from(self.completions.unwrap_or(0)).unwrap_or(0)
    }

    /// The index of a pod, if it is one of this Job's.
    fn index_of(&self, pod: &Pod) -> Option<usize> {
        completion_index(pod).filter(|index| *index < self.index_count())
    }

    fn is_failed(&self, pod: &Pod) -> bool {
        match phase(pod) {
            "Failed" => true,
            "Succeeded" => false,
            // A pod that is deleted may never reach the phase Failed.
            _ => !self.only_replaces_failed && is_terminating(pod),
        }
    }
}

fn completion_index(pod: &Pod) -> Option<usize> {
    pod.metadata.annotations.as_ref()?.get(COMPLETION_INDEX)?.parse().ok()
}

fn has_finalizer(pod: &Pod) -> bool {
    pod.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER)
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn condition_of<'a>(job: &'a Job, kind: &str) -> Option<&'a JobCondition> {
    job.status.as_ref()?.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

fn has_condition(job: &Job, kind: &str) -> bool {
    condition_of(job, kind).is_some_and(|condition| condition.status == "True")
}

/// The condition that says how the Job ended, once it has.
pub(crate) fn finished_condition(job: &Job) -> Option<&JobCondition> {
    let conditions = job.status.as_ref()?.conditions.iter().flatten();
    let mut finished = conditions.filter(|condition| {
        matches!(condition.type_.as_str(), COMPLETE | FAILED) && condition.status == "True"
    });
    finished.next()
}

pub(crate) fn is_finished(job: &Job) -> bool {
    finished_condition(job).is_some()
}

/// True if another controller is responsible for the Job.
fn is_managed_elsewhere(job: &Job) -> bool {
    let manager = job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref());
    manager.is_some_and(|manager| manager != MANAGER)
}

fn new_condition(kind: &str, status: &str, reason: &str, message: &str, now: Timestamp) -> JobCondition {
    JobCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

/// Brings the condition up to date and returns whether that changed anything. A condition that is not there is not added
/// as false: that would say nothing.
fn ensure_condition(conditions: &mut Vec<JobCondition>, new: JobCondition) -> bool {
    match conditions.iter_mut().find(|condition| condition.type_ == new.type_) {
        Some(old) if old.status == new.status && old.reason == new.reason && old.message == new.message => {
            false
        }
        Some(old) => {
            *old = new;
            true
        }
        None if new.status == "False" => false,
        None => {
            conditions.push(new);
            true
        }
    }
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
