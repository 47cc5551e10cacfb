//! The contribution of a pod to a Service's endpoints.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::pods::{is_finished, is_terminating, ready_since};

/// A port of a Service as it is on one pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Port {
    pub(super) name: String,
    pub(super) protocol: String,
    pub(super) number: i32,
    pub(super) app_protocol: Option<String>,
}

pub(super) fn is_headless(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.cluster_ip.as_deref()) == Some("None")
}

pub(super) fn publishes_not_ready(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.publish_not_ready_addresses).unwrap_or(false)
}

/// Returns true if the controllers maintain the endpoints of this Service: it selects pods, and is not an
/// ExternalName.
pub(super) fn is_managed(service: &Service) -> bool {
    service.spec.as_ref().is_some_and(|spec| {
        spec.selector.as_ref().is_some_and(|selector| !selector.is_empty())
            && spec.type_.as_deref() != Some("ExternalName")
    })
}

/// Returns true if the pod can be an endpoint: it has an address and has not ended.
pub(super) fn can_answer(pod: &Pod, include_terminating: bool) -> bool {
    let has_address =
        pod.status.as_ref().is_some_and(|status| status.pod_ip.as_deref().is_some_and(|ip| !ip.is_empty()));
    has_address && !is_finished(pod) && (include_terminating || !is_terminating(pod))
}

/// The ports of the Service on this pod; those whose name the pod does not have are left out.
pub(super) fn ports(service: &Service, pod: &Pod) -> Vec<Port> {
    let wanted = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    let mut ports: Vec<Port> = wanted
        .iter()
        .filter_map(|port| {
            Some(Port {
                name: port.name.clone().unwrap_or_default(),
                protocol: protocol(port).to_owned(),
                number: number(port, pod)?,
                app_protocol: port.app_protocol.clone(),
            })
        })
        .collect();
    ports.sort();
    ports
}

fn protocol(port: &ServicePort) -> &str {
    port.protocol.as_deref().filter(|protocol| !protocol.is_empty()).unwrap_or("TCP")
}

fn number(port: &ServicePort, pod: &Pod) -> Option<i32> {
    let name = match &port.target_port {
        None | Some(IntOrString::Int(0)) => return Some(port.port),
        Some(IntOrString::Int(number)) => return Some(*number),
        Some(IntOrString::String(name)) if name.is_empty() => return Some(port.port),
        Some(IntOrString::String(name)) => name,
    };
    let spec = pod.spec.as_ref()?;
    let sidecars = spec.init_containers.iter().flatten();
    spec.containers
        .iter()
        .chain(sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always")))
        .flat_map(|container| container.ports.iter().flatten())
        .find(|known| {
            known.name.as_ref() == Some(name) && known.protocol.as_deref().unwrap_or("TCP") == protocol(port)
        })
        .map(|known| known.container_port)
}

/// All addresses of the pod of one family.
pub(super) fn addresses(pod: &Pod, ipv6: bool) -> Vec<String> {
    let Some(status) = &pod.status else { return Vec::new() };
    let listed = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    let mut all: Vec<&str> = listed.collect();
    if all.is_empty() {
        all.extend(status.pod_ip.as_deref());
    }
    all.into_iter().filter(|ip| !ip.is_empty() && ip.contains(':') == ipv6).map(str::to_owned).collect()
}

/// The pod's host name, if the Service is the subdomain it asks for.
pub(super) fn hostname(service: &Service, pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let hostname = spec.hostname.clone().filter(|hostname| !hostname.is_empty())?;
    (spec.subdomain == service.metadata.name && pod.metadata.namespace == service.metadata.namespace)
        .then_some(hostname)
}

pub(super) fn target(pod: &Pod) -> ObjectReference {
    ObjectReference {
        kind: Some("Pod".to_owned()),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        ..ObjectReference::default()
    }
}

/// The last change the endpoints show: when the Service was made or a pod became ready.
pub(super) fn trigger_time<'a>(service: &Service, pods: impl Iterator<Item = &'a Pod>) -> Option<String> {
    let created = service.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let latest: Option<Timestamp> = pods.filter_map(ready_since).chain(created).max();
    latest.map(|time| time.to_string())
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn target_ports_are_resolved_on_each_pod() {
        let pod: Pod = ferrite_json::from_value(json!({"spec": {
            "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8080},
                                                   {"name": "dns", "containerPort": 53, "protocol": "UDP"}]}],
            "initContainers": [{"name": "s", "restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 9}]},
                               {"name": "i", "ports": [{"name": "init", "containerPort": 10}]}]}}))
        .unwrap();
        for (port, expected) in [
            (json!({"port": 80}), Some(80)),
            (json!({"port": 80, "targetPort": 8000}), Some(8000)),
            (json!({"port": 80, "targetPort": "web"}), Some(8080)),
            (json!({"port": 80, "targetPort": "side"}), Some(9)),
            (json!({"port": 80, "targetPort": "init"}), None),
            (json!({"port": 80, "targetPort": "dns"}), None),
            (json!({"port": 80, "targetPort": "dns", "protocol": "UDP"}), Some(53)),
        ] {
            let parsed: ServicePort = ferrite_json::from_value(port.clone()).unwrap();
            assert_eq!(number(&parsed, &pod), expected, "{port}");
        }
    }
}
