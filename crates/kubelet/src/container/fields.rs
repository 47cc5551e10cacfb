//! Downward API: fields of a pod and resources of a container as text.

use crate::pod::model;
use crate::quantity;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// The addresses that a pod only knows at run time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Addresses {
    pub pod_ips: Vec<String>,
    pub host_ips: Vec<String>,
}

/// Allocatable amounts of the node, the limit of containers that have none.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NodeLimits {
    pub cpu_milli: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum FieldError {
    #[error("unsupported fieldPath: {0}")]
    UnknownField(String),
    #[error("unsupported container resource : {0}")]
    UnknownResource(String),
    #[error("container {0} not found")]
    NoContainer(String),
}

/// The value at `path`, as the downward API writes it.
pub(crate) fn field(pod: &Pod, path: &str, addresses: &Addresses) -> Result<String, FieldError> {
    let meta = &pod.metadata;
    let spec = model::spec(pod);
    if let Some((map, key)) = subscript(path) {
        let source = match map {
            "metadata.labels" => &meta.labels,
            "metadata.annotations" => &meta.annotations,
            _ => return Err(FieldError::UnknownField(path.into())),
        };
        return Ok(source.as_ref().and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    let text = match path {
        "metadata.name" => meta.name.clone(),
        "metadata.namespace" => meta.namespace.clone(),
        "metadata.uid" => meta.uid.clone(),
        "metadata.labels" => Some(formatted(meta.labels.as_ref())),
        "metadata.annotations" => Some(formatted(meta.annotations.as_ref())),
        "spec.nodeName" => spec.node_name.clone(),
        "spec.serviceAccountName" => spec.service_account_name.clone(),
        "status.hostIP" => addresses.host_ips.first().cloned(),
        "status.hostIPs" => Some(addresses.host_ips.join(",")),
        "status.podIP" => addresses.pod_ips.first().cloned(),
        "status.podIPs" => Some(addresses.pod_ips.join(",")),
        _ => return Err(FieldError::UnknownField(path.into())),
    };
    Ok(text.unwrap_or_default())
}

fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once("['")?;
    Some((map, rest.strip_suffix("']")?))
}

/// A map as files of the downward API show it: sorted `key="escaped value"` lines.
fn formatted(map: Option<&BTreeMap<String, String>>) -> String {
    let lines: Vec<String> = map.into_iter().flatten().map(|(k, v)| format!("{k}={v:?}")).collect();
    lines.join("\n")
}

/// The amount a `resourceFieldRef` selects, divided and rounded up.
pub(crate) fn resource(
    pod: &Pod,
    default_container: Option<&str>,
    selector: &ResourceFieldSelector,
    node: &NodeLimits,
) -> Result<String, FieldError> {
    let name =
        selector.container_name.as_deref().filter(|n| !n.is_empty()).or(default_container).unwrap_or("");
    let container = model::containers(pod)
        .into_iter()
        .find(|c| c.name() == name)
        .ok_or_else(|| FieldError::NoContainer(name.into()))?;
    amount(&container.spec, selector, node)
}

fn amount(
    container: &Container,
    selector: &ResourceFieldSelector,
    node: &NodeLimits,
) -> Result<String, FieldError> {
    let unknown = || FieldError::UnknownResource(selector.resource.clone());
    let (which, resource) = selector.resource.split_once('.').ok_or_else(unknown)?;
    let resources = container.resources.as_ref();
    let list = match which {
        "limits" => resources.and_then(|r| r.limits.as_ref()),
        "requests" => resources.and_then(|r| r.requests.as_ref()),
        _ => return Err(unknown()),
    };
    let fallback = |node_amount: i64| if which == "limits" { node_amount } else { 0 };
    let milli = match resource {
        "cpu" => quantity::milli_of(list, "cpu").unwrap_or_else(|| fallback(node.cpu_milli)),
        "memory" => {
            quantity::value_of(list, "memory").unwrap_or_else(|| fallback(node.memory)).saturating_mul(1000)
        }
        "ephemeral-storage" => quantity::value_of(list, resource)
            .unwrap_or_else(|| fallback(node.ephemeral_storage))
            .saturating_mul(1000),
        other if other.starts_with("hugepages-") => {
            quantity::value_of(list, other).unwrap_or(0).saturating_mul(1000)
        }
        _ => return Err(unknown()),
    };
    let divisor = selector.divisor.clone().unwrap_or(Quantity("1".into()));
    let divisor = quantity::milli(&divisor).filter(|d| *d > 0).unwrap_or(1000);
    Ok(milli.saturating_add(divisor - 1).div_euclid(divisor).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn pod() -> Pod {
        ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"b": "2", "a": "x\"y"}},
            "spec": {"nodeName": "node", "serviceAccountName": "sa", "containers": [
                {"name": "c", "resources": {"limits": {"cpu": "1500m"}, "requests": {"memory": "64Mi"}}}]},
        }))
        .unwrap()
    }

    #[test]
    fn fields_of_the_pod() {
        let addresses = Addresses {
            pod_ips: vec!["10.1.0.2".into(), "fd00::2".into()],
            host_ips: vec!["192.0.2.1".into(), "2001:db8::1".into()],
        };
        for (path, expected) in [
            ("metadata.name", Ok("p")),
            ("metadata.labels", Ok("a=\"x\\\"y\"\nb=\"2\"")),
            ("metadata.labels['b']", Ok("2")),
            ("metadata.annotations['none']", Ok("")),
            ("spec.nodeName", Ok("node")),
            ("status.podIP", Ok("10.1.0.2")),
            ("status.podIPs", Ok("10.1.0.2,fd00::2")),
            ("status.hostIP", Ok("192.0.2.1")),
            ("status.hostIPs", Ok("192.0.2.1,2001:db8::1")),
            ("spec.containers", Err(())),
        ] {
            let got = field(&pod(), path, &addresses);
            assert_eq!(got.map_err(|_| ()), expected.map(str::to_string), "{path}");
        }
    }

    #[test]
    fn resources_are_divided_and_rounded_up() {
        let node = NodeLimits { cpu_milli: 4000, memory: 1 << 30, ephemeral_storage: 7 };
        for (name, divisor, expected) in [
            ("limits.cpu", None, Ok("2")),
            ("limits.cpu", Some("1m"), Ok("1500")),
            ("requests.cpu", None, Ok("0")),
            ("requests.memory", Some("1Mi"), Ok("64")),
            ("limits.memory", Some("1Mi"), Ok("1024")),
            ("limits.gpu", None, Err(())),
        ] {
            let selector = ResourceFieldSelector {
                container_name: None,
                divisor: divisor.map(|d: &str| Quantity(d.into())),
                resource: name.into(),
            };
            let got = resource(&pod(), Some("c"), &selector, &node);
            assert_eq!(got.map_err(|_| ()), expected.map(str::to_string), "{name}");
        }
    }
}
