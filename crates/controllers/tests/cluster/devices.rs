use std::sync::Arc;

use ferrite_client::Api;
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};

use crate::support::Cluster;

fn pod(name: &str, claims: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "nodeName": "elsewhere", "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "i"}], "resourceClaims": claims}})
}

fn template(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "metadata": {"labels": {"from": name}},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}}}})
}

fn slice(taints: Value) -> Value {
    json!({"metadata": {"name": "slice"}, "spec": {"driver": "d.example", "nodeName": "elsewhere",
        "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "dev", "taints": taints}]}})
}

impl Cluster {
    async fn claim_of(&self, pod: &str, entry: &str) -> Arc<ResourceClaim> {
        let name = self
            .eventually(&format!("the claim {entry} of {pod}"), |pods: &[Arc<Pod>]| {
                let pod = pods.iter().find(|p| p.metadata.name.as_deref() == Some(pod))?;
                let statuses = pod.status.as_ref()?.resource_claim_statuses.as_ref()?;
                statuses.iter().find(|status| status.name == entry)?.resource_claim_name.clone()
            })
            .await;
        self.claim(&name, |_| true).await
    }

    async fn claim(&self, name: &str, check: impl Fn(&ResourceClaim) -> bool) -> Arc<ResourceClaim> {
        self.eventually(name, |claims: &[Arc<ResourceClaim>]| {
            claims.iter().find(|c| c.metadata.name.as_deref() == Some(name) && check(c)).cloned()
        })
        .await
    }

    async fn claim_gone(&self, name: &str) {
        self.eventually("end of the claim", |claims: &[Arc<ResourceClaim>]| {
            claims.iter().all(|c| c.metadata.name.as_deref() != Some(name)).then_some(())
        })
        .await;
    }

    /// As the scheduler does: the finalizer, then the devices.
    async fn allocate(&self, name: &str, tolerations: Value) {
        let api = self.api::<ResourceClaim>("default");
        let finalizer = json!({"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}});
        api.patch(name, &PatchParams::default(), &Patch::Merge(finalizer)).await.unwrap();
        let status = json!({"status": {
            "allocation": {"devices": {"results": [
                {"request": "r", "driver": "d.example", "pool": "p", "device": "dev", "tolerations": tolerations}]}},
            "devices": [{"driver": "d.example", "pool": "p", "device": "dev"}]}});
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    async fn finish(&self, pod: &str, phase: &str) {
        let status = Patch::Merge(json!({"status": {"phase": phase}}));
        self.api::<Pod>("default").patch_status(pod, &PatchParams::default(), &status).await.unwrap();
    }
}

fn consumers(claim: &ResourceClaim) -> Vec<String> {
    let status = claim.status.as_ref();
    let consumers = status.and_then(|status| status.reserved_for.clone()).unwrap_or_default();
    consumers.into_iter().map(|consumer| consumer.name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_made_from_templates_and_end_with_their_pods() {
    let cluster = Cluster::start(&[]).await;
    let two = json!([{"name": "a", "resourceClaimTemplateName": "late"}, {"name": "b", "resourceClaimTemplateName": "t"}]);
    cluster.create::<ResourceClaimTemplate>("default", template("t")).await;
    let pod = cluster.create::<Pod>("default", pod("p", two)).await;
    // Nothing is made before the template exists, and the pod's owner can read why.
    cluster
        .eventually("an event", |events: &[Arc<Event>]| {
            let event = events.iter().find(|e| e.reason.as_deref() == Some("FailedResourceClaimCreation"))?;
            event.message.as_ref()?.contains("resource claim template \"late\"").then_some(())
        })
        .await;
    cluster.create::<ResourceClaimTemplate>("default", template("late")).await;
    let (a, b) = (cluster.claim_of("p", "a").await, cluster.claim_of("p", "b").await);
    assert_eq!(a.metadata.generate_name.as_deref(), Some("p-a-"));
    assert_eq!(a.metadata.labels.as_ref().unwrap()["from"], "late");
    assert_eq!(b.metadata.owner_references.as_ref().unwrap()[0].uid, pod.metadata.uid.clone().unwrap());
    let claims = cluster.api::<ResourceClaim>("default");
    assert_eq!(claims.list(&Default::default()).await.unwrap().items.len(), 2, "one for each entry");

    // A claim that somebody deleted is made again under another name; the other keeps its name.
    let name = a.metadata.name.clone().unwrap();
    claims.delete(&name, &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("another claim", |pods: &[Arc<Pod>]| {
            let statuses = pods.first()?.status.as_ref()?.resource_claim_statuses.as_ref()?;
            let named = |entry: &str| statuses.iter().find(|s| s.name == entry)?.resource_claim_name.as_ref();
            (named("a")? != &name && named("b") == b.metadata.name.as_ref()).then_some(())
        })
        .await;

    // The pod is scheduled: the allocated devices are reserved for it, and released when it is done.
    let name = b.metadata.name.clone().unwrap();
    cluster.allocate(&name, json!([])).await;
    cluster.claim(&name, |claim| consumers(claim) == ["p"]).await;
    cluster.finish("p", "Succeeded").await;
    cluster.claim_gone(&name).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shared_claim_is_deallocated_after_its_last_pod() {
    let cluster = Cluster::start(&[]).await;
    let spec = json!({"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}});
    cluster.create::<ResourceClaim>("default", json!({"metadata": {"name": "shared"}, "spec": spec})).await;
    for name in ["p", "q"] {
        cluster
            .create::<Pod>("default", pod(name, json!([{"name": "a", "resourceClaimName": "shared"}])))
            .await;
    }
    cluster.allocate("shared", json!([])).await;
    cluster.claim("shared", |claim| consumers(claim).len() == 2).await;
    cluster.finish("p", "Failed").await;
    let claim = cluster.claim("shared", |claim| consumers(claim) == ["q"]).await;
    assert!(claim.status.as_ref().unwrap().allocation.is_some(), "somebody still uses it");
    cluster.api::<Pod>("default").delete("q", &DeleteParams::default().grace_period(0)).await.unwrap();
    let claim = cluster
        .claim("shared", |claim| {
            consumers(claim).is_empty() && claim.metadata.finalizers.as_ref().is_none_or(Vec::is_empty)
        })
        .await;
    let status = claim.status.clone().unwrap_or_default();
    assert!(status.allocation.is_none() && status.devices.is_none());
    // The claim of extended resources is found through the pod's status.
    cluster.create::<ResourceClaim>("default", json!({"metadata": {"name": "extended"}, "spec": spec})).await;
    let mut extended = pod("e", json!(null));
    extended["spec"]["containers"][0]["resources"] =
        json!({"requests": {"example.com/gpu": "1"}, "limits": {"example.com/gpu": "1"}});
    let pod = cluster.create::<Pod>("default", extended).await;
    let status = Patch::Merge(
        json!({"status": {"extendedResourceClaimStatus": {"resourceClaimName": "extended",
        "requestMappings": [{"containerName": "c", "resourceName": "example.com/gpu", "requestName": "r"}]}}}),
    );
    cluster.api::<Pod>("default").patch_status("e", &PatchParams::default(), &status).await.unwrap();
    cluster.allocate("extended", json!([])).await;
    let consumer =
        json!({"status": {"reservedFor": [{"resource": "pods", "name": "e", "uid": pod.metadata.uid}]}});
    let claims = cluster.api::<ResourceClaim>("default");
    claims.patch_status("extended", &PatchParams::default(), &Patch::Merge(consumer)).await.unwrap();
    cluster.claim("extended", |claim| consumers(claim) == ["e"]).await;
    cluster.finish("e", "Failed").await;
    cluster.claim("extended", |claim| consumers(claim).is_empty()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_tainted_devices_are_evicted_when_their_toleration_ends() {
    let cluster = Cluster::start(&[]).await;
    let spec = json!({"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}});
    let for_seconds = |seconds: Option<i64>| json!([{"key": "broken", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}]);
    for (name, tolerations) in
        [("strict", json!([])), ("patient", for_seconds(Some(100_000))), ("stoic", for_seconds(None))]
    {
        cluster.create::<ResourceClaim>("default", json!({"metadata": {"name": name}, "spec": spec})).await;
        cluster.create::<Pod>("default", pod(name, json!([{"name": "a", "resourceClaimName": name}]))).await;
        cluster.allocate(name, tolerations).await;
        cluster.claim(name, |claim| consumers(claim) == [name]).await;
    }
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let taint = json!([{"key": "broken", "effect": "NoExecute"}]);
    let tainted = ferrite_json::from_value(slice(taint)).unwrap();
    let tainted = slices.create(&PostParams::default(), &tainted).await.unwrap();
    let taints = tainted.spec.devices.as_ref().unwrap()[0].taints.as_ref().unwrap();
    assert!(taints[0].time_added.is_some(), "the server says since when");
    let left = |expected: &'static [&'static str]| {
        cluster.eventually("eviction", move |pods: &[Arc<Pod>]| {
            let names: Vec<_> = pods.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
            (names == expected).then_some(())
        })
    };
    left(&["patient", "stoic"]).await;
    cluster
        .eventually("an event", |events: &[Arc<Event>]| {
            let event = events.iter().find(|e| e.reason.as_deref() == Some("DeviceTaintManagerEviction"))?;
            (event.involved_object.name.as_deref() == Some("strict")).then_some(())
        })
        .await;
    // The taint turns out to be old: the patient pod has waited long enough.
    let taint = json!([{"key": "broken", "effect": "NoExecute", "timeAdded": "2020-01-01T00:00:00Z"}]);
    let patch = Patch::Merge(json!({"spec": slice(taint)["spec"]}));
    slices.patch("slice", &PatchParams::default(), &patch).await.unwrap();
    left(&["stoic"]).await;
    cluster.stop().await;
}
