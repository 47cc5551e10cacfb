//! The endpoints of a Service, from its EndpointSlices.

use std::collections::BTreeMap;

use k8s_openapi::api::discovery::v1::EndpointSlice;

use super::{EndpointAddress, IpFamily, Protocol};

/// One address behind a service port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub address: EndpointAddress,
    /// On this node.
    pub local: bool,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    pub zone_hints: Vec<String>,
    pub node_hints: Vec<String>,
}

/// The endpoints of each port (by name and protocol), ordered by address.
pub type EndpointsByPort = BTreeMap<(String, Protocol), Vec<Endpoint>>;

/// Merges the slices of one Service.
///
/// An address may be in two slices for a while, or belong to a terminating pod and to the one that got its address
/// next. The one that does not terminate wins.
pub fn endpoints_of<'a>(
    slices: impl Iterator<Item = &'a EndpointSlice>,
    family: IpFamily,
    node: &str,
) -> EndpointsByPort {
    let mut merged: BTreeMap<(String, Protocol), BTreeMap<EndpointAddress, Endpoint>> = BTreeMap::new();
    for slice in slices.filter(|slice| slice.address_type == family.api_name()) {
        for port in slice.ports.iter().flatten() {
            let number = port.port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
            let (Some(number), Some(protocol)) = (number, Protocol::parse(port.protocol.as_deref())) else {
                continue;
            };
            let group = merged.entry((port.name.clone().unwrap_or_default(), protocol)).or_default();
            for endpoint in slice.endpoints.iter().flatten() {
                let Some(ip) = endpoint.addresses.first().and_then(|text| text.parse().ok()) else {
                    continue;
                };
                if IpFamily::of(ip) != family {
                    continue;
                }
                let conditions = endpoint.conditions.clone().unwrap_or_default();
                let terminating = conditions.terminating.unwrap_or(false);
                let address = EndpointAddress { ip, port: number };
                if terminating && group.contains_key(&address) {
                    continue;
                }
                let hints = endpoint.hints.as_ref();
                let zones = hints.and_then(|hints| hints.for_zones.as_ref()).into_iter().flatten();
                let nodes = hints.and_then(|hints| hints.for_nodes.as_ref()).into_iter().flatten();
                let made = Endpoint {
                    address,
                    local: !node.is_empty() && endpoint.node_name.as_deref() == Some(node),
                    ready: conditions.ready.unwrap_or(true),
                    serving: conditions.serving.unwrap_or(true),
                    terminating,
                    zone_hints: zones.map(|zone| zone.name.clone()).collect(),
                    node_hints: nodes.map(|node| node.name.clone()).collect(),
                };
                group.insert(address, made);
            }
        }
    }
    merged.into_iter().map(|(port, group)| (port, group.into_values().collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn slice(address_type: &str, endpoints: Value) -> EndpointSlice {
        serde_json::from_value(json!({
            "metadata": {"name": "s"}, "addressType": address_type,
            "ports": [{"name": "web", "port": 8080, "protocol": "TCP"}, {"name": "none", "protocol": "TCP"}],
            "endpoints": endpoints,
        }))
        .unwrap()
    }

    #[test]
    fn absent_conditions_mean_ready_and_serving() {
        let slices = [slice("IPv4", json!([{"addresses": ["10.0.0.1", "10.0.0.9"], "nodeName": "here"}]))];
        let merged = endpoints_of(slices.iter(), IpFamily::V4, "here");
        assert_eq!(merged.len(), 1, "a port without a number is ignored");
        let endpoints = &merged[&("web".to_owned(), Protocol::Tcp)];
        assert_eq!(endpoints.len(), 1, "only the first address counts");
        let endpoint = &endpoints[0];
        assert_eq!(endpoint.address.to_string(), "10.0.0.1:8080");
        assert!(endpoint.local && endpoint.ready && endpoint.serving && !endpoint.terminating);
        assert!(endpoints_of(slices.iter(), IpFamily::V6, "here").is_empty());
    }

    #[test]
    fn the_running_pod_wins_over_the_terminating_one() {
        let running = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}}]);
        let ending = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": false, "serving": true, "terminating": true}}]);
        for order in [[&running, &ending], [&ending, &running]] {
            let slices = order.map(|endpoints| slice("IPv4", endpoints.clone()));
            let merged = endpoints_of(slices.iter(), IpFamily::V4, "");
            let endpoints = &merged[&("web".to_owned(), Protocol::Tcp)];
            assert!(endpoints.len() == 1 && endpoints[0].ready && !endpoints[0].terminating);
        }
    }
}
