//! The Jobs of a CronJob: which are active, which succeeded last, which are too old to keep.

use std::cmp::Ordering;
use std::sync::Arc;

use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job};

use crate::job::finished_condition;

/// What the Jobs show that the status did not.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Whether the status has changed.
    pub(super) changed: bool,
    /// Names and conditions of Jobs that have finished.
    pub(super) finished: Vec<(String, String)>,
    /// Names of unfinished Jobs that the status does not name.
    pub(super) unexpected: Vec<String>,
}

pub(super) fn is_active(status: &CronJobStatus, uid: Option<&String>) -> bool {
    status.active.iter().flatten().any(|job| job.uid.as_ref() == uid)
}

/// Removes the Job from the list of active ones.
pub(super) fn remove(status: &mut CronJobStatus, uid: Option<&String>) {
    if let Some(active) = &mut status.active {
        active.retain(|job| job.uid.as_ref() != uid);
        if active.is_empty() {
            status.active = None;
        }
    }
}

/// Brings the status in line with the Jobs.
pub(super) fn refresh(status: &mut CronJobStatus, jobs: &[Arc<Job>]) -> Found {
    let mut found = Found::default();
    for job in jobs {
        let uid = job.metadata.uid.as_ref();
        let name = || job.metadata.name.clone().unwrap_or_default();
        let active = is_active(status, uid);
        let Some(condition) = finished_condition(job) else {
            if !active {
                found.unexpected.push(name());
            }
            continue;
        };
        if active {
            remove(status, uid);
            found.finished.push((name(), condition.type_.clone()));
            found.changed = true;
        }
        let completed = job.status.as_ref().and_then(|status| status.completion_time.as_ref());
        let last = status.last_successful_time.as_ref();
        if condition.type_ == "Complete"
            && let Some(completed) = completed
            && last.is_none_or(|last| completed.0 > last.0)
        {
            status.last_successful_time = Some(completed.clone());
            found.changed = true;
        }
    }
    found
}

/// The finished Jobs beyond the history limits, oldest first.
pub(super) fn too_old(cron: &CronJob, jobs: &[Arc<Job>]) -> Vec<Arc<Job>> {
    let spec = &cron.spec;
    [("Complete", spec.successful_jobs_history_limit), ("Failed", spec.failed_jobs_history_limit)]
        .into_iter()
        .filter_map(|(kind, limit)| Some((kind, usize::try_from(limit?).unwrap_or(0))))
        .flat_map(|(kind, limit)| {
            let of_kind =
                |job: &&Arc<Job>| finished_condition(job).is_some_and(|condition| condition.type_ == kind);
            let mut finished: Vec<_> = jobs.iter().filter(of_kind).cloned().collect();
            finished.sort_by(|a, b| by_start(a, b));
            finished.truncate(finished.len().saturating_sub(limit));
            finished
        })
        .collect()
}

/// Jobs that never started come last.
fn by_start(a: &Job, b: &Job) -> Ordering {
    let start =
        |job: &Job| job.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
    let (x, y) = (start(a), start(b));
    x.is_none().cmp(&y.is_none()).then(x.cmp(&y)).then_with(|| a.metadata.name.cmp(&b.metadata.name))
}
