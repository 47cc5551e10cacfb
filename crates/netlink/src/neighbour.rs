//! Neighbours of links, and where a tunnel sends frames.

use std::net::IpAddr;

use crate::message::{family_of, flag};
use crate::{Connection, Error, Message, Messages};

const NEW: u16 = 28;
const DELETE: u16 = 29;
const GET: u16 = 30;
/// The length of `ndmsg`.
const FIXED: usize = 12;
const BRIDGE_FAMILY: u8 = 7;

const DESTINATION: u16 = 1;
const HARDWARE: u16 = 2;

const PERMANENT: u16 = 0x80;
/// The entry is the link's own, not of a bridge that it is a port of.
const OWN: u8 = 2;

fn fixed(family: u8, link: u32, state: u16, flags: u8) -> [u8; FIXED] {
    let mut bytes = [0; FIXED];
    bytes[0] = family;
    bytes[4..8].copy_from_slice(&link.to_ne_bytes());
    bytes[8..10].copy_from_slice(&state.to_ne_bytes());
    bytes[10] = flags;
    bytes
}

/// The hardware address of a neighbour, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeighbourEntry {
    /// The link's index.
    pub link: u32,
    pub address: IpAddr,
    pub hardware: Option<Vec<u8>>,
}

impl NeighbourEntry {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != NEW {
            return None;
        }
        let attributes = message.attributes(FIXED);
        Some(Self {
            link: message.number(4)?,
            address: attributes.ip(DESTINATION)?,
            hardware: attributes.get(HARDWARE).map(<[u8]>::to_vec),
        })
    }
}

/// A neighbour whose hardware address the kernel need not look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// The link's index.
    pub link: u32,
    pub address: IpAddr,
    pub hardware: [u8; 6],
}

/// The machine to which a tunnel sends the frames for a hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardingEntry {
    /// The tunnel's index.
    pub link: u32,
    pub hardware: [u8; 6],
    pub machine: IpAddr,
}

impl Connection {
    /// The neighbours of both families that the kernel knows.
    pub async fn get_neighbours(&self) -> Result<Vec<NeighbourEntry>, Error> {
        self.list("list neighbours", GET, &[0; FIXED], NeighbourEntry::parse).await
    }

    pub async fn replace_neighbour(&self, neighbour: Neighbour) -> Result<(), Error> {
        let mut request = Messages::request(NEW, flag::CREATE | flag::REPLACE);
        request.push(&fixed(family_of(neighbour.address), neighbour.link, PERMANENT, 0));
        request.ip(DESTINATION, neighbour.address);
        request.attribute(HARDWARE, &neighbour.hardware);
        self.change("set a neighbour", request).await
    }

    /// Returns false if there was no such neighbour.
    pub async fn del_neighbour_if_exists(&self, link: u32, address: IpAddr) -> Result<bool, Error> {
        let mut request = Messages::request(DELETE, 0);
        request.push(&fixed(family_of(address), link, 0, 0));
        request.ip(DESTINATION, address);
        Error::existed(self.change("delete a neighbour", request).await)
    }

    pub async fn replace_forwarding(&self, entry: ForwardingEntry) -> Result<(), Error> {
        let mut request = Messages::request(NEW, flag::CREATE | flag::REPLACE);
        request.push(&fixed(BRIDGE_FAMILY, entry.link, PERMANENT, OWN));
        request.attribute(HARDWARE, &entry.hardware);
        request.ip(DESTINATION, entry.machine);
        self.change("set a forwarding entry", request).await
    }

    /// Returns false if there was no entry for the hardware address.
    pub async fn del_forwarding_if_exists(&self, link: u32, hardware: [u8; 6]) -> Result<bool, Error> {
        let mut request = Messages::request(DELETE, 0);
        request.push(&fixed(BRIDGE_FAMILY, link, 0, OWN));
        request.attribute(HARDWARE, &hardware);
        Error::existed(self.change("delete a forwarding entry", request).await)
    }
}
