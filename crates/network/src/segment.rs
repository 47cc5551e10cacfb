//! A virtual segment that connects nodes on one machine with each other and with the machine, and with nothing else.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use nlink::netlink::addr::Ipv4Address;
use nlink::netlink::link::{BridgeLink, BridgePortConfig, VethLink};
use nlink::netlink::namespace::Netns;
use nlink::netlink::{Connection, Route};

use crate::bridge::{delete_link, find_link, hardware_address, open_netns};
use crate::{Cidr, NetworkError, rules};

/// A node's end of its link to the segment.
const NODE_LINK: &str = "eth0";

/// The segment: a bridge whose first address is the machine's. Routes of the segment lead nowhere else: packets between
/// it and the machine's other links are dropped, except those of the machine's own pods.
pub struct Segment {
    name: String,
    range: Cidr,
    conn: Connection<Route>,
}

impl Segment {
    /// Makes or completes the segment in the calling thread's network namespace. `pod_bridge` is the bridge of the
    /// pods that run on the machine itself.
    pub async fn open(name: &str, range: Cidr, pod_bridge: &str) -> Result<Self, NetworkError> {
        let fail = |what: &str| NetworkError::netlink(format!("{what} of segment {name}"));
        let address = first_address(range)?;
        let conn = connect()?;
        match find_link(&conn, name).await? {
            None => {
                let bridge = BridgeLink::new(name).address(hardware_address(address));
                conn.add_link(bridge).await.map_err(fail("creation"))?;
            }
            Some(link) if link.kind() == Some("bridge") => {}
            Some(_) => return Err(NetworkError::Conflict(format!("link {name} exists and is no bridge"))),
        }
        // The drop comes before the address: at no moment is there a way out.
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        rules::add_segment_isolation(&host, name, pod_bridge).await?;
        let config = Ipv4Address::new(name, address, range.prefix()).broadcast(range.broadcast());
        conn.replace_address(config).await.map_err(fail("address"))?;
        conn.set_link_up(name).await.map_err(fail("activation"))?;
        Ok(Self { name: name.to_owned(), range, conn })
    }

    /// The segment that is there; none if there is none.
    pub async fn find(name: &str, pod_bridge: &str) -> Result<Option<Self>, NetworkError> {
        let conn = connect()?;
        if find_link(&conn, name).await?.is_none_or(|link| link.kind() != Some("bridge")) {
            return Ok(None);
        }
        let fail = NetworkError::netlink(format!("addresses of segment {name}"));
        let addresses = conn.get_addresses_by_name(name).await.map_err(fail)?;
        let range = addresses.iter().find_map(|address| match address.primary_address()? {
            IpAddr::V4(ip) => Cidr::containing(*ip, address.prefix_len()),
            IpAddr::V6(_) => None,
        });
        match range {
            Some(range) => Self::open(name, range, pod_bridge).await.map(Some),
            None => Ok(None),
        }
    }

    /// The addresses of nodes.
    pub fn range(&self) -> Cidr {
        self.range
    }

    /// The machine's own address.
    pub fn address(&self) -> Ipv4Addr {
        self.range.nth(1).unwrap_or(self.range.network())
    }

    /// Connects the network namespace at `netns`: `port` is the machine's end of the link. May be repeated.
    pub async fn attach(&self, port: &str, netns: &Path, address: Ipv4Addr) -> Result<(), NetworkError> {
        let fail = |what: &str| NetworkError::netlink(format!("{what} of node link {port}"));
        let netns = open_netns(netns)?;
        let node = Connection::<Route>::new_in(&netns).map_err(fail("netlink socket"))?;
        if find_link(&node, NODE_LINK).await?.is_none() {
            delete_link(&self.conn, port).await?;
            let veth =
                VethLink::new(port, NODE_LINK).peer_address(hardware_address(address)).peer_netns_fd(&netns);
            self.conn.add_link(veth).await.map_err(fail("creation"))?;
        }
        self.conn.set_link_master(port, self.name.as_str()).await.map_err(fail("bridge port"))?;
        // A node may ask a node port of the machine whose endpoint is on the node itself. With bridge netfilter on,
        // the kernel then sends the frame back out of the port that it came in by.
        let hairpin = BridgePortConfig::new().hairpin(true);
        self.conn.set_bridge_port(port, hairpin).await.map_err(fail("hairpin mode"))?;
        self.conn.set_link_up(port).await.map_err(fail("activation"))?;
        node.set_link_up("lo").await.map_err(fail("loopback"))?;
        let config =
            Ipv4Address::new(NODE_LINK, address, self.range.prefix()).broadcast(self.range.broadcast());
        node.replace_address(config).await.map_err(fail("address"))?;
        node.set_link_up(NODE_LINK).await.map_err(fail("node's end"))
    }

    /// Takes the segment away, with its rules. Does nothing when there is none.
    pub async fn remove(name: &str) -> Result<(), NetworkError> {
        let conn = connect()?;
        if find_link(&conn, name).await?.is_some_and(|link| link.kind() == Some("bridge")) {
            delete_link(&conn, name).await?;
        }
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        rules::remove_segment_isolation(&host, name).await
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

fn connect() -> Result<Connection<Route>, NetworkError> {
    Connection::<Route>::new().map_err(NetworkError::netlink("open a netlink socket"))
}

fn first_address(range: Cidr) -> Result<Ipv4Addr, NetworkError> {
    let room = NetworkError::Config(format!("{range} has no room for a machine and a node"));
    range.nth(1).filter(|_| range.prefix() <= 29).ok_or(room)
}
