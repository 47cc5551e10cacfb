//! Which way the pods of other nodes are reached: values in, values out.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use crate::addresses::link_local;
use crate::{Addresses, Cidr, Cidrs, IpFamily};

/// Another node, as its Node object describes it. Nothing of it is trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub name: String,
    /// Where the node says that it is.
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<Cidr>,
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
    /// This node's addresses. Tunnels are between those of the primary family.
    pub node_ips: Addresses,
    /// The ranges of this node's pods; none on a machine without pods.
    pub pod_cidrs: Option<Cidrs>,
    /// The ranges of all pods. No route to anything else is made.
    pub cluster_cidrs: Cidrs,
    pub service_cidrs: Option<Cidrs>,
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
    Direct { gateway: IpAddr, link: u32 },
    Tunnel { node: IpAddr },
}

/// Why a range of a peer gets no route.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("its pod CIDR {0} is not inside the cluster's {1}")]
    Outside(Cidr, Cidrs),
    #[error("its pod CIDR {0} overlaps with that of {1}, which had it first")]
    Taken(Cidr, String),
    #[error("{0} is no address of a node")]
    Address(IpAddr),
    #[error("{0} is on no segment of this node, and packets may not be encapsulated")]
    Beyond(IpAddr),
    #[error("it has no address by which packets to {0} could reach it")]
    NoAddress(Cidr),
}

/// The routes of a node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) hops: BTreeMap<Cidr, Hop>,
    pub(crate) refused: Vec<(String, Refusal)>,
}

/// Decides about each range of each peer. Earlier peers win: callers sort them by the age of their objects, which nobody
/// can choose.
pub(crate) fn plan(config: &RouterConfig, segments: &[Segment], peers: &[Peer]) -> Plan {
    let mut plan = Plan::default();
    let own = config.pod_cidrs.iter().flat_map(Cidrs::iter);
    let mut taken: Vec<(Cidr, &str)> = own.map(|own| (*own, "this node")).collect();
    for peer in peers {
        for family in config.cluster_cidrs.families() {
            // A node has one range of each family; of more, the first counts.
            let Some(cidr) = peer.pod_cidrs.iter().find(|cidr| cidr.family() == family) else { continue };
            match hop(config, segments, &taken, peer, *cidr) {
                Ok(hop) => {
                    taken.push((*cidr, &peer.name));
                    plan.hops.insert(*cidr, hop);
                }
                Err(refusal) => plan.refused.push((peer.name.clone(), refusal)),
            }
        }
    }
    plan
}

fn hop(
    config: &RouterConfig,
    segments: &[Segment],
    taken: &[(Cidr, &str)],
    peer: &Peer,
    cidr: Cidr,
) -> Result<Hop, Refusal> {
    // A node that had the whole range would have the pods of all others.
    let inside = |cluster: &Cidr| cluster.covers(cidr) && cidr != *cluster;
    if !config.cluster_cidrs.of(cidr.family()).is_some_and(inside) {
        return Err(Refusal::Outside(cidr, config.cluster_cidrs));
    }
    if let Some((_, owner)) = taken.iter().find(|(other, _)| other.overlaps(cidr)) {
        return Err(Refusal::Taken(cidr, (*owner).to_owned()));
    }
    let of =
        |family: IpFamily| peer.addresses.iter().copied().find(|address| IpFamily::of(*address) == family);
    // A packet travels as it is to an address of its own family only.
    let neighbour = match of(cidr.family()) {
        Some(address) => segment_of(config, segments, address)?.map(|segment| (address, segment.link)),
        None => None,
    };
    match (config.encapsulation, neighbour) {
        (Encapsulation::Auto | Encapsulation::Never, Some((gateway, link))) => {
            Ok(Hop::Direct { gateway, link })
        }
        (Encapsulation::Never, None) => {
            Err(of(cidr.family()).map_or(Refusal::NoAddress(cidr), Refusal::Beyond))
        }
        (Encapsulation::Auto | Encapsulation::Always, _) => {
            let underlay = config.node_ips.primary();
            let node = of(IpFamily::of(*underlay)).ok_or(Refusal::NoAddress(cidr))?;
            segment_of(config, segments, node)?;
            Ok(Hop::Tunnel { node })
        }
    }
}

/// The segment of a node's address; none if it is beyond a router. An address that no node can have is refused.
fn segment_of<'a>(
    config: &RouterConfig,
    segments: &'a [Segment],
    address: IpAddr,
) -> Result<Option<&'a Segment>, Refusal> {
    let special = match address {
        IpAddr::V4(v4) => v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
    };
    let services = config.service_cidrs.iter().flat_map(Cidrs::iter);
    let no_node = special
        || address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || config.node_ips.iter().any(|own| *own == address)
        || config.cluster_cidrs.iter().chain(services).any(|range| range.contains(address));
    if no_node {
        return Err(Refusal::Address(address));
    }
    let on = segments.iter().filter(|segment| segment.range.contains(address));
    let segment = on.max_by_key(|segment| segment.range.prefix());
    // The ends of a segment are no hosts. The last address of IPv6 is one like others.
    let end = |s: &Segment| address == s.range.network() || (address.is_ipv4() && address == s.range.last());
    match segment.is_some_and(end) {
        true => Err(Refusal::Address(address)),
        false => Ok(segment),
    }
}

/// The hardware address of a node's end of the tunnel. All nodes know it from the node's address alone.
pub(crate) fn tunnel_address(node: IpAddr) -> [u8; 6] {
    match node {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [0x0a, 0x59, a, b, c, d]
        }
        IpAddr::V6(v6) => {
            // FNV-1a: the same on all machines and in all versions.
            let hash = v6.octets().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
            let [_, _, _, a, b, c, d, e] = hash.to_be_bytes();
            [0x0e, a, b, c, d, e]
        }
    }
}

/// The gateway of a route through the tunnel: an address that only leads to the node's end of it.
pub(crate) fn tunnel_gateway(cidr: Cidr, node: IpAddr) -> IpAddr {
    match cidr.family() {
        IpFamily::V4 => cidr.network(),
        IpFamily::V6 => {
            let local: Ipv6Addr = link_local(tunnel_address(node));
            local.into()
        }
    }
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
            node_ips: "192.0.2.1,2001:db8::1".parse().unwrap(),
            pod_cidrs: Some("10.244.0.0/24,fd00:0:0:1::/64".parse().unwrap()),
            cluster_cidrs: "10.244.0.0/16,fd00::/56".parse().unwrap(),
            service_cidrs: Some("10.96.0.0/12,fd00:1::/108".parse().unwrap()),
            encapsulation,
        }
    }

    fn peer(name: &str, addresses: &str, pods: &str) -> Peer {
        Peer {
            name: name.into(),
            addresses: addresses.split(',').map(|text| text.parse().unwrap()).collect(),
            pod_cidrs: pods.split(',').map(cidr).collect(),
        }
    }

    fn segments() -> Vec<Segment> {
        vec![
            Segment { link: 2, range: cidr("192.0.2.0/24") },
            Segment { link: 3, range: cidr("198.51.100.0/24") },
            Segment { link: 4, range: cidr("192.0.2.128/25") },
            Segment { link: 2, range: cidr("2001:db8::/64") },
            Segment { link: 2, range: cidr("fe80::/64") },
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
    fn ways_to_pods_of_ipv6() {
        use Encapsulation::*;
        let direct = |gateway: &str, link| Some(Hop::Direct { gateway: gateway.parse().unwrap(), link });
        let tunnel = |node: &str| Some(Hop::Tunnel { node: node.parse().unwrap() });
        for (how, addresses, want) in [
            (Auto, "192.0.2.2,2001:db8::2", direct("2001:db8::2", 2)),
            (Auto, "2001:db8::2", direct("2001:db8::2", 2)),
            (Auto, "192.0.2.2,2001:db8::ffff:ffff:ffff:ffff", direct("2001:db8::ffff:ffff:ffff:ffff", 2)),
            (Auto, "192.0.2.2,2001:db8:9::2", tunnel("192.0.2.2")),
            (Auto, "192.0.2.2", tunnel("192.0.2.2")),
            (Auto, "2001:db8:9::2", None),
            (Always, "192.0.2.2,2001:db8::2", tunnel("192.0.2.2")),
            (Never, "192.0.2.2,2001:db8::2", direct("2001:db8::2", 2)),
            (Never, "192.0.2.2", None),
            (Never, "192.0.2.2,2001:db8:9::2", None),
            (Auto, "192.0.2.2,fe80::2", None),
            (Auto, "192.0.2.2,::1", None),
            (Auto, "192.0.2.2,::", None),
            (Auto, "192.0.2.2,ff02::1", None),
            (Auto, "192.0.2.2,2001:db8::", None),
            (Auto, "192.0.2.2,2001:db8::1", None),
            (Auto, "192.0.2.2,::ffff:192.0.2.9", None),
            (Auto, "192.0.2.2,fd00::1", None),
            (Auto, "192.0.2.2,fd00:1::1", None),
        ] {
            let plan = plan(&config(how), &segments(), &[peer("b", addresses, "fd00:0:0:2::/64")]);
            assert_eq!(plan.hops.get(&cidr("fd00:0:0:2::/64")).copied(), want, "{how:?} {addresses}");
            assert_eq!(plan.refused.is_empty(), want.is_some(), "{how:?} {addresses}");
        }
        let both = [peer("b", "192.0.2.2,2001:db8::2", "10.244.1.0/24,fd00:0:0:2::/64,fd00:0:0:3::/64")];
        let plan = plan(&config(Auto), &segments(), &both);
        assert_eq!(plan.hops.get(&cidr("10.244.1.0/24")).copied(), direct("192.0.2.2", 2));
        assert_eq!(plan.hops.len(), 2, "one range of each family");
    }

    #[test]
    fn ends_of_tunnels() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(tunnel_address(address("192.0.2.1")), [0x0a, 0x59, 192, 0, 2, 1]);
        let (a, b) = (tunnel_address(address("2001:db8::1")), tunnel_address(address("2001:db8:1::1")));
        assert_ne!(a, b);
        assert_eq!(a[0] & 3, 2, "locally administered, one host");
        assert_eq!(tunnel_gateway(cidr("10.244.1.0/24"), address("192.0.2.1")), address("10.244.1.0"));
        let gateway = tunnel_gateway(cidr("fd00:0:0:2::/64"), address("192.0.2.1"));
        assert_eq!(gateway, address("fe80::859:c0ff:fe00:201"));
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
            peer("d", "2001:db8::4", "fd00:0:0:4::/64"),
            peer("world-6", "2001:db8::5", "::/0"),
            peer("cluster-6", "2001:db8::5", "fd00::/56"),
            peer("ours-6", "2001:db8::5", "fd00:0:0:1:8000::/65"),
            peer("theirs-6", "2001:db8::5", "fd00:0:0:4::/64"),
        ];
        let plan = plan(&config(Encapsulation::Auto), &segments(), &peers);
        let routed: Vec<String> = plan.hops.keys().map(ToString::to_string).collect();
        assert_eq!(routed, ["10.244.1.0/24", "10.244.2.0/24", "fd00:0:0:4::/64"]);
        let refused: Vec<&str> = plan.refused.iter().map(|(name, _)| name.as_str()).collect();
        let four = ["world", "cluster", "services", "ours", "theirs", "wide"];
        assert_eq!(refused[..6], four);
        assert_eq!(refused[6..], ["world-6", "cluster-6", "ours-6", "theirs-6"]);
    }
}
