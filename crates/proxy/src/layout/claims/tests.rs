//! Which elements a service port gets, by its kind, policies and endpoints.

use super::*;
use crate::layout::{LocalTraffic, NodePortAddresses};
use crate::model::{Endpoint, service_ports};
use crate::model::{IpFamily, NodeFacts, choose};
use ferrite_nft::SetId;
use serde_json::{Value, json};

fn config() -> LayoutConfig {
    LayoutConfig {
        family: IpFamily::V4,
        masquerade_mark: 1 << 14,
        masquerade_all: false,
        local_traffic: LocalTraffic::Unknown,
        node_ip: Some("192.0.2.1".parse().unwrap()),
        node_port_addresses: NodePortAddresses::All,
        untracked_bridge: None,
        service_cidrs: Vec::new(),
    }
}

/// The elements of a service port, one text each.
fn elements(spec: Value, status: Value, endpoints: &[(u8, bool)]) -> Vec<String> {
    let service = json!({"metadata": {"namespace": "ns", "name": "web"}, "spec": spec, "status": status});
    let (_, port) = service_ports(&serde_json::from_value(service).unwrap(), IpFamily::V4).remove(0);
    let endpoints: Vec<Endpoint> = endpoints
        .iter()
        .map(|(octet, local)| Endpoint {
            address: EndpointAddress { ip: [10, 244, 0, *octet].into(), port: 8080 },
            local: *local,
            ready: true,
            serving: true,
            terminating: false,
            zone_hints: Vec::new(),
            node_hints: Vec::new(),
        })
        .collect();
    let chosen = choose(&port, &endpoints, &NodeFacts::default());
    let out = desired(&port, &chosen, &config());
    out.claims.iter().map(text).collect()
}

fn text(claim: &Claim) -> String {
    let key = |bytes: &[u8]| {
        let words: Vec<String> = bytes
            .chunks(4)
            .map(|word| word.iter().map(u8::to_string).collect::<Vec<_>>().join("."))
            .collect();
        words.join(" ")
    };
    let last = claim.key.last().map(|last| format!(" - {}", key(last))).unwrap_or_default();
    let value = match claim.value {
        ClaimValue::Member => String::new(),
        ClaimValue::Class(class) => format!(" : {}", class.chain()),
    };
    format!("{} {}{last}{value}", claim.set.shape().name, key(claim.key.first()))
}

/// The port 80 of TCP as the kernel has it.
const WEB: &str = "10.96.0.10 6.0.0.0 0.80.0.0";

#[test]
fn a_cluster_ip() {
    let spec = json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]});
    let want = ["cluster-ips 10.96.0.10".to_owned(), format!("service-ips {WEB} : pick-2")];
    assert_eq!(elements(spec.clone(), json!({}), &[(2, false), (3, false)]), want);
    let want = ["cluster-ips 10.96.0.10".to_owned(), format!("reject-services {WEB}")];
    assert_eq!(elements(spec, json!({}), &[]), want);
}

#[test]
fn local_endpoints_may_meet_themselves() {
    let spec = json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]});
    let all = elements(spec, json!({}), &[(2, true), (3, false)]);
    assert_eq!(all[2..], ["hairpin-connections 10.244.0.2 10.244.0.2 6.0.0.0 31.144.0.0"]);
}

#[test]
fn policies_without_a_local_endpoint_drop() {
    let internal =
        json!({"clusterIP": "10.96.0.10", "internalTrafficPolicy": "Local", "ports": [{"port": 80}]});
    assert_eq!(elements(internal.clone(), json!({}), &[(2, false)])[1], format!("drop-services {WEB}"));
    assert_eq!(
        elements(internal.clone(), json!({}), &[(2, true)])[1],
        format!("service-ips {WEB} : pick-local-1")
    );
    assert_eq!(elements(internal, json!({}), &[])[1], format!("reject-services {WEB}"));

    let external = json!({"type": "NodePort", "clusterIP": "10.96.0.10", "externalTrafficPolicy": "Local",
        "ports": [{"port": 80, "nodePort": 30080}]});
    assert_eq!(
        elements(external.clone(), json!({}), &[(2, false)])[1..],
        [
            format!("service-ips {WEB} : pick-1"),
            "service-nodeports 6.0.0.0 117.128.0.0 : external-local-pick-nodeport-1-none".into(),
            "drop-nodeports 6.0.0.0 117.128.0.0".into(),
        ]
    );
    assert_eq!(
        elements(external.clone(), json!({}), &[(2, false), (3, true)])[2],
        "service-nodeports 6.0.0.0 117.128.0.0 : external-local-pick-nodeport-2-pick-nodeport-local-1"
    );
    assert_eq!(
        elements(external, json!({}), &[])[1..],
        [format!("reject-services {WEB}"), "reject-nodeports 6.0.0.0 117.128.0.0".into()]
    );
}

#[test]
fn external_addresses_share_a_class_and_only_vips_have_a_firewall() {
    let spec = json!({"type": "LoadBalancer", "clusterIP": "10.96.0.10", "externalIPs": ["203.0.113.7"],
        "ports": [{"port": 80}], "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
        "loadBalancerSourceRanges": ["192.0.2.0/24"]});
    let status = json!({"loadBalancer": {"ingress": [{"ip": "203.0.113.5"}]}});
    assert_eq!(
        elements(spec, status, &[(2, false)]),
        [
            "cluster-ips 10.96.0.10",
            "service-ips 10.96.0.10 6.0.0.0 0.80.0.0 : pick-1-affinity-60",
            "service-ips 203.0.113.7 6.0.0.0 0.80.0.0 : external-pick-1-affinity-60",
            "service-ips 203.0.113.5 6.0.0.0 0.80.0.0 : external-pick-1-affinity-60",
            "firewall-ips 203.0.113.5 6.0.0.0 0.80.0.0",
            "firewall-sources 203.0.113.5 6.0.0.0 0.80.0.0 192.0.2.0 - 203.0.113.5 6.0.0.0 0.80.0.0 192.0.2.255",
            // The node is in the ranges and may itself have the VIP.
            "firewall-sources 203.0.113.5 6.0.0.0 0.80.0.0 203.0.113.5 - 203.0.113.5 6.0.0.0 0.80.0.0 203.0.113.5",
        ]
    );
}

#[test]
fn an_address_is_one_frontend_however_often_a_service_names_it() {
    let spec = json!({"clusterIP": "10.96.0.9", "type": "LoadBalancer", "ports": [{"port": 80, "nodePort": 30080}],
        "externalIPs": ["10.96.0.9", "192.0.2.7", "192.0.2.7"], "loadBalancerSourceRanges": ["10.0.0.0/8"]});
    let status = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}, {"ip": "192.0.2.8"}]}});
    let service = json!({"metadata": {"namespace": "ns", "name": "web"}, "spec": spec, "status": status});
    let (_, port) = service_ports(&serde_json::from_value(service).unwrap(), IpFamily::V4).remove(0);
    let out = desired(&port, &ChosenEndpoints::default(), &config());
    let origins: Vec<_> = out.frontends.iter().map(|frontend| frontend.rank.origin).collect();
    use crate::layout::Origin::{Allocated, External};
    assert_eq!(origins, [Allocated, External, External, Allocated]);
    let frontends: HashSet<&Key> = out.frontends.iter().map(|frontend| &frontend.key).collect();
    for claim in &out.claims {
        let frontend = claim.set.frontend(&claim.key);
        let shared = matches!(claim.set, SetName::ClusterIps | SetName::HairpinConnections);
        assert_eq!(frontend.as_ref().is_some_and(|key| frontends.contains(key)), !shared, "{}", text(claim));
    }
}
