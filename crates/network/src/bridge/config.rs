//! The settings of a pod network and of one sandbox in it.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::{Cidrs, IpFamily, NetworkError};

/// A link with a smaller MTU has no IPv6.
const LEAST_IPV6_MTU: u32 = 1280;
/// The pod's end of the pair.
pub(super) const POD_LINK: &str = "eth0";

/// The configuration of a [`Bridge`](super::Bridge).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeConfig {
    /// The name of the bridge link, at most 15 characters.
    pub name: String,
    /// This node's ranges; the first address of each is the gateway. Pods have an address of each.
    pub pod_cidrs: Cidrs,
    /// The ranges of all pods of the cluster; they cover `pod_cidrs`.
    pub cluster_cidrs: Cidrs,
    /// The ranges of all services, where there are any.
    pub service_cidrs: Option<Cidrs>,
    /// A directory for reservations and the record of what was made. Must survive reboots.
    pub state: PathBuf,
    /// The MTU of the bridge and the pods' interfaces.
    pub mtu: u32,
    /// True if packets between pods of this node pass the packet filter and connection tracking, also where the
    /// kernel leaves those out for packets that stay on a bridge.
    pub routed: bool,
}

impl BridgeConfig {
    pub(super) fn check(&self) -> Result<(), NetworkError> {
        let fail = |text: String| Err(NetworkError::Config(text));
        let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if !(1..=15).contains(&self.name.len()) || !self.name.bytes().all(good) {
            return fail(format!("bridge name {:?} is not 1 to 15 letters, digits, '-' or '_'", self.name));
        }
        for pods in self.pod_cidrs.iter() {
            if pods.prefix() > pods.family().bits() - 2 {
                return fail(format!("pod CIDR {pods} has no room for a gateway and a pod"));
            }
            if !self.cluster_cidrs.of(pods.family()).is_some_and(|cluster| cluster.covers(*pods)) {
                return fail(format!("pod CIDR {pods} is not inside the cluster's {}", self.cluster_cidrs));
            }
        }
        for service in self.service_cidrs.iter().flat_map(Cidrs::iter) {
            if let Some(cluster) = self.cluster_cidrs.iter().find(|cluster| cluster.overlaps(*service)) {
                return fail(format!("service CIDR {service} and cluster CIDR {cluster} overlap"));
            }
        }
        let least = if self.pod_cidrs.of(IpFamily::V6).is_some() { LEAST_IPV6_MTU } else { 576 };
        if self.mtu < least {
            return fail(format!("MTU {} is less than {least}", self.mtu));
        }
        if !(576..=65_535).contains(&self.mtu) {
            return fail(format!("MTU {} is not between 576 and 65535", self.mtu));
        }
        Ok(())
    }
}

/// The settings of one further network of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The interface's name in the sandbox.
    pub link: String,
    /// The address of the primary family it must have; any free one when not given.
    pub address: Option<IpAddr>,
    /// True if the sandbox's way to everywhere else is through this network.
    pub default_route: bool,
}

impl Default for Port {
    /// The only network of a sandbox.
    fn default() -> Self {
        Self { link: POD_LINK.to_owned(), address: None, default_route: true }
    }
}

/// Whom a network lets in and out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Members reach everything; nobody beyond this node or on its other networks can begin a connection to
    /// them.
    Incoming,
    /// Members reach each other and the node, nothing else.
    Internal,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_that_cannot_work() {
        let good = BridgeConfig {
            name: "ferrite0".into(),
            pod_cidrs: "10.244.0.0/24,fd00:1::/64".parse().unwrap(),
            cluster_cidrs: "10.244.0.0/16,fd00:1::/56".parse().unwrap(),
            service_cidrs: Some("10.96.0.0/12,fd00:2::/108".parse().unwrap()),
            state: "/nonexistent".into(),
            mtu: 1500,
            routed: true,
        };
        good.check().unwrap();
        let rows: Vec<(&str, BridgeConfig)> = vec![
            ("bridge name", BridgeConfig { name: "a/b".into(), ..good.clone() }),
            ("bridge name", BridgeConfig { name: "x".repeat(16), ..good.clone() }),
            ("no room", BridgeConfig { pod_cidrs: "10.244.0.0/31".parse().unwrap(), ..good.clone() }),
            ("no room", BridgeConfig { pod_cidrs: "fd00:1::/127".parse().unwrap(), ..good.clone() }),
            ("not inside", BridgeConfig { pod_cidrs: "10.1.0.0/24".parse().unwrap(), ..good.clone() }),
            ("not inside", BridgeConfig { cluster_cidrs: "10.244.0.0/16".parse().unwrap(), ..good.clone() }),
            (
                "overlap",
                BridgeConfig { service_cidrs: Some("10.244.128.0/17".parse().unwrap()), ..good.clone() },
            ),
            (
                "overlap",
                BridgeConfig { service_cidrs: Some("fd00:1::/108".parse().unwrap()), ..good.clone() },
            ),
            ("less than 1280", BridgeConfig { mtu: 1279, ..good.clone() }),
            ("MTU", BridgeConfig { mtu: 60, ..good.clone() }),
        ];
        for (want, config) in rows {
            let text = config.check().unwrap_err().to_string();
            assert!(text.contains(want), "{text}");
        }
    }
}
