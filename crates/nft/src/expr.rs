//! Rules as data: the expressions of nftables that our tables use.

use std::net::IpAddr;

use crate::{Bytes, Cidr, IpFamily};

/// A 32-bit register, by number.
pub type Register = u8;

/// The decision about a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    Drop,
    Jump(String),
    Goto(String),
}

/// One step of a rule. A step that does not match ends the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expr<S> {
    LoadMark {
        to: Register,
    },
    StoreMark {
        from: Register,
    },
    /// The transport protocol.
    LoadProtocol {
        to: Register,
    },
    /// The protocol that an Ethernet frame carries.
    LoadEtherType {
        to: Register,
    },
    /// The IP family, in tables that see both: see [`of_family`].
    LoadFamily {
        to: Register,
    },
    LoadLinkHeader {
        to: Register,
        offset: u32,
        len: u32,
    },
    LoadTransportHeader {
        to: Register,
        offset: u32,
        len: u32,
    },
    LoadInputInterface {
        to: Register,
    },
    LoadNetworkHeader {
        to: Register,
        offset: u32,
        len: u32,
    },
    LoadDestinationPort {
        to: Register,
    },
    LoadOutputInterface {
        to: Register,
    },
    LoadCtState {
        to: Register,
    },
    LoadCtStatus {
        to: Register,
    },
    LoadSourceType {
        to: Register,
    },
    LoadDestinationType {
        to: Register,
    },
    LoadNumber {
        to: Register,
        number: u32,
    },
    /// A random number below `modulus`, plus `offset`.
    LoadRandom {
        to: Register,
        modulus: u32,
        offset: u32,
    },
    /// `to = (from & mask) ^ xor`
    Bitwise {
        from: Register,
        to: Register,
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    Compare {
        with: Register,
        equal: bool,
        data: Vec<u8>,
    },
    InSet {
        set: S,
        key: Register,
        inverted: bool,
    },
    /// Loads the value that a map has for the key.
    Map {
        set: S,
        key: Register,
        to: Register,
    },
    /// Obeys the verdict that a map has for the key.
    VerdictMap {
        set: S,
        key: Register,
    },
    /// Adds an element or makes it expire later.
    Remember {
        set: S,
        key: Register,
        data: Register,
        seconds: u32,
    },
    /// Removes an element of a map; the kernel wants its value named, too.
    Forget {
        set: S,
        key: Register,
        data: Register,
    },
    DestinationNat {
        address: Register,
        port: Register,
    },
    /// The source becomes the node's address.
    Masquerade {
        /// With a random port, else with the packet's own if it is free.
        random_ports: bool,
    },
    /// Matches when more than that number of bytes passes.
    Exceeds {
        bytes_per_second: u64,
        burst: u32,
    },
    Reject,
    Verdict(Verdict),
}

pub type Rule<S> = Vec<Expr<S>>;

/// `ct state established,related`: packets that belong to a known connection.
const CT_STATE_KNOWN: u32 = 2 | 4;
/// `ct state new`: only the first packet of a connection.
const CT_STATE_NEW: u32 = 8;
const CT_STATUS_DST_NAT: u32 = 1 << 5;
/// `RTN_LOCAL`: an address of this node.
const ROUTE_TYPE_LOCAL: u32 = 2;

pub fn native(number: u32) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

pub fn jump<S>(chain: &str) -> Expr<S> {
    Expr::Verdict(Verdict::Jump(chain.to_owned()))
}

pub fn goto<S>(chain: &str) -> Expr<S> {
    Expr::Verdict(Verdict::Goto(chain.to_owned()))
}

pub fn load_source<S>(family: IpFamily, to: Register) -> Expr<S> {
    match family {
        IpFamily::V4 => Expr::LoadNetworkHeader { to, offset: 12, len: 4 },
        IpFamily::V6 => Expr::LoadNetworkHeader { to, offset: 8, len: 16 },
    }
}

pub fn load_destination<S>(family: IpFamily, to: Register) -> Expr<S> {
    match family {
        IpFamily::V4 => Expr::LoadNetworkHeader { to, offset: 16, len: 4 },
        IpFamily::V6 => Expr::LoadNetworkHeader { to, offset: 24, len: 16 },
    }
}

pub fn new_connection<S>() -> [Expr<S>; 3] {
    connection_state(CT_STATE_NEW)
}

/// Matches packets that belong to a known connection.
pub fn known_connection<S>() -> [Expr<S>; 3] {
    connection_state(CT_STATE_KNOWN)
}

fn connection_state<S>(any_of: u32) -> [Expr<S>; 3] {
    [
        Expr::LoadCtState { to: 0 },
        Expr::Bitwise { from: 0, to: 0, mask: native(any_of), xor: native(0) },
        Expr::Compare { with: 0, equal: false, data: native(0) },
    ]
}

/// Compares register 0 with a value.
pub fn compare<S>(load: Expr<S>, equal: bool, data: &[u8]) -> [Expr<S>; 2] {
    [load, Expr::Compare { with: 0, equal, data: data.to_vec() }]
}

/// Matches packets that come in by a link, or do not.
pub fn comes_by<S>(link: &str, equal: bool) -> [Expr<S>; 2] {
    compare(Expr::LoadInputInterface { to: 0 }, equal, &link_name(link))
}

/// Matches packets that leave by a link, or do not.
pub fn leaves_by<S>(link: &str, equal: bool) -> [Expr<S>; 2] {
    compare(Expr::LoadOutputInterface { to: 0 }, equal, &link_name(link))
}

/// A link's name as the kernel compares it. It has no longer ones.
fn link_name(link: &str) -> [u8; 16] {
    let mut name = [0; 16];
    for (to, from) in name.iter_mut().zip(link.bytes().take(15)) {
        *to = from;
    }
    name
}

/// Matches packets of an IP family, in tables that see both.
pub fn of_family<S>(family: IpFamily) -> [Expr<S>; 2] {
    compare(Expr::LoadFamily { to: 0 }, true, &[crate::TableFamily::from(family).number()])
}

pub fn was_destination_natted<S>() -> [Expr<S>; 3] {
    [
        Expr::LoadCtStatus { to: 0 },
        Expr::Bitwise { from: 0, to: 0, mask: native(CT_STATUS_DST_NAT), xor: native(0) },
        Expr::Compare { with: 0, equal: false, data: native(0) },
    ]
}

pub fn from_this_node<S>() -> [Expr<S>; 2] {
    [Expr::LoadSourceType { to: 0 }, Expr::Compare { with: 0, equal: true, data: native(ROUTE_TYPE_LOCAL) }]
}

pub fn to_this_node<S>() -> [Expr<S>; 2] {
    [
        Expr::LoadDestinationType { to: 0 },
        Expr::Compare { with: 0, equal: true, data: native(ROUTE_TYPE_LOCAL) },
    ]
}

pub fn set_mark<S>(mark: u32) -> [Expr<S>; 3] {
    [
        Expr::LoadMark { to: 0 },
        Expr::Bitwise { from: 0, to: 0, mask: native(!mark), xor: native(mark) },
        Expr::StoreMark { from: 0 },
    ]
}

/// Matches an address that `load` puts into register 0 with a range.
pub fn in_range<S>(load: Expr<S>, range: Cidr, equal: bool) -> [Expr<S>; 3] {
    let network = octets(range.network());
    let mask: Vec<u8> = (0..network.len())
        .map(|byte| {
            let bits = usize::from(range.prefix()).saturating_sub(byte * 8).min(8);
            u8::try_from(0xff00_u32 >> bits & 0xff).unwrap_or(0xff)
        })
        .collect();
    let zero = vec![0; network.len()];
    [
        load,
        Expr::Bitwise { from: 0, to: 0, mask, xor: zero },
        Expr::Compare { with: 0, equal, data: network.to_vec() },
    ]
}

pub fn octets(address: IpAddr) -> Bytes {
    match address {
        IpAddr::V4(v4) => v4.octets().into(),
        IpAddr::V6(v6) => v6.octets().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks() {
        let rows = [
            ("10.0.0.0/8", vec![255, 0, 0, 0]),
            ("10.96.0.0/12", vec![255, 240, 0, 0]),
            ("10.96.0.1/32", vec![255; 4]),
            ("0.0.0.0/0", vec![0; 4]),
        ];
        for (range, want) in rows {
            let [_, bitwise, _] = in_range::<()>(load_source(IpFamily::V4, 0), range.parse().unwrap(), true);
            assert!(matches!(bitwise, Expr::Bitwise { mask, .. } if mask == want), "{range}");
        }
    }
}
