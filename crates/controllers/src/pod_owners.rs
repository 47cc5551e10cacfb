//! The relation between pods and the kind of object that controls them: which owner a change of a pod wakes, and
//! which pods an owner has.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Change, ClaimError, Expectations, Informer, ObjectKey, WorkQueue, claim_all, controller_of,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::core::{Selector, SelectorExt};

use crate::Context;
use crate::history::Revisioned;
use crate::pods::{self, BY_CONTROLLER, ORPHANS, is_ready, is_terminating};

/// An owner with more pods is woken by a change of one of them after a delay, in which other changes join it: each
/// sync examines all pods, so that a sync for every change would take quadratic time.
const AT_ONCE: usize = 100;
/// The delay for each pod of an owner with many.
const DELAY_PER_POD: Duration = Duration::from_micros(100);

/// A kind that controls pods.
pub(crate) trait PodOwner: Revisioned {
    /// The time that an availability check waits beyond `minReadySeconds`, for a clock that differs from the kubelet's.
    const CLOCK_SLACK: Duration;

    fn selector(&self) -> Option<Selector>;

    fn min_ready_seconds(&self) -> i32;

    /// Returns true if one sync may handle changes of several pods together.
    fn joins_changes(&self) -> bool;
}

/// The owners of one kind, their pods, and the queue of owners to sync.
pub(crate) struct PodOwners<O> {
    pub(crate) owners: Informer<O>,
    pub(crate) pods: Informer<Pod>,
    pub(crate) expectations: Expectations,
    pub(crate) queue: Arc<WorkQueue<ObjectKey>>,
}

impl<O: PodOwner> PodOwners<O> {
    pub(crate) fn new(context: &Context, queue: Arc<WorkQueue<ObjectKey>>) -> Self {
        let pods: Informer<Pod> = context.informers.get();
        pods.add_index(BY_CONTROLLER, pods::controller_index);
        pods.add_index(ORPHANS, pods::orphan_index);
        Self { owners: context.informers.get(), pods, expectations: Expectations::new(), queue }
    }

    /// Wakes the owner itself.
    pub(crate) fn owner_changed(&self, change: &Change<O>) {
        let key = ObjectKey::of(&**change.object());
        if let Change::Deleted(_) = change {
            self.expectations.forget(&key);
        }
        self.queue.add(key);
    }

    /// Wakes the owner of the pod, its earlier owner, or those that may adopt it.
    pub(crate) fn pod_changed(&self, change: &Change<Pod>) {
        match change {
            // A pod that is already on its way out counts as deleted when it is first seen.
            Change::Added(pod) if is_terminating(pod) => self.pod_gone(pod),
            Change::Added(pod) => match self.owner_of(&pod.metadata) {
                Some(owner) => {
                    self.expectations.creation_observed(&ObjectKey::of(&*owner));
                    self.wake(&owner);
                }
                None => self.wake_adopters(&pod.metadata),
            },
            Change::Updated { new, .. } if is_terminating(new) => self.pod_gone(new),
            Change::Updated { old, new } => self.pod_updated(old, new),
            Change::Deleted(pod) => self.pod_gone(pod),
        }
    }

    fn pod_updated(&self, old: &Pod, new: &Pod) {
        let owner_changed = controller_of(&old.metadata) != controller_of(&new.metadata);
        if owner_changed && let Some(previous) = self.owner_of(&old.metadata) {
            self.wake(&previous);
        }
        if let Some(owner) = self.owner_of(&new.metadata) {
            let seconds = owner.min_ready_seconds();
            if seconds > 0 && !is_ready(old) && is_ready(new) {
                let wait = Duration::from_secs(seconds.unsigned_abs().into()) + O::CLOCK_SLACK;
                self.queue.add_after(ObjectKey::of(&*owner), wait);
            }
            self.wake(&owner);
        } else if owner_changed || old.metadata.labels != new.metadata.labels {
            self.wake_adopters(&new.metadata);
        }
    }

    fn pod_gone(&self, pod: &Pod) {
        if let Some(owner) = self.owner_of(&pod.metadata) {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            self.expectations.deletion_observed(&ObjectKey::of(&*owner), name);
            self.wake(&owner);
        }
    }

    fn wake(&self, owner: &O) {
        let key = ObjectKey::of(owner);
        let uid = owner.meta().uid.as_deref().unwrap_or_default();
        match self.pods.count_by_index(BY_CONTROLLER, uid) {
            count if count > AT_ONCE && owner.joins_changes() => {
                let count = u32::try_from(count).unwrap_or(u32::MAX);
                self.queue.add_after(key, DELAY_PER_POD.saturating_mul(count));
            }
            _ => self.queue.add(key),
        }
    }

    /// The owner in the cache that controls the object, compared by UID.
    pub(crate) fn owner_of(&self, meta: &ObjectMeta) -> Option<Arc<O>> {
        let reference = controller_of(meta).filter(|owner| owner.kind == O::kind(&()))?;
        let key = ObjectKey::new(meta.namespace.as_deref().unwrap_or_default(), reference.name.as_str());
        self.owners.get(&key).filter(|owner| owner.meta().uid.as_ref() == Some(&reference.uid))
    }

    /// Wakes the owners whose selector matches an object that nobody controls.
    pub(crate) fn wake_adopters(&self, meta: &ObjectMeta) {
        if controller_of(meta).is_some() {
            return;
        }
        let empty = Default::default();
        let labels = meta.labels.as_ref().unwrap_or(&empty);
        for owner in self.owners.list_in(meta.namespace.as_deref().unwrap_or_default()) {
            if owner.selector().is_some_and(|selector| selector.matches(labels)) {
                self.queue.add(ObjectKey::of(&*owner));
            }
        }
    }

    /// The pods of `owner`, after adopting those that match and releasing those that no longer do.
    pub(crate) async fn claim(
        &self,
        client: &Client,
        owner: &O,
        selector: &Selector,
        may_adopt: impl Fn(&Pod) -> bool + Send,
    ) -> Result<Vec<Arc<Pod>>, ClaimError> {
        let meta = owner.meta();
        let mut candidates = self.pods.by_index(BY_CONTROLLER, meta.uid.as_deref().unwrap_or_default());
        candidates.extend(self.pods.by_index(ORPHANS, meta.namespace.as_deref().unwrap_or_default()));
        claim_all(client, owner, selector, candidates, may_adopt).await
    }
}
