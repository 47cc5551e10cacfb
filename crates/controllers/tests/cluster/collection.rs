use std::sync::Arc;

use ferrite_json::json;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;

use crate::support::Cluster;

async fn deploy(cluster: &Cluster, name: &str) {
    let object = json!({"metadata": {"name": name}, "spec": {"replicas": 2, "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "c", "image": "a"}]}}}});
    cluster.create::<Deployment>("default", object).await;
    cluster
        .eventually("its pods", |pods: &[Arc<Pod>]| {
            let running = pods
                .iter()
                .filter(|pod| pod.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Running")));
            (running.count() == 2).then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dependents_follow_their_owner_by_its_deletion_policy() {
    let cluster = Cluster::start(&["n1"]).await;
    let deployments = cluster.api::<Deployment>("default");
    for policy in [DeleteParams::background(), DeleteParams::foreground()] {
        deploy(&cluster, "web").await;
        deployments.delete("web", &policy).await.unwrap();
        cluster.eventually("no deployment", |all: &[Arc<Deployment>]| all.is_empty().then_some(())).await;
        cluster.eventually("no sets", |all: &[Arc<ReplicaSet>]| all.is_empty().then_some(())).await;
        cluster.eventually("no pods", |all: &[Arc<Pod>]| all.is_empty().then_some(())).await;
    }
    deploy(&cluster, "kept").await;
    deployments.delete("kept", &DeleteParams::orphan()).await.unwrap();
    cluster.eventually("no deployment", |all: &[Arc<Deployment>]| all.is_empty().then_some(())).await;
    let set = cluster
        .eventually("a set without an owner", |all: &[Arc<ReplicaSet>]| {
            let set = all.first()?;
            set.metadata.owner_references.as_ref().is_none_or(Vec::is_empty).then(|| set.clone())
        })
        .await;
    assert_eq!(set.metadata.deletion_timestamp, None);
    // A deployment of the same selector takes the set over.
    let object = json!({"metadata": {"name": "kept"}, "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "kept"}},
        "template": {"metadata": {"labels": {"app": "kept"}}, "spec": {"containers": [{"name": "c", "image": "a"}]}}}});
    cluster.create::<Deployment>("default", object).await;
    cluster
        .eventually("the set adopted", |all: &[Arc<ReplicaSet>]| {
            let adopted =
                all.first()?.metadata.owner_references.as_ref().is_some_and(|owners| owners.len() == 1);
            (all.len() == 1 && adopted).then_some(())
        })
        .await;
    cluster.stop().await;
}
