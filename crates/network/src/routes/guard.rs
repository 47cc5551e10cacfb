//! Keeps pods out of the tunnel between nodes.
//!
//! A node takes packets out of the tunnel as they are, with the source that they name. A pod that could send to the port
//! of the tunnel could speak as every other pod. So a node takes packets of the tunnel from nodes only and at its own
//! address only, and lets no packet of a pod leave for that port of a node, since it would have the node's address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use nlink::netlink::namespace::Netns;
use nlink::netlink::nftables::{
    BaseChain, Chain, CmpOp, Expr, Family, FilterHook, PacketField, PayloadBase, Priority, Register, Rule,
    Set, SetElement, SetKeyType,
};
use nlink::netlink::{Connection, Nftables};

use super::{VXLAN_ID, VXLAN_PORT};
use crate::{NetworkError, rules};

const INPUT: &str = "input";
const FORWARD: &str = "forward";
/// All nodes.
const NODES: &str = "nodes";
/// The nodes that the tunnel leads to.
const TUNNELS: &str = "tunnels";
/// The number of the network in a packet of VXLAN: after the header of UDP, flags and reserved bytes.
const NETWORK: (u32, u32) = (12, 3);

/// Elements of one message, whose parts have 64 KiB at most.
const ELEMENTS: usize = 1000;

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

    fn family(&self) -> Family {
        if self.own.is_ipv4() { Family::Ip } else { Family::Ip6 }
    }

    /// Makes the rules, in place of earlier ones and in one step, unless `present` are the same and are still there.
    pub(super) async fn set(
        &self,
        host: &Netns,
        bridge: &str,
        present: Option<&Self>,
    ) -> Result<(), NetworkError> {
        let (name, family) = (rules::tunnel_table(bridge), self.family());
        let fail = || NetworkError::netlink(format!("nftables table {name}"));
        let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
        let tables = conn.list_tables_in(family).await.map_err(fail())?;
        let is_there = tables.iter().any(|table| table.name == name);
        if present == Some(self) && is_there {
            return Ok(());
        }
        let chain = |chain: &str, hook| {
            let made = Chain::new(name.as_str(), chain).map_err(fail())?.family(family);
            Ok::<_, NetworkError>(made.base(BaseChain::filter(hook, Priority::Filter)))
        };
        let (key, source, destination) = match self.own {
            IpAddr::V4(_) => (SetKeyType::Ipv4Addr, PacketField::Ip4Saddr, PacketField::Ip4Daddr),
            IpAddr::V6(_) => (SetKeyType::Ipv6Addr, PacketField::Ip6Saddr, PacketField::Ip6Daddr),
        };
        let set = |set: &str| Set::new(&name, set).family(family).key_type(key.clone());
        let rule = |chain: &str| Rule::new(&name, chain).family(family).match_udp_dport(VXLAN_PORT);
        let leaves = rule(FORWARD).match_iif(bridge).match_in_set(destination, NODES).drop();
        let mut transaction = conn.transaction();
        if is_there {
            transaction = transaction.del_table(&name, family);
        }
        transaction = transaction
            .add_table(&name, family)
            .add_chain(chain(FORWARD, FilterHook::Forward)?)
            .add_set(set(NODES));
        transaction = with_elements(transaction, &set(NODES), &self.nodes).add_rule(leaves);
        if !self.tunnels.is_empty() {
            let bits = if self.own.is_ipv4() { 32 } else { 128 };
            let of_tunnel = || of_network(rule(INPUT));
            let honest = of_tunnel().match_daddr(self.own, bits).match_in_set(source, TUNNELS).accept();
            transaction = transaction.add_chain(chain(INPUT, FilterHook::Input)?).add_set(set(TUNNELS));
            transaction = with_elements(transaction, &set(TUNNELS), &self.tunnels);
            transaction = transaction.add_rule(honest).add_rule(of_tunnel().drop());
        }
        transaction.commit(&conn).await.map_err(fail())
    }
}

fn with_elements(
    transaction: nlink::netlink::nftables::Transaction,
    set: &Set,
    addresses: &BTreeSet<IpAddr>,
) -> nlink::netlink::nftables::Transaction {
    let element = |address: &IpAddr| match address {
        IpAddr::V4(v4) => SetElement::ipv4(*v4),
        IpAddr::V6(v6) => SetElement::ipv6(*v6),
    };
    let elements: Vec<SetElement> = addresses.iter().map(element).collect();
    elements.chunks(ELEMENTS).fold(transaction, |transaction, part| transaction.add_set_elements(set, part))
}

/// Matches packets of our network alone: other software may use the same port.
fn of_network(rule: Rule) -> Rule {
    let (offset, len) = NETWORK;
    let [_, number @ ..] = VXLAN_ID.to_be_bytes();
    let load = Expr::Payload { dreg: Register::R0, base: PayloadBase::Transport, offset, len };
    rule.expr(load).expr(Expr::Cmp { sreg: Register::R0, op: CmpOp::Eq, data: number.to_vec() })
}

/// Takes the rules away. A kernel without nftables has none.
pub(super) async fn remove(host: &Netns, bridge: &str) -> Result<(), NetworkError> {
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    let name = rules::tunnel_table(bridge);
    for family in [Family::Ip, Family::Ip6] {
        let fail = NetworkError::netlink(format!("remove nftables table {name}"));
        conn.del_table_if_exists(name.as_str(), family).await.map_err(fail)?;
    }
    Ok(())
}
