//! Which address the node calls its own.

use std::net::IpAddr;

use nlink::netlink::{Connection, Route};

use crate::NetworkError;

/// A route, as far as the choice needs it.
struct DefaultRoute {
    link: u32,
    metric: u32,
}

/// A global address and the link it is on.
struct Global {
    link: u32,
    address: IpAddr,
    /// On a bridge: likely a gateway for containers, not an address others can reach the node by.
    on_bridge: bool,
}

/// The address of the interface of the best default route, else any global address that is not a
/// bridge's, else `None`. IPv4 goes before IPv6.
pub async fn node_address() -> Result<Option<IpAddr>, NetworkError> {
    let fail = || NetworkError::netlink("look up the node's address");
    let conn = Connection::<Route>::new().map_err(fail())?;
    let bridges: Vec<u32> = conn
        .get_links()
        .await
        .map_err(fail())?
        .iter()
        .filter(|link| link.kind() == Some("bridge"))
        .map(|link| link.ifindex())
        .collect();
    let routes = conn.get_routes().await.map_err(fail())?;
    let defaults = routes
        .iter()
        .filter(|route| route.is_default() && route.table_id() == u32::from(nix::libc::RT_TABLE_MAIN))
        .filter_map(|route| Some(DefaultRoute { link: route.oif()?, metric: route.priority().unwrap_or(0) }))
        .collect();
    let addresses = conn.get_addresses().await.map_err(fail())?;
    let globals = addresses
        .iter()
        .filter(|a| a.scope() == nlink::netlink::types::addr::Scope::Universe && !a.is_deprecated())
        .filter_map(|a| {
            let address = *a.primary_address()?;
            let link = a.ifindex();
            Some(Global { link, address, on_bridge: bridges.contains(&link) })
        })
        .collect();
    Ok(choose(defaults, globals))
}

fn choose(mut defaults: Vec<DefaultRoute>, mut globals: Vec<Global>) -> Option<IpAddr> {
    globals.retain(|global| !global.address.is_loopback());
    globals.sort_by_key(|global| global.address.is_ipv6());
    defaults.sort_by_key(|route| route.metric);
    defaults
        .iter()
        .find_map(|route| globals.iter().find(|global| global.link == route.link))
        .or_else(|| globals.iter().find(|global| !global.on_bridge))
        .map(|global| global.address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices() {
        type Row<'a> = (&'a str, &'a [(u32, u32)], &'a [(u32, &'a str, bool)], Option<&'a str>);
        let rows: &[Row] = &[
            ("nothing", &[], &[], None),
            (
                "default route decides",
                &[(2, 0)],
                &[(3, "192.0.2.3", false), (2, "192.0.2.2", false)],
                Some("192.0.2.2"),
            ),
            (
                "lowest metric first",
                &[(2, 600), (3, 100)],
                &[(2, "192.0.2.2", false), (3, "192.0.2.3", false)],
                Some("192.0.2.3"),
            ),
            ("route without address", &[(2, 0)], &[(3, "192.0.2.3", false)], Some("192.0.2.3")),
            (
                "IPv4 first",
                &[(2, 0)],
                &[(2, "2001:db8::2", false), (2, "192.0.2.2", false)],
                Some("192.0.2.2"),
            ),
            ("IPv6 alone", &[], &[(2, "2001:db8::2", false)], Some("2001:db8::2")),
            ("a bridge with the default route", &[(2, 0)], &[(2, "192.0.2.2", true)], Some("192.0.2.2")),
            ("a container bridge is no node address", &[], &[(2, "10.244.0.1", true)], None),
            ("loopback is no node address", &[], &[(1, "127.0.0.2", false)], None),
        ];
        for (name, defaults, globals, want) in rows {
            let defaults = defaults.iter().map(|&(link, metric)| DefaultRoute { link, metric }).collect();
            let globals = globals
                .iter()
                .map(|&(link, address, on_bridge)| Global {
                    link,
                    address: address.parse().unwrap(),
                    on_bridge,
                })
                .collect();
            assert_eq!(choose(defaults, globals), want.map(|a| a.parse().unwrap()), "{name}");
        }
    }
}
