use std::collections::BTreeMap;
use std::sync::Arc;

use ferrite_client::Api;
use ferrite_json::{Value, json};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams};

use crate::support::Cluster;

fn daemon_set(name: &str, image: &str, strategy: Value) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": name}}, "updateStrategy": strategy,
            "template": {"metadata": {"labels": {"app": name}},
                "spec": {"containers": [{"name": "c", "image": image}]}}}})
}

fn image(image: &str) -> Value {
    json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}}})
}

/// Returns true if every eligible node runs the current template, by the rules of `kubectl rollout status`.
fn is_complete(set: &DaemonSet, nodes: i32) -> bool {
    let Some(status) = &set.status else { return false };
    status.observed_generation == set.metadata.generation
        && status.desired_number_scheduled == nodes
        && status.current_number_scheduled == nodes
        && status.updated_number_scheduled.unwrap_or(0) == nodes
        && status.number_available.unwrap_or(0) == nodes
        && status.number_misscheduled == 0
}

fn complete(nodes: i32) -> impl Fn(&[Arc<DaemonSet>]) -> Option<Arc<DaemonSet>> {
    move |sets| sets.iter().find(|set| is_complete(set, nodes)).cloned()
}

/// The image of the live pod on each node.
fn images(pods: &[Arc<Pod>]) -> BTreeMap<String, String> {
    let live = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
    live.filter_map(|pod| {
        let spec = pod.spec.as_ref()?;
        Some((spec.node_name.clone()?, spec.containers[0].image.clone()?))
    })
    .collect()
}

fn uids(pods: &[Arc<Pod>]) -> Vec<String> {
    let mut uids: Vec<_> = pods.iter().filter_map(|pod| pod.metadata.uid.clone()).collect();
    uids.sort();
    uids
}

impl Cluster {
    async fn patch_node(&self, name: &str, patch: Value) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.patch(name, &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
    }

    async fn patch_daemon_set(&self, name: &str, patch: Value) {
        let api = self.api::<DaemonSet>("default");
        let patched = api.patch(name, &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
        self.eventually("the patch", |sets: &[Arc<DaemonSet>]| {
            let set = sets.iter().find(|set| set.metadata.name == patched.metadata.name)?;
            (set.metadata.generation >= patched.metadata.generation).then_some(())
        })
        .await;
    }

    async fn nodes_with_pods(&self, what: &str, expected: &[&str]) {
        self.eventually(what, |pods: &[Arc<Pod>]| {
            (images(pods).keys().map(String::as_str).collect::<Vec<_>>() == expected).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_eligible_node_runs_one_daemon_pod() {
    let cluster = Cluster::start(&["n1", "n2"]).await;
    cluster.create::<DaemonSet>("default", daemon_set("agent", "a:1", json!(null))).await;
    cluster.eventually("pods on both nodes", complete(2)).await;
    cluster.nodes_with_pods("one pod for each node", &["n1", "n2"]).await;
    cluster
        .eventually("labels and pins", |pods: &[Arc<Pod>]| {
            pods.iter()
                .all(|pod| {
                    let labels = pod.metadata.labels.as_ref().unwrap();
                    labels.contains_key("controller-revision-hash")
                        && labels["pod-template-generation"] == "1"
                })
                .then_some(())
        })
        .await;

    cluster.add_node("n3").await;
    cluster.eventually("a pod on the new node", complete(3)).await;
    // A node that takes no new pods keeps its daemon, which then counts as misplaced.
    cluster.patch_node("n3", json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}})).await;
    cluster.patch_daemon_set("agent", json!({"metadata": {"labels": {"seen": "yes"}}})).await;
    cluster
        .eventually("a misplaced pod", |sets: &[Arc<DaemonSet>]| {
            let status = sets[0].status.as_ref()?;
            (status.number_misscheduled == 1 && status.desired_number_scheduled == 2).then_some(())
        })
        .await;
    cluster.patch_node("n3", json!({"spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}})).await;
    cluster.nodes_with_pods("the pod leaves a node that evicts", &["n1", "n2"]).await;
    cluster.eventually("two nodes", complete(2)).await;
    cluster.patch_node("n3", json!({"spec": {"taints": null}})).await;
    cluster.nodes_with_pods("it comes back", &["n1", "n2", "n3"]).await;
    // An unschedulable node runs daemons all the same.
    cluster.patch_node("n3", json!({"spec": {"unschedulable": true}})).await;
    cluster.eventually("three nodes", complete(3)).await;

    cluster
        .patch_daemon_set(
            "agent",
            json!({"spec": {"template": {"spec": {"nodeSelector": {"color": "blue"}}}}}),
        )
        .await;
    cluster.nodes_with_pods("no node is blue", &[]).await;
    cluster.eventually("none desired", complete(0)).await;
    cluster.patch_node("n2", json!({"metadata": {"labels": {"color": "blue"}}})).await;
    cluster.nodes_with_pods("one node is blue", &["n2"]).await;
    cluster.patch_node("n2", json!({"metadata": {"labels": {"color": "green"}}})).await;
    cluster.nodes_with_pods("none is blue any more", &[]).await;
    let strategy = json!({"spec": {"updateStrategy": {"type": "RollingUpdate"},
        "template": {"spec": {"nodeSelector": {"color": "green"}}}}});
    cluster.patch_daemon_set("agent", strategy).await;
    cluster.nodes_with_pods("green now", &["n2"]).await;
    cluster.eventually("one node", complete(1)).await;

    Api::<Node>::all(cluster.client.clone()).delete("n2", &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("no node is left", |sets: &[Arc<DaemonSet>]| {
            (sets[0].status.as_ref()?.desired_number_scheduled == 0).then_some(())
        })
        .await;
    let reasons = ["SuccessfulCreate", "SuccessfulDelete"];
    cluster
        .eventually("events", |events: &[Arc<Event>]| {
            let of = |reason: &str| {
                events.iter().any(|event| {
                    event.reason.as_deref() == Some(reason)
                        && event.involved_object.kind.as_deref() == Some("DaemonSet")
                })
            };
            reasons.iter().all(|reason| of(reason)).then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_set_rolls_out_and_back_without_needless_restarts() {
    let cluster = Cluster::start(&["n1", "n2", "n3"]).await;
    cluster.create::<DaemonSet>("default", daemon_set("agent", "a:1", json!(null))).await;
    cluster.eventually("the first revision", complete(3)).await;

    cluster.patch_daemon_set("agent", image("a:2")).await;
    let rolled = cluster.eventually("the update", complete(3)).await;
    assert_eq!(
        rolled.metadata.annotations.as_ref().unwrap()["deprecated.daemonset.template.generation"],
        "2"
    );
    let revisions = cluster
        .eventually("two revisions", |all: &[Arc<ControllerRevision>]| {
            let mut all = all.to_vec();
            all.sort_by_key(|revision| revision.revision);
            (all.len() == 2).then_some(all)
        })
        .await;
    assert_eq!(revisions.iter().map(|revision| revision.revision).collect::<Vec<_>>(), [1, 2]);

    // As `kubectl rollout undo` does.
    let data = ferrite_json::to_value(revisions[0].data.as_ref().unwrap()).unwrap();
    cluster.patch_daemon_set("agent", data).await;
    cluster.eventually("the roll-back", complete(3)).await;
    cluster
        .eventually("old images", |pods: &[Arc<Pod>]| {
            let images = images(pods);
            (images.len() == 3 && images.values().all(|image| image == "a:1")).then_some(())
        })
        .await;
    cluster
        .eventually("the first revision is the third", |all: &[Arc<ControllerRevision>]| {
            let first = all.iter().find(|r| r.metadata.name == revisions[0].metadata.name)?;
            (all.len() == 2 && first.revision == 3).then_some(())
        })
        .await;

    // A rollout that hangs is rolled back: the pods that it did not reach stay.
    let before =
        cluster.eventually("three pods", |pods: &[Arc<Pod>]| (pods.len() == 3).then(|| uids(pods))).await;
    let stuck = json!({"spec": {"template": {"metadata": {"labels": {"stuck": "yes"}}}}});
    cluster.patch_daemon_set("agent", stuck).await;
    cluster
        .eventually("one pod that never becomes ready", |pods: &[Arc<Pod>]| {
            let stuck = pods.iter().filter(|pod| pod.metadata.labels.as_ref().unwrap().contains_key("stuck"));
            (pods.len() == 3 && stuck.count() == 1).then_some(())
        })
        .await;
    let undo = json!({"spec": {"template": {"metadata": {"labels": {"stuck": null}}}}});
    cluster.patch_daemon_set("agent", undo).await;
    cluster.eventually("whole again", complete(3)).await;
    let after =
        cluster.eventually("three pods", |pods: &[Arc<Pod>]| (pods.len() == 3).then(|| uids(pods))).await;
    assert_eq!(after.iter().filter(|uid| before.contains(uid)).count(), 2, "two pods were never touched");

    let surge = json!({"spec": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}});
    cluster.patch_daemon_set("agent", surge).await;
    cluster.patch_daemon_set("agent", image("a:3")).await;
    cluster
        .eventually("the update with surge", |pods: &[Arc<Pod>]| {
            for node in ["n1", "n2", "n3"] {
                let serves = |pod: &&Arc<Pod>| {
                    let ready = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
                    pod.spec.as_ref().unwrap().node_name.as_deref() == Some(node)
                        && pod.metadata.deletion_timestamp.is_none()
                        && ready.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
                };
                assert!(pods.iter().any(|pod| serves(&pod)), "{node} is without a pod that serves");
            }
            (pods.len() == 3 && images(pods).values().all(|image| image == "a:3")).then_some(())
        })
        .await;
    cluster.eventually("it is complete", complete(3)).await;

    let on_delete = json!({"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}});
    cluster.patch_daemon_set("agent", on_delete).await;
    cluster.patch_daemon_set("agent", image("a:4")).await;
    cluster
        .eventually("nothing is updated", |sets: &[Arc<DaemonSet>]| {
            let status = sets[0].status.as_ref()?;
            (status.observed_generation == sets[0].metadata.generation
                && status.updated_number_scheduled.unwrap_or(0) == 0)
                .then_some(())
        })
        .await;
    let old = cluster
        .eventually("the pod of a node", |pods: &[Arc<Pod>]| {
            pods.iter().find(|pod| pod.spec.as_ref().unwrap().node_name.as_deref() == Some("n1")).cloned()
        })
        .await;
    let pods = cluster.api::<Pod>("default");
    pods.delete(old.metadata.name.as_deref().unwrap(), &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("the deleted one is new", |pods: &[Arc<Pod>]| {
            let images = images(pods);
            (images.len() == 3 && images["n1"] == "a:4" && images["n2"] == "a:3").then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_daemons_are_replaced_and_deletion_takes_or_leaves_the_pods() {
    let cluster = Cluster::start(&["n1", "n2"]).await;
    cluster.create::<DaemonSet>("default", daemon_set("agent", "a:1", json!(null))).await;
    cluster.eventually("pods on both nodes", complete(2)).await;
    let pods = cluster.api::<Pod>("default");
    let victim = cluster.eventually("a pod", |pods: &[Arc<Pod>]| pods.first().cloned()).await;
    let failed = Patch::Merge(json!({"status": {"phase": "Failed"}}));
    let name = victim.metadata.name.as_deref().unwrap();
    pods.patch_status(name, &PatchParams::default(), &failed).await.unwrap();
    cluster
        .eventually("another pod", |pods: &[Arc<Pod>]| {
            (images(pods).len() == 2 && pods.iter().all(|pod| pod.metadata.uid != victim.metadata.uid))
                .then_some(())
        })
        .await;
    cluster
        .eventually("the event", |events: &[Arc<Event>]| {
            events.iter().find(|event| event.reason.as_deref() == Some("FailedDaemonPod")).map(|_| ())
        })
        .await;
    cluster.eventually("whole", complete(2)).await;

    let sets = cluster.api::<DaemonSet>("default");
    let before =
        cluster.eventually("two pods", |pods: &[Arc<Pod>]| (pods.len() == 2).then(|| uids(pods))).await;
    sets.delete("agent", &DeleteParams::orphan()).await.unwrap();
    cluster.eventually("the set is gone", |sets: &[Arc<DaemonSet>]| sets.is_empty().then_some(())).await;
    cluster
        .eventually("orphans", |pods: &[Arc<Pod>]| {
            pods.iter().all(|pod| pod.metadata.owner_references.is_none()).then_some(())
        })
        .await;
    cluster.create::<DaemonSet>("default", daemon_set("agent", "a:1", json!(null))).await;
    cluster.eventually("the pods are adopted as they are", complete(2)).await;
    let after =
        cluster.eventually("two pods", |pods: &[Arc<Pod>]| (pods.len() == 2).then(|| uids(pods))).await;
    assert_eq!(before, after);
    sets.delete("agent", &DeleteParams::foreground()).await.unwrap();
    cluster.eventually("the set is gone", |sets: &[Arc<DaemonSet>]| sets.is_empty().then_some(())).await;
    cluster.eventually("its pods are too", |pods: &[Arc<Pod>]| pods.is_empty().then_some(())).await;
    cluster
        .eventually("and its revisions", |all: &[Arc<ControllerRevision>]| all.is_empty().then_some(()))
        .await;
    cluster.create::<DaemonSet>("default", daemon_set("other", "a:1", json!(null))).await;
    cluster.eventually("pods on both nodes", complete(2)).await;
    sets.delete("other", &DeleteParams::background()).await.unwrap();
    cluster.eventually("no pods", |pods: &[Arc<Pod>]| pods.is_empty().then_some(())).await;
    cluster.stop().await;
}
