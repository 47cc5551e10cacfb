//! Keeps pods out of the tunnel between nodes.
//!
//! A node takes packets out of the tunnel as they are, with the source that they name. A pod that could send to the port
//! of the tunnel could speak as every other pod. So a node takes packets of the tunnel from nodes only and at its own
//! address only, and lets no packet of a pod leave for that port of a node, since it would have the node's address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ferrite_netlink::Netns;
use ferrite_nft::{
    BaseChain, Cidr, Element, Expr, Field, Hook, IpFamily, Key, Ruleset, SetId, SetShape, TableFamily, Value,
    Verdict, comes_by, compare, in_range, load_destination, load_source,
};

use super::{VXLAN_ID, VXLAN_PORT};
use crate::{NetworkError, rules};

const INPUT: &str = "input";
const FORWARD: &str = "forward";
/// The number of the network in a packet of VXLAN: after the header of UDP, flags and reserved bytes.
const NETWORK: (u32, u32) = (12, 3);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Set {
    /// All nodes.
    Nodes,
    /// The nodes that the tunnel leads to.
    Tunnels,
}

impl SetId for Set {
    const ALL: &'static [Self] = &[Self::Nodes, Self::Tunnels];

    fn shape(self) -> SetShape {
        SetShape::set(if self == Self::Nodes { "nodes" } else { "tunnels" }, &[Field::Address])
    }
}

/// The addresses that the rules are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Guard {
    /// This node's address in the tunnel.
    pub own: IpAddr,
    pub nodes: BTreeSet<IpAddr>,
    /// None when there is no tunnel: the port may be that of other software.
    pub tunnels: BTreeSet<IpAddr>,
}

impl Guard {
    /// The addresses of one family that count.
    pub(super) fn new(
        own: IpAddr,
        nodes: impl IntoIterator<Item = IpAddr>,
        tunnels: BTreeSet<IpAddr>,
    ) -> Self {
        let same = |address: &IpAddr| address.is_ipv4() == own.is_ipv4();
        Self { own, nodes: nodes.into_iter().filter(same).collect(), tunnels }
    }

    fn family(&self) -> IpFamily {
        IpFamily::of(self.own)
    }

    /// Makes the rules, in place of earlier ones and in one step, unless `present` are the same and are still there.
    pub(super) fn set(&self, host: &Netns, bridge: &str, present: Option<&Self>) -> Result<(), NetworkError> {
        let name = rules::tunnel_table(bridge);
        let fail = || NetworkError::netlink(format!("nftables table {name}"));
        let mut ruleset = Ruleset::open(Some(host)).map_err(fail())?;
        let family = TableFamily::from(self.family());
        if present == Some(self)
            && ruleset.has_table(family, &name).map_err(fail())?
            && ruleset.rules(family, &name).map_err(fail())?.len() >= self.rule_count()
        {
            return Ok(());
        }
        let mut batch = ruleset.batch(family, &name);
        batch.replace_table();
        batch.add_sets::<Set>();
        batch.add_elements(&self.elements());
        batch.add_chain(FORWARD, &BaseChain::filter(Hook::Forward));
        batch.add_rule(FORWARD, &self.leaves(bridge));
        if !self.tunnels.is_empty() {
            batch.add_chain(INPUT, &BaseChain::filter(Hook::Input));
            self.arrives().iter().for_each(|rule| batch.add_rule(INPUT, rule));
        }
        ruleset.commit(batch).map_err(fail())
    }

    fn rule_count(&self) -> usize {
        if self.tunnels.is_empty() { 1 } else { 1 + self.arrives().len() }
    }

    fn elements(&self) -> Vec<Element<Set>> {
        let element = |set| {
            move |address: &IpAddr| Element {
                set,
                key: Key::address(*address),
                value: Value::Member,
                comment: None,
            }
        };
        let tunnels = self.tunnels.iter().filter(|address| address.is_ipv4() == self.own.is_ipv4());
        self.nodes.iter().map(element(Set::Nodes)).chain(tunnels.map(element(Set::Tunnels))).collect()
    }

    /// A pod sends to the tunnel's port of a node.
    fn leaves(&self, bridge: &str) -> Vec<Expr<Set>> {
        let mut rule = to_tunnel();
        rule.extend(comes_by(bridge, true));
        rule.extend([
            load_destination(self.family(), 0),
            Expr::InSet { set: Set::Nodes, key: 0, inverted: false },
            Expr::Verdict(Verdict::Drop),
        ]);
        rule
    }

    /// Packets of our network come from its nodes to this node's address, or not at all.
    fn arrives(&self) -> [Vec<Expr<Set>>; 2] {
        let mut honest = of_network();
        honest.extend(in_range(load_destination(self.family(), 0), Cidr::single(self.own), true));
        honest.extend([
            load_source(self.family(), 0),
            Expr::InSet { set: Set::Tunnels, key: 0, inverted: false },
            Expr::Verdict(Verdict::Accept),
        ]);
        let mut others = of_network();
        others.push(Expr::Verdict(Verdict::Drop));
        [honest, others]
    }
}

/// Matches packets to the tunnel's port.
fn to_tunnel() -> Vec<Expr<Set>> {
    const UDP: u8 = 17;
    let protocol = compare(Expr::LoadProtocol { to: 0 }, true, &[UDP]);
    let port = compare(Expr::LoadDestinationPort { to: 0 }, true, &VXLAN_PORT.to_be_bytes());
    [protocol, port].concat()
}

/// Matches packets of our network alone: other software may use the same port.
fn of_network() -> Vec<Expr<Set>> {
    let (offset, len) = NETWORK;
    let [_, number @ ..] = VXLAN_ID.to_be_bytes();
    let mut rule = to_tunnel();
    rule.extend(compare(Expr::LoadTransportHeader { to: 0, offset, len }, true, &number));
    rule
}

/// Takes the rules away. A kernel without nftables has none.
pub(super) fn remove(host: &Netns, bridge: &str) -> Result<(), NetworkError> {
    let Ok(mut ruleset) = Ruleset::open(Some(host)) else { return Ok(()) };
    rules::delete_tables(&mut ruleset, &rules::tunnel_table(bridge))
}
