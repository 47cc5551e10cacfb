//! Pods whose authors want the scheduler for themselves.

use std::sync::Arc;

use ferrite_client::Api;
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;

use crate::support::Cluster;

fn pod(name: &str, spec: Value) -> Value {
    let mut spec = spec;
    spec["containers"] = json!([{"name": "c", "image": "i"}]);
    json!({"metadata": {"name": name}, "spec": spec})
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())
}

/// The message of a failed attempt to schedule the pod.
fn failed(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == "False")?;
    scheduled.message.as_deref()
}

impl Cluster {
    async fn is_scheduled(&self, name: &str) {
        self.create::<Pod>("default", pod(name, json!({}))).await;
        self.eventually("a pod that asks for nothing has a node", |pods: &[Arc<Pod>]| {
            pods.iter().find(|p| p.metadata.name.as_deref() == Some(name) && is_bound(p)).map(|_| ())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_wait_for_volumes_stop_nobody() {
    // More than the scheduler writes results at once.
    const WAITING: usize = 70;
    let cluster = Cluster::start(&["n"]).await;
    let class = json!({"metadata": {"name": "never"}, "provisioner": "example.com/never",
        "volumeBindingMode": "WaitForFirstConsumer"});
    let classes: Api<StorageClass> = Api::all(cluster.client.clone());
    classes.create(&PostParams::default(), &ferrite_json::from_value(class).unwrap()).await.unwrap();
    for index in 0..WAITING {
        let name = format!("waits-{index}");
        let claim = json!({"metadata": {"name": name}, "spec": {"storageClassName": "never",
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
        cluster.create::<PersistentVolumeClaim>("default", claim).await;
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": name}}]);
        cluster.create::<Pod>("default", pod(&name, json!({"volumes": volumes}))).await;
    }
    cluster
        .eventually("all claims have a node", |claims: &[Arc<PersistentVolumeClaim>]| {
            let selected = "volume.kubernetes.io/selected-node";
            let has = |claim: &&Arc<PersistentVolumeClaim>| {
                claim.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(selected))
            };
            (claims.iter().filter(has).count() == WAITING).then_some(())
        })
        .await;
    cluster.is_scheduled("ordinary").await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_search_for_devices_stops_nobody() {
    const HOSTILE: usize = 6;
    let cluster = Cluster::start(&["n"]).await;
    let class = json!({"metadata": {"name": "any"}, "spec": {}});
    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    classes.create(&PostParams::default(), &ferrite_json::from_value(class).unwrap()).await.unwrap();
    let devices: Vec<Value> = (0..40).map(|index| json!({"name": format!("dev-{index}")})).collect();
    let slice = json!({"metadata": {"name": "slice"}, "spec": {"driver": "d.example", "nodeName": "n",
        "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}, "devices": devices}});
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    slices.create(&PostParams::default(), &ferrite_json::from_value(slice).unwrap()).await.unwrap();
    // There are more ways to choose twenty of forty devices than anybody can try, and none helps the second request.
    let never = json!([{"cel": {"expression": "device.driver == 'other.example'"}}]);
    let requests = json!([{"name": "many", "exactly": {"deviceClassName": "any", "count": 20}},
        {"name": "never", "exactly": {"deviceClassName": "any", "selectors": never}}]);
    for index in 0..HOSTILE {
        let name = format!("hostile-{index}");
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}});
        cluster.create::<ResourceClaim>("default", claim).await;
        let claims = json!([{"name": "x", "resourceClaimName": name}]);
        cluster.create::<Pod>("default", pod(&name, json!({"resourceClaims": claims}))).await;
    }
    cluster.is_scheduled("ordinary").await;
    let pods: Vec<Pod> = cluster.api::<Pod>("default").list(&Default::default()).await.unwrap().items;
    let tried: Vec<&str> = pods.iter().filter_map(failed).collect();
    assert!(tried.len() < HOSTILE - 1, "the ordinary pod waited for all searches: {tried:?}");
    // A search that takes too long ends, and its pod's owner can read why.
    cluster
        .eventually("an end of a search", |pods: &[Arc<Pod>]| {
            pods.iter().filter_map(|pod| failed(pod)).find(|m| m.contains("timed out")).map(|_| ())
        })
        .await;
    cluster.stop().await;
}
