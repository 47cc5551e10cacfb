//! Address families, transport protocols and ranges of addresses.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// One of the two IP families. Each has tables of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IpFamily {
    V4,
    V6,
}

impl IpFamily {
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The name in `spec.ipFamilies` and in `addressType`.
    pub fn api_name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    /// Length of an address in bits.
    pub fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

/// The family of a table: the packets that its chains can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TableFamily {
    Ipv4,
    Ipv6,
    /// Both IP families.
    Inet,
    /// Everything that comes in by a link.
    Netdev,
}

impl TableFamily {
    const ALL: [Self; 4] = [Self::Ipv4, Self::Ipv6, Self::Inet, Self::Netdev];

    /// The kernel's number.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Ipv4 => 2,
            Self::Netdev => 5,
            Self::Ipv6 => 10,
        }
    }

    /// None for families that nobody here has tables of.
    pub(crate) fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.number() == number)
    }
}

impl From<IpFamily> for TableFamily {
    fn from(family: IpFamily) -> Self {
        match family {
            IpFamily::V4 => Self::Ipv4,
            IpFamily::V6 => Self::Ipv6,
        }
    }
}

impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "ip",
            Self::Ipv6 => "ip6",
            Self::Inet => "inet",
            Self::Netdev => "netdev",
        })
    }
}

/// A transport protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    /// An absent protocol is TCP; an unknown one is `None`.
    pub fn parse(name: Option<&str>) -> Option<Self> {
        match name.unwrap_or("TCP") {
            "TCP" => Some(Self::Tcp),
            "UDP" => Some(Self::Udp),
            "SCTP" => Some(Self::Sctp),
            _ => None,
        }
    }

    /// The number in the IP header.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

/// A range of addresses in CIDR notation, without host bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr {
    network: IpAddr,
    prefix: u8,
}

/// A text that is not a CIDR.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a CIDR such as 10.0.0.0/8 or fd00::/8")]
pub struct BadCidr(pub String);

impl Cidr {
    /// The range of `prefix` bits around `address`; `None` if the prefix is longer than an address.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let family = IpFamily::of(address);
        let network = match address {
            _ if prefix > family.bits() => return None,
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(u32::from(32 - prefix)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(u32::from(128 - prefix)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
        };
        Some(Self { network, prefix })
    }

    /// The range with one address.
    pub fn single(address: IpAddr) -> Self {
        Self { network: address, prefix: IpFamily::of(address).bits() }
    }

    pub fn network(self) -> IpAddr {
        self.network
    }

    pub fn prefix(self) -> u8 {
        self.prefix
    }

    pub fn family(self) -> IpFamily {
        IpFamily::of(self.network)
    }

    /// The last address of the range.
    pub fn last(self) -> IpAddr {
        match self.network {
            IpAddr::V4(v4) => {
                let host = u32::MAX.checked_shr(u32::from(self.prefix)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() | host))
            }
            IpAddr::V6(v6) => {
                let host = u128::MAX.checked_shr(u32::from(self.prefix)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() | host))
            }
        }
    }

    pub fn contains(self, address: IpAddr) -> bool {
        Self::new(address, self.prefix).is_some_and(|range| range.network == self.network)
    }

    /// Returns true if every address of `other` is in this range.
    pub fn covers(self, other: Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.network)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = BadCidr;

    fn from_str(text: &str) -> Result<Self, BadCidr> {
        let bad = || BadCidr(text.to_owned());
        let (address, prefix) = text.trim().split_once('/').ok_or_else(bad)?;
        let address = address.parse().map_err(|_| bad())?;
        Self::new(address, prefix.parse().map_err(|_| bad())?).ok_or_else(bad)
    }
}

/// Removes ranges that another one covers. CIDRs nest or are disjoint, so the result has no overlap.
pub fn without_overlap(mut ranges: Vec<Cidr>) -> Vec<Cidr> {
    ranges.sort_by_key(|range| (range.network, range.prefix));
    let mut kept: Vec<Cidr> = Vec::with_capacity(ranges.len());
    for range in ranges {
        if !kept.last().is_some_and(|last| last.covers(range)) {
            kept.push(range);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cidrs() {
        let range: Cidr = " 10.1.2.3/8 ".parse().unwrap();
        assert_eq!(range.to_string(), "10.0.0.0/8");
        assert_eq!(range.last().to_string(), "10.255.255.255");
        assert!(range.contains("10.9.9.9".parse().unwrap()) && !range.contains("11.0.0.0".parse().unwrap()));
        let six: Cidr = "fd00::1/64".parse().unwrap();
        assert_eq!(
            (six.to_string(), six.last().to_string()),
            ("fd00::/64".into(), "fd00::ffff:ffff:ffff:ffff".into())
        );
        assert!(!six.contains("10.0.0.1".parse().unwrap()));
        let all: Cidr = "0.0.0.0/0".parse().unwrap();
        assert!(all.covers(range) && !range.covers(all));
        for bad in ["10.0.0.0", "10.0.0.0/33", "x/8", "fd00::/129", ""] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
    }

    #[test]
    fn ranges_that_another_covers_are_removed() {
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<Cidr>>();
        let kept = without_overlap(parse(&[
            "10.1.0.0/16",
            "10.0.0.0/8",
            "192.0.2.1/32",
            "10.1.2.0/24",
            "192.0.2.1/32",
        ]));
        assert_eq!(kept, parse(&["10.0.0.0/8", "192.0.2.1/32"]));
    }
}
