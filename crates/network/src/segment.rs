//! A virtual segment that connects nodes on one machine with each other and with the machine, and with nothing else.

use std::path::Path;

use ferrite_netlink::{BridgeLink, Connection, Netns, PortFlags, Scope, VethLink};
use futures_util::future::BoxFuture;

use crate::addresses::{self, hardware_address};
use crate::bridge::{delete_link, find_link, open_netns};
use crate::{Addresses, Cidr, Cidrs, NetworkError, rules};

/// A node's end of its link to the segment.
const NODE_LINK: &str = "eth0";

/// The segment: a bridge whose first address of each family is the machine's. Routes of the segment lead nowhere else: packets between
/// it and the machine's other links are dropped, except those of the machine's own pods.
pub struct Segment {
    name: String,
    ranges: Cidrs,
    conn: Connection,
}

impl Segment {
    /// Makes or completes the segment in the calling thread's network namespace. `pod_bridge` is the bridge of the
    /// pods that run on the machine itself.
    pub fn open<'a>(
        name: &'a str,
        ranges: Cidrs,
        pod_bridge: &'a str,
    ) -> BoxFuture<'a, Result<Self, NetworkError>> {
        Box::pin(Self::make(name, ranges, pod_bridge))
    }

    async fn make(name: &str, ranges: Cidrs, pod_bridge: &str) -> Result<Self, NetworkError> {
        let fail = |what: &str| NetworkError::netlink(format!("{what} of segment {name}"));
        let own = first_addresses(ranges)?;
        let conn = connect()?;
        match find_link(&conn, name).await? {
            None => {
                let bridge = BridgeLink::new(name).address(hardware_address(*own.primary()));
                conn.add_link(bridge).await.map_err(fail("creation"))?;
            }
            Some(link) if link.is_kind("bridge") => {}
            Some(_) => return Err(NetworkError::Conflict(format!("link {name} exists and is no bridge"))),
        }
        // The drop comes before the address: at no moment is there a way out.
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        rules::add_segment_isolation(&host, name, &ranges.families(), pod_bridge)?;
        for (address, range) in own.iter().zip(ranges.iter()) {
            addresses::add(&conn, name, *address, *range).await.map_err(fail("address"))?;
        }
        conn.set_link_up(name).await.map_err(fail("activation"))?;
        Ok(Self { name: name.to_owned(), ranges, conn })
    }

    /// The segment that is there; none if there is none.
    pub async fn find(name: &str, pod_bridge: &str) -> Result<Option<Self>, NetworkError> {
        let conn = connect()?;
        let found = find_link(&conn, name).await?.filter(|link| link.is_kind("bridge"));
        let Some(index) = found.map(|link| link.index) else { return Ok(None) };
        let fail = NetworkError::netlink(format!("addresses of segment {name}"));
        let addresses = conn.get_addresses().await.map_err(fail)?;
        // The kernel lists IPv4 first, which is the primary family of a segment that has both, and each address once.
        let global = addresses.iter().filter(|a| a.link == index && a.is_scope(Scope::Universe));
        let ranges = global.filter_map(|a| Cidr::containing(a.address, a.prefix));
        match Cidrs::new(ranges) {
            Ok(ranges) => Self::open(name, ranges, pod_bridge).await.map(Some),
            Err(_) => Ok(None),
        }
    }

    /// The addresses of nodes.
    pub fn ranges(&self) -> Cidrs {
        self.ranges
    }

    /// The machine's own addresses.
    pub fn addresses(&self) -> Addresses {
        first_addresses(self.ranges).unwrap_or(Addresses::single(self.ranges.primary().network()))
    }

    /// Connects the network namespace at `netns`: `port` is the machine's end of the link. May be repeated.
    pub fn attach<'a>(
        &'a self,
        port: &'a str,
        netns: &'a Path,
        node_ips: Addresses,
    ) -> BoxFuture<'a, Result<(), NetworkError>> {
        Box::pin(self.link_node(port, netns, node_ips))
    }

    async fn link_node(&self, port: &str, netns: &Path, node_ips: Addresses) -> Result<(), NetworkError> {
        let fail = |what: &str| NetworkError::netlink(format!("{what} of node link {port}"));
        let netns = open_netns(netns)?;
        let node = Connection::new_in(&netns).map_err(fail("netlink socket"))?;
        if find_link(&node, NODE_LINK).await?.is_none() {
            delete_link(&self.conn, port).await?;
            let hardware = hardware_address(*node_ips.primary());
            let veth = VethLink::new(port, NODE_LINK).peer_address(hardware).peer_netns(&netns);
            self.conn.add_link(veth).await.map_err(fail("creation"))?;
        }
        self.conn.set_link_master(port, &self.name).await.map_err(fail("bridge port"))?;
        // A node may ask a node port of the machine whose endpoint is on the node itself. With bridge netfilter on,
        // the kernel then sends the frame back out of the port that it came in by.
        let hairpin = PortFlags { hairpin: Some(true), isolated: None };
        self.conn.set_bridge_port(port, hairpin).await.map_err(fail("hairpin mode"))?;
        self.conn.set_link_up(port).await.map_err(fail("activation"))?;
        node.set_link_up("lo").await.map_err(fail("loopback"))?;
        for address in node_ips.iter() {
            let Some(range) = self.ranges.iter().find(|range| range.contains(*address)) else {
                return Err(NetworkError::Config(format!("{address} is not in {}", self.ranges)));
            };
            addresses::add(&node, NODE_LINK, *address, *range).await.map_err(fail("address"))?;
        }
        node.set_link_up(NODE_LINK).await.map_err(fail("node's end"))
    }

    /// Takes the segment away, with its rules. Does nothing when there is none.
    pub async fn remove(name: &str) -> Result<(), NetworkError> {
        let conn = connect()?;
        if find_link(&conn, name).await?.is_some_and(|link| link.is_kind("bridge")) {
            delete_link(&conn, name).await?;
        }
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        rules::remove_segment_isolation(&host, name)
    }
}

/// Pulls the cable of a node, or puts it back. The node keeps its address and its routes.
pub async fn set_port(port: &str, up: bool) -> Result<(), NetworkError> {
    let conn = connect()?;
    let changed = match up {
        true => conn.set_link_up(port).await,
        false => conn.set_link_down(port).await,
    };
    changed.map_err(NetworkError::netlink(format!("state of node link {port}")))
}

/// Removes a node's link, if there is one.
pub async fn remove_port(port: &str) -> Result<(), NetworkError> {
    delete_link(&connect()?, port).await
}

fn connect() -> Result<Connection, NetworkError> {
    Connection::new().map_err(NetworkError::netlink("open a netlink socket"))
}

fn first_addresses(ranges: Cidrs) -> Result<Addresses, NetworkError> {
    let room = |range: &Cidr| range.nth(1).filter(|_| range.prefix() <= range.family().bits() - 3);
    let none = || NetworkError::Config(format!("{ranges} has no room for a machine and a node"));
    ranges.try_map(room).ok_or_else(none)
}
