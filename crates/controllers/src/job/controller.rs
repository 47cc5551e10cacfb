//! Watches Jobs and pods, and wakes the Job concerned.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Change, Controller, EventRecorder, EventType, Informer, ObjectKey, RateLimits, WorkQueue,
    claim_all_with_finalizer, controller_of, is_not_found, message_of,
};
use ferrite_json::json;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{Selector, SelectorExt};

use super::memory::Memory;
use super::orphans::{OrphanKey, is_orphan};
use super::sync::{self, BATCH, Seen, Writes};
use super::{FINALIZER, NAME, has_finalizer, is_finished, is_managed_elsewhere, name, uid};
use crate::Context;
use crate::error::{During, SyncError, is_namespace_terminating};
use crate::pods::{self, BY_CONTROLLER, BY_LABEL, is_terminating};

/// A sync that failed waits longer than those of other controllers: the Job's pods run meanwhile.
const LIMITS: RateLimits = RateLimits {
    base: Duration::from_secs(1),
    cap: Duration::from_secs(60),
    per_second: 1000.0,
    burst: 1000.0,
};

struct JobController {
    jobs: Informer<Job>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue<ObjectKey>>,
    orphans: Arc<WorkQueue<OrphanKey>>,
    memory: Memory,
    writer: Writer,
}

pub(crate) fn start(context: &Context) {
    let workers = context.workers(NAME);
    let kit: Controller = context.declared(NAME, workers, LIMITS);
    let orphans: Controller<OrphanKey> = context.declared("job-controller-orphans", workers, LIMITS);
    let controller = Arc::new(JobController {
        jobs: context.informers.get(),
        pods: context.informers.get(),
        queue: kit.queue().clone(),
        orphans: orphans.queue().clone(),
        memory: Memory::default(),
        writer: Writer { client: context.client.clone(), recorder: context.events.recorder(NAME, None) },
    });
    controller.pods.add_index(BY_CONTROLLER, pods::controller_index);
    controller.pods.add_index(BY_LABEL, pods::label_index);
    let (by_job, by_pod) = (controller.clone(), controller.clone());
    kit.about(&controller.jobs)
        .watches(&controller.jobs, move |change, _| by_job.job_changed(change))
        .watches(&controller.pods, move |change, _| by_pod.pod_changed(change))
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
    orphans
        .reads(&controller.jobs)
        .reads(&controller.pods)
        .run_with(controller.clone(), |controller, key| async move { controller.sync_orphans(key).await });
}

impl JobController {
    fn job_changed(&self, change: &Change<Job>) {
        let job = change.object();
        let key = ObjectKey::of(&**job);
        match change {
            Change::Added(_) => self.queue.add(key),
            Change::Updated { new, .. } if is_finished(new) => {
                self.memory.forget(&key);
                self.check_pods_of(new);
            }
            Change::Updated { old, new } => {
                let same_spec = old.metadata.generation == new.metadata.generation;
                // Status updates follow the pods, whose events are batched.
                self.queue.add_after(key.clone(), if same_spec { BATCH } else { Duration::ZERO });
                let deadline = |job: &Job| job.spec.as_ref().and_then(|spec| spec.active_deadline_seconds);
                let start = new.status.as_ref().and_then(|status| status.start_time.as_ref());
                if let (false, Some(seconds), Some(start)) = (same_spec, deadline(new), start)
                    && deadline(old) != Some(seconds)
                {
                    let passed = Timestamp::now().duration_since(start.0);
                    let left = SignedDuration::from_secs(seconds).saturating_sub(passed);
                    self.queue.add_after(key, Duration::try_from(left).unwrap_or_default());
                }
            }
            Change::Deleted(_) => {
                self.memory.forget(&key);
                self.check_pods_of(job);
            }
        }
    }

    fn check_pods_of(&self, job: &Job) {
        self.orphans.add(OrphanKey::PodsOf(job.metadata.uid.clone().unwrap_or_default()));
    }

    fn pod_changed(&self, change: &Change<Pod>) {
        match change {
            // A pod that is already on its way out counts as deleted when it is first seen.
            Change::Added(pod) if is_terminating(pod) => self.pod_gone(pod, false),
            Change::Added(pod) => {
                if let Some(job) = self.owner_of(pod) {
                    let key = ObjectKey::of(&*job);
                    self.memory.expectations.creation_observed(&key);
                    self.queue.add_after(key, BATCH);
                } else if controller_of(&pod.metadata).is_none() {
                    self.check_orphan(pod);
                    self.wake_adopters(pod);
                }
            }
            Change::Updated { new, .. } if is_terminating(new) => self.pod_gone(new, false),
            Change::Updated { old, new } => self.pod_updated(old, new),
            Change::Deleted(pod) => self.pod_gone(pod, true),
        }
    }

    fn pod_updated(&self, old: &Pod, new: &Pod) {
        let wake = |job: &Job| {
            let key = ObjectKey::of(job);
            if !has_finalizer(new) {
                self.memory.removal_observed(&key, uid(new));
            }
            self.queue.add_after(key, BATCH);
        };
        let owner = controller_of(&new.metadata);
        let owner_changed = controller_of(&old.metadata) != owner;
        if owner_changed && let Some(previous) = self.owner_of(old) {
            wake(&previous);
        }
        if owner.is_some() {
            self.owner_of(new).iter().for_each(|job| wake(job));
            return;
        }
        self.check_orphan(new);
        if owner_changed || old.metadata.labels != new.metadata.labels {
            self.wake_adopters(new);
        }
    }

    /// The pod is deleted or being deleted: a replacement may start while it takes its time to stop.
    fn pod_gone(&self, pod: &Pod, is_final: bool) {
        match self.owner_of(pod).filter(|job| !is_finished(job)) {
            Some(job) => {
                let key = ObjectKey::of(&*job);
                self.memory.expectations.deletion_observed(&key, name(pod));
                if is_final || !has_finalizer(pod) {
                    self.memory.removal_observed(&key, uid(pod));
                }
                self.queue.add_after(key, BATCH);
            }
            None if !is_final => self.check_orphan(pod),
            None => {}
        }
    }

    fn check_orphan(&self, pod: &Pod) {
        if has_finalizer(pod) {
            self.orphans.add(OrphanKey::Pod(ObjectKey::of(pod)));
        }
    }

    /// The Job in the cache that controls the pod, compared by UID.
    fn owner_of(&self, pod: &Pod) -> Option<Arc<Job>> {
        let reference = controller_of(&pod.metadata).filter(|owner| owner.kind == "Job")?;
        let key =
            ObjectKey::new(pod.metadata.namespace.as_deref().unwrap_or_default(), reference.name.as_str());
        self.jobs.get(&key).filter(|job| job.metadata.uid.as_ref() == Some(&reference.uid))
    }

    fn wake_adopters(&self, pod: &Pod) {
        let empty = Default::default();
        let labels = pod.metadata.labels.as_ref().unwrap_or(&empty);
        for job in self.jobs.list_in(pod.metadata.namespace.as_deref().unwrap_or_default()) {
            if !is_finished(&job) && selector(&job).is_some_and(|selector| selector.matches(labels)) {
                self.queue.add_after(ObjectKey::of(&*job), BATCH);
            }
        }
    }

    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(job) = self.jobs.get(&key) else {
            self.memory.forget(&key);
            return Ok(None);
        };
        if is_managed_elsewhere(&job) {
            return Ok(None);
        }
        if is_finished(&job) {
            self.memory.forget(&key);
            return Ok(None);
        }
        self.memory.begin(&key, &job);
        if self.memory.is_stale(&key, &job) {
            // The event of that write wakes the Job, too; this is for the case that it is lost.
            return Ok(Some(BATCH));
        }
        let mode = job.spec.as_ref().and_then(|spec| spec.completion_mode.as_deref());
        if mode.is_some_and(|mode| !matches!(mode, "NonIndexed" | "Indexed")) {
            let message = "Skipped Job sync because completion mode is unknown";
            self.writer.event(&job, EventType::Warning, "UnknownCompletionMode", message);
            return Ok(None);
        }
        // Both before looking at the pods: the other way round, a pod that changes in between would be created or
        // counted twice.
        let satisfied = self.memory.expectations.satisfied(&key);
        let removed = self.memory.removed(&key);
        let pods = self.claim(&job, &key).await?;
        let seen = Seen { job, pods, removed, satisfied };
        Box::pin(sync::sync(&self.writer, &self.memory, &key, seen, Timestamp::now())).await
    }

    /// The pods of the Job, after adopting those that match and releasing those that no longer do.
    async fn claim(&self, job: &Job, key: &ObjectKey) -> Result<Vec<Arc<Pod>>, SyncError> {
        let Some(selector) = selector(job) else {
            return Err(SyncError::Other(format!("{key} has a selector that cannot be understood")));
        };
        let mut candidates =
            self.pods.by_index(BY_CONTROLLER, job.metadata.uid.as_deref().unwrap_or_default());
        let labels = job.spec.as_ref().and_then(|spec| spec.selector.as_ref()?.match_labels.as_ref());
        let matching = pods::candidates(&self.pods, &key.namespace, labels.into_iter().flatten());
        candidates.extend(matching.into_iter().filter(|pod| controller_of(&pod.metadata).is_none()));
        let client = &self.writer.client;
        Ok(claim_all_with_finalizer(client, job, &selector, candidates, |_| true, Some(FINALIZER)).await?)
    }

    async fn sync_orphans(&self, key: OrphanKey) -> Result<Option<Duration>, SyncError> {
        let pods = match &key {
            OrphanKey::Pod(key) => self.pods.get(key).into_iter().collect(),
            OrphanKey::PodsOf(uid) => self.pods.by_index(BY_CONTROLLER, uid),
        };
        for pod in pods {
            if is_orphan(&pod, self.owner_of(&pod).as_deref()) {
                match self.writer.remove_finalizer(&pod).await {
                    Err(error) if is_not_found(&error) => {}
                    result => {
                        result.during(|| format!("remove the finalizer from {}", ObjectKey::of(&*pod)))?
                    }
                }
            }
        }
        Ok(None)
    }
}

fn selector(job: &Job) -> Option<Selector> {
    job.spec.as_ref()?.selector.clone()?.try_into().ok()
}

/// Writes through the API and records events.
struct Writer {
    client: Client,
    recorder: EventRecorder,
}

impl Writer {
    fn pods(&self, namespace: Option<&String>) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace.map(String::as_str).unwrap_or_default())
    }
}

impl Writes for Writer {
    async fn create_pod(&self, job: &Job, pod: &Pod) -> Result<(), kube::Error> {
        match self.pods(job.metadata.namespace.as_ref()).create(&PostParams::default(), pod).await {
            Ok(created) => {
                let message = format!("Created pod: {}", name(&created));
                self.event(job, EventType::Normal, "SuccessfulCreate", &message);
                Ok(())
            }
            Err(error) => {
                if !is_namespace_terminating(&error) {
                    let message = format!("Error creating: {}", message_of(&error));
                    self.event(job, EventType::Warning, "FailedCreate", &message);
                }
                Err(error)
            }
        }
    }

    async fn delete_pod(&self, job: &Job, pod: &Pod) -> Result<(), kube::Error> {
        let same = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams::default().preconditions(same);
        let result = self.pods(pod.metadata.namespace.as_ref()).delete(name(pod), &params).await;
        match &result {
            Ok(()) => {
                let message = format!("Deleted pod: {}", name(pod));
                self.event(job, EventType::Normal, "SuccessfulDelete", &message);
            }
            Err(error) if is_not_found(error) => {}
            Err(error) => {
                let message = format!("Error deleting: {}", message_of(error));
                self.event(job, EventType::Warning, "FailedDelete", &message);
            }
        }
        result
    }

    async fn remove_finalizer(&self, pod: &Pod) -> Result<(), kube::Error> {
        // The UID keeps the patch from another pod of the same name.
        let patch =
            json!({"metadata": {"uid": uid(pod), "$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
        let api = self.pods(pod.metadata.namespace.as_ref());
        api.patch(name(pod), &PatchParams::default(), &Patch::Strategic(patch)).await.map(drop)
    }

    async fn update_status(&self, job: &Job) -> Result<Job, kube::Error> {
        let api: Api<Job> =
            Api::namespaced(self.client.clone(), job.metadata.namespace.as_deref().unwrap_or_default());
        let name = job.metadata.name.as_deref().unwrap_or_default();
        api.replace_status(name, &PostParams::default(), job).await
    }

    fn event(&self, job: &Job, kind: EventType, reason: &str, message: &str) {
        self.recorder.event_for(job, kind, reason, message);
    }
}
