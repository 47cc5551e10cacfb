//! Keeps the status of disruption budgets: how many pods there should be, how many are well, how many may go.

mod decide;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_api::selector::LabelSelector;
use ferrite_client::{Change, Informer, ObjectKey, WorkQueue, is_conflict, is_not_found, run_workers};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::PostParams;
use kube::{Api, Client};

use crate::Context;
use crate::error::{During, SyncError};
use decide::decide;

const NAME: &str = "disruption-controller";

/// The workloads whose size tells how many pods there should be.
struct Workloads {
    deployments: Informer<Deployment>,
    replica_sets: Informer<ReplicaSet>,
    stateful_sets: Informer<StatefulSet>,
    replication_controllers: Informer<ReplicationController>,
}

pub(crate) fn start(context: &Context) {
    let queue = Arc::new(WorkQueue::new());
    let budgets: Informer<PodDisruptionBudget> = context.informers.get();
    let pods: Informer<Pod> = context.informers.get();
    let workloads = Workloads {
        deployments: context.informers.get(),
        replica_sets: context.informers.get(),
        stateful_sets: context.informers.get(),
        replication_controllers: context.informers.get(),
    };
    let (client, scope, workers) = (context.client.clone(), context.scope.clone(), context.config.workers);
    context.scope.spawn(async move {
        let watching = queue.clone();
        budgets.subscribe(move |change| {
            if !matches!(change, Change::Deleted(_)) {
                watching.add(ObjectKey::of(&**change.object()));
            }
        });
        let (watching, known) = (queue.clone(), budgets.clone());
        pods.subscribe(move |change| {
            let of = |pod: &Pod| -> Vec<ObjectKey> {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                let all = known.list_in(namespace);
                all.iter().filter(|budget| selects(budget, pod)).map(|b| ObjectKey::of(&**b)).collect()
            };
            of(change.object()).into_iter().for_each(|key| watching.add(key));
            if let Change::Updated { old, .. } = change {
                of(old).into_iter().for_each(|key| watching.add(key));
            }
        });
        // A workload that is resized changes what is expected.
        resized(&workloads.deployments, &queue, &budgets, |d| d.spec.as_ref().and_then(|s| s.replicas));
        resized(&workloads.replica_sets, &queue, &budgets, |r| r.spec.as_ref().and_then(|s| s.replicas));
        resized(&workloads.stateful_sets, &queue, &budgets, |s| s.spec.as_ref().and_then(|s| s.replicas));
        resized(&workloads.replication_controllers, &queue, &budgets, |r| {
            r.spec.as_ref().and_then(|s| s.replicas)
        });
        budgets.synced().await;
        pods.synced().await;
        workloads.synced().await;
        run_workers(NAME, queue, workers, scope, |key: ObjectKey| {
            let plan = budgets.get(&key).map(|budget| {
                let mut selected = pods.list_in(&key.namespace);
                selected.retain(|pod| selects(&budget, pod));
                let expected = workloads.expected(&selected);
                let plan = decide(&budget, &selected, expected, Timestamp::now());
                (budget, plan)
            });
            let client = client.clone();
            async move {
                let Some((budget, plan)) = plan else { return Ok(None) };
                let recheck = plan.recheck;
                match plan.status {
                    None => Ok(recheck),
                    Some(status) => {
                        let updated = PodDisruptionBudget { status: Some(status), ..(*budget).clone() };
                        write(&client, &key, &updated).await.map(|again| again.or(recheck))
                    }
                }
            }
        })
        .await;
    });
}

fn resized<K>(
    informer: &Informer<K>,
    queue: &Arc<WorkQueue<ObjectKey>>,
    budgets: &Informer<PodDisruptionBudget>,
    size: fn(&K) -> Option<i32>,
) where
    K: ferrite_client::Object + kube::Resource<DynamicType = ()>,
{
    let (watching, known) = (queue.clone(), budgets.clone());
    informer.subscribe(move |change| {
        if let Change::Updated { old, new } = change
            && size(old) != size(new)
        {
            let namespace = new.meta().namespace.clone().unwrap_or_default();
            known.list_in(&namespace).iter().for_each(|budget| watching.add(ObjectKey::of(&**budget)));
        }
    });
}

fn selects(budget: &PodDisruptionBudget, pod: &Pod) -> bool {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let labels = pod.metadata.labels.clone().unwrap_or_default();
    selector.is_some() && LabelSelector::from_typed(selector).is_ok_and(|s| s.matches(&labels))
}

fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

impl Workloads {
    async fn synced(&self) {
        self.deployments.synced().await;
        self.replica_sets.synced().await;
        self.stateful_sets.synced().await;
        self.replication_controllers.synced().await;
    }

    /// How many pods the workloads of these pods want together. Pods of nobody count as themselves.
    fn expected(&self, pods: &[Arc<Pod>]) -> Result<i32, String> {
        let mut wanted: HashMap<String, i32> = HashMap::new();
        for pod in pods {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let Some(owner) = controller(&pod.metadata) else { continue };
            if wanted.contains_key(&owner.uid) {
                continue;
            }
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let (uid, replicas) = self
                .size(namespace, owner)
                .ok_or_else(|| format!("found no controller ref for pod {name:?} of kind {}", owner.kind))?;
            wanted.insert(uid, replicas);
        }
        Ok(wanted.values().sum())
    }

    /// The UID and size of what an owner is, or of what owns it.
    fn size(&self, namespace: &str, owner: &OwnerReference) -> Option<(String, i32)> {
        let key = ObjectKey::new(namespace, owner.name.clone());
        let of = |metadata: &ObjectMeta, replicas: Option<i32>| {
            (metadata.uid.as_deref() == Some(&owner.uid)).then(|| (owner.uid.clone(), replicas.unwrap_or(1)))
        };
        match owner.kind.as_str() {
            "ReplicaSet" => {
                let set = self.replica_sets.get(&key)?;
                match controller(&set.metadata).filter(|parent| parent.kind == "Deployment") {
                    Some(parent) => self.size(namespace, parent),
                    None => of(&set.metadata, set.spec.as_ref().and_then(|s| s.replicas)),
                }
            }
            "Deployment" => {
                let found = self.deployments.get(&key)?;
                of(&found.metadata, found.spec.as_ref().and_then(|s| s.replicas))
            }
            "StatefulSet" => {
                let found = self.stateful_sets.get(&key)?;
                of(&found.metadata, found.spec.as_ref().and_then(|s| s.replicas))
            }
            "ReplicationController" => {
                let found = self.replication_controllers.get(&key)?;
                of(&found.metadata, found.spec.as_ref().and_then(|s| s.replicas))
            }
            _ => None,
        }
    }
}

async fn write(
    client: &Client,
    key: &ObjectKey,
    budget: &PodDisruptionBudget,
) -> Result<Option<Duration>, SyncError> {
    let api: Api<PodDisruptionBudget> = Api::namespaced(client.clone(), &key.namespace);
    match api.replace_status(&key.name, &PostParams::default(), budget).await {
        Ok(_) => Ok(None),
        // What has changed wakes us again.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("write the status of budget {key}")),
    }
}
