use std::sync::Arc;

use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, Patch, PatchParams};

use crate::support::Cluster;

/// The addresses of all mirrored slices.
fn addresses(slices: &[Arc<EndpointSlice>]) -> Vec<String> {
    let mirrored = slices.iter().filter(|slice| {
        let labels = slice.metadata.labels.as_ref().unwrap();
        labels.get("endpointslice.kubernetes.io/managed-by").map(String::as_str)
            == Some("endpointslicemirroring-controller.k8s.io")
    });
    mirrored.flat_map(|slice| slice.endpoints.iter().flatten().flat_map(|e| e.addresses.clone())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_kept_by_hand_are_mirrored() {
    let cluster = Cluster::start(&[]).await;
    let service = json!({"metadata": {"name": "db"}, "spec": {"ports": [{"port": 5432}]}});
    cluster.create::<Service>("default", service).await;
    let subsets = |ips: &[&str]| -> Value {
        let addresses: Vec<_> = ips.iter().map(|ip| json!({"ip": ip})).collect();
        json!([{"addresses": addresses, "ports": [{"port": 5432}]}])
    };
    let endpoints = json!({"metadata": {"name": "db"}, "subsets": subsets(&["192.0.2.7"])});
    cluster.create::<Endpoints>("default", endpoints).await;
    let mirrored = |expected: &'static [&'static str]| {
        move |slices: &[Arc<EndpointSlice>]| (addresses(slices) == expected).then_some(())
    };
    cluster.eventually("a mirror", mirrored(&["192.0.2.7"])).await;
    let api = cluster.api::<Endpoints>("default");
    let patch = |value: Value| {
        let api = api.clone();
        async move { api.patch("db", &PatchParams::default(), &Patch::Merge(value)).await.unwrap() }
    };
    patch(json!({"subsets": subsets(&["192.0.2.7", "192.0.2.8"])})).await;
    cluster.eventually("another address", mirrored(&["192.0.2.7", "192.0.2.8"])).await;
    patch(json!({"metadata": {"labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}}})).await;
    cluster.eventually("no mirror any more", mirrored(&[])).await;
    patch(json!({"metadata": {"labels": null}})).await;
    cluster.eventually("again", mirrored(&["192.0.2.7", "192.0.2.8"])).await;
    api.delete("db", &DeleteParams::default()).await.unwrap();
    cluster.eventually("gone with the endpoints", mirrored(&[])).await;
    cluster.stop().await;
}
