use ferrite_client::Api;
use std::sync::Arc;

use ferrite_json::json;
use k8s_openapi::api::core::v1::{ConfigMap, Endpoints, Namespace, Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::DeleteParams;

use crate::support::Cluster;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_gets_what_pods_need_and_goes_with_all_its_content() {
    let cluster = Cluster::start(&["n1"]).await;
    cluster.create_namespace("team").await;
    let in_team = |meta: &kube::core::ObjectMeta| meta.namespace.as_deref() == Some("team");
    cluster
        .eventually("the default account", |all: &[Arc<ServiceAccount>]| {
            all.iter().find(|account| in_team(&account.metadata)).map(|_| ())
        })
        .await;
    cluster
        .eventually("the CA", |all: &[Arc<ConfigMap>]| {
            let map = all.iter().find(|map| in_team(&map.metadata))?;
            (map.data.as_ref()?.get("ca.crt")? == "PEM").then_some(())
        })
        .await;
    cluster
        .create::<Pod>(
            "team",
            json!({"metadata": {"name": "p", "labels": {"app": "x"}},
                   "spec": {"containers": [{"name": "c", "image": "a", "ports": [{"name": "web", "containerPort": 8080}]}]}}),
        )
        .await;
    cluster
        .create::<Service>(
            "team",
            json!({"metadata": {"name": "s"}, "spec": {"selector": {"app": "x"}, "ports": [{"port": 80, "targetPort": "web"}]}}),
        )
        .await;
    cluster
        .eventually("a slice with the pod", |all: &[Arc<EndpointSlice>]| {
            let slice = all.iter().find(|slice| {
                in_team(&slice.metadata)
                    && slice.endpoints.as_ref().is_some_and(|endpoints| !endpoints.is_empty())
            })?;
            assert_eq!(slice.ports.as_ref()?[0].port, Some(8080));
            slice.endpoints.as_ref()?[0].conditions.as_ref()?.ready.filter(|ready| *ready)
        })
        .await;
    cluster
        .eventually("endpoints with the pod", |all: &[Arc<Endpoints>]| {
            let endpoints = all.iter().find(|endpoints| in_team(&endpoints.metadata))?;
            endpoints.subsets.as_ref()?.first()?.addresses.as_ref().map(|_| ())
        })
        .await;

    let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("the namespace gone", |all: &[Arc<Namespace>]| {
            all.iter().all(|namespace| namespace.metadata.name.as_deref() != Some("team")).then_some(())
        })
        .await;
    cluster
        .eventually("its pods gone", |all: &[Arc<Pod>]| {
            all.iter().all(|pod| !in_team(&pod.metadata)).then_some(())
        })
        .await;
    cluster.stop().await;
}
