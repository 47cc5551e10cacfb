//! Usage of nodes and pods, and autoscaling by it and by a custom metrics adapter.

use crate::world::*;
use ferrite_json::Value;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};

fn deployment(name: &str, command: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - {{name: c, image: {TOOLS}, command: [/ferrite, tools, {command}], resources: {{requests: {{cpu: 20m}}}}}}
"
    )
}

fn condition_is(object: &Value, kind: &str, reason: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == kind && one["reason"] == reason))
}

#[test]
fn usage_is_told_and_scaled_by() {
    let world = World::start();
    world.create(&deployment("busy", "spin"));
    world.wait_rolled_out("busy", 1);

    // The first answer has figures: samples are taken while it waits. A pod that has just started has none yet.
    let top = eventually("usage of the pod", || {
        let output = world.try_kubectl(&["top", "pod", "--no-headers"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().find(|line| line.starts_with("busy-") && !line.contains(" 0m ")).map(str::to_owned)
    });
    let words: Vec<&str> = top.split_whitespace().collect();
    let millis: u64 = words[1].trim_end_matches('m').parse().unwrap();
    assert!(millis > 20, "a busy pod uses more than it requested: {top}");
    assert!(world.kubectl(&["top", "node", "node", "--no-headers"]).contains('%'));
    let pod = world.living_pods("app=busy")[0]["metadata"]["name"].as_str().unwrap().to_owned();
    let metrics: Value = ferrite_json::from_str(&world.kubectl(&[
        "get",
        "--raw",
        &format!("/apis/metrics.k8s.io/v1beta1/namespaces/default/pods/{pod}"),
    ]))
    .unwrap();
    assert_eq!(metrics["metadata"]["labels"]["app"], "busy");
    let none = "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods?labelSelector=app%3Dnone";
    assert!(world.kubectl(&["get", "--raw", none]).contains("\"items\":[]"));
    assert!(world.kubectl(&["get", "apiservice", "v1beta1.metrics.k8s.io"]).contains("Local"));
    assert!(world.kubectl(&["api-resources", "--api-group=metrics.k8s.io"]).contains("PodMetrics"));
    let denied = world.kubectl_fails(&["top", "pod", "--as", "nobody"]);
    assert!(denied.contains("pods.metrics.k8s.io is forbidden"), "{denied}");

    // By usage: 20m are requested and far more are used.
    world.create(
        "apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: busy}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: busy}
  maxReplicas: 2
  metrics:
  - {type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 50}}}
",
    );
    world.watch(&["hpa", "busy"], |hpa| {
        condition_is(hpa, "AbleToScale", "SucceededRescale") || hpa["status"]["desiredReplicas"] == 2
    });
    world.wait_rolled_out("busy", 2);
    let events = world.kubectl(&["get", "events", "--field-selector=reason=SuccessfulRescale"]);
    assert!(
        events.contains("New size: 2; reason: cpu resource utilization (percentage of request) above target"),
        "{events}"
    );
}

/// The example `constant_adapter`, ended with the test.
struct Adapter(Child);

impl Drop for Adapter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Cargo puts examples beside the binary.
fn adapter() -> PathBuf {
    let directory = ferrite();
    directory.parent().unwrap().join("examples/constant_adapter")
}

#[test]
fn a_custom_metrics_adapter_is_scaled_by() {
    let world = World::start();
    assert!(adapter().exists(), "build it with: cargo build -p ferrite-metrics --example constant_adapter");
    let kubeconfig = world.path("kubeconfig");
    let mut command = world.command(
        adapter().to_str().unwrap(),
        &["--listen", "0.0.0.0:9997", "--kubeconfig", kubeconfig.to_str().unwrap()],
    );
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    let _adapter = Adapter(child);
    assert!(said.starts_with("serving at"), "{said}");

    let raw = "/apis/custom.metrics.k8s.io/v1beta1";
    assert!(world.kubectl_fails(&["get", "--raw", raw]).contains("NotFound"));
    let node = world.get(&["node", "node"]);
    let addresses = node["status"]["addresses"].as_array().unwrap();
    let address = addresses.iter().find(|a| a["type"] == "InternalIP").unwrap()["address"].as_str().unwrap();
    world.create(&format!(
        "apiVersion: v1
kind: Service
metadata: {{name: adapter}}
spec: {{ports: [{{name: https, port: 443, targetPort: 9997}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: adapter, labels: {{kubernetes.io/service-name: adapter}}}}
addressType: IPv4
endpoints: [{{addresses: [{address}]}}]
ports: [{{name: https, port: 9997}}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {{name: v1beta1.custom.metrics.k8s.io}}
spec:
  group: custom.metrics.k8s.io
  version: v1beta1
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {{namespace: default, name: adapter, port: 443}}
"
    ));
    world.watch(&["apiservice", "v1beta1.custom.metrics.k8s.io"], |api| {
        condition(api, "Available") == Some("True")
    });
    assert!(world.kubectl(&["get", "--raw", raw]).contains("MetricValueList"));

    // The metric is in no list of the adapter's, and 10 is twice the target.
    world.create(&deployment("web", "sleep"));
    world.wait_rolled_out("web", 1);
    world.create(
        "apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: web}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: web}
  maxReplicas: 2
  metrics:
  - {type: Pods, pods: {metric: {name: anything}, target: {type: AverageValue, averageValue: 5}}}
",
    );
    world.wait_rolled_out("web", 2);
    let events = world.kubectl(&["get", "events", "--field-selector=reason=SuccessfulRescale"]);
    assert!(events.contains("New size: 2; reason: pods metric anything above target"), "{events}");
    world.watch(&["hpa", "web"], |hpa| {
        hpa["status"]["currentMetrics"][0]["pods"]["current"]["averageValue"] == "10"
    });
    assert!(world.kubectl(&["get", "hpa", "web"]).contains("10/5"));
}
