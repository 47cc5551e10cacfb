use ferrite_json::{Value, json};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Patch, PatchParams};

use crate::support::Cluster;

fn deployment(name: &str, replicas: i32, image: &str, labels: Value) -> Value {
    let mut template_labels = json!({"app": name});
    template_labels.as_object_mut().unwrap().extend(labels.as_object().unwrap().clone());
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": template_labels},
                "spec": {"containers": [{"name": "c", "image": image,
                    "resources": {"requests": {"cpu": "100m"}}}]}}}})
}

fn condition(deployment: &Deployment, kind: &str) -> Option<(String, String)> {
    let conditions = deployment.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == kind)?;
    Some((found.status.clone(), found.reason.clone().unwrap_or_default()))
}

fn is_complete(deployment: &Deployment) -> bool {
    let (Some(spec), Some(status)) = (&deployment.spec, &deployment.status) else { return false };
    status.observed_generation == deployment.metadata.generation
        && status.updated_replicas == spec.replicas
        && status.replicas == spec.replicas
        && status.available_replicas == spec.replicas
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_rolls_out_scales_updates_and_rolls_back() {
    let cluster = Cluster::start(&["n1", "n2"]).await;
    cluster.create::<Deployment>("default", deployment("web", 3, "a:1", json!({}))).await;
    let api = cluster.api::<Deployment>("default");
    let complete = |image: &'static str| {
        move |all: &[std::sync::Arc<Deployment>]| {
            let found = all.iter().find(|deployment| {
                let spec = deployment.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
                spec.containers[0].image.as_deref() == Some(image) && is_complete(deployment)
            })?;
            (condition(found, "Progressing")?.1 == "NewReplicaSetAvailable").then(|| found.clone())
        }
    };
    let first = cluster.eventually("a complete rollout", complete("a:1")).await;
    assert_eq!(condition(&first, "Available").unwrap(), ("True".into(), "MinimumReplicasAvailable".into()));
    assert_eq!(first.metadata.annotations.as_ref().unwrap()["deployment.kubernetes.io/revision"], "1");
    let nodes = cluster
        .eventually("pods on both nodes", |pods: &[std::sync::Arc<Pod>]| {
            let mut nodes: Vec<_> =
                pods.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.clone()).collect();
            // The reader of pods may be behind that of Deployments.
            let is_whole = nodes.len() == 3;
            nodes.sort();
            nodes.dedup();
            is_whole.then_some(nodes)
        })
        .await;
    assert_eq!(nodes, ["n1", "n2"], "siblings spread");

    let patch = |value: Value| {
        let api = api.clone();
        async move { api.patch("web", &PatchParams::default(), &Patch::Strategic(value)).await.unwrap() }
    };
    let image = |image: &str| json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}}});
    patch(json!({"spec": {"replicas": 5}})).await;
    cluster
        .eventually("five pods", |all: &[std::sync::Arc<Deployment>]| {
            all.iter().find(|d| is_complete(d) && d.spec.as_ref().unwrap().replicas == Some(5)).map(|_| ())
        })
        .await;
    patch(image("a:2")).await;
    let second = cluster.eventually("the update", complete("a:2")).await;
    assert_eq!(second.metadata.annotations.as_ref().unwrap()["deployment.kubernetes.io/revision"], "2");
    patch(image("a:1")).await;
    let third = cluster.eventually("the roll-back", complete("a:1")).await;
    assert_eq!(third.metadata.annotations.as_ref().unwrap()["deployment.kubernetes.io/revision"], "3");
    let sets = cluster
        .eventually("two sets, one in use", |sets: &[std::sync::Arc<ReplicaSet>]| {
            let used = sets.iter().filter(|set| set.status.as_ref().is_some_and(|s| s.replicas == 5)).count();
            let idle = sets.iter().filter(|set| set.status.as_ref().is_some_and(|s| s.replicas == 0)).count();
            (used == 1 && idle == 1).then(|| sets.to_vec())
        })
        .await;
    let used = sets.iter().find(|set| set.status.as_ref().unwrap().replicas == 5).unwrap();
    let annotations = used.metadata.annotations.as_ref().unwrap();
    assert_eq!(annotations["deployment.kubernetes.io/revision-history"], "1");

    let reasons = ["ScalingReplicaSet", "SuccessfulCreate", "Scheduled", "SuccessfulDelete"];
    cluster
        .eventually("events", |events: &[std::sync::Arc<Event>]| {
            reasons
                .iter()
                .all(|reason| events.iter().any(|event| event.reason.as_deref() == Some(reason)))
                .then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_fit_nowhere_say_why_and_run_when_a_node_comes() {
    let cluster = Cluster::start(&[]).await;
    cluster
        .create::<Pod>(
            "default",
            json!({"metadata": {"name": "big"}, "spec": {"containers": [
                {"name": "c", "image": "a", "resources": {"requests": {"cpu": "3"}}}]}}),
        )
        .await;
    let message = |pods: &[std::sync::Arc<Pod>]| {
        let conditions = pods.first()?.status.as_ref()?.conditions.clone()?;
        conditions.into_iter().find(|c| c.type_ == "PodScheduled").and_then(|c| c.message)
    };
    let told = cluster.eventually("a condition", message).await;
    assert_eq!(told, "no nodes available to schedule pods");
    cluster.add_node("n1").await;
    cluster
        .eventually("the pod on the node", |pods: &[std::sync::Arc<Pod>]| {
            pods.iter().find(|pod| pod.spec.as_ref().unwrap().node_name.as_deref() == Some("n1")).map(|_| ())
        })
        .await;
    cluster
        .create::<Pod>(
            "default",
            json!({"metadata": {"name": "second"}, "spec": {"containers": [
                {"name": "c", "image": "a", "resources": {"requests": {"cpu": "3"}}}]}}),
        )
        .await;
    let told = cluster
        .eventually("the second pod's condition", |pods: &[std::sync::Arc<Pod>]| {
            let second: Vec<_> =
                pods.iter().filter(|pod| pod.metadata.name.as_deref() == Some("second")).cloned().collect();
            message(&second)
        })
        .await;
    assert_eq!(
        told,
        "0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: \
         0/1 nodes are available: 1 No preemption victims found for incoming pod."
    );
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recreate_never_mixes_and_a_paused_deployment_waits() {
    let cluster = Cluster::start(&["n1"]).await;
    let mut object = deployment("db", 2, "a:1", json!({}));
    object["spec"]["strategy"] = json!({"type": "Recreate"});
    cluster.create::<Deployment>("default", object).await;
    let images = |pods: &[std::sync::Arc<Pod>]| -> Vec<String> {
        let mut images: Vec<_> = pods
            .iter()
            .map(|pod| pod.spec.as_ref().unwrap().containers[0].image.clone().unwrap_or_default())
            .collect();
        images.sort();
        images
    };
    cluster
        .eventually("the first pods", |pods: &[std::sync::Arc<Pod>]| {
            (images(pods) == ["a:1", "a:1"]).then_some(())
        })
        .await;
    let api = cluster.api::<Deployment>("default");
    let patch = |value: Value| {
        let api = api.clone();
        async move { api.patch("db", &PatchParams::default(), &Patch::Strategic(value)).await.unwrap() }
    };
    let image = |image: &str| json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}}});
    patch(json!({"spec": {"paused": true}})).await;
    patch(image("a:2")).await;
    // Scaling works while paused, and shows that the new template was seen and left alone.
    patch(json!({"spec": {"replicas": 3}})).await;
    cluster
        .eventually("three old pods", |pods: &[std::sync::Arc<Pod>]| {
            (images(pods) == ["a:1", "a:1", "a:1"]).then_some(())
        })
        .await;
    let paused = cluster
        .eventually("the pause told", |all: &[std::sync::Arc<Deployment>]| {
            let found = all.first()?;
            (found.status.as_ref()?.observed_generation == found.metadata.generation)
                .then(|| condition(found, "Progressing"))
                .flatten()
        })
        .await;
    assert_eq!(paused, ("Unknown".to_owned(), "DeploymentPaused".to_owned()));
    patch(json!({"spec": {"paused": false}})).await;
    cluster
        .eventually("new pods only", |pods: &[std::sync::Arc<Pod>]| {
            let images = images(pods);
            assert!(images.windows(2).all(|pair| pair[0] == pair[1]), "old and new at once: {images:?}");
            (images == ["a:2", "a:2", "a:2"]).then_some(())
        })
        .await;
    cluster.stop().await;
}
