//! An IPv4 range.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An IPv4 network in canonical form: no host bits are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    network: Ipv4Addr,
    prefix: u8,
}

/// Why a text is not a range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an IPv4 CIDR: {why}")]
pub struct CidrError {
    text: String,
    why: &'static str,
}

impl Cidr {
    /// The network `address`/`prefix`; host bits in `address` are an error, as in the API.
    pub fn new(address: Ipv4Addr, prefix: u8) -> Result<Self, CidrError> {
        let fail = |why| CidrError { text: format!("{address}/{prefix}"), why };
        if prefix > 32 {
            return Err(fail("the prefix is longer than 32"));
        }
        let cidr = Self { network: address, prefix };
        if u32::from(address) & !cidr.mask() != 0 {
            return Err(fail("bits are set to the right of the prefix"));
        }
        Ok(cidr)
    }

    /// The network of this prefix that has the address.
    pub fn containing(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        if prefix > 32 {
            return None;
        }
        let mask = Self { network: address, prefix }.mask();
        Some(Self { network: Ipv4Addr::from(u32::from(address) & mask), prefix })
    }

    /// The network address.
    pub fn network(self) -> Ipv4Addr {
        self.network
    }

    /// The length of the prefix in bits.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The last address of the range.
    pub fn broadcast(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.network) | !self.mask())
    }

    /// Number of addresses in the range, including the network and broadcast address.
    pub fn size(self) -> u64 {
        1 << (32 - self.prefix)
    }

    /// The address `index` places after the network address.
    pub fn nth(self, index: u64) -> Option<Ipv4Addr> {
        let index = u32::try_from(index).ok().filter(|_| index < self.size())?;
        Some(Ipv4Addr::from(u32::from(self.network) + index))
    }

    /// The place of `address` in the range, if it is inside.
    pub fn index_of(self, address: Ipv4Addr) -> Option<u64> {
        self.contains(address).then(|| u64::from(u32::from(address) - u32::from(self.network)))
    }

    /// Returns true if `address` is in the range.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        u32::from(address) & self.mask() == u32::from(self.network)
    }

    /// Returns true if every address of `other` is in the range.
    pub fn covers(self, other: Cidr) -> bool {
        self.prefix <= other.prefix && self.contains(other.network)
    }

    fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0)
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
        ] {
            let cidr: Cidr = text.parse().unwrap();
            assert_eq!(cidr.to_string(), text);
            assert_eq!(cidr.size(), size, "{text}");
            assert_eq!(cidr.nth(1).unwrap().to_string(), first, "{text}");
            assert_eq!(cidr.broadcast().to_string(), last, "{text}");
            assert_eq!(cidr.nth(size), None, "{text}");
            assert_eq!(cidr.index_of(cidr.broadcast()), Some(size - 1), "{text}");
        }
    }

    #[test]
    fn refused() {
        for text in
            ["", "10.0.0.0", "10.0.0.1/24", "10.0.0.0/33", "10.0.0/8", "10.0.0.0/-1", "::/0", "10.0.0.0/"]
        {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }

    #[test]
    fn cover() {
        let all: Cidr = "10.244.0.0/16".parse().unwrap();
        let node: Cidr = "10.244.7.0/24".parse().unwrap();
        assert!(all.covers(node) && all.covers(all) && !node.covers(all));
        assert!(!all.covers("10.96.0.0/16".parse().unwrap()));
    }
}
