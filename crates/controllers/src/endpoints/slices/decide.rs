//! Which slices there should be, changing as few of the present ones as possible.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice, ForNode, ForZone,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::topology::{Refusal, Slices, Zones, is_auto};
use crate::endpoints::addresses::{
    Port, addresses, can_answer, hostname, is_headless, ports, publishes_not_ready, target, trigger_time,
};
use crate::endpoints::{HEADLESS, TRIGGER_TIME};
use crate::pods::{is_ready, is_terminating, node_name};
use ferrite_client::controller_reference;

pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
pub(super) const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
pub(super) const MANAGER: &str = "endpointslice-controller.k8s.io";
const ZONE: &str = "topology.kubernetes.io/zone";
/// Endpoints in one slice at most, unless configured.
pub(crate) const CAPACITY: usize = 100;

/// The slices to write.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) create: Vec<EndpointSlice>,
    pub(super) update: Vec<EndpointSlice>,
    pub(super) delete: Vec<String>,
    /// The results of the search for hints, by address family, of a Service that asks for them by annotation.
    pub(super) hinted: Vec<(&'static str, Result<Zones<usize>, Refusal>)>,
}

/// The address families of the Service, as slices call them.
pub(super) fn families(service: &Service) -> Vec<&'static str> {
    let families = service.spec.as_ref().and_then(|spec| spec.ip_families.as_deref()).unwrap_or_default();
    let mut named: Vec<&'static str> =
        families.iter().map(|family| if family == "IPv6" { "IPv6" } else { "IPv4" }).collect();
    if named.is_empty() {
        named.push("IPv4");
    }
    named
}

pub(super) fn plan(
    service: &Service,
    pods: &[Arc<Pod>],
    zone_of: impl Fn(&str) -> Option<String>,
    existing: &[Arc<EndpointSlice>],
    capacity: usize,
    ratios: Option<&Zones<f64>>,
) -> Plan {
    let mut plan = Plan::default();
    let is_auto = is_auto(service);
    let families = families(service);
    let trigger = trigger_time(service, pods.iter().map(|pod| &**pod));
    for slice in existing {
        if !families.contains(&slice.address_type.as_str()) {
            plan.delete.push(slice.metadata.name.clone().unwrap_or_default());
        }
    }
    for family in families {
        let mut wanted: BTreeMap<Vec<Port>, Vec<Endpoint>> = BTreeMap::new();
        for pod in pods.iter().filter(|pod| can_answer(pod, true)) {
            let addresses = addresses(pod, family == "IPv6");
            if !addresses.is_empty() {
                let endpoint = endpoint(service, pod, addresses, &zone_of);
                wanted.entry(ports(service, pod)).or_default().push(endpoint);
            }
        }
        let present: Vec<_> = existing.iter().filter(|slice| slice.address_type == family).collect();
        let trigger = trigger.as_deref();
        let mut slices = Slices::default();
        let delete = plan_family(service, family, wanted, &present, trigger, capacity, is_auto, &mut slices);
        if is_auto {
            plan.hinted.push((family, slices.add_hints(ratios)));
        }
        plan.create.append(&mut slices.create);
        plan.update.append(&mut slices.update);
        plan.delete.extend(delete);
    }
    plan
}

fn endpoint(
    service: &Service,
    pod: &Pod,
    addresses: Vec<String>,
    zone_of: &impl Fn(&str) -> Option<String>,
) -> Endpoint {
    let serving = is_ready(pod);
    let terminating = is_terminating(pod);
    let ready = publishes_not_ready(service) || serving && !terminating;
    let zone = node_name(pod).and_then(zone_of);
    let distributes = ready && !is_auto(service);
    Endpoint {
        addresses,
        hints: distributes.then(|| hints(service, node_name(pod), zone.as_deref())).flatten(),
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        hostname: hostname(service, pod),
        node_name: node_name(pod).map(str::to_owned),
        target_ref: Some(target(pod)),
        zone,
        ..Endpoint::default()
    }
}

/// The topology hints that the Service's `trafficDistribution` asks for.
fn hints(service: &Service, node: Option<&str>, zone: Option<&str>) -> Option<EndpointHints> {
    let distribution = service.spec.as_ref()?.traffic_distribution.as_deref()?;
    let same_node = match distribution {
        "PreferClose" | "PreferSameZone" => false,
        "PreferSameNode" => true,
        _ => return None,
    };
    let for_zones = zone.map(|zone| vec![ForZone { name: zone.to_owned() }]);
    let for_nodes = node.filter(|_| same_node).map(|node| vec![ForNode { name: node.to_owned() }]);
    (for_zones.is_some() || for_nodes.is_some()).then_some(EndpointHints { for_zones, for_nodes })
}

pub(super) fn zone(node: &Node) -> Option<String> {
    node.metadata.labels.as_ref()?.get(ZONE).cloned()
}

fn slice_ports(ports: &[Port]) -> Vec<EndpointPort> {
    ports
        .iter()
        .map(|port| EndpointPort {
            name: Some(port.name.clone()),
            protocol: Some(port.protocol.clone()),
            port: Some(port.number),
            app_protocol: port.app_protocol.clone(),
        })
        .collect()
}

fn ports_of(slice: &EndpointSlice) -> Vec<Port> {
    let mut ports: Vec<_> = slice
        .ports
        .iter()
        .flatten()
        .map(|port| Port {
            name: port.name.clone().unwrap_or_default(),
            protocol: port.protocol.clone().unwrap_or_default(),
            number: port.port.unwrap_or(0),
            app_protocol: port.app_protocol.clone(),
        })
        .collect();
    ports.sort();
    ports
}

/// Sorts the slices of a family and returns the names of those to delete. If `keeps_hints`, endpoints have the hints that they
/// had.
#[expect(clippy::too_many_arguments, reason = "all of them say how one family looks")]
fn plan_family(
    service: &Service,
    family: &str,
    mut wanted: BTreeMap<Vec<Port>, Vec<Endpoint>>,
    present: &[&Arc<EndpointSlice>],
    trigger: Option<&str>,
    capacity: usize,
    keeps_hints: bool,
    slices: &mut Slices,
) -> Vec<String> {
    let mut delete = Vec::new();
    let labels = labels(service);
    if wanted.is_empty() {
        // One empty slice says "nobody", which is not the same as "not known yet".
        wanted.insert(Vec::new(), Vec::new());
    }
    let mut by_ports: HashMap<Vec<Port>, Vec<&EndpointSlice>> = HashMap::new();
    for slice in present {
        by_ports.entry(ports_of(slice)).or_default().push(slice);
    }
    for (ports, endpoints) in wanted {
        let uid = |endpoint: &Endpoint| endpoint.target_ref.as_ref().and_then(|target| target.uid.clone());
        let is_placeholder = endpoints.is_empty();
        let mut missing: HashMap<Option<String>, Endpoint> =
            endpoints.iter().map(|endpoint| (uid(endpoint), endpoint.clone())).collect();
        // Endpoints stay in the slice they are in, so that a change touches few slices.
        let mut filled: Vec<(&EndpointSlice, Vec<Endpoint>)> = Vec::new();
        for slice in by_ports.remove(&ports).unwrap_or_default() {
            let keep = |known: &Endpoint| {
                let mut endpoint = missing.remove(&uid(known))?;
                let is_ready = endpoint.conditions.as_ref().is_some_and(|c| c.ready == Some(true));
                if keeps_hints && is_ready {
                    endpoint.hints = known.hints.clone();
                }
                Some(endpoint)
            };
            let kept = slice.endpoints.iter().flatten().filter_map(keep).collect();
            filled.push((slice, kept));
        }
        // In the order of the pods, for stable results.
        let mut rest: Vec<Endpoint> =
            endpoints.into_iter().filter(|endpoint| missing.contains_key(&uid(endpoint))).collect();
        filled.sort_by_key(|(_, kept)| std::cmp::Reverse(kept.len()));
        for (_, kept) in &mut filled {
            let room = capacity.saturating_sub(kept.len()).min(rest.len());
            kept.extend(rest.drain(..room));
        }
        let mut keep_one_empty = is_placeholder;
        for (slice, kept) in filled {
            if kept.is_empty() && !std::mem::take(&mut keep_one_empty) {
                delete.push(slice.metadata.name.clone().unwrap_or_default());
                continue;
            }
            if slice.endpoints.as_deref().unwrap_or_default() == kept.as_slice()
                && slice.metadata.labels.as_ref() == Some(&labels)
            {
                if keeps_hints {
                    slices.unchanged.push(slice.clone());
                }
                continue;
            }
            let mut updated = slice.clone();
            updated.endpoints = Some(kept);
            updated.metadata.labels = Some(labels.clone());
            annotate(&mut updated.metadata, trigger);
            slices.update.push(updated);
        }
        while !rest.is_empty() || std::mem::take(&mut keep_one_empty) {
            let chunk: Vec<Endpoint> = rest.drain(..capacity.min(rest.len())).collect();
            slices.create.push(new_slice(service, family, &ports, chunk, &labels, trigger));
        }
    }
    for slice in by_ports.into_values().flatten() {
        delete.push(slice.metadata.name.clone().unwrap_or_default());
    }
    delete
}

fn annotate(meta: &mut ObjectMeta, trigger: Option<&str>) {
    if let Some(trigger) = trigger {
        meta.annotations.get_or_insert_default().insert(TRIGGER_TIME.to_owned(), trigger.to_owned());
    }
}

fn new_slice(
    service: &Service,
    family: &str,
    ports: &[Port],
    endpoints: Vec<Endpoint>,
    labels: &BTreeMap<String, String>,
    trigger: Option<&str>,
) -> EndpointSlice {
    let mut slice = EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", service.metadata.name.as_deref().unwrap_or_default())),
            namespace: service.metadata.namespace.clone(),
            labels: Some(labels.clone()),
            owner_references: Some(vec![controller_reference(service)]),
            ..ObjectMeta::default()
        },
        address_type: family.to_owned(),
        endpoints: Some(endpoints),
        ports: Some(slice_ports(ports)),
    };
    annotate(&mut slice.metadata, trigger);
    slice
}

fn labels(service: &Service) -> BTreeMap<String, String> {
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(HEADLESS);
    if is_headless(service) {
        labels.insert(HEADLESS.to_owned(), String::new());
    }
    labels.insert(SERVICE_NAME.to_owned(), service.metadata.name.clone().unwrap_or_default());
    labels.insert(MANAGED_BY.to_owned(), MANAGER.to_owned());
    labels
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn service(change: Value) -> Service {
        let mut value = json!({"metadata": {"name": "web", "namespace": "ns", "uid": "s", "labels": {"team": "a"}},
            "spec": {"selector": {"app": "web"}, "clusterIP": "10.0.0.1", "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}});
        for (key, field) in change.as_object().unwrap() {
            value["spec"][key] = field.clone();
        }
        ferrite_json::from_value(value).unwrap()
    }

    fn pod(name: usize, ready: bool, terminating: bool) -> Arc<Pod> {
        Arc::new(
            ferrite_json::from_value(json!({
                "metadata": {"name": format!("p{name}"), "namespace": "ns", "uid": format!("u{name}"),
                             "deletionTimestamp": terminating.then_some("2024-01-01T00:00:00Z")},
                "spec": {"nodeName": "n1", "containers": []},
                "status": {"phase": "Running", "podIP": format!("10.1.{}.{}", name / 250, name % 250),
                           "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}
            }))
            .unwrap(),
        )
    }

    fn run(service: &Service, pods: &[Arc<Pod>], existing: &[EndpointSlice]) -> Plan {
        let existing: Vec<_> = existing.iter().cloned().map(Arc::new).collect();
        let ratios = Zones::from([("zone-of-n1".to_owned(), 0.5), ("zone-of-n2".to_owned(), 0.5)]);
        plan(service, pods, |node| Some(format!("zone-of-{node}")), &existing, CAPACITY, Some(&ratios))
    }

    /// Slices as the API would return them after a create.
    fn stored(slices: Vec<EndpointSlice>) -> Vec<EndpointSlice> {
        let named = slices.into_iter().enumerate().map(|(index, mut slice)| {
            slice.metadata.name = Some(format!("web-{index}"));
            slice
        });
        named.collect()
    }

    #[test]
    fn conditions_follow_the_pod() {
        for (ready, terminating, publish, expected) in [
            (true, false, false, (true, true, false)),
            (false, false, false, (false, false, false)),
            (true, true, false, (false, true, true)),
            (false, false, true, (true, false, false)),
            (false, true, true, (true, false, true)),
        ] {
            let service = service(json!({"publishNotReadyAddresses": publish}));
            let plan = run(&service, &[pod(1, ready, terminating)], &[]);
            let endpoint = &plan.create[0].endpoints.as_ref().unwrap()[0];
            let conditions = endpoint.conditions.clone().unwrap();
            let got =
                (conditions.ready.unwrap(), conditions.serving.unwrap(), conditions.terminating.unwrap());
            assert_eq!(got, expected, "ready {ready} terminating {terminating} publish {publish}");
            assert_eq!(endpoint.zone.as_deref(), Some("zone-of-n1"));
        }
    }

    #[test]
    fn traffic_distribution_gives_hints_to_ready_endpoints() {
        let zones = json!([{"name": "zone-of-n1"}]);
        let nodes = json!([{"name": "n1"}]);
        for (distribution, ready, expected) in [
            (json!(null), true, json!(null)),
            (json!("PreferClose"), true, json!({"forZones": zones})),
            (json!("PreferSameZone"), true, json!({"forZones": zones})),
            (json!("PreferSameNode"), true, json!({"forNodes": nodes, "forZones": zones})),
            (json!("PreferSameNode"), false, json!(null)),
        ] {
            let service = service(json!({"trafficDistribution": distribution}));
            let plan = run(&service, &[pod(1, ready, false)], &[]);
            let endpoint = &plan.create[0].endpoints.as_ref().unwrap()[0];
            assert_eq!(ferrite_json::to_value(&endpoint.hints).unwrap(), expected, "{distribution} {ready}");
        }
        // A Service that no longer wants it loses the hints.
        let existing = stored(
            run(&service(json!({"trafficDistribution": "PreferClose"})), &[pod(1, true, false)], &[]).create,
        );
        let plan = run(&service(json!({})), &[pod(1, true, false)], &existing);
        assert_eq!(plan.update.len(), 1);
    }

    #[test]
    fn an_annotation_shares_endpoints_out_among_zones() {
        let mut auto = service(json!({"trafficDistribution": "PreferClose"}));
        auto.metadata.annotations =
            Some([("service.kubernetes.io/topology-mode".into(), "Auto".into())].into());
        let pods: Vec<_> = (0..4).map(|n| pod(n, true, false)).collect();
        let made = run(&auto, &pods, &[]);
        let shares = Zones::from([("zone-of-n1".to_owned(), 2), ("zone-of-n2".to_owned(), 2)]);
        assert_eq!(made.hinted, [("IPv4", Ok(shares.clone()))]);
        let zone = |endpoint: &Endpoint| endpoint.hints.clone()?.for_zones?.pop().map(|zone| zone.name);
        let has =
            |slice: &EndpointSlice| slice.endpoints.iter().flatten().filter_map(zone).collect::<Vec<_>>();
        assert_eq!(has(&made.create[0]), ["zone-of-n2", "zone-of-n2", "zone-of-n1", "zone-of-n1"]);
        // Hints that are good stay, and nothing is written.
        let existing = stored(made.create);
        let same = run(&auto, &pods, &existing);
        assert!(same.create.is_empty() && same.update.is_empty() && same.delete.is_empty());
        assert_eq!(same.hinted, [("IPv4", Ok(shares))]);
        // With too few endpoints there are none.
        let fewer = run(&auto, &pods[..1], &existing);
        assert!(has(&fewer.update[0]).is_empty());
        assert!(matches!(fewer.hinted[0].1, Err(Refusal::TooFew { endpoints: 1, zones: 2 })));
        // Without the annotation the field decides again.
        let plain = run(&service(json!({"trafficDistribution": "PreferClose"})), &pods, &existing);
        assert_eq!(has(&plain.update[0]), ["zone-of-n1"; 4]);
        assert!(plain.hinted.is_empty());
    }

    #[test]
    fn slices_are_labelled_owned_and_carry_the_ports() {
        let plan = run(&service(json!({"clusterIP": "None"})), &[pod(1, true, false)], &[]);
        let slice = &plan.create[0];
        let labels = slice.metadata.labels.as_ref().unwrap();
        assert_eq!(labels[SERVICE_NAME], "web");
        assert_eq!(labels[MANAGED_BY], MANAGER);
        assert_eq!(labels["team"], "a");
        assert_eq!(labels[HEADLESS], "");
        assert_eq!(slice.metadata.owner_references.as_ref().unwrap()[0].uid, "s");
        assert_eq!(slice.metadata.generate_name.as_deref(), Some("web-"));
        let port = &slice.ports.as_ref().unwrap()[0];
        assert_eq!((port.name.as_deref(), port.port), (Some("http"), Some(8080)));
    }

    #[test]
    fn nobody_is_one_empty_slice() {
        let plan = run(&service(json!({})), &[], &[]);
        assert_eq!(plan.create.len(), 1);
        let existing = stored(plan.create);
        let again = run(&service(json!({})), &[], &existing);
        assert!(again.create.is_empty() && again.update.is_empty() && again.delete.is_empty());
        let first = run(&service(json!({})), &[pod(1, true, false)], &existing);
        assert_eq!((first.create.len(), first.delete.len()), (1, 1), "ports differ from the placeholder's");
    }

    #[test]
    fn slices_hold_a_hundred_and_changes_touch_few() {
        let service = service(json!({}));
        let pods: Vec<_> = (0..250).map(|n| pod(n, true, false)).collect();
        let made = run(&service, &pods, &[]);
        let sizes: Vec<_> = made.create.iter().map(|slice| slice.endpoints.as_ref().unwrap().len()).collect();
        assert_eq!(sizes, [100, 100, 50]);
        let existing = stored(made.create);
        let same = run(&service, &pods, &existing);
        assert!(same.create.is_empty() && same.update.is_empty() && same.delete.is_empty());

        let mut changed = pods.clone();
        changed[120] = pod(120, false, false);
        let plan = run(&service, &changed, &existing);
        assert_eq!((plan.create.len(), plan.update.len(), plan.delete.len()), (0, 1, 0));
        assert_eq!(plan.update[0].metadata.name.as_deref(), Some("web-1"));

        let fewer = run(&service, &pods[..100], &existing);
        assert_eq!((fewer.create.len(), fewer.update.len(), fewer.delete.len()), (0, 0, 2));
    }
}
