//! Watches owners and pods, and carries out the decisions of [`super::decide`].

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Change, EventRecorder, Expectations, Informer, ObjectKey, WorkQueue, is_conflict, is_not_found,
    message_of,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::PostParams;
use kube::core::{Selector, SelectorExt};

use super::decide::{self, Failure, Observed, Plan};
use super::kinds::Replicated;
use crate::Context;
use crate::error::{During, SyncError, is_namespace_terminating};
use crate::pod_control;
use crate::pods::{self, BY_CONTROLLER, BY_LABEL, is_active, is_finished, is_terminating};
use ferrite_client::{claim_all, controller_of};

/// Index of owners by the UID of their controllers.
const BY_PARENT: &str = "parent";

struct Manager<O: Replicated> {
    client: Client,
    owners: Informer<O>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue<ObjectKey>>,
    expectations: Expectations,
    recorder: EventRecorder,
}

pub(super) fn start<O: Replicated>(context: &Context) {
    let kit = context.controller(O::CONTROLLER);
    let manager = Arc::new(Manager::<O> {
        client: context.client.clone(),
        owners: context.informers.get(),
        pods: context.informers.get(),
        queue: kit.queue().clone(),
        expectations: Expectations::new(),
        recorder: context.events.recorder(O::COMPONENT, None),
    });
    manager.pods.add_index(BY_CONTROLLER, pods::controller_index);
    manager.pods.add_index(BY_LABEL, pods::label_index);
    manager.owners.add_index(BY_PARENT, |owner| {
        controller_of(owner.meta()).map(|parent| parent.uid.clone()).into_iter().collect()
    });
    let (by_owner, by_pod) = (manager.clone(), manager.clone());
    kit.about(&manager.owners)
        .watches(&manager.owners, move |change, _| by_owner.owner_changed(change))
        .watches(&manager.pods, move |change, _| by_pod.pod_changed(change))
        .run_with(manager.clone(), |manager, key| async move { manager.sync(key).await });
}

impl<O: Replicated> Manager<O> {
    fn owner_changed(&self, change: &Change<O>) {
        let key = ObjectKey::of(&**change.object());
        if let Change::Deleted(_) = change {
            self.expectations.forget(&key);
        }
        self.queue.add(key);
    }

    fn pod_changed(&self, change: &Change<Pod>) {
        match change {
            // A pod that is already on its way out counts as deleted when it is first seen.
            Change::Added(pod) if is_terminating(pod) => self.pod_gone(pod),
            Change::Added(pod) => match self.owner_of(pod) {
                Some(owner) => {
                    let key = ObjectKey::of(&*owner);
                    self.expectations.creation_observed(&key);
                    self.queue.add(key);
                }
                None => self.wake_adopters(pod),
            },
            Change::Updated { old, new } => self.pod_updated(old, new),
            Change::Deleted(pod) => self.pod_gone(pod),
        }
    }

    fn pod_updated(&self, old: &Pod, new: &Pod) {
        if is_terminating(new) {
            // Seen as a deletion at once: a replacement starts while the old pod takes its time to stop.
            self.pod_gone(new);
            return;
        }
        let owner_changed = controller_of(&old.metadata) != controller_of(&new.metadata);
        if owner_changed && let Some(previous) = self.owner_of(old) {
            self.queue.add(ObjectKey::of(&*previous));
        }
        if let Some(owner) = self.owner_of(new) {
            let key = ObjectKey::of(&*owner);
            if decide::became_ready(old, new) && owner.min_ready_seconds() > 0 {
                // The extra second covers a clock that differs from the kubelet's.
                let after = owner.min_ready_seconds().unsigned_abs().saturating_add(1);
                self.queue.add_after(key.clone(), Duration::from_secs(after.into()));
            }
            self.queue.add(key);
        } else if owner_changed || old.metadata.labels != new.metadata.labels {
            self.wake_adopters(new);
        }
    }

    fn pod_gone(&self, pod: &Pod) {
        if let Some(owner) = self.owner_of(pod) {
            let key = ObjectKey::of(&*owner);
            self.expectations.deletion_observed(&key, pod.metadata.name.as_deref().unwrap_or_default());
            self.queue.add(key);
        }
    }

    /// The owner in the cache that controls the pod, compared by UID.
    fn owner_of(&self, pod: &Pod) -> Option<Arc<O>> {
        let reference = controller_of(&pod.metadata)?;
        if reference.kind != O::kind(&()) {
            return None;
        }
        let key = ObjectKey::new(pod.metadata.namespace.clone().unwrap_or_default(), reference.name.clone());
        self.owners.get(&key).filter(|owner| owner.meta().uid.as_ref() == Some(&reference.uid))
    }

    fn wake_adopters(&self, pod: &Pod) {
        if controller_of(&pod.metadata).is_some() {
            return;
        }
        let empty = Default::default();
        let labels = pod.metadata.labels.as_ref().unwrap_or(&empty);
        for owner in self.owners.list_in(pod.metadata.namespace.as_deref().unwrap_or_default()) {
            if owner.selector().is_some_and(|selector| selector.matches(labels)) {
                self.queue.add(ObjectKey::of(&*owner));
            }
        }
    }

    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(owner) = self.owners.get(&key) else {
            self.expectations.forget(&key);
            return Ok(None);
        };
        // Before looking at the pods: the other way round, a pod that arrives in between would be made twice.
        let may_act = self.expectations.satisfied(&key);
        let Some(selector) = owner.selector() else {
            return Err(SyncError::Other(format!("{key} has a selector that cannot be understood")));
        };
        let owned = self.claim(&owner, &selector).await?;
        let (active, others): (Vec<_>, Vec<_>) = owned.into_iter().partition(|pod| is_active(pod));
        let terminating = others.iter().filter(|pod| is_terminating(pod) && !is_finished(pod)).count();

        let mut failure = None;
        if may_act && owner.meta().deletion_timestamp.is_none() {
            failure = self.manage(&key, &owner, &active).await;
        }
        let now = Timestamp::now();
        let template = owner.template();
        let status = decide::status(
            &Observed {
                previous: &owner.status(),
                generation: owner.meta().generation,
                template_labels: template.metadata.as_ref().and_then(|meta| meta.labels.as_ref()),
                min_ready_seconds: owner.min_ready_seconds(),
                active: &active,
                terminating: (O::kind(&()) == "ReplicaSet").then_some(terminating),
                failure: failure.clone(),
            },
            now,
        );
        let waiting_to_be_available = owner.min_ready_seconds() > 0
            && status.ready_replicas.unwrap_or(0) == owner.replicas()
            && status.available_replicas.unwrap_or(0) != owner.replicas();
        if status != owner.status() {
            self.write_status(&key, &owner, status).await?;
        }
        if let Some((_, message)) = failure {
            return Err(SyncError::Other(message));
        }
        let seconds = owner.min_ready_seconds().unsigned_abs();
        Ok(waiting_to_be_available.then(|| Duration::from_secs(seconds.into())))
    }

    /// The pods of `owner`, after adopting those that match and releasing those that no longer do.
    async fn claim(&self, owner: &O, selector: &Selector) -> Result<Vec<Arc<Pod>>, SyncError> {
        let meta = owner.meta();
        let mut candidates = self.pods.by_index(BY_CONTROLLER, meta.uid.as_deref().unwrap_or_default());
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let matching = pods::candidates(&self.pods, namespace, owner.match_labels().into_iter().flatten());
        candidates.extend(matching.into_iter().filter(|pod| controller_of(&pod.metadata).is_none()));
        Ok(claim_all(&self.client, owner, selector, candidates, |pod| !is_finished(pod)).await?)
    }

    async fn manage(
        &self,
        key: &ObjectKey,
        owner: &Arc<O>,
        active: &[Arc<Pod>],
    ) -> Option<(Failure, String)> {
        let related = self.related(owner);
        match decide::plan(owner.replicas(), active, &related, Timestamp::now()) {
            Plan::Nothing => None,
            Plan::Create(count) => self.create(key, owner, count).await.map(|error| (Failure::Create, error)),
            Plan::Delete(victims) => {
                self.delete(key, owner, &victims).await.map(|error| (Failure::Delete, error))
            }
        }
    }

    /// Active pods of every owner with the same parent.
    fn related(&self, owner: &Arc<O>) -> Vec<Arc<Pod>> {
        let siblings = match controller_of(owner.meta()) {
            Some(parent) => self.owners.by_index(BY_PARENT, &parent.uid),
            None => vec![owner.clone()],
        };
        siblings
            .iter()
            .flat_map(|owner| {
                self.pods.by_index(BY_CONTROLLER, owner.meta().uid.as_deref().unwrap_or_default())
            })
            .filter(|pod| is_active(pod))
            .collect()
    }

    /// Makes pods in growing batches until one batch has a failure; the first error is returned.
    async fn create(&self, key: &ObjectKey, owner: &O, count: usize) -> Option<String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let pod = pod_control::pod_from_template(owner, owner.template());
        self.expectations.expect_creations(key, count);
        let mut attempted = 0;
        for batch in pod_control::slow_start(count) {
            let results = pod_control::in_parallel(
                (0..batch).map(|_| pod_control::create(&api, &self.recorder, owner, &pod)),
            )
            .await;
            attempted += batch;
            let mut failed = 0;
            let mut first = None;
            for result in results {
                match result {
                    Ok(()) => {}
                    Err(error) if is_namespace_terminating(&error) => failed += 1,
                    Err(error) => {
                        failed += 1;
                        first.get_or_insert_with(|| message_of(&error));
                    }
                }
            }
            if failed > 0 {
                // No watch event will come for these, nor for those not tried.
                self.expectations.creations_observed(key, failed + (count - attempted));
                return first;
            }
        }
        None
    }

    async fn delete(&self, key: &ObjectKey, owner: &O, victims: &[Arc<Pod>]) -> Option<String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let name_of = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
        self.expectations.expect_deletions(key, victims.iter().map(|pod| name_of(pod)));
        let deletions = victims.iter().map(|pod| async {
            let name = name_of(pod);
            let error = pod_control::delete(&api, &self.recorder, owner, pod).await.err()?;
            self.expectations.deletion_observed(key, &name);
            (!is_not_found(&error)).then(|| message_of(&error))
        });
        pod_control::in_parallel(deletions).await.into_iter().flatten().next()
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        owner: &O,
        status: k8s_openapi::api::apps::v1::ReplicaSetStatus,
    ) -> Result<(), SyncError> {
        let api: Api<O> = Api::namespaced(self.client.clone(), &key.namespace);
        let mut updated = owner.clone();
        updated.set_status(status.clone());
        match api.replace_status(&key.name, &PostParams::default(), &updated).await {
            Ok(_) => return Ok(()),
            Err(error) if is_not_found(&error) => return Ok(()),
            Err(error) if is_conflict(&error) => {}
            Err(error) => return Err(error).during(|| format!("update status of {key}")),
        }
        let mut live = api.get(&key.name).await.during(|| format!("read {key}"))?;
        if live.meta().uid != owner.meta().uid {
            return Ok(());
        }
        live.set_status(status);
        api.replace_status(&key.name, &PostParams::default(), &live)
            .await
            .map(|_| ())
            .during(|| format!("update status of {key}"))
    }
}
