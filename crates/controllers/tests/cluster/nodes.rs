use ferrite_client::Api;
use std::sync::Arc;
use std::time::Duration;

use ferrite_controllers::{Config, NodeCidrs};
use ferrite_json::json;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams};

use crate::support::Cluster;

fn taints(node: &Node) -> Vec<String> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let mut told: Vec<_> = taints
        .iter()
        .map(|taint| format!("{}:{}", taint.key.trim_start_matches("node.kubernetes.io/"), taint.effect))
        .collect();
    told.sort();
    told
}

fn named<'a>(nodes: &'a [Arc<Node>], name: &str) -> Option<&'a Arc<Node>> {
    nodes.iter().find(|node| node.metadata.name.as_deref() == Some(name))
}

fn ready(node: &Node) -> Option<&str> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == "Ready").map(|condition| condition.status.as_str())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_not_ready_is_tainted_and_loses_pods_that_do_not_tolerate_it() {
    let cluster = Cluster::start(&["n1", "n2"]).await;
    let pod = |name: &str, tolerations: ferrite_json::Value| {
        json!({"metadata": {"name": name}, "spec": {"nodeName": "n1", "tolerations": tolerations,
               "containers": [{"name": "c", "image": "a"}]}})
    };
    let for_ever =
        json!([{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}]);
    let briefly = json!([{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
                          "tolerationSeconds": 1}]);
    cluster.create::<Pod>("default", pod("stays", for_ever)).await;
    cluster.create::<Pod>("default", pod("leaves", briefly)).await;
    cluster
        .eventually("both run", |pods: &[Arc<Pod>]| {
            let running =
                |pod: &&Arc<Pod>| pod.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Running"));
            (pods.iter().filter(running).count() == 2).then_some(())
        })
        .await;

    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let status = |status: &str| {
        Patch::Strategic(json!({"status": {"conditions": [{"type": "Ready", "status": status}]}}))
    };
    nodes.patch_status("n1", &PatchParams::default(), &status("False")).await.unwrap();
    cluster
        .eventually("taints", |nodes: &[Arc<Node>]| {
            (taints(named(nodes, "n1")?) == ["not-ready:NoExecute", "not-ready:NoSchedule"]).then_some(())
        })
        .await;
    cluster
        .eventually("only the tolerant pod", |pods: &[Arc<Pod>]| {
            (pods.len() == 1 && pods[0].metadata.name.as_deref() == Some("stays")).then_some(())
        })
        .await;
    nodes.patch_status("n1", &PatchParams::default(), &status("True")).await.unwrap();
    cluster
        .eventually("no taints", |nodes: &[Arc<Node>]| taints(named(nodes, "n1")?).is_empty().then_some(()))
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_fall_silent_become_unknown_but_pods_stay_when_all_are_lost() {
    let grace = Duration::from_millis(300);
    let config = Config { node_monitor_grace: grace, node_startup_grace: grace, ..Config::default() };
    let cluster = Cluster::start_with(&["n1"], config).await;
    cluster
        .eventually("the node unknown and tainted", |nodes: &[Arc<Node>]| {
            let node = named(nodes, "n1")?;
            (ready(node) == Some("Unknown") && taints(node) == ["unreachable:NoSchedule"]).then_some(())
        })
        .await;
    cluster.stop().await;
}

fn pod_cidrs(node: &Node) -> Vec<&str> {
    let cidrs = node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default();
    cidrs.iter().map(String::as_str).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_get_pod_cidrs_and_give_them_back() {
    let range = |text: &str| ferrite_api::Cidr::parse(text).unwrap();
    let cidrs = NodeCidrs::new(vec![(range("10.244.0.0/23"), 24), (range("fd00::/63"), 64)]).unwrap();
    let config = Config { node_cidrs: Some(cidrs), ..Config::default() };
    let cluster = Cluster::start_with(&["n1"], config).await;
    let has = |name: &'static str, want: [&'static str; 2]| {
        move |nodes: &[Arc<Node>]| {
            let node = named(nodes, name)?;
            assert!(pod_cidrs(node).is_empty() || pod_cidrs(node) == want, "{:?}", pod_cidrs(node));
            (pod_cidrs(node) == want).then_some(())
        }
    };
    cluster.eventually("the first range", has("n1", ["10.244.0.0/24", "fd00::/64"])).await;
    cluster.add_node("n2").await;
    cluster.eventually("the second range", has("n2", ["10.244.1.0/24", "fd00:0:0:1::/64"])).await;
    cluster.add_node("n3").await;
    cluster
        .eventually("an event", |events: &[Arc<k8s_openapi::api::core::v1::Event>]| {
            let told = |event: &&Arc<k8s_openapi::api::core::v1::Event>| {
                event.reason.as_deref() == Some("CIDRNotAvailable")
                    && event.involved_object.name.as_deref() == Some("n3")
            };
            events.iter().find(told).map(|_| ())
        })
        .await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    nodes.delete("n1", &kube::api::DeleteParams::default()).await.unwrap();
    cluster.eventually("what the first had", has("n3", ["10.244.0.0/24", "fd00::/64"])).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_node_that_is_out_of_service_are_ended_without_it() {
    let cluster = Cluster::start(&["n1", "n2"]).await;
    // The finalizer keeps the pod for us to see; nobody on the node ends it.
    let pod = json!({"metadata": {"name": "p", "labels": {"keeps-room": ""}, "finalizers": ["example.com/kept"]},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "a"}],
            "tolerations": [{"operator": "Exists"}]}});
    cluster.create::<Pod>("default", pod).await;
    let in_phase = |phase: &'static str| {
        cluster.eventually(phase, move |pods: &[Arc<Pod>]| {
            let pod = pods.first()?;
            (pod.status.as_ref()?.phase.as_deref() == Some(phase)).then(|| pod.clone())
        })
    };
    in_phase("Running").await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let silent = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Strategic(silent)).await.unwrap();
    cluster.api::<Pod>("default").delete("p", &kube::api::DeleteParams::default()).await.unwrap();
    let taint = json!({"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown",
        "effect": "NoExecute"}]}});
    nodes.patch("n1", &PatchParams::default(), &Patch::Strategic(taint)).await.unwrap();
    let ended = in_phase("Failed").await;
    assert!(ended.metadata.deletion_timestamp.is_some());
    cluster.stop().await;
}
