//! The node that has the pod of an address.
//!
//! Node objects say so, and kubelets write Node objects: nothing of them is trusted. As for routes between nodes, a range
//! counts if it lies inside the cluster's and no older Node has a part of it. The store decides who is older, so that no node
//! can attract what is meant for the pods of another one.

use ferrite_api::Cidr;
use ferrite_api::quota::amounts::list;
use ferrite_json::Value;
use std::net::IpAddr;

/// The ranges of all nodes that count.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PodRanges(Vec<(Cidr, String)>);

impl PodRanges {
    /// Of the nodes of a cluster whose pods have addresses in `cluster`. The oldest node is the first.
    pub fn of<'a>(cluster: &[Cidr], nodes: impl IntoIterator<Item = &'a Value>) -> Self {
        let mut ranges: Vec<(Cidr, String)> = Vec::new();
        for node in nodes {
            let name = ferrite_api::meta::name(node);
            for cluster in cluster {
                // A node has one range of each family; of more, the first counts.
                let family = |range: &Cidr| range.address.is_ipv4() == cluster.address.is_ipv4();
                let Some(range) = claimed(node).into_iter().find(family) else { continue };
                // A node that had the whole range would have the pods of all others.
                let inside = cluster.contains(range) && range.bits > cluster.bits;
                let overlaps = |other: &Cidr| other.contains(range) || range.contains(*other);
                if inside && !ranges.iter().any(|(other, _)| overlaps(other)) {
                    ranges.push((range, name.to_owned()));
                }
            }
        }
        Self(ranges)
    }

    /// The node whose pods have the address. Neither the first address of a range nor, of IPv4, the last is a pod's.
    pub fn node_of(&self, address: IpAddr) -> Option<&str> {
        self.0.iter().find(|(range, _)| range.contains_host(address)).map(|(_, node)| node.as_str())
    }
}

/// The ranges that a Node claims.
fn claimed(node: &Value) -> Vec<Cidr> {
    let all = list(&node["spec"], "podCIDRs").iter().chain([&node["spec"]["podCIDR"]]);
    all.filter_map(|range| Cidr::parse(range.as_str()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn no_node_has_the_addresses_of_another() {
        let cluster: Vec<Cidr> =
            ["10.244.0.0/16", "fd00:1::/48"].into_iter().map(|range| Cidr::parse(range).unwrap()).collect();
        let node =
            |name: &str, ranges: &[&str]| json!({"metadata": {"name": name}, "spec": {"podCIDRs": ranges}});
        let nodes = [
            node("a", &["10.244.1.0/24", "fd00:1:0:1::/64"]),
            node("everything", &["10.244.0.0/16", "fd00:1::/48"]),
            node("more", &["0.0.0.0/0", "::/0"]),
            node("above", &["10.244.0.0/17"]),
            node("below", &["10.244.1.128/25"]),
            node("same", &["10.244.1.0/24"]),
            node("elsewhere", &["192.0.2.0/24"]),
            node("loopback", &["127.0.0.0/8"]),
            // Its second range of a family does not count.
            node("b", &["10.244.2.0/24", "10.244.9.0/24"]),
            node("broken", &["10.244.3.0", "x"]),
            json!({"metadata": {"name": "single"}, "spec": {"podCIDR": "10.244.4.0/24"}}),
            json!({"metadata": {"name": "new"}}),
        ];
        let ranges = PodRanges::of(&cluster, &nodes);
        for (address, node) in [
            ("10.244.1.5", Some("a")),
            ("10.244.1.200", Some("a")),
            ("fd00:1:0:1::5", Some("a")),
            ("10.244.2.5", Some("b")),
            ("10.244.4.5", Some("single")),
            ("10.244.1.0", None),
            ("10.244.1.255", None),
            ("fd00:1:0:1::", None),
            ("10.244.3.5", None),
            ("10.244.9.5", None),
            ("10.244.200.5", None),
            ("fd00:1:0:2::5", None),
            ("192.0.2.5", None),
            ("127.0.0.1", None),
            ("::ffff:10.244.1.5", None),
        ] {
            assert_eq!(ranges.node_of(address.parse().unwrap()), node, "{address}");
        }
        assert_eq!(PodRanges::of(&[], &nodes), PodRanges::default(), "a server that knows no range of pods");
    }
}
