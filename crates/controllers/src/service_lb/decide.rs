//! Decides which addresses a Service gets.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};

use super::ports::Port;

/// The class of load balancers that this controller implements. A Service without a class is its, too.
pub const CLASS: &str = "ferrite.io/service-lb";
/// Keeps a Service until its load balancer is gone.
pub(super) const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// The cluster autoscaler is about to delete the node.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// The state that a Service asks this controller for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    LoadBalancer,
    /// The addresses and the finalizer of this controller are removed.
    Cleanup,
    /// Another controller's, or none.
    Nothing,
}

pub(super) fn wanted(service: &Service) -> Wanted {
    let spec = service.spec.as_ref();
    let is_balanced = spec.is_some_and(|spec| spec.type_.as_deref() == Some("LoadBalancer"));
    let class = spec.and_then(|spec| spec.load_balancer_class.as_deref());
    if is_balanced && class.is_some_and(|class| class != CLASS) {
        return Wanted::Nothing;
    }
    if is_balanced && service.metadata.deletion_timestamp.is_none() {
        return Wanted::LoadBalancer;
    }
    if has_finalizer(service) { Wanted::Cleanup } else { Wanted::Nothing }
}

pub(super) fn has_finalizer(service: &Service) -> bool {
    service.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER)
}

/// The ports that the Service asks for.
pub(super) fn ports(service: &Service) -> Vec<Port> {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_ref());
    let port = |port: &k8s_openapi::api::core::v1::ServicePort| Port {
        protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
        number: port.port,
    };
    ports.into_iter().flatten().map(port).collect()
}

/// True for a node that may receive traffic from outside. Clients choose among the addresses and notice nothing of a node
/// that is down, so that a node must be ready; in front of upstream's nodes a cloud's load balancer probes them.
pub(super) fn serves(node: &Node) -> bool {
    let label = node.metadata.labels.as_ref().and_then(|labels| labels.get(EXCLUDED));
    // As upstream: a value that is no boolean excludes.
    let excluded =
        label.is_some_and(|value| !matches!(value.as_str(), "0" | "f" | "F" | "false" | "FALSE" | "False"));
    let leaving = node
        .spec
        .as_ref()
        .is_some_and(|spec| spec.taints.iter().flatten().any(|taint| taint.key == TO_BE_DELETED));
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    node.metadata.deletion_timestamp.is_none() && !excluded && !leaving && ready
}

/// The addresses by which a node is reached from outside: external ones if it has any.
pub(super) fn node_addresses(node: &Node) -> Vec<IpAddr> {
    let all = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let of = |kind: &str| -> Vec<IpAddr> {
        let found = all.iter().filter(|address| address.type_ == kind);
        found.filter_map(|address| address.address.parse().ok()).collect()
    };
    let external = of("ExternalIP");
    if external.is_empty() { of("InternalIP") } else { external }
}

pub(super) fn is_local(service: &Service) -> bool {
    service.spec.as_ref().is_some_and(|spec| spec.external_traffic_policy.as_deref() == Some("Local"))
}

/// The nodes that have an endpoint which takes traffic: one that is ready, else one that still serves while it ends.
fn local_nodes(slices: &[Arc<EndpointSlice>]) -> BTreeSet<&str> {
    let nodes = |accept: fn(&Endpoint) -> bool| -> BTreeSet<&str> {
        let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
        endpoints
            .filter(|endpoint| accept(endpoint))
            .filter_map(|endpoint| endpoint.node_name.as_deref())
            .collect()
    };
    let ready = nodes(|endpoint| endpoint.conditions.as_ref().and_then(|c| c.ready) != Some(false));
    if !ready.is_empty() {
        return ready;
    }
    nodes(|endpoint| endpoint.conditions.as_ref().and_then(|c| c.serving) == Some(true))
}

/// True for an address that traffic from outside may have as its destination, and that no other node
/// claims. A kubelet writes the addresses of its node, and the proxies of all nodes accept traffic to the
/// addresses of a load balancer.
fn is_believable(address: IpAddr, nodes: &[Arc<Node>]) -> bool {
    let special = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
    };
    let claims = nodes.iter().filter(|node| node_addresses(node).contains(&address)).count();
    !special && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast() && claims == 1
}

/// The addresses that the Service gets, in the order of its families and of the nodes' names. `is_taken`
/// returns true if a Service has an address as its own.
pub(super) fn ingress(
    service: &Service,
    nodes: &[Arc<Node>],
    slices: &[Arc<EndpointSlice>],
    is_taken: impl Fn(IpAddr) -> bool,
) -> Vec<LoadBalancerIngress> {
    let Some(spec) = service.spec.as_ref() else { return Vec::new() };
    let local = is_local(service).then(|| local_nodes(slices));
    let chosen = nodes.iter().filter(|node| {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        serves(node) && local.as_ref().is_none_or(|local| local.contains(name))
    });
    let mut all: Vec<IpAddr> = chosen.flat_map(|node| node_addresses(node)).collect();
    all.retain(|address| is_believable(*address, nodes) && !is_taken(*address));
    if let Some(only) = spec.load_balancer_ip.as_ref().filter(|ip| !ip.is_empty()) {
        all.retain(|address| only.parse() == Ok(*address));
    }
    let mut found: Vec<IpAddr> = Vec::new();
    for family in spec.ip_families.iter().flatten() {
        for address in all.iter().filter(|address| address.is_ipv6() == (family == "IPv6")) {
            if !found.contains(address) {
                found.push(*address);
            }
        }
    }
    let ingress = |address: IpAddr| LoadBalancerIngress {
        ip: Some(address.to_string()),
        ip_mode: Some("VIP".into()),
        ..LoadBalancerIngress::default()
    };
    found.into_iter().map(ingress).collect()
}

/// The addresses that the Service has.
pub(super) fn current(service: &Service) -> &[LoadBalancerIngress] {
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    balancer.and_then(|balancer| balancer.ingress.as_deref()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn service(spec: Value) -> Service {
        ferrite_json::from_value(json!({"metadata": {"name": "s", "namespace": "ns"}, "spec": spec})).unwrap()
    }

    fn node(name: &str, changes: Value) -> Arc<Node> {
        let mut node = json!({"metadata": {"name": name}, "spec": {}, "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": format!("10.0.0.{}", name.len())},
                {"type": "InternalIP", "address": format!("fd00::{}", name.len())}]}});
        for (key, value) in changes.as_object().unwrap().iter() {
            for (member, value) in value.as_object().unwrap().iter() {
                node[key.as_str()].as_object_mut().unwrap().insert(member.clone(), value.clone());
            }
        }
        Arc::new(ferrite_json::from_value(node).unwrap())
    }

    fn slice(endpoints: Value) -> Arc<EndpointSlice> {
        let slice =
            json!({"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": endpoints, "ports": []});
        Arc::new(ferrite_json::from_value(slice).unwrap())
    }

    fn addresses(service: &Service, nodes: &[Arc<Node>], slices: &[Arc<EndpointSlice>]) -> Vec<String> {
        let taken = |address: IpAddr| address.to_string() == "10.96.0.1";
        ingress(service, nodes, slices, taken).into_iter().filter_map(|ingress| ingress.ip).collect()
    }

    #[test]
    fn who_is_served() {
        let finalizer = |mut service: Service, deleted: bool| {
            service.metadata.finalizers = Some(vec![FINALIZER.into()]);
            service.metadata.deletion_timestamp = deleted
                .then_some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
            service
        };
        let balanced = || service(json!({"type": "LoadBalancer"}));
        let foreign = || service(json!({"type": "LoadBalancer", "loadBalancerClass": "example.com/x"}));
        for (what, service, expected) in [
            ("no class", balanced(), Wanted::LoadBalancer),
            (
                "our class",
                service(json!({"type": "LoadBalancer", "loadBalancerClass": CLASS})),
                Wanted::LoadBalancer,
            ),
            ("another class", foreign(), Wanted::Nothing),
            ("another class, deleted", finalizer(foreign(), true), Wanted::Nothing),
            ("another type", service(json!({"type": "ClusterIP"})), Wanted::Nothing),
            ("was balanced", finalizer(service(json!({"type": "ClusterIP"})), false), Wanted::Cleanup),
            ("deleted", finalizer(balanced(), true), Wanted::Cleanup),
        ] {
            assert_eq!(wanted(&service), expected, "{what}");
        }
    }

    #[test]
    fn nodes_that_serve() {
        let label = |value: &str| json!({"metadata": {"labels": {EXCLUDED: value}}});
        for (what, changes, expected) in [
            ("ready", json!({}), true),
            ("not ready", json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}), false),
            ("silent", json!({"status": {"conditions": []}}), false),
            ("excluded", label(""), false),
            ("excluded by true", label("true"), false),
            ("not excluded", label("false"), true),
            ("leaving", json!({"spec": {"taints": [{"key": TO_BE_DELETED, "effect": "NoSchedule"}]}}), false),
            ("deleted", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), false),
        ] {
            assert_eq!(serves(&node("n", changes)), expected, "{what}");
        }
    }

    #[test]
    fn addresses_of_nodes() {
        let external = json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.9"},
            {"type": "ExternalIP", "address": "203.0.113.9"}, {"type": "Hostname", "address": "h"}]}});
        let nodes = [node("a", json!({})), node("bb", external), node("ccc", json!({}))];
        let local = json!({"type": "LoadBalancer", "ipFamilies": ["IPv4"], "externalTrafficPolicy": "Local"});
        let endpoint = |node: &str, ready: bool, serving: bool| json!({"addresses": ["10.1.0.1"], "nodeName": node, "conditions": {"ready": ready, "serving": serving}});
        for (what, spec, endpoints, expected) in [
            ("all", json!({"ipFamilies": ["IPv4"]}), json!([]), &["10.0.0.1", "203.0.113.9", "10.0.0.3"][..]),
            (
                "both families, in the Service's order",
                json!({"ipFamilies": ["IPv6", "IPv4"]}),
                json!([]),
                &["fd00::1", "fd00::3", "10.0.0.1", "203.0.113.9", "10.0.0.3"],
            ),
            (
                "a chosen one",
                json!({"ipFamilies": ["IPv4"], "loadBalancerIP": "10.0.0.3"}),
                json!([]),
                &["10.0.0.3"],
            ),
            (
                "a chosen one that is not there",
                json!({"ipFamilies": ["IPv4"], "loadBalancerIP": "1.2.3.4"}),
                json!([]),
                &[],
            ),
            ("local, no endpoint", local.clone(), json!([]), &[]),
            (
                "local, one ready",
                local.clone(),
                json!([endpoint("a", false, false), endpoint("ccc", true, true)]),
                &["10.0.0.3"],
            ),
            (
                "local, all ending",
                local,
                json!([endpoint("a", false, true), endpoint("ccc", false, false)]),
                &["10.0.0.1"],
            ),
        ] {
            assert_eq!(addresses(&service(spec), &nodes, &[slice(endpoints)]), expected, "{what}");
        }
    }

    #[test]
    fn a_node_does_not_get_what_is_not_its_own() {
        let at = |name: &str, address: &str| {
            node(name, json!({"status": {"addresses": [{"type": "ExternalIP", "address": address}]}}))
        };
        let both = service(json!({"ipFamilies": ["IPv4", "IPv6"]}));
        for (what, address, expected) in [
            ("its own", "203.0.113.7", 1),
            ("loopback", "127.0.0.1", 0),
            ("everybody", "0.0.0.0", 0),
            ("the metadata service of a cloud", "169.254.169.254", 0),
            ("a group", "ff02::1", 0),
            ("another form of loopback", "::ffff:127.0.0.1", 0),
            ("a Service's", "10.96.0.1", 0),
        ] {
            assert_eq!(addresses(&both, &[at("thief", address)], &[]).len(), expected, "{what}");
        }
        let nodes = [at("owner", "203.0.113.7"), at("thief", "203.0.113.7"), at("third", "203.0.113.8")];
        assert_eq!(addresses(&both, &nodes, &[]), ["203.0.113.8"], "two claim it: nobody knows whose it is");
    }
}
