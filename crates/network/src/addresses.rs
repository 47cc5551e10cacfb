//! Addresses and routes of either family, as the kernel is asked for them.

use std::net::{IpAddr, Ipv6Addr};

use nlink::netlink::addr::{Ipv4Address, Ipv6Address};
use nlink::netlink::route::{Ipv4Route, Ipv6Route};
use nlink::netlink::types::addr::Scope;
use nlink::netlink::{Connection, Error, Route};

use crate::Cidr;

/// Gives a link an address and the route to its range. An address of IPv6 is usable at once: nobody else can have it, so
/// the kernel does not look for duplicates.
pub(crate) async fn add(
    conn: &Connection<Route>,
    link: &str,
    address: IpAddr,
    range: Cidr,
) -> Result<(), Error> {
    match (address, range.last()) {
        (IpAddr::V4(v4), IpAddr::V4(last)) => {
            conn.replace_address(Ipv4Address::new(link, v4, range.prefix()).broadcast(last)).await
        }
        (IpAddr::V4(v4), IpAddr::V6(_)) => {
            conn.replace_address(Ipv4Address::new(link, v4, range.prefix())).await
        }
        (IpAddr::V6(v6), _) => conn.replace_address(Ipv6Address::new(link, v6, range.prefix()).nodad()).await,
    }
}

/// Gives a link an address that only this host uses: it is never the source of what goes elsewhere.
pub(crate) async fn add_host(conn: &Connection<Route>, link: &str, address: IpAddr) -> Result<(), Error> {
    match address {
        IpAddr::V4(v4) => conn.replace_address(Ipv4Address::new(link, v4, 32).scope(Scope::Host)).await,
        // The kernel takes the scope of IPv6 from the address. A deprecated address is no source, either.
        IpAddr::V6(v6) => {
            conn.replace_address(Ipv6Address::new(link, v6, 128).nodad().preferred_lifetime(0)).await
        }
    }
}

/// Makes the gateway the way of a pod to a range; `None` is everywhere.
///
/// Pods of IPv6 have no neighbours but the gateway: a pod cannot ask the isolated ports of others for their hardware
/// addresses, and the kernel answers for others in IPv4 only.
pub(crate) async fn route_by(
    conn: &Connection<Route>,
    link: &str,
    gateway: IpAddr,
    to: Option<Cidr>,
) -> Result<(), Error> {
    match gateway {
        IpAddr::V4(gateway) => {
            let route = match to.map(|range| (range.network(), range.prefix())) {
                Some((IpAddr::V4(network), prefix)) => Ipv4Route::new(network, prefix),
                _ => Ipv4Route::default_route(),
            };
            conn.replace_route(route.gateway(gateway).dev(link)).await
        }
        IpAddr::V6(gateway) => {
            conn.replace_route(Ipv6Route::new(gateway, 128).dev(link)).await?;
            let route = match to.map(|range| (range.network(), range.prefix())) {
                Some((IpAddr::V6(network), prefix)) => Ipv6Route::new(network, prefix),
                _ => Ipv6Route::default_route(),
            };
            conn.replace_route(route.gateway(gateway).dev(link)).await
        }
    }
}

/// A locally administered hardware address made from the IP address: whoever gets the IP address next
/// has the hardware address its neighbours remember.
pub(crate) fn hardware_address(address: IpAddr) -> [u8; 6] {
    let [a, b, c, d] = match address {
        IpAddr::V4(v4) => v4.octets(),
        IpAddr::V6(v6) => {
            let [.., a, b, c, d] = v6.octets();
            [a, b, c, d]
        }
    };
    [0x0a, 0x58, a, b, c, d]
}

/// The link-local address that the kernel makes of a hardware address.
pub(crate) fn link_local(hardware: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = hardware;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_on_the_link() {
        for (address, hardware, local) in [
            ("10.244.0.2", [0x0a, 0x58, 10, 244, 0, 2], "fe80::858:aff:fef4:2"),
            ("fd00::1:2", [0x0a, 0x58, 0, 1, 0, 2], "fe80::858:ff:fe01:2"),
        ] {
            let made = hardware_address(address.parse().unwrap());
            assert_eq!(made, hardware, "{address}");
            assert_eq!(link_local(made).to_string(), local, "{address}");
        }
    }
}
