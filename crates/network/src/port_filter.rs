//! Filters the packets that a pod sends: only from its own addresses, and no faster than its limit.
//!
//! A pod with `NET_RAW` can write any source into a packet, and one with `NET_ADMIN` can give itself
//! addresses and remove queues of its own namespace. So the node filters packets from the pod's link before
//! they reach the bridge: with a chain of the netdev family at the node's end of each pair. Rules by source
//! address (NetworkPolicies, masquerading) can rely on the addresses.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nlink::Bytes;
use nlink::netlink::namespace::Netns;
use nlink::netlink::nftables::{
    BaseChain, Chain, CmpOp, Expr, Family, FilterHook, LimitExpr, LimitUnit, MetaKey, PayloadBase, Priority,
    Register, Rule,
};
use nlink::netlink::{Connection, Nftables};

use crate::addresses::{hardware_address, link_local};
use crate::bandwidth::burst_and_limit;
use crate::{Addresses, NetworkError};

const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const ARP: [u8; 2] = [0x08, 0x06];
/// In an ARP packet: the hardware address of the sender, then its IP address.
const ARP_SENDER_HARDWARE: u32 = 8;
const ARP_SENDER: u32 = 14;
/// In an IPv4 packet.
const IPV4_SOURCE: u32 = 12;
/// In an IPv6 packet.
const IPV6_SOURCE: u32 = 8;
/// The protocol that carries neighbour discovery.
const ICMPV6: u8 = 58;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
/// In a neighbour advertisement: the address that it is about.
const ADVERTISED: u32 = 8;
/// In an Ethernet frame.
const ETHER_SOURCE: u32 = 6;

/// A pod's end of a pair, as the node knows it.
#[derive(Debug, Clone)]
pub(crate) struct Sender {
    /// The node's end of the pair.
    pub(crate) link: String,
    pub(crate) hardware: [u8; 6],
    pub(crate) addresses: Addresses,
    /// Bits in a second.
    pub(crate) limit: Option<u64>,
}

impl Sender {
    pub(crate) fn new(link: &str, addresses: Addresses, limit: Option<u64>) -> Self {
        Self { link: link.to_owned(), hardware: hardware_address(*addresses.primary()), addresses, limit }
    }
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

/// The rules of a pod's link. Everything that is neither of the families of the pod's addresses nor ARP for IPv4 is
/// dropped with the rest: the pod has no other addresses, and nothing on the node would judge it.
fn rules(table: &str, sender: &Sender) -> Vec<Rule> {
    let rule = |parts: &[[Expr; 2]]| {
        let rule = Rule::new(table, &sender.link).family(Family::Netdev);
        parts.iter().flatten().cloned().fold(rule, Rule::expr)
    };
    let hardware = sender.hardware;
    let mut rules = vec![rule(&[field(PayloadBase::LinkLayer, ETHER_SOURCE, CmpOp::Neq, &hardware)]).drop()];
    if let Some(bits) = sender.limit {
        // Twice the burst of the pod's own queue: packets that pass that queue pass here.
        let burst = u32::try_from(burst_and_limit(bits).0.saturating_mul(2)).unwrap_or(u32::MAX);
        let limit = LimitExpr::bytes(Bytes::new((bits / 8).max(1)), LimitUnit::Second).burst(burst).over();
        rules.push(rule(&[]).expr(limit).drop());
    }
    for address in sender.addresses.iter() {
        match address {
            IpAddr::V4(v4) => {
                let matches = ipv4(hardware, *v4);
                rules.extend(matches.iter().map(|parts| rule(parts).accept()));
            }
            IpAddr::V6(v6) => {
                let (refused, accepted) = ipv6(hardware, *v6);
                rules.extend(refused.iter().map(|parts| rule(parts).drop()));
                rules.extend(accepted.iter().map(|parts| rule(parts).accept()));
            }
        }
    }
    rules.push(rule(&[]).drop());
    rules
}

/// Conditions of which one must hold.
type Conditions = Vec<Vec<[Expr; 2]>>;

/// The packets of IPv4 that a pod may send.
fn ipv4(hardware: [u8; 6], address: Ipv4Addr) -> Conditions {
    let is = |offset, value: &[u8]| field(PayloadBase::Network, offset, CmpOp::Eq, value);
    vec![
        vec![protocol(IPV4), is(IPV4_SOURCE, &address.octets())],
        vec![protocol(ARP), is(ARP_SENDER_HARDWARE, &hardware), is(ARP_SENDER, &address.octets())],
    ]
}

/// The packets of IPv6 that a pod may not send, whatever their source is, and those that it may.
///
/// A pod is no router, and it advertises its own addresses only. The unspecified address, from which the kernel looks for
/// duplicates, is no source: nobody else can have the pod's addresses.
fn ipv6(hardware: [u8; 6], address: Ipv6Addr) -> (Conditions, Conditions) {
    let local = link_local(hardware);
    let discovery = |kind: u8| {
        let transport = is(Expr::Meta { dreg: Register::R0, key: MetaKey::L4Proto }, CmpOp::Eq, &[ICMPV6]);
        [protocol(IPV6), transport, field(PayloadBase::Transport, 0, CmpOp::Eq, &[kind])]
    };
    let not_about =
        |address: Ipv6Addr| field(PayloadBase::Transport, ADVERTISED, CmpOp::Neq, &address.octets());
    let advertises_others: Vec<_> = discovery(NEIGHBOUR_ADVERTISEMENT)
        .into_iter()
        .chain([not_about(address), not_about(local)])
        .collect();
    let refused =
        vec![discovery(ROUTER_ADVERTISEMENT).to_vec(), discovery(REDIRECT).to_vec(), advertises_others];
    let from = |source: Ipv6Addr| field(PayloadBase::Network, IPV6_SOURCE, CmpOp::Eq, &source.octets());
    let accepted = vec![vec![protocol(IPV6), from(address)], vec![protocol(IPV6), from(local)]];
    (refused, accepted)
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
pub(crate) async fn guard(host: &Netns, bridge: &str, sender: &Sender) -> Result<(), NetworkError> {
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
    sender: &Sender,
) -> Result<(), nlink::netlink::Error> {
    let name = table(bridge);
    let link = sender.link.as_str();
    let chain = Chain::new(name.as_str(), link)?
        .family(Family::Netdev)
        .base(BaseChain::filter(FilterHook::ingress(link), Priority::Filter));
    let known = chains(conn, bridge).await?.any(|name| name == link);
    let mut transaction = match known {
        true => conn.transaction().flush_chain(&name, link, Family::Netdev),
        false => conn.transaction().add_chain(chain),
    };
    for rule in rules(&name, sender) {
        transaction = transaction.add_rule(rule);
    }
    transaction.commit(conn).await
}

/// The links whose packets are looked at, each with the number of its rules.
pub(crate) async fn guarded(host: &Netns, bridge: &str) -> Result<BTreeMap<String, usize>, NetworkError> {
    let name = table(bridge);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    let mut found: BTreeMap<String, usize> =
        chains(&conn, bridge).await.map_err(fail())?.map(|link| (link, 0)).collect();
    if !found.is_empty() {
        for rule in conn.list_rules(&name, Family::Netdev).await.map_err(fail())? {
            found.entry(rule.chain).and_modify(|count| *count += 1);
        }
    }
    Ok(found)
}

/// True if a link has the rules it should have, by their number: others remove rules, or all of them. A pod of an earlier
/// process may have a limit besides.
pub(crate) fn is_whole(found: &BTreeMap<String, usize>, sender: &Sender) -> bool {
    found.get(&sender.link).is_some_and(|count| *count >= rules("", sender).len())
}

async fn chains(
    conn: &Connection<Nftables>,
    bridge: &str,
) -> Result<impl Iterator<Item = String>, nlink::netlink::Error> {
    let name = table(bridge);
    let all = conn.list_chains().await?.into_iter();
    Ok(all.filter(move |c| c.family == Family::Netdev && c.table == name).map(|c| c.name.to_string()))
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
