//! The `bridge` network: one bridge per engine, opened for as long as a change takes.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use ferrite_cri::with_causes;
use ferrite_network::{Attachment, Bridge, BridgeConfig, Cidr, NetworkError, PodNetwork, PodRef};

use super::{Engine, EngineError, Result, blocking};
use crate::record::{self, Container, Lock};

const MTU: u32 = 1500;
/// What [`subnet`] chose is kept here.
const SUBNET: &str = "subnet";

/// The ranges docker tries, in its order.
fn candidates() -> impl Iterator<Item = (Ipv4Addr, u8)> {
    let large = (17..=31).map(|second| (Ipv4Addr::new(172, second, 0, 0), 16));
    large.chain((0..=240).step_by(16).map(|third| (Ipv4Addr::new(192, 168, third, 0), 20)))
}

/// The first range that overlaps no route of the host. `routes` is `/proc/net/route`.
fn free_range(routes: &str) -> Option<Cidr> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(u32::from_be);
    let taken: Vec<Cidr> = routes
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (network, mask) = (number(fields.get(1)?)?, number(fields.get(7)?)?);
            // The default route covers everything and means nothing here.
            (mask != 0).then(|| Cidr::new(network.into(), mask.count_ones() as u8).ok())?
        })
        .collect();
    candidates()
        .filter_map(|(address, prefix)| Cidr::new(address, prefix).ok())
        .find(|range| !taken.iter().any(|known| known.covers(*range) || range.covers(*known)))
}

impl Engine {
    /// The containers' range, chosen when the first of them starts.
    pub(super) fn subnet(&self) -> Result<Cidr> {
        let directory = self.paths.network();
        std::fs::create_dir_all(&directory).map_err(EngineError::io("create network state"))?;
        let path = directory.join(SUBNET);
        if let Some(known) = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()) {
            return Ok(known);
        }
        let routes = std::fs::read_to_string("/proc/self/net/route").unwrap_or_default();
        let range = free_range(&routes)
            .ok_or_else(|| EngineError::Internal("could not find an available IPv4 address pool".into()))?;
        record::write(&path, range.to_string().as_bytes()).map_err(EngineError::io("record the network"))?;
        Ok(range)
    }

    /// The gateway of the bridge, once there is one.
    pub(super) fn gateway(&self) -> Option<(Ipv4Addr, Cidr)> {
        let text = std::fs::read_to_string(self.paths.network().join(SUBNET)).ok()?;
        let range: Cidr = text.trim().parse().ok()?;
        Some((range.nth(1)?, range))
    }

    /// Opens the bridge for one change; others wait.
    async fn bridge(&self) -> Result<(Lock, std::sync::Arc<Bridge>)> {
        let engine = self.clone();
        let (lock, range) = blocking(move || {
            let directory = engine.paths.network();
            std::fs::create_dir_all(&directory).map_err(EngineError::io("create network state"))?;
            let lock = record::lock(&directory.join("turn")).map_err(EngineError::io("lock the network"))?;
            Ok((lock, engine.subnet()?))
        })
        .await?;
        let config = BridgeConfig {
            name: self.paths.bridge(),
            pod_cidr: range,
            cluster_cidr: range,
            service_cidr: None,
            state: self.paths.network().join("bridge"),
            mtu: MTU,
        };
        let bridge =
            Bridge::open(config).await.map_err(|error| EngineError::Internal(with_causes(&error)))?;
        Ok((lock, bridge))
    }
}

/// A container's way to its network.
pub(super) struct ContainerNetwork {
    pub(super) engine: Engine,
    /// `none` has only a loopback interface.
    pub(super) connected: bool,
    /// Written once the address is known.
    pub(super) hosts: PathBuf,
    pub(super) container: Container,
}

fn failed(error: &EngineError) -> NetworkError {
    NetworkError::Conflict(error.to_string())
}

#[async_trait]
impl PodNetwork for ContainerNetwork {
    async fn attach(
        &self,
        sandbox: &str,
        netns: &Path,
        pod: &PodRef,
    ) -> std::result::Result<Attachment, NetworkError> {
        let mut ips = Vec::new();
        if self.connected {
            let (_lock, bridge) = self.engine.bridge().await.map_err(|error| failed(&error))?;
            ips = bridge.attach(sandbox, netns, pod).await?.ips;
        }
        let gateway = self.engine.gateway().map(|(gateway, _)| gateway.to_string());
        let text = hosts_file(&self.container, ips.first().map(ToString::to_string).as_deref(), gateway);
        std::fs::write(&self.hosts, text).map_err(|source| NetworkError::State {
            path: self.hosts.clone(),
            what: "write",
            source,
        })?;
        Ok(Attachment { ips })
    }

    async fn detach(&self, sandbox: &str, netns: &Path) -> std::result::Result<(), NetworkError> {
        if !self.connected {
            return Ok(());
        }
        let (_lock, bridge) = self.engine.bridge().await.map_err(|error| failed(&error))?;
        bridge.detach(sandbox, netns).await
    }

    fn ready(&self) -> std::result::Result<(), String> {
        Ok(())
    }
}

/// `/etc/hosts` of a container with that address.
pub(super) fn hosts_file(container: &Container, address: Option<&str>, gateway: Option<String>) -> String {
    let mut text = String::from(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\n\
         ff00::0\tip6-mcastprefix\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n",
    );
    for entry in &container.host.extra_hosts {
        if let Some((name, address)) = entry.split_once([':', '=']) {
            let host = gateway.clone().unwrap_or_else(|| "127.0.0.1".into());
            let address = if address == "host-gateway" { host } else { address.to_owned() };
            text.push_str(&format!("{address}\t{name}\n"));
        }
    }
    if let Some(address) = address {
        text.push_str(&format!("{address}\t{}\n", container.config.hostname));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";
        let default = "eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        let docker0 = "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
        let wide = "vpn0\t000010AC\t00000000\t0001\t0\t0\t0\t0000F0FF\t0\t0\t0\n";
        for (routes, want) in [
            (String::new(), "172.17.0.0/16"),
            (format!("{head}{default}"), "172.17.0.0/16"),
            (format!("{head}{default}{docker0}"), "172.18.0.0/16"),
            (format!("{head}{wide}"), "192.168.0.0/20"),
        ] {
            assert_eq!(free_range(&routes).map(|range| range.to_string()).as_deref(), Some(want), "{routes}");
        }
    }

    #[test]
    fn hosts() {
        let mut container = Container::default();
        container.config.hostname = "abc".into();
        container.host.extra_hosts = vec!["db:10.0.0.1".into(), "up:host-gateway".into()];
        let text = hosts_file(&container, Some("172.17.0.2"), Some("172.17.0.1".into()));
        for line in ["10.0.0.1\tdb\n", "172.17.0.1\tup\n", "172.17.0.2\tabc\n", "127.0.0.1\tlocalhost\n"] {
            assert!(text.contains(line), "{text}");
        }
    }
}
