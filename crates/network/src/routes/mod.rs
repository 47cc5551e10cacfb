//! Routes to the pods of other nodes.
//!
//! Routes of this module carry a protocol number of their own: a route that no node asks for any more is found in the
//! kernel, also after a crash, and routes of others are never touched. Ranges without a node keep the `unreachable`
//! route of the cluster, whose metric is worse.

mod guard;
mod plan;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_netlink::{
    AddressEntry, Connection, Error, ForwardingEntry, Link, Neighbour, Netns, NetworkEvent, NetworkEvents,
    Route, RouteEntry, RouteType, Scope, VxlanLink, table,
};
use ferrite_nft::{Monitor, OwnGenerations};
use futures_util::future::BoxFuture;

use crate::bridge::{delete_link, find_link, is_host_link, open_netns};
use crate::state::Record;
use crate::{Cidr, Cidrs, IpFamily, NetworkError, addresses, rules};
use guard::Guard;
pub use plan::{Encapsulation, Peer, RouterConfig};
use plan::{Hop, Plan, Segment, plan, tunnel_address, tunnel_gateway};

/// Marks our routes.
const PROTOCOL: u8 = 0xfe;
/// The port that Linux and flannel use; VXLAN's own is 4789.
const VXLAN_PORT: u16 = 8472;
const VXLAN_ID: u32 = 1;
/// Bytes that VXLAN over IPv4 adds to a packet.
pub const VXLAN_OVERHEAD: u32 = 50;
/// The bytes that VXLAN over IPv6 adds to a packet.
pub const VXLAN_OVERHEAD_IPV6: u32 = 70;

fn overhead(underlay: IpAddr) -> u32 {
    match underlay {
        IpAddr::V4(_) => VXLAN_OVERHEAD,
        IpAddr::V6(_) => VXLAN_OVERHEAD_IPV6,
    }
}

/// A route of ours: range, gateway, link.
type OwnRoute = (Cidr, IpAddr, u32);

/// The name of the tunnel's link: at most 15 bytes, as the kernel wants it.
fn tunnel_link(bridge: &str) -> String {
    format!("v{}", bridge.get(..bridge.len().min(14)).unwrap_or(bridge))
}

/// Keeps the routes of one node to the pods of all others.
pub struct Router {
    config: RouterConfig,
    host: Arc<Netns>,
    conn: Connection,
    /// Nodes that the tunnel leads to.
    tunnels: BTreeSet<(Cidr, IpAddr)>,
    /// The rules that keep pods out of the tunnel.
    guard: Option<Guard>,
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
        let conn = Connection::new_in(&host).map_err(NetworkError::netlink("open a netlink socket"))?;
        // Its neighbours may be those of a cluster that has changed since.
        delete_link(&conn, &tunnel_link(&config.bridge)).await?;
        let host = Arc::new(host);
        Ok(Self { config, host, conn, tunnels: BTreeSet::new(), guard: None, refused: BTreeSet::new() })
    }

    /// Brings the routes in line with the peers, the oldest first. Peers whose claims cannot be true get no route.
    pub fn apply<'a>(&'a mut self, peers: &'a [Peer]) -> BoxFuture<'a, Result<(), NetworkError>> {
        Box::pin(self.apply_plan(peers))
    }

    async fn apply_plan(&mut self, peers: &[Peer]) -> Result<(), NetworkError> {
        let plan = plan(&self.config, &self.segments().await?, peers);
        self.report(&plan);
        let tunnels: BTreeSet<(Cidr, IpAddr)> = plan
            .hops
            .iter()
            .filter_map(|(cidr, hop)| match hop {
                Hop::Tunnel { node } => Some((*cidr, *node)),
                Hop::Direct { .. } => None,
            })
            .collect();
        self.keep_out(peers, &tunnels).await?;
        let tunnel = self.lead_tunnel(&tunnels).await?;
        let present = self.present().await?;
        for (cidr, hop) in &plan.hops {
            let fail = NetworkError::netlink(format!("route to the pods {cidr}"));
            match hop {
                Hop::Direct { gateway, link } => {
                    if !present.contains(&(*cidr, *gateway, *link)) {
                        set_route(&self.conn, *cidr, *gateway, *link, None).await.map_err(fail)?;
                    }
                }
                Hop::Tunnel { node } => {
                    let Some((link, mtu)) = tunnel else { continue };
                    let gateway = tunnel_gateway(*cidr, *node);
                    if !present.contains(&(*cidr, gateway, link)) {
                        set_route(&self.conn, *cidr, gateway, link, Some(mtu)).await.map_err(fail)?;
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
        if self.config.pod_cidrs.is_some() {
            let cluster = self.config.cluster_cidrs;
            self.with_rules(move |host, bridge| rules::open_forward(host, bridge, cluster)).await?;
        }
        if self.tunnels.is_empty() {
            delete_link(&self.conn, &tunnel_link(&self.config.bridge)).await?;
        }
        Ok(())
    }

    /// Keeps pods out of the tunnels of this node and of the peers, which may have one where this node has none.
    async fn keep_out(
        &mut self,
        peers: &[Peer],
        tunnels: &BTreeSet<(Cidr, IpAddr)>,
    ) -> Result<(), NetworkError> {
        if self.config.encapsulation == Encapsulation::Never {
            self.guard = None;
            return self.with_rules(guard::remove).await;
        }
        let own = *self.config.node_ips.primary();
        let nodes = peers.iter().flat_map(|peer| peer.addresses.iter().copied());
        let wanted = Guard::new(own, nodes, tunnels.iter().map(|(_, node)| *node).collect());
        let present = self.guard.take();
        self.guard = Some(
            self.with_rules(move |host, bridge| {
                wanted.set(host, bridge, present.as_ref())?;
                Ok(wanted)
            })
            .await?,
        );
        Ok(())
    }

    /// Runs `work` on nftables rules, away from the async workers: the kernel makes writers of rules wait for all
    /// processors.
    async fn with_rules<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Netns, &str) -> Result<T, NetworkError> + Send + 'static,
    ) -> Result<T, NetworkError> {
        let (host, bridge) = (Arc::clone(&self.host), self.config.bridge.clone());
        tokio::task::spawn_blocking(move || work(&host, &bridge))
            .await
            .unwrap_or_else(|error| Err(NetworkError::Conflict(format!("rules of routes failed: {error}"))))
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
        let segment = |address: &AddressEntry| {
            let range = Cidr::containing(address.address, address.prefix)?;
            let pods = self.config.cluster_cidrs.iter().any(|cluster| cluster.overlaps(range));
            let has_neighbours = range.prefix() < range.family().bits() - 1;
            (has_neighbours && !pods && !address.address.is_loopback() && !address.is_scope(Scope::Link))
                .then_some(Segment { link: address.link, range })
        };
        Ok(addresses.iter().filter_map(segment).collect())
    }

    /// Our routes to pods.
    async fn present(&self) -> Result<BTreeSet<OwnRoute>, NetworkError> {
        let routes = own_routes(&self.conn, self.config.cluster_cidrs).await?;
        Ok(routes.into_iter().collect())
    }

    /// Makes the tunnel lead to these nodes, and to no others. Returns its index and its MTU.
    async fn lead_tunnel(
        &self,
        tunnels: &BTreeSet<(Cidr, IpAddr)>,
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
        let index = link.index;
        for (cidr, node) in self.tunnels.difference(tunnels) {
            // Another range of the same node keeps the entry of the node.
            if tunnels.iter().all(|(_, other)| other != node) {
                let removed = self.conn.del_forwarding_if_exists(index, tunnel_address(*node)).await;
                removed.map_err(fail("forwarding"))?;
            }
            let gateway = tunnel_gateway(*cidr, *node);
            if tunnels.iter().any(|(other, node)| tunnel_gateway(*other, *node) == gateway) {
                continue;
            }
            self.conn.del_neighbour_if_exists(index, gateway).await.map_err(fail("neighbour"))?;
        }
        for (cidr, node) in tunnels {
            if !made && self.tunnels.contains(&(*cidr, *node)) {
                continue;
            }
            let hardware = tunnel_address(*node);
            let entry = ForwardingEntry { link: index, hardware, machine: *node };
            self.conn.replace_forwarding(entry).await.map_err(fail("forwarding"))?;
            let neighbour = Neighbour { link: index, address: tunnel_gateway(*cidr, *node), hardware };
            self.conn.replace_neighbour(neighbour).await.map_err(fail("neighbour"))?;
        }
        Ok(Some((index, link.mtu.unwrap_or(1500))))
    }

    async fn make_tunnel(&self, name: &str) -> Result<(), NetworkError> {
        let fail = |what: &str| NetworkError::netlink(format!("{what} of tunnel {name}"));
        let underlay = *self.config.node_ips.primary();
        let six = self.config.cluster_cidrs.of(IpFamily::V6).is_some();
        let least = if six { 1280 } else { 576 };
        let mtu = mtu_of(&self.conn, underlay).await?.saturating_sub(overhead(underlay)).max(least);
        let link = VxlanLink {
            name,
            id: VXLAN_ID,
            local: underlay,
            port: VXLAN_PORT,
            address: tunnel_address(underlay),
            mtu,
        };
        self.conn.add_link(link).await.map_err(fail("creation"))?;
        let own = self.config.pod_cidrs.and_then(|own| own.of(IpFamily::V4).copied());
        if let Some(address) = own.map(|own| own.network()) {
            // A packet that this node itself sends to pods behind the tunnel comes from an address that leads back through it.
            // Of IPv6 the kernel chooses the bridge's address by itself.
            if let Some(alone) = Cidr::containing(address, IpFamily::V4.bits()) {
                addresses::add(&self.conn, name, address, alone).await.map_err(fail("address"))?;
            }
        }
        self.conn.set_link_up(name).await.map_err(fail("activation"))
    }
}

/// Sets the route to the pods of a node. The gateway of a tunnel is on no segment.
async fn set_route(
    conn: &Connection,
    cidr: Cidr,
    gateway: IpAddr,
    link: u32,
    tunnel_mtu: Option<u32>,
) -> Result<(), Error> {
    let route = own_route(cidr).gateway(gateway).dev_index(link);
    let route = match tunnel_mtu {
        Some(mtu) if gateway.is_ipv4() => route.onlink().mtu(mtu),
        Some(mtu) => route.mtu(mtu),
        None => route,
    };
    conn.replace_route(route).await
}

/// The MTU that packets of pods may have on a node with this address, with room for encapsulation unless there is none.
pub async fn pod_mtu(address: IpAddr, encapsulation: Encapsulation) -> Result<u32, NetworkError> {
    pod_mtu_on(
        &Connection::new().map_err(NetworkError::netlink("open a netlink socket"))?,
        address,
        encapsulation,
    )
    .await
}

/// [`pod_mtu`], in the network namespace at `host`.
pub async fn pod_mtu_in(
    host: &Path,
    address: IpAddr,
    encapsulation: Encapsulation,
) -> Result<u32, NetworkError> {
    let conn = Connection::new_in(&open_netns(host)?);
    pod_mtu_on(&conn.map_err(NetworkError::netlink("open a netlink socket"))?, address, encapsulation).await
}

async fn pod_mtu_on(
    conn: &Connection,
    address: IpAddr,
    encapsulation: Encapsulation,
) -> Result<u32, NetworkError> {
    let mtu = mtu_of(conn, address).await?.clamp(576 + overhead(address), 65_535);
    Ok(match encapsulation {
        Encapsulation::Never => mtu,
        Encapsulation::Auto | Encapsulation::Always => mtu - overhead(address),
    })
}

/// The MTU of the link that has the address; Ethernet's when none has it.
async fn mtu_of(conn: &Connection, address: IpAddr) -> Result<u32, NetworkError> {
    let fail = || NetworkError::netlink(format!("look up the link of {address}"));
    let addresses = conn.get_addresses().await.map_err(fail())?;
    let index = addresses.iter().find(|a| a.address == address).map(|a| a.link);
    let Some(index) = index else { return Ok(1500) };
    let link = conn.get_link_by_index(index).await.map_err(fail())?;
    Ok(link.and_then(|link| link.mtu).unwrap_or(1500))
}

/// With a scope: without a gateway, as when it is removed, it would be that of a link.
fn own_route(cidr: Cidr) -> Route<'static> {
    Route::new(cidr.network(), cidr.prefix()).protocol(PROTOCOL).scope(Scope::Universe)
}

async fn remove_route(conn: &Connection, cidr: Cidr) -> Result<(), NetworkError> {
    let fail = NetworkError::netlink(format!("remove the route to the pods {cidr}"));
    conn.del_route_if_exists(own_route(cidr)).await.map(drop).map_err(fail)
}

async fn own_routes(conn: &Connection, cluster: Cidrs) -> Result<Vec<OwnRoute>, NetworkError> {
    let routes = conn.get_routes().await.map_err(NetworkError::netlink("list routes"))?;
    let own = |route: &RouteEntry| {
        let main = route.table == table::MAIN && !route.is_default();
        if !main || route.protocol != PROTOCOL || route.route_type != RouteType::Unicast {
            return None;
        }
        let cidr = Cidr::new(route.destination, route.prefix).ok()?;
        cluster.of(cidr.family()).filter(|all| all.covers(cidr))?;
        let gateway = route.gateway.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        Some((cidr, gateway, route.link.unwrap_or(0)))
    };
    Ok(routes.iter().filter_map(own).collect())
}

/// Removes everything that a router made for this network.
pub(crate) async fn remove(conn: &Connection, record: &Record) -> Result<(), NetworkError> {
    delete_link(conn, &tunnel_link(&record.bridge)).await?;
    for (cidr, ..) in own_routes(conn, record.cluster_cidrs).await? {
        remove_route(conn, cidr).await?;
    }
    Ok(())
}

/// No route to other nodes leads through the link of a pod, and pods come and go.
fn is_pod_link(link: &Link) -> bool {
    is_host_link(&link.name)
}

/// Changes of rules that come together are looked at together.
const RULES_PERIOD: Duration = Duration::from_secs(1);

/// Waits until links, addresses, routes or rules of this node have changed.
pub struct Changes {
    events: NetworkEvents,
    /// None on a kernel without nftables.
    rules: Option<Monitor>,
    cluster: Cidrs,
}

impl Changes {
    /// Watches the calling thread's network namespace.
    pub fn watch(cluster: Cidrs, bridge: &str) -> Result<Self, NetworkError> {
        Self::watch_on(None, cluster, bridge)
    }

    /// [`watch`](Self::watch), in the network namespace at `host`.
    pub fn watch_in(host: &Path, cluster: Cidrs, bridge: &str) -> Result<Self, NetworkError> {
        Self::watch_on(Some(host), cluster, bridge)
    }

    fn watch_on(host: Option<&Path>, cluster: Cidrs, bridge: &str) -> Result<Self, NetworkError> {
        let fail = NetworkError::netlink("watch links, addresses and routes");
        let netns = host.map(open_netns).transpose()?;
        let events =
            NetworkEvents::listen(netns.as_ref(), cluster.of(IpFamily::V6).is_some()).map_err(fail)?;
        let tunnel = rules::tunnel_table(bridge);
        let follows = move |name: &str| name == tunnel || rules::may_forward(name);
        let rules = Monitor::open_all(follows, host, OwnGenerations::default());
        let rules = rules.inspect_err(|error| tracing::warn!(%error, "changes of rules go unnoticed")).ok();
        Ok(Self { events, rules, cluster })
    }

    /// Returns after a change by somebody else that routes to pods may depend on.
    pub async fn next(&mut self) -> Result<(), NetworkError> {
        loop {
            let fail = NetworkError::netlink("watch links, addresses and routes");
            let changed = async {
                match &mut self.rules {
                    Some(rules) => rules.changed().await,
                    None => std::future::pending().await,
                }
            };
            let event = tokio::select! {
                _ = changed => None,
                event = self.events.next() => Some(event.map_err(fail)?),
            };
            match event {
                Some(event) if self.matters(&event) => return Ok(()),
                Some(_) => {}
                None => {
                    tokio::time::sleep(RULES_PERIOD).await;
                    return Ok(());
                }
            }
        }
    }

    fn matters(&self, event: &NetworkEvent) -> bool {
        match event {
            // Links of pods get link-local addresses by themselves.
            NetworkEvent::NewAddress(address) | NetworkEvent::DelAddress(address) => {
                !address.is_scope(Scope::Link)
            }
            NetworkEvent::DelLink(link) => !is_pod_link(link),
            // A link that goes down takes its routes along, and the kernel does not report those.
            NetworkEvent::NewLink(link) => !link.is_up && !is_pod_link(link),
            NetworkEvent::DelRoute(route) => {
                route.protocol == PROTOCOL && self.cluster.iter().any(|all| all.contains(route.destination))
            }
            // Any of them may have mattered.
            NetworkEvent::Lost => true,
            _ => false,
        }
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
