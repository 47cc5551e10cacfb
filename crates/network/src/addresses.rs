//! Addresses and routes of either family, as the kernel is asked for them.

use std::net::{IpAddr, Ipv6Addr};

use ferrite_netlink::{Address, Connection, Error, Route, Scope};

use crate::Cidr;

/// Gives a link an address and the route to its range. An address of IPv6 is usable at once: nobody else can have it, so
/// the kernel does not look for duplicates.
pub(crate) async fn add(conn: &Connection, link: &str, address: IpAddr, range: Cidr) -> Result<(), Error> {
    let given = Address::new(link, address, range.prefix());
    let given = match (address, range.last()) {
        (IpAddr::V4(_), IpAddr::V4(last)) => given.broadcast(last.into()),
        (IpAddr::V4(_), IpAddr::V6(_)) => given,
        (IpAddr::V6(_), _) => given.without_duplicate_detection(),
    };
    conn.replace_address(given).await
}

/// Gives a link an address that only this host uses: it is never the source of what goes elsewhere.
pub(crate) async fn add_host(conn: &Connection, link: &str, address: IpAddr) -> Result<(), Error> {
    let given = match address {
        IpAddr::V4(_) => Address::new(link, address, 32).scope(Scope::Host),
        // The kernel takes the scope of IPv6 from the address. A deprecated address is no source, either.
        IpAddr::V6(_) => Address::new(link, address, 128).without_duplicate_detection().deprecated(),
    };
    conn.replace_address(given).await
}

/// Makes the gateway the way of a pod to a range; `None` is everywhere.
///
/// Pods of IPv6 have no neighbours but the gateway: a pod cannot ask the isolated ports of others for their hardware
/// addresses, and the kernel answers for others in IPv4 only.
pub(crate) async fn route_by(
    conn: &Connection,
    link: &str,
    gateway: IpAddr,
    to: Option<Cidr>,
) -> Result<(), Error> {
    if gateway.is_ipv6() {
        conn.replace_route(Route::new(gateway, 128).dev(link)).await?;
    }
    let range = to.filter(|range| range.network().is_ipv4() == gateway.is_ipv4());
    let route = match range {
        Some(range) => Route::new(range.network(), range.prefix()).gateway(gateway),
        None => Route::default_by(gateway),
    };
    conn.replace_route(route.dev(link)).await
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
