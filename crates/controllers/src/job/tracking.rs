//! Counts finished pods once each, whatever fails in between.

use std::collections::HashSet;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::JobStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::assess::{Assessment, Outcome};
use super::{
    COMPLETE, FAILED, FAILURE_TARGET, SUCCESS_CRITERIA_MET, completion_index, ensure_condition,
    has_finalizer, new_condition, number, policy, uid,
};
use crate::pods::phase;

/// The UIDs in a status at most, so that it stays small and one large Job does not hold up the others.
const UNCOUNTED_MAX: usize = 500;

/// The first of the three writes, and the pods for the second.
#[derive(Debug)]
pub(super) struct Tracking {
    /// True if the status has changed and must be written before the finalizers are removed.
    pub(super) changed: bool,
    pub(super) finalized: Vec<Arc<Pod>>,
    /// UIDs of all pods that have the finalizer now.
    pub(super) with_finalizer: HashSet<String>,
    /// True if finished pods are left for the next sync.
    pub(super) more: bool,
}

impl Assessment<'_> {
    /// Puts the numbers of pods into the status and returns whether they have changed.
    pub(super) fn update_numbers(&mut self) -> bool {
        let old = (self.status.active.unwrap_or(0), self.status.ready, self.status.terminating);
        let new = (number(self.active_count), Some(number(self.ready)), Some(number(self.terminating)));
        self.status.active = Some(new.0).filter(|active| *active > 0);
        (self.status.ready, self.status.terminating) = (new.1, new.2);
        old != new
    }

    /// Puts finished pods into `uncountedTerminatedPods` and announces how the Job ends.
    pub(super) fn track(&mut self, now: Timestamp) -> Tracking {
        if self.rules.indexed {
            self.pods.sort_by_key(|pod| completion_index(pod));
        }
        let tracked = |pod: &Arc<Pod>| has_finalizer(pod) && !self.removed.contains(uid(pod));
        let pods: Vec<Arc<Pod>> = self.pods.iter().filter(|pod| tracked(pod)).cloned().collect();
        let with_finalizer: HashSet<String> = pods.iter().map(|pod| uid(pod).to_owned()).collect();
        let uids = |uids: Option<&Vec<String>>| uids.into_iter().flatten().cloned().collect::<HashSet<_>>();
        let uncounted = self.status.uncounted_terminated_pods.as_ref();
        let counting_succeeded = uids(uncounted.and_then(|uncounted| uncounted.succeeded.as_ref()));
        let counting_failed = uids(uncounted.and_then(|uncounted| uncounted.failed.as_ref()));
        let mut tracking = Tracking {
            changed: count_finalized(&mut self.status, &with_finalizer),
            finalized: Vec::new(),
            with_finalizer,
            more: false,
        };

        let mut new_indexes = Vec::new();
        for pod in pods {
            let failed = self.rules.is_failed(&pod);
            if !self.may_finalize(&pod, failed) {
                continue;
            }
            let index = self.rules.index_of(&pod);
            let uncounted = self.status.uncounted_terminated_pods.get_or_insert_default();
            if phase(&pod) == "Succeeded" && !counting_failed.contains(uid(&pod)) {
                if self.rules.indexed {
                    // The index alone shows that the pod is counted.
                    if let Some(index) = index.filter(|index| !self.counted_indexes.has(*index)) {
                        new_indexes.push(index);
                        tracking.changed = true;
                    }
                } else if !counting_succeeded.contains(uid(&pod)) {
                    uncounted.succeeded.get_or_insert_default().push(uid(&pod).to_owned());
                    tracking.changed = true;
                }
            } else if failed
                || self.verdict.as_ref().is_some_and(|verdict| verdict.outcome == Outcome::Failure)
            {
                // The pods of a Job that has failed are failed, too.
                let is_new = !counting_failed.contains(uid(&pod)) && (!self.rules.indexed || index.is_some());
                if is_new && policy::counts(self.rules.failure_policy, &pod) {
                    uncounted.failed.get_or_insert_default().push(uid(&pod).to_owned());
                    tracking.changed = true;
                }
            }
            let length = |uids: &Option<Vec<String>>| uids.as_ref().map_or(0, Vec::len);
            let waiting = new_indexes.len() + length(&uncounted.succeeded) + length(&uncounted.failed);
            tracking.finalized.push(pod);
            if waiting >= UNCOUNTED_MAX {
                tracking.more = true;
                break;
            }
        }
        if self.rules.indexed {
            tracking.changed |= self.update_indexes(new_indexes);
        }
        tracking.changed |= self.announce(now);
        tracking
    }

    fn update_indexes(&mut self, new: Vec<usize>) -> bool {
        self.succeeded_indexes = self.succeeded_indexes.with(new);
        let completed = Some(self.succeeded_indexes.to_string()).filter(|text| !text.is_empty());
        let failed = self.failed_indexes.as_ref().map(ToString::to_string);
        let changed = completed != self.status.completed_indexes || failed != self.status.failed_indexes;
        self.status.succeeded = Some(number(self.succeeded_indexes.total())).filter(|count| *count > 0);
        self.status.completed_indexes = completed;
        self.status.failed_indexes = failed;
        changed
    }

    /// True if the pod needs its finalizer no longer: it is finished, or its Job is.
    fn may_finalize(&self, pod: &Pod, failed: bool) -> bool {
        if self.rules.deleting || self.verdict.is_some() || phase(pod) == "Succeeded" {
            return true;
        }
        let awaits_replacement = || {
            let last = completion_index(pod).and_then(|index| self.to_be_replaced.get(&index));
            last.is_some_and(|last| uid(last) == uid(pod))
        };
        failed && !awaits_replacement()
    }

    /// Adds the condition that comes before `Failed` or `Complete`: pods lose their results with their
    /// finalizers.
    fn announce(&mut self, now: Timestamp) -> bool {
        let Some(verdict) = self.verdict.as_mut().filter(|verdict| !verdict.announced) else { return false };
        verdict.announced = true;
        let kind = match verdict.outcome {
            Outcome::Success => SUCCESS_CRITERIA_MET,
            Outcome::Failure => FAILURE_TARGET,
        };
        let condition = new_condition(kind, "True", &verdict.reason, &verdict.message, now);
        ensure_condition(self.status.conditions.get_or_insert_default(), condition);
        true
    }

    /// Adds `Failed` or `Complete` if all is counted and no pod is left. Returns whether the Job is finished by that.
    pub(super) fn finish(&mut self, now: Timestamp) -> bool {
        let Some(verdict) = &self.verdict else { return false };
        let is_empty = |uids: &Option<Vec<String>>| uids.as_ref().is_none_or(Vec::is_empty);
        let uncounted = self.status.uncounted_terminated_pods.as_ref();
        let counted =
            uncounted.is_none_or(|uncounted| is_empty(&uncounted.succeeded) && is_empty(&uncounted.failed));
        if !counted || self.terminating > 0 {
            return false;
        }
        let kind = match verdict.outcome {
            Outcome::Success => COMPLETE,
            Outcome::Failure => FAILED,
        };
        let condition = new_condition(kind, "True", &verdict.reason, &verdict.message, now);
        ensure_condition(self.status.conditions.get_or_insert_default(), condition);
        if verdict.outcome == Outcome::Success {
            self.status.completion_time = Some(Time(now));
        }
        // A suspended Job has no start time, but can end by the pods it had. The server refuses an end without a start,
        // except for a Job that never needed a pod.
        if !(self.rules.suspended && self.rules.completions == Some(0)) {
            self.status.start_time.get_or_insert(Time(now));
        }
        true
    }
}

/// The third write: pods that no longer have the finalizer move from the lists into the counters. Returns whether that
/// changed the status.
pub(super) fn count_finalized(status: &mut JobStatus, with_finalizer: &HashSet<String>) -> bool {
    let Some(uncounted) = status.uncounted_terminated_pods.as_mut() else { return false };
    let mut changed = false;
    for (uids, counter) in
        [(&mut uncounted.succeeded, &mut status.succeeded), (&mut uncounted.failed, &mut status.failed)]
    {
        let Some(list) = uids else { continue };
        let before = list.len();
        list.retain(|uid| with_finalizer.contains(uid));
        let counted = before - list.len();
        if list.is_empty() {
            *uids = None;
        }
        if counted > 0 {
            *counter = Some(counter.unwrap_or(0).saturating_add(number(counted)));
            changed = true;
        }
    }
    changed
}
