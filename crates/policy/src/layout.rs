//! The table as data. No I/O.
//!
//! A packet between pods meets two base chains: `egress` judges it by its source, `ingress` by its destination. A pod
//! that a policy selects has a class, the rules that apply to it, in `egress-pods` or `ingress-pods`; other pods are not
//! in there and everything is allowed. A class is a chain that calls the chain of each of its rules and drops the rest;
//! an `accept` ends the base chain. Rules look peers and ports up in sets with their ids, so a pod that comes or goes
//! changes elements only.

use std::net::IpAddr;

use ferrite_nft::{
    Chain, ChainType, Expr, Field, Hook, IpFamily, Key, Register, Rule, SetId, SetShape, Verdict, jump,
    load_destination, load_source, native, octets,
};

use crate::model::{Direction, NamedPort, PolicyRule, PortRange};

/// The sets of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicySet {
    /// Pods of this node that a policy selects for ingress → class.
    IngressPods,
    /// The same for egress.
    EgressPods,
    /// Class → its chain.
    Classes,
    /// Group of pods, address of a member.
    Members,
    /// Rule, range of addresses.
    Blocks,
    /// Rule, protocol, range of ports.
    Ports,
    /// Name of a port, address of a pod that has it, protocol, port.
    NamedPorts,
    /// Pods that a policy selects, each beside itself: a pod always reaches itself.
    Themselves,
}

impl SetId for PolicySet {
    const ALL: &'static [Self] = &[
        Self::IngressPods,
        Self::EgressPods,
        Self::Classes,
        Self::Members,
        Self::Blocks,
        Self::Ports,
        Self::NamedPorts,
        Self::Themselves,
    ];

    fn shape(self) -> SetShape {
        use Field::{Address, Number, Port, Protocol};
        match self {
            Self::IngressPods => SetShape::map("ingress-pods", &[Address], &[Number]),
            Self::EgressPods => SetShape::map("egress-pods", &[Address], &[Number]),
            Self::Classes => SetShape::verdicts("classes", &[Number]),
            Self::Members => SetShape::set("members", &[Number, Address]),
            Self::Blocks => SetShape::set("blocks", &[Number, Address]).with_ranges(),
            Self::Ports => SetShape::set("ports", &[Number, Protocol, Port]).with_ranges(),
            Self::NamedPorts => SetShape::set("named-ports", &[Number, Address, Protocol, Port]),
            Self::Themselves => SetShape::set("themselves", &[Address, Address]),
        }
    }
}

pub type PolicyExpr = Expr<PolicySet>;
pub type PolicyChain = Chain<PolicySet>;

/// A number that names a rule, a group, a class or a name of ports in the table.
pub type Id = u32;

const ESTABLISHED_OR_RELATED: u32 = 2 | 4;
const FILTER: i32 = 0;

/// The set with the classes of pods.
pub fn pods_set(direction: Direction) -> PolicySet {
    match direction {
        Direction::Ingress => PolicySet::IngressPods,
        Direction::Egress => PolicySet::EgressPods,
    }
}

/// The chains that are there without any policy.
pub fn base_chains(family: IpFamily) -> Vec<PolicyChain> {
    let chain = |direction: Direction, name: &str, priority| Chain {
        name: name.to_owned(),
        hook: Some((ChainType::Filter, Hook::Forward, priority)),
        rules: base_rules(direction, family),
    };
    vec![chain(Direction::Egress, "egress", FILTER), chain(Direction::Ingress, "ingress", FILTER + 1)]
}

fn accept() -> PolicyExpr {
    Expr::Verdict(Verdict::Accept)
}

fn words(family: IpFamily) -> Register {
    match family {
        IpFamily::V4 => 1,
        IpFamily::V6 => 4,
    }
}

fn base_rules(direction: Direction, family: IpFamily) -> Vec<Rule<PolicySet>> {
    let address_words = words(family);
    let own_side = match direction {
        Direction::Ingress => load_destination(family, 0),
        Direction::Egress => load_source(family, 0),
    };
    vec![
        // Connections that were allowed go on, also when a policy comes later, and so do answers.
        vec![
            Expr::LoadCtState { to: 0 },
            Expr::Bitwise { from: 0, to: 0, mask: native(ESTABLISHED_OR_RELATED), xor: native(0) },
            Expr::Compare { with: 0, equal: false, data: native(0) },
            accept(),
        ],
        vec![
            load_source(family, 0),
            load_destination(family, address_words),
            Expr::InSet { set: PolicySet::Themselves, key: 0, inverted: false },
            accept(),
        ],
        vec![
            own_side,
            Expr::Map { set: pods_set(direction), key: 0, to: address_words },
            Expr::VerdictMap { set: PolicySet::Classes, key: address_words },
        ],
    ]
}

pub fn class_chain(id: Id) -> String {
    format!("class-{id}")
}

pub fn rule_chain(id: Id) -> String {
    format!("rule-{id}")
}

/// The chain of a rule's peers, where the rule has many ports and many peers.
pub fn peers_chain(id: Id) -> String {
    format!("peers-{id}")
}

/// The chain of a class: packets that none of its rules accepts are dropped.
pub fn class_rules(rules: &[Id]) -> Vec<Rule<PolicySet>> {
    let calls = rules.iter().map(|id| vec![jump(&rule_chain(*id))]);
    calls.chain([vec![Expr::Verdict(Verdict::Drop)]]).collect()
}

/// The ids that the chain of a rule refers to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleIds {
    pub rule: Id,
    pub groups: Vec<Id>,
    pub names: Vec<Id>,
    /// True if the rule has elements in `blocks`; `numbers` is the same for `ports`.
    pub blocks: bool,
    pub numbers: bool,
}

/// The chains of a rule.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RuleChains {
    pub rule: Vec<Rule<PolicySet>>,
    /// None if the chain of the rule has the peers, too.
    pub peers: Option<Vec<Rule<PolicySet>>>,
}

/// The chains of a rule: one alternative for each way to match a port and each way to match a peer. Where that is much, the
/// ports lead to a chain of the peers: a policy's author decides how many there are of both.
pub fn rule_rules(rule: &PolicyRule, ids: &RuleIds, direction: Direction, family: IpFamily) -> RuleChains {
    let member = |set, key| Expr::InSet { set, key, inverted: false };
    let number = |id| Expr::LoadNumber { to: 0, number: id };
    let address_words = words(family);
    let mut ports: Vec<Rule<PolicySet>> = Vec::new();
    if rule.ports.is_none() {
        ports.push(Vec::new());
    }
    if ids.numbers {
        ports.push(vec![
            number(ids.rule),
            Expr::LoadProtocol { to: 1 },
            Expr::LoadDestinationPort { to: 2 },
            member(PolicySet::Ports, 0),
        ]);
    }
    ports.extend(ids.names.iter().map(|name| {
        vec![
            number(*name),
            load_destination(family, 1),
            Expr::LoadProtocol { to: 1 + address_words },
            Expr::LoadDestinationPort { to: 2 + address_words },
            member(PolicySet::NamedPorts, 0),
        ]
    }));
    let other_side = || match direction {
        Direction::Ingress => load_source(family, 1),
        Direction::Egress => load_destination(family, 1),
    };
    let mut peers: Vec<Rule<PolicySet>> = Vec::new();
    if rule.peers.is_none() {
        peers.push(Vec::new());
    }
    peers.extend(
        ids.groups.iter().map(|group| vec![number(*group), other_side(), member(PolicySet::Members, 0)]),
    );
    if ids.blocks {
        peers.push(vec![number(ids.rule), other_side(), member(PolicySet::Blocks, 0)]);
    }
    let ending = |mut rule: Rule<PolicySet>, end: PolicyExpr| {
        rule.push(end);
        rule
    };
    if ports.len().saturating_mul(peers.len()) > ports.len() + peers.len() {
        let lead = |port| ending(port, jump(&peers_chain(ids.rule)));
        return RuleChains {
            rule: ports.into_iter().map(lead).collect(),
            peers: Some(peers.into_iter().map(|peer| ending(peer, accept())).collect()),
        };
    }
    let both = |port: &Rule<PolicySet>| -> Vec<Rule<PolicySet>> {
        let with = |peer: &Rule<PolicySet>| port.iter().chain(peer).cloned().chain([accept()]).collect();
        peers.iter().map(with).collect()
    };
    RuleChains { rule: ports.iter().flat_map(both).collect(), peers: None }
}

pub fn member_key(group: Id, address: IpAddr) -> Key {
    Key::new(&[&group.to_ne_bytes(), &octets(address)])
}

pub fn block_key(rule: Id, (first, last): (IpAddr, IpAddr)) -> Key {
    let end = |address| Key::new(&[&rule.to_ne_bytes(), &octets(address)]);
    Key::range(&end(first), &end(last))
}

pub fn port_key(rule: Id, (protocol, first, last): PortRange) -> Key {
    let end = |port: u16| Key::new(&[&rule.to_ne_bytes(), &[protocol.number()], &port.to_be_bytes()]);
    Key::range(&end(first), &end(last))
}

pub fn named_port_key(name: Id, address: IpAddr, port: &NamedPort) -> Key {
    let (protocol, number) = ([port.protocol.number()], port.number.to_be_bytes());
    Key::new(&[&name.to_ne_bytes(), &octets(address), &protocol, &number])
}

pub fn themselves_key(address: IpAddr) -> Key {
    Key::new(&[&octets(address), &octets(address)])
}

pub fn number_key(id: Id) -> Key {
    Key::new(&[&id.to_ne_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_peers_do_not_multiply() {
        let rule = PolicyRule { peers: Some(Vec::new()), ports: Some(Vec::new()) };
        let of = |groups: u32, names: u32| {
            let ids = RuleIds {
                rule: 1,
                groups: (10..10 + groups).collect(),
                names: (100_000..100_000 + names).collect(),
                ..RuleIds::default()
            };
            let chains = rule_rules(&rule, &ids, Direction::Ingress, IpFamily::V4);
            (chains.rule.len(), chains.peers.map(|peers| peers.len()))
        };
        for (groups, names, expected) in [
            (1, 1, (1, None)),
            (1, 5, (5, None)),
            (2, 2, (4, None)),
            (2, 3, (3, Some(2))),
            (20_000, 20_000, (20_000, Some(20_000))),
        ] {
            assert_eq!(of(groups, names), expected, "{groups} groups, {names} names");
        }
    }
}
