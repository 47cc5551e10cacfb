//! What the node's routing and packet filter know about the pod network besides the bridge itself.

use nlink::netlink::namespace::Netns;
use nlink::netlink::nftables::{BaseChain, Chain, Family, NatHook, Priority, Rule};
use nlink::netlink::route::Ipv4Route;
use nlink::netlink::types::route::RouteType;
use nlink::netlink::{Connection, Nftables, Route};

use crate::state::Record;
use crate::{Cidr, NetworkError};

/// The metric of the `unreachable` routes: worse than any route somebody adds for the same range, so
/// that a service proxy or an overlay only has to add its own route to take over.
pub(crate) const UNREACHABLE_METRIC: u32 = 4_000_000_000;

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

/// Takes the routes of [`add_routes`] away.
pub(crate) async fn remove_routes(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    for range in record.service_cidr.into_iter().chain([record.cluster_cidr]) {
        conn.del_route_if_exists(unreachable(range))
            .await
            .map_err(NetworkError::netlink(format!("remove unreachable route for {range}")))?;
    }
    Ok(())
}

fn table(record: &Record) -> String {
    format!("ferrite-{}", record.bridge)
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

/// Takes the rules of [`add_masquerade`] away. A kernel without nftables has none.
pub(crate) async fn remove_masquerade(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    let name = table(record);
    let fail = || NetworkError::netlink(format!("remove nftables table {name}"));
    let Ok(conn) = Connection::<Nftables>::new_in(host) else { return Ok(()) };
    conn.del_table_if_exists(name.as_str(), Family::Ip).await.map(drop).map_err(fail())
}
