//! The group as the API server mounts it.

use crate::collector::{Collector, client_of};
use crate::objects::{API_VERSION, node_metrics, pod_metrics};
use ferrite_api::Status;
use ferrite_api::selector::FieldSelector;
use ferrite_apiserver::{ApiServer, MountedGroup, MountedRequest, MountedResource};
use ferrite_client::{is_not_found, message_of, read_document};
use ferrite_json::{Value, json};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::sync::Arc;

const GROUP: &str = "metrics.k8s.io";
/// The most that a list of pods may take.
const LARGEST: usize = 1 << 30;

/// `metrics.k8s.io/v1beta1`, from the kubelets' figures.
#[derive(Debug, Default)]
pub struct ResourceMetrics {
    collector: Arc<Collector>,
}

impl MountedGroup for ResourceMetrics {
    fn group(&self) -> &'static str {
        GROUP
    }

    fn version(&self) -> &'static str {
        "v1beta1"
    }

    fn resources(&self) -> &'static [MountedResource] {
        &[
            MountedResource { plural: "nodes", singular: "", kind: "NodeMetrics", namespaced: false },
            MountedResource { plural: "pods", singular: "", kind: "PodMetrics", namespaced: true },
        ]
    }

    /// As metrics-server installs it: a user who may view pods may view their metrics.
    fn roles(&self) -> Vec<Value> {
        vec![json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {
                "name": "system:aggregated-metrics-reader",
                "labels": {
                    "rbac.authorization.k8s.io/aggregate-to-admin": "true",
                    "rbac.authorization.k8s.io/aggregate-to-edit": "true",
                    "rbac.authorization.k8s.io/aggregate-to-view": "true",
                },
            },
            "rules": [{"apiGroups": [GROUP], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]}],
        })]
    }

    fn answer<'a>(
        &'a self,
        server: &'a Arc<ApiServer>,
        request: MountedRequest,
    ) -> BoxFuture<'a, Result<Value, Status>> {
        async move {
            check_fields(&request.field_selector)?;
            self.collector.ready(server).await;
            let client = client_of(server);
            let path = path(&request);
            let found = read_document(&client, &path, "application/json", LARGEST).await;
            let named = request.name.is_some();
            let found = match found {
                Err(error) if named && is_not_found(&error) => return Err(not_found(&request)),
                found => found.map_err(|error| refusal(&error))?,
            };
            if named {
                return self.metrics_of(&request.resource, &found).ok_or_else(|| not_found(&request));
            }
            let objects = found["items"].as_array().map_or(&[][..], |items| items.as_slice());
            let items: Vec<Value> =
                objects.iter().filter_map(|object| self.metrics_of(&request.resource, object)).collect();
            let kind = if request.resource == "pods" { "PodMetricsList" } else { "NodeMetricsList" };
            Ok(json!({"kind": kind, "apiVersion": API_VERSION, "metadata": {}, "items": items}))
        }
        .boxed()
    }
}

impl ResourceMetrics {
    /// The metrics of a pod or a node, if there are any yet.
    fn metrics_of(&self, resource: &str, object: &Value) -> Option<Value> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let name = text(&object["metadata"]["name"])?;
        if resource == "nodes" {
            return Some(node_metrics(object, &self.collector.node(&name)?, Timestamp::now()));
        }
        let node = object["spec"]["nodeName"].as_str()?;
        let key = (text(&object["metadata"]["namespace"])?, name);
        pod_metrics(object, &self.collector.pod(node, &key)?, Timestamp::now())
    }
}

/// Metrics have a name and a namespace to be selected by. Other fields are those of pods, which the user may not be
/// allowed to know.
fn check_fields(selector: &str) -> Result<(), Status> {
    let parsed = FieldSelector::parse(selector).map_err(|error| Status::bad_request(error.to_string()))?;
    match parsed.terms().iter().find(|term| !matches!(&*term.field, "metadata.name" | "metadata.namespace")) {
        None => Ok(()),
        Some(term) => Err(Status::bad_request(format!("field label not supported: {}", term.field))),
    }
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// The pods or nodes whose metrics are asked for.
fn path(request: &MountedRequest) -> String {
    let mut path = "/api/v1".to_owned();
    if let Some(namespace) = &request.namespace {
        path = format!("{path}/namespaces/{}", encoded(namespace));
    }
    path = format!("{path}/{}", request.resource);
    if let Some(name) = &request.name {
        return format!("{path}/{}", encoded(name));
    }
    let selectors = [("labelSelector", &request.label_selector), ("fieldSelector", &request.field_selector)];
    let query: Vec<String> = selectors
        .iter()
        .filter(|(_, selector)| !selector.is_empty())
        .map(|(name, selector)| format!("{name}={}", encoded(selector)))
        .collect();
    if query.is_empty() { path } else { format!("{path}?{}", query.join("&")) }
}

/// In metrics-server's words.
fn not_found(request: &MountedRequest) -> Status {
    let name = request.name.as_deref().unwrap_or_default();
    match &request.namespace {
        Some(namespace) => Status::not_found(GROUP, "podmetrics", &format!("{namespace}/{name}")),
        None => Status::not_found(GROUP, "nodemetrics", name),
    }
}

fn refusal(error: &kube::Error) -> Status {
    match error {
        kube::Error::Api(status) if status.code == 400 => Status::bad_request(status.message.clone()),
        other => Status::internal(message_of(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(namespace: Option<&str>, name: Option<&str>, labels: &str, fields: &str) -> MountedRequest {
        MountedRequest {
            resource: "pods".to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
            label_selector: labels.to_owned(),
            field_selector: fields.to_owned(),
        }
    }

    #[test]
    fn requests_are_about_pods() {
        assert_eq!(path(&request(None, None, "", "")), "/api/v1/pods");
        assert_eq!(path(&request(Some("n"), Some("p"), "", "")), "/api/v1/namespaces/n/pods/p");
        let found = path(&request(Some("n"), None, "a=b", "metadata.name=x"));
        assert_eq!(found, "/api/v1/namespaces/n/pods?labelSelector=a%3Db&fieldSelector=metadata%2Ename%3Dx");
        let error = not_found(&request(Some("n"), Some("p"), "", ""));
        assert_eq!(error.message, "podmetrics.metrics.k8s.io \"n/p\" not found");
    }

    #[test]
    fn only_names_can_be_selected_by_field() {
        assert!(check_fields("").is_ok());
        assert!(check_fields("metadata.name=a,metadata.namespace!=b").is_ok());
        assert!(check_fields("spec.nodeName=a").is_err());
    }
}
