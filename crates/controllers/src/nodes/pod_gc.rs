//! Removes pods nobody else will: those of nodes that are gone or out of service, and old finished ones.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferrite_client::{Api, Change, Controller, Informer, ObjectKey, RateLimits, is_conflict, is_not_found};
use ferrite_component::metrics::{Counter, Family, registry};
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use tracing::info;

use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{self, BY_NODE, is_finished, is_terminating, node_name};

const NAME: &str = "pod-garbage-collector-controller";
/// A node that is missing may only be late: its pods are left alone for this long.
const QUARANTINE: Duration = Duration::from_secs(40);
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// A candidate for cleaning up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Task {
    /// A node that seems to be gone.
    Node(String),
    /// A pod that is being deleted and has no node whose kubelet would finish that.
    Unscheduled(ObjectKey),
    /// A node that somebody has declared out of service.
    OutOfService(String),
    /// All finished pods together.
    Finished,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Task::Node(name) => write!(f, "node {name}"),
            Task::Unscheduled(key) => write!(f, "unscheduled {key}"),
            Task::OutOfService(name) => write!(f, "out-of-service node {name}"),
            Task::Finished => f.write_str("finished pods"),
        }
    }
}

struct Collector {
    client: Client,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    threshold: usize,
}

pub(crate) fn start(context: &Context) {
    let collector = Arc::new(Collector {
        client: context.client.clone(),
        nodes: context.informers.get(),
        pods: context.informers.get(),
        threshold: context.config.terminated_pod_threshold,
    });
    collector.pods.add_index(BY_NODE, pods::node_index);
    let observer = collector.clone();
    let kit: Controller<Task> = context.declared(NAME, context.workers(NAME), RateLimits::default());
    kit.watches(&collector.nodes, |change, queue| {
        let name = || change.object().metadata.name.clone().unwrap_or_default();
        match change {
            Change::Deleted(_) => queue.add_after(Task::Node(name()), QUARANTINE),
            Change::Added(node) | Change::Updated { new: node, .. } if is_out_of_service(node) => {
                queue.add(Task::OutOfService(name()));
            }
            Change::Added(_) | Change::Updated { .. } => {}
        }
    })
    .watches(&collector.pods, move |change, queue| {
        let (Change::Added(pod) | Change::Updated { new: pod, .. }) = change else { return };
        match node_name(pod) {
            Some(name) => match observer.nodes.get(&ObjectKey::cluster(name)) {
                None => queue.add_after(Task::Node(name.to_owned()), QUARANTINE),
                Some(node) if is_terminating(pod) && is_out_of_service(&node) => {
                    queue.add(Task::OutOfService(name.to_owned()));
                }
                Some(_) => {}
            },
            None if is_terminating(pod) => queue.add(Task::Unscheduled(ObjectKey::of(&**pod))),
            _ => {}
        }
        if observer.threshold > 0 && is_finished(pod) && observer.pods.len() > observer.threshold {
            queue.add(Task::Finished);
        }
    })
    .run_with(collector.clone(), |collector, task| async move { collector.sync(task).await });
}

/// True for a node that does not answer and that somebody has declared out of service: its kubelet will end no pod.
fn is_out_of_service(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    !ready && taints.into_iter().flatten().any(|taint| taint.key == OUT_OF_SERVICE)
}

/// The finished pods beyond `threshold`: those that their node evicted, then those that are oldest.
fn surplus(pods: &[Arc<Pod>], threshold: usize) -> Vec<Arc<Pod>> {
    let mut finished: Vec<_> =
        pods.iter().filter(|pod| is_finished(pod) && !is_terminating(pod)).cloned().collect();
    finished.sort_by_cached_key(|pod| {
        let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (!is_evicted(pod), created, pod.metadata.name.clone())
    });
    finished.truncate(finished.len().saturating_sub(threshold));
    finished
}

fn is_evicted(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    pods::phase(pod) == "Failed" && status.is_some_and(|status| status.reason.as_deref() == Some("Evicted"))
}

/// Why a pod is removed, as upstream's metrics call it.
#[derive(Debug, Clone, Copy)]
enum Reason {
    Terminated,
    OutOfService,
    Orphaned,
    Unscheduled,
}

impl Reason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Terminated => "terminated",
            Self::OutOfService => "out-of-service",
            Self::Orphaned => "orphaned",
            Self::Unscheduled => "unscheduled",
        }
    }

    /// The message of the condition `DisruptionTarget`, where the pod gets one.
    fn disruption(self) -> Option<&'static str> {
        matches!(self, Self::Orphaned).then_some("PodGC: node no longer exists")
    }
}

static DELETED: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Number of pods that are being forcefully deleted since the Pod GC Controller started.";
    registry().counter("pod_gc_collector_force_delete_pods_total", help, &["namespace", "reason"])
});

static FAILED: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help =
        "Number of errors encountered when forcefully deleting the pods since the Pod GC Controller started.";
    registry().counter("pod_gc_collector_force_delete_pod_errors_total", help, &["namespace", "reason"])
});

impl Collector {
    async fn sync(&self, task: Task) -> Result<Option<Duration>, SyncError> {
        match task {
            Task::Node(name) => {
                if self.nodes.get(&ObjectKey::cluster(name.clone())).is_some() {
                    return Ok(None);
                }
                match Api::<Node>::all(self.client.clone()).get(&name).await {
                    Ok(_) => return Ok(None),
                    Err(error) if is_not_found(&error) => {}
                    Err(error) => return Err(error).during(|| format!("look for node {name}")),
                }
                for pod in self.pods.by_index(BY_NODE, &name) {
                    self.remove(&pod, Reason::Orphaned).await?;
                }
            }
            Task::Unscheduled(key) => {
                let pod = self.pods.get(&key);
                if let Some(pod) = pod.filter(|pod| is_terminating(pod) && node_name(pod).is_none()) {
                    self.remove(&pod, Reason::Unscheduled).await?;
                }
            }
            Task::OutOfService(name) => {
                if self
                    .nodes
                    .get(&ObjectKey::cluster(name.clone()))
                    .is_some_and(|node| is_out_of_service(&node))
                {
                    for pod in self.pods.by_index(BY_NODE, &name).iter().filter(|pod| is_terminating(pod)) {
                        self.remove(pod, Reason::OutOfService).await?;
                    }
                }
            }
            Task::Finished => {
                for pod in surplus(&self.pods.list(), self.threshold) {
                    self.remove(&pod, Reason::Terminated).await?;
                }
            }
        }
        Ok(None)
    }

    async fn remove(&self, pod: &Pod, reason: Reason) -> Result<(), SyncError> {
        let key = ObjectKey::of(pod);
        info!(pod = %key, reason = reason.as_str(), "removing");
        let labels = [&*key.namespace, reason.as_str()];
        DELETED.with(&labels).increment();
        self.force(pod, &key, reason).await.inspect_err(|_| FAILED.with(&labels).increment())
    }

    /// Removes the pod at once. One that had not ended has failed: no kubelet is there to say so.
    async fn force(&self, pod: &Pod, key: &ObjectKey, reason: Reason) -> Result<(), SyncError> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        if !is_finished(pod) {
            let mut status = json!({"phase": "Failed"});
            if let Some(message) = reason.disruption() {
                status["conditions"] = json!([{"type": "DisruptionTarget", "status": "True",
                    "reason": "DeletionByPodGC", "message": message,
                    "lastTransitionTime": Time(Timestamp::now())}]);
            }
            let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": status});
            match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) || is_conflict(&error) => return Ok(()),
                Err(error) => return Err(error).during(|| format!("mark pod {key} as failed")),
            }
        }
        let same = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
        match api.delete(&key.name, &DeleteParams::default().grace_period(0).preconditions(same)).await {
            Ok(_) => Ok(()),
            Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
            Err(error) => Err(error).during(|| format!("remove pod {key}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn the_oldest_finished_pods_go() {
        let pod = |name: &str, phase: &str, created: &str| -> Arc<Pod> {
            Arc::new(
                ferrite_json::from_value(json!({"metadata": {"name": name, "creationTimestamp": created},
                                                   "status": {"phase": phase}}))
                .unwrap(),
            )
        };
        let pods = [
            pod("new", "Failed", "2024-01-03T00:00:00Z"),
            pod("running", "Running", "2024-01-01T00:00:00Z"),
            pod("old", "Succeeded", "2024-01-01T00:00:00Z"),
            pod("middle", "Succeeded", "2024-01-02T00:00:00Z"),
        ];
        let names = |threshold| -> Vec<String> {
            surplus(&pods, threshold).iter().map(|pod| pod.metadata.name.clone().unwrap()).collect()
        };
        assert_eq!(names(1), ["old", "middle"]);
        assert!(names(3).is_empty());
        let mut evicted = (*pods[0]).clone();
        evicted.status.as_mut().unwrap().reason = Some("Evicted".into());
        let pods = [Arc::new(evicted), pods[2].clone()];
        assert_eq!(surplus(&pods, 1)[0].metadata.name.as_deref(), Some("new"), "evicted pods go first");
    }

    #[test]
    fn a_node_is_out_of_service_when_it_says_nothing_and_somebody_says_so() {
        let node = |ready: &str, taint: &str| -> Node {
            ferrite_json::from_value(json!({"metadata": {"name": "n"},
                "spec": {"taints": [{"key": taint, "effect": "NoExecute"}]},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}}))
            .unwrap()
        };
        for (ready, taint, expected) in [
            ("False", OUT_OF_SERVICE, true),
            ("Unknown", OUT_OF_SERVICE, true),
            ("True", OUT_OF_SERVICE, false),
            ("Unknown", "node.kubernetes.io/unreachable", false),
        ] {
            assert_eq!(is_out_of_service(&node(ready, taint)), expected, "{ready} {taint}");
        }
    }
}
