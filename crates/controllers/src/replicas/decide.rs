//! Decides the number of pods to create, the pods to delete, and the status.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ReplicaSetCondition, ReplicaSetStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::pods::{condition, is_available, is_ready, node_name, phase, ready_since};

/// Pods made or removed in one sync at most.
pub(super) const BURST: usize = 500;

const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The change of the number of pods.
#[derive(Debug)]
pub(super) enum Plan {
    Nothing,
    Create(usize),
    Delete(Vec<Arc<Pod>>),
}

/// `active` are the owner's pods that count; `related` those of all owners with the same parent (an old and a new
/// ReplicaSet of one Deployment), so that a node with many of them loses one first.
pub(super) fn plan(desired: i32, active: &[Arc<Pod>], related: &[Arc<Pod>], now: Timestamp) -> Plan {
    let desired = usize::try_from(desired).unwrap_or(0);
    match active.len().cmp(&desired) {
        Ordering::Equal => Plan::Nothing,
        Ordering::Less => Plan::Create((desired - active.len()).min(BURST)),
        Ordering::Greater => {
            let count = (active.len() - desired).min(BURST);
            let mut victims = active.to_vec();
            if count < victims.len() {
                let mut per_node: HashMap<&str, usize> = HashMap::new();
                for pod in related {
                    if let Some(node) = node_name(pod) {
                        *per_node.entry(node).or_default() += 1;
                    }
                }
                let crowd =
                    |pod: &Pod| node_name(pod).and_then(|node| per_node.get(node)).copied().unwrap_or(0);
                victims.sort_by(|a, b| deletion_order(a, b, crowd(a), crowd(b), now));
                victims.truncate(count);
            }
            Plan::Delete(victims)
        }
    }
}

/// `Less` if `a` should go before `b`. First difference decides.
fn deletion_order(a: &Pod, b: &Pod, crowd_a: usize, crowd_b: usize, now: Timestamp) -> Ordering {
    let phase_rank = |pod: &Pod| match phase(pod) {
        "Pending" => 0,
        "Unknown" => 1,
        _ => 2,
    };
    let cost = |pod: &Pod| -> i32 {
        let cost = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(DELETION_COST));
        cost.and_then(|cost| cost.parse().ok()).unwrap_or(0)
    };
    node_name(a)
        .is_some()
        .cmp(&node_name(b).is_some())
        .then_with(|| phase_rank(a).cmp(&phase_rank(b)))
        .then_with(|| is_ready(a).cmp(&is_ready(b)))
        .then_with(|| cost(a).cmp(&cost(b)))
        .then_with(|| crowd_b.cmp(&crowd_a))
        .then_with(|| {
            if is_ready(a) {
                younger_first(ready_since(a), ready_since(b), a, b, now)
            } else {
                Ordering::Equal
            }
        })
        .then_with(|| restarts(b).cmp(&restarts(a)))
        .then_with(|| younger_first(created(a), created(b), a, b, now))
}

/// Ages are compared by magnitude (powers of two), and pods of about the same age by UID, so that removal among
/// them is as good as random. A pod without the time goes first.
fn younger_first(
    a: Option<Timestamp>,
    b: Option<Timestamp>,
    pod_a: &Pod,
    pod_b: &Pod,
    now: Timestamp,
) -> Ordering {
    let magnitude = |since: Timestamp| now.duration_since(since).as_nanos().max(0).checked_ilog2();
    match (a, b) {
        (Some(a), Some(b)) if a == b => Ordering::Equal,
        (Some(a), Some(b)) => {
            magnitude(a).cmp(&magnitude(b)).then_with(|| pod_a.metadata.uid.cmp(&pod_b.metadata.uid))
        }
        (a, b) => a.is_some().cmp(&b.is_some()),
    }
}

fn created(pod: &Pod) -> Option<Timestamp> {
    pod.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.map(|status| status.restart_count).max().unwrap_or(0)
}

/// The pods of an owner and the inputs of its status.
pub(super) struct Observed<'a> {
    pub(super) previous: &'a ReplicaSetStatus,
    pub(super) generation: Option<i64>,
    pub(super) template_labels: Option<&'a BTreeMap<String, String>>,
    pub(super) min_ready_seconds: i32,
    pub(super) active: &'a [Arc<Pod>],
    /// Number of further pods in deletion.
    pub(super) terminating: Option<usize>,
    /// Why making (`Create`) or removing (`Delete`) pods failed in this sync.
    pub(super) failure: Option<(Failure, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    Create,
    Delete,
}

pub(super) fn status(observed: &Observed<'_>, now: Timestamp) -> ReplicaSetStatus {
    let empty = BTreeMap::new();
    let wanted = observed.template_labels.unwrap_or(&empty);
    let count =
        |matches: &dyn Fn(&Pod) -> bool| number(observed.active.iter().filter(|pod| matches(pod)).count());
    let fully_labelled = count(&|pod| {
        let labels = pod.metadata.labels.as_ref().unwrap_or(&empty);
        wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
    });
    ReplicaSetStatus {
        replicas: number(observed.active.len()),
        fully_labeled_replicas: Some(fully_labelled).filter(|n| *n > 0),
        ready_replicas: Some(count(&|pod| is_ready(pod))).filter(|n| *n > 0),
        available_replicas: Some(count(&|pod| is_available(pod, observed.min_ready_seconds, now)))
            .filter(|n| *n > 0),
        terminating_replicas: observed.terminating.map(number),
        observed_generation: observed.generation,
        conditions: conditions(observed, now),
    }
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

fn conditions(observed: &Observed<'_>, now: Timestamp) -> Option<Vec<ReplicaSetCondition>> {
    const REPLICA_FAILURE: &str = "ReplicaFailure";
    let previous = observed.previous.conditions.iter().flatten();
    let mut conditions: Vec<_> = previous.clone().filter(|c| c.type_ != REPLICA_FAILURE).cloned().collect();
    if let Some((failure, message)) = &observed.failure {
        let reason = match failure {
            Failure::Create => "FailedCreate",
            Failure::Delete => "FailedDelete",
        };
        // The first message stays while the reason does: it would otherwise be rewritten on every retry.
        let kept = previous.clone().find(|c| {
            c.type_ == REPLICA_FAILURE && c.status == "True" && c.reason.as_deref() == Some(reason)
        });
        conditions.push(kept.cloned().unwrap_or_else(|| ReplicaSetCondition {
            type_: REPLICA_FAILURE.to_owned(),
            status: "True".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.clone()),
            last_transition_time: Some(Time(now)),
        }));
    }
    Some(conditions).filter(|conditions| !conditions.is_empty())
}

/// Returns true if the pod became ready between the two versions.
pub(super) fn became_ready(old: &Pod, new: &Pod) -> bool {
    let ready = |pod: &Pod| condition(pod, "Ready").is_some_and(|c| c.status == "True");
    !ready(old) && ready(new)
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn now() -> Timestamp {
        "2024-01-01T12:00:00Z".parse().unwrap()
    }

    fn pod(name: &str, change: &[(&str, Value)]) -> Arc<Pod> {
        let mut value = json!({
            "metadata": {"name": name, "uid": name, "creationTimestamp": "2024-01-01T00:00:00Z", "labels": {"app": "web"}},
            "spec": {"nodeName": "n1", "containers": []},
            "status": {"phase": "Running",
                       "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2024-01-01T00:00:00Z"}],
                       "containerStatuses": [{"name": "c", "restartCount": 0, "ready": true, "image": "", "imageID": ""}]},
        });
        for (pointer, new) in change {
            *value.pointer_mut(pointer).unwrap() = new.clone();
        }
        Arc::new(ferrite_json::from_value(value).unwrap())
    }

    #[test]
    fn each_rank_decides_before_the_next() {
        let ready = "/status/conditions/0/status";
        let since = "/status/conditions/0/lastTransitionTime";
        let base = pod("z", &[]);
        for (what, first) in [
            ("unassigned", pod("a", &[("/spec/nodeName", Value::Null)])),
            ("pending", pod("a", &[("/status/phase", "Pending".into())])),
            ("unknown", pod("a", &[("/status/phase", "Unknown".into())])),
            ("not ready", pod("a", &[(ready, "False".into())])),
            (
                "cheaper",
                pod("a", &[("/metadata", json!({"uid": "a", "annotations": {DELETION_COST: "-1"}}))]),
            ),
            ("ready for a shorter time", pod("a", &[(since, "2024-01-01T11:59:00Z".into())])),
            ("restarted", pod("a", &[("/status/containerStatuses/0/restartCount", 3.into())])),
            ("younger", pod("a", &[("/metadata/creationTimestamp", "2024-01-01T11:59:00Z".into())])),
        ] {
            assert_eq!(deletion_order(&first, &base, 1, 1, now()), Ordering::Less, "{what}");
            assert_eq!(deletion_order(&base, &first, 1, 1, now()), Ordering::Greater, "{what}");
        }
        assert_eq!(deletion_order(&pod("a", &[]), &base, 1, 2, now()), Ordering::Greater, "crowded node");
    }

    #[test]
    fn plans() {
        let pods: Vec<_> = ["a", "b", "c"].iter().map(|name| pod(name, &[])).collect();
        assert!(matches!(plan(3, &pods, &pods, now()), Plan::Nothing));
        assert!(matches!(plan(5, &pods, &pods, now()), Plan::Create(2)));
        assert!(matches!(plan(5000, &pods, &pods, now()), Plan::Create(BURST)));
        assert!(matches!(plan(-1, &pods, &pods, now()), Plan::Delete(all) if all.len() == 3));
        let elsewhere = pod("d", &[("/spec/nodeName", "n2".into())]);
        let with_other: Vec<_> = pods.iter().cloned().chain([elsewhere]).collect();
        match plan(1, &with_other, &with_other, now()) {
            Plan::Delete(victims) => assert!(victims.iter().all(|pod| node_name(pod) == Some("n1"))),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn status_counts_and_failure_condition_comes_and_goes() {
        let active = [
            pod("a", &[]),
            pod("b", &[("/status/conditions/0/status", "False".into())]),
            pod("c", &[("/status/conditions/0/lastTransitionTime", "2024-01-01T11:59:55Z".into())]),
            pod("d", &[("/metadata/labels", json!({"app": "web", "tier": "x"}))]),
        ];
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let mut observed = Observed {
            previous: &ReplicaSetStatus::default(),
            generation: Some(2),
            template_labels: Some(&labels),
            min_ready_seconds: 10,
            active: &active,
            terminating: Some(1),
            failure: Some((Failure::Create, "quota".into())),
        };
        let failed = status(&observed, now());
        assert_eq!(
            (
                failed.replicas,
                failed.fully_labeled_replicas,
                failed.ready_replicas,
                failed.available_replicas
            ),
            (4, Some(4), Some(3), Some(2))
        );
        assert_eq!(failed.terminating_replicas, Some(1));
        let condition = &failed.conditions.as_ref().unwrap()[0];
        assert_eq!(
            (condition.reason.as_deref(), condition.message.as_deref()),
            (Some("FailedCreate"), Some("quota"))
        );

        observed.previous = &failed;
        observed.failure = Some((Failure::Create, "another".into()));
        assert_eq!(status(&observed, now()).conditions, failed.conditions, "same reason, nothing rewritten");
        observed.failure = None;
        assert_eq!(status(&observed, now()).conditions, None);
    }
}
