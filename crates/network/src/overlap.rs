//! Ranges of addresses that somebody else on this machine has already.

use ferrite_netlink::{Connection, RouteType};

use crate::rules::UNREACHABLE_METRIC;
use crate::{Cidr, Cidrs, NetworkError};

/// The ranges that a network is about to use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranges {
    pub(crate) pods: Cidrs,
    pub(crate) cluster: Cidrs,
    pub(crate) services: Option<Cidrs>,
}

/// The existing networks, without the network's own.
#[derive(Debug, Default)]
struct Present {
    /// Networks of other links.
    links: Vec<(String, Cidr)>,
    /// Ranges of other networks of ours: where their packets end if nobody has them.
    clusters: Vec<Cidr>,
}

/// Why the ranges cannot be used, in words. A link may be within the range of all pods (a machine's network, of which
/// no pod is given an address); another cluster may not, for both would route and translate the same addresses.
fn refuse(ranges: Ranges, present: &Present) -> Option<String> {
    let own = || ranges.pods.iter().chain(ranges.services.iter().flat_map(Cidrs::iter));
    for (link, there) in &present.links {
        if let Some(range) = own().find(|range| range.overlaps(*there)) {
            return Some(format!(
                "{range} overlaps with {there} of link {link}: another cluster or network of this machine has these addresses; choose other ranges (--cluster-cidr, --service-cluster-ip-range)"
            ));
        }
    }
    let all = || own().chain(ranges.cluster.iter());
    for there in &present.clusters {
        if let Some(range) = all().find(|range| range.overlaps(*there)) {
            return Some(format!(
                "{range} overlaps with {there} of another cluster on this machine: choose other ranges (--cluster-cidr, --service-cluster-ip-range), or stop the other cluster with `ferrite down`"
            ));
        }
    }
    None
}

/// Refuses ranges that somebody else on this machine has. A network whose bridge is there already is completed, and not
/// asked.
pub(crate) async fn check(conn: &Connection, bridge: &str, ranges: Ranges) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink("look for networks that overlap");
    let links = conn.get_links().await.map_err(fail())?;
    if links.iter().any(|link| link.name == bridge) {
        return Ok(());
    }
    let mut present = Present::default();
    for address in conn.get_addresses().await.map_err(fail())? {
        let Some(network) = Cidr::containing(address.address, address.prefix) else { continue };
        let link = links.iter().find(|link| link.index == address.link);
        let name = link.map(|link| link.name.clone()).unwrap_or_default();
        present.links.push((name, network));
    }
    for route in conn.get_routes().await.map_err(fail())? {
        let ours = route.route_type == RouteType::Unreachable && route.metric == Some(UNREACHABLE_METRIC);
        let range = Cidr::containing(route.destination, route.prefix);
        present.clusters.extend(range.filter(|_| ours));
    }
    match refuse(ranges, &present) {
        Some(why) => Err(NetworkError::Conflict(why)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_others_are_left_to_them() {
        let range = |text: &str| text.parse::<Cidr>().unwrap();
        let ranges = Ranges {
            pods: "10.244.0.0/24,fd00:1::/64".parse().unwrap(),
            cluster: "10.244.0.0/16,fd00:1::/56".parse().unwrap(),
            services: Some("10.96.0.0/12,fd00:2::/108".parse().unwrap()),
        };
        for (what, links, clusters, refused) in [
            ("nothing", &[][..], &[][..], false),
            ("loopback and a LAN", &["127.0.0.0/8", "192.168.1.0/24"], &[], false),
            ("the pods of another cluster", &["10.244.0.0/24"], &[], true),
            ("a wide network around the pods", &["10.0.0.0/8"], &[], true),
            ("an address of a Service", &["10.96.0.10/32"], &[], true),
            ("a link within the range of all pods", &["10.244.9.0/24"], &[], false),
            ("a cluster with other ranges", &["10.245.0.0/24"], &["10.245.0.0/16", "10.112.0.0/12"], false),
            (
                "a cluster with the same Services",
                &["10.245.0.0/24"],
                &["10.245.0.0/16", "10.96.0.0/12"],
                true,
            ),
            ("a cluster within the range of all pods", &[], &["10.244.128.0/17"], true),
            ("link-local addresses and a LAN of IPv6", &["fe80::/64", "2001:db8::/64"], &[], false),
            ("the pods of another cluster, by IPv6", &["fd00:1::/64"], &[], true),
            ("a cluster with the same Services, by IPv6", &[], &["fd00:2::/108"], true),
        ] {
            let links = links.iter().map(|text| ("eth9".to_owned(), range(text))).collect();
            let clusters = clusters.iter().map(|text| range(text)).collect();
            let why = refuse(ranges, &Present { links, clusters });
            assert_eq!(why.is_some(), refused, "{what}: {why:?}");
        }
    }
}
