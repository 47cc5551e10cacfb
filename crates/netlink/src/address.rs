//! Addresses of links.

use std::net::IpAddr;

use crate::message::{family_of, flag};
use crate::{Connection, Error, Message, Messages};

pub(crate) const NEW: u16 = 20;
pub(crate) const DELETE: u16 = 21;
const GET: u16 = 22;
/// The length of `ifaddrmsg`.
const FIXED: usize = 8;

const ADDRESS: u16 = 1;
const LOCAL: u16 = 2;
const BROADCAST: u16 = 4;
const LIFETIMES: u16 = 6;
const FLAGS: u16 = 8;

const NO_DUPLICATE_DETECTION: u32 = 2;
const DEPRECATED: u32 = 0x20;

/// The range in which an address is valid. The kernel takes the scope of IPv6 from the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Scope {
    #[default]
    Universe = 0,
    Link = 253,
    Host = 254,
}

/// An address, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressEntry {
    /// The link's index.
    pub link: u32,
    pub address: IpAddr,
    pub prefix: u8,
    /// [`Scope`] has names for some.
    pub scope: u8,
    /// The kernel does not use it as a source any more.
    pub is_deprecated: bool,
}

impl AddressEntry {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        if !matches!(message.kind, NEW | DELETE) {
            return None;
        }
        let attributes = message.attributes(FIXED);
        let flags = attributes.number(FLAGS).or_else(|| message.byte(2).map(u32::from)).unwrap_or(0);
        Some(Self {
            link: message.number(4)?,
            // Of a point-to-point link, the other one is the far end's.
            address: attributes.ip(LOCAL).or_else(|| attributes.ip(ADDRESS))?,
            prefix: message.byte(1)?,
            scope: message.byte(3)?,
            is_deprecated: flags & DEPRECATED != 0,
        })
    }

    pub fn is_scope(&self, scope: Scope) -> bool {
        self.scope == scope as u8
    }
}

/// An address to give to a link.
#[derive(Debug, Clone, Copy)]
pub struct Address<'a> {
    link: &'a str,
    address: IpAddr,
    prefix: u8,
    scope: Scope,
    broadcast: Option<IpAddr>,
    flags: u32,
    preferred: Option<u32>,
}

impl<'a> Address<'a> {
    /// An address of a link, by the link's name.
    pub fn new(link: &'a str, address: IpAddr, prefix: u8) -> Self {
        Self { link, address, prefix, scope: Scope::Universe, broadcast: None, flags: 0, preferred: None }
    }

    #[must_use]
    pub fn scope(self, scope: Scope) -> Self {
        Self { scope, ..self }
    }

    #[must_use]
    pub fn broadcast(self, address: IpAddr) -> Self {
        Self { broadcast: Some(address), ..self }
    }

    /// The address is usable at once: the kernel does not look for others that have it.
    #[must_use]
    pub fn without_duplicate_detection(self) -> Self {
        Self { flags: self.flags | NO_DUPLICATE_DETECTION, ..self }
    }

    /// The kernel never uses the address as the source by itself.
    #[must_use]
    pub fn deprecated(self) -> Self {
        Self { preferred: Some(0), ..self }
    }

    pub(crate) fn write(&self, request: &mut Messages, index: u32) {
        let [a, b, c, d] = index.to_ne_bytes();
        request.push(&[family_of(self.address), self.prefix, 0, self.scope as u8, a, b, c, d]);
        request.ip(LOCAL, self.address);
        request.ip(ADDRESS, self.address);
        if let Some(broadcast) = self.broadcast {
            request.ip(BROADCAST, broadcast);
        }
        if self.flags != 0 {
            request.number(FLAGS, self.flags);
        }
        if let Some(preferred) = self.preferred {
            // Valid for ever; the times of its making and change are the kernel's.
            let lifetimes = [preferred, u32::MAX, 0, 0].map(u32::to_ne_bytes);
            request.attribute(LIFETIMES, lifetimes.as_flattened());
        }
    }
}

impl Connection {
    pub async fn get_addresses(&self) -> Result<Vec<AddressEntry>, Error> {
        self.list("list addresses", GET, &[0; FIXED], AddressEntry::parse).await
    }

    /// Fails if the link has the address.
    pub async fn add_address(&self, address: Address<'_>) -> Result<(), Error> {
        self.send_address("add an address", NEW, flag::CREATE | flag::EXCLUSIVE, address).await
    }

    pub async fn replace_address(&self, address: Address<'_>) -> Result<(), Error> {
        self.send_address("set an address", NEW, flag::CREATE | flag::REPLACE, address).await
    }

    pub async fn del_address(&self, address: Address<'_>) -> Result<(), Error> {
        self.send_address("delete an address", DELETE, 0, address).await
    }

    async fn send_address(
        &self,
        name: &'static str,
        kind: u16,
        flags: u16,
        address: Address<'_>,
    ) -> Result<(), Error> {
        let index = self.index_of(address.link).await?;
        let mut request = Messages::request(kind, flags);
        address.write(&mut request, index);
        self.change(name, request).await
    }
}
