//! Watches Deployments, ReplicaSets and Pods, and wakes the Deployment concerned.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, Change, EventRecorder, EventType, Informer, ObjectKey, WorkQueue};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::Client;
use kube::api::PostParams;
use kube::core::{Selector, SelectorExt};

use super::is_rolling_update;
use super::sync::Rollout;
use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{self, BY_CONTROLLER, ORPHANS};
use ferrite_client::{claim_all, controller_of};

const NAME: &str = "deployment-controller";

pub(super) struct DeploymentController {
    pub(super) client: Client,
    deployments: Informer<Deployment>,
    sets: Informer<ReplicaSet>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue<ObjectKey>>,
    pub(super) recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let controller = Arc::new(DeploymentController {
        client: context.client.clone(),
        deployments: context.informers.get(),
        sets: context.informers.get(),
        pods: context.informers.get(),
        queue: kit.queue().clone(),
        recorder: context.events.recorder(NAME, None),
    });
    controller.pods.add_index(BY_CONTROLLER, pods::controller_index);
    controller.sets.add_index(BY_CONTROLLER, pods::controller_index);
    controller.sets.add_index(ORPHANS, pods::orphan_index);
    let (by_set, by_pod) = (controller.clone(), controller.clone());
    kit.reconciles(&controller.deployments)
        .watches(&controller.sets, move |change, _| by_set.set_changed(change))
        .watches(&controller.pods, move |change, _| {
            if let Change::Deleted(pod) = change {
                by_pod.pod_deleted(pod);
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

impl DeploymentController {
    fn set_changed(&self, change: &Change<ReplicaSet>) {
        let set = change.object();
        if let Change::Updated { old, new } = change
            && controller_of(&old.metadata) != controller_of(&new.metadata)
            && let Some(previous) = self.owner_of(&old.metadata)
        {
            self.queue.add(ObjectKey::of(&*previous));
        }
        if let Some(owner) = self.owner_of(&set.metadata) {
            self.queue.add(ObjectKey::of(&*owner));
        } else if controller_of(&set.metadata).is_none() && !matches!(change, Change::Deleted(_)) {
            let empty = Default::default();
            let labels = set.metadata.labels.as_ref().unwrap_or(&empty);
            for deployment in self.deployments.list_in(set.metadata.namespace.as_deref().unwrap_or_default())
            {
                if selector(&deployment).is_some_and(|selector| selector.matches(labels)) {
                    self.queue.add(ObjectKey::of(&*deployment));
                }
            }
        }
    }

    /// A Deployment with strategy Recreate waits for its last old pod to go.
    fn pod_deleted(&self, pod: &Pod) {
        let Some(reference) = controller_of(&pod.metadata).filter(|owner| owner.kind == "ReplicaSet") else {
            return;
        };
        let key = ObjectKey::new(pod.metadata.namespace.clone().unwrap_or_default(), reference.name.clone());
        let owner = self.sets.get(&key).and_then(|set| self.owner_of(&set.metadata));
        if let Some(deployment) = owner.filter(|deployment| !is_rolling_update(deployment)) {
            self.queue.add(ObjectKey::of(&*deployment));
        }
    }

    fn owner_of(&self, meta: &ObjectMeta) -> Option<Arc<Deployment>> {
        let reference = controller_of(meta).filter(|owner| owner.kind == "Deployment")?;
        let key = ObjectKey::new(meta.namespace.clone().unwrap_or_default(), reference.name.clone());
        self.deployments.get(&key).filter(|owner| owner.metadata.uid.as_ref() == Some(&reference.uid))
    }

    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(deployment) = self.deployments.get(&key) else { return Ok(None) };
        let everything = LabelSelector::default();
        if deployment.spec.as_ref().is_none_or(|spec| spec.selector == everything) {
            let message = "This deployment is selecting all pods. A non-empty selector is required.";
            self.recorder.event_for(&*deployment, EventType::Warning, "SelectingAll", message);
            return self.note_observed(&key, &deployment).await.map(|()| None);
        }
        let Some(selector) = selector(&deployment) else {
            return Err(SyncError::Other(format!("{key} has a selector that cannot be understood")));
        };
        // ReplicaSets of others are none of its business, however many there are.
        let uid = deployment.metadata.uid.as_deref().unwrap_or_default();
        let mut candidates = self.sets.by_index(BY_CONTROLLER, uid);
        candidates.extend(self.sets.by_index(ORPHANS, &key.namespace));
        let sets = claim_all(&self.client, &*deployment, &selector, candidates, |_| true).await?;
        let sets: Vec<ReplicaSet> = sets.iter().map(|set| (**set).clone()).collect();
        let pods: HashMap<String, Vec<Arc<Pod>>> = sets
            .iter()
            .filter_map(|set| set.metadata.uid.clone())
            .map(|uid| (uid.clone(), self.pods.by_index(BY_CONTROLLER, &uid)))
            .collect();
        Box::pin(Rollout::new(self, (*deployment).clone(), sets, pods).run()).await
    }

    async fn note_observed(&self, key: &ObjectKey, deployment: &Deployment) -> Result<(), SyncError> {
        let Some(updated) = observed(deployment) else { return Ok(()) };
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), &key.namespace);
        match api.replace_status(&key.name, &PostParams::default(), &updated).await {
            Ok(_) => Ok(()),
            Err(error) => Err(error).during(|| format!("update status of deployment {key}")),
        }
    }
}

/// The Deployment with its generation as the observed one, unless it is already.
fn observed(deployment: &Deployment) -> Option<Deployment> {
    let generation = deployment.metadata.generation;
    let mut updated = deployment.clone();
    let seen = &mut updated.status.get_or_insert_default().observed_generation;
    if *seen >= generation {
        return None;
    }
    *seen = generation;
    Some(updated)
}

fn selector(deployment: &Deployment) -> Option<Selector> {
    deployment.spec.as_ref()?.selector.clone().try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_new_generation_is_observed_once() {
        let deployment = |observed: Option<i64>| -> Deployment {
            ferrite_json::from_value(
                json!({"metadata": {"generation": 2}, "status": {"observedGeneration": observed}}),
            )
            .unwrap()
        };
        for (has, expected) in [(None, true), (Some(1), true), (Some(2), false)] {
            let generation = observed(&deployment(has)).map(|d| d.status.unwrap().observed_generation);
            assert_eq!(generation, expected.then_some(Some(2)), "{has:?}");
        }
    }
}
