//! The kernel's objects of a pod network: made, found and removed.

use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use ferrite_netlink::{BridgeLink, Connection, Link, Netns};

use super::BridgeConfig;
use crate::addresses::{self, hardware_address};
use crate::state::Record;
use crate::{Addresses, Cidr, Cidrs, IpFamily, NetworkError, forwarding, routes, rules};

/// The name of the host's end of a sandbox's pair: short enough for a link, the same at every call.
pub(super) fn host_link(sandbox: &str) -> String {
    hash_name("veth", sandbox)
}

/// A prefix and eleven hexadecimal digits that stand for a text.
pub(crate) fn hash_name(prefix: &str, text: &str) -> String {
    // FNV-1a: stable across versions and machines, which the standard hasher is not.
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{prefix}{:011x}", hash >> 20)
}

/// Returns true if a link name has the form that [`host_link`] gives.
pub(crate) fn is_host_link(name: &str) -> bool {
    name.len() == 15
        && name.strip_prefix("veth").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit()))
}

pub(super) fn gateways(ranges: Cidrs) -> Addresses {
    let first = |range: &Cidr| Some(range.nth(1).unwrap_or(range.network()));
    ranges.try_map(first).unwrap_or(Addresses::single(ranges.primary().network()))
}

pub(crate) fn open_netns(path: &Path) -> Result<Netns, NetworkError> {
    Netns::from_path(path)
        .map_err(|source| NetworkError::Netns { path: path.to_owned(), source: Box::new(source) })
}

pub(super) async fn make_bridge(
    host: &Netns,
    conn: &Connection,
    config: &BridgeConfig,
) -> Result<(), NetworkError> {
    let name = config.name.as_str();
    let fail = |what: &str| NetworkError::netlink(format!("{what} of bridge {name}"));
    let addresses = gateways(config.pod_cidrs);
    match find_link(conn, name).await? {
        None => {
            let bridge = BridgeLink::new(name).address(hardware_address(*addresses.primary()));
            conn.add_link(bridge).await.map_err(fail("creation"))?;
        }
        Some(link) if link.is_kind("bridge") => {}
        Some(link) => {
            let kind = link.kind.as_deref().unwrap_or("physical");
            return Err(NetworkError::Conflict(format!(
                "link {name} exists but is a {kind} link, not a bridge; remove it or choose another name"
            )));
        }
    }
    conn.pin_bridge_mtu(name, config.mtu).await.map_err(fail("MTU"))?;
    if addresses.of(IpFamily::V6).is_some() {
        prepare_ipv6(host, name)?;
    }
    for (address, range) in addresses.iter().zip(config.pod_cidrs.iter()) {
        addresses::add(conn, name, *address, *range).await.map_err(fail("address"))?;
    }
    conn.set_link_up(name).await.map_err(fail("activation"))
}

/// The bridge's addresses of IPv6 are usable as soon as a pod has a link, and pods tell the node nothing about routes.
fn prepare_ipv6(host: &Netns, bridge: &str) -> Result<(), NetworkError> {
    [("disable_ipv6", "0"), ("accept_dad", "0"), ("accept_ra", "0"), ("accept_redirects", "0")]
        .into_iter()
        .try_for_each(|(setting, value)| {
            let name = format!("net.ipv6.conf.{bridge}.{setting}");
            host.sysctl().set(&name, value).map_err(NetworkError::netlink(format!("set {name}")))
        })
}

/// Makes the bridge answer for pods that its isolated ports cannot ask: a pod sends packets for its neighbours to the
/// bridge, and the node routes them.
pub(super) fn route_between_pods(host: &Netns, bridge: &str) -> Result<(), NetworkError> {
    let settings = [
        (format!("net.ipv4.conf.{bridge}.proxy_arp_pvlan"), "1"),
        // The kernel would wait before it answers for somebody else.
        (format!("net.ipv4.neigh.{bridge}.proxy_delay"), "0"),
        (format!("net.ipv4.conf.{bridge}.send_redirects"), "0"),
    ];
    settings.into_iter().try_for_each(|(name, value)| {
        host.sysctl().set(&name, value).map_err(NetworkError::netlink(format!("set {name}")))
    })
}

/// True if packets that stay on a bridge pass the packet filter.
pub(super) fn bridges_are_filtered(host: &Netns, family: IpFamily) -> bool {
    let setting = match family {
        IpFamily::V4 => "net.bridge.bridge-nf-call-iptables",
        IpFamily::V6 => "net.bridge.bridge-nf-call-ip6tables",
    };
    host.sysctl().get(setting).is_ok_and(|value| value.trim() == "1")
}

/// Lets the node's own processes reach host ports at 127.0.0.1: their packets leave by the bridge.
pub(super) fn allow_loopback(host: &Netns, bridge: &str) -> Result<(), NetworkError> {
    let name = format!("net.ipv4.conf.{bridge}.route_localnet");
    host.sysctl().set(&name, "1").map_err(NetworkError::netlink(format!("set {name}")))
}

/// A path to the namespace, good for as long as the value.
pub(super) fn path_of(host: &Netns) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", host.as_fd().as_raw_fd()))
}

/// Removes everything that the network made and restores forwarding.
pub(super) async fn undo(
    host: &Netns,
    conn: &Connection,
    record: &Record,
    sandboxes: &[String],
) -> Result<(), NetworkError> {
    dismantle(host, conn, record, sandboxes).await?;
    // Another network of ours came later and found forwarding on: it still needs it.
    match rules::others_exist(host, record) {
        true => Ok(()),
        false => forwarding::restore(host, record),
    }
}

pub(super) async fn dismantle(
    host: &Netns,
    conn: &Connection,
    record: &Record,
    sandboxes: &[String],
) -> Result<(), NetworkError> {
    let mut links = ports(conn, &record.bridge).await?;
    // A pair that a crash left outside the bridge is known by its reservation.
    links.extend(sandboxes.iter().map(|sandbox| host_link(sandbox)));
    for link in links {
        delete_link(conn, &link).await?;
    }
    if find_link(conn, &record.bridge).await?.is_some_and(|link| link.is_kind("bridge")) {
        delete_link(conn, &record.bridge).await?;
    }
    routes::remove(conn, record).await?;
    rules::remove_routes(conn, record).await?;
    rules::remove_tables(host, record)
}

/// The pod links in the bridge.
pub(super) async fn ports(conn: &Connection, bridge: &str) -> Result<Vec<String>, NetworkError> {
    let Some(bridge) = find_link(conn, bridge).await? else { return Ok(Vec::new()) };
    let links = conn.get_links().await.map_err(NetworkError::netlink("list links"))?;
    Ok(links
        .into_iter()
        .filter(|link| link.master == Some(bridge.index) && link.is_kind("veth") && is_host_link(&link.name))
        .map(|link| link.name)
        .collect())
}

pub(crate) async fn find_link(conn: &Connection, name: &str) -> Result<Option<Link>, NetworkError> {
    conn.get_link_by_name(name).await.map_err(NetworkError::netlink(format!("look up link {name}")))
}

pub(crate) async fn delete_link(conn: &Connection, name: &str) -> Result<(), NetworkError> {
    let fail = NetworkError::netlink(format!("delete link {name}"));
    conn.del_link_if_exists(name).await.map(drop).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_names_are_stable_and_fit() {
        assert_eq!(host_link("a"), host_link("a"));
        assert_ne!(host_link("a"), host_link("b"));
        for sandbox in ["a", &"f".repeat(64)] {
            assert!(is_host_link(&host_link(sandbox)), "{}", host_link(sandbox));
        }
        assert!(!is_host_link("veth0") && !is_host_link("vethzzzzzzzzzzz"));
    }
}
