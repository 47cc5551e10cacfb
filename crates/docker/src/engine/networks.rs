//! Networks people make: kept, found, joined, left, removed.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use ferrite_cri::with_causes;
use ferrite_network::{Bridge, Cidr};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::network::{namespace_of, overlap};
use super::{Engine, EngineError, Result};
use crate::names;
use crate::paths::Paths;
use crate::record::{self, Container, Joined};
use crate::units;

const RECORD: &str = "network.json";
/// The networks every engine has, and their drivers.
const PREDEFINED: &[(&str, &str)] = &[("bridge", "bridge"), ("host", "host"), ("none", "null")];

/// A network containers can be on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    pub id: String,
    pub name: String,
    pub driver: String,
    /// Nanoseconds since 1970; 0 for those every engine has.
    pub created: i64,
    /// None for those every engine has: theirs is chosen when it is needed.
    pub subnet: Option<Cidr>,
    /// Members reach each other and nothing else.
    pub internal: bool,
    pub labels: BTreeMap<String, String>,
    pub options: BTreeMap<String, String>,
}

impl Network {
    /// Returns true if the network always exists.
    pub fn is_predefined(&self) -> bool {
        PREDEFINED.iter().any(|(name, _)| *name == self.name)
    }

    /// The name of its bridge.
    pub(super) fn link(&self, paths: &Paths) -> String {
        if self.is_predefined() {
            paths.bridge()
        } else {
            format!("br-{}", &self.id[..12.min(self.id.len())])
        }
    }
}

/// The description of a network to make.
#[derive(Debug, Clone, Default)]
pub struct NetworkRequest {
    pub name: String,
    /// Empty is `bridge`.
    pub driver: String,
    /// In CIDR notation; any free range when not given.
    pub subnet: Option<String>,
    pub gateway: Option<Ipv4Addr>,
    pub internal: bool,
    pub labels: BTreeMap<String, String>,
    pub options: BTreeMap<String, String>,
}

fn invalid(text: impl Into<String>) -> EngineError {
    EngineError::Invalid(text.into())
}

fn range_of(request: &NetworkRequest) -> Result<Option<Cidr>> {
    let Some(text) = &request.subnet else {
        return match request.gateway {
            Some(_) => Err(invalid("invalid network config: no matching subnet for gateway")),
            None => Ok(None),
        };
    };
    let range: Option<Cidr> = text.parse().ok().filter(|range: &Cidr| range.network().is_ipv4());
    let range = range.ok_or_else(|| invalid(format!("invalid subnet {text}: not an IPv4 CIDR")))?;
    if range.prefix() > 30 {
        return Err(invalid(format!("invalid subnet {text}: it has no room for a gateway and a container")));
    }
    match request.gateway {
        Some(gateway) if range.nth(1) != Some(gateway.into()) => Err(invalid(format!(
            "invalid gateway {gateway}: a network's gateway is the first address of its subnet {range}"
        ))),
        _ => Ok(Some(range)),
    }
}

impl Engine {
    fn predefined(&self, name: &str, driver: &str) -> Network {
        // FNV-1a, of the engine's place too: the same at every call, another in another engine.
        let digest = |salt: u8| {
            let place = self.paths.root().as_os_str().as_encoded_bytes();
            let bytes = place.iter().chain(name.as_bytes()).chain(std::iter::once(&salt));
            bytes.fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
        };
        Network {
            id: (0..4).map(|salt| format!("{:016x}", digest(salt))).collect(),
            name: name.to_owned(),
            driver: driver.to_owned(),
            ..Default::default()
        }
    }

    pub(super) fn default_network(&self) -> Network {
        self.predefined("bridge", "bridge")
    }

    pub(super) fn network_directory(&self, network: &Network) -> PathBuf {
        if network.is_predefined() { self.paths.network() } else { self.paths.networks().join(&network.id) }
    }

    /// The networks people made.
    pub(super) fn user_networks(&self) -> Result<Vec<Network>> {
        let entries = match fs::read_dir(self.paths.networks()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(EngineError::io("list networks"))?,
        };
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path.join(RECORD)).ok()?).ok();
        Ok(entries.flatten().filter_map(|entry| read(entry.path())).collect())
    }

    /// Every network, by name.
    pub fn networks(&self) -> Result<Vec<Network>> {
        let mut all = self.user_networks()?;
        all.extend(PREDEFINED.iter().map(|(name, driver)| self.predefined(name, driver)));
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The network a name, an id or the beginning of one means.
    pub fn find_network(&self, name: &str) -> Result<Network> {
        let all = self.networks()?;
        let exact = all.iter().find(|n| n.id == name).or_else(|| all.iter().find(|n| n.name == name));
        if let Some(network) = exact {
            return Ok(network.clone());
        }
        let mut matching = all.iter().filter(|network| !name.is_empty() && network.id.starts_with(name));
        match (matching.next(), matching.next()) {
            (Some(network), None) => Ok(network.clone()),
            (Some(_), Some(_)) => Err(invalid(format!("network {name} is ambiguous"))),
            _ => Err(EngineError::NoSuchNetwork(name.to_owned())),
        }
    }

    /// Makes a network. Its bridge is there from the first container on.
    pub async fn create_network(&self, request: NetworkRequest) -> Result<Network> {
        let name = request.name.as_str();
        let single = name.len() == 1 && name.bytes().all(|b| b.is_ascii_alphanumeric());
        if !names::is_valid(name) && !single {
            return Err(invalid(format!(
                "invalid network name {name:?}: only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed"
            )));
        }
        if PREDEFINED.iter().any(|(known, _)| *known == name) || name == "default" {
            return Err(EngineError::Conflict(format!(
                "operation is not permitted on predefined {name} network"
            )));
        }
        if !matches!(request.driver.as_str(), "" | "bridge") {
            return Err(invalid(format!(
                "could not resolve driver {} in registry: only bridge networks can be made",
                request.driver
            )));
        }
        let wanted = range_of(&request)?;
        let _turn = self.turn().await?;
        let known = self.user_networks()?;
        if known.iter().any(|network| network.name == name) {
            return Err(EngineError::Conflict(format!("network with name {name} already exists")));
        }
        let subnet = match wanted {
            Some(range) => {
                let taken = known.iter().filter_map(|network| network.subnet).chain(self.default_range());
                if taken.into_iter().any(|other| overlap(other, range)) {
                    let text = "invalid pool request: Pool overlaps with other one on this address space";
                    return Err(EngineError::Conflict(text.into()));
                }
                range
            }
            None => {
                // The default network's range is the first of them, whichever network is made first.
                self.choose_default_range()?;
                self.new_range()?
            }
        };
        let network = Network {
            id: super::create::new_id(),
            name: request.name,
            driver: "bridge".into(),
            created: units::now(),
            subnet: Some(subnet),
            internal: request.internal,
            labels: request.labels,
            options: request.options,
        };
        let directory = self.network_directory(&network);
        let write = || {
            fs::create_dir_all(&directory)?;
            // Without it there is no network.
            record::write(&directory.join(RECORD), &serde_json::to_vec(&network)?)
        };
        write().map_err(EngineError::io("record network"))?;
        self.note_network(&network, "create", None);
        Ok(network)
    }

    /// Removes a network nobody is on.
    pub async fn remove_network(&self, name: &str) -> Result<Network> {
        // A container that ended unnoticed is on no network. Settled before the network lock is taken,
        // because settling takes the container's lock first.
        for endpoint in self.endpoints(&self.find_network(name)?) {
            self.settle(&endpoint.container).await?;
        }
        let turn = self.turn().await?;
        let network = self.find_network(name)?;
        if network.is_predefined() {
            let text = format!("{} is a pre-defined network and cannot be removed", network.name);
            return Err(EngineError::Conflict(text));
        }
        for endpoint in self.endpoints(&network) {
            // Left by a removal that was interrupted; its link goes with the bridge.
            if !self.directory(&endpoint.container).exists() {
                self.remove_endpoint(&turn, &network, &endpoint.container)?;
            }
        }
        let endpoints = self.endpoints(&network);
        if !endpoints.is_empty() {
            let named = endpoints.iter().map(|endpoint| {
                let name = self.view(&endpoint.container).map(|view| view.container.name).unwrap_or_default();
                format!("name:{name:?} id:{:?}", &endpoint.container[..12.min(endpoint.container.len())])
            });
            return Err(EngineError::Conflict(format!(
                "error while removing network: network {} has active endpoints ({})",
                network.name,
                named.collect::<Vec<_>>().join(", ")
            )));
        }
        let directory = self.network_directory(&network);
        Bridge::purge(&directory.join("bridge"))
            .await
            .map_err(|error| EngineError::Internal(with_causes(&error)))?;
        ferrite_hostfs::remove_tree(&directory).map_err(EngineError::io("remove network"))?;
        drop(turn);
        self.note_network(&network, "destroy", None);
        Ok(network)
    }

    /// Removes the networks that no container has, running or not; answers their names.
    pub async fn prune_networks(&self, wanted: impl Fn(&Network) -> bool) -> Result<Vec<String>> {
        let used: Vec<String> = self
            .list()?
            .into_iter()
            .flat_map(|view| view.container.networks.into_iter().map(|joined| joined.network))
            .collect();
        let mut removed = Vec::new();
        for network in self.user_networks()? {
            if !used.contains(&network.id) && self.endpoints(&network).is_empty() && wanted(&network) {
                self.remove_network(&network.id).await?;
                removed.push(network.name);
            }
        }
        Ok(removed)
    }

    /// The names of the networks a container is on.
    pub fn network_names(&self, container: &Container) -> Vec<String> {
        if matches!(container.host.network.as_str(), "host" | "none") {
            return vec![container.host.network.clone()];
        }
        let known = self.networks().unwrap_or_default();
        let name = |joined: &Joined| known.iter().find(|n| n.id == joined.network).map(|n| n.name.clone());
        container.networks.iter().filter_map(name).collect()
    }

    /// The networks that a container asks for, with names replaced by ids.
    pub(super) fn resolve_networks(&self, host_network: &str, wanted: Vec<Joined>) -> Result<Vec<Joined>> {
        let mut joined: Vec<Joined> = Vec::new();
        for mut one in wanted {
            let network = self.find_network(&one.network)?;
            check_joinable(&network, &one)?;
            if joined.iter().any(|known| known.network == network.id) {
                return Err(invalid(format!("network {:?} is specified multiple times", network.name)));
            }
            one.network = network.id;
            joined.push(one);
        }
        if joined.is_empty() && !host_network.is_empty() {
            joined.push(Joined { network: self.find_network(host_network)?.id, ..Default::default() });
        }
        Ok(joined)
    }

    /// Puts a container on a network, at once if it runs.
    pub async fn connect(&self, network: &str, name: &str, mut joined: Joined) -> Result<()> {
        let network = self.find_network(network)?;
        let id = self.find(name)?.container.id;
        let (_lock, mut view) = self.locked(&id).await?;
        check_mode(&network, &view.container)?;
        check_joinable(&network, &joined)?;
        if view.container.networks.iter().any(|known| known.network == network.id) {
            return Err(EngineError::Conflict(format!(
                "endpoint with name {} already exists in network {}",
                view.container.name, network.name
            )));
        }
        joined.network = network.id.clone();
        if let Some(netns) = namespace_of(&view) {
            let turn = self.turn().await?;
            let present = self.endpoints_of(&id)?;
            let links: Vec<String> = present.iter().map(|(_, endpoint)| endpoint.link.clone()).collect();
            let link =
                (0..).map(|n| format!("eth{n}")).find(|link| !links.contains(link)).unwrap_or_default();
            let way_out = !network.internal && present.iter().all(|(other, _)| other.internal);
            // Recorded first: the names it has there are read from the record.
            view.container.networks.push(joined.clone());
            self.write_record(&view.container)?;
            let made = self.join(&turn, &view.container, &netns, (&network, &joined), (link, way_out)).await;
            if let Err(error) = made {
                let _ = self.leave(&turn, &view.container, &netns, &network).await;
                view.container.networks.pop();
                self.write_record(&view.container)?;
                return Err(error);
            }
            self.refresh_hosts_of(&turn, &view.container)?;
            self.refresh_hosts(&turn, std::slice::from_ref(&network))?;
        } else {
            view.container.networks.push(joined);
            self.write_record(&view.container)?;
        }
        self.note_network(&network, "connect", Some(&id));
        Ok(())
    }

    /// Takes a container off a network.
    pub async fn disconnect(&self, network: &str, name: &str) -> Result<()> {
        let network = self.find_network(network)?;
        let id = self.find(name)?.container.id;
        let (_lock, mut view) = self.locked(&id).await?;
        if network.driver == "host" {
            let text = "container cannot be disconnected from host network or connected to host network";
            return Err(EngineError::Conflict(text.into()));
        }
        let before = view.container.networks.len();
        view.container.networks.retain(|joined| joined.network != network.id);
        if view.container.networks.len() == before {
            return Err(EngineError::Conflict(format!(
                "container {id} is not connected to network {}",
                network.name
            )));
        }
        if let Some(netns) = namespace_of(&view) {
            let turn = self.turn().await?;
            self.leave(&turn, &view.container, &netns, &network).await?;
            let rest = self.endpoints_of(&id)?;
            if let Some((way_out, endpoint)) = rest.iter().find(|(other, _)| !other.internal) {
                let bridge = self.bridge(&turn, way_out).await?;
                bridge
                    .route_out(&netns, &endpoint.link)
                    .await
                    .map_err(|error| EngineError::Internal(with_causes(&error)))?;
            }
            self.refresh_hosts_of(&turn, &view.container)?;
            self.refresh_hosts(&turn, std::slice::from_ref(&network))?;
        }
        self.write_record(&view.container)?;
        self.note_network(&network, "disconnect", Some(&id));
        Ok(())
    }

    fn write_record(&self, container: &Container) -> Result<()> {
        container.write(&self.directory(&container.id)).map_err(EngineError::io("record container"))
    }

    /// `network inspect`.
    pub fn inspect_network(&self, name: &str) -> Result<Value> {
        let network = self.find_network(name)?;
        let range = self.gateway_on(&network).filter(|_| network.driver == "bridge");
        let config = range.map_or(
            json!([]),
            |(gateway, range)| json!([{"Subnet": range.to_string(), "Gateway": gateway.to_string()}]),
        );
        let mut containers = Map::new();
        for endpoint in self.endpoints(&network) {
            let Ok(view) = self.view(&endpoint.container) else { continue };
            let prefix = range.map_or(0, |(_, range)| range.prefix());
            let address = endpoint.address.map_or_else(String::new, |a| format!("{a}/{prefix}"));
            containers.insert(
                endpoint.container.clone(),
                json!({
                    "Name": view.container.name, "EndpointID": "", "IPv4Address": address, "IPv6Address": "",
                    "MacAddress": endpoint.address.map(hardware_address).unwrap_or_default(),
                }),
            );
        }
        Ok(json!({
            "Name": network.name, "Id": network.id, "Created": units::rfc3339(network.created),
            "Scope": "local", "Driver": network.driver, "EnableIPv4": true, "EnableIPv6": false,
            "IPAM": {"Driver": "default", "Options": {}, "Config": config},
            "Internal": network.internal, "Attachable": false, "Ingress": false, "ConfigFrom": {"Network": ""},
            "ConfigOnly": false, "Containers": containers, "Options": network.options, "Labels": network.labels,
        }))
    }
}

/// A container's hardware address follows from its IP address.
pub(super) fn hardware_address(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("0a:58:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

fn check_joinable(network: &Network, joined: &Joined) -> Result<()> {
    if !network.is_predefined() {
        if let (Some(ip), Some(range)) = (joined.ip, network.subnet)
            && !range.contains(ip.into())
        {
            return Err(invalid(format!(
                "invalid config for network {}: no configured subnet contains IP address {ip}",
                network.name
            )));
        }
        return Ok(());
    }
    if !joined.aliases.is_empty() {
        return Err(invalid(
            "network-scoped alias is supported only for containers in user defined networks",
        ));
    }
    if joined.ip.is_some() {
        return Err(invalid("user specified IP address is supported on user defined networks only"));
    }
    Ok(())
}

/// Checks that the network mode of the container allows further networks.
fn check_mode(network: &Network, container: &Container) -> Result<()> {
    let fail = |text: &str| Err(EngineError::Conflict(text.to_owned()));
    match (container.host.network.as_str(), network.driver.as_str()) {
        ("host", _) | (_, "host") => {
            fail("container cannot be disconnected from host network or connected to host network")
        }
        ("none", _) | (_, "null") => fail(
            "container cannot be connected to multiple networks with one of the networks in private (none) mode",
        ),
        (shared, _) if shared.starts_with("container:") => fail(
            "container sharing network namespace with another container or host cannot be connected to any other \
             network",
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_cannot_be() {
        let request = |subnet: Option<&str>, gateway: Option<&str>| NetworkRequest {
            subnet: subnet.map(str::to_owned),
            gateway: gateway.map(|g| g.parse().unwrap()),
            ..Default::default()
        };
        for (subnet, gateway, good) in [
            (None, None, true),
            (Some("10.1.0.0/24"), None, true),
            (Some("10.1.0.0/24"), Some("10.1.0.1"), true),
            (Some("10.1.0.0/24"), Some("10.1.0.9"), false),
            (None, Some("10.1.0.1"), false),
            (Some("10.1.0.0/31"), None, false),
            (Some("nonsense"), None, false),
            (Some("fd00::/64"), None, false),
        ] {
            assert_eq!(range_of(&request(subnet, gateway)).is_ok(), good, "{subnet:?} {gateway:?}");
        }
    }

    #[test]
    fn who_may_join() {
        let bridge = Network { name: "bridge".into(), driver: "bridge".into(), ..Default::default() };
        let own = Network {
            name: "own".into(),
            driver: "bridge".into(),
            subnet: "10.1.0.0/24".parse().ok(),
            ..Default::default()
        };
        let aliased = Joined { aliases: vec!["x".into()], ..Default::default() };
        let at = |ip: &str| Joined { ip: ip.parse().ok(), ..Default::default() };
        for (network, joined, good) in [
            (&bridge, &Joined::default(), true),
            (&bridge, &aliased, false),
            (&bridge, &at("10.1.0.5"), false),
            (&own, &aliased, true),
            (&own, &at("10.1.0.5"), true),
            (&own, &at("10.2.0.5"), false),
        ] {
            assert_eq!(check_joinable(network, joined).is_ok(), good, "{} {joined:?}", network.name);
        }
        for (mode, good) in
            [("bridge", true), ("own", true), ("host", false), ("none", false), ("container:a", false)]
        {
            let mut container = Container::default();
            container.host.network = mode.into();
            assert_eq!(check_mode(&own, &container).is_ok(), good, "{mode}");
        }
    }
}
