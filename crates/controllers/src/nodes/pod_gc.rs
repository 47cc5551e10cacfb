//! Removes pods nobody else will: those of nodes that are gone, and old finished ones.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, Change, Controller, Informer, ObjectKey, is_conflict, is_not_found};
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

/// What may need cleaning.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Task {
    /// A node that seems to be gone.
    Node(String),
    /// A pod that is being deleted and has no node whose kubelet would finish that.
    Unscheduled(ObjectKey),
    /// All finished pods together.
    Finished,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Task::Node(name) => write!(f, "node {name}"),
            Task::Unscheduled(key) => write!(f, "unscheduled {key}"),
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
    Controller::new(NAME, context.config.workers, &context.scope)
        .watches(&collector.nodes, |change, queue| {
            if let Change::Deleted(node) = change {
                queue.add_after(Task::Node(node.metadata.name.clone().unwrap_or_default()), QUARANTINE);
            }
        })
        .watches(&collector.pods, move |change, queue| {
            let (Change::Added(pod) | Change::Updated { new: pod, .. }) = change else { return };
            match node_name(pod) {
                Some(node) if observer.nodes.get(&ObjectKey::cluster(node)).is_none() => {
                    queue.add_after(Task::Node(node.to_owned()), QUARANTINE);
                }
                None if is_terminating(pod) => queue.add(Task::Unscheduled(ObjectKey::of(&**pod))),
                _ => {}
            }
            if observer.threshold > 0 && is_finished(pod) && observer.pods.len() > observer.threshold {
                queue.add(Task::Finished);
            }
        })
        .run_with(collector.clone(), |collector, task| async move { collector.sync(task).await });
}

/// The finished pods beyond `threshold`, those that ended first.
fn surplus(pods: &[Arc<Pod>], threshold: usize) -> Vec<Arc<Pod>> {
    let mut finished: Vec<_> =
        pods.iter().filter(|pod| is_finished(pod) && !is_terminating(pod)).cloned().collect();
    finished.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0));
    finished.truncate(finished.len().saturating_sub(threshold));
    finished
}

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
                    self.remove(&pod, Some("PodGC: node no longer exists")).await?;
                }
            }
            Task::Unscheduled(key) => {
                let pod = self.pods.get(&key);
                if let Some(pod) = pod.filter(|pod| is_terminating(pod) && node_name(pod).is_none()) {
                    self.remove(&pod, None).await?;
                }
            }
            Task::Finished => {
                for pod in surplus(&self.pods.list(), self.threshold) {
                    self.remove(&pod, None).await?;
                }
            }
        }
        Ok(None)
    }

    /// Removes the pod at once. `disruption` says why, for a pod that had not ended.
    async fn remove(&self, pod: &Pod, disruption: Option<&str>) -> Result<(), SyncError> {
        let key = ObjectKey::of(pod);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        info!(pod = %key, "removing");
        if let Some(message) = disruption
            && !is_finished(pod)
        {
            let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"phase": "Failed", "conditions": [{
                "type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": message,
                "lastTransitionTime": Time(Timestamp::now())}]}});
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
    }
}
