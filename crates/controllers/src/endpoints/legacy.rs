//! Endpoints: one object per Service with all its addresses, as clients before EndpointSlices read them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, EventRecorder, EventType, Informer, ObjectKey, is_not_found, message_of};
use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{DeleteParams, PostParams};

use super::addresses::{
    Port, addresses, can_answer, hostname, is_headless, is_managed, ports, publishes_not_ready, target,
    trigger_time,
};
use super::{HEADLESS, TRIGGER_TIME, watch};
use crate::Context;
use crate::error::{During, SyncError, is_namespace_terminating};
use crate::pods::{is_ready, node_name};

const NAME: &str = "endpoints-controller";
const MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
/// Addresses in one object at most; the rest is left out and the object says so.
const CAPACITY: usize = 1000;

struct EndpointsController {
    client: Client,
    services: Informer<Service>,
    pods: Informer<Pod>,
    endpoints: Informer<Endpoints>,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(EndpointsController {
        client: context.client.clone(),
        services: context.informers.get(),
        pods: context.informers.get(),
        endpoints: context.informers.get(),
        recorder: context.events.recorder("endpoint-controller", None),
    });
    let kit = context.controller(NAME).reconciles(&controller.endpoints);
    watch::services_and_pods(kit, &controller.services, &controller.pods)
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

impl EndpointsController {
    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let api: Api<Endpoints> = Api::namespaced(self.client.clone(), &key.namespace);
        let current = self.endpoints.get(&key);
        let Some(service) = self.services.get(&key) else {
            // Only Endpoints that this controller made go with the Service; people may keep Endpoints of
            // their own.
            let ours = current.is_some_and(|current| {
                current.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(MANAGED_BY))
            });
            if ours {
                match api.delete(&key.name, &DeleteParams::default()).await {
                    Ok(_) => {}
                    Err(error) if is_not_found(&error) => {}
                    Err(error) => return Err(error).during(|| format!("delete endpoints {key}")),
                }
            }
            return Ok(None);
        };
        if !is_managed(&service) {
            return Ok(None);
        }
        let pods = watch::selected(&service, &self.pods);
        let Some(wanted) = decide(&service, &pods, current.as_deref()) else { return Ok(None) };
        let result = if current.is_some() {
            api.replace(&key.name, &PostParams::default(), &wanted).await
        } else {
            api.create(&PostParams::default(), &wanted).await
        };
        match result {
            Ok(_) => Ok(None),
            Err(error) if is_namespace_terminating(&error) => Ok(None),
            Err(error) => {
                let (reason, verb) = match current {
                    Some(_) => ("FailedToUpdateEndpoint", "update"),
                    None => ("FailedToCreateEndpoint", "create"),
                };
                let message = format!("Failed to {verb} endpoint {key}: {}", message_of(&error));
                self.recorder.event_for(&wanted, EventType::Warning, reason, message);
                Err(error).during(|| format!("{verb} endpoints {key}"))
            }
        }
    }
}

/// The Endpoints to write, or nothing if the present ones are right.
fn decide(service: &Service, pods: &[Arc<Pod>], current: Option<&Endpoints>) -> Option<Endpoints> {
    let (subsets, over_capacity) = subsets(service, pods);
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(HEADLESS);
    if is_headless(service) {
        labels.insert(HEADLESS.to_owned(), String::new());
    }
    labels.insert(MANAGED_BY.to_owned(), "endpoint-controller".to_owned());
    if let Some(current) = current
        && current.subsets.as_deref().unwrap_or_default() == subsets.as_slice()
        && current.metadata.labels.as_ref() == Some(&labels)
    {
        return None;
    }
    let mut wanted = current.cloned().unwrap_or_else(|| Endpoints {
        metadata: ObjectMeta {
            name: service.metadata.name.clone(),
            namespace: service.metadata.namespace.clone(),
            ..ObjectMeta::default()
        },
        subsets: None,
    });
    wanted.metadata.labels = Some(labels);
    wanted.subsets = Some(subsets).filter(|subsets| !subsets.is_empty());
    let annotations = wanted.metadata.annotations.get_or_insert_default();
    annotations.remove(OVER_CAPACITY);
    if over_capacity {
        annotations.insert(OVER_CAPACITY.to_owned(), "truncated".to_owned());
    }
    if let Some(trigger) = trigger_time(service, pods.iter().map(|pod| &**pod)) {
        annotations.insert(TRIGGER_TIME.to_owned(), trigger);
    }
    Some(wanted)
}

/// Addresses grouped by the ports they answer on, sorted, and whether some were left out.
fn subsets(service: &Service, pods: &[Arc<Pod>]) -> (Vec<EndpointSubset>, bool) {
    let publish = publishes_not_ready(service);
    let ipv6 = service
        .spec
        .as_ref()
        .and_then(|spec| spec.ip_families.as_ref()?.first())
        .is_some_and(|f| f == "IPv6");
    let mut groups: BTreeMap<Vec<Port>, (Vec<EndpointAddress>, Vec<EndpointAddress>)> = BTreeMap::new();
    let mut count = 0;
    for pod in pods.iter().filter(|pod| can_answer(pod, publish)) {
        let Some(ip) = addresses(pod, ipv6).into_iter().next() else { continue };
        let ports = ports(service, pod);
        if ports.is_empty() && !is_headless(service) {
            continue;
        }
        count += 1;
        if count > CAPACITY {
            break;
        }
        let address = EndpointAddress {
            ip,
            hostname: hostname(service, pod),
            node_name: node_name(pod).map(str::to_owned),
            target_ref: Some(target(pod)),
        };
        let group = groups.entry(ports).or_default();
        if publish || is_ready(pod) { group.0.push(address) } else { group.1.push(address) }
    }
    let some = |mut addresses: Vec<EndpointAddress>| {
        addresses.sort_by(|a, b| a.ip.cmp(&b.ip));
        Some(addresses).filter(|addresses| !addresses.is_empty())
    };
    let subsets = groups
        .into_iter()
        .map(|(ports, (ready, not_ready))| EndpointSubset {
            addresses: some(ready),
            not_ready_addresses: some(not_ready),
            ports: Some(ports.iter().map(endpoint_port).collect::<Vec<_>>())
                .filter(|ports| !ports.is_empty()),
        })
        .collect();
    (subsets, count > CAPACITY)
}

fn endpoint_port(port: &Port) -> EndpointPort {
    EndpointPort {
        name: Some(port.name.clone()).filter(|name| !name.is_empty()),
        port: port.number,
        protocol: Some(port.protocol.clone()),
        app_protocol: port.app_protocol.clone(),
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    fn pod(name: &str, ip: &str, ready: bool, terminating: bool) -> Arc<Pod> {
        Arc::new(
            ferrite_json::from_value(json!({
                "metadata": {"name": name, "uid": name, "deletionTimestamp": terminating.then_some("2024-01-01T00:00:00Z")},
                "spec": {"containers": []},
                "status": {"phase": "Running", "podIP": ip,
                           "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}
            }))
            .unwrap(),
        )
    }

    #[test]
    fn addresses_are_grouped_by_readiness_and_terminating_pods_leave() {
        let service: Service =
            ferrite_json::from_value(json!({"metadata": {"name": "web", "namespace": "ns"},
            "spec": {"selector": {"a": "b"}, "ports": [{"port": 80}]}}))
            .unwrap();
        let pods = [
            pod("b", "10.0.0.2", true, false),
            pod("a", "10.0.0.1", true, false),
            pod("c", "10.0.0.3", false, false),
            pod("d", "10.0.0.4", true, true),
            pod("e", "", true, false),
        ];
        let made = decide(&service, &pods, None).unwrap();
        let subset = &made.subsets.as_ref().unwrap()[0];
        let ips = |addresses: &Option<Vec<EndpointAddress>>| -> Vec<String> {
            addresses.iter().flatten().map(|address| address.ip.clone()).collect()
        };
        assert_eq!(ips(&subset.addresses), ["10.0.0.1", "10.0.0.2"]);
        assert_eq!(ips(&subset.not_ready_addresses), ["10.0.0.3"]);
        assert_eq!(subset.ports.as_ref().unwrap()[0].port, 80);
        assert_eq!(decide(&service, &pods, Some(&made)), None, "nothing to write");
        let empty = decide(&service, &[], Some(&made)).unwrap();
        assert_eq!(empty.subsets, None);
    }
}
