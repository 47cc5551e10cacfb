//! The horizontal pod autoscaler against a metrics API whose figures the test sets.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use ferrite_api::Status;
use ferrite_apiserver::{ApiServer, MountedGroup, MountedRequest, MountedResource, User};
use ferrite_client::{Api, read_document};
use ferrite_controllers::{AutoscalingConfig, Config};
use ferrite_json::{Value, json};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;

use crate::support::Cluster;

/// A metrics API in which every pod uses the same.
#[derive(Debug)]
struct Metrics {
    /// Thousandths of a processor. Negative: no pod has metrics.
    cpu: AtomicI64,
}

impl MountedGroup for Metrics {
    fn group(&self) -> &'static str {
        "metrics.k8s.io"
    }

    fn version(&self) -> &'static str {
        "v1beta1"
    }

    fn resources(&self) -> &'static [MountedResource] {
        &[MountedResource { plural: "pods", singular: "", kind: "PodMetrics", namespaced: true }]
    }

    fn answer<'a>(
        &'a self,
        server: &'a Arc<ApiServer>,
        request: MountedRequest,
    ) -> BoxFuture<'a, Result<Value, Status>> {
        async move {
            let admin = User::new("system:admin", ["system:masters"]);
            let client = kube::Client::new(server.in_process_client(admin), "default");
            let path = format!("/api/v1/namespaces/{}/pods", request.namespace.unwrap_or_default());
            let pods = read_document(&client, &path, "application/json", 1 << 20).await.unwrap();
            let cpu = self.cpu.load(Ordering::Relaxed);
            let selected = ferrite_api::selector::LabelSelector::parse(&request.label_selector).unwrap();
            let items: Vec<Value> = pods["items"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|pod| cpu >= 0 && selected.matches_object(pod))
                .map(|pod| {
                    json!({"metadata": {"name": pod["metadata"]["name"]}, "timestamp": Timestamp::now().to_string(),
                        "window": "0s", "containers": [{"name": "c", "usage": {"cpu": format!("{cpu}m")}}]})
                })
                .collect();
            Ok(json!({"kind": "PodMetricsList", "items": items}))
        }
        .boxed()
    }
}

async fn cluster(cpu: i64) -> (Cluster, Arc<Metrics>) {
    let metrics = Arc::new(Metrics { cpu: AtomicI64::new(cpu) });
    let autoscaling = AutoscalingConfig {
        sync_period: Duration::from_millis(50),
        downscale_stabilization: Duration::ZERO,
        ..AutoscalingConfig::default()
    };
    let config = Config { autoscaling, ..Config::default() };
    let mounted: Arc<dyn MountedGroup> = metrics.clone();
    (Cluster::start_mounted(&["a", "b"], config, vec![mounted]).await, metrics)
}

fn deployment(name: &str, replicas: i32) -> Value {
    json!({"metadata": {"name": name}, "spec": {"replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [
            {"name": "c", "image": "a:1", "resources": {"requests": {"cpu": "100m"}}}]}}}})
}

fn autoscaler(name: &str, target: (&str, &str, &str), max: i32) -> Value {
    let (api_version, kind, of) = target;
    json!({"metadata": {"name": name}, "spec": {"maxReplicas": max,
        "scaleTargetRef": {"apiVersion": api_version, "kind": kind, "name": of},
        "metrics": [{"type": "Resource", "resource": {"name": "cpu",
            "target": {"type": "Utilization", "averageUtilization": 50}}}]}})
}

const APPS: &str = "apps/v1";

impl Cluster {
    /// Waits for a condition of an autoscaler with a status and a reason, and returns its message.
    async fn condition(&self, name: &str, kind: &str, status: &str, reason: &str) -> String {
        let what = format!("{kind} {status} {reason} of {name}");
        self.eventually(&what, |all: &[Arc<HorizontalPodAutoscaler>]| {
            let found = all.iter().find(|one| one.metadata.name.as_deref() == Some(name))?;
            let conditions = found.status.as_ref()?.conditions.as_ref()?;
            let condition = conditions.iter().find(|condition| condition.type_ == kind)?;
            let is_it = condition.status == status && condition.reason.as_deref() == Some(reason);
            is_it.then(|| condition.message.clone().unwrap_or_default())
        })
        .await
    }

    async fn event(&self, reason: &str, message: &str) {
        self.eventually(&format!("{reason}: {message}"), |events: &[Arc<Event>]| {
            let is_it = |event: &&Arc<Event>| {
                event.reason.as_deref() == Some(reason) && event.message.as_deref() == Some(message)
            };
            events.iter().find(is_it).map(drop)
        })
        .await;
    }

    async fn replicas(&self, name: &str, replicas: i32) {
        self.eventually(&format!("{replicas} replicas of {name}"), |all: &[Arc<Deployment>]| {
            let found = all.iter().find(|one| one.metadata.name.as_deref() == Some(name))?;
            (found.spec.as_ref()?.replicas == Some(replicas)).then_some(())
        })
        .await;
    }

    async fn set_replicas(&self, name: &str, replicas: i32) {
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        self.api::<Deployment>("default").patch(name, &PatchParams::default(), &patch).await.unwrap();
    }
}

#[tokio::test]
async fn a_busy_deployment_grows_and_an_idle_one_shrinks() {
    let (cluster, metrics) = cluster(100).await;
    cluster.create::<Deployment>("default", deployment("web", 1)).await;
    let scaler = autoscaler("web", (APPS, "Deployment", "web"), 5);
    cluster.create::<HorizontalPodAutoscaler>("default", scaler).await;
    let up = "reason: cpu resource utilization (percentage of request) above target";
    cluster.event("SuccessfulRescale", &format!("New size: 2; {up}")).await;
    cluster.event("SuccessfulRescale", &format!("New size: 5; {up}")).await;
    cluster.replicas("web", 5).await;
    let message = cluster.condition("web", "ScalingLimited", "True", "TooManyReplicas").await;
    assert_eq!(message, "the desired replica count is more than the maximum replica count");
    let message = cluster.condition("web", "ScalingActive", "True", "ValidMetricFound").await;
    assert_eq!(
        message,
        "the HPA was able to successfully calculate a replica count from cpu resource utilization (percentage of request)"
    );
    cluster
        .eventually("the status", |all: &[Arc<HorizontalPodAutoscaler>]| {
            let status = all.first()?.status.as_ref()?;
            let current = status.current_metrics.as_ref()?.first()?.resource.as_ref()?.current.clone();
            let told = (status.current_replicas, status.desired_replicas, current.average_utilization);
            (told == (Some(5), 5, Some(100))).then_some(())?;
            status.last_scale_time.as_ref().map(drop)
        })
        .await;

    metrics.cpu.store(1, Ordering::Relaxed);
    cluster.event("SuccessfulRescale", "New size: 1; reason: All metrics below target").await;
    cluster.replicas("web", 1).await;
    cluster.condition("web", "AbleToScale", "True", "ReadyForNewScale").await;

    // Somebody else's numbers are brought into the range.
    cluster.set_replicas("web", 9).await;
    let reason = "New size: 5; reason: Current number of replicas above Spec.MaxReplicas";
    cluster.event("SuccessfulRescale", reason).await;

    // No target of zero replicas is scaled.
    cluster.replicas("web", 1).await;
    cluster.set_replicas("web", 0).await;
    let message = cluster.condition("web", "ScalingActive", "False", "ScalingDisabled").await;
    assert_eq!(message, "scaling is disabled since the replica count of the target is zero");
    cluster.replicas("web", 0).await;
    cluster.stop().await;
}

#[tokio::test]
async fn problems_are_told() {
    let (cluster, metrics) = cluster(-1).await;
    let target = (APPS, "Deployment", "web");
    cluster.create::<HorizontalPodAutoscaler>("default", autoscaler("web", target, 5)).await;
    let message = cluster.condition("web", "AbleToScale", "False", "FailedGetScale").await;
    assert!(
        message.starts_with("the HPA controller was unable to get the target's current scale: "),
        "{message}"
    );
    assert!(message.contains("\"web\" not found"), "{message}");

    // The target comes, its metrics do not.
    cluster.create::<Deployment>("default", deployment("web", 1)).await;
    let why = "failed to get cpu utilization: unable to get metrics for resource cpu: no metrics returned from resource metrics API";
    let message = cluster.condition("web", "ScalingActive", "False", "FailedGetResourceMetric").await;
    assert_eq!(message, format!("the HPA was unable to compute the replica count: {why}"));
    cluster.event("FailedGetResourceMetric", why).await;
    let all = format!(
        "invalid metrics (1 invalid out of 1), first error is: failed to get cpu resource metric value: {why}"
    );
    cluster.event("FailedComputeMetricsReplicas", &all).await;
    metrics.cpu.store(50, Ordering::Relaxed);
    cluster.condition("web", "ScalingActive", "True", "ValidMetricFound").await;

    // Two autoscalers of the same pods stop each other, until one goes.
    cluster.create::<HorizontalPodAutoscaler>("default", autoscaler("other", target, 5)).await;
    let message = cluster.condition("web", "ScalingActive", "False", "AmbiguousSelector").await;
    assert_eq!(
        message,
        "pods by selector app=web are controlled by multiple HPAs: [{other default} {web default}]"
    );
    let api = cluster.api::<HorizontalPodAutoscaler>("default");
    api.delete("other", &DeleteParams::default()).await.unwrap();
    cluster.condition("web", "ScalingActive", "True", "ValidMetricFound").await;

    // A kind that nobody serves.
    let nobody = autoscaler("nobody", ("a.example/v1", "Widget", "w"), 5);
    cluster.create::<HorizontalPodAutoscaler>("default", nobody).await;
    let message = cluster.condition("nobody", "AbleToScale", "False", "FailedGetScale").await;
    assert!(message.ends_with(": no matches for kind \"Widget\" in group \"a.example\""), "{message}");
    let external = json!({"metadata": {"name": "outside"}, "spec": {"maxReplicas": 5, "scaleTargetRef": {
        "apiVersion": APPS, "kind": "Deployment", "name": "web"}, "metrics": [{"type": "External", "external": {
        "metric": {"name": "queue"}, "target": {"type": "Value", "value": "10"}}}]}});
    api.delete("web", &DeleteParams::default()).await.unwrap();
    cluster.create::<HorizontalPodAutoscaler>("default", external).await;
    let message = cluster.condition("outside", "ScalingActive", "False", "FailedGetExternalMetric").await;
    assert_eq!(
        message,
        "the HPA was unable to compute the replica count: unable to get external metric default/queue/nil: unable to fetch metrics from external metrics API: the server could not find the requested resource (get queue.external.metrics.k8s.io)"
    );
    cluster.stop().await;
}

#[tokio::test]
async fn custom_kinds_are_scaled() {
    let (cluster, _) = cluster(100).await;
    let definition = json!({"metadata": {"name": "widgets.a.example"}, "spec": {"group": "a.example", "scope": "Namespaced",
        "names": {"plural": "widgets", "kind": "Widget"}, "versions": [{"name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                "spec": {"type": "object", "properties": {"replicas": {"type": "integer"}}},
                "status": {"type": "object", "properties": {"replicas": {"type": "integer"}, "selector": {"type": "string"}}}}}},
            "subresources": {"scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector"}}}]}});
    let definition = ferrite_json::from_value(definition).unwrap();
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    definitions.create(&PostParams::default(), &definition).await.unwrap();
    cluster
        .eventually("the kind", |all: &[Arc<CustomResourceDefinition>]| {
            let conditions = all.first()?.status.as_ref()?.conditions.as_ref()?;
            conditions.iter().find(|one| one.type_ == "Established" && one.status == "True").map(drop)
        })
        .await;
    // The pods of the widget are somebody else's business: here, a Deployment's.
    cluster.create::<Deployment>("default", deployment("web", 1)).await;
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("a.example", "v1", "Widget"));
    let widgets: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), "default", &kind);
    let widget = json!({"apiVersion": "a.example/v1", "kind": "Widget", "metadata": {"name": "w"},
        "spec": {"replicas": 1}, "status": {"replicas": 1, "selector": "app=web"}});
    let widget = ferrite_json::from_value(widget).unwrap();
    widgets.create(&PostParams::default(), &widget).await.unwrap();
    let scaler = autoscaler("w", ("a.example/v1", "Widget", "w"), 9);
    cluster.create::<HorizontalPodAutoscaler>("default", scaler).await;
    let reason = "reason: cpu resource utilization (percentage of request) above target";
    cluster.event("SuccessfulRescale", &format!("New size: 2; {reason}")).await;
    assert_eq!(widgets.get("w").await.unwrap().data["spec"]["replicas"], 2);
    cluster.stop().await;
}
