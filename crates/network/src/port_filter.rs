//! Filters the packets that a pod sends: only from its own addresses, and no faster than its limit.
//!
//! A pod with `NET_RAW` can write any source into a packet, and one with `NET_ADMIN` can give itself
//! addresses and remove queues of its own namespace. So the node filters packets from the pod's link before
//! they reach the bridge: with a chain of the netdev family at the node's end of each pair. Rules by source
//! address (NetworkPolicies, masquerading) can rely on the addresses.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferrite_netlink::{Error, Netns};
use ferrite_nft::{BaseChain, Expr, NoSets, Ruleset, TableFamily, Verdict, compare};

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

/// A condition of a rule, or several that must all hold.
type Condition = Vec<Expr<NoSets>>;

/// The header that a field is in.
#[derive(Debug, Clone, Copy)]
enum Header {
    Link,
    Network,
    Transport,
}

fn protocol(value: [u8; 2]) -> Condition {
    compare(Expr::LoadEtherType { to: 0 }, true, &value).into()
}

fn field(header: Header, offset: u32, equal: bool, value: &[u8]) -> Condition {
    let len = u32::try_from(value.len()).unwrap_or(u32::MAX);
    let load = match header {
        Header::Link => Expr::LoadLinkHeader { to: 0, offset, len },
        Header::Network => Expr::LoadNetworkHeader { to: 0, offset, len },
        Header::Transport => Expr::LoadTransportHeader { to: 0, offset, len },
    };
    compare(load, equal, value).into()
}

/// The rules of a pod's link. Everything that is neither of the families of the pod's addresses nor ARP for IPv4 is
/// dropped with the rest: the pod has no other addresses, and nothing on the node would judge it.
fn rules(sender: &Sender) -> Vec<Vec<Expr<NoSets>>> {
    let decide = |parts: &[Condition], verdict| {
        let mut rule = parts.concat();
        rule.push(Expr::Verdict(verdict));
        rule
    };
    let (accept, drop) = (
        |parts: &Vec<Condition>| decide(parts, Verdict::Accept),
        |parts: &Vec<Condition>| decide(parts, Verdict::Drop),
    );
    let hardware = sender.hardware;
    let mut rules = vec![drop(&vec![field(Header::Link, ETHER_SOURCE, false, &hardware)])];
    if let Some(bits) = sender.limit {
        // Twice the burst of the pod's own queue: packets that pass that queue pass here.
        let burst = u32::try_from(burst_and_limit(bits).0.saturating_mul(2)).unwrap_or(u32::MAX);
        rules.push(drop(&vec![vec![Expr::Exceeds { bytes_per_second: (bits / 8).max(1), burst }]]));
    }
    for address in sender.addresses.iter() {
        match address {
            IpAddr::V4(v4) => rules.extend(ipv4(hardware, *v4).iter().map(accept)),
            IpAddr::V6(v6) => {
                let (refused, accepted) = ipv6(hardware, *v6);
                rules.extend(refused.iter().map(drop));
                rules.extend(accepted.iter().map(accept));
            }
        }
    }
    rules.push(drop(&Vec::new()));
    rules
}

/// Conditions of which one must hold.
type Conditions = Vec<Vec<Condition>>;

/// The packets of IPv4 that a pod may send.
fn ipv4(hardware: [u8; 6], address: Ipv4Addr) -> Conditions {
    let is = |offset, value: &[u8]| field(Header::Network, offset, true, value);
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
        let transport = compare(Expr::LoadProtocol { to: 0 }, true, &[ICMPV6]).into();
        [protocol(IPV6), transport, field(Header::Transport, 0, true, &[kind])]
    };
    let not_about = |address: Ipv6Addr| field(Header::Transport, ADVERTISED, false, &address.octets());
    let advertises_others: Vec<_> = discovery(NEIGHBOUR_ADVERTISEMENT)
        .into_iter()
        .chain([not_about(address), not_about(local)])
        .collect();
    let refused =
        vec![discovery(ROUTER_ADVERTISEMENT).to_vec(), discovery(REDIRECT).to_vec(), advertises_others];
    let from = |source: Ipv6Addr| field(Header::Network, IPV6_SOURCE, true, &source.octets());
    let accepted = vec![vec![protocol(IPV6), from(address)], vec![protocol(IPV6), from(local)]];
    (refused, accepted)
}

/// Makes the table of a network, which has no rules yet.
pub(crate) fn prepare(host: &Netns, bridge: &str) -> Result<(), NetworkError> {
    let name = table(bridge);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let mut ruleset = Ruleset::open(Some(host)).map_err(fail())?;
    if ruleset.has_table(TableFamily::Netdev, &name).map_err(fail())? {
        return Ok(());
    }
    let mut batch = ruleset.batch(TableFamily::Netdev, &name);
    batch.add_table();
    ruleset.commit(batch).map_err(fail())
}

/// Lets a pod send from its own address only. May be repeated; the rules that were there are replaced at once.
pub(crate) fn guard(host: &Netns, bridge: &str, sender: &Sender) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink(format!("rules for what {} sends", sender.link));
    let mut ruleset = Ruleset::open(Some(host)).map_err(fail())?;
    match replace(&mut ruleset, bridge, sender) {
        // Somebody made the chain in between.
        Err(error) if error.is_already_exists() => replace(&mut ruleset, bridge, sender).map_err(fail()),
        other => other.map_err(fail()),
    }
}

fn replace(ruleset: &mut Ruleset, bridge: &str, sender: &Sender) -> Result<(), Error> {
    let link = sender.link.as_str();
    let known = chains(ruleset, bridge)?.iter().any(|name| name == link);
    let mut batch = ruleset.batch(TableFamily::Netdev, &table(bridge));
    match known {
        true => batch.flush_chain(link),
        false => batch.add_chain(link, &BaseChain::ingress(link)),
    }
    rules(sender).iter().for_each(|rule| batch.add_rule(link, rule));
    ruleset.commit(batch)
}

/// The links whose packets are looked at, each with the number of its rules.
pub(crate) fn guarded(host: &Netns, bridge: &str) -> Result<BTreeMap<String, usize>, NetworkError> {
    let name = table(bridge);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let mut ruleset = Ruleset::open(Some(host)).map_err(fail())?;
    let chains = chains(&mut ruleset, bridge).map_err(fail())?;
    let mut found: BTreeMap<String, usize> = chains.into_iter().map(|link| (link, 0)).collect();
    if !found.is_empty() {
        for rule in ruleset.rules(TableFamily::Netdev, &name).map_err(fail())? {
            found.entry(rule.chain).and_modify(|count| *count += 1);
        }
    }
    Ok(found)
}

/// True if a link has the rules it should have, by their number: others remove rules, or all of them. A pod of an earlier
/// process may have a limit besides.
pub(crate) fn is_whole(found: &BTreeMap<String, usize>, sender: &Sender) -> bool {
    found.get(&sender.link).is_some_and(|count| *count >= rules(sender).len())
}

fn chains(ruleset: &mut Ruleset, bridge: &str) -> Result<Vec<String>, Error> {
    let name = table(bridge);
    let all = ruleset.chains()?.into_iter();
    Ok(all.filter(|c| c.family == TableFamily::Netdev && c.table == name).map(|c| c.name).collect())
}

/// Takes the rules of a link away. Newer kernels keep a chain whose link is gone.
pub(crate) fn forget(host: &Netns, bridge: &str, link: &str) -> Result<(), NetworkError> {
    // A kernel without nftables has none.
    let Ok(mut ruleset) = Ruleset::open(Some(host)) else { return Ok(()) };
    let fail = NetworkError::netlink(format!("remove the rules for what {link} sends"));
    ruleset.delete_chain(TableFamily::Netdev, &table(bridge), link).map(drop).map_err(fail)
}

/// Takes all rules of a network away.
pub(crate) fn remove(ruleset: &mut Ruleset, bridge: &str) -> Result<(), NetworkError> {
    let name = table(bridge);
    let fail = NetworkError::netlink(format!("remove nftables table {name}"));
    ruleset.delete_table(TableFamily::Netdev, &name).map(drop).map_err(fail)
}
