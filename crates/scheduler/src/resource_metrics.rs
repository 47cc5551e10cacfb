//! The page `/metrics/resources`: requests and limits of pods, as the scheduler counts them.

use std::fmt::Write;
use std::sync::Arc;

use ferrite_client::Informer;
use k8s_openapi::api::core::v1::{Pod, PodSpec};

use crate::resources::{Resources, pod_limits, pod_requests};

/// The amounts of a pod that one family shows.
type Amounts = fn(&PodSpec) -> Resources;

const REQUEST: &str = "kube_pod_resource_request";
const LIMIT: &str = "kube_pod_resource_limit";

/// The page for all pods that the informer knows.
pub fn page(pods: &Informer<Pod>) -> String {
    text(&pods.list())
}

fn text(pods: &[Arc<Pod>]) -> String {
    let mut out = String::new();
    let families: [(&str, &str, Amounts); 2] = [
        (LIMIT, "Limits of each pod that is not finished, by resource, with its unit.", pod_limits),
        (REQUEST, "Requests of each pod that is not finished, by resource, with its unit.", |spec| {
            pod_requests(spec, None)
        }),
    ];
    for (name, help, amounts) in families {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# HELP {name} [STABLE] {help}\n# TYPE {name} gauge");
        for pod in pods.iter().filter(|pod| !is_terminal(pod)) {
            let Some(spec) = &pod.spec else { continue };
            write_pod(&mut out, name, pod, spec, &amounts(spec));
        }
    }
    out
}

/// As upstream: a pod without a node cannot be finished.
fn is_terminal(pod: &Pod) -> bool {
    let has_node =
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).is_some_and(|name| !name.is_empty());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    has_node && matches!(phase, Some("Succeeded" | "Failed"))
}

fn unit(resource: &str) -> &'static str {
    match resource {
        "cpu" => "cores",
        "memory" | "storage" | "ephemeral-storage" => "bytes",
        name if name.starts_with("hugepages-") => "bytes",
        name if name.starts_with("attachable-volumes-") => "integer",
        _ => "",
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn write_pod(out: &mut String, family: &str, pod: &Pod, spec: &PodSpec, amounts: &Resources) {
    let text = |text: Option<&str>| escaped(text.unwrap_or_default());
    let (namespace, name) = (text(pod.metadata.namespace.as_deref()), text(pod.metadata.name.as_deref()));
    let (node, scheduler) = (text(spec.node_name.as_deref()), text(spec.scheduler_name.as_deref()));
    let priority = spec.priority.map(|priority| priority.to_string()).unwrap_or_default();
    let plain = [("memory", amounts.memory), ("ephemeral-storage", amounts.ephemeral_storage)];
    let others = amounts.scalar.iter().map(|(name, amount)| (name.as_str(), *amount));
    let cpu = (amounts.milli_cpu != 0).then(|| ("cpu", amounts.milli_cpu as f64 / 1000.0));
    let whole = plain.into_iter().chain(others).filter(|(_, amount)| *amount != 0);
    for (resource, amount) in cpu.into_iter().chain(whole.map(|(name, amount)| (name, amount as f64))) {
        let (unit, resource) = (unit(resource), escaped(resource));
        let _ = writeln!(
            out,
            "{family}{{namespace=\"{namespace}\",node=\"{node}\",pod=\"{name}\",priority=\"{priority}\",\
             resource=\"{resource}\",scheduler=\"{scheduler}\",unit=\"{unit}\"}} {amount}"
        );
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn lines(spec: Value, phase: &str) -> Vec<String> {
        let pod =
            json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": spec, "status": {"phase": phase}});
        let text = text(&[Arc::new(ferrite_json::from_value(pod).unwrap())]);
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    #[test]
    fn requests_and_limits_are_shown_with_their_units() {
        let container = json!({"name": "c", "resources": {
            "requests": {"cpu": "100m", "memory": "1Ki", "example.com/gpu": "2", "hugepages-2Mi": "2Mi"},
            "limits": {"memory": "2Ki"}}});
        let spec = json!({"nodeName": "n", "schedulerName": "s", "priority": 7, "containers": [container.clone(), container],
            "overhead": {"cpu": "50m", "memory": "1Ki"}});
        let line = |family: &str, resource: &str, unit: &str, amount: &str| {
            format!(
                "{family}{{namespace=\"ns\",node=\"n\",pod=\"p\",priority=\"7\",resource=\"{resource}\",\
                 scheduler=\"s\",unit=\"{unit}\"}} {amount}"
            )
        };
        let expected = [
            line(LIMIT, "memory", "bytes", "5120"),
            line(REQUEST, "cpu", "cores", "0.25"),
            line(REQUEST, "memory", "bytes", "3072"),
            line(REQUEST, "example.com/gpu", "", "4"),
            line(REQUEST, "hugepages-2Mi", "bytes", "4194304"),
        ];
        assert_eq!(lines(spec.clone(), "Running"), expected);
        assert_eq!(lines(spec, "Failed"), Vec::<String>::new());
    }

    #[test]
    fn a_pod_that_waits_is_shown_without_a_node() {
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}],
            "resources": {"limits": {"cpu": "2"}}});
        let shown = |family: &str, amount: i64| {
            format!(
                "{family}{{namespace=\"ns\",node=\"\",pod=\"p\",priority=\"\",resource=\"cpu\",scheduler=\"\",\
                 unit=\"cores\"}} {amount}"
            )
        };
        assert_eq!(lines(spec, "Failed"), [shown(LIMIT, 2), shown(REQUEST, 1)]);
    }

    #[test]
    fn values_of_labels_are_escaped() {
        assert_eq!(escaped("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
    }
}
