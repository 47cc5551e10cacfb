//! `portmap`: ports of the node that lead to the container, as the built-in network has them.

use std::collections::BTreeMap;

use async_trait::async_trait;
use ferrite_netlink::Netns;
use ferrite_nft::{IpFamily, OwnGenerations, Table};
use serde_json::Value;

use super::refused::{Refused, always_on, key, unless};
use super::{Call, Failure, Plugin, code, ips};
use crate::Addresses;
use crate::bridge::hash_name;
use crate::host_ports::{HostPort, PortProtocol, Published, forget_flows, whole_table};

pub(super) struct PortMap;

fn table(call: &Call, family: IpFamily) -> Result<Table, Failure> {
    let name = hash_name("cni-ports-", &format!("{}/{}", call.environment.container, call.interface()));
    Table::open(family, &name, None, OwnGenerations::default()).map_err(Failure::of("nftables"))
}

fn port(mapping: &Value) -> Result<HostPort, Failure> {
    let bad = || Failure::config(format!("{mapping} is no port mapping"));
    let number =
        |key: &str| mapping.get(key).and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
    let host_ip = match mapping.get("hostIP").and_then(Value::as_str).unwrap_or_default() {
        "" => None,
        text => Some(text.parse().map_err(|_| bad())?),
    };
    let protocol = mapping.get("protocol").and_then(Value::as_str).unwrap_or("tcp").to_ascii_lowercase();
    Ok(HostPort {
        host_ip,
        host_port: number("hostPort").filter(|port| *port > 0).ok_or_else(bad)?,
        container_port: number("containerPort").filter(|port| *port > 0).ok_or_else(bad)?,
        protocol: match protocol.as_str() {
            "tcp" => PortProtocol::Tcp,
            "udp" => PortProtocol::Udp,
            "sctp" => PortProtocol::Sctp,
            _ => return Err(bad()),
        },
    })
}

/// The container's first address of each family.
fn addresses(result: &Value) -> Option<Addresses> {
    let all = ips(result);
    let first = |family| all.iter().map(|ip| ip.address).find(|address| IpFamily::of(*address) == family);
    Addresses::new(IpFamily::BOTH.into_iter().filter_map(first)).ok()
}

/// The node's links of the container: those without a sandbox.
fn links(result: &Value) -> Vec<String> {
    let all = result.get("interfaces").and_then(Value::as_array);
    let outside = |link: &&Value| link.get("sandbox").and_then(Value::as_str).unwrap_or_default().is_empty();
    let names = all.into_iter().flatten().filter(outside).filter_map(|link| link.get("name")?.as_str());
    names.filter(|name| name.len() <= 15 && crate::ipam::is_sandbox_id(name)).map(str::to_owned).collect()
}

#[async_trait]
impl Plugin for PortMap {
    fn refused(&self) -> &'static [Refused] {
        const KEYS: &[Refused] = &[
            always_on("snat"),
            key("masqAll"),
            unless("markMasqBit", &[13]),
            key("externalSetMarkChain"),
            key("conditionsV4"),
            key("conditionsV6"),
        ];
        KEYS
    }

    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let previous = call.needs_previous()?;
        let mappings = call.capability("portMappings").and_then(Value::as_array);
        let ports = mappings.into_iter().flatten().map(port).collect::<Result<Vec<_>, _>>()?;
        if ports.is_empty() {
            return Ok(previous.clone());
        }
        let addresses = addresses(previous).ok_or_else(|| Failure::config("the container has no address"))?;
        let links = links(previous);
        let published =
            BTreeMap::from([(call.environment.container.clone(), Published { addresses, ports })]);
        for family in addresses.families() {
            let whole = whole_table(family, &links, &published);
            table(call, family)?.apply(&whole).map_err(Failure::of("nftables"))?;
        }
        let host = Netns::current().map_err(Failure::of("this namespace"))?;
        for link in links.iter().filter(|_| addresses.of(IpFamily::V4).is_some()) {
            let name = format!("net.ipv4.conf.{link}.route_localnet");
            host.sysctl().set(&name, "1").map_err(Failure::of(format!("set {name}")))?;
        }
        Ok(previous.clone())
    }

    async fn del(&self, call: &Call) -> Result<(), Failure> {
        let mut published = false;
        for family in IpFamily::BOTH {
            let mut table = table(call, family)?;
            if table.exists().map_err(Failure::of("nftables"))? {
                table.remove().map_err(Failure::of("nftables"))?;
                published = true;
            }
        }
        match call.previous().and_then(addresses).filter(|_| published) {
            Some(addresses) => forget_flows(None, addresses).map_err(Failure::of("connection tracking")),
            None => Ok(()),
        }
    }

    async fn check(&self, call: &Call) -> Result<(), Failure> {
        let wanted =
            call.capability("portMappings").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
        for family in call.previous().and_then(addresses).map(|all| all.families()).into_iter().flatten() {
            if wanted && !table(call, family)?.exists().map_err(Failure::of("nftables"))? {
                return Err(Failure::new(code::OTHER, "the rules of host ports are gone"));
            }
        }
        Ok(())
    }
}
