//! The metrics of Jobs, with upstream's names.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferrite_component::metrics::{Counter, Family, Histogram, registry};
use k8s_openapi::api::batch::v1::{Job, JobStatus};

use super::assess::{Outcome, Verdict};

/// Doubling from 4 ms, 15 times.
const SYNC_TIMES: &[f64] = &[
    0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384, 32.768,
    65.536,
];

pub(super) struct Families {
    pub(super) syncs: Arc<Family<Counter>>,
    times: Arc<Family<Histogram>>,
    pub(super) finished: Arc<Family<Counter>>,
    pub(super) pods: Arc<Family<Counter>>,
}

pub(super) static FAMILIES: LazyLock<Families> = LazyLock::new(|| {
    let labels = &["completion_mode", "result", "action"];
    Families {
        syncs: registry().counter("job_controller_job_syncs_total", "Syncs of Jobs.", labels),
        times: registry().histogram(
            "job_controller_job_sync_duration_seconds",
            "Time that the sync of a Job took.",
            labels,
            SYNC_TIMES,
        ),
        finished: registry().counter(
            "job_controller_jobs_finished_total",
            "Jobs that have ended.",
            &["completion_mode", "result", "reason"],
        ),
        pods: registry().counter(
            "job_controller_job_pods_finished_total",
            "Ended pods that are counted in the status of their Job.",
            &["completion_mode", "result"],
        ),
    }
});

/// The effect of a sync on the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing: earlier writes have not been seen yet, or the Job ends.
    Reconciling,
    /// Nothing was to do.
    Tracking,
    PodsCreated,
    PodsDeleted,
}

impl Action {
    fn as_str(self) -> &'static str {
        match self {
            Self::Reconciling => "reconciling",
            Self::Tracking => "tracking",
            Self::PodsCreated => "pods_created",
            Self::PodsDeleted => "pods_deleted",
        }
    }
}

fn mode(job: &Job) -> &'static str {
    match job.spec.as_ref().and_then(|spec| spec.completion_mode.as_deref()) {
        Some("Indexed") => "Indexed",
        _ => "NonIndexed",
    }
}

pub(super) fn synced(job: &Job, action: Action, is_ok: bool, took: Duration) {
    let labels = [mode(job), if is_ok { "success" } else { "error" }, action.as_str()];
    FAMILIES.syncs.with(&labels).increment();
    FAMILIES.times.with(&labels).observe(took);
}

pub(super) fn finished(job: &Job, verdict: &Verdict) {
    let result = match verdict.outcome {
        Outcome::Success => "succeeded",
        Outcome::Failure => "failed",
    };
    FAMILIES.finished.with(&[mode(job), result, &verdict.reason]).increment();
}

/// Counts the pods that a write of the status has counted.
pub(super) fn counted(job: &Job, old: Option<&JobStatus>, new: Option<&JobStatus>) {
    let (succeeded, failed) = newly_counted(old, new);
    for (result, count) in [("succeeded", succeeded), ("failed", failed)] {
        FAMILIES.pods.with(&[mode(job), result]).add(count);
    }
}

/// The pods that succeeded and that failed since the old status. A Job of fewer indexes may have fewer than before.
fn newly_counted(old: Option<&JobStatus>, new: Option<&JobStatus>) -> (u64, u64) {
    let of = |status: Option<&JobStatus>| {
        let count = |of: fn(&JobStatus) -> Option<i32>| i64::from(status.and_then(of).unwrap_or(0));
        (count(|status| status.succeeded), count(|status| status.failed))
    };
    let (old, new) = (of(old), of(new));
    let more = |old: i64, new: i64| u64::try_from(new - old).unwrap_or(0);
    (more(old.0, new.0), more(old.1, new.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_counted_when_the_status_has_them() {
        let status = |succeeded, failed| JobStatus {
            succeeded: Some(succeeded),
            failed: Some(failed),
            ..JobStatus::default()
        };
        let (two, five) = (status(2, 1), status(5, 1));
        assert_eq!(newly_counted(None, Some(&two)), (2, 1));
        assert_eq!(newly_counted(Some(&two), Some(&five)), (3, 0));
        assert_eq!(newly_counted(Some(&five), Some(&two)), (0, 0));
    }
}
