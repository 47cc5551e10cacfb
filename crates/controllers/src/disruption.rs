//! Keeps the status of disruption budgets: the numbers of expected and healthy pods, and of allowed
//! disruptions.

mod decide;
mod sizes;
mod stale;

use std::sync::Arc;
use std::time::Duration;

use ferrite_api::selector::LabelSelector;
use ferrite_client::{
    Api, Change, Controller, EventRecorder, EventType, Informer, Object, ObjectKey, is_conflict, is_not_found,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector as Selector;
use kube::Client;
use kube::api::PostParams;

use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{self, BY_LABEL};
use decide::{BudgetError, decide, needs_sizes};
use sizes::{Expected, Workloads};

const NAME: &str = "disruption-controller";

/// The controller as a source of events.
const COMPONENT: &str = "controllermanager";

/// The tools of a sync.
struct Budgets {
    client: Client,
    workloads: Workloads,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    stale::start(context);
    let budgets: Informer<PodDisruptionBudget> = context.informers.get();
    let pods: Informer<Pod> = context.informers.get();
    pods.add_index(BY_LABEL, pods::label_index);
    let state = Arc::new(Budgets {
        client: context.client.clone(),
        workloads: Workloads::new(context.client.clone(), &context.informers),
        recorder: context.events.recorder(COMPONENT, None),
    });
    let workloads = &state.workloads;
    let (known, recorder) = (budgets.clone(), state.recorder.clone());
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
                let mut of_pod: Vec<ObjectKey> = known
                    .list_in(namespace)
                    .iter()
                    .filter(|budget| selects(budget, pod))
                    .map(|budget| ObjectKey::of(&**budget))
                    .collect();
                of_pod.sort();
                of_pod.iter().cloned().for_each(|key| queue.add(key));
                of_pod
            };
            if let Some(message) = several(change.object(), &wake(change.object())) {
                recorder.event_for(
                    &**change.object(),
                    EventType::Warning,
                    "MultiplePodDisruptionBudgets",
                    message,
                );
            }
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
    let state = Arc::clone(&state);
    kit.run(move |key| {
        let found = budgets.get(&key).map(|budget| {
            let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
            let labels = selector.and_then(|selector| selector.match_labels.as_ref());
            let mut selected = pods::candidates(&pods, &key.namespace, labels.into_iter().flatten());
            selected.retain(|pod| selects(&budget, pod));
            (budget, selected)
        });
        let state = Arc::clone(&state);
        async move {
            match found {
                Some((budget, pods)) => state.sync(&key, &budget, &pods).await,
                None => Ok(None),
            }
        }
    });
}

/// Upstream's warning about a pod that several budgets select.
fn several(pod: &Pod, budgets: &[ObjectKey]) -> Option<String> {
    let [chosen, _, ..] = budgets else { return None };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let chosen = &chosen.name;
    Some(format!(
        "Pod {namespace:?}/{name:?} matches multiple PodDisruptionBudgets.  Chose \"{chosen}\" arbitrarily."
    ))
}

/// A selector in the form in which upstream prints it.
fn printed(selector: Option<&Selector>) -> String {
    let Some(selector) = selector else { return "nil".to_owned() };
    let labels = selector.match_labels.iter().flatten();
    let labels: String = labels.map(|(key, value)| format!("{key}: {value},")).collect();
    let expressions = selector.match_expressions.iter().flatten().map(|e| {
        let values = e.values.clone().unwrap_or_default().join(" ");
        format!("LabelSelectorRequirement{{Key:{},Operator:{},Values:[{values}],}},", e.key, e.operator)
    });
    let expressions: String = expressions.collect();
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}

impl Budgets {
    async fn sync(
        &self,
        key: &ObjectKey,
        budget: &PodDisruptionBudget,
        pods: &[Arc<Pod>],
    ) -> Result<Option<Duration>, SyncError> {
        let expected = match needs_sizes(budget) {
            true => self.workloads.expected(pods).await,
            false => Ok(Expected { pods: 0, has_unmanaged: false }),
        };
        self.report(budget, pods, expected.as_ref());
        // The server may know later; all else changes with the pods.
        let again = match &expected {
            Err(error @ BudgetError::Unreadable(_)) => Err(SyncError::Other(error.to_string())),
            _ => Ok(()),
        };
        let plan = decide(budget, pods, expected.map(|expected| expected.pods), Timestamp::now());
        for pod in &plan.overdue {
            let message = format!("Pod was expected by PDB {key} to be deleted but it wasn't");
            self.recorder.event_for(&**pod, EventType::Warning, "NotDeleted", message);
        }
        if let Some(status) = plan.status {
            let updated = PodDisruptionBudget { status: Some(status), ..budget.clone() };
            write(&self.client, key, &updated).await?;
        }
        again.map(|()| plan.recheck)
    }

    /// Upstream's events about a budget whose pods are in doubt.
    fn report(
        &self,
        budget: &PodDisruptionBudget,
        pods: &[Arc<Pod>],
        expected: Result<&Expected, &BudgetError>,
    ) {
        let event = |kind, reason, message: String| self.recorder.event_for(budget, kind, reason, message);
        if pods.is_empty() {
            event(EventType::Normal, "NoPods", "No matching pods found".to_owned());
        }
        match expected {
            Ok(expected) if expected.has_unmanaged => {
                let selector = printed(budget.spec.as_ref().and_then(|spec| spec.selector.as_ref()));
                let message = format!(
                    "Pods selected by this PodDisruptionBudget (selector: {selector}) were found to be unmanaged. As a result, the \
                     status of the PDB cannot be calculated correctly, which may result in undefined behavior. To account for \
                     these pods please set \".spec.minAvailable\" field of the PDB to an integer value."
                );
                event(EventType::Warning, "UnmanagedPods", message);
            }
            Ok(_) => {}
            Err(error) => event(
                EventType::Warning,
                "CalculateExpectedPodCountFailed",
                format!("Failed to calculate the number of expected pods: {error}"),
            ),
        }
    }
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

async fn write(client: &Client, key: &ObjectKey, budget: &PodDisruptionBudget) -> Result<(), SyncError> {
    let api: Api<PodDisruptionBudget> = Api::namespaced(client.clone(), &key.namespace);
    match api.replace_status(&key.name, &PostParams::default(), budget).await {
        Ok(_) => Ok(()),
        // A change of the object triggers another sync.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
        Err(error) => Err(error).during(|| format!("write the status of budget {key}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn texts_of_events() {
        let selector: Selector = ferrite_json::from_value(json!({"matchLabels": {"app": "web"},
            "matchExpressions": [{"key": "tier", "operator": "In", "values": ["a", "b"]}]}))
        .unwrap();
        assert_eq!(
            printed(Some(&selector)),
            "&LabelSelector{MatchLabels:map[string]string{app: web,},MatchExpressions:[]LabelSelectorRequirement{\
             LabelSelectorRequirement{Key:tier,Operator:In,Values:[a b],},},}"
        );
        let pod: Pod =
            ferrite_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns"}})).unwrap();
        let budgets = [ObjectKey::new("ns", "a"), ObjectKey::new("ns", "b")];
        assert_eq!(several(&pod, &budgets[..1]), None);
        assert_eq!(
            several(&pod, &budgets).as_deref(),
            Some("Pod \"ns\"/\"p\" matches multiple PodDisruptionBudgets.  Chose \"a\" arbitrarily.")
        );
    }
}
