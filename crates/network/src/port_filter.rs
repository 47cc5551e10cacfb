//! Filters the packets that a pod sends: only from its own addresses, and no faster than its limit.
//!
//! A pod with `NET_RAW` can write any source into a packet, and one with `NET_ADMIN` can give itself
//! addresses and remove queues of its own namespace. So the node filters packets from the pod's link before
//! they reach the bridge: with a chain of the netdev family at the node's end of each pair. Rules by source
//! address (NetworkPolicies, masquerading) can rely on the addresses.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use nlink::Bytes;
use nlink::netlink::namespace::Netns;
use nlink::netlink::nftables::{
    BaseChain, Chain, CmpOp, Expr, Family, FilterHook, LimitExpr, LimitUnit, MetaKey, PayloadBase, Priority,
    Register, Rule,
};
use nlink::netlink::{Connection, Nftables};

use crate::NetworkError;
use crate::bandwidth::burst_and_limit;

const IPV4: [u8; 2] = [0x08, 0x00];
const ARP: [u8; 2] = [0x08, 0x06];
/// In an ARP packet: the hardware address of the sender, then its IP address.
const ARP_SENDER_HARDWARE: u32 = 8;
const ARP_SENDER: u32 = 14;
/// In an IPv4 packet.
const IPV4_SOURCE: u32 = 12;
/// In an Ethernet frame.
const ETHER_SOURCE: u32 = 6;

/// A pod's end of a pair, as the node knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sender<'a> {
    /// The node's end of the pair.
    pub(crate) link: &'a str,
    pub(crate) hardware: [u8; 6],
    pub(crate) address: Ipv4Addr,
    /// Bits in a second.
    pub(crate) limit: Option<u64>,
}

/// The table of a network, in the family netdev.
pub(crate) fn table(bridge: &str) -> String {
    format!("ferrite-senders-{bridge}")
}

/// One comparison of a field.
fn is(load: Expr, op: CmpOp, value: &[u8]) -> [Expr; 2] {
    [load, Expr::Cmp { sreg: Register::R0, op, data: value.to_vec() }]
}

fn protocol(value: [u8; 2]) -> [Expr; 2] {
    is(Expr::Meta { dreg: Register::R0, key: MetaKey::Protocol }, CmpOp::Eq, &value)
}

fn field(base: PayloadBase, offset: u32, op: CmpOp, value: &[u8]) -> [Expr; 2] {
    is(Expr::Payload { dreg: Register::R0, base, offset, len: value.len() as u32 }, op, value)
}

/// The rules of a pod's link. Everything that is neither IPv4 nor ARP is dropped with the rest: pods have no other
/// addresses, and nothing on the node would judge it.
fn rules(table: &str, sender: Sender<'_>) -> Vec<Rule> {
    let rule = |parts: &[[Expr; 2]]| {
        let rule = Rule::new(table, sender.link).family(Family::Netdev);
        parts.iter().flatten().cloned().fold(rule, Rule::expr)
    };
    let (hardware, address) = (sender.hardware, sender.address.octets());
    let mut rules = vec![rule(&[field(PayloadBase::LinkLayer, ETHER_SOURCE, CmpOp::Neq, &hardware)]).drop()];
    if let Some(bits) = sender.limit {
        // Twice the burst of the pod's own queue: packets that pass that queue pass here.
        let burst = u32::try_from(burst_and_limit(bits).0.saturating_mul(2)).unwrap_or(u32::MAX);
        let limit = LimitExpr::bytes(Bytes::new((bits / 8).max(1)), LimitUnit::Second).burst(burst).over();
        rules.push(rule(&[]).expr(limit).drop());
    }
    let own = field(PayloadBase::Network, IPV4_SOURCE, CmpOp::Eq, &address);
    rules.push(rule(&[protocol(IPV4), own]).accept());
    let sender_is = |offset, value: &[u8]| field(PayloadBase::Network, offset, CmpOp::Eq, value);
    let own = [sender_is(ARP_SENDER_HARDWARE, &hardware), sender_is(ARP_SENDER, &address)];
    rules.push(rule(&[protocol(ARP), own[0].clone(), own[1].clone()]).accept());
    rules.push(rule(&[]).drop());
    rules
}

/// Makes the table of a network, which has no rules yet.
pub(crate) async fn prepare(host: &Netns, bridge: &str) -> Result<(), NetworkError> {
    let name = table(bridge);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    let tables = conn.list_tables_in(Family::Netdev).await.map_err(fail())?;
    if tables.iter().any(|table| table.name == name) {
        return Ok(());
    }
    conn.transaction().add_table(&name, Family::Netdev).commit(&conn).await.map_err(fail())
}

/// Lets a pod send from its own address only. May be repeated; the rules that were there are replaced at once.
pub(crate) async fn guard(host: &Netns, bridge: &str, sender: Sender<'_>) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink(format!("rules for what {} sends", sender.link));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    match replace(&conn, bridge, sender).await {
        // Somebody made the chain in between.
        Err(error) if error.is_already_exists() => replace(&conn, bridge, sender).await.map_err(fail()),
        other => other.map_err(fail()),
    }
}

async fn replace(
    conn: &Connection<Nftables>,
    bridge: &str,
    sender: Sender<'_>,
) -> Result<(), nlink::netlink::Error> {
    let name = table(bridge);
    let chain = Chain::new(name.as_str(), sender.link)?
        .family(Family::Netdev)
        .base(BaseChain::filter(FilterHook::ingress(sender.link), Priority::Filter));
    let known = chains(conn, bridge).await?.contains(sender.link);
    let mut transaction = match known {
        true => conn.transaction().flush_chain(&name, sender.link, Family::Netdev),
        false => conn.transaction().add_chain(chain),
    };
    for rule in rules(&name, sender) {
        transaction = transaction.add_rule(rule);
    }
    transaction.commit(conn).await
}

/// The links whose packets are filtered.
pub(crate) async fn guarded(host: &Netns, bridge: &str) -> Result<BTreeSet<String>, NetworkError> {
    let fail = || NetworkError::netlink(format!("nftables table {}", table(bridge)));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    chains(&conn, bridge).await.map_err(fail())
}

async fn chains(
    conn: &Connection<Nftables>,
    bridge: &str,
) -> Result<BTreeSet<String>, nlink::netlink::Error> {
    let name = table(bridge);
    let all = conn.list_chains().await?.into_iter();
    Ok(all.filter(|c| c.family == Family::Netdev && c.table == name).map(|c| c.name.to_string()).collect())
}

/// Takes the rules of a link away. Newer kernels keep a chain whose link is gone.
pub(crate) async fn forget(host: &Netns, bridge: &str, link: &str) -> Result<(), NetworkError> {
    // A kernel without nftables has none.
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    let fail = NetworkError::netlink(format!("remove the rules for what {link} sends"));
    conn.del_chain_if_exists(table(bridge).as_str(), link, Family::Netdev).await.map(drop).map_err(fail)
}

/// Takes all rules of a network away.
pub(crate) async fn remove(conn: &Connection<Nftables>, bridge: &str) -> Result<(), NetworkError> {
    let name = table(bridge);
    let fail = NetworkError::netlink(format!("remove nftables table {name}"));
    conn.del_table_if_exists(name.as_str(), Family::Netdev).await.map(drop).map_err(fail)
}
