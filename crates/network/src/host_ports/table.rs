//! The nftables table of host ports, as data. No I/O.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferrite_nft::{
    Bytes, Chain, ChainType, Cidr, Element, Expr, Field, Hook, IpFamily, Key, Rule, SetId, SetShape,
    Transaction, Value, Verdict, in_range, load_destination, load_source, octets, to_this_node,
    was_destination_natted,
};

use super::{HostPort, PortProtocol, Published};
use crate::Addresses;

/// Before the Services' own translation: a host port is a promise of the node.
const BEFORE_SERVICES: i32 = -105;
const SOURCE_NAT: i32 = 100;
/// Before connection tracking.
const RAW: i32 = -300;

/// The sets of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum HostPortSet {
    /// Address of the node, protocol and port → address and port of the pod.
    Addressed,
    /// Protocol and port at any address of the node → address and port of the pod.
    Anywhere,
    /// Pods with host ports, each beside itself: such a pod may call itself through the node.
    Hairpin,
}

impl SetId for HostPortSet {
    const ALL: &'static [Self] = &[Self::Addressed, Self::Anywhere, Self::Hairpin];

    fn shape(self) -> SetShape {
        use Field::{Address, Port, Protocol};
        match self {
            Self::Addressed => SetShape::map("host-ports", &[Address, Protocol, Port], &[Address, Port]),
            Self::Anywhere => SetShape::map("host-ports-anywhere", &[Protocol, Port], &[Address, Port]),
            Self::Hairpin => SetShape::set("hairpin", &[Address, Address]),
        }
    }
}

/// The elements of one family for the published ports. Of two sandboxes that claim one port the first, in the order of their names,
/// has it: the scheduler and the kubelet keep that from happening.
pub(crate) fn elements(
    family: IpFamily,
    published: &BTreeMap<String, Published>,
) -> BTreeMap<(HostPortSet, Key), (Value, String)> {
    let mut out = BTreeMap::new();
    for (sandbox, pod) in published {
        let Some(address) = pod.addresses.of(family).copied() else { continue };
        let mut any = false;
        for port in pod.ports.iter().filter(|port| port.has(family)) {
            any = true;
            let protocol = port.protocol();
            let (set, key) = match port.host_ip() {
                Some(ip) => (HostPortSet::Addressed, Key::service(ip, protocol, port.host_port)),
                None => (HostPortSet::Anywhere, Key::node_port(protocol, port.host_port)),
            };
            let target = Bytes::fields(&[&octets(address), &port.container_port.to_be_bytes()]);
            out.entry((set, key)).or_insert((Value::Bytes(target), sandbox.clone()));
        }
        if any {
            let ip = octets(address);
            let key = Key::new(&[&ip, &ip]);
            out.entry((HostPortSet::Hairpin, key)).or_insert((Value::Member, sandbox.clone()));
        }
    }
    out
}

pub(crate) fn element(
    ((set, key), (value, comment)): (&(HostPortSet, Key), &(Value, String)),
) -> Element<HostPortSet> {
    Element { set: *set, key: key.clone(), value: value.clone(), comment: Some(comment.clone()) }
}

/// The whole table of a family.
///
/// Pods are behind `links`.
pub(crate) fn table(
    family: IpFamily,
    links: &[String],
    published: &BTreeMap<String, Published>,
) -> Transaction<HostPortSet> {
    let hooked = |name: &str, kind, hook, priority, rules| Chain {
        name: name.to_owned(),
        hook: Some((kind, hook, priority)),
        rules,
    };
    Transaction {
        rebuild: true,
        delete: Vec::new(),
        chains: vec![
            hooked(
                "raw-prerouting",
                ChainType::Filter,
                Hook::Prerouting,
                RAW,
                no_loopback_from(family, links),
            ),
            hooked("nat-prerouting", ChainType::Nat, Hook::Prerouting, BEFORE_SERVICES, translate(family)),
            hooked("nat-output", ChainType::Nat, Hook::Output, BEFORE_SERVICES, translate(family)),
            hooked("nat-postrouting", ChainType::Nat, Hook::Postrouting, SOURCE_NAT, masquerade(family)),
        ],
        add: elements(family, published).iter().map(element).collect(),
    }
}

/// The host port that an element of a map is for.
pub(crate) fn host_port(family: IpFamily, set: HostPortSet, key: &[u8], value: &[u8]) -> Option<HostPort> {
    let length = usize::from(family.bits() / 8);
    let (host_ip, rest) = match set {
        HostPortSet::Addressed => {
            let (ip, rest) = key.split_at_checked(length)?;
            let ip = match family {
                IpFamily::V4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
                IpFamily::V6 => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
            };
            (Some(ip), rest)
        }
        HostPortSet::Anywhere => (None, key),
        HostPortSet::Hairpin => return None,
    };
    let port = |bytes: &[u8]| Some(u16::from_be_bytes(bytes.get(..2)?.try_into().ok()?));
    let protocol = match rest.first()? {
        6 => PortProtocol::Tcp,
        17 => PortProtocol::Udp,
        132 => PortProtocol::Sctp,
        _ => return None,
    };
    Some(HostPort {
        host_ip,
        host_port: port(rest.get(4..)?)?,
        container_port: port(value.get(length..)?)?,
        protocol,
    })
}

type R = Rule<HostPortSet>;

fn translate(family: IpFamily) -> Vec<R> {
    let words = family.bits() / 32;
    let nat = |at: u8| Expr::DestinationNat { address: at, port: at + words };
    let addressed = [
        load_destination(family, 0),
        Expr::LoadProtocol { to: words },
        Expr::LoadDestinationPort { to: words + 1 },
        Expr::Map { set: HostPortSet::Addressed, key: 0, to: words + 2 },
        nat(words + 2),
    ];
    let anywhere = to_this_node().into_iter().chain([
        Expr::LoadProtocol { to: 0 },
        Expr::LoadDestinationPort { to: 1 },
        Expr::Map { set: HostPortSet::Anywhere, key: 0, to: 2 },
        nat(2),
    ]);
    vec![
        not_to_loopback(family).into_iter().chain(addressed).collect(),
        not_to_loopback(family).into_iter().chain(anywhere).collect(),
    ]
}

/// The loopback address of IPv6 leads to no pod: the kernel takes no answer for it from a link.
fn not_to_loopback(family: IpFamily) -> Vec<Expr<HostPortSet>> {
    match family {
        IpFamily::V4 => Vec::new(),
        IpFamily::V6 => in_range(load_destination(family, 0), loopback(family), false).to_vec(),
    }
}

fn loopback(family: IpFamily) -> Cidr {
    match family {
        IpFamily::V4 => {
            Cidr::new(Ipv4Addr::LOCALHOST.into(), 8).unwrap_or(Cidr::single(Ipv4Addr::LOCALHOST.into()))
        }
        IpFamily::V6 => Cidr::single(Ipv6Addr::LOCALHOST.into()),
    }
}

/// A pod could not answer 127.0.0.1, nor itself.
fn masquerade(family: IpFamily) -> Vec<R> {
    let words = family.bits() / 32;
    let from_loopback = in_range(load_source(family, 0), loopback(family), true);
    let to_itself = [
        load_source(family, 0),
        load_destination(family, words),
        Expr::InSet { set: HostPortSet::Hairpin, key: 0, inverted: false },
    ];
    vec![
        was_destination_natted()
            .into_iter()
            .chain(from_loopback)
            .chain([Expr::Masquerade { random_ports: true }])
            .collect(),
        was_destination_natted()
            .into_iter()
            .chain(to_itself)
            .chain([Expr::Masquerade { random_ports: true }])
            .collect(),
    ]
}

/// `route_localnet` lets the node send from 127.0.0.1 to pods. It would also let pods send to the node's loopback
/// addresses: those packets are dropped as they come in.
fn no_loopback_from(family: IpFamily, links: &[String]) -> Vec<R> {
    let rule = |link: &String, load| -> R {
        let mut name = link.as_bytes().to_vec();
        name.resize(16, 0);
        [Expr::LoadInputInterface { to: 0 }, Expr::Compare { with: 0, equal: true, data: name }]
            .into_iter()
            .chain(in_range(load, loopback(family), true))
            .chain([Expr::Verdict(Verdict::Drop)])
            .collect()
    };
    let both = |link| [rule(link, load_destination(family, 0)), rule(link, load_source(family, 0))];
    links.iter().flat_map(both).collect()
}

impl HostPort {
    /// True if a pod with these addresses can have it.
    pub(crate) fn applies_to(&self, addresses: Addresses) -> bool {
        addresses.families().into_iter().any(|family| self.has(family))
    }

    /// True if it is a port of the node's addresses of this family.
    fn has(&self, family: IpFamily) -> bool {
        self.host_port != 0 && self.host_ip.is_none_or(|ip| IpFamily::of(ip) == family)
    }

    /// The address it is limited to.
    fn host_ip(&self) -> Option<IpAddr> {
        self.host_ip.filter(|ip| !ip.is_unspecified())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_ports::PortProtocol::{Sctp, Tcp, Udp};

    fn port(ip: Option<&str>, host: u16, protocol: PortProtocol, container: u16) -> HostPort {
        HostPort {
            host_ip: ip.map(|ip| ip.parse().unwrap()),
            host_port: host,
            container_port: container,
            protocol,
        }
    }

    #[test]
    fn ports_with_different_addresses_and_protocols_are_apart() {
        let pod = |last, ports| Published {
            addresses: format!("10.244.0.{last},fd00::{last}").parse().unwrap(),
            ports,
        };
        let published = BTreeMap::from([
            ("a".to_owned(), pod(2, vec![port(Some("127.0.0.1"), 54323, Tcp, 8080)])),
            ("b".to_owned(), pod(3, vec![port(Some("192.0.2.1"), 54323, Tcp, 8080)])),
            ("c".to_owned(), pod(4, vec![port(Some("192.0.2.1"), 54323, Udp, 8080)])),
            ("d".to_owned(), pod(5, vec![port(None, 54323, Sctp, 1), port(Some("0.0.0.0"), 80, Tcp, 81)])),
            ("late".to_owned(), pod(6, vec![port(Some("192.0.2.1"), 54323, Udp, 9)])),
            ("six".to_owned(), pod(7, vec![port(Some("::"), 80, Tcp, 80), port(None, 0, Tcp, 80)])),
        ]);
        let four = elements(IpFamily::V4, &published);
        let seen: Vec<String> = four
            .iter()
            .map(|((set, key), (value, owner))| format!("{set:?} {:?} {value:?} {owner}", key.first()))
            .collect();
        for ((set, key), (value, _)) in &four {
            if let Value::Bytes(bytes) = value {
                let read = host_port(IpFamily::V4, *set, key.first(), bytes).unwrap();
                let known = published.values().flat_map(|pod| &pod.ports);
                let same =
                    |port: &&HostPort| (port.host_port, port.protocol) == (read.host_port, read.protocol);
                assert!(
                    known.filter(same).any(|port| port.container_port == read.container_port),
                    "{read:?}"
                );
            }
        }
        let member = |last: u8, owner: &str| {
            format!("Hairpin [10, 244, 0, {last}, 10, 244, 0, {last}] Member {owner}")
        };
        let to = |last: u8, port: u16, owner: &str| {
            let [high, low] = port.to_be_bytes();
            format!("Bytes([10, 244, 0, {last}, {high}, {low}, 0, 0]) {owner}")
        };
        assert_eq!(
            seen,
            [
                format!("Addressed [127, 0, 0, 1, 6, 0, 0, 0, 212, 51, 0, 0] {}", to(2, 8080, "a")),
                format!("Addressed [192, 0, 2, 1, 6, 0, 0, 0, 212, 51, 0, 0] {}", to(3, 8080, "b")),
                format!("Addressed [192, 0, 2, 1, 17, 0, 0, 0, 212, 51, 0, 0] {}", to(4, 8080, "c")),
                format!("Anywhere [6, 0, 0, 0, 0, 80, 0, 0] {}", to(5, 81, "d")),
                format!("Anywhere [132, 0, 0, 0, 212, 51, 0, 0] {}", to(5, 1, "d")),
                member(2, "a"),
                member(3, "b"),
                member(4, "c"),
                member(5, "d"),
                member(6, "late"),
            ]
        );
    }

    #[test]
    fn ports_of_ipv6_have_elements_of_their_own() {
        let published = BTreeMap::from([
            (
                "a".to_owned(),
                Published {
                    addresses: "10.244.0.2,fd00::2".parse().unwrap(),
                    ports: vec![
                        port(None, 80, Tcp, 8080),
                        port(Some("2001:db8::1"), 53, Udp, 5353),
                        port(Some("::"), 81, Tcp, 8081),
                        port(Some("192.0.2.1"), 82, Tcp, 8082),
                        port(Some("0.0.0.0"), 83, Tcp, 8083),
                    ],
                },
            ),
            (
                "four".to_owned(),
                Published { addresses: "10.244.0.3".parse().unwrap(), ports: vec![port(None, 84, Tcp, 84)] },
            ),
        ]);
        let ports = |family| {
            let found = elements(family, &published);
            let read = found.iter().filter_map(|((set, key), (value, _))| match value {
                Value::Bytes(bytes) => host_port(family, *set, key.first(), bytes),
                _ => None,
            });
            let text = |port: HostPort| {
                let ip = port.host_ip.map(|ip| ip.to_string()).unwrap_or_default();
                format!("{ip} {} {}", port.host_port, port.container_port)
            };
            read.map(text).collect::<Vec<_>>()
        };
        assert_eq!(ports(IpFamily::V6), ["2001:db8::1 53 5353", " 80 8080", " 81 8081"]);
        assert_eq!(ports(IpFamily::V4), ["192.0.2.1 82 8082", " 80 8080", " 83 8083", " 84 84"]);
        let only = |text: &str| text.parse::<Addresses>().unwrap();
        assert!(!port(Some("::1"), 80, Tcp, 80).applies_to(only("10.244.0.2")));
        assert!(port(Some("::1"), 80, Tcp, 80).applies_to(only("10.244.0.2,fd00::2")));
    }
}
