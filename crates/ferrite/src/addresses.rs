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

/// The machine's addresses, if the server listens at all of them.
pub async fn machine_addresses(listen: &[IpAddr]) -> Vec<IpAddr> {
    if !listen.iter().any(IpAddr::is_unspecified) {
        return Vec::new();
    }
    ferrite_network::machine_addresses().await.unwrap_or_else(|error| {
        tracing::warn!(
            error = crate::chain(&error),
            "the server's certificate lacks addresses of the machine"
        );
        Vec::new()
    })
}

/// The addresses at which clients may find the server, for its certificate.
pub fn listening_names(listen: &[IpAddr], machine: &[IpAddr]) -> Vec<String> {
    let fits = |any: &IpAddr, address: &IpAddr| any.is_ipv6() || address.is_ipv4();
    let all = listen.iter().flat_map(|listen| match listen.is_unspecified() {
        false => vec![*listen],
        true => machine.iter().copied().filter(|address| fits(listen, address)).collect(),
    });
    all.map(|address| address.to_string()).collect()
}

/// The address that others are told, for a server at this one: as upstream, a certain one of the machine's.
pub fn advertised(bind: Option<IpAddr>) -> Option<IpAddr> {
    bind.filter(|address| !address.is_unspecified() && !address.is_loopback())
}

/// Reads a name or an address for a certificate.
pub fn parse_subject_name(text: &str) -> Result<String, String> {
    if text.parse::<IpAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    let name = text.strip_prefix("*.").unwrap_or(text);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    match name.len() <= 253 && name.split('.').all(is_label) {
        true => Ok(text.to_ascii_lowercase()),
        false => Err(format!("{text:?} is neither an IP address nor a DNS name")),
    }
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

    #[test]
    fn certificates_name_the_addresses_where_clients_are_served() {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let machine = ips(&["192.0.2.1", "2001:db8::1"]);
        for (listen, want) in [
            (&["127.0.0.1", "198.51.100.7"][..], &["127.0.0.1", "198.51.100.7"][..]),
            (&["0.0.0.0"], &["192.0.2.1"]),
            (&["::"], &["192.0.2.1", "2001:db8::1"]),
        ] {
            assert_eq!(listening_names(&ips(listen), &machine), want, "{listen:?}");
        }
    }

    #[test]
    fn a_certain_address_is_the_one_that_others_are_told() {
        for (bind, told) in [
            ("192.0.2.1", Some("192.0.2.1")),
            ("0.0.0.0", None),
            ("::", None),
            ("127.0.0.1", None),
            ("2001:db8::1", Some("2001:db8::1")),
        ] {
            assert_eq!(
                advertised(Some(bind.parse().unwrap())),
                told.map(|text| text.parse().unwrap()),
                "{bind}"
            );
        }
        assert_eq!(advertised(None), None);
    }

    #[test]
    fn names_for_certificates() {
        for good in ["api.example.com", "*.example.com", "192.0.2.1", "2001:db8::1", "localhost"] {
            assert_eq!(parse_subject_name(good).as_deref(), Ok(good));
        }
        for bad in ["", "a..b", "-a", "a b", "https://x", "*"] {
            assert!(parse_subject_name(bad).is_err(), "{bad}");
        }
    }
}
