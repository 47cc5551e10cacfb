//! The chains that are there without any Service.

use ferrite_nft::{
    ChainType, Hook, Register, Verdict, in_range, jump, load_destination, load_source, native,
    new_connection, set_mark, to_this_node, was_destination_natted,
};

use super::{BaseChain, Expr, LayoutConfig, LocalTraffic, NodePortAddresses, Rule, SetName};
use crate::model::{Cidr, IpFamily};

const DESTINATION_NAT: i32 = -100;
const SOURCE_NAT: i32 = 100;
const FILTER: i32 = 0;
/// Before DNAT, where a packet still has the address of the load balancer.
const BEFORE_DNAT: i32 = DESTINATION_NAT - 10;
/// After DNAT: a packet that still has the address of a Service here has met no service port. It is refused before the
/// kernel looks for a route, which would refuse it in another way.
const AFTER_DNAT: i32 = DESTINATION_NAT + 10;

const SERVICES: &str = "services";
const MASQUERADING: &str = "masquerading";
const FIREWALL: &str = "firewall-check";
const NO_ENDPOINTS: &str = "service-endpoints-check";
const NO_NODE_PORT_ENDPOINTS: &str = "nodeport-endpoints-check";
const CLUSTER_IPS: &str = "cluster-ips-check";

/// All chains that do not depend on Services, called ones before their callers.
pub fn base_chains(config: &LayoutConfig) -> Vec<BaseChain> {
    let called = |name: &str, rules: Vec<Rule>| BaseChain { name: name.to_owned(), hook: None, rules };
    let jump_new = |chain: &str| -> Rule { new_connection().into_iter().chain([jump(chain)]).collect() };
    let hooked = |name: &str, hook, rules| BaseChain { name: name.to_owned(), hook: Some(hook), rules };
    use ChainType::{Filter, Nat};
    use Hook::{Input, Output, Postrouting, Prerouting};
    vec![
        called(SERVICES, services(config)),
        called(MASQUERADING, masquerading(config)),
        called(FIREWALL, vec![firewall(config.family)]),
        called(CLUSTER_IPS, cluster_ips(config)),
        called(NO_ENDPOINTS, no_endpoints(config.family)),
        called(NO_NODE_PORT_ENDPOINTS, no_node_port_endpoints(config)),
        hooked("filter-prerouting-pre-dnat", (Filter, Prerouting, BEFORE_DNAT), vec![jump_new(FIREWALL)]),
        hooked("filter-output-pre-dnat", (Filter, Output, BEFORE_DNAT), vec![jump_new(FIREWALL)]),
        hooked("filter-input", (Filter, Input, FILTER), vec![jump_new(NO_NODE_PORT_ENDPOINTS)]),
        hooked("filter-prerouting", (Filter, Prerouting, AFTER_DNAT), vec![jump_new(NO_ENDPOINTS)]),
        hooked("filter-output", (Filter, Output, FILTER), vec![jump_new(NO_ENDPOINTS)]),
        hooked("nat-prerouting", (Nat, Prerouting, DESTINATION_NAT), vec![vec![jump(SERVICES)]]),
        hooked("nat-output", (Nat, Output, DESTINATION_NAT), vec![vec![jump(SERVICES)]]),
        hooked("nat-postrouting", (Nat, Postrouting, SOURCE_NAT), vec![vec![jump(MASQUERADING)]]),
    ]
}

/// Words of an address.
pub(super) fn address_words(family: IpFamily) -> Register {
    match family {
        IpFamily::V4 => 1,
        IpFamily::V6 => 4,
    }
}

/// The register of the class in the value of `service-ips` and `service-nodeports`; the id follows it.
pub(super) fn class_register(family: IpFamily) -> Register {
    address_words(family) + 2
}

/// Puts address, protocol and port of the destination into registers 0 and up.
pub(super) fn load_service(family: IpFamily) -> [Expr; 3] {
    let words = address_words(family);
    [
        load_destination(family, 0),
        Expr::LoadProtocol { to: words },
        Expr::LoadDestinationPort { to: words + 1 },
    ]
}

/// Puts protocol and port of the destination into registers 0 and 1.
pub(super) fn load_node_port() -> [Expr; 2] {
    [Expr::LoadProtocol { to: 0 }, Expr::LoadDestinationPort { to: 1 }]
}

/// Loopback addresses have no node ports: a packet from 127.0.0.1 cannot leave for a pod.
fn not_loopback(family: IpFamily) -> [Expr; 3] {
    let range = match family {
        IpFamily::V4 => Cidr::new(std::net::Ipv4Addr::LOCALHOST.into(), 8),
        IpFamily::V6 => Cidr::new(std::net::Ipv6Addr::LOCALHOST.into(), 128),
    };
    in_range(load_destination(family, 0), range.expect("both prefixes fit their addresses"), false)
}

/// Matches packets to an address of this node that has node ports.
fn to_node_port_address(config: &LayoutConfig) -> Rule {
    match config.node_port_addresses {
        NodePortAddresses::All => to_this_node().into_iter().chain(not_loopback(config.family)).collect(),
        NodePortAddresses::Only(_) => vec![
            load_destination(config.family, 0),
            Expr::InSet { set: SetName::NodePortIps, key: 0, inverted: false },
        ],
    }
}

/// The guards that match traffic of pods, one for each rule needed; empty if pods cannot be recognised.
pub(super) fn from_pods(config: &LayoutConfig) -> Vec<Rule> {
    match &config.local_traffic {
        LocalTraffic::Unknown => Vec::new(),
        LocalTraffic::Cidrs(ranges) => {
            let source = || load_source(config.family, 0);
            config.own(ranges).map(|range| in_range(source(), range, true).to_vec()).collect()
        }
        LocalTraffic::Interface(name) => vec![interface(name, false, true)],
        LocalTraffic::InterfacePrefix(prefix) => vec![interface(prefix, true, true)],
    }
}

/// The guard that matches all other traffic.
fn not_from_pods(config: &LayoutConfig) -> Option<Rule> {
    match &config.local_traffic {
        LocalTraffic::Unknown => None,
        LocalTraffic::Cidrs(ranges) => {
            let source = || load_source(config.family, 0);
            let guards: Rule =
                config.own(ranges).flat_map(|range| in_range(source(), range, false)).collect();
            (!guards.is_empty()).then_some(guards)
        }
        LocalTraffic::Interface(name) => Some(interface(name, false, false)),
        LocalTraffic::InterfacePrefix(prefix) => Some(interface(prefix, true, false)),
    }
}

fn interface(name: &str, prefix: bool, equal: bool) -> Rule {
    const IFNAMSIZ: usize = 16;
    let mut data = name.as_bytes().to_vec();
    data.truncate(IFNAMSIZ - 1);
    if !prefix {
        data.resize(IFNAMSIZ, 0);
    }
    vec![Expr::LoadInputInterface { to: 0 }, Expr::Compare { with: 0, equal, data }]
}

fn services(config: &LayoutConfig) -> Vec<Rule> {
    let family = config.family;
    let class = class_register(family);
    let to_cluster_ip =
        || [load_destination(family, 0), Expr::InSet { set: SetName::ClusterIps, key: 0, inverted: false }];
    let mut rules: Vec<Rule> = Vec::new();
    if config.masquerade_all {
        rules.push(to_cluster_ip().into_iter().chain(set_mark(config.masquerade_mark)).collect());
    } else if let Some(guard) = not_from_pods(config) {
        // Somebody outside may route the Service range to any node, and the endpoint may be on another one.
        // The guard goes first: it costs less than the lookup, and ends the rule for connections of pods.
        let mark = set_mark(config.masquerade_mark);
        rules.push(guard.into_iter().chain(to_cluster_ip()).chain(mark).collect());
    }
    let dispatch =
        |set| [Expr::Map { set, key: 0, to: class }, Expr::VerdictMap { set: SetName::Classes, key: class }];
    rules.push(load_service(family).into_iter().chain(dispatch(SetName::ServiceIps)).collect());
    rules.push(
        to_node_port_address(config)
            .into_iter()
            .chain(load_node_port())
            .chain(dispatch(SetName::ServiceNodePorts))
            .collect(),
    );
    rules
}

fn masquerading(config: &LayoutConfig) -> Vec<Rule> {
    let (family, mark) = (config.family, config.masquerade_mark);
    let words = address_words(family);
    let marked: Rule = vec![
        Expr::LoadMark { to: 0 },
        Expr::Bitwise { from: 0, to: 0, mask: native(mark), xor: native(0) },
        Expr::Compare { with: 0, equal: false, data: native(0) },
        Expr::LoadMark { to: 0 },
        Expr::Bitwise { from: 0, to: 0, mask: native(u32::MAX), xor: native(mark) },
        Expr::StoreMark { from: 0 },
        Expr::Masquerade { random_ports: true },
    ];
    let hairpin = was_destination_natted().into_iter().chain([
        load_source(family, 0),
        load_destination(family, words),
        Expr::LoadProtocol { to: 2 * words },
        Expr::LoadDestinationPort { to: 2 * words + 1 },
        Expr::InSet { set: SetName::HairpinConnections, key: 0, inverted: false },
        Expr::Masquerade { random_ports: true },
    ]);
    let mut rules = vec![marked, hairpin.collect()];
    if let Some(range) = config.untracked_bridge.filter(|range| range.family() == family) {
        let both = in_range(load_source(family, 0), range, true).into_iter().chain(in_range(
            load_destination(family, 0),
            range,
            true,
        ));
        rules.push(
            was_destination_natted()
                .into_iter()
                .chain(both)
                .chain([Expr::Masquerade { random_ports: true }])
                .collect(),
        );
    }
    rules
}

fn firewall(family: IpFamily) -> Rule {
    let words = address_words(family);
    load_service(family)
        .into_iter()
        .chain([
            Expr::InSet { set: SetName::FirewallIps, key: 0, inverted: false },
            load_source(family, words + 2),
            Expr::InSet { set: SetName::FirewallSources, key: 0, inverted: true },
            Expr::Verdict(Verdict::Drop),
        ])
        .collect()
}

fn no_endpoints(family: IpFamily) -> Vec<Rule> {
    let rule = |set, last| -> Rule {
        load_service(family).into_iter().chain([Expr::InSet { set, key: 0, inverted: false }, last]).collect()
    };
    vec![
        rule(SetName::DropServices, Expr::Verdict(Verdict::Drop)),
        rule(SetName::RejectServices, Expr::Reject),
        // From here and not from the hooks: packets of known connections then meet one rule less.
        vec![jump(CLUSTER_IPS)],
    ]
}

fn no_node_port_endpoints(config: &LayoutConfig) -> Vec<Rule> {
    let rule = |set, last| -> Rule {
        to_node_port_address(config)
            .into_iter()
            .chain(load_node_port())
            .chain([Expr::InSet { set, key: 0, inverted: false }, last])
            .collect()
    };
    vec![
        rule(SetName::DropNodePorts, Expr::Verdict(Verdict::Drop)),
        rule(SetName::RejectNodePorts, Expr::Reject),
    ]
}

/// Packets that still have a ClusterIP here have met no service port: reject those to other ports of a Service,
/// drop those to addresses that no Service has (yet).
fn cluster_ips(config: &LayoutConfig) -> Vec<Rule> {
    let destination = || load_destination(config.family, 0);
    let mut rules = vec![vec![
        destination(),
        Expr::InSet { set: SetName::ClusterIps, key: 0, inverted: false },
        Expr::Reject,
    ]];
    rules.extend(config.own(&config.service_cidrs).map(|range| -> Rule {
        in_range(destination(), range, true).into_iter().chain([Expr::Verdict(Verdict::Drop)]).collect()
    }));
    rules
}
