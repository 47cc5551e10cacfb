use std::sync::Arc;

use ferrite_client::Api;
use ferrite_json::{Value, json};
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet};
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim, Pod};
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};

use crate::support::Cluster;

fn stateful_set(name: &str, replicas: i32, spec: Value) -> Value {
    let mut whole = json!({"replicas": replicas, "serviceName": "svc",
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}},
            "spec": {"containers": [{"name": "c", "image": "a:1"}]}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": whole})
}

fn claim(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}})
}

fn image(image: &str) -> Value {
    json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}}})
}

/// Returns true if all pods run the current template, by the rules of `kubectl rollout status`.
fn is_complete(set: &StatefulSet) -> bool {
    let (Some(spec), Some(status)) = (&set.spec, &set.status) else { return false };
    let wanted = spec.replicas.unwrap_or(1);
    status.observed_generation == set.metadata.generation
        && status.replicas == wanted
        && status.updated_replicas.unwrap_or(0) == wanted
        && status.ready_replicas.unwrap_or(0) == wanted
        && status.available_replicas.unwrap_or(0) == wanted
        && status.current_revision == status.update_revision
        && status.current_replicas.unwrap_or(0) == wanted
}

fn complete(sets: &[Arc<StatefulSet>]) -> Option<Arc<StatefulSet>> {
    sets.iter().find(|set| is_complete(set)).cloned()
}

fn names<K: kube::Resource>(objects: &[Arc<K>]) -> Vec<String> {
    objects.iter().filter_map(|object| object.meta().name.clone()).collect()
}

fn image_of(pod: &Pod) -> &str {
    pod.spec.as_ref().unwrap().containers[0].image.as_deref().unwrap()
}

impl Cluster {
    async fn patch_stateful_set(&self, name: &str, patch: Value) {
        let api = self.api::<StatefulSet>("default");
        let patched = api.patch(name, &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
        self.eventually("the patch", |sets: &[Arc<StatefulSet>]| {
            let set = sets.iter().find(|set| set.metadata.name == patched.metadata.name)?;
            (set.metadata.generation >= patched.metadata.generation).then_some(())
        })
        .await;
    }

    /// As `kubectl scale` does.
    async fn scale(&self, name: &str, replicas: i32) {
        let kind = ApiResource::erase::<StatefulSet>(&());
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), "default", &kind);
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        let scale = api.patch_subresource("scale", name, &PatchParams::default(), &patch).await.unwrap();
        assert_eq!(scale.data["spec"]["replicas"], replicas);
        self.eventually("the scaling", |sets: &[Arc<StatefulSet>]| {
            let set = sets.iter().find(|set| set.metadata.name.as_deref() == Some(name))?;
            (set.spec.as_ref()?.replicas == Some(replicas)).then_some(())
        })
        .await;
    }

    async fn set_ready(&self, pod: &str, ready: bool) {
        let status = if ready { "True" } else { "False" };
        let patch =
            Patch::Strategic(json!({"status": {"conditions": [{"type": "Ready", "status": status}]}}));
        self.api::<Pod>("default").patch_status(pod, &PatchParams::default(), &patch).await.unwrap();
    }

    async fn pods_are(&self, what: &str, expected: &[&str]) {
        self.eventually(what, |pods: &[Arc<Pod>]| (names(pods) == expected).then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_have_names_claims_and_an_order() {
    let cluster = Cluster::start(&["n1", "n2"]).await;
    cluster.provision();
    let set = stateful_set("web", 3, json!({"volumeClaimTemplates": [claim("data")]}));
    cluster.create::<StatefulSet>("default", set).await;
    cluster.eventually("three pods", complete).await;
    let pods = cluster
        .eventually("the pods", |pods: &[Arc<Pod>]| {
            (names(pods) == ["web-0", "web-1", "web-2"]).then(|| pods.to_vec())
        })
        .await;
    for (ordinal, pod) in pods.iter().enumerate() {
        let name = format!("web-{ordinal}");
        let labels = pod.metadata.labels.as_ref().unwrap();
        assert_eq!(labels["statefulset.kubernetes.io/pod-name"], name);
        assert_eq!(labels["apps.kubernetes.io/pod-index"], ordinal.to_string());
        assert!(labels["controller-revision-hash"].starts_with("web-"));
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!((spec.hostname.as_deref(), spec.subdomain.as_deref()), (Some(name.as_str()), Some("svc")));
        let source = spec.volumes.as_ref().unwrap()[0].persistent_volume_claim.as_ref().unwrap();
        assert_eq!(source.claim_name, format!("data-web-{ordinal}"));
        if ordinal > 0 {
            let created = |pod: &Pod| pod.metadata.creation_timestamp.clone().unwrap().0;
            assert!(created(&pods[ordinal - 1]) <= created(pod));
        }
    }

    // An unhealthy pod stops both directions.
    cluster.set_ready("web-1", false).await;
    cluster
        .eventually("two ready", |sets: &[Arc<StatefulSet>]| {
            (sets[0].status.as_ref()?.ready_replicas == Some(2)).then_some(())
        })
        .await;
    cluster.scale("web", 5).await;
    let generation_seen = |sets: &[Arc<StatefulSet>]| {
        let set = &sets[0];
        (set.status.as_ref()?.observed_generation == set.metadata.generation).then_some(())
    };
    cluster.eventually("the scaling is seen", generation_seen).await;
    cluster.pods_are("no pod comes while one is unhealthy", &["web-0", "web-1", "web-2"]).await;
    cluster.set_ready("web-0", false).await;
    cluster
        .eventually("one ready", |sets: &[Arc<StatefulSet>]| {
            (sets[0].status.as_ref()?.ready_replicas == Some(1)).then_some(())
        })
        .await;
    cluster.scale("web", 1).await;
    cluster.eventually("the scaling is seen", generation_seen).await;
    cluster.pods_are("no pod goes while the first is unhealthy", &["web-0", "web-1", "web-2"]).await;
    cluster.set_ready("web-0", true).await;
    cluster.pods_are("scaled down", &["web-0"]).await;
    cluster.eventually("one pod", complete).await;
    cluster
        .eventually("claims are kept", |claims: &[Arc<PersistentVolumeClaim>]| {
            (names(claims) == ["data-web-0", "data-web-1", "data-web-2"]).then_some(())
        })
        .await;
    let deletions = cluster
        .eventually("events of deletions", |events: &[Arc<Event>]| {
            let mut found: Vec<_> = events
                .iter()
                .filter(|event| event.reason.as_deref() == Some("SuccessfulDelete"))
                .filter_map(|event| event.message.clone())
                .collect();
            found.sort();
            (found.len() == 2).then_some(found)
        })
        .await;
    assert_eq!(deletions[0], "Delete Pod web-1 in StatefulSet web successful");

    cluster.patch_stateful_set("web", json!({"spec": {"ordinals": {"start": 4}, "replicas": 2}})).await;
    cluster.pods_are("ordinals start at four", &["web-4", "web-5"]).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_roll_out_in_parts_and_back() {
    let cluster = Cluster::start(&["n1"]).await;
    cluster.provision();
    cluster.create::<StatefulSet>("default", stateful_set("web", 3, json!({}))).await;
    let first = cluster.eventually("three pods", complete).await.status.clone().unwrap();

    // A canary: only pods from the partition on are updated.
    let partition = |at: i32| json!({"spec": {"updateStrategy": {"rollingUpdate": {"partition": at}}}});
    cluster.patch_stateful_set("web", partition(2)).await;
    cluster.patch_stateful_set("web", image("a:2")).await;
    let updated = |count: i32| {
        move |sets: &[Arc<StatefulSet>]| {
            let status = sets[0].status.as_ref()?;
            let settled = status.observed_generation == sets[0].metadata.generation
                && status.updated_replicas == Some(count)
                && status.ready_replicas == Some(3);
            settled.then(|| status.clone())
        }
    };
    let canary = cluster.eventually("the canary", updated(1)).await;
    assert_eq!(canary.current_revision, first.current_revision);
    assert_ne!(canary.update_revision, first.update_revision);
    assert_eq!(canary.current_replicas, Some(2));
    // A pod below the partition comes back as it was.
    let pods = cluster.api::<Pod>("default");
    let old = cluster.eventually("web-0", |pods: &[Arc<Pod>]| pods.first().cloned()).await;
    pods.delete("web-0", &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("web-0 again", |pods: &[Arc<Pod>]| {
            let pod = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("web-0"))?;
            (pod.metadata.uid != old.metadata.uid).then(|| assert_eq!(image_of(pod), "a:1"))
        })
        .await;
    cluster.eventually("ready again", updated(1)).await;
    cluster.patch_stateful_set("web", partition(1)).await;
    cluster.eventually("the next phase", updated(2)).await;
    cluster.patch_stateful_set("web", partition(0)).await;
    let second = cluster.eventually("the whole update", complete).await.status.clone().unwrap();
    assert_eq!(second.current_revision, canary.update_revision);

    // As `kubectl rollout undo` does.
    let revision = cluster
        .eventually("the first revision", |all: &[Arc<ControllerRevision>]| {
            all.iter().find(|revision| revision.metadata.name == first.current_revision).cloned()
        })
        .await;
    let data = ferrite_json::to_value(revision.data.as_ref().unwrap()).unwrap();
    cluster.patch_stateful_set("web", data).await;
    cluster
        .eventually("the roll-back", |sets: &[Arc<StatefulSet>]| {
            let set = complete(sets)?;
            (set.status.as_ref()?.current_revision == first.current_revision).then_some(())
        })
        .await;
    cluster
        .eventually("its revision is the newest", |all: &[Arc<ControllerRevision>]| {
            let found = all.iter().find(|r| r.metadata.name == revision.metadata.name)?;
            (found.revision == 3 && all.len() == 2).then_some(())
        })
        .await;

    // As `kubectl rollout restart` does, with the strategy that waits for somebody to delete pods.
    let on_delete = json!({"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}});
    cluster.patch_stateful_set("web", on_delete).await;
    let restart = json!({"spec": {"template": {"metadata": {
        "annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}});
    cluster.patch_stateful_set("web", restart).await;
    cluster
        .eventually("nothing is updated", |sets: &[Arc<StatefulSet>]| {
            let status = sets[0].status.as_ref()?;
            (status.observed_generation == sets[0].metadata.generation
                && status.updated_replicas.unwrap_or(0) == 0)
                .then_some(())
        })
        .await;
    pods.delete("web-1", &DeleteParams::default()).await.unwrap();
    cluster.eventually("the deleted one is new", updated(1)).await;
    cluster
        .eventually("web-1", |pods: &[Arc<Pod>]| {
            let annotated = |pod: &&Arc<Pod>| pod.metadata.annotations.as_ref().is_some_and(|a| a.len() == 1);
            (pods.iter().filter(annotated).map(|pod| pod.metadata.name.clone().unwrap()).collect::<Vec<_>>()
                == ["web-1"])
            .then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_pods_and_claims_that_go_with_them() {
    let cluster = Cluster::start(&["n1", "n2"]).await;
    cluster.provision();
    let spec = json!({"podManagementPolicy": "Parallel", "volumeClaimTemplates": [claim("data")],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Delete"}});
    cluster.create::<StatefulSet>("default", stateful_set("db", 4, spec)).await;
    cluster.eventually("four pods", complete).await;
    let owner = |claim: &PersistentVolumeClaim| {
        let owners = claim.metadata.owner_references.as_ref()?;
        Some(owners.iter().map(|owner| owner.kind.clone()).collect::<Vec<_>>())
    };
    cluster
        .eventually("claims belong to the set", |claims: &[Arc<PersistentVolumeClaim>]| {
            (claims.len() == 4 && claims.iter().all(|claim| owner(claim) == Some(vec!["StatefulSet".into()])))
                .then_some(())
        })
        .await;
    // Scaling goes on beside unhealthy pods.
    cluster.set_ready("db-0", false).await;
    cluster.scale("db", 6).await;
    cluster.pods_are("six pods", &["db-0", "db-1", "db-2", "db-3", "db-4", "db-5"]).await;
    cluster.scale("db", 2).await;
    cluster.pods_are("two pods", &["db-0", "db-1"]).await;
    cluster
        .eventually("claims of pods that went are gone", |claims: &[Arc<PersistentVolumeClaim>]| {
            (names(claims) == ["data-db-0", "data-db-1"]).then_some(())
        })
        .await;
    cluster.set_ready("db-0", true).await;
    cluster.scale("db", 3).await;
    cluster.eventually("three pods", complete).await;

    // A pod that ended, however it did, is made again.
    for phase in ["Failed", "Succeeded"] {
        let old = cluster
            .eventually("db-1", |pods: &[Arc<Pod>]| {
                let pod = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("db-1"))?;
                (pod.status.as_ref()?.phase.as_deref() == Some("Running")).then(|| pod.clone())
            })
            .await;
        let patch = Patch::Merge(json!({"status": {"phase": phase}}));
        let pods = cluster.api::<Pod>("default");
        pods.patch_status("db-1", &PatchParams::default(), &patch).await.unwrap();
        cluster
            .eventually("another db-1", |pods: &[Arc<Pod>]| {
                let pod = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("db-1"))?;
                (pod.metadata.uid != old.metadata.uid).then_some(())
            })
            .await;
    }
    cluster.eventually("three pods", complete).await;

    let sets = cluster.api::<StatefulSet>("default");
    sets.delete("db", &DeleteParams::orphan()).await.unwrap();
    cluster.eventually("the set is gone", |sets: &[Arc<StatefulSet>]| sets.is_empty().then_some(())).await;
    let uids = |pods: &[Arc<Pod>]| -> Option<Vec<_>> {
        let orphans = pods.iter().all(|pod| pod.metadata.owner_references.is_none());
        orphans.then(|| pods.iter().map(|pod| pod.metadata.uid.clone()).collect())
    };
    let before = cluster.eventually("orphans", uids).await;
    let spec = json!({"podManagementPolicy": "Parallel"});
    cluster.create::<StatefulSet>("default", stateful_set("db", 3, spec)).await;
    cluster
        .eventually("the pods are adopted", |pods: &[Arc<Pod>]| {
            let adopted = pods.iter().all(|pod| pod.metadata.owner_references.is_some());
            (adopted && pods.len() == 3).then_some(())
        })
        .await;
    assert_eq!(before.len(), 3);
    sets.delete("db", &DeleteParams::foreground()).await.unwrap();
    cluster.eventually("the set is gone", |sets: &[Arc<StatefulSet>]| sets.is_empty().then_some(())).await;
    cluster.eventually("no pods", |pods: &[Arc<Pod>]| pods.is_empty().then_some(())).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parallel_set_of_many_pods_comes_up() {
    let cluster = Cluster::start(&["n1", "n2", "n3", "n4", "n5"]).await;
    cluster.provision();
    let spec = json!({"podManagementPolicy": "Parallel"});
    cluster.create::<StatefulSet>("default", stateful_set("big", 300, spec)).await;
    cluster.eventually("all pods", complete).await;
    let sets = cluster.api::<StatefulSet>("default");
    sets.delete("big", &DeleteParams::background()).await.unwrap();
    cluster.eventually("no pods", |pods: &[Arc<Pod>]| pods.is_empty().then_some(())).await;
    cluster.stop().await;
}
