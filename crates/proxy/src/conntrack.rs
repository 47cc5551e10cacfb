//! Removes connection tracking entries of UDP flows whose endpoint is gone.
//!
//! A client that keeps its socket keeps the entry alive, and the entry keeps the client at an endpoint that nobody
//! serves any more. TCP does not need this: such a connection breaks.

use std::collections::HashMap;
use std::path::Path;

use ferrite_netlink::{Conntrack, Error, Netns};

use crate::model::{EndpointAddress, Protocol};
use crate::sync::ServedPort;

/// The entries could not be read or removed.
#[derive(Debug, thiserror::Error)]
#[error("connection tracking entries of UDP Services")]
pub struct ConntrackError(#[source] Box<Error>);

/// A tracked UDP flow, as far as the choice needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flow {
    /// Where the client sent it.
    destination: EndpointAddress,
    /// The endpoint that answers.
    server: EndpointAddress,
}

/// The addresses of UDP Services with the endpoints that serve each.
#[derive(Debug, Default)]
struct Frontends<'a> {
    addresses: HashMap<EndpointAddress, &'a [EndpointAddress]>,
    node_ports: HashMap<u16, &'a [EndpointAddress]>,
}

impl<'a> Frontends<'a> {
    /// A Service without serving endpoints has nobody to send the client to, so its entries stay. Policies, topology
    /// and termination do not count: a change of those does not end flows.
    fn of(ports: impl Iterator<Item = &'a ServedPort>) -> Self {
        let mut all = Self::default();
        for served in
            ports.filter(|served| served.port.protocol == Protocol::Udp && !served.serving.is_empty())
        {
            let port = &served.port;
            let ips =
                [&port.cluster_ip].into_iter().chain(&port.external_ips).chain(&port.load_balancer_vips);
            all.addresses
                .extend(ips.map(|ip| (EndpointAddress { ip: *ip, port: port.port }, &*served.serving)));
            all.node_ports.extend(port.node_port.map(|number| (number, &*served.serving)));
        }
        all
    }

    fn is_stale(&self, flow: Flow) -> bool {
        let by_address = self.addresses.get(&flow.destination);
        let serving = by_address.or_else(|| self.node_ports.get(&flow.destination.port));
        serving.is_some_and(|serving| serving.binary_search(&flow.server).is_err())
    }
}

/// Removes the stale flows of the given service ports and returns their number.
pub fn remove_stale<'a>(
    ports: impl Iterator<Item = &'a ServedPort>,
    netns: Option<&Path>,
) -> Result<usize, ConntrackError> {
    let frontends = Frontends::of(ports);
    if frontends.addresses.is_empty() {
        return Ok(0);
    }
    remove(&frontends, netns).map_err(|error| ConntrackError(Box::new(error)))
}

fn remove(frontends: &Frontends<'_>, netns: Option<&Path>) -> Result<usize, Error> {
    let netns = netns.map(Netns::from_path).transpose()?;
    let mut tracked = Conntrack::open(netns.as_ref())?;
    let mut removed = 0;
    for entry in tracked.udp_flows()? {
        let end = |(ip, port)| EndpointAddress { ip, port };
        let flow = Flow { destination: end(entry.original.destination), server: end(entry.reply.source) };
        // It may have expired by itself.
        removed += usize::from(frontends.is_stale(flow) && tracked.delete(&entry)?);
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{IpFamily, NodeFacts};
    use crate::sync::served_ports;
    use serde_json::json;

    #[test]
    fn flows_to_endpoints_that_do_not_serve_are_stale() {
        let service = serde_json::from_value(
            json!({"metadata": {"namespace": "ns", "name": "dns"}, "spec": {
            "clusterIP": "10.96.0.10", "externalIPs": ["192.0.2.7"], "type": "NodePort",
            "ports": [{"name": "u", "port": 53, "nodePort": 30053, "protocol": "UDP"}, {"name": "t", "port": 53}]}}),
        );
        let slice = serde_json::from_value(json!({"metadata": {"name": "s"}, "addressType": "IPv4",
            "ports": [{"name": "u", "port": 53, "protocol": "UDP"}, {"name": "t", "port": 53}], "endpoints": [
                {"addresses": ["10.244.0.2"]},
                {"addresses": ["10.244.0.3"], "conditions": {"ready": false, "serving": true, "terminating": true}},
                {"addresses": ["10.244.0.4"], "conditions": {"ready": false, "serving": false}}]}));
        let slices = [slice.unwrap()];
        let ports = served_ports(&service.unwrap(), slices.iter(), IpFamily::V4, &NodeFacts::default());
        let frontends = Frontends::of(ports.iter());
        let address = |text: &str| {
            let socket: std::net::SocketAddr = text.parse().unwrap();
            EndpointAddress { ip: socket.ip(), port: socket.port() }
        };
        let rows = [
            ("a ready endpoint", "10.96.0.10:53", "10.244.0.2:53", false),
            ("one that terminates and serves", "10.96.0.10:53", "10.244.0.3:53", false),
            ("one that does not serve", "10.96.0.10:53", "10.244.0.4:53", true),
            ("one that is gone", "10.96.0.10:53", "10.244.0.9:53", true),
            ("sent before the Service was there", "10.96.0.10:53", "10.96.0.10:53", true),
            ("another port of the endpoint", "10.96.0.10:53", "10.244.0.2:54", true),
            ("by an external address", "192.0.2.7:53", "10.244.0.9:53", true),
            ("by a node port of any address", "198.51.100.1:30053", "10.244.0.9:53", true),
            ("by a node port, served", "198.51.100.1:30053", "10.244.0.2:53", false),
            ("of no Service", "10.96.0.11:53", "10.96.0.11:53", false),
        ];
        for (name, destination, server, want) in rows {
            let flow = Flow { destination: address(destination), server: address(server) };
            assert_eq!(frontends.is_stale(flow), want, "{name}");
        }
    }
}
