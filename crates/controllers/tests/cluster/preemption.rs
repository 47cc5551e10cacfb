//! The behaviours of upstream's end-to-end tests of preemption.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use ferrite_client::{Api, Informer};
use ferrite_json::{Value, json};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{Patch, PatchParams, PostParams};

use crate::support::Cluster;

const RESOURCE: &str = "example.com/fakecpu";

/// A cluster whose nodes have `amount` of an extended resource, with the priority classes p1 to p4.
async fn cluster(nodes: &[&str], amount: u32) -> Cluster {
    let cluster = Cluster::start(nodes).await;
    let classes: Api<PriorityClass> = Api::all(cluster.client.clone());
    for value in 1..=4 {
        let class = json!({"metadata": {"name": format!("p{value}")}, "value": value});
        classes.create(&PostParams::default(), &ferrite_json::from_value(class).unwrap()).await.unwrap();
    }
    let api: Api<Node> = Api::all(cluster.client.clone());
    for node in nodes {
        let has = json!({(RESOURCE): amount.to_string()});
        let status = json!({"status": {"capacity": has, "allocatable": has}});
        api.patch_status(node, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }
    let wanted = nodes.len();
    cluster
        .eventually("the extended resource", |nodes: &[Arc<Node>]| {
            let has = |node: &&Arc<Node>| {
                node.status.as_ref().and_then(|status| status.allocatable.as_ref()?.get(RESOURCE)).is_some()
            };
            (nodes.iter().filter(has).count() == wanted).then_some(())
        })
        .await;
    cluster
}

fn pod(name: &str, class: &str, amount: u32) -> Value {
    let amount = json!({(RESOURCE): amount.to_string()});
    json!({"metadata": {"name": name, "labels": {"app": name}},
        "spec": {"priorityClassName": class, "containers": [{"name": "c", "image": "a",
            "resources": {"requests": amount, "limits": amount}}]}})
}

fn node_of(pods: &[Arc<Pod>], name: &str) -> Option<String> {
    let pod = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(name))?;
    let is_running = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
    pod.spec.as_ref()?.node_name.clone().filter(|_| is_running)
}

async fn running(cluster: &Cluster, name: &str) -> String {
    cluster.eventually(name, |pods: &[Arc<Pod>]| node_of(pods, name)).await
}

async fn gone(cluster: &Cluster, name: &str) {
    let is_there = |pods: &[Arc<Pod>]| pods.iter().any(|pod| pod.metadata.name.as_deref() == Some(name));
    cluster.eventually(name, |pods: &[Arc<Pod>]| (!is_there(pods)).then_some(())).await;
}

fn names(cluster: &Cluster) -> BTreeSet<String> {
    let pods: Informer<Pod> = cluster.context.informers.get();
    pods.list().iter().filter_map(|pod| pod.metadata.name.clone()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_least_important_pod_makes_room() {
    let cluster = cluster(&["a", "b"], 5).await;
    cluster.create::<Pod>("default", pod("low", "p1", 3)).await;
    let low_on = running(&cluster, "low").await;
    cluster.create::<Pod>("default", pod("medium", "p2", 3)).await;
    assert_ne!(running(&cluster, "medium").await, low_on);
    let high: Pod = cluster.create("default", pod("high", "p3", 3)).await;
    assert_eq!(running(&cluster, "high").await, low_on);
    gone(&cluster, "low").await;
    assert!(names(&cluster).contains("medium"));

    let message = format!("Preempted by pod {} on node {low_on}", high.metadata.uid.unwrap());
    cluster
        .eventually("the event", |events: &[Arc<Event>]| {
            let event = events.iter().find(|event| event.reason.as_deref() == Some("Preempted"))?;
            assert_eq!(event.message.as_deref(), Some(message.as_str()));
            assert_eq!(event.involved_object.name.as_deref(), Some("low"));
            Some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_critical_pod_preempts() {
    let cluster = cluster(&["a"], 5).await;
    cluster.create::<Pod>("default", pod("low", "p1", 3)).await;
    running(&cluster, "low").await;
    cluster.create::<Pod>("kube-system", pod("critical", "system-cluster-critical", 3)).await;
    running(&cluster, "critical").await;
    gone(&cluster, "low").await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_victim_has_the_disruption_condition_and_a_budget_is_respected() {
    let cluster = cluster(&["a", "b"], 5).await;
    // A finalizer keeps the victim, so that its condition can be read.
    let with_finalizer = |name: &str| {
        let mut pod = pod(name, "p1", 3);
        pod["metadata"]["finalizers"] = json!(["example.com/test"]);
        pod
    };
    cluster.create::<Pod>("default", with_finalizer("free")).await;
    cluster.create::<Pod>("default", with_finalizer("protected")).await;
    let free_on = running(&cluster, "free").await;
    running(&cluster, "protected").await;
    cluster
        .create::<PodDisruptionBudget>(
            "default",
            json!({"metadata": {"name": "b"}, "spec": {"minAvailable": 1,
                "selector": {"matchLabels": {"app": "protected"}}}}),
        )
        .await;
    cluster
        .eventually("the budget", |budgets: &[Arc<PodDisruptionBudget>]| {
            (budgets.first()?.status.as_ref()?.expected_pods == Some(1)).then_some(())
        })
        .await;
    cluster.create::<Pod>("default", pod("high", "p3", 3)).await;
    assert_eq!(running(&cluster, "high").await, free_on);
    let pods: Api<Pod> = cluster.api("default");
    let victim = pods.get("free").await.unwrap();
    assert!(victim.metadata.deletion_timestamp.is_some());
    let conditions = victim.status.unwrap().conditions.unwrap();
    let target = conditions.iter().find(|condition| condition.type_ == "DisruptionTarget").unwrap();
    assert_eq!((target.status.as_str(), target.reason.as_deref()), ("True", Some("PreemptionByScheduler")));
    assert_eq!(
        target.message.as_deref(),
        Some("default-scheduler: preempting to accommodate a higher priority pod")
    );
    assert!(pods.get("protected").await.unwrap().metadata.deletion_timestamp.is_none());
    for name in ["free", "protected"] {
        let none = json!({"metadata": {"finalizers": null}});
        pods.patch(name, &PatchParams::default(), &Patch::Merge(none)).await.unwrap();
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spreading_decides_how_many_pods_go() {
    let cluster = cluster(&["a", "b"], 10).await;
    let labelled = |name: &str, class: &str, amount: u32| {
        let mut pod = pod(name, class, amount);
        pod["metadata"]["labels"] = json!({"spread": "yes"});
        pod
    };
    cluster.create::<Pod>("default", labelled("high", "p3", 9)).await;
    let high_on = running(&cluster, "high").await;
    for name in ["low-1", "low-2", "low-3"] {
        cluster.create::<Pod>("default", labelled(name, "p1", 3)).await;
        assert_ne!(running(&cluster, name).await, high_on);
    }
    let mut medium = labelled("medium", "p2", 3);
    medium["spec"]["topologySpreadConstraints"] = json!([{"maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchExpressions": [{"key": "spread", "operator": "Exists"}]}}]);
    cluster.create::<Pod>("default", medium).await;
    assert_ne!(running(&cluster, "medium").await, high_on);
    cluster.eventually("three pods", |pods: &[Arc<Pod>]| (pods.len() == 3).then_some(())).await;
    let kinds: BTreeSet<String> =
        names(&cluster).iter().map(|name| name.split('-').next().unwrap().to_owned()).collect();
    assert_eq!(kinds, ["high", "low", "medium"].map(String::from).into());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_sets_lose_each_pod_once() {
    let cluster = cluster(&["a"], 1000).await;
    let seen: Arc<Mutex<BTreeMap<String, BTreeSet<String>>>> = Arc::default();
    let pods: Informer<Pod> = cluster.context.informers.get();
    let watching = seen.clone();
    pods.subscribe(move |change| {
        let meta = &change.object().metadata;
        let owner = meta.labels.as_ref().and_then(|labels| labels.get("set").cloned()).unwrap_or_default();
        let name = meta.name.clone().unwrap_or_default();
        watching.lock().unwrap().entry(owner).or_default().insert(name);
    });
    for (name, class, amount) in [("rs1", "p1", 200), ("rs2", "p2", 300), ("rs3", "p3", 450)] {
        let labels = json!({"set": name});
        let spec = pod(name, class, amount)["spec"].clone();
        cluster
            .create::<ReplicaSet>(
                "default",
                json!({"metadata": {"name": name}, "spec": {"replicas": 1, "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": spec}}}),
            )
            .await;
        cluster
            .eventually(name, |sets: &[Arc<ReplicaSet>]| {
                let set = sets.iter().find(|set| set.metadata.name.as_deref() == Some(name))?;
                (set.status.as_ref()?.ready_replicas == Some(1)).then_some(())
            })
            .await;
    }
    cluster.create::<Pod>("default", pod("pod4", "p4", 500)).await;
    running(&cluster, "pod4").await;
    // The replacements wait: their condition says why, and nothing else is preempted for them.
    cluster
        .eventually("two waiting replacements", |pods: &[Arc<Pod>]| {
            let waits = |pod: &&Arc<Pod>| {
                let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
                conditions.into_iter().flatten().any(|condition| {
                    condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable")
                })
            };
            (pods.iter().filter(waits).count() == 2 && pods.len() == 4).then_some(())
        })
        .await;
    let counts: BTreeMap<String, usize> = seen
        .lock()
        .unwrap()
        .iter()
        .filter(|(set, _)| !set.is_empty())
        .map(|(set, pods)| (set.clone(), pods.len()))
        .collect();
    assert_eq!(counts, [("rs1", 2), ("rs2", 2), ("rs3", 1)].map(|(set, n)| (set.to_owned(), n)).into());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_made_for_a_pod_is_not_taken_by_another() {
    let cluster = cluster(&["a"], 4).await;
    for name in ["low-1", "low-2"] {
        let mut low = pod(name, "p1", 2);
        low["metadata"]["finalizers"] = json!(["example.com/test"]);
        low["metadata"]["labels"]["keeps-room"] = "yes".into();
        cluster.create::<Pod>("default", low).await;
        running(&cluster, name).await;
    }
    cluster.create::<Pod>("default", pod("high", "p4", 4)).await;
    // The victims do not end, so the nomination can be seen.
    cluster
        .eventually("the nomination", |pods: &[Arc<Pod>]| {
            let high = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("high"))?;
            let nominated = high.status.as_ref()?.nominated_node_name.as_deref();
            let leaving = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).count();
            (nominated == Some("a") && leaving == 2).then_some(())
        })
        .await;
    let pods: Api<Pod> = cluster.api("default");
    let release = |name: &'static str| {
        let pods = pods.clone();
        async move {
            let none = json!({"metadata": {"finalizers": null}});
            pods.patch(name, &PatchParams::default(), &Patch::Merge(none)).await.unwrap();
        }
    };
    release("low-1").await;
    gone(&cluster, "low-1").await;
    cluster.create::<Pod>("default", pod("thief", "p2", 2)).await;
    cluster
        .eventually("the thief's condition", |pods: &[Arc<Pod>]| {
            let thief = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("thief"))?;
            let conditions = thief.status.as_ref()?.conditions.as_ref()?;
            conditions
                .iter()
                .find(|condition| condition.reason.as_deref() == Some("Unschedulable"))
                .map(|_| ())
        })
        .await;
    release("low-2").await;
    assert_eq!(running(&cluster, "high").await, "a");
    let high = pods.get("high").await.unwrap();
    assert_eq!(high.status.unwrap().nominated_node_name, None, "a bound pod is nominated to no node");
    cluster.stop().await;
}
