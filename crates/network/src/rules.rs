//! The node's routing and packet filter rules for the pod network, besides the bridge itself.

use ferrite_netlink::{Connection, Netns, Route, RouteType, Rule, Scope};
use ferrite_nft::{
    BaseChain, Expr, Hook, NoSets, Ruleset, TableFamily, Verdict, comes_by, compare, in_range,
    known_connection, leaves_by, load_destination, load_source, of_family,
};

use crate::bridge::Isolation;
use crate::state::Record;
use crate::{Cidr, Cidrs, IpFamily, NetworkError};

/// The metric of the `unreachable` routes: worse than any route somebody adds for the same range, so
/// that a service proxy or an overlay only has to add its own route to take over.
pub(crate) const UNREACHABLE_METRIC: u32 = 4_000_000_000;

/// Prefix of the names of our tables.
const PREFIX: &str = "ferrite-";
const FORWARD: &str = "forward";

/// A step of a rule in a table without sets.
type Step = Expr<NoSets>;

/// The range in the type of tables.
fn nft_range(range: &Cidr) -> ferrite_nft::Cidr {
    ferrite_nft::Cidr::new(range.network(), range.prefix()).expect("the prefix of a range fits its address")
}

/// Matches the source of packets.
fn from_range(range: &Cidr) -> Vec<Step> {
    let load = load_source(range.family(), 0);
    in_range(load, nft_range(range), true).into()
}

/// Matches the destination of packets.
fn to_range(range: &Cidr, equal: bool) -> Vec<Step> {
    let load = load_destination(range.family(), 0);
    in_range(load, nft_range(range), equal).into()
}

fn unreachable(range: &Cidr) -> Route<'static> {
    let route = Route::new(range.network(), range.prefix());
    route.route_type(RouteType::Unreachable).metric(UNREACHABLE_METRIC)
}

/// The ranges of which no packet may leave by the machine's own interface.
fn closed_ranges(record: &Record) -> impl Iterator<Item = &Cidr> {
    record.service_cidrs.iter().flat_map(Cidrs::iter).chain(record.cluster_cidrs.iter())
}

/// Makes packets to cluster addresses that nobody owns end on this node. Without this they would follow
/// the default route and leave by the machine's own interface.
pub(crate) async fn add_routes(conn: &Connection, record: &Record) -> Result<(), NetworkError> {
    for range in closed_ranges(record) {
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
fn service_rule(range: Cidr) -> Rule {
    Rule {
        priority: SERVICE_RULE_PRIORITY,
        table: SERVICE_TABLE,
        to: Some((range.network(), range.prefix())),
        input_link: Some("lo".into()),
    }
}

/// Gives packets of this node's own processes to Services a route.
///
/// The kernel looks for a route before a service proxy sees such a packet; without one it refuses the connection at
/// once. The route ends at the bridge, so that a packet that no proxy takes never leaves the machine, and it goes with
/// the bridge. Packets of others still meet the `unreachable` route unless the proxy takes them.
pub(crate) async fn add_service_route(conn: &Connection, record: &Record) -> Result<(), NetworkError> {
    for range in record.service_cidrs.iter().flat_map(Cidrs::iter) {
        let fail = || NetworkError::netlink(format!("add the route for Services {range}"));
        let route = Route::new(range.network(), range.prefix());
        let route = route.dev(&record.bridge).scope(Scope::Link).table(SERVICE_TABLE);
        conn.replace_route(route).await.map_err(fail())?;
        match conn.add_rule(&service_rule(*range)).await {
            Err(error) if !error.is_already_exists() => return Err(fail()(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Takes the routes of [`add_routes`] and the rule of [`add_service_route`] away.
pub(crate) async fn remove_routes(conn: &Connection, record: &Record) -> Result<(), NetworkError> {
    for range in record.service_cidrs.iter().flat_map(Cidrs::iter) {
        let fail = NetworkError::netlink(format!("remove the rule for Services {range}"));
        conn.del_rule_if_exists(&service_rule(*range)).await.map_err(fail)?;
    }
    for range in closed_ranges(record) {
        let fail = NetworkError::netlink(format!("remove unreachable route for {range}"));
        conn.del_route_if_exists(unreachable(range)).await.map_err(fail)?;
    }
    Ok(())
}

fn table(record: &Record) -> String {
    format!("{PREFIX}{}", record.bridge)
}

fn isolation_table(bridge: &str) -> String {
    format!("{PREFIX}apart-{bridge}")
}

/// The tables of a network that depend on no pod.
pub(crate) fn base_tables(bridge: &str) -> [String; 2] {
    [format!("{PREFIX}{bridge}"), isolation_table(bridge)]
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
pub(crate) fn add_masquerade(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    const POSTROUTING: &str = "postrouting";
    const OUTPUT: &str = "output";
    const REDIRECT: u8 = 137;
    const ICMPV6: u8 = 58;
    let name = table(record);
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let mut rules = Ruleset::open(Some(host)).map_err(fail())?;
    for pods in record.pod_cidrs.iter() {
        let cluster = record.cluster_cidrs.of(pods.family()).unwrap_or(pods);
        let mut batch = rules.batch(pods.family().into(), &name);
        batch.replace_table();
        batch.add_chain(POSTROUTING, &BaseChain::source_nat());
        let leaves: Vec<Step> = [
            from_range(pods),
            to_range(cluster, false),
            leaves_by(&record.bridge, false).into(),
            vec![Expr::Masquerade { random_ports: false }],
        ]
        .concat();
        batch.add_rule(POSTROUTING, &leaves);
        if pods.family() == IpFamily::V6 {
            batch.add_chain(OUTPUT, &BaseChain::filter(Hook::Output));
            let redirects: Vec<Step> = [
                leaves_by(&record.bridge, true),
                compare(Expr::LoadProtocol { to: 0 }, true, &[ICMPV6]),
                compare(Expr::LoadTransportHeader { to: 0, offset: 0, len: 1 }, true, &[REDIRECT]),
            ]
            .concat();
            batch.add_rule(OUTPUT, &[redirects, vec![Expr::Verdict(Verdict::Drop)]].concat());
        }
        rules.commit(batch).map_err(fail())?;
    }
    Ok(())
}

/// [`add_masquerade`] where rules are missing. Returns true if that was so.
pub(crate) fn restore_masquerade(host: &Netns, record: &Record) -> Result<bool, NetworkError> {
    let name = table(record);
    let rules_of = |family| if family == IpFamily::V6 { 2 } else { 1 };
    let wanted = record.pod_cidrs.families().into_iter().map(|family| (family, rules_of(family)));
    if has_rules(host, &name, wanted)? {
        return Ok(false);
    }
    add_masquerade(host, record)?;
    Ok(true)
}

/// [`add_isolation`] where rules are missing. Returns true if that was so.
pub(crate) fn restore_isolation(
    host: &Netns,
    bridge: &str,
    families: &[IpFamily],
    isolation: Isolation,
) -> Result<bool, NetworkError> {
    let name = isolation_table(bridge);
    if has_rules(host, &name, families.iter().map(|family| (*family, 2)))? {
        return Ok(false);
    }
    let mut rules =
        Ruleset::open(Some(host)).map_err(NetworkError::netlink(format!("nftables table {name}")))?;
    // Rules are only added to a table that is not there.
    delete_tables(&mut rules, &name)?;
    add_isolation(host, bridge, families, isolation)?;
    Ok(true)
}

/// Returns true if a table has this number of rules in each family: others remove rules, or all of them.
fn has_rules(
    host: &Netns,
    name: &str,
    wanted: impl Iterator<Item = (IpFamily, usize)>,
) -> Result<bool, NetworkError> {
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let mut rules = Ruleset::open(Some(host)).map_err(fail())?;
    for (family, count) in wanted {
        let family = TableFamily::from(family);
        if !rules.has_table(family, name).map_err(fail())?
            || rules.rules(family, name).map_err(fail())?.len() < count
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Isolates the bridge. Rules of an earlier call stay: the rules of one bridge do not change, and it is
/// never without them.
pub(crate) fn add_isolation(
    host: &Netns,
    bridge: &str,
    families: &[IpFamily],
    isolation: Isolation,
) -> Result<(), NetworkError> {
    let outward = [comes_by(bridge, true), leaves_by(bridge, false)].concat();
    let inward = [leaves_by(bridge, true), comes_by(bridge, false)].concat();
    let first = match isolation {
        Isolation::Internal => decide(&[&outward], Verdict::Drop),
        Isolation::Incoming => decide(&[&inward, &known_connection()], Verdict::Accept),
    };
    let rules = [first, decide(&[&inward], Verdict::Drop)];
    add_forward_rules(host, &isolation_table(bridge), families, &rules)
}

/// Drops packets between a segment of nodes and any link but the pod bridge.
pub(crate) fn add_segment_isolation(
    host: &Netns,
    segment: &str,
    families: &[IpFamily],
    pod_bridge: &str,
) -> Result<(), NetworkError> {
    let outward = [comes_by(segment, true), leaves_by(segment, false), leaves_by(pod_bridge, false)].concat();
    let inward = [leaves_by(segment, true), comes_by(segment, false), comes_by(pod_bridge, false)].concat();
    let rules = [outward, inward].map(|packets| decide(&[&packets], Verdict::Drop));
    add_forward_rules(host, &isolation_table(segment), families, &rules)
}

/// A rule that decides about the packets that all conditions match.
fn decide(conditions: &[&[Step]], verdict: Verdict) -> Vec<Step> {
    let mut rule = conditions.concat();
    rule.push(Expr::Verdict(verdict));
    rule
}

/// Makes a table of each family with rules of the forward hook, unless it is there.
fn add_forward_rules(
    host: &Netns,
    name: &str,
    families: &[IpFamily],
    rules: &[Vec<Step>],
) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink(format!("nftables table {name}"));
    let mut ruleset = Ruleset::open(Some(host)).map_err(fail())?;
    for family in families.iter().copied().map(TableFamily::from) {
        if ruleset.has_table(family, name).map_err(fail())? {
            continue;
        }
        let mut batch = ruleset.batch(family, name);
        batch.add_table();
        batch.add_chain(FORWARD, &BaseChain::filter(Hook::Forward));
        rules.iter().for_each(|rule| batch.add_rule(FORWARD, rule));
        ruleset.commit(batch).map_err(fail())?;
    }
    Ok(())
}

/// Takes the rules of a segment away. A kernel without nftables has none.
pub(crate) fn remove_segment_isolation(host: &Netns, segment: &str) -> Result<(), NetworkError> {
    let Ok(mut rules) = Ruleset::open(Some(host)) else { return Ok(()) };
    delete_tables(&mut rules, &isolation_table(segment))
}

/// Deletes the tables of a name of both IP families. A transaction makes the kernel wait for all processors, also one
/// that finds nothing to delete; a list of the tables does not.
pub(crate) fn delete_tables(rules: &mut Ruleset, name: &str) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink(format!("remove nftables table {name}"));
    let present = rules.tables().map_err(fail())?;
    for family in IpFamily::BOTH.map(TableFamily::from) {
        if present.iter().any(|table| table.family == family && table.name == name) {
            rules.delete_table(family, name).map_err(fail())?;
        }
    }
    Ok(())
}

/// Returns true if a table may have chains that keep packets of pods from being forwarded. Ours have none, and neither has
/// that of a service proxy, which changes all the time.
pub(crate) fn may_forward(table: &str) -> bool {
    !table.starts_with(PREFIX) && !table.starts_with("kube-proxy")
}

/// The kernel's number of the forward hook.
const FORWARD_HOOK: u32 = 2;
/// The comment that marks our rules in chains of others.
fn mark(bridge: &str) -> String {
    format!("{PREFIX}{bridge}")
}

/// Lets packets from and to pods pass chains of others that drop by default, as hosts with docker have
/// them:
/// an accept in a table of ours would not count there. The rules come last, so that whatever such a chain drops
/// on purpose stays dropped. May be repeated. Rules of the older iptables are out of reach.
pub(crate) fn open_forward(host: &Netns, bridge: &str, cluster: Cidrs) -> Result<(), NetworkError> {
    // A kernel without nftables has no such chains.
    let Ok(mut rules) = Ruleset::open(Some(host)) else { return Ok(()) };
    let fail = || NetworkError::netlink("rules of the forward hook");
    let closed = rules.chains().map_err(fail())?.into_iter().filter(|chain| {
        chain.family != TableFamily::Netdev
            && chain.hook == Some(FORWARD_HOOK)
            && chain.drops
            && !chain.table.starts_with(PREFIX)
    });
    for chain in closed {
        let mark = mark(bridge);
        let known = rules.rules(chain.family, &chain.table).map_err(fail())?;
        if known.iter().any(|rule| rule.chain == chain.name && rule.comment.as_ref() == Some(&mark)) {
            continue;
        }
        let both = chain.family == TableFamily::Inet;
        let sees = |range: &&Cidr| both || chain.family == range.family().into();
        let mut batch = None;
        for range in cluster.iter().filter(sees) {
            let batch = batch.get_or_insert_with(|| rules.batch(chain.family, &chain.table));
            let family: &[Step] = if both { &of_family(range.family()) } else { &[] };
            for packets in [from_range(range), to_range(range, true)] {
                let rule = decide(&[family, &packets], Verdict::Accept);
                batch.add_rule_with_comment(&chain.name, &rule, &mark);
            }
        }
        if let Some(batch) = batch {
            rules.commit(batch).map_err(fail())?;
        }
    }
    Ok(())
}

/// Takes the rules of [`open_forward`] away.
fn close_forward(rules: &mut Ruleset, bridge: &str) -> Result<(), NetworkError> {
    let fail = || NetworkError::netlink("remove rules of the forward hook");
    let mark = mark(bridge);
    let chains = rules.chains().map_err(fail())?;
    for chain in chains.into_iter().filter(|chain| chain.hook == Some(FORWARD_HOOK)) {
        for rule in rules.rules(chain.family, &chain.table).map_err(fail())? {
            if rule.chain != chain.name || rule.comment.as_ref() != Some(&mark) {
                continue;
            }
            let mut batch = rules.batch(chain.family, &chain.table);
            batch.delete_rule(&chain.name, rule.handle);
            match rules.commit(batch) {
                Err(error) if !error.is_not_found() => return Err(fail()(error)),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Returns true if this node has another network of ours.
pub(crate) fn others_exist(host: &Netns, record: &Record) -> bool {
    let Ok(mut rules) = Ruleset::open(Some(host)) else { return false };
    let own = own_tables(record);
    let of_another = |name: &String| name.starts_with(PREFIX) && !own.contains(name);
    let ip = |family| IpFamily::BOTH.map(TableFamily::from).contains(&family);
    let tables = rules.tables().unwrap_or_default();
    tables.iter().any(|table| ip(table.family) && of_another(&table.name))
}

/// Takes all rules of a network away. A kernel without nftables has none.
pub(crate) fn remove_tables(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    let Ok(mut rules) = Ruleset::open(Some(host)) else { return Ok(()) };
    close_forward(&mut rules, &record.bridge)?;
    crate::port_filter::remove(&mut rules, &record.bridge)?;
    // The tunnel may be of a family that pods do not have.
    own_tables(record).iter().try_for_each(|name| delete_tables(&mut rules, name))
}
