//! The node's routing and packet filter rules for the pod network, besides the bridge itself.

use nlink::netlink::namespace::Netns;
use nlink::netlink::nftables::{BaseChain, Chain, CtState, Family, FilterHook, NatHook, Priority, Rule};
use nlink::netlink::route::Ipv4Route;
use nlink::netlink::rule::RuleBuilder;
use nlink::netlink::types::route::{RouteScope, RouteType};
use nlink::netlink::{Connection, Nftables, Route};

use crate::bridge::Isolation;
use crate::state::Record;
use crate::{Cidr, NetworkError};

/// The metric of the `unreachable` routes: worse than any route somebody adds for the same range, so
/// that a service proxy or an overlay only has to add its own route to take over.
pub(crate) const UNREACHABLE_METRIC: u32 = 4_000_000_000;

/// Prefix of the names of our tables.
const PREFIX: &str = "ferrite-";
const FORWARD: &str = "forward";

fn unreachable(range: Cidr) -> Ipv4Route {
    Ipv4Route::new(range.network(), range.prefix())
        .route_type(RouteType::Unreachable)
        .metric(UNREACHABLE_METRIC)
}

/// Makes packets to cluster addresses that nobody owns end on this node. Without this they would follow
/// the default route and leave by the machine's own interface.
pub(crate) async fn add_routes(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    for range in record.service_cidr.into_iter().chain([record.cluster_cidr]) {
        match conn.add_route(unreachable(range)).await {
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
    RuleBuilder::v4()
        .priority(SERVICE_RULE_PRIORITY)
        .iif("lo")
        .to_v4(range.network(), range.prefix())
        .table(SERVICE_TABLE)
}

/// Gives packets of this node's own processes to Services a route.
///
/// The kernel looks for a route before a service proxy sees such a packet; without one it refuses the connection at
/// once. The route ends at the bridge, so that a packet that no proxy takes never leaves the machine, and it goes with
/// the bridge. Packets of others still meet the `unreachable` route unless the proxy takes them.
pub(crate) async fn add_service_route(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    let Some(range) = record.service_cidr else { return Ok(()) };
    let fail = || NetworkError::netlink(format!("add the route for Services {range}"));
    let route = Ipv4Route::new(range.network(), range.prefix())
        .dev(record.bridge.as_str())
        .scope(RouteScope::Link)
        .table(SERVICE_TABLE);
    conn.replace_route(route).await.map_err(fail())?;
    match conn.add_rule(service_rule(range)).await {
        Err(error) if !error.is_already_exists() => Err(fail()(error)),
        _ => Ok(()),
    }
}

/// Takes the routes of [`add_routes`] and the rule of [`add_service_route`] away.
pub(crate) async fn remove_routes(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    if let Some(range) = record.service_cidr {
        let fail = NetworkError::netlink(format!("remove the rule for Services {range}"));
        conn.del_rule_if_exists(service_rule(range)).await.map_err(fail)?;
    }
    for range in record.service_cidr.into_iter().chain([record.cluster_cidr]) {
        conn.del_route_if_exists(unreachable(range))
            .await
            .map_err(NetworkError::netlink(format!("remove unreachable route for {range}")))?;
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
fn own_tables(record: &Record) -> [String; 4] {
    let bridge = &record.bridge;
    [table(record), isolation_table(bridge), crate::host_ports::table_name(bridge), policy_table(bridge)]
}

/// The name of the table that filters the packets of a network's pods. It goes with the network.
pub fn policy_table(bridge: &str) -> String {
    format!("{PREFIX}policy-{bridge}")
}

/// Gives pod traffic that leaves the cluster the node's address as its source.
pub(crate) async fn add_masquerade(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    let name = table(record);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    conn.del_table_if_exists(name.as_str(), Family::Ip).await.map_err(fail())?;
    let chain = Chain::new(name.as_str(), "postrouting")
        .map_err(fail())?
        .family(Family::Ip)
        .base(BaseChain::nat(NatHook::Postrouting, Priority::SrcNat));
    let rule = Rule::new(&name, "postrouting")
        .family(Family::Ip)
        .match_saddr_v4(record.pod_cidr.network(), record.pod_cidr.prefix())
        .match_daddr_v4_not(record.cluster_cidr.network(), record.cluster_cidr.prefix())
        .match_oif_not(&record.bridge)
        .masquerade();
    conn.transaction()
        .add_table(&name, Family::Ip)
        .add_chain(chain)
        .add_rule(rule)
        .commit(&conn)
        .await
        .map_err(fail())
}

/// Isolates the bridge. Rules of an earlier call stay: the rules of one bridge do not change, and it is
/// never without them.
pub(crate) async fn add_isolation(
    host: &Netns,
    bridge: &str,
    isolation: Isolation,
) -> Result<(), NetworkError> {
    let name = isolation_table(bridge);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    let tables = conn.list_tables_in(Family::Ip).await.map_err(fail())?;
    if tables.iter().any(|table| table.name == name) {
        return Ok(());
    }
    let chain = Chain::new(name.as_str(), FORWARD)
        .map_err(fail())?
        .family(Family::Ip)
        .base(BaseChain::filter(FilterHook::Forward, Priority::Filter));
    let inward = || Rule::new(&name, FORWARD).family(Family::Ip).match_oif(bridge).match_iif_not(bridge);
    let answers = CtState::ESTABLISHED | CtState::RELATED;
    let mut transaction = conn.transaction().add_table(&name, Family::Ip).add_chain(chain);
    if isolation == Isolation::Internal {
        let outward = Rule::new(&name, FORWARD).family(Family::Ip).match_iif(bridge).match_oif_not(bridge);
        transaction = transaction.add_rule(outward.drop());
    } else {
        transaction = transaction.add_rule(inward().match_ct_state(answers).accept());
    }
    transaction.add_rule(inward().drop()).commit(&conn).await.map_err(fail())
}

/// Drops packets between a segment of nodes and any link but the pod bridge.
pub(crate) async fn add_segment_isolation(
    host: &Netns,
    segment: &str,
    pod_bridge: &str,
) -> Result<(), NetworkError> {
    let name = isolation_table(segment);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let conn = Connection::<Nftables>::new_in(host).map_err(fail())?;
    let tables = conn.list_tables_in(Family::Ip).await.map_err(fail())?;
    if tables.iter().any(|table| table.name == name) {
        return Ok(());
    }
    let chain = Chain::new(name.as_str(), FORWARD)
        .map_err(fail())?
        .family(Family::Ip)
        .base(BaseChain::filter(FilterHook::Forward, Priority::Filter));
    let rule = || Rule::new(&name, FORWARD).family(Family::Ip);
    let outward = rule().match_iif(segment).match_oif_not(segment).match_oif_not(pod_bridge);
    let inward = rule().match_oif(segment).match_iif_not(segment).match_iif_not(pod_bridge);
    conn.transaction()
        .add_table(&name, Family::Ip)
        .add_chain(chain)
        .add_rule(outward.drop())
        .add_rule(inward.drop())
        .commit(&conn)
        .await
        .map_err(fail())
}

/// Takes the rules of a segment away. A kernel without nftables has none.
pub(crate) async fn remove_segment_isolation(host: &Netns, segment: &str) -> Result<(), NetworkError> {
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    let name = isolation_table(segment);
    let fail = NetworkError::netlink(format!("remove nftables table {name}"));
    conn.del_table_if_exists(name.as_str(), Family::Ip).await.map(drop).map_err(fail)
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
pub(crate) async fn open_forward(host: &Netns, bridge: &str, cluster: Cidr) -> Result<(), NetworkError> {
    // A kernel without nftables has no such chains.
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    let fail = || NetworkError::netlink("rules of the forward hook");
    let chains = conn.list_chains().await.map_err(fail())?;
    let closed = chains.into_iter().filter(|chain| {
        matches!(chain.family, Family::Ip | Family::Inet)
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
        let (network, prefix) = (cluster.network(), cluster.prefix());
        let rule = || Rule::new(&chain.table, &chain.name).family(chain.family).comment(&mark(bridge));
        conn.transaction()
            .add_rule(rule().match_saddr_v4(network, prefix).accept())
            .add_rule(rule().match_daddr_v4(network, prefix).accept())
            .commit(&conn)
            .await
            .map_err(fail())?;
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
    let tables = conn.list_tables_in(Family::Ip).await.unwrap_or_default();
    tables.iter().any(|table| table.name.starts_with(PREFIX) && !own.contains(&table.name))
}

/// Takes all rules of a network away. A kernel without nftables has none.
pub(crate) async fn remove_tables(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    close_forward(&conn, &record.bridge).await?;
    crate::port_filter::remove(&conn, &record.bridge).await?;
    for name in own_tables(record) {
        let fail = NetworkError::netlink(format!("remove nftables table {name}"));
        conn.del_table_if_exists(name.as_str(), Family::Ip).await.map_err(fail)?;
    }
    Ok(())
}
