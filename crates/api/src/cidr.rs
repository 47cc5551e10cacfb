//! Ranges of addresses, of either family.

use std::fmt;
use std::net::IpAddr;

/// A range of addresses in its text form: an address and how many of its bits all of the range share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    pub address: IpAddr,
    pub bits: u8,
}

impl Cidr {
    /// Reads `10.96.0.0/12` or `fd00::/108`. The address need not be the first of the range.
    pub fn parse(value: &str) -> Option<Self> {
        let (address, bits) = value.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let digits = !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit());
        let bits: u8 = bits.parse().ok().filter(|_| digits)?;
        (bits <= if address.is_ipv4() { 32 } else { 128 }).then_some(Self { address, bits })
    }

    /// Number of bits in which the addresses of the range differ.
    fn free_bits(self) -> u32 {
        u32::from(number(self.address).1 - self.bits)
    }

    /// The first address of the range, as a number in 128 bits.
    fn base(self) -> u128 {
        let free = self.free_bits();
        if free >= 128 { 0 } else { number(self.address).0 >> free << free }
    }

    /// The first and the last address of the range.
    pub fn ends(self) -> (IpAddr, IpAddr) {
        let (base, free) = (self.base(), self.free_bits());
        let last = base | if free >= 128 { u128::MAX } else { (1 << free) - 1 };
        (self.address_of(base), self.address_of(last))
    }

    /// The same range, written with its first address.
    pub fn masked(self) -> Self {
        Self { address: self.ends().0, bits: self.bits }
    }

    /// Returns true if the address is the first of the range.
    pub fn is_canonical(self) -> bool {
        number(self.address).0 == self.base()
    }

    /// Returns true if another range lies within this one.
    pub fn contains(self, other: Self) -> bool {
        let free = self.free_bits();
        self.address.is_ipv4() == other.address.is_ipv4()
            && self.bits <= other.bits
            && (free >= 128 || (self.base() ^ other.base()) >> free == 0)
    }

    /// Returns true if the range has an address that a service may get. As upstream: neither the first nor,
    /// of IPv4, the last.
    pub fn contains_host(self, address: IpAddr) -> bool {
        let (first, last) = self.ends();
        let within = address.is_ipv4() == first.is_ipv4() && (first..=last).contains(&address);
        within && address != first && (address != last || address.is_ipv6())
    }

    /// An address of the range's family, by its number.
    pub fn address_of(self, number: u128) -> IpAddr {
        match self.address {
            IpAddr::V4(_) => IpAddr::V4((u32::try_from(number).unwrap_or(u32::MAX)).into()),
            IpAddr::V6(_) => IpAddr::V6(number.into()),
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// An address as a number, and its number of bits.
pub fn number(address: IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(v4) => (u128::from(u32::from(v4)), 32),
        IpAddr::V6(v6) => (u128::from(v6), 128),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_a_range() {
        for (range, address, is_host) in [
            ("10.0.0.0/24", "10.0.0.0", false),
            ("10.0.0.0/24", "10.0.0.1", true),
            ("10.0.0.0/24", "10.0.0.255", false),
            ("10.0.0.0/24", "10.0.1.1", false),
            ("10.0.0.0/24", "::10.0.0.1", false),
            ("fd00::/112", "fd00::", false),
            ("fd00::/112", "fd00::ffff", true),
            ("fd00::/112", "fd00::1:0", false),
            ("::/0", "ffff::1", true),
        ] {
            let range = Cidr::parse(range).expect(range);
            assert_eq!(range.contains_host(address.parse().expect(address)), is_host, "{range} {address}");
        }
    }

    #[test]
    fn a_range_is_told_by_its_first_address() {
        for (given, masked) in
            [("10.1.2.3/8", "10.0.0.0/8"), ("fd00::1:2/112", "fd00::1:0/112"), ("::1/0", "::/0")]
        {
            assert_eq!(Cidr::parse(given).expect(given).masked().to_string(), masked);
        }
    }
}
