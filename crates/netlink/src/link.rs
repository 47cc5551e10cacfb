//! Links.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};

use crate::message::flag;
use crate::{Attributes, Connection, Error, Message, Messages, NESTED, Netns};

pub(crate) const NEW: u16 = 16;
pub(crate) const DELETE: u16 = 17;
const GET: u16 = 18;
const SET: u16 = 19;

/// The length of `ifinfomsg`.
const FIXED: usize = 16;
const BRIDGE_FAMILY: u8 = 7;
const UP: u32 = 1;
const LOWER_UP: u32 = 1 << 16;
/// The kernel's limit, with the zero at the end.
const NAME_BYTES: usize = 16;

const ADDRESS: u16 = 1;
const NAME: u16 = 3;
const MTU: u16 = 4;
const PEER: u16 = 5;
const MASTER: u16 = 10;
const PORT: u16 = 12;
const INFO: u16 = 18;
const ALIAS: u16 = 20;
const NETNS_FD: u16 = 28;
const EXTENSIONS: u16 = 29;
/// Of [`EXTENSIONS`]: no counters.
const SKIP_COUNTERS: u32 = 8;

const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;

fn fixed(family: u8, index: u32, flags: u32, change: u32) -> [u8; FIXED] {
    let mut bytes = [0; FIXED];
    bytes[0] = family;
    bytes[4..8].copy_from_slice(&index.to_ne_bytes());
    bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
    bytes[12..].copy_from_slice(&change.to_ne_bytes());
    bytes
}

/// A link, as the kernel lists it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// Such as `bridge` or `veth`; a physical link has none.
    pub kind: Option<String>,
    pub alias: Option<String>,
    pub mtu: Option<u32>,
    /// The bridge that it is a port of.
    pub master: Option<u32>,
    /// The other end of a pair.
    pub peer: Option<u32>,
    pub is_up: bool,
    /// The link is up, and the medium with it.
    pub has_carrier: bool,
    /// Of a bridge's port.
    pub port: PortFlags,
    /// The hardware address.
    pub hardware: Option<[u8; 6]>,
}

impl Link {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        if !matches!(message.kind, NEW | DELETE) {
            return None;
        }
        let (index, flags) = (message.number(4)?, message.number(8)?);
        let attributes = message.attributes(FIXED);
        Some(Self {
            index,
            name: attributes.text(NAME)?,
            kind: attributes.nested(INFO).and_then(|info| info.text(INFO_KIND)),
            alias: attributes.text(ALIAS),
            mtu: attributes.number(MTU),
            master: attributes.number(MASTER),
            peer: attributes.number(PEER),
            is_up: flags & UP != 0,
            has_carrier: flags & LOWER_UP != 0,
            port: PortFlags::parse(attributes.nested(INFO).unwrap_or_default()),
            hardware: attributes.get(ADDRESS).and_then(|bytes| bytes.try_into().ok()),
        })
    }

    pub fn is_kind(&self, kind: &str) -> bool {
        self.kind.as_deref() == Some(kind)
    }
}

/// A link to make.
pub trait LinkConfig {
    /// Writes the link's attributes.
    fn write(&self, request: &mut Messages);
}

fn write_common(request: &mut Messages, name: &str, mtu: Option<u32>, address: Option<[u8; 6]>) {
    request.text(NAME, name);
    if let Some(mtu) = mtu {
        request.number(MTU, mtu);
    }
    if let Some(address) = address {
        request.attribute(ADDRESS, &address);
    }
}

fn write_info(request: &mut Messages, kind: &str, data: impl FnOnce(&mut Messages)) {
    request.nest(INFO, |m| {
        m.text(INFO_KIND, kind);
        m.nest(INFO_DATA, data);
    });
}

/// A bridge.
#[derive(Debug, Clone)]
pub struct BridgeLink<'a> {
    name: &'a str,
    mtu: Option<u32>,
    address: Option<[u8; 6]>,
}

impl<'a> BridgeLink<'a> {
    pub fn new(name: &'a str) -> Self {
        Self { name, mtu: None, address: None }
    }

    #[must_use]
    pub fn mtu(self, mtu: u32) -> Self {
        Self { mtu: Some(mtu), ..self }
    }

    /// The hardware address.
    #[must_use]
    pub fn address(self, address: [u8; 6]) -> Self {
        Self { address: Some(address), ..self }
    }
}

impl LinkConfig for BridgeLink<'_> {
    fn write(&self, request: &mut Messages) {
        write_common(request, self.name, self.mtu, self.address);
        request.nest(INFO, |m| m.text(INFO_KIND, "bridge"));
    }
}

/// A pair of links, each the end of the other.
#[derive(Debug, Clone)]
pub struct VethLink<'a> {
    name: &'a str,
    peer: &'a str,
    mtu: Option<u32>,
    peer_address: Option<[u8; 6]>,
    peer_netns: Option<&'a Netns>,
}

impl<'a> VethLink<'a> {
    pub fn new(name: &'a str, peer: &'a str) -> Self {
        Self { name, peer, mtu: None, peer_address: None, peer_netns: None }
    }

    /// The MTU of both ends.
    #[must_use]
    pub fn mtu(self, mtu: u32) -> Self {
        Self { mtu: Some(mtu), ..self }
    }

    /// The hardware address of the far end.
    #[must_use]
    pub fn peer_address(self, address: [u8; 6]) -> Self {
        Self { peer_address: Some(address), ..self }
    }

    /// Makes the far end in another namespace, under its final name.
    #[must_use]
    pub fn peer_netns(self, netns: &'a Netns) -> Self {
        Self { peer_netns: Some(netns), ..self }
    }
}

impl LinkConfig for VethLink<'_> {
    fn write(&self, request: &mut Messages) {
        const FAR_END: u16 = 1;
        write_common(request, self.name, self.mtu, None);
        write_info(request, "veth", |m| {
            m.nest(FAR_END, |m| {
                m.push(&fixed(0, 0, 0, 0));
                write_common(m, self.peer, self.mtu, self.peer_address);
                if let Some(netns) = self.peer_netns {
                    m.attribute(NETNS_FD, &netns.as_fd().as_raw_fd().to_ne_bytes());
                }
            });
        });
    }
}

/// A tunnel that carries Ethernet frames in UDP.
#[derive(Debug, Clone)]
pub struct VxlanLink<'a> {
    pub name: &'a str,
    /// The number of the network.
    pub id: u32,
    /// The source of encapsulated packets.
    pub local: IpAddr,
    pub port: u16,
    /// The hardware address.
    pub address: [u8; 6],
    pub mtu: u32,
}

impl LinkConfig for VxlanLink<'_> {
    /// The tunnel learns no addresses from packets.
    fn write(&self, request: &mut Messages) {
        const ID: u16 = 1;
        const LOCAL: u16 = 4;
        const LEARNING: u16 = 7;
        const UDP_PORT: u16 = 15;
        const LOCAL6: u16 = 17;
        write_common(request, self.name, Some(self.mtu), Some(self.address));
        write_info(request, "vxlan", |m| {
            m.number(ID, self.id);
            m.ip(if self.local.is_ipv4() { LOCAL } else { LOCAL6 }, self.local);
            m.attribute(UDP_PORT, &self.port.to_be_bytes());
            m.attribute(LEARNING, &[0]);
        });
    }
}

/// The flags of a bridge's port; what is absent stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortFlags {
    /// Frames may leave by the port that they came in by.
    pub hairpin: Option<bool>,
    /// Frames pass between the port and ports that are not isolated only.
    pub isolated: Option<bool>,
}

impl PortFlags {
    const HAIRPIN: u16 = 4;
    const ISOLATED: u16 = 33;

    /// The flags in the information about a link; none if it is no bridge's port.
    fn parse(info: Attributes<'_>) -> Self {
        const MASTER_KIND: u16 = 4;
        const PORT_DATA: u16 = 5;
        let of_bridge = info.text(MASTER_KIND).is_some_and(|kind| kind == "bridge");
        let data = info.nested(PORT_DATA).filter(|_| of_bridge).unwrap_or_default();
        let flag = |kind| data.get(kind).and_then(<[u8]>::first).map(|value| *value != 0);
        Self { hairpin: flag(Self::HAIRPIN), isolated: flag(Self::ISOLATED) }
    }

    pub(crate) fn write(self, request: &mut Messages) {
        request.nest(PORT | NESTED, |m| {
            for (kind, value) in [(Self::HAIRPIN, self.hairpin), (Self::ISOLATED, self.isolated)] {
                if let Some(value) = value {
                    m.attribute(kind, &[u8::from(value)]);
                }
            }
        });
    }
}

/// A change of the link of a name.
fn change_of(name: &str, flags: u32, change: u32) -> Messages {
    let mut request = Messages::request(SET, 0);
    request.push(&fixed(0, 0, flags, change));
    request.text(NAME, name);
    request
}

impl Connection {
    pub async fn get_links(&self) -> Result<Vec<Link>, Error> {
        let mut request = Messages::request(GET, flag::DUMP);
        request.push(&fixed(0, 0, 0, 0));
        request.number(EXTENSIONS, SKIP_COUNTERS);
        self.ask("list links", request, Link::parse).await
    }

    /// The link of a name; none if there is none.
    pub async fn get_link_by_name(&self, name: &str) -> Result<Option<Link>, Error> {
        if name.is_empty() || name.len() >= NAME_BYTES {
            return Ok(None);
        }
        self.get_link(0, Some(name)).await
    }

    pub async fn get_link_by_index(&self, index: u32) -> Result<Option<Link>, Error> {
        self.get_link(index, None).await
    }

    async fn get_link(&self, index: u32, name: Option<&str>) -> Result<Option<Link>, Error> {
        let mut request = Messages::request(GET, 0);
        request.push(&fixed(0, index, 0, 0));
        request.number(EXTENSIONS, SKIP_COUNTERS);
        if let Some(name) = name {
            request.text(NAME, name);
        }
        match self.ask("look up a link", request, Link::parse).await {
            Ok(found) => Ok(found.into_iter().next()),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn index_of(&self, name: &str) -> Result<u32, Error> {
        let link = self.get_link_by_name(name).await?;
        link.map(|link| link.index).ok_or_else(|| Error::NoLink(name.to_owned()))
    }

    /// Fails if a link of that name exists.
    pub async fn add_link(&self, link: impl LinkConfig) -> Result<(), Error> {
        let mut request = Messages::request(NEW, flag::CREATE | flag::EXCLUSIVE);
        request.push(&fixed(0, 0, 0, 0));
        link.write(&mut request);
        self.change("add a link", request).await
    }

    pub async fn del_link(&self, name: &str) -> Result<(), Error> {
        let mut request = Messages::request(DELETE, 0);
        request.push(&fixed(0, 0, 0, 0));
        request.text(NAME, name);
        self.change("delete a link", request).await
    }

    /// Returns false if there was no such link.
    pub async fn del_link_if_exists(&self, name: &str) -> Result<bool, Error> {
        Error::existed(self.del_link(name).await)
    }

    pub async fn set_link_up(&self, name: &str) -> Result<(), Error> {
        self.change("bring a link up", change_of(name, UP, UP)).await
    }

    /// Returns when packets pass a link that has a carrier. The kernel activates such a link a moment later, and drops what
    /// is sent until then, but at once for somebody who looks it up (since 6.8).
    pub async fn settle_link(&self, name: &str) -> Result<(), Error> {
        self.get_link_by_name(name).await.map(drop)
    }

    pub async fn set_link_down(&self, name: &str) -> Result<(), Error> {
        self.change("take a link down", change_of(name, 0, UP)).await
    }

    pub async fn set_link_mtu(&self, name: &str, mtu: u32) -> Result<(), Error> {
        let mut request = change_of(name, 0, 0);
        request.number(MTU, mtu);
        self.change("set a link's MTU", request).await
    }

    /// Sets the MTU so that the kernel does not adapt it to the bridge's ports: it keeps one that was set, and to set
    /// the present one again changes nothing.
    pub async fn pin_bridge_mtu(&self, bridge: &str, mtu: u32) -> Result<(), Error> {
        const LEAST: u32 = 68;
        if self.get_link_by_name(bridge).await?.and_then(|link| link.mtu) == Some(mtu) {
            let other = if mtu > LEAST { mtu - 1 } else { mtu + 1 };
            self.set_link_mtu(bridge, other).await?;
        }
        self.set_link_mtu(bridge, mtu).await
    }

    /// A text for people.
    pub async fn set_link_alias(&self, name: &str, alias: &str) -> Result<(), Error> {
        let mut request = change_of(name, 0, 0);
        request.attribute(ALIAS, alias.as_bytes());
        self.change("set a link's alias", request).await
    }

    /// Makes a link the port of a bridge.
    pub async fn set_link_master(&self, name: &str, bridge: &str) -> Result<(), Error> {
        let index = self.index_of(bridge).await?;
        let mut request = change_of(name, 0, 0);
        request.number(MASTER, index);
        self.change("add a link to a bridge", request).await
    }

    pub async fn set_bridge_port(&self, name: &str, flags: PortFlags) -> Result<(), Error> {
        let index = self.index_of(name).await?;
        let mut request = Messages::request(SET, 0);
        request.push(&fixed(BRIDGE_FAMILY, index, 0, 0));
        flags.write(&mut request);
        self.change("set the flags of a bridge's port", request).await
    }
}
