//! Routes to the pods of other nodes.
//!
//! Routes of this module carry a protocol number of their own: a route that no node asks for any more is found in the
//! kernel, also after a crash, and routes of others are never touched. Ranges without a node keep the `unreachable`
//! route of the cluster, whose metric is worse.

mod plan;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use nlink::netlink::addr::Ipv4Address;
use nlink::netlink::fdb::FdbEntryBuilder;
use nlink::netlink::link::VxlanLink;
use nlink::netlink::namespace::Netns;
use nlink::netlink::neigh::Neighbor;
use nlink::netlink::route::{Ipv4Route, RouteMetrics};
use nlink::netlink::types::route::{RouteProtocol, RouteScope, RouteType};
use nlink::netlink::{Connection, Route};

use crate::bridge::{delete_link, find_link, is_host_link, open_netns};
use crate::state::Record;
use crate::{Cidr, NetworkError, rules};
pub use plan::{Encapsulation, Peer, RouterConfig};
use plan::{Hop, Plan, Segment, plan, tunnel_address};

/// Marks our routes.
const PROTOCOL: RouteProtocol = RouteProtocol::Other(0xfe);
/// The port that Linux and flannel use; VXLAN's own is 4789.
const VXLAN_PORT: u16 = 8472;
const VXLAN_ID: u32 = 1;
/// Bytes that VXLAN over IPv4 adds to a packet.
pub const VXLAN_OVERHEAD: u32 = 50;

/// The name of the tunnel's link: at most 15 bytes, as the kernel wants it.
fn tunnel_link(bridge: &str) -> String {
    format!("v{}", bridge.get(..bridge.len().min(14)).unwrap_or(bridge))
}

/// Keeps the routes of one node to the pods of all others.
pub struct Router {
    config: RouterConfig,
    host: Netns,
    conn: Connection<Route>,
    /// Nodes that the tunnel leads to.
    tunnels: BTreeSet<(Cidr, Ipv4Addr)>,
    /// Peers that were refused in the last call: each refusal is reported once.
    refused: BTreeSet<String>,
}

impl Router {
    /// Takes over the routes that are there. The tunnel of an earlier process is made anew.
    pub async fn open(config: RouterConfig) -> Result<Self, NetworkError> {
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        Self::open_on(host, config).await
    }

    /// [`open`](Self::open), in the network namespace at `host`.
    pub async fn open_in(host: &Path, config: RouterConfig) -> Result<Self, NetworkError> {
        Self::open_on(open_netns(host)?, config).await
    }

    async fn open_on(host: Netns, config: RouterConfig) -> Result<Self, NetworkError> {
        let conn =
            Connection::<Route>::new_in(&host).map_err(NetworkError::netlink("open a netlink socket"))?;
        // Its neighbours may be those of a cluster that has changed since.
        delete_link(&conn, &tunnel_link(&config.bridge)).await?;
        Ok(Self { config, host, conn, tunnels: BTreeSet::new(), refused: BTreeSet::new() })
    }

    /// Brings the routes in line with the peers, the oldest first. Peers whose claims cannot be true get no route.
    pub async fn apply(&mut self, peers: &[Peer]) -> Result<(), NetworkError> {
        let plan = plan(&self.config, &self.segments().await?, peers);
        self.report(&plan);
        let tunnels: BTreeSet<(Cidr, Ipv4Addr)> = plan
            .hops
            .iter()
            .filter_map(|(cidr, hop)| match hop {
                Hop::Tunnel { node } => Some((*cidr, *node)),
                Hop::Direct { .. } => None,
            })
            .collect();
        let tunnel = self.lead_tunnel(&tunnels).await?;
        let present = self.present().await?;
        for (cidr, hop) in &plan.hops {
            let fail = NetworkError::netlink(format!("route to the pods {cidr}"));
            match hop {
                Hop::Direct { gateway, link } => {
                    if !present.contains(&(*cidr, *gateway, *link)) {
                        let route = own_route(*cidr).gateway(*gateway).dev_index(*link);
                        self.conn.replace_route(route).await.map_err(fail)?;
                    }
                }
                Hop::Tunnel { .. } => {
                    let Some((link, mtu)) = tunnel else { continue };
                    let gateway = cidr.network();
                    if !present.contains(&(*cidr, gateway, link)) {
                        let metrics = RouteMetrics::new().mtu(mtu);
                        let route = own_route(*cidr).gateway(gateway).dev_index(link).onlink();
                        self.conn.replace_route(route.metrics(metrics)).await.map_err(fail)?;
                    }
                }
            }
        }
        for (cidr, ..) in present {
            if !plan.hops.contains_key(&cidr) {
                remove_route(&self.conn, cidr).await?;
            }
        }
        self.tunnels = tunnels;
        if self.config.pod_cidr.is_some() {
            rules::open_forward(&self.host, &self.config.bridge, self.config.cluster_cidr).await?;
        }
        if self.tunnels.is_empty() {
            delete_link(&self.conn, &tunnel_link(&self.config.bridge)).await?;
        }
        Ok(())
    }

    fn report(&mut self, plan: &Plan) {
        for (name, why) in &plan.refused {
            if !self.refused.contains(name) {
                tracing::warn!(node = name, %why, "no route to the pods of a node");
            }
        }
        self.refused = plan.refused.iter().map(|(name, _)| name.clone()).collect();
    }

    /// The networks of this node's links, without those of pods.
    async fn segments(&self) -> Result<Vec<Segment>, NetworkError> {
        let fail = NetworkError::netlink("list addresses");
        let addresses = self.conn.get_addresses().await.map_err(fail)?;
        let segment = |address: &nlink::netlink::messages::AddressMessage| {
            let IpAddr::V4(ip) = *address.local().or(address.primary_address())? else { return None };
            let range = Cidr::containing(ip, address.prefix_len())?;
            let pods = self.config.cluster_cidr.covers(range) || range.covers(self.config.cluster_cidr);
            (range.prefix() < 31 && !pods && !ip.is_loopback())
                .then_some(Segment { link: address.ifindex(), range })
        };
        Ok(addresses.iter().filter_map(segment).collect())
    }

    /// Our routes to pods: range, gateway, link.
    async fn present(&self) -> Result<BTreeSet<(Cidr, Ipv4Addr, u32)>, NetworkError> {
        let routes = own_routes(&self.conn, self.config.cluster_cidr).await?;
        Ok(routes.into_iter().collect())
    }

    /// Makes the tunnel lead to these nodes, and to no others. Returns its index and its MTU.
    async fn lead_tunnel(
        &self,
        tunnels: &BTreeSet<(Cidr, Ipv4Addr)>,
    ) -> Result<Option<(u32, u32)>, NetworkError> {
        if tunnels.is_empty() {
            return Ok(None);
        }
        let name = tunnel_link(&self.config.bridge);
        let fail = |what: &str| NetworkError::netlink(format!("{what} of tunnel {name}"));
        let (link, made) = match find_link(&self.conn, &name).await? {
            Some(link) => (link, false),
            None => {
                self.make_tunnel(&name).await?;
                let link = find_link(&self.conn, &name).await?;
                (link.ok_or_else(|| NetworkError::Conflict(format!("link {name} is gone")))?, true)
            }
        };
        let index = link.ifindex();
        for (cidr, node) in self.tunnels.difference(tunnels) {
            // Another range of the same node keeps the entry of the node.
            if tunnels.iter().all(|(_, other)| other != node) {
                let entry =
                    FdbEntryBuilder::new(tunnel_address(*node)).ifindex(index).dst((*node).into()).self_();
                ignore_missing(self.conn.del_fdb_entry(entry).await).map_err(fail("forwarding"))?;
            }
            let neighbour = Neighbor::with_index_v4(index, cidr.network());
            self.conn.del_neighbor_if_exists(neighbour).await.map_err(fail("neighbour"))?;
        }
        for (cidr, node) in tunnels {
            if !made && self.tunnels.contains(&(*cidr, *node)) {
                continue;
            }
            let address = tunnel_address(*node);
            let entry = FdbEntryBuilder::new(address).ifindex(index).dst((*node).into()).self_().permanent();
            self.conn.replace_fdb(entry).await.map_err(fail("forwarding"))?;
            let neighbour = Neighbor::with_index_v4(index, cidr.network()).lladdr(address).permanent();
            self.conn.replace_neighbor(neighbour).await.map_err(fail("neighbour"))?;
        }
        Ok(Some((index, link.mtu().unwrap_or(1500))))
    }

    async fn make_tunnel(&self, name: &str) -> Result<(), NetworkError> {
        let fail = |what: &str| NetworkError::netlink(format!("{what} of tunnel {name}"));
        let mtu = mtu_of(&self.conn, self.config.address).await?.saturating_sub(VXLAN_OVERHEAD).max(576);
        let link = VxlanLink::new(name, VXLAN_ID)
            .local(self.config.address)
            .port(VXLAN_PORT)
            .learning(false)
            .address(tunnel_address(self.config.address))
            .mtu(mtu);
        self.conn.add_link(link).await.map_err(fail("creation"))?;
        if let Some(own) = self.config.pod_cidr {
            // Packets from this node itself to pods behind the tunnel need a source address that leads back
            // through it.
            let address = Ipv4Address::new(name, own.network(), 32);
            self.conn.replace_address(address).await.map_err(fail("address"))?;
        }
        self.conn.set_link_up(name).await.map_err(fail("activation"))
    }
}

/// The MTU that packets of pods may have on a node with this address, with room for encapsulation unless there is none.
pub async fn pod_mtu(address: Ipv4Addr, encapsulation: Encapsulation) -> Result<u32, NetworkError> {
    pod_mtu_on(
        &Connection::<Route>::new().map_err(NetworkError::netlink("open a netlink socket"))?,
        address,
        encapsulation,
    )
    .await
}

/// [`pod_mtu`], in the network namespace at `host`.
pub async fn pod_mtu_in(
    host: &Path,
    address: Ipv4Addr,
    encapsulation: Encapsulation,
) -> Result<u32, NetworkError> {
    let conn = Connection::<Route>::new_in(&open_netns(host)?);
    pod_mtu_on(&conn.map_err(NetworkError::netlink("open a netlink socket"))?, address, encapsulation).await
}

async fn pod_mtu_on(
    conn: &Connection<Route>,
    address: Ipv4Addr,
    encapsulation: Encapsulation,
) -> Result<u32, NetworkError> {
    let mtu = mtu_of(conn, address).await?.clamp(576 + VXLAN_OVERHEAD, 65_535);
    Ok(match encapsulation {
        Encapsulation::Never => mtu,
        Encapsulation::Auto | Encapsulation::Always => mtu - VXLAN_OVERHEAD,
    })
}

/// The MTU of the link that has the address; Ethernet's when none has it.
async fn mtu_of(conn: &Connection<Route>, address: Ipv4Addr) -> Result<u32, NetworkError> {
    let fail = || NetworkError::netlink(format!("look up the link of {address}"));
    let addresses = conn.get_addresses().await.map_err(fail())?;
    let own = IpAddr::V4(address);
    let index = addresses.iter().find(|a| a.primary_address() == Some(&own)).map(|a| a.ifindex());
    let Some(index) = index else { return Ok(1500) };
    let link = conn.get_link_by_index(index).await.map_err(fail())?;
    Ok(link.and_then(|link| link.mtu()).unwrap_or(1500))
}

/// With a scope: without a gateway, as when it is removed, the library would look for a route of another scope.
fn own_route(cidr: Cidr) -> Ipv4Route {
    Ipv4Route::new(cidr.network(), cidr.prefix()).protocol(PROTOCOL).scope(RouteScope::Universe)
}

async fn remove_route(conn: &Connection<Route>, cidr: Cidr) -> Result<(), NetworkError> {
    let fail = NetworkError::netlink(format!("remove the route to the pods {cidr}"));
    conn.del_route_if_exists(own_route(cidr)).await.map(drop).map_err(fail)
}

async fn own_routes(
    conn: &Connection<Route>,
    cluster: Cidr,
) -> Result<Vec<(Cidr, Ipv4Addr, u32)>, NetworkError> {
    let routes = conn.get_routes().await.map_err(NetworkError::netlink("list routes"))?;
    let own = |route: &nlink::netlink::messages::RouteMessage| {
        let main = route.table_id() == u32::from(nix::libc::RT_TABLE_MAIN);
        if !main || route.protocol() != PROTOCOL || route.route_type() != RouteType::Unicast {
            return None;
        }
        let IpAddr::V4(network) = *route.destination()? else { return None };
        let cidr = Cidr::new(network, route.dst_len()).ok().filter(|cidr| cluster.covers(*cidr))?;
        let gateway = match route.gateway() {
            Some(IpAddr::V4(gateway)) => *gateway,
            _ => Ipv4Addr::UNSPECIFIED,
        };
        Some((cidr, gateway, route.oif().unwrap_or(0)))
    };
    Ok(routes.iter().filter_map(own).collect())
}

/// Removes everything that a router made for this network.
pub(crate) async fn remove(conn: &Connection<Route>, record: &Record) -> Result<(), NetworkError> {
    delete_link(conn, &tunnel_link(&record.bridge)).await?;
    for (cidr, ..) in own_routes(conn, record.cluster_cidr).await? {
        remove_route(conn, cidr).await?;
    }
    Ok(())
}

fn ignore_missing(result: Result<(), nlink::netlink::Error>) -> Result<(), nlink::netlink::Error> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        other => other,
    }
}

/// No route to other nodes leads through the link of a pod, and pods come and go.
fn is_pod_link(link: &nlink::netlink::messages::LinkMessage) -> bool {
    link.name().is_some_and(is_host_link)
}

/// Waits until links, addresses or routes of this node have changed.
pub struct Changes {
    conn: Connection<Route>,
    cluster: Cidr,
}

impl Changes {
    /// Watches the calling thread's network namespace.
    pub fn watch(cluster: Cidr) -> Result<Self, NetworkError> {
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        let fail = || NetworkError::netlink("watch links, addresses and routes");
        let conn = Connection::<Route>::new_in(&host).map_err(fail())?;
        use nlink::netlink::RtnetlinkGroup::{Ipv4Addr, Ipv4Route, Link};
        conn.subscribe(&[Link, Ipv4Addr, Ipv4Route]).map_err(fail())?;
        Ok(Self { conn, cluster })
    }

    /// Returns after a change by somebody else that routes to pods may depend on.
    pub async fn next(&mut self) -> Result<(), NetworkError> {
        use futures_util::StreamExt;
        use nlink::netlink::NetworkEvent;
        let mut events = std::pin::pin!(self.conn.events().await);
        while let Some(event) = events.next().await {
            let matters = match event {
                Ok(NetworkEvent::NewAddress(_) | NetworkEvent::DelAddress(_)) => true,
                Ok(NetworkEvent::DelLink(link)) => !is_pod_link(&link),
                // A link that goes down takes its routes along, and the kernel does not report those.
                Ok(NetworkEvent::NewLink(link)) => !link.is_up() && !is_pod_link(&link),
                Ok(NetworkEvent::DelRoute(route)) => {
                    route.protocol() == PROTOCOL
                        && matches!(route.destination(), Some(IpAddr::V4(ip)) if self.cluster.contains(*ip))
                }
                Ok(_) => false,
                // Events were lost: any of them may have mattered.
                Err(_) => true,
            };
            if matters {
                return Ok(());
            }
        }
        Err(NetworkError::Conflict("the kernel reports no more changes".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_names_that_fit() {
        assert_eq!(tunnel_link("fe-abcdef"), "vfe-abcdef");
        assert_eq!(tunnel_link("abcdefghijklmno").len(), 15);
    }
}
