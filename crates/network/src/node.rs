//! Which address the node calls its own.

use std::net::IpAddr;

use ferrite_netlink::{Connection, Scope, table};

use crate::{IpFamily, NetworkError};

/// A route, as far as the choice needs it.
struct DefaultRoute {
    family: IpFamily,
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
    let (defaults, globals) = read().await?;
    Ok(IpFamily::BOTH.into_iter().find_map(|family| choose(&defaults, &globals, family)))
}

/// The addresses of the node in these families, in their order: for each family as [`node_address`] chooses.
pub async fn node_addresses(families: &[IpFamily]) -> Result<Vec<IpAddr>, NetworkError> {
    let (defaults, globals) = read().await?;
    Ok(families.iter().filter_map(|family| choose(&defaults, &globals, *family)).collect())
}

/// The addresses by which others may reach the machine: all but those of bridges and of single links.
pub async fn machine_addresses() -> Result<Vec<IpAddr>, NetworkError> {
    let (_, globals) = read().await?;
    let usable = globals.into_iter().filter(|global| !global.on_bridge && !global.address.is_loopback());
    let mut addresses: Vec<IpAddr> = usable.map(|global| global.address).collect();
    addresses.sort();
    addresses.dedup();
    Ok(addresses)
}

async fn read() -> Result<(Vec<DefaultRoute>, Vec<Global>), NetworkError> {
    let fail = || NetworkError::netlink("look up the node's address");
    let conn = Connection::new().map_err(fail())?;
    let bridges: Vec<u32> = conn
        .get_links()
        .await
        .map_err(fail())?
        .iter()
        .filter(|link| link.is_kind("bridge"))
        .map(|link| link.index)
        .collect();
    let routes = conn.get_routes().await.map_err(fail())?;
    let mut defaults: Vec<DefaultRoute> = routes
        .iter()
        .filter(|route| route.is_default() && route.table == table::MAIN)
        .filter_map(|route| {
            let family = IpFamily::of(route.destination);
            Some(DefaultRoute { family, link: route.link?, metric: route.metric.unwrap_or(0) })
        })
        .collect();
    defaults.sort_by_key(|route| route.metric);
    let addresses = conn.get_addresses().await.map_err(fail())?;
    let globals = addresses
        .iter()
        .filter(|a| a.is_scope(Scope::Universe) && !a.is_deprecated)
        .map(|a| Global { link: a.link, address: a.address, on_bridge: bridges.contains(&a.link) })
        .collect();
    Ok((defaults, globals))
}

/// Default routes come with the lowest metric first. A route of the other family says which link is the way out, too.
fn choose(defaults: &[DefaultRoute], globals: &[Global], family: IpFamily) -> Option<IpAddr> {
    let usable = |global: &&Global| !global.address.is_loopback() && IpFamily::of(global.address) == family;
    let at = |route: &DefaultRoute| globals.iter().filter(usable).find(|global| global.link == route.link);
    let (own, other): (Vec<_>, Vec<_>) = defaults.iter().partition(|route| route.family == family);
    own.into_iter()
        .chain(other)
        .find_map(at)
        .or_else(|| globals.iter().filter(usable).find(|global| !global.on_bridge))
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
            let mut defaults: Vec<DefaultRoute> = defaults
                .iter()
                .map(|&(link, metric)| DefaultRoute { family: IpFamily::V4, link, metric })
                .collect();
            defaults.sort_by_key(|route| route.metric);
            let globals: Vec<Global> = globals
                .iter()
                .map(|&(link, address, on_bridge)| Global {
                    link,
                    address: address.parse().unwrap(),
                    on_bridge,
                })
                .collect();
            let chosen = IpFamily::BOTH.into_iter().find_map(|family| choose(&defaults, &globals, family));
            assert_eq!(chosen, want.map(|a| a.parse().unwrap()), "{name}");
        }
    }

    #[test]
    fn each_family_has_a_choice_of_its_own() {
        let route = |family, link, metric| DefaultRoute { family, link, metric };
        let global =
            |link, address: &str| Global { link, address: address.parse().unwrap(), on_bridge: false };
        let defaults = [route(IpFamily::V4, 2, 0), route(IpFamily::V6, 3, 100)];
        let globals = [global(2, "192.0.2.2"), global(2, "2001:db8:2::2"), global(3, "2001:db8:3::3")];
        let chosen = |family| choose(&defaults, &globals, family).map(|address| address.to_string());
        assert_eq!(chosen(IpFamily::V4).as_deref(), Some("192.0.2.2"));
        assert_eq!(chosen(IpFamily::V6).as_deref(), Some("2001:db8:3::3"));
        let only_v4 = &defaults[..1];
        let chosen = choose(only_v4, &globals, IpFamily::V6).map(|address| address.to_string());
        assert_eq!(chosen.as_deref(), Some("2001:db8:2::2"), "the link of the other family's way out");
    }
}
