use std::sync::Arc;

use ferrite_client::Api;
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{Event, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, Patch, PatchParams};

use crate::support::Cluster;

const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";

fn service(name: &str, changes: Value) -> Value {
    let mut spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    spec.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    json!({"metadata": {"name": name}, "spec": spec})
}

fn addresses(service: &Service) -> Vec<&str> {
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    ingress.filter_map(|ingress| ingress.ip.as_deref()).collect()
}

impl Cluster {
    async fn balancers(nodes: &[(&str, &str)]) -> Self {
        let cluster = Self::start(&nodes.iter().map(|(name, _)| *name).collect::<Vec<_>>()).await;
        for (name, address) in nodes {
            let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": address}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10_450}}}});
            Api::<Node>::all(cluster.client.clone())
                .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
                .await
                .unwrap();
        }
        ferrite_controllers::service_lb::start(&cluster.context);
        cluster
    }

    async fn balanced(&self, name: &str, expected: &[&str]) -> Arc<Service> {
        self.eventually(&format!("{name} at {expected:?}"), |services: &[Arc<Service>]| {
            let service = services.iter().find(|s| s.metadata.name.as_deref() == Some(name))?;
            (addresses(service) == expected).then(|| service.clone())
        })
        .await
    }

    async fn refused(&self, name: &str, part: &str) {
        self.eventually(part, |events: &[Arc<Event>]| {
            let found = events.iter().any(|event| {
                event.involved_object.name.as_deref() == Some(name)
                    && event.reason.as_deref() == Some("SyncLoadBalancerFailed")
                    && event.message.as_ref().is_some_and(|message| message.contains(part))
            });
            found.then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_balancer_has_the_addresses_of_the_nodes_that_serve() {
    let cluster = Cluster::balancers(&[("a", "192.0.2.1"), ("b", "192.0.2.2")]).await;
    let services = cluster.api::<Service>("default");
    cluster.create::<Service>("default", service("web", json!({}))).await;
    let web = cluster.balanced("web", &["192.0.2.1", "192.0.2.2"]).await;
    assert_eq!(web.metadata.finalizers.as_deref(), Some(&[FINALIZER.to_owned()][..]));
    let ingress = web.status.as_ref().unwrap().load_balancer.as_ref().unwrap().ingress.as_ref().unwrap();
    assert_eq!(ingress[0].ip_mode.as_deref(), Some("VIP"));

    // Another's class is another's business.
    let foreign = json!({"loadBalancerClass": "example.com/other", "ports": [{"port": 81}]});
    cluster.create::<Service>("default", service("foreign", foreign)).await;

    // A node that is excluded, and one that stops being ready.
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let label =
        json!({"metadata": {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": ""}}});
    nodes.patch("a", &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
    cluster.balanced("web", &["192.0.2.2"]).await;
    let silent = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
    nodes.patch_status("b", &PatchParams::default(), &Patch::Strategic(silent)).await.unwrap();
    cluster.balanced("web", &[]).await;
    let label =
        json!({"metadata": {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": null}}});
    nodes.patch("a", &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
    cluster.balanced("web", &["192.0.2.1"]).await;

    // It is no longer balanced, and can be deleted.
    let patch = Patch::Merge(json!({"spec": {"type": "ClusterIP"}}));
    services.patch("web", &PatchParams::default(), &patch).await.unwrap();
    cluster
        .eventually("no finalizer", |services: &[Arc<Service>]| {
            let web = services.iter().find(|s| s.metadata.name.as_deref() == Some("web"))?;
            (web.metadata.finalizers.is_none() && addresses(web).is_empty()).then_some(())
        })
        .await;
    let foreign = services.get("foreign").await.unwrap();
    assert!(foreign.metadata.finalizers.is_none() && addresses(&foreign).is_empty());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_traffic_goes_to_nodes_with_endpoints_only() {
    let cluster = Cluster::balancers(&[("a", "192.0.2.1"), ("b", "192.0.2.2")]).await;
    cluster.create::<Service>("default", service("web", json!({"externalTrafficPolicy": "Local"}))).await;
    cluster.balanced("web", &[]).await;
    let slice = |node: &str| {
        json!({"metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
            "ports": [{"port": 8080}],
            "endpoints": [{"addresses": ["10.244.1.1"], "nodeName": node, "conditions": {"ready": true}}]})
    };
    cluster.create::<EndpointSlice>("default", slice("b")).await;
    cluster.balanced("web", &["192.0.2.2"]).await;
    let api = cluster.api::<EndpointSlice>("default");
    let moved = Patch::Merge(json!({"endpoints": slice("a")["endpoints"]}));
    api.patch("web-1", &PatchParams::default(), &moved).await.unwrap();
    cluster.balanced("web", &["192.0.2.1"]).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_takes_a_port_from_another_service_or_from_the_nodes() {
    let cluster = Cluster::balancers(&[("a", "192.0.2.1")]).await;
    cluster.create_namespace("other").await;
    cluster.create::<Service>("default", service("first", json!({}))).await;
    cluster.balanced("first", &["192.0.2.1"]).await;
    cluster.create::<Service>("other", service("second", json!({}))).await;
    cluster.refused("second", "port TCP/80 is that of Service default/first").await;
    for (name, port, why) in
        [("ssh", 22, "remote access"), ("kubelet", 10_450, "kubelets"), ("nodeport", 30_111, "node ports")]
    {
        cluster.create::<Service>("other", service(name, json!({"ports": [{"port": port}]}))).await;
        cluster.refused(name, why).await;
    }
    // An edit does not get it either: the Service loses its former address.
    cluster.create::<Service>("other", service("third", json!({"ports": [{"port": 81}]}))).await;
    cluster.balanced("third", &["192.0.2.1"]).await;
    let patch = Patch::Merge(json!({"spec": {"ports": [{"port": 80}]}}));
    cluster.api::<Service>("other").patch("third", &PatchParams::default(), &patch).await.unwrap();
    cluster.balanced("third", &[]).await;
    // A Service that waits gets the port as soon as it is free.
    cluster.api::<Service>("default").delete("first", &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("the port's next user", |services: &[Arc<Service>]| {
            let has = |name: &str| {
                services.iter().any(|s| s.metadata.name.as_deref() == Some(name) && !addresses(s).is_empty())
            };
            (has("second") != has("third")).then_some(())
        })
        .await;
    cluster.stop().await;
}
