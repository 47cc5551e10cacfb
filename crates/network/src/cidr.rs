//! A range of addresses of one family.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ferrite_nft::IpFamily;
use serde::{Deserialize, Serialize};

/// A network in canonical form: no host bits are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    network: IpAddr,
    prefix: u8,
}

/// Why a text is not a range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a CIDR: {why}")]
pub struct CidrError {
    text: String,
    why: &'static str,
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn address(number: u128, family: IpFamily) -> Option<IpAddr> {
    match family {
        IpFamily::V4 => u32::try_from(number).ok().map(|bits| Ipv4Addr::from_bits(bits).into()),
        IpFamily::V6 => Some(Ipv6Addr::from_bits(number).into()),
    }
}

impl Cidr {
    /// The network `address`/`prefix`; host bits in `address` are an error, as in the API.
    pub fn new(address: IpAddr, prefix: u8) -> Result<Self, CidrError> {
        let fail = |why| CidrError { text: format!("{address}/{prefix}"), why };
        let cidr = Self::containing(address, prefix).ok_or_else(|| fail("the prefix is too long"))?;
        match cidr.network == address {
            true => Ok(cidr),
            false => Err(fail("bits are set to the right of the prefix")),
        }
    }

    /// The network of this prefix that has the address.
    pub fn containing(address: IpAddr, prefix: u8) -> Option<Self> {
        let range = ferrite_nft::Cidr::new(address, prefix)?;
        Some(Self { network: range.network(), prefix })
    }

    /// The network address.
    pub fn network(self) -> IpAddr {
        self.network
    }

    /// The length of the prefix in bits.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    pub fn family(self) -> IpFamily {
        IpFamily::of(self.network)
    }

    /// The last address of the range; of IPv4, the broadcast address.
    pub fn last(self) -> IpAddr {
        ferrite_nft::Cidr::from(self).last()
    }

    /// The number of addresses of the range, the first and the last included; of all of IPv6, one less.
    pub fn size(self) -> u128 {
        1_u128.checked_shl(u32::from(self.family().bits() - self.prefix)).unwrap_or(u128::MAX)
    }

    /// The address `index` places after the network address.
    pub fn nth(self, index: u128) -> Option<IpAddr> {
        (index < self.size()).then(|| address(number(self.network) + index, self.family())).flatten()
    }

    /// The place of `address` in the range, if it is inside.
    pub fn index_of(self, address: IpAddr) -> Option<u128> {
        self.contains(address).then(|| number(address) - number(self.network))
    }

    /// True if `address` is inside.
    pub fn contains(self, address: IpAddr) -> bool {
        ferrite_nft::Cidr::from(self).contains(address)
    }

    /// Returns true if every address of `other` is in the range.
    pub fn covers(self, other: Cidr) -> bool {
        ferrite_nft::Cidr::from(self).covers(other.into())
    }

    /// True if an address is in both.
    pub fn overlaps(self, other: Cidr) -> bool {
        self.covers(other) || other.covers(self)
    }
}

impl From<Cidr> for ferrite_nft::Cidr {
    fn from(cidr: Cidr) -> Self {
        // The prefix was compared with the family when the range was made.
        Self::new(cidr.network, cidr.prefix).unwrap_or(Self::single(cidr.network))
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let fail = |why| CidrError { text: text.to_owned(), why };
        let (address, prefix) = text.split_once('/').ok_or_else(|| fail("no '/'"))?;
        let address = address.parse().map_err(|_| fail("the address does not parse"))?;
        let prefix = prefix.parse().map_err(|_| fail("the prefix does not parse"))?;
        Self::new(address, prefix)
    }
}

impl TryFrom<String> for Cidr {
    type Error = CidrError;

    fn try_from(text: String) -> Result<Self, CidrError> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(cidr: Cidr) -> Self {
        cidr.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (text, size, first, last) in [
            ("10.244.3.0/24", 256, "10.244.3.1", "10.244.3.255"),
            ("10.0.0.0/8", 1 << 24, "10.0.0.1", "10.255.255.255"),
            ("192.0.2.4/30", 4, "192.0.2.5", "192.0.2.7"),
            ("0.0.0.0/0", 1 << 32, "0.0.0.1", "255.255.255.255"),
            ("fd00::/64", 1 << 64, "fd00::1", "fd00::ffff:ffff:ffff:ffff"),
            ("fd00:0:0:5::/126", 4, "fd00:0:0:5::1", "fd00:0:0:5::3"),
        ] {
            let cidr: Cidr = text.parse().unwrap();
            assert_eq!(cidr.to_string(), text);
            assert_eq!(cidr.size(), size, "{text}");
            assert_eq!(cidr.nth(1).unwrap().to_string(), first, "{text}");
            assert_eq!(cidr.last().to_string(), last, "{text}");
            assert_eq!(cidr.nth(size), None, "{text}");
            assert_eq!(cidr.index_of(cidr.last()), Some(size - 1), "{text}");
        }
        let all: Cidr = "::/0".parse().unwrap();
        assert_eq!((all.size(), all.nth(2).unwrap().to_string()), (u128::MAX, "::2".into()));
    }

    #[test]
    fn refused() {
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.1/24",
            "10.0.0.0/33",
            "10.0.0/8",
            "10.0.0.0/-1",
            "10.0.0.0/",
            "fd00::1/64",
            "fd00::/129",
            "::ffff:10.0.0.0/8",
        ] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }

    #[test]
    fn cover() {
        let cidr = |text: &str| text.parse::<Cidr>().unwrap();
        for (all, node) in [("10.244.0.0/16", "10.244.7.0/24"), ("fd00::/56", "fd00:0:0:7::/64")] {
            let (all, node) = (cidr(all), cidr(node));
            assert!(all.covers(node) && all.covers(all) && !node.covers(all) && node.overlaps(all));
        }
        assert!(!cidr("10.244.0.0/16").covers(cidr("10.96.0.0/16")));
        assert!(!cidr("::/0").overlaps(cidr("10.0.0.0/8")) && !cidr("0.0.0.0/0").overlaps(cidr("fd00::/8")));
    }
}
