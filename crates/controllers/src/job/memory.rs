//! The controller's memory between two syncs. It may be lost at any time: a Job without it takes longer, but ends the same.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrite_client::{Expectations, ObjectKey, Uid};
use k8s_openapi::api::batch::v1::Job;

use super::backoff::BackoffRecord;

#[derive(Debug, Default)]
struct JobMemory {
    /// The UID of the Job this is about.
    job: Option<Uid>,
    /// UIDs of pods whose finalizer was removed and which the informer has not yet shown without it.
    removed: HashSet<String>,
    backoff: BackoffRecord,
    /// The Job's resource version after the last write.
    written: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) expectations: Expectations,
    jobs: Mutex<HashMap<ObjectKey, JobMemory>>,
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectKey, JobMemory>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a sync: drops the state of another Job of the same name.
    pub(super) fn begin(&self, key: &ObjectKey, job: &Job) {
        let uid = job.metadata.uid.as_deref().map(Uid::from);
        let mut jobs = self.lock();
        let memory = jobs.entry(key.clone()).or_default();
        if memory.job != uid {
            self.expectations.forget(key);
            *memory = JobMemory { job: uid, ..JobMemory::default() };
        }
    }

    /// The pods of the Job that have no finalizer, whatever the informer shows. Ask before reading the pods: an event
    /// in between then shows up in both, and a pod is never taken for one that still has it.
    pub(super) fn removed(&self, job: &ObjectKey) -> HashSet<String> {
        self.lock().get(job).map(|memory| memory.removed.clone()).unwrap_or_default()
    }

    pub(super) fn expect_removals(&self, job: &ObjectKey, pods: impl IntoIterator<Item = String>) {
        self.lock().entry(job.clone()).or_default().removed.extend(pods);
    }

    /// The informer shows the pod without the finalizer, or the removal failed.
    pub(super) fn removal_observed(&self, job: &ObjectKey, pod: &str) {
        if let Some(memory) = self.lock().get_mut(job) {
            memory.removed.remove(pod);
        }
    }

    pub(super) fn backoff(&self, job: &ObjectKey) -> BackoffRecord {
        self.lock().get(job).map(|memory| memory.backoff.clone()).unwrap_or_default()
    }

    pub(super) fn set_backoff(&self, job: &ObjectKey, record: BackoffRecord) {
        self.lock().entry(job.clone()).or_default().backoff = record;
    }

    pub(super) fn wrote(&self, key: &ObjectKey, job: &Job) {
        self.lock().entry(key.clone()).or_default().written = version(job);
    }

    /// True if the informer does not yet show the controller's own last write. A sync would be in vain: its status would
    /// be refused.
    pub(super) fn is_stale(&self, key: &ObjectKey, job: &Job) -> bool {
        let written = self.lock().get(key).and_then(|memory| memory.written);
        written.zip(version(job)).is_some_and(|(written, seen)| written > seen)
    }

    /// Drops everything about a Job that is gone or finished.
    pub(super) fn forget(&self, job: &ObjectKey) {
        self.expectations.forget(job);
        self.lock().remove(job);
    }
}

fn version(job: &Job) -> Option<u64> {
    job.metadata.resource_version.as_deref()?.parse().ok()
}
