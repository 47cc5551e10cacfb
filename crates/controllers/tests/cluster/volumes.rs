use std::sync::Arc;

use ferrite_client::Api;
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass, VolumeAttachment};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};

use crate::support::Cluster;

fn claim(name: &str, spec: Value) -> Value {
    let mut whole = json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "resources": {"requests": {"storage": "2Gi"}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({"metadata": {"name": name}, "spec": whole})
}

fn annotation<'a>(annotations: &'a Option<std::collections::BTreeMap<String, String>>, key: &str) -> &'a str {
    annotations.as_ref().and_then(|all| all.get(key)).map_or("", String::as_str)
}

impl Cluster {
    async fn create_volume(&self, name: &str, spec: Value) -> PersistentVolume {
        let mut whole = json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "5Gi"},
            "persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": "/mnt/x"}});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        let volume = ferrite_json::from_value(json!({"metadata": {"name": name}, "spec": whole})).unwrap();
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        api.create(&PostParams::default(), &volume).await.unwrap()
    }

    async fn create_class(&self, name: &str, provisioner: &str, default: bool) {
        let class = ferrite_json::from_value(json!({
            "metadata": {"name": name,
                "annotations": {"storageclass.kubernetes.io/is-default-class": default.to_string()}},
            "provisioner": provisioner,
        }))
        .unwrap();
        let api: Api<StorageClass> = Api::all(self.client.clone());
        api.create(&PostParams::default(), &class).await.unwrap();
    }

    async fn claim_in(&self, name: &str, phase: &str) -> Arc<PersistentVolumeClaim> {
        self.eventually(&format!("{name} {phase}"), |claims: &[Arc<PersistentVolumeClaim>]| {
            let claim = claims.iter().find(|claim| claim.metadata.name.as_deref() == Some(name))?;
            (claim.status.as_ref()?.phase.as_deref() == Some(phase)).then(|| claim.clone())
        })
        .await
    }

    async fn volume_in(&self, name: &str, phase: &str) -> Arc<PersistentVolume> {
        self.eventually(&format!("{name} {phase}"), |volumes: &[Arc<PersistentVolume>]| {
            let volume = volumes.iter().find(|volume| volume.metadata.name.as_deref() == Some(name))?;
            (volume.status.as_ref()?.phase.as_deref() == Some(phase)).then(|| volume.clone())
        })
        .await
    }

    async fn delete_claim(&self, name: &str) {
        self.api::<PersistentVolumeClaim>("default").delete(name, &DeleteParams::default()).await.unwrap();
    }
}

fn volume_of(claim: &Arc<PersistentVolumeClaim>) -> String {
    claim.spec.as_ref().unwrap().volume_name.clone().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_gets_the_smallest_volume_and_gives_it_back_as_its_policy_says() {
    let cluster = Cluster::start(&[]).await;
    cluster.create_volume("large", json!({"capacity": {"storage": "9Gi"}})).await;
    cluster.create_volume("right", json!({"capacity": {"storage": "3Gi"}})).await;
    cluster.create_volume("small", json!({"capacity": {"storage": "1Gi"}})).await;
    for name in ["large", "right", "small"] {
        cluster.volume_in(name, "Available").await;
    }
    cluster.create::<PersistentVolumeClaim>("default", claim("c", json!({}))).await;
    let bound = cluster.claim_in("c", "Bound").await;
    assert_eq!(volume_of(&bound), "right");
    assert_eq!(annotation(&bound.metadata.annotations, "pv.kubernetes.io/bind-completed"), "yes");
    assert_eq!(annotation(&bound.metadata.annotations, "pv.kubernetes.io/bound-by-controller"), "yes");
    assert_eq!(bound.status.as_ref().unwrap().capacity.as_ref().unwrap()["storage"].0, "3Gi");
    let volume = cluster.volume_in("right", "Bound").await;
    assert_eq!(annotation(&volume.metadata.annotations, "pv.kubernetes.io/bound-by-controller"), "yes");
    assert_eq!(volume.spec.as_ref().unwrap().claim_ref.as_ref().unwrap().uid, bound.metadata.uid);

    cluster.delete_claim("c").await;
    let kept = cluster.volume_in("right", "Released").await;
    assert!(kept.spec.as_ref().unwrap().claim_ref.is_some(), "a retained volume is nobody else's");
    // The name of the claim is not the claim.
    cluster.create::<PersistentVolumeClaim>("default", claim("c", json!({}))).await;
    assert_eq!(volume_of(&cluster.claim_in("c", "Bound").await), "large");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reservations_of_both_sides_hold() {
    let cluster = Cluster::start(&[]).await;
    // The claim waits for a volume that does not exist yet.
    cluster.create::<PersistentVolumeClaim>("default", claim("by-name", json!({"volumeName": "mine"}))).await;
    cluster.claim_in("by-name", "Pending").await;
    cluster.create_volume("kept", json!({"claimRef": {"namespace": "default", "name": "by-ref"}})).await;
    cluster.volume_in("kept", "Available").await;
    cluster.create::<PersistentVolumeClaim>("default", claim("stranger", json!({}))).await;
    cluster.claim_in("stranger", "Pending").await;
    cluster.create::<PersistentVolumeClaim>("default", claim("by-ref", json!({}))).await;
    let bound = cluster.claim_in("by-ref", "Bound").await;
    assert_eq!(volume_of(&bound), "kept");
    let kept = cluster.volume_in("kept", "Bound").await;
    assert_eq!(
        annotation(&kept.metadata.annotations, "pv.kubernetes.io/bound-by-controller"),
        "",
        "the user chose this claim"
    );
    cluster.create_volume("mine", json!({"claimRef": {"namespace": "default", "name": "by-name"}})).await;
    assert_eq!(volume_of(&cluster.claim_in("by-name", "Bound").await), "mine");
    // Nobody else's reservation is given away.
    assert_eq!(volume_of(&cluster.claim_in("stranger", "Pending").await), "");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_binding_that_was_interrupted_is_finished() {
    let cluster = Cluster::start(&[]).await;
    let mut wanted = claim("c", json!({}));
    wanted["spec"]["storageClassName"] = json!("none");
    let made = cluster.create::<PersistentVolumeClaim>("default", wanted).await;
    // As after the first of the four writes, by a controller that then stopped.
    let reference = json!({"namespace": "default", "name": "c", "uid": made.metadata.uid});
    cluster.create_volume("v", json!({"claimRef": reference, "storageClassName": "none"})).await;
    assert_eq!(volume_of(&cluster.claim_in("c", "Bound").await), "v");
    cluster.volume_in("v", "Bound").await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_default_class_comes_late_and_its_provisioner_is_asked() {
    let cluster = Cluster::start(&[]).await;
    let mut wanted = claim("c", json!({}));
    wanted["spec"].as_object_mut().unwrap().remove("storageClassName");
    cluster.create::<PersistentVolumeClaim>("default", wanted).await;
    cluster.claim_in("c", "Pending").await;
    cluster.create_class("fast", "example.com/disk", true).await;
    let asked = cluster
        .eventually("the provisioner is asked", |claims: &[Arc<PersistentVolumeClaim>]| {
            let claim = claims.first()?;
            let key = "volume.kubernetes.io/storage-provisioner";
            (annotation(&claim.metadata.annotations, key) == "example.com/disk").then(|| claim.clone())
        })
        .await;
    assert_eq!(asked.spec.as_ref().unwrap().storage_class_name.as_deref(), Some("fast"));
    // The test acts as the provisioner: it makes a volume for this claim.
    let reference = json!({"namespace": "default", "name": "c", "uid": asked.metadata.uid});
    cluster.create_volume("pvc-1", json!({"claimRef": reference, "storageClassName": "fast"})).await;
    assert_eq!(volume_of(&cluster.claim_in("c", "Bound").await), "pvc-1");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_nobody_can_delete_has_failed() {
    let cluster = Cluster::start(&[]).await;
    cluster.create_volume("v", json!({"persistentVolumeReclaimPolicy": "Delete"})).await;
    cluster.create::<PersistentVolumeClaim>("default", claim("c", json!({}))).await;
    cluster.claim_in("c", "Bound").await;
    cluster.delete_claim("c").await;
    let failed = cluster.volume_in("v", "Failed").await;
    let message = failed.status.as_ref().unwrap().message.clone().unwrap_or_default();
    assert!(message.contains("no deletable volume plugin matched"), "{message}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ephemeral_volumes_claim_is_its_pods() {
    let cluster = Cluster::start(&["n"]).await;
    let template = json!({"spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "resources": {"requests": {"storage": "1Gi"}}}});
    let pod = cluster
        .create::<Pod>(
            "default",
            json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}],
                "volumes": [{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]}}),
        )
        .await;
    let claim = cluster.claim_in("p-v", "Pending").await;
    let owner = &claim.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), Some(&owner.uid)), ("Pod", pod.metadata.uid.as_ref()));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attachments_that_others_made_are_left_alone() {
    let cluster = Cluster::start(&["a"]).await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let managed = json!({"metadata": {"annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}}});
    nodes.patch("a", &PatchParams::default(), &Patch::Merge(managed)).await.unwrap();
    let attachments: Api<VolumeAttachment> = Api::all(cluster.client.clone());
    let own = ferrite_client::csi::attachment_name("handle", "driver.example.com", "a");
    for name in ["by-hand", own.as_str()] {
        let attachment = json!({"metadata": {"name": name}, "spec": {"attacher": "driver.example.com",
            "nodeName": "a", "source": {"persistentVolumeName": "gone"}}});
        let attachment = ferrite_json::from_value(attachment).unwrap();
        attachments.create(&PostParams::default(), &attachment).await.unwrap();
    }
    // Its own goes, as nobody wants it; by then the controller has checked the other, too.
    cluster
        .eventually("one attachment", |all: &[Arc<VolumeAttachment>]| {
            let is_own = |one: &Arc<VolumeAttachment>| one.metadata.name.as_deref() == Some(own.as_str());
            (!all.is_empty() && !all.iter().any(is_own)).then_some(())
        })
        .await;
    assert!(attachments.get_opt("by-hand").await.unwrap().is_some());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_would_label_a_volume_differently_are_told() {
    let cluster = Cluster::start(&["n1"]).await;
    let driver = ferrite_json::from_value(json!({"metadata": {"name": "d.example"},
        "spec": {"attachRequired": false, "seLinuxMount": true}}))
    .unwrap();
    let drivers: Api<CSIDriver> = Api::all(cluster.client.clone());
    drivers.create(&PostParams::default(), &driver).await.unwrap();
    let source = json!({"hostPath": null, "csi": {"driver": "d.example", "volumeHandle": "h"},
        "accessModes": ["ReadWriteMany"]});
    cluster.create_volume("pv", source).await;
    cluster
        .create::<PersistentVolumeClaim>("default", claim("c", json!({"accessModes": ["ReadWriteMany"]})))
        .await;
    cluster.claim_in("c", "Bound").await;
    for (name, level) in [("one", "s0:c1"), ("two", "s0:c2")] {
        let pod = json!({"metadata": {"name": name}, "spec": {
            "securityContext": {"seLinuxOptions": {"level": level}},
            "containers": [{"name": "c", "image": "a", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}});
        cluster.create::<Pod>("default", pod).await;
    }
    for (pod, other) in [("one", "pod two"), ("two", "pod one")] {
        cluster
            .eventually("a warning", |events: &[Arc<Event>]| {
                let found = events.iter().any(|event| {
                    event.reason.as_deref() == Some("SELinuxLabelConflict")
                        && event.involved_object.name.as_deref() == Some(pod)
                        && event.message.as_ref().is_some_and(|message| message.contains(other))
                });
                found.then_some(())
            })
            .await;
    }
    cluster.stop().await;
}
