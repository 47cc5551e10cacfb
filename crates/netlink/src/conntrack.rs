//! Tracked connections.

use std::net::IpAddr;

use crate::message::flag;
use crate::parse::{INET, INET6};
use crate::{Attributes, Error, Message, Messages, NESTED, Netns, Protocol, Socket};

const SUBSYSTEM: u16 = 1;
const NEW: u16 = SUBSYSTEM << 8;
const GET: u16 = SUBSYSTEM << 8 | 1;
const DELETE: u16 = SUBSYSTEM << 8 | 2;
/// The length of `nfgenmsg`.
const FIXED: usize = 4;
const UDP: u8 = 17;

const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
const FILTER: u16 = 25;

const TUPLE_PROTOCOL: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;

/// The ends of a flow in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple {
    pub source: (IpAddr, u16),
    pub destination: (IpAddr, u16),
}

impl Tuple {
    fn parse(tuple: Attributes<'_>) -> Option<Self> {
        const TUPLE_IP: u16 = 1;
        const SOURCES: [u16; 2] = [1, 3];
        const DESTINATIONS: [u16; 2] = [2, 4];
        const SOURCE_PORT: u16 = 2;
        const DESTINATION_PORT: u16 = 3;
        let (ip, protocol) = (tuple.nested(TUPLE_IP)?, tuple.nested(TUPLE_PROTOCOL)?);
        let address = |kinds: [u16; 2]| kinds.into_iter().find_map(|kind| ip.ip(kind));
        let port = |kind| Some(u16::from_be_bytes(protocol.get(kind)?.try_into().ok()?));
        if protocol.get(PROTOCOL_NUMBER) != Some(&[UDP]) {
            return None;
        }
        Some(Self {
            source: (address(SOURCES)?, port(SOURCE_PORT)?),
            destination: (address(DESTINATIONS)?, port(DESTINATION_PORT)?),
        })
    }
}

/// A tracked flow of UDP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// As the client sends.
    pub original: Tuple,
    /// As the server answers.
    pub reply: Tuple,
    family: u8,
    /// The attributes that name the entry to the kernel, as the kernel wrote them.
    names: Vec<(u16, Vec<u8>)>,
}

impl Flow {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != NEW {
            return None;
        }
        let attributes = message.attributes(FIXED);
        let name = |kind| attributes.get(kind).map(|data| (kind, data.to_vec()));
        Some(Self {
            original: Tuple::parse(attributes.nested(ORIGINAL)?)?,
            reply: Tuple::parse(attributes.nested(REPLY)?)?,
            family: message.byte(0)?,
            names: [ORIGINAL, ID, ZONE].into_iter().filter_map(name).collect(),
        })
    }
}

/// The connection tracking of a network namespace. The calls block for as long as the kernel works on them.
#[derive(Debug)]
pub struct Conntrack(Socket);

impl Conntrack {
    /// Of a network namespace, else of that of the calling thread.
    pub fn open(netns: Option<&Netns>) -> Result<Self, Error> {
        Socket::open(Protocol::Netfilter, netns).map(Self)
    }

    /// The flows of UDP.
    pub fn udp_flows(&mut self) -> Result<Vec<Flow>, Error> {
        let mut found = Vec::new();
        for family in [INET, INET6] {
            found.extend(self.0.request("list tracked connections", list_udp(family), Flow::parse)?);
        }
        Ok(found)
    }

    /// Deletes an entry. Returns false if it has expired, or if another flow has its addresses by now.
    pub fn delete(&mut self, flow: &Flow) -> Result<bool, Error> {
        let mut request = Messages::request(DELETE, 0);
        request.push(&[flow.family, 0, 0, 0]);
        for (kind, data) in &flow.names {
            let kind = if *kind == ORIGINAL { kind | NESTED } else { *kind };
            request.attribute(kind, data);
        }
        Error::existed(self.0.request("delete a tracked connection", request, |_| None::<()>).map(drop))
    }
}

/// Asks for the flows of UDP. Kernels before 5.8 ignore the filter and list all.
fn list_udp(family: u8) -> Messages {
    const FILTER_ORIGINAL: u16 = 1;
    const BY_PROTOCOL: u32 = 1 << 3;
    let mut request = Messages::request(GET, flag::DUMP);
    request.push(&[family, 0, 0, 0]);
    request.nest(ORIGINAL | NESTED, |m| {
        m.nest(TUPLE_PROTOCOL | NESTED, |m| m.attribute(PROTOCOL_NUMBER, &[UDP]));
    });
    request.nest(FILTER | NESTED, |m| m.number(FILTER_ORIGINAL, BY_PROTOCOL));
    request
}
