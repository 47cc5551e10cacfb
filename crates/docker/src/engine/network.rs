//! A container's way to its networks: a bridge for each, opened for as long as a change takes.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use ferrite_cri::with_causes;
use ferrite_network::{
    Attachment, Bridge, BridgeConfig, Cidr, Cidrs, Isolation, NetworkError, PodNetwork, PodRef, Port,
};

use super::hosts::{Endpoint, base_hosts};
use super::networks::Network;
use super::{Engine, EngineError, Result, blocking};
use crate::record::{self, Container, Joined, Lock};

const MTU: u32 = 1500;
/// File with the result of [`Engine::subnet`].
const SUBNET: &str = "subnet";

/// The ranges docker tries, in its order.
fn candidates() -> impl Iterator<Item = (Ipv4Addr, u8)> {
    let large = (17..=31).map(|second| (Ipv4Addr::new(172, second, 0, 0), 16));
    large.chain((0..=240).step_by(16).map(|third| (Ipv4Addr::new(192, 168, third, 0), 20)))
}

/// The first range that overlaps no route of the host and none that is `taken`. `routes` is
/// `/proc/net/route`.
fn free_range(routes: &str, taken: &[Cidr]) -> Option<Cidr> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(u32::from_be);
    let routed: Vec<Cidr> = routes
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (network, mask) = (number(fields.get(1)?)?, number(fields.get(7)?)?);
            // The default route covers everything and means nothing here.
            (mask != 0)
                .then(|| Cidr::new(Ipv4Addr::from_bits(network).into(), mask.count_ones() as u8).ok())?
        })
        .collect();
    candidates()
        .filter_map(|(address, prefix)| Cidr::new(address.into(), prefix).ok())
        .find(|range| !routed.iter().chain(taken).any(|known| overlap(*known, *range)))
}

pub(super) fn overlap(a: Cidr, b: Cidr) -> bool {
    a.covers(b) || b.covers(a)
}

fn gateway_of(range: Cidr) -> Option<Ipv4Addr> {
    range.nth(1).and_then(v4)
}

/// Networks of containers are of IPv4.
fn v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(_) => None,
    }
}

fn internal(error: &NetworkError) -> EngineError {
    EngineError::Internal(with_causes(error))
}

impl Engine {
    /// A range for a new network.
    pub(super) fn new_range(&self) -> Result<Cidr> {
        let routes = std::fs::read_to_string("/proc/self/net/route").unwrap_or_default();
        let mut taken: Vec<Cidr> = self.user_networks()?.iter().filter_map(|n| n.subnet).collect();
        taken.extend(self.default_range());
        free_range(&routes, &taken).ok_or_else(|| {
            EngineError::Internal(
                "could not find an available, non-overlapping IPv4 address pool among the defaults to assign to \
                 the network"
                    .into(),
            )
        })
    }

    /// The default network's range, once it has one.
    pub(super) fn default_range(&self) -> Option<Cidr> {
        std::fs::read_to_string(self.paths.network().join(SUBNET)).ok()?.trim().parse().ok()
    }

    /// The gateway of the default network, once there is one.
    pub(super) fn gateway(&self) -> Option<Ipv4Addr> {
        gateway_of(self.default_range()?)
    }

    /// The gateway and range of any network.
    pub(super) fn gateway_on(&self, network: &Network) -> Option<(Ipv4Addr, Cidr)> {
        let range = if network.is_predefined() { self.default_range()? } else { network.subnet? };
        Some((gateway_of(range)?, range))
    }

    /// The lock for changes of networks and of their members; others wait.
    pub(super) async fn turn(&self) -> Result<Lock> {
        let directory = self.paths.network();
        blocking(move || {
            ferrite_hostfs::private_dir(&directory).map_err(EngineError::io("create network state"))?;
            record::lock(&directory.join("turn")).map_err(EngineError::io("lock the network"))
        })
        .await
    }

    /// Opens a network's bridge for one change.
    pub(super) async fn bridge(&self, turn: &Lock, network: &Network) -> Result<Arc<Bridge>> {
        if !network.is_predefined() && !forwarding() {
            // The bridge that turns forwarding on turns it off when it goes. The default network never
            // goes.
            Box::pin(self.open_bridge(turn, &self.default_network())).await?;
        }
        Box::pin(self.open_bridge(turn, network)).await
    }

    async fn open_bridge(&self, _turn: &Lock, network: &Network) -> Result<Arc<Bridge>> {
        let range = match network.subnet {
            Some(range) => range,
            None => self.choose_default_range()?,
        };
        let config = BridgeConfig {
            name: network.link(&self.paths),
            pod_cidrs: Cidrs::single(range),
            cluster_cidrs: Cidrs::single(range),
            service_cidrs: None,
            state: self.network_directory(network).join("bridge"),
            mtu: MTU,
            routed: false,
        };
        let bridge = Bridge::open(config).await.map_err(|error| internal(&error))?;
        let isolation = if network.internal { Isolation::Internal } else { Isolation::Incoming };
        if let Err(error) = bridge.isolate(isolation).await {
            // A network that must not be left is none without this; others only lose a wall between them.
            if network.internal {
                return Err(internal(&error));
            }
            tracing::warn!(error = with_causes(&error), network = network.name, "it is not set apart");
        }
        Ok(bridge)
    }

    pub(super) fn choose_default_range(&self) -> Result<Cidr> {
        if let Some(known) = self.default_range() {
            return Ok(known);
        }
        let range = self.new_range()?;
        record::write(&self.paths.network().join(SUBNET), range.to_string().as_bytes())
            .map_err(EngineError::io("record the network"))?;
        Ok(range)
    }

    /// The networks a container is to be on, the first of them first.
    fn networks_of(&self, container: &Container) -> Result<Vec<(Network, Joined)>> {
        if !container.host.is_on_networks() {
            return Ok(Vec::new());
        }
        let mut wanted = container.networks.clone();
        if wanted.is_empty() {
            // It has left them all: a start begins with the one it was made for.
            let network = self.find_network(&container.host.network)?;
            wanted.push(Joined { network: network.id, ..Default::default() });
        }
        wanted.into_iter().map(|joined| Ok((self.find_network(&joined.network)?, joined))).collect()
    }

    /// Puts a container's namespace on a network.
    pub(super) async fn join(
        &self,
        turn: &Lock,
        container: &Container,
        netns: &Path,
        (network, joined): (&Network, &Joined),
        (link, default_route): (String, bool),
    ) -> Result<Ipv4Addr> {
        let mut endpoint = Endpoint { container: container.id.clone(), link: link.clone(), address: None };
        // Before anything is made, so that the remains of a killed command are found.
        self.write_endpoint(turn, network, &endpoint)?;
        let bridge = self.bridge(turn, network).await?;
        let pod = PodRef {
            namespace: "docker".into(),
            name: container.name.clone(),
            uid: container.id.clone(),
            ..PodRef::default()
        };
        let port = Port { link, address: joined.ip.map(IpAddr::V4), default_route };
        let addresses = Box::pin(bridge.attach_port(&owner(container, network), netns, &pod, &port))
            .await
            .map_err(|error| internal(&error))?;
        let address = v4(*addresses.primary())
            .ok_or_else(|| EngineError::Internal(format!("{addresses} is no address of IPv4")))?;
        endpoint.address = Some(address);
        self.write_endpoint(turn, network, &endpoint)?;
        Ok(address)
    }

    /// Takes a container off a network, whatever of it is there.
    pub(super) async fn leave(
        &self,
        turn: &Lock,
        container: &Container,
        netns: &Path,
        network: &Network,
    ) -> Result<()> {
        let bridge = self.bridge(turn, network).await?;
        bridge.detach(&owner(container, network), netns).await.map_err(|error| internal(&error))?;
        self.remove_endpoint(turn, network, &container.id)
    }

    async fn leave_all(&self, turn: &Lock, container: &Container, netns: &Path) -> Result<()> {
        let networks: Vec<Network> =
            self.endpoints_of(&container.id)?.into_iter().map(|(network, _)| network).collect();
        for network in &networks {
            self.leave(turn, container, netns, network).await?;
        }
        self.refresh_hosts(turn, &networks)
    }

    async fn join_all(&self, container: &Container, netns: &Path) -> Result<Vec<IpAddr>> {
        let turn = self.turn().await?;
        let wanted = self.networks_of(container)?;
        let way_out = wanted.iter().position(|(network, _)| !network.internal);
        let mut addresses = Vec::new();
        for (index, (network, joined)) in wanted.iter().enumerate() {
            let port = (format!("eth{index}"), way_out == Some(index));
            match self.join(&turn, container, netns, (network, joined), port).await {
                Ok(address) => addresses.push(address.into()),
                Err(error) => {
                    self.leave_all(&turn, container, netns).await?;
                    return Err(error);
                }
            }
        }
        // The file a running container had stays the same one: it is mounted.
        std::fs::write(self.hosts_path(container), base_hosts(container, self.gateway()))
            .map_err(EngineError::io("write /etc/hosts"))?;
        self.refresh_hosts_of(&turn, container)?;
        let networks: Vec<Network> = wanted.into_iter().map(|(network, _)| network).collect();
        self.refresh_hosts(&turn, &networks)?;
        Ok(addresses)
    }
}

fn forwarding() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").is_ok_and(|text| text.trim() != "0")
}

/// The name of a container's reservation on a network.
fn owner(container: &Container, network: &Network) -> String {
    format!("{}.{}", container.id, &network.id[..12.min(network.id.len())])
}

/// A container's networks, as its runtime asks for them.
pub(super) struct ContainerNetwork {
    pub(super) engine: Engine,
    pub(super) container: Container,
}

fn failed(error: &EngineError) -> NetworkError {
    NetworkError::Conflict(error.to_string())
}

#[async_trait]
impl PodNetwork for ContainerNetwork {
    async fn attach(
        &self,
        _: &str,
        netns: &Path,
        _: &PodRef,
    ) -> std::result::Result<Attachment, NetworkError> {
        let ips =
            Box::pin(self.engine.join_all(&self.container, netns)).await.map_err(|error| failed(&error))?;
        Ok(Attachment { ips })
    }

    async fn detach(&self, _: &str, netns: &Path) -> std::result::Result<(), NetworkError> {
        let left = async {
            let turn = self.engine.turn().await?;
            self.engine.leave_all(&turn, &self.container, netns).await
        };
        Box::pin(left).await.map_err(|error| failed(&error))
    }

    fn ready(&self) -> std::result::Result<(), ferrite_network::NotReady> {
        Ok(())
    }
}

/// Where a running container's network namespace is pinned.
pub(super) fn namespace_of(view: &super::View) -> Option<PathBuf> {
    view.state.task.as_ref().filter(|task| task.runs()).map(|task| task.network_namespace())
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
        for (routes, taken, want) in [
            (String::new(), "", "172.17.0.0/16"),
            (format!("{head}{default}"), "", "172.17.0.0/16"),
            (format!("{head}{default}{docker0}"), "", "172.18.0.0/16"),
            (format!("{head}{default}{docker0}"), "172.18.4.0/24", "172.19.0.0/16"),
            (format!("{head}{wide}"), "", "192.168.0.0/20"),
        ] {
            let taken: Vec<Cidr> = taken.parse().into_iter().collect();
            let range = free_range(&routes, &taken).map(|range| range.to_string());
            assert_eq!(range.as_deref(), Some(want), "{routes}");
        }
    }
}
