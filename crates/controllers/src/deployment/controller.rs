//! Watches Deployments, ReplicaSets and Pods, and wakes the Deployment concerned.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Change, EventRecorder, EventType, Informer, ObjectKey, WorkQueue, is_conflict, is_not_found, run_workers,
};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::api::{Patch, PatchParams};
use kube::core::{Selector, SelectorExt};
use kube::{Api, Client};

use super::is_rolling_update;
use super::sync::Rollout;
use crate::Context;
use crate::error::{During, SyncError};
use crate::owners::{self, Claim, controller_of, controller_reference};
use crate::pods::{self, BY_CONTROLLER};

const NAME: &str = "deployment-controller";

pub(super) struct Controller {
    pub(super) client: Client,
    deployments: Informer<Deployment>,
    sets: Informer<ReplicaSet>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue<ObjectKey>>,
    pub(super) recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(Controller {
        client: context.client.clone(),
        deployments: context.informers.get(),
        sets: context.informers.get(),
        pods: context.informers.get(),
        queue: Arc::new(WorkQueue::new()),
        recorder: context.events.recorder(NAME, None),
    });
    controller.pods.add_index(BY_CONTROLLER, pods::controller_index);
    let scope = context.scope.clone();
    let workers = context.config.workers;
    context.scope.spawn(async move {
        let watching = controller.clone();
        controller.deployments.subscribe(move |change| watching.queue.add(ObjectKey::of(&**change.object())));
        let watching = controller.clone();
        controller.sets.subscribe(move |change| watching.set_changed(change));
        let watching = controller.clone();
        controller.pods.subscribe(move |change| {
            if let Change::Deleted(pod) = change {
                watching.pod_deleted(pod);
            }
        });
        controller.deployments.synced().await;
        controller.sets.synced().await;
        controller.pods.synced().await;
        let queue = controller.queue.clone();
        run_workers(NAME, queue, workers, scope, move |key| {
            let controller = controller.clone();
            async move { controller.sync(key).await }
        })
        .await;
    });
}

impl Controller {
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
            return Ok(None);
        }
        let Some(selector) = selector(&deployment) else {
            return Err(SyncError::Other(format!("{key} has a selector that cannot be understood")));
        };
        let sets = self.claim(&deployment, &selector).await?;
        let pods: HashMap<String, Vec<Arc<Pod>>> = sets
            .iter()
            .filter_map(|set| set.metadata.uid.clone())
            .map(|uid| (uid.clone(), self.pods.by_index(BY_CONTROLLER, &uid)))
            .collect();
        Box::pin(Rollout::new(self, (*deployment).clone(), sets, pods).run()).await
    }

    /// The ReplicaSets of the Deployment, after adopting those that match and releasing those that no longer do.
    async fn claim(
        &self,
        deployment: &Deployment,
        selector: &Selector,
    ) -> Result<Vec<ReplicaSet>, SyncError> {
        let meta = &deployment.metadata;
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let name = meta.name.as_deref().unwrap_or_default();
        let uid = meta.uid.as_deref().unwrap_or_default();
        let api: Api<ReplicaSet> = Api::namespaced(self.client.clone(), namespace);
        let mut owned = Vec::new();
        let mut verified = false;
        for set in self.sets.list_in(namespace) {
            let set_name = set.metadata.name.as_deref().unwrap_or_default();
            let set_uid = set.metadata.uid.as_deref().unwrap_or_default();
            match owners::claim(meta, selector, &set.metadata) {
                Claim::Ignore => {}
                Claim::Keep => owned.push((*set).clone()),
                Claim::Adopt => {
                    if !verified {
                        let live = Api::<Deployment>::namespaced(self.client.clone(), namespace)
                            .get(name)
                            .await
                            .during(|| format!("recheck {namespace}/{name}"))?;
                        if live.metadata.uid != meta.uid || live.metadata.deletion_timestamp.is_some() {
                            return Err(SyncError::Other(format!(
                                "{namespace}/{name} is gone, not adopting"
                            )));
                        }
                        verified = true;
                    }
                    let patch = owners::adopt_patch(&controller_reference(deployment), set_uid);
                    match api.patch(set_name, &PatchParams::default(), &Patch::Strategic(patch)).await {
                        Ok(adopted) => owned.push(adopted),
                        Err(error) if is_not_found(&error) => {}
                        Err(error) => {
                            return Err(error).during(|| format!("adopt replica set {namespace}/{set_name}"));
                        }
                    }
                }
                Claim::Release => {
                    let patch = owners::release_patch(uid, set_uid);
                    match api.patch(set_name, &PatchParams::default(), &Patch::Strategic(patch)).await {
                        Ok(_) => {}
                        Err(error) if is_not_found(&error) || is_conflict(&error) => {}
                        Err(error) => {
                            return Err(error)
                                .during(|| format!("release replica set {namespace}/{set_name}"));
                        }
                    }
                }
            }
        }
        Ok(owned)
    }
}

fn selector(deployment: &Deployment) -> Option<Selector> {
    deployment.spec.as_ref()?.selector.clone().try_into().ok()
}
