//! Links, addresses and routes, for the plugins that make them.

use std::net::IpAddr;

use ferrite_netlink::{Address, Connection, Link, Netns, Route, VethLink};
use ferrite_nft::{
    BaseChain, Cidr, Expr, IpFamily, NoSets, Ruleset, in_range, load_destination, load_source,
};
use serde_json::{Value, json};

use super::{Call, Failure, IpConfig, code};
use crate::bridge::{hash_name, open_netns};

/// The kernel in the container's namespace.
pub(super) fn inside(call: &Call) -> Result<Connection, Failure> {
    let netns = open_netns(call.netns()).map_err(|error| {
        Failure::new(
            code::UNKNOWN_CONTAINER,
            format!("failed to open netns {}: {error}", call.netns().display()),
        )
    })?;
    Connection::new_in(&netns).map_err(Failure::of("netlink socket in the namespace"))
}

/// The kernel where the plugin runs.
pub(super) fn outside() -> Result<Connection, Failure> {
    Connection::new().map_err(Failure::of("netlink socket"))
}

pub(super) async fn find(conn: &Connection, name: &str) -> Result<Option<Link>, Failure> {
    conn.get_link_by_name(name).await.map_err(Failure::of(format!("look up link {name}")))
}

/// The name of the node's end of an attachment's pair: the same at every call.
pub(super) fn host_end(call: &Call) -> String {
    hash_name("veth", &format!("{}/{}", call.environment.container, call.interface()))
}

/// Makes the pair with one end in the container. An interface of that name must not be there yet.
pub(super) async fn make_pair(call: &Call, mtu: Option<u32>) -> Result<String, Failure> {
    let name = call.interface();
    if find(&inside(call)?, name).await?.is_some() {
        return Err(Failure::new(code::OTHER, format!("the container has an interface {name} already")));
    }
    let host_end = host_end(call);
    let conn = outside()?;
    // An attempt that failed half-way left it.
    conn.del_link_if_exists(&host_end).await.map_err(Failure::of("remove an old link"))?;
    let netns = open_netns(call.netns()).map_err(Failure::of("namespace"))?;
    let mut pair = VethLink::new(&host_end, name).peer_netns(&netns);
    if let Some(mtu) = mtu {
        pair = pair.mtu(mtu);
    }
    conn.add_link(pair).await.map_err(Failure::of(format!("make the pair {host_end}")))?;
    conn.set_link_up(&host_end).await.map_err(Failure::of(host_end.clone()))?;
    Ok(host_end)
}

/// Takes the container's interface away, from wherever it can be reached.
pub(super) async fn remove_pair(call: &Call) -> Result<(), Failure> {
    if let Ok(conn) = inside(call) {
        conn.del_link_if_exists(call.interface()).await.map_err(Failure::of("remove the interface"))?;
    }
    outside()?.del_link_if_exists(&host_end(call)).await.map(drop).map_err(Failure::of("remove the pair"))
}

pub(super) async fn add_address(
    conn: &Connection,
    link: &str,
    address: IpAddr,
    prefix: u8,
) -> Result<(), Failure> {
    let given = Address::new(link, address, prefix);
    // IPAM gives an address once; looking for duplicates would make the container wait for it.
    let given = if address.is_ipv6() { given.without_duplicate_detection() } else { given };
    let added = conn.replace_address(given).await;
    added.map_err(Failure::of(format!("address {address}/{prefix} of {link}")))
}

/// A route by a link, through a gateway if there is one.
pub(super) async fn add_route(
    conn: &Connection,
    link: &str,
    (destination, prefix): (IpAddr, u8),
    gateway: Option<IpAddr>,
) -> Result<(), Failure> {
    let route = Route::new(destination, prefix).dev(link);
    let route = match gateway {
        Some(gateway) if gateway.is_ipv4() != destination.is_ipv4() => {
            return Err(Failure::config("a route and its gateway are of different families"));
        }
        Some(gateway) => route.gateway(gateway),
        None => route,
    };
    let added = conn.replace_route(route).await;
    added.map_err(Failure::of(format!("route to {destination}/{prefix} by {link}")))
}

/// A link of the node, in the form of a result.
pub(super) async fn interface(conn: &Connection, name: &str) -> Result<Value, Failure> {
    let mut object = json!({"name": name});
    if let Some(mac) = find(conn, name).await?.and_then(|link| link.hardware) {
        let parts: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        object["mac"] = parts.join(":").into();
    }
    Ok(object)
}

/// The container's interface, in the form of a result.
pub(super) async fn own_interface(call: &Call) -> Result<Value, Failure> {
    let mut own = interface(&inside(call)?, call.interface()).await?;
    own["sandbox"] = call.netns().display().to_string().into();
    Ok(own)
}

/// As the reference plugins: the settings for names of the network, else those of IPAM.
pub(super) fn dns(call: &Call, given: &Value) -> Value {
    let own = call.config.get("dns").filter(|dns| dns.as_object().is_some_and(|dns| !dns.is_empty()));
    own.or_else(|| given.get("dns")).cloned().unwrap_or_else(|| json!({}))
}

/// The routes that IPAM wants: destination and gateway.
pub(super) fn routes(result: &Value) -> Vec<((IpAddr, u8), Option<IpAddr>)> {
    let list = result.get("routes").and_then(Value::as_array);
    let parse = |route: &Value| {
        let (address, prefix) = route.get("dst")?.as_str()?.split_once('/')?;
        let gateway = route.get("gw").and_then(Value::as_str).and_then(|text| text.parse().ok());
        Some(((address.parse().ok()?, prefix.parse().ok()?), gateway))
    };
    list.into_iter().flatten().filter_map(parse).collect()
}

/// Runtimes may turn IPv6 off in a namespace; an interface that gets an address of it must have it on.
pub(super) fn enable_ipv6(call: &Call, ips: &[IpConfig]) -> Result<(), Failure> {
    if ips.iter().all(|ip| ip.address.is_ipv4()) {
        return Ok(());
    }
    let netns = open_netns(call.netns()).map_err(Failure::of("namespace"))?;
    let name = format!("net.ipv6.conf.{}.disable_ipv6", call.interface());
    netns.sysctl().set(&name, "0").map_err(Failure::of(format!("set {name}")))
}

/// Gives the container's interface its addresses and routes.
pub(super) async fn configure(call: &Call, ips: &[IpConfig], result: &Value) -> Result<(), Failure> {
    enable_ipv6(call, ips)?;
    let (conn, link) = (inside(call)?, call.interface());
    for ip in ips {
        add_address(&conn, link, ip.address, ip.prefix).await?;
    }
    conn.set_link_up(link).await.map_err(Failure::of(link))?;
    for (destination, gateway) in routes(result) {
        let of_family = |ip: &&IpConfig| ip.address.is_ipv4() == destination.0.is_ipv4();
        let gateway = gateway.or_else(|| ips.iter().find(of_family).and_then(|ip| ip.gateway));
        add_route(&conn, link, destination, gateway).await?;
    }
    Ok(())
}

/// Fails if the interface or one of the addresses is gone.
pub(super) async fn check(call: &Call) -> Result<(), Failure> {
    let (conn, name) = (inside(call)?, call.interface());
    let missing = |what: String| Failure::new(code::OTHER, what);
    let link = find(&conn, name).await?.ok_or_else(|| missing(format!("interface {name} is gone")))?;
    let addresses = conn.get_addresses().await.map_err(Failure::of("list addresses"))?;
    let own: Vec<IpAddr> =
        addresses.iter().filter(|known| known.link == link.index).map(|known| known.address).collect();
    let wanted = call.previous().map(super::ips).unwrap_or_default();
    match wanted.iter().find(|ip| !own.contains(&ip.address)) {
        Some(ip) => Err(missing(format!("address {} of {name} is gone", ip.address))),
        None => Ok(()),
    }
}

/// The node forwards packets of these families.
pub(super) fn forward(ips: &[IpConfig]) -> Result<(), Failure> {
    let host = Netns::current().map_err(Failure::of("this namespace"))?;
    for (wanted, name) in [
        (ips.iter().any(|ip| ip.address.is_ipv4()), "net.ipv4.ip_forward"),
        (ips.iter().any(|ip| ip.address.is_ipv6()), "net.ipv6.conf.all.forwarding"),
    ] {
        if wanted {
            host.sysctl().set(name, "1").map_err(Failure::of(format!("set {name}")))?;
        }
    }
    Ok(())
}

fn masquerade_table(call: &Call) -> String {
    hash_name("cni-masq-", &format!("{}/{}", call.environment.container, call.interface()))
}

/// Packets of the container that leave its subnet have the node's address.
pub(super) fn masquerade(call: &Call, ips: &[IpConfig]) -> Result<(), Failure> {
    const CHAIN: &str = "postrouting";
    let name = masquerade_table(call);
    let fail = || Failure::of(format!("nftables table {name}"));
    let mut ruleset = Ruleset::open(None).map_err(fail())?;
    for family in IpFamily::BOTH {
        let own: Vec<_> = ips.iter().filter(|ip| IpFamily::of(ip.address) == family).collect();
        if own.is_empty() {
            ruleset.delete_table(family.into(), &name).map_err(fail())?;
            continue;
        }
        let mut batch = ruleset.batch(family.into(), &name);
        batch.replace_table();
        batch.add_chain(CHAIN, &BaseChain::source_nat());
        for ip in own {
            let Some(subnet) = Cidr::new(ip.address, ip.prefix) else {
                return Err(Failure::config(format!("{}/{} is no address", ip.address, ip.prefix)));
            };
            let mut rule: Vec<Expr<NoSets>> = Vec::new();
            rule.extend(in_range(load_source(family, 0), Cidr::single(ip.address), true));
            rule.extend(in_range(load_destination(family, 0), subnet, false));
            rule.push(Expr::Masquerade { random_ports: false });
            batch.add_rule(CHAIN, &rule);
        }
        ruleset.commit(batch).map_err(fail())?;
    }
    Ok(())
}

pub(super) fn stop_masquerade(call: &Call) -> Result<(), Failure> {
    // A kernel without nftables has no such rules.
    let Ok(mut ruleset) = Ruleset::open(None) else { return Ok(()) };
    let name = masquerade_table(call);
    for family in IpFamily::BOTH {
        ruleset.delete_table(family.into(), &name).map_err(Failure::of(name.clone()))?;
    }
    Ok(())
}
