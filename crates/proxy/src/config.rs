//! The proxy's configuration, and the settings of this node that follow from it.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use ferrite_nft::KernelError;

use crate::layout::{LayoutConfig, LocalTraffic, NodePortAddresses};
use crate::model::{Cidr, IpFamily};

/// Settings of the proxy.
#[derive(Debug, Clone)]
pub struct ProxyConfig {
    pub node_name: String,
    /// The addresses of the node, at most one of each family. Families without one are proxied as well.
    pub node_ips: Vec<IpAddr>,
    /// The name of the nftables table.
    pub table: String,
    pub families: Vec<IpFamily>,
    pub masquerade_all: bool,
    /// The bit of the packet mark that asks for masquerading.
    pub masquerade_bit: u8,
    pub local_traffic: LocalTraffic,
    /// Ranges of this node's addresses at which node ports answer; empty means all addresses.
    pub node_port_addresses: Vec<Cidr>,
    /// The range of pods on a bridge of this node; `None` if the network of pods is not a bridge or is known to work.
    /// Where the kernel does not track connections on bridges, Services between them need masquerading.
    pub pod_bridge: Option<Cidr>,
    /// The least time between two transactions.
    pub min_sync_period: Duration,
    /// The time after which a failed transaction is tried again.
    pub sync_period: Duration,
    /// True if an address that cannot be listened at is an error; else it is a warning.
    pub bind_address_hard_fail: bool,
    /// Where `/healthz` and `/livez` are answered.
    pub healthz_bind_address: Option<SocketAddr>,
    /// Where `/metrics` and `/proxyMode` are answered.
    pub metrics_bind_address: Option<SocketAddr>,
    /// The body of `/configz` at the same address: the configuration with defaults, as JSON.
    pub configz: Option<String>,
}

impl ProxyConfig {
    /// Upstream's defaults.
    pub fn new(node_name: impl Into<String>) -> Self {
        Self {
            node_name: node_name.into(),
            node_ips: Vec::new(),
            table: "kube-proxy".into(),
            families: IpFamily::BOTH.to_vec(),
            masquerade_all: false,
            masquerade_bit: 14,
            local_traffic: LocalTraffic::Unknown,
            node_port_addresses: Vec::new(),
            pod_bridge: None,
            bind_address_hard_fail: false,
            min_sync_period: Duration::from_secs(1),
            sync_period: Duration::from_secs(30),
            healthz_bind_address: None,
            metrics_bind_address: None,
            configz: None,
        }
    }
}

/// Why the proxy could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("cannot listen at {address} for {what}")]
    Listen {
        address: SocketAddr,
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("list the addresses of this node")]
    Addresses(#[source] Box<ferrite_netlink::Error>),
    #[error("the kernel supports no IP family of the proxy")]
    NoFamily,
}

impl ProxyConfig {
    /// The inputs of each family's table, with the addresses that the node has.
    pub(crate) fn layouts(&self, addresses: &[IpAddr]) -> Vec<LayoutConfig> {
        self.families.iter().map(|family| layout_config(self, *family, addresses)).collect()
    }

    /// Where health-check node ports listen.
    pub(crate) fn health_check_addresses(&self, addresses: &[IpAddr]) -> Vec<IpAddr> {
        health_check_addresses(self, addresses)
    }
}

fn layout_config(config: &ProxyConfig, family: IpFamily, addresses: &[IpAddr]) -> LayoutConfig {
    LayoutConfig {
        family,
        masquerade_mark: 1 << (config.masquerade_bit & 31),
        masquerade_all: config.masquerade_all,
        local_traffic: config.local_traffic.clone(),
        node_ip: config.node_ips.iter().copied().find(|ip| IpFamily::of(*ip) == family),
        node_port_addresses: node_port_addresses(&config.node_port_addresses, family, addresses),
        untracked_bridge: config.pod_bridge.filter(|_| !bridges_are_tracked(family)),
        service_cidrs: Vec::new(),
    }
}

/// Returns true if packets that stay on a bridge pass connection tracking (br_netfilter).
fn bridges_are_tracked(family: IpFamily) -> bool {
    let file = match family {
        IpFamily::V4 => "/proc/sys/net/bridge/bridge-nf-call-iptables",
        IpFamily::V6 => "/proc/sys/net/bridge/bridge-nf-call-ip6tables",
    };
    std::fs::read_to_string(file).is_ok_and(|value| value.trim() == "1")
}

/// As upstream: no range of the family, or one of everything, means all addresses.
fn node_port_addresses(ranges: &[Cidr], family: IpFamily, addresses: &[IpAddr]) -> NodePortAddresses {
    let own: Vec<Cidr> = ranges.iter().copied().filter(|range| range.family() == family).collect();
    if own.is_empty() || own.iter().any(|range| range.prefix() == 0) {
        return NodePortAddresses::All;
    }
    let chosen = addresses.iter().copied().filter(|ip| own.iter().any(|range| range.contains(*ip)));
    NodePortAddresses::Only(chosen.collect())
}

fn health_check_addresses(config: &ProxyConfig, addresses: &[IpAddr]) -> Vec<IpAddr> {
    let mut chosen = BTreeSet::new();
    for family in &config.families {
        match node_port_addresses(&config.node_port_addresses, *family, addresses) {
            NodePortAddresses::Only(only) => chosen.extend(only),
            NodePortAddresses::All => {
                chosen.insert(match family {
                    IpFamily::V4 => Ipv4Addr::UNSPECIFIED.into(),
                    IpFamily::V6 => std::net::Ipv6Addr::UNSPECIFIED.into(),
                });
            }
        }
    }
    chosen.into_iter().collect()
}

/// All addresses of this node.
pub(crate) async fn node_addresses() -> Result<Vec<IpAddr>, ProxyError> {
    let failed = |error| ProxyError::Addresses(Box::new(error));
    let conn = ferrite_netlink::Connection::new().map_err(failed)?;
    let addresses = conn.get_addresses().await.map_err(failed)?;
    Ok(addresses.iter().map(|entry| entry.address).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_checks_listen_in_every_family() {
        let addresses: Vec<IpAddr> = ["10.0.0.5", "fd00::5"].map(|text| text.parse().unwrap()).into();
        let of = |ranges: &[&str]| {
            let node_port_addresses = ranges.iter().map(|text| text.parse().unwrap()).collect();
            let config = ProxyConfig { node_port_addresses, ..ProxyConfig::new("node") };
            let chosen = config.health_check_addresses(&addresses);
            chosen.iter().map(IpAddr::to_string).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), ["0.0.0.0", "::"]);
        assert_eq!(of(&["10.0.0.0/8"]), ["10.0.0.5", "::"]);
        assert_eq!(of(&["10.0.0.0/8", "fd00::/8"]), ["10.0.0.5", "fd00::5"]);
    }

    #[test]
    fn node_ports_answer_at_addresses_in_the_ranges() {
        let addresses: Vec<IpAddr> =
            ["127.0.0.1", "192.0.2.1", "10.0.0.5", "fd00::5"].map(|text| text.parse().unwrap()).into();
        type Row<'a> = (&'a [&'a str], IpFamily, Option<&'a [&'a str]>);
        let rows: [Row; 5] = [
            (&[], IpFamily::V4, None),
            (&["fd00::/8"], IpFamily::V4, None),
            (&["0.0.0.0/0", "10.0.0.0/8"], IpFamily::V4, None),
            (&["10.0.0.0/8", "192.0.2.0/24"], IpFamily::V4, Some(&["192.0.2.1", "10.0.0.5"])),
            (&["10.0.0.0/8", "fd00::/8"], IpFamily::V6, Some(&["fd00::5"])),
        ];
        for (ranges, family, want) in rows {
            let parsed: Vec<Cidr> = ranges.iter().map(|text| text.parse().unwrap()).collect();
            let want = want.map_or(NodePortAddresses::All, |list| {
                NodePortAddresses::Only(list.iter().map(|text| text.parse().unwrap()).collect())
            });
            assert_eq!(node_port_addresses(&parsed, family, &addresses), want, "{ranges:?}");
        }
    }
}
