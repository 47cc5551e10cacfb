//! The kernel settings by which a node forwards packets of pods.

use std::collections::BTreeMap;

use ferrite_netlink::Netns;

use crate::state::{Before, Record, boot_id};
use crate::{IpFamily, NetworkError};

const IP_FORWARD: &str = "net.ipv4.ip_forward";
const IPV6_FORWARDING: &str = "net.ipv6.conf.all.forwarding";
const CONF: &str = "/proc/sys/net/ipv6/conf";

fn read(host: &Netns, name: &str) -> Result<String, NetworkError> {
    let value = host.sysctl().get(name).map_err(NetworkError::netlink(format!("read {name}")))?;
    Ok(value.trim().to_owned())
}

fn write(host: &Netns, name: &str, value: &str) -> Result<(), NetworkError> {
    host.sysctl().set(name, value).map_err(NetworkError::netlink(format!("set {name}")))
}

/// Notes in the record the settings that [`enable`] is going to change. A setting that an earlier process of this boot
/// noted stays as it was noted.
pub(crate) fn note(host: &Netns, record: &mut Record) -> Result<(), NetworkError> {
    let families = record.pod_cidrs.families();
    let before = |value: &str| Before { value: value.to_owned(), boot: boot_id() };
    if families.contains(&IpFamily::V4) && record.ip_forward.is_none() && read(host, IP_FORWARD)? == "0" {
        record.ip_forward = Some(before("0"));
    }
    if !families.contains(&IpFamily::V6) {
        return Ok(());
    }
    if host.sysctl().get(IPV6_FORWARDING).is_err() {
        return Err(NetworkError::Config(
            "this kernel has no IPv6: leave ranges of IPv6 out of --cluster-cidr and --service-cluster-ip-range"
                .into(),
        ));
    }
    if read(host, IPV6_FORWARDING)? == "0" {
        for (name, value) in accepts_advertisements(host)? {
            record.ipv6_settings.entry(name).or_insert_with(|| before(&value));
        }
        record.ipv6_settings.entry(IPV6_FORWARDING.into()).or_insert_with(|| before("0"));
    }
    Ok(())
}

/// Forwards packets of the families of the record.
pub(crate) fn enable(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    let families = record.pod_cidrs.families();
    if families.contains(&IpFamily::V4) {
        write(host, IP_FORWARD, "1")?;
    }
    if families.contains(&IpFamily::V6) {
        // A node that forwards would otherwise lose the routes that routers advertise to it.
        for name in record.ipv6_settings.keys().filter(|name| *name != IPV6_FORWARDING) {
            // The link may be gone.
            if host.sysctl().get(name).is_ok() {
                write(host, name, "2")?;
            }
        }
        write(host, IPV6_FORWARDING, "1")?;
    }
    Ok(())
}

/// Sets what was changed in this boot back.
pub(crate) fn restore(host: &Netns, record: &Record) -> Result<(), NetworkError> {
    let this_boot = |before: &&Before| before.boot == boot_id();
    if let Some(before) = record.ip_forward.as_ref().filter(this_boot) {
        write(host, IP_FORWARD, &before.value)?;
    }
    let settings = record.ipv6_settings.iter().filter(|(_, before)| this_boot(before));
    let (forwarding, links): (BTreeMap<_, _>, BTreeMap<_, _>) =
        settings.partition(|(name, _)| *name == IPV6_FORWARDING);
    for (name, before) in forwarding.into_iter().chain(links) {
        if host.sysctl().get(name).is_ok() {
            write(host, name, &before.value)?;
        }
    }
    Ok(())
}

/// The settings of links that follow router advertisements for as long as the node does not forward.
fn accepts_advertisements(host: &Netns) -> Result<Vec<(String, String)>, NetworkError> {
    let fail = NetworkError::netlink(format!("list {CONF}"));
    let links = host.run(links_with_settings).map_err(fail)?;
    let setting = |link: &String| {
        (link != "all" && link != "default").then(|| format!("net/ipv6/conf/{link}/accept_ra"))
    };
    let names = links.iter().filter_map(setting);
    Ok(names.filter_map(|name| Some((name.clone(), read(host, &name).ok().filter(|v| v == "1")?))).collect())
}

fn links_with_settings() -> Vec<String> {
    let entries = std::fs::read_dir(CONF).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
