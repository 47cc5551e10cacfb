//! Which way the pods of other nodes are reached: values in, values out.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::Cidr;

/// Another node, as its Node object describes it. Nothing of it is trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub name: String,
    /// Where the node says that it is.
    pub address: Ipv4Addr,
    pub pod_cidr: Cidr,
}

/// The transport of packets to pods of another node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Encapsulation {
    /// As they are to nodes on the same segment, in VXLAN to all others.
    #[default]
    Auto,
    /// As they are. Nodes beyond a router are out of reach.
    Never,
    /// In VXLAN always.
    Always,
}

/// The inputs of a node's routes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterConfig {
    /// The name of the pod bridge, from which other names are made.
    pub bridge: String,
    /// This node's address.
    pub address: Ipv4Addr,
    /// The range of this node's pods; none on a machine without pods.
    pub pod_cidr: Option<Cidr>,
    /// The range of all pods. No route to anything else is made.
    pub cluster_cidr: Cidr,
    pub service_cidr: Option<Cidr>,
    pub encapsulation: Encapsulation,
}

/// A network that this node is connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) link: u32,
    pub(crate) range: Cidr,
}

/// The next hop of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hop {
    Direct { gateway: Ipv4Addr, link: u32 },
    Tunnel { node: Ipv4Addr },
}

/// Why a peer gets no route.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("its pod CIDR {0} is not inside the cluster's {1}")]
    Outside(Cidr, Cidr),
    #[error("its pod CIDR {0} overlaps with that of {1}, which had it first")]
    Taken(Cidr, String),
    #[error("{0} is no address of a node")]
    Address(Ipv4Addr),
    #[error("{0} is on no segment of this node, and packets may not be encapsulated")]
    Beyond(Ipv4Addr),
}

/// The routes of a node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) hops: BTreeMap<Cidr, Hop>,
    pub(crate) refused: Vec<(String, Refusal)>,
}

/// Decides about each peer. Earlier peers win: callers sort them by the age of their objects, which nobody can choose.
pub(crate) fn plan(config: &RouterConfig, segments: &[Segment], peers: &[Peer]) -> Plan {
    let mut plan = Plan::default();
    let mut taken: Vec<(Cidr, &str)> = config.pod_cidr.iter().map(|own| (*own, "this node")).collect();
    for peer in peers {
        match hop(config, segments, &taken, peer) {
            Ok(hop) => {
                taken.push((peer.pod_cidr, &peer.name));
                plan.hops.insert(peer.pod_cidr, hop);
            }
            Err(refusal) => plan.refused.push((peer.name.clone(), refusal)),
        }
    }
    plan
}

fn hop(
    config: &RouterConfig,
    segments: &[Segment],
    taken: &[(Cidr, &str)],
    peer: &Peer,
) -> Result<Hop, Refusal> {
    let (cidr, address) = (peer.pod_cidr, peer.address);
    // A node that had the whole range would have the pods of all others.
    if !config.cluster_cidr.covers(cidr) || cidr == config.cluster_cidr {
        return Err(Refusal::Outside(cidr, config.cluster_cidr));
    }
    if let Some((_, owner)) = taken.iter().find(|(other, _)| other.covers(cidr) || cidr.covers(*other)) {
        return Err(Refusal::Taken(cidr, (*owner).to_owned()));
    }
    let within = |range: Cidr| range.contains(address);
    let no_node = address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || address.is_broadcast()
        || address == config.address
        || within(config.cluster_cidr)
        || config.service_cidr.is_some_and(within);
    if no_node {
        return Err(Refusal::Address(address));
    }
    let segment = segments
        .iter()
        .filter(|segment| segment.range.contains(address))
        .max_by_key(|segment| segment.range.prefix());
    // The ends of a segment are no hosts.
    if segment.is_some_and(|s| address == s.range.network() || address == s.range.broadcast()) {
        return Err(Refusal::Address(address));
    }
    match (config.encapsulation, segment) {
        (Encapsulation::Always, _) | (Encapsulation::Auto, None) => Ok(Hop::Tunnel { node: address }),
        (_, Some(segment)) => Ok(Hop::Direct { gateway: address, link: segment.link }),
        (Encapsulation::Never, None) => Err(Refusal::Beyond(address)),
    }
}

/// The hardware address of a node's end of the tunnel. All nodes know it from the node's address alone.
pub(crate) fn tunnel_address(node: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = node.octets();
    [0x0a, 0x59, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn config(encapsulation: Encapsulation) -> RouterConfig {
        RouterConfig {
            bridge: "ferrite0".into(),
            address: "192.0.2.1".parse().unwrap(),
            pod_cidr: Some(cidr("10.244.0.0/24")),
            cluster_cidr: cidr("10.244.0.0/16"),
            service_cidr: Some(cidr("10.96.0.0/12")),
            encapsulation,
        }
    }

    fn peer(name: &str, address: &str, pods: &str) -> Peer {
        Peer { name: name.into(), address: address.parse().unwrap(), pod_cidr: cidr(pods) }
    }

    fn segments() -> Vec<Segment> {
        vec![
            Segment { link: 2, range: cidr("192.0.2.0/24") },
            Segment { link: 3, range: cidr("198.51.100.0/24") },
            Segment { link: 4, range: cidr("192.0.2.128/25") },
        ]
    }

    #[test]
    fn ways_to_peers() {
        use Encapsulation::*;
        let direct = |gateway: &str, link| Some(Hop::Direct { gateway: gateway.parse().unwrap(), link });
        let tunnel = |node: &str| Some(Hop::Tunnel { node: node.parse().unwrap() });
        for (how, address, want) in [
            (Auto, "192.0.2.2", direct("192.0.2.2", 2)),
            (Auto, "192.0.2.130", direct("192.0.2.130", 4)),
            (Auto, "198.51.100.9", direct("198.51.100.9", 3)),
            (Auto, "203.0.113.9", tunnel("203.0.113.9")),
            (Always, "192.0.2.2", tunnel("192.0.2.2")),
            (Never, "192.0.2.2", direct("192.0.2.2", 2)),
            (Never, "203.0.113.9", None),
            (Auto, "0.0.0.0", None),
            (Auto, "127.0.0.1", None),
            (Auto, "224.0.0.1", None),
            (Auto, "255.255.255.255", None),
            (Auto, "192.0.2.1", None),
            (Auto, "192.0.2.0", None),
            (Auto, "192.0.2.255", None),
            (Auto, "10.244.0.1", None),
            (Auto, "10.96.0.1", None),
        ] {
            let plan = plan(&config(how), &segments(), &[peer("b", address, "10.244.1.0/24")]);
            assert_eq!(plan.hops.get(&cidr("10.244.1.0/24")).copied(), want, "{how:?} {address}");
            assert_eq!(plan.refused.is_empty(), want.is_some(), "{how:?} {address}");
        }
    }

    #[test]
    fn no_node_gets_what_is_not_its_own() {
        let peers = [
            peer("b", "192.0.2.2", "10.244.1.0/24"),
            peer("world", "192.0.2.3", "0.0.0.0/0"),
            peer("cluster", "192.0.2.3", "10.244.0.0/16"),
            peer("services", "192.0.2.3", "10.96.0.0/24"),
            peer("ours", "192.0.2.3", "10.244.0.128/25"),
            peer("theirs", "192.0.2.3", "10.244.1.0/24"),
            peer("wide", "192.0.2.3", "10.244.0.0/23"),
            peer("c", "192.0.2.3", "10.244.2.0/24"),
        ];
        let plan = plan(&config(Encapsulation::Auto), &segments(), &peers);
        let routed: Vec<String> = plan.hops.keys().map(ToString::to_string).collect();
        assert_eq!(routed, ["10.244.1.0/24", "10.244.2.0/24"]);
        let refused: Vec<&str> = plan.refused.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(refused, ["world", "cluster", "services", "ours", "theirs", "wide"]);
    }
}
