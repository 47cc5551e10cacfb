//! Keeps the status of disruption budgets: the numbers of expected and healthy pods, and of allowed
//! disruptions.

mod decide;
mod stale;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_api::selector::LabelSelector;
use ferrite_client::{Api, Change, Controller, Informer, Object, ObjectKey, is_conflict, is_not_found};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Client;
use kube::api::PostParams;

use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{self, BY_LABEL};
use decide::{BudgetError, decide};

const NAME: &str = "disruption-controller";

/// The workloads whose size is the expected number of pods.
struct Workloads {
    deployments: Informer<Deployment>,
    replica_sets: Informer<ReplicaSet>,
    stateful_sets: Informer<StatefulSet>,
    replication_controllers: Informer<ReplicationController>,
}

pub(crate) fn start(context: &Context) {
    stale::start(context);
    let budgets: Informer<PodDisruptionBudget> = context.informers.get();
    let pods: Informer<Pod> = context.informers.get();
    pods.add_index(BY_LABEL, pods::label_index);
    let workloads = Workloads {
        deployments: context.informers.get(),
        replica_sets: context.informers.get(),
        stateful_sets: context.informers.get(),
        replication_controllers: context.informers.get(),
    };
    let (client, known) = (context.client.clone(), budgets.clone());
    let kit = context
        .controller(NAME)
        .watches(&budgets, |change, queue| {
            if !matches!(change, Change::Deleted(_)) {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        .watches(&pods, move |change, queue| {
            let wake = |pod: &Pod| {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                for budget in known.list_in(namespace).iter().filter(|budget| selects(budget, pod)) {
                    queue.add(ObjectKey::of(&**budget));
                }
            };
            wake(change.object());
            if let Change::Updated { old, .. } = change {
                wake(old);
            }
        });
    // A workload that is resized changes the expected number.
    let kit = resized(kit, &workloads.deployments, &budgets, |d| d.spec.as_ref().and_then(|s| s.replicas));
    let kit = resized(kit, &workloads.replica_sets, &budgets, |r| r.spec.as_ref().and_then(|s| s.replicas));
    let kit = resized(kit, &workloads.stateful_sets, &budgets, |s| s.spec.as_ref().and_then(|s| s.replicas));
    let kit = resized(kit, &workloads.replication_controllers, &budgets, |r| {
        r.spec.as_ref().and_then(|s| s.replicas)
    });
    kit.run(move |key| {
        let plan = budgets.get(&key).map(|budget| {
            let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
            let labels = selector.and_then(|selector| selector.match_labels.as_ref());
            let mut selected = pods::candidates(&pods, &key.namespace, labels.into_iter().flatten());
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
    });
}

fn resized<K: Object>(
    kit: Controller,
    informer: &Informer<K>,
    budgets: &Informer<PodDisruptionBudget>,
    size: fn(&K) -> Option<i32>,
) -> Controller {
    let known = budgets.clone();
    kit.watches(informer, move |change, queue| {
        if let Change::Updated { old, new } = change
            && size(old) != size(new)
        {
            let namespace = new.meta().namespace.clone().unwrap_or_default();
            known.list_in(&namespace).iter().for_each(|budget| queue.add(ObjectKey::of(&**budget)));
        }
    })
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
    /// Sum of the replicas that the workloads of these pods want. Pods without a controller count as
    /// themselves.
    fn expected(&self, pods: &[Arc<Pod>]) -> Result<i32, BudgetError> {
        let mut wanted: HashMap<String, i32> = HashMap::new();
        for pod in pods {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let Some(owner) = controller(&pod.metadata) else { continue };
            if wanted.contains_key(&owner.uid) {
                continue;
            }
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let (uid, replicas) = self.size(namespace, owner).ok_or_else(|| BudgetError::NoController {
                pod: name.to_owned(),
                kind: owner.kind.clone(),
            })?;
            wanted.insert(uid, replicas);
        }
        Ok(wanted.values().sum())
    }

    /// The UID and size of an owner, or of its own owner.
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
        // A change of the object triggers another sync.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("write the status of budget {key}")),
    }
}
