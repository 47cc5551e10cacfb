//! The addresses on which a cluster with a node listens.

use std::net::IpAddr;

/// The address that the user asks for first, then those of the cluster's own pods and nodes that it does not include.
/// Without these no pod and no agent would reach the server.
pub fn listen_addresses(own: Vec<IpAddr>, asked: Option<IpAddr>) -> Vec<IpAddr> {
    let Some(asked) = asked else { return own };
    let is_included = |address: &IpAddr| match asked {
        // A socket of `::` takes connections of both families.
        IpAddr::V6(any) if any.is_unspecified() => true,
        IpAddr::V4(any) if any.is_unspecified() => address.is_ipv4(),
        one => one == *address,
    };
    let others = own.into_iter().filter(|address| !is_included(address));
    std::iter::once(asked).chain(others).collect()
}

/// The address through which other machines are meant to reach the cluster, if any are.
pub fn opened_to(asked: Option<IpAddr>) -> Option<IpAddr> {
    asked.filter(|address| !address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_and_agents_reach_the_server_whatever_address_is_asked_for() {
        let addresses = |list: &[&str]| list.iter().map(|one| one.parse().unwrap()).collect::<Vec<IpAddr>>();
        let own = ["127.0.0.1", "10.244.0.1", "fd00::1", "10.243.0.1"];
        for (asked, expected) in [
            (None, &own[..]),
            (Some("127.0.0.1"), &own[..]),
            (Some("192.0.2.7"), &["192.0.2.7", "127.0.0.1", "10.244.0.1", "fd00::1", "10.243.0.1"]),
            (Some("0.0.0.0"), &["0.0.0.0", "fd00::1"]),
            (Some("::"), &["::"]),
        ] {
            let asked = asked.map(|address| address.parse().unwrap());
            assert_eq!(listen_addresses(addresses(&own), asked), addresses(expected), "{asked:?}");
        }
    }

    #[test]
    fn a_loopback_address_opens_the_cluster_to_nobody() {
        for (asked, opens) in [("127.0.0.1", false), ("::1", false), ("0.0.0.0", true), ("192.0.2.7", true)] {
            assert_eq!(opened_to(Some(asked.parse().unwrap())).is_some(), opens, "{asked}");
        }
        assert_eq!(opened_to(None), None);
    }
}
