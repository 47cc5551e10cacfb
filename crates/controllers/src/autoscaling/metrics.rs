//! Clients of the three metrics APIs. The servers behind them are extensions: their answers are limited in size and
//! time, and entries that make no sense are left out.

use std::time::Duration;

use ferrite_api::quantity::Quantity;
use ferrite_api::selector::LabelSelector;
use ferrite_client::{message_of, read_document};
use ferrite_component::GoDuration;
use ferrite_json::Value;
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::CrossVersionObjectReference;
use kube::Client;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::pods::{PodMetric, PodMetrics};
use crate::kinds::{CUSTOM_METRICS, Kinds};

/// The most that a metrics API may answer.
const LARGEST: usize = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(30);
/// As upstream: the window of custom metrics that have none.
const DEFAULT_WINDOW: Duration = Duration::from_secs(60);

/// A metrics API did not give a figure. In upstream's words.
#[derive(Debug, thiserror::Error)]
pub(super) enum MetricsError {
    #[error("unable to fetch metrics from {api} metrics API: {why}")]
    Fetch { api: &'static str, why: String },
    #[error("no metrics returned from {api} metrics API")]
    Empty { api: &'static str },
}

const RESOURCE: &str = "resource";
const CUSTOM: &str = "custom";
const EXTERNAL: &str = "external";

/// Reads metrics as the controller.
#[derive(Clone)]
pub(super) struct MetricsClient {
    client: Client,
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// The query of a request: the parameters that say something.
fn query(parameters: &[(&str, String)]) -> String {
    let set: Vec<String> = parameters
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name}={}", encoded(value)))
        .collect();
    if set.is_empty() { String::new() } else { format!("?{}", set.join("&")) }
}

/// The error as upstream's client words it when the server answers with no Status.
fn reason(error: &kube::Error, resource: &str) -> String {
    let is_status = |status: &kube::core::Status| status.reason != "Failed to parse error data";
    match error {
        kube::Error::Api(status) if status.code == 404 && !is_status(status) => {
            format!("the server could not find the requested resource (get {resource})")
        }
        kube::Error::Api(status) if status.code == 503 && !is_status(status) => {
            format!("the server is currently unable to handle the request (get {resource})")
        }
        other => message_of(other),
    }
}

impl MetricsClient {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    async fn items(&self, api: &'static str, path: &str, resource: &str) -> Result<Vec<Value>, MetricsError> {
        let asking = read_document(&self.client, path, "application/json", LARGEST);
        let mut answer = match tokio::time::timeout(TIMEOUT, asking).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(MetricsError::Fetch { api, why: reason(&error, resource) }),
            Err(_) => {
                let why = format!("no answer within {} s", TIMEOUT.as_secs());
                return Err(MetricsError::Fetch { api, why });
            }
        };
        match answer.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) if !items.is_empty() => Ok(items.into_iter().collect()),
            _ => Err(MetricsError::Empty { api }),
        }
    }

    /// The usage of a resource by the pods of a selector, or by one container of each.
    pub(super) async fn resource(
        &self,
        resource: &str,
        namespace: &str,
        selector: &LabelSelector,
        container: &str,
    ) -> Result<PodMetrics, MetricsError> {
        let query = query(&[("labelSelector", selector.to_string())]);
        let path = format!("/apis/metrics.k8s.io/v1beta1/namespaces/{namespace}/pods{query}");
        let items = self.items(RESOURCE, &path, "pods.metrics.k8s.io").await?;
        Ok(items.iter().filter_map(|item| usage_of(item, resource, container)).collect())
    }

    /// The values of a metric of the pods of a selector.
    pub(super) async fn pods(
        &self,
        kinds: &Kinds,
        metric: &str,
        namespace: &str,
        selector: &LabelSelector,
        metric_selector: &LabelSelector,
    ) -> Result<PodMetrics, MetricsError> {
        let query = query(&[
            ("labelSelector", selector.to_string()),
            ("metricLabelSelector", metric_selector.to_string()),
        ]);
        let place = format!("namespaces/{namespace}/pods/%2A/{}{query}", encoded(metric));
        let items = self.items(CUSTOM, &custom(kinds, &place)?, "pods.custom.metrics.k8s.io").await?;
        Ok(items.iter().filter_map(pod_value).collect())
    }

    /// The value of a metric of one object.
    pub(super) async fn object(
        &self,
        kinds: &Kinds,
        metric: &str,
        namespace: &str,
        object: &CrossVersionObjectReference,
        metric_selector: &LabelSelector,
    ) -> Result<i64, MetricsError> {
        let fetch = |why: String| MetricsError::Fetch { api: CUSTOM, why };
        let group = group_of(object.api_version.as_deref().unwrap_or_default());
        let metric = encoded(metric);
        let place = match (group, object.kind.as_str()) {
            // As upstream: the object's name is not read, so that nobody reaches another namespace.
            ("", "Namespace") => format!("namespaces/{namespace}/metrics/{metric}"),
            (group, kind) => {
                let resource = kinds.mappings(group, kind).first();
                let resource = resource.ok_or_else(|| fetch(no_match(group, kind)))?.group_resource();
                format!("namespaces/{namespace}/{resource}/{}/{metric}", encoded(&object.name))
            }
        };
        let query = query(&[("metricLabelSelector", metric_selector.to_string())]);
        let path = custom(kinds, &format!("{place}{query}"))?;
        let items = self.items(CUSTOM, &path, CUSTOM_METRICS).await;
        let items = match items {
            Err(MetricsError::Empty { .. }) => Vec::new(),
            other => other?,
        };
        match items.as_slice() {
            [item] => amount(&item["value"]).ok_or_else(|| fetch("the value is no quantity".to_owned())),
            several => Err(fetch(format!(
                "the custom metrics API server returned {} results when we asked for exactly one",
                several.len()
            ))),
        }
    }

    /// The values of an external metric.
    pub(super) async fn external(
        &self,
        metric: &str,
        namespace: &str,
        selector: &LabelSelector,
    ) -> Result<Vec<i64>, MetricsError> {
        let query = query(&[("labelSelector", selector.to_string())]);
        let path = format!(
            "/apis/external.metrics.k8s.io/v1beta1/namespaces/{namespace}/{}{query}",
            encoded(metric)
        );
        let items = self.items(EXTERNAL, &path, &format!("{metric}.external.metrics.k8s.io")).await?;
        Ok(items.iter().filter_map(|item| amount(&item["value"])).collect())
    }
}

/// The group of an `apiVersion`.
pub(super) fn group_of(api_version: &str) -> &str {
    api_version.split_once('/').map_or("", |(group, _)| group)
}

/// The words of upstream's REST mapper for a kind that is not served.
pub(super) fn no_match(group: &str, kind: &str) -> String {
    format!("no matches for kind {kind:?} in group {group:?}")
}

fn custom(kinds: &Kinds, place: &str) -> Result<String, MetricsError> {
    let version = kinds.custom_metrics().ok_or_else(|| MetricsError::Fetch {
        api: CUSTOM,
        why: format!("no custom metrics API ({CUSTOM_METRICS}) registered"),
    })?;
    Ok(format!("/apis/{CUSTOM_METRICS}/{version}/{place}"))
}

fn amount(value: &Value) -> Option<i64> {
    Quantity::parse(value.as_str()?).ok().map(|quantity| quantity.milli_value())
}

fn timestamp(value: &Value) -> Timestamp {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// The usage of one pod: none if any of its containers has none.
fn usage_of(item: &Value, resource: &str, container: &str) -> Option<(String, PodMetric)> {
    let containers = item["containers"].as_array().filter(|containers| !containers.is_empty())?;
    let usage = |container: &Value| amount(&container["usage"][resource]);
    let value = match container {
        "" => {
            containers.iter().try_fold(0i64, |sum, container| Some(sum.saturating_add(usage(container)?)))?
        }
        name => usage(containers.iter().find(|container| container["name"] == name)?)?,
    };
    let window = item["window"].as_str().unwrap_or_default().parse::<GoDuration>();
    let metric = PodMetric {
        timestamp: timestamp(&item["timestamp"]),
        window: window.map_or(Duration::ZERO, |window| window.0),
        value,
    };
    Some((item["metadata"]["name"].as_str()?.to_owned(), metric))
}

/// The value of a custom metric of one pod, in either version of the API.
fn pod_value(item: &Value) -> Option<(String, PodMetric)> {
    let window = item["windowSeconds"].as_u64().or_else(|| item["window"].as_u64());
    let metric = PodMetric {
        timestamp: timestamp(&item["timestamp"]),
        window: window.map_or(DEFAULT_WINDOW, Duration::from_secs),
        value: amount(&item["value"])?,
    };
    Some((item["describedObject"]["name"].as_str()?.to_owned(), metric))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn usage_is_the_sum_of_containers_that_all_tell() {
        let item = |containers: Value| json!({"metadata": {"name": "p"}, "timestamp": "2024-01-01T00:00:00Z", "window": "15.5s", "containers": containers});
        let used = |name: &str, cpu: &str| json!({"name": name, "usage": {"cpu": cpu, "memory": "1Ki"}});
        let rows = [
            (json!([used("a", "100m"), used("b", "1")]), "", Some(1100)),
            (json!([used("a", "100m"), used("b", "1")]), "b", Some(1000)),
            (json!([used("a", "100m")]), "z", None),
            (json!([used("a", "100m"), {"name": "b", "usage": {}}]), "", None),
            (json!([used("a", "nonsense")]), "", None),
            (json!([]), "", None),
            (json!(null), "", None),
        ];
        for (containers, container, expected) in rows {
            let found = usage_of(&item(containers.clone()), "cpu", container);
            assert_eq!(found.as_ref().map(|(_, metric)| metric.value), expected, "{containers} {container}");
            if let Some((name, metric)) = found {
                assert_eq!((&*name, metric.window), ("p", Duration::from_millis(15500)));
            }
        }
    }

    #[test]
    fn custom_values_are_read_in_both_versions() {
        let old =
            json!({"describedObject": {"name": "p"}, "metricName": "m", "window": 30, "value": "1500m"});
        let new = json!({"describedObject": {"name": "p"}, "metric": {"name": "m"}, "windowSeconds": 30, "value": "1500m"});
        let bare = json!({"describedObject": {"name": "p"}, "value": "2"});
        let read = |item: &Value| pod_value(item).map(|(_, metric)| (metric.value, metric.window.as_secs()));
        assert_eq!(read(&old), Some((1500, 30)));
        assert_eq!(read(&new), Some((1500, 30)));
        assert_eq!(read(&bare), Some((2000, 60)));
        assert_eq!(read(&json!({"describedObject": {}, "value": "2"})), None);
        assert_eq!(read(&json!({"describedObject": {"name": "p"}, "value": 2})), None);
    }

    #[test]
    fn names_cannot_leave_their_place_in_a_path() {
        assert_eq!(encoded("a/../b?c"), "a%2F%2E%2E%2Fb%3Fc");
        assert_eq!(
            query(&[("labelSelector", "a=b,c in (d)".into()), ("metricLabelSelector", String::new())]),
            "?labelSelector=a%3Db%2Cc%20in%20%28d%29"
        );
    }
}
