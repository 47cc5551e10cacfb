//! The node's routing and packet filter rules for the pod network, besides the bridge itself.

use nlink::netlink::namespace::Netns;
use nlink::netlink::nftables::{BaseChain, Chain, CtState, Family, FilterHook, NatHook, Priority, Rule};
use nlink::netlink::route::{Ipv4Route, Ipv6Route};
use nlink::netlink::rule::RuleBuilder;
use nlink::netlink::types::route::{RouteScope, RouteType};
use nlink::netlink::{Connection, Nftables, Route};

use crate::bridge::Isolation;
use crate::state::Record;
use crate::{Cidr, Cidrs, IpFamily, NetworkError};
use std::net::IpAddr;

/// The metric of the `unreachable` routes: worse than any route somebody adds for the same range, so
/// that a service proxy or an overlay only has to add its own route to take over.
pub(crate) const UNREACHABLE_METRIC: u32 = 4_000_000_000;

/// Prefix of the names of our tables.
const PREFIX: &str = "ferrite-";
const FORWARD: &str = "forward";

/// The kernel's tables of a family.
fn tables_of(family: IpFamily) -> Family {
    match family {
        IpFamily::V4 => Family::Ip,
        IpFamily::V6 => Family::Ip6,
    }
}

/// Calls `$call` with the route to a range in the type of its family, changed by `$with`.
macro_rules! with_route {
    ($range:expr, |$route:ident| $with:expr, $conn:ident.$call:ident) => {
        match $range.network() {
            IpAddr::V4(network) => {
                let $route = Ipv4Route::new(network, $range.prefix());
                $conn.$call($with).await
            }
            IpAddr::V6(network) => {
                let $route = Ipv6Route::new(network, $range.prefix());
                $conn.$call($with).await
            }
        }
    };
}

/// The ranges of which no packet may leave by the machine's own interface.
fn closed_ranges(record: &Record) -> impl Iterator<Item = &Cidr> {
    record.service_cidrs.iter().flat_map(Cidrs::iter).chain(record.cluster_cidrs.iter())
}

/// Makes packets to cluster addresses that nobody owns end on this node. Without this they would follow
/// the default route and leave by the machine's own interface.
pub(crate) async fn add_routes(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    for range in closed_ranges(record) {
        let added = with_route!(
            range,
            |route| route.route_type(RouteType::Unreachable).metric(UNREACHABLE_METRIC),
            conn.add_route
        );
        match added {
            Ok(()) => {}
            Err(error) if error.is_already_exists() => {}
            Err(error) => {
                return Err(NetworkError::netlink(format!("add unreachable route for {range}"))(error));
            }
        }
    }
    Ok(())
}

/// The routing table for packets of this node's own processes to Services.
const SERVICE_TABLE: u32 = 26_213;
/// Before the rule for the main table.
const SERVICE_RULE_PRIORITY: u32 = 32_000;

/// Names the packets of this node's own processes (which the kernel says come in by `lo`) to Services.
fn service_rule(range: Cidr) -> RuleBuilder {
    let rule = match range.family() {
        IpFamily::V4 => RuleBuilder::v4(),
        IpFamily::V6 => RuleBuilder::v6(),
    };
    rule.priority(SERVICE_RULE_PRIORITY)
        .iif("lo")
        .to_addr(range.network(), range.prefix())
        .table(SERVICE_TABLE)
}

/// Gives packets of this node's own processes to Services a route.
///
/// The kernel looks for a route before a service proxy sees such a packet; without one it refuses the connection at
/// once. The route ends at the bridge, so that a packet that no proxy takes never leaves the machine, and it goes with
/// the bridge. Packets of others still meet the `unreachable` route unless the proxy takes them.
pub(crate) async fn add_service_route(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    for range in record.service_cidrs.iter().flat_map(Cidrs::iter) {
        let fail = || NetworkError::netlink(format!("add the route for Services {range}"));
        let bridge = record.bridge.as_str();
        let added = with_route!(
            range,
            |route| route.dev(bridge).scope(RouteScope::Link).table(SERVICE_TABLE),
            conn.replace_route
        );
        added.map_err(fail())?;
        match conn.add_rule(service_rule(*range)).await {
            Err(error) if !error.is_already_exists() => return Err(fail()(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Takes the routes of [`add_routes`] and the rule of [`add_service_route`] away.
pub(crate) async fn remove_routes(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    for range in record.service_cidrs.iter().flat_map(Cidrs::iter) {
        let fail = NetworkError::netlink(format!("remove the rule for Services {range}"));
        conn.del_rule_if_exists(service_rule(*range)).await.map_err(fail)?;
    }
    for range in closed_ranges(record) {
        let removed = with_route!(
            range,
            |route| route.route_type(RouteType::Unreachable).metric(UNREACHABLE_METRIC),
            conn.del_route_if_exists
        );
        removed.map_err(NetworkError::netlink(format!("remove unreachable route for {range}")))?;
    }
    Ok(())
}

fn table(record: &Record) -> String {
    format!("{PREFIX}{}", record.bridge)
}

fn isolation_table(bridge: &str) -> String {
    format!("{PREFIX}apart-{bridge}")
}

/// All tables of a network.
fn own_tables(record: &Record) -> [String; 5] {
    let bridge = &record.bridge;
    [
        table(record),
        isolation_table(bridge),
        crate::host_ports::table_name(bridge),
        policy_table(bridge),
        tunnel_table(bridge),
    ]
}

/// The name of the table that keeps pods out of the tunnel between nodes.
pub(crate) fn tunnel_table(bridge: &str) -> String {
    format!("{PREFIX}tunnel-{bridge}")
}

/// The name of the table that filters the packets of a network's pods. It goes with the network.
pub fn policy_table(bridge: &str) -> String {
    format!("{PREFIX}policy-{bridge}")
}

/// Gives pod traffic that leaves the cluster the node's address as its source.
///
/// The node tells pods of no other way to their neighbours: it would lead past the node's packet filter, and nowhere
/// where ports are isolated. The kernel has a setting for that in IPv4 only.
pub(crate) async fn add_masquerade(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    const POSTROUTING: &str = "postrouting";
    const OUTPUT: &str = "output";
    const REDIRECT: u8 = 137;
    let name = table(record);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    for pods in record.pod_cidrs.iter() {
        let family = tables_of(pods.family());
        let cluster = record.cluster_cidrs.of(pods.family()).unwrap_or(pods);
        conn.del_table_if_exists(name.as_str(), family).await.map_err(fail())?;
        let chain = Chain::new(name.as_str(), POSTROUTING)
            .map_err(fail())?
            .family(family)
            .base(BaseChain::nat(NatHook::Postrouting, Priority::SrcNat));
        let rule = Rule::new(&name, POSTROUTING)
            .family(family)
            .match_saddr(pods.network(), pods.prefix())
            .match_daddr_not(cluster.network(), cluster.prefix())
            .match_oif_not(&record.bridge)
            .masquerade();
        let mut transaction = conn.transaction().add_table(&name, family).add_chain(chain).add_rule(rule);
        if family == Family::Ip6 {
            let chain = Chain::new(name.as_str(), OUTPUT)
                .map_err(fail())?
                .family(family)
                .base(BaseChain::filter(FilterHook::Output, Priority::Filter));
            let rule = Rule::new(&name, OUTPUT).family(family).match_oif(&record.bridge);
            transaction = transaction.add_chain(chain).add_rule(rule.match_icmpv6_type(REDIRECT).drop());
        }
        transaction.commit(&conn).await.map_err(fail())?;
    }
    Ok(())
}

/// Isolates the bridge. Rules of an earlier call stay: the rules of one bridge do not change, and it is
/// never without them.
pub(crate) async fn add_isolation(
    host: &Netns,
    bridge: &str,
    families: &[IpFamily],
    isolation: Isolation,
) -> Result<(), NetworkError> {
    add_forward_rules(host, &isolation_table(bridge), families, |rule| {
        let inward = || rule().match_oif(bridge).match_iif_not(bridge);
        let first = match isolation {
            Isolation::Internal => rule().match_iif(bridge).match_oif_not(bridge).drop(),
            Isolation::Incoming => inward().match_ct_state(CtState::ESTABLISHED | CtState::RELATED).accept(),
        };
        [first, inward().drop()]
    })
    .await
}

/// Drops packets between a segment of nodes and any link but the pod bridge.
pub(crate) async fn add_segment_isolation(
    host: &Netns,
    segment: &str,
    families: &[IpFamily],
    pod_bridge: &str,
) -> Result<(), NetworkError> {
    add_forward_rules(host, &isolation_table(segment), families, |rule| {
        let outward = rule().match_iif(segment).match_oif_not(segment).match_oif_not(pod_bridge);
        let inward = rule().match_oif(segment).match_iif_not(segment).match_iif_not(pod_bridge);
        [outward.drop(), inward.drop()]
    })
    .await
}

/// Makes a table of each family with rules of the forward hook, unless it is there.
async fn add_forward_rules(
    host: &Netns,
    name: &str,
    families: &[IpFamily],
    rules: impl Fn(&dyn Fn() -> Rule) -> [Rule; 2],
) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    for family in families.iter().copied().map(tables_of) {
        let tables = conn.list_tables_in(family).await.map_err(fail())?;
        if tables.iter().any(|table| table.name == name) {
            continue;
        }
        let chain = Chain::new(name, FORWARD)
            .map_err(fail())?
            .family(family)
            .base(BaseChain::filter(FilterHook::Forward, Priority::Filter));
        let [first, second] = rules(&|| Rule::new(name, FORWARD).family(family));
        let transaction = conn.transaction().add_table(name, family).add_chain(chain);
        transaction.add_rule(first).add_rule(second).commit(&conn).await.map_err(fail())?;
    }
    Ok(())
}

/// Takes the rules of a segment away. A kernel without nftables has none.
pub(crate) async fn remove_segment_isolation(host: &Netns, segment: &str) -> Result<(), NetworkError> {
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    let name = isolation_table(segment);
    for family in IpFamily::BOTH.map(tables_of) {
        let fail = NetworkError::netlink(format!("remove nftables table {name}"));
        conn.del_table_if_exists(name.as_str(), family).await.map_err(fail)?;
    }
    Ok(())
}

/// The kernel's number of the forward hook.
const FORWARD_HOOK: u32 = 2;
/// The kernel's number of the policy that drops.
const DROP: u32 = 0;

/// The comment that marks our rules in chains of others.
fn mark(bridge: &str) -> String {
    format!("{PREFIX}{bridge}")
}

/// Lets packets from and to pods pass chains of others that drop by default, as hosts with docker have
/// them:
/// an accept in a table of ours would not count there. The rules come last, so that whatever such a chain drops
/// on purpose stays dropped. May be repeated. Rules of the older iptables are out of reach.
pub(crate) async fn open_forward(host: &Netns, bridge: &str, cluster: Cidrs) -> Result<(), NetworkError> {
    // A kernel without nftables has no such chains.
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    let fail = || NetworkError::netlink("rules of the forward hook");
    let chains = conn.list_chains().await.map_err(fail())?;
    let closed = chains.into_iter().filter(|chain| {
        matches!(chain.family, Family::Ip | Family::Ip6 | Family::Inet)
            && chain.hook == Some(FORWARD_HOOK)
            && chain.policy == Some(DROP)
            && !chain.table.starts_with(PREFIX)
    });
    for chain in closed {
        let rules = conn.list_rules(&chain.table, chain.family).await.map_err(fail())?;
        let ours = |rule: &nlink::netlink::nftables::RuleInfo| {
            rule.chain == chain.name && rule.comment_text.as_deref() == Some(&mark(bridge))
        };
        if rules.iter().any(ours) {
            continue;
        }
        let sees =
            |range: &&Cidr| matches!(chain.family, Family::Inet) || chain.family == tables_of(range.family());
        let mut transaction = None;
        for range in cluster.iter().filter(sees) {
            let (network, prefix) = (range.network(), range.prefix());
            let rule = || Rule::new(&chain.table, &chain.name).family(chain.family).comment(&mark(bridge));
            let added = transaction.unwrap_or_else(|| conn.transaction());
            let added = added.add_rule(rule().match_saddr(network, prefix).accept());
            transaction = Some(added.add_rule(rule().match_daddr(network, prefix).accept()));
        }
        if let Some(transaction) = transaction {
            transaction.commit(&conn).await.map_err(fail())?;
        }
    }
    Ok(())
}

/// Takes the rules of [`open_forward`] away.
async fn close_forward(conn: &Connection<Nftables>, bridge: &str) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink("remove rules of the forward hook");
    let chains = conn.list_chains().await.map_err(fail())?;
    for chain in chains.into_iter().filter(|chain| chain.hook == Some(FORWARD_HOOK)) {
        for rule in conn.list_rules(&chain.table, chain.family).await.map_err(fail())? {
            if rule.chain == chain.name && rule.comment_text.as_deref() == Some(&mark(bridge)) {
                conn.del_rule_if_exists(&chain.table, &chain.name, chain.family, rule.handle)
                    .await
                    .map_err(fail())?;
            }
        }
    }
    Ok(())
}

/// Returns true if this node has another network of ours.
pub(crate) async fn others_exist(host: &Netns, record: &Record) -> bool {
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return false };
    let own = own_tables(record);
    for family in IpFamily::BOTH.map(tables_of) {
        let tables = conn.list_tables_in(family).await.unwrap_or_default();
        if tables.iter().any(|table| table.name.starts_with(PREFIX) && !own.contains(&table.name)) {
            return true;
        }
    }
    false
}

/// Takes all rules of a network away. A kernel without nftables has none.
pub(crate) async fn remove_tables(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    close_forward(&conn, &record.bridge).await?;
    crate::port_filter::remove(&conn, &record.bridge).await?;
    // The tunnel may be of a family that pods do not have.
    for family in IpFamily::BOTH.map(tables_of) {
        for name in own_tables(record) {
            let fail = NetworkError::netlink(format!("remove nftables table {name}"));
            conn.del_table_if_exists(name.as_str(), family).await.map_err(fail)?;
        }
    }
    Ok(())
}
