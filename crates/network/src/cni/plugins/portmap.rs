//! `portmap`: ports of the node that lead to the container, as the built-in network has them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use async_trait::async_trait;
use ferrite_nft::{IpFamily, OwnGenerations, Table};
use nlink::netlink::namespace::Netns;
use serde_json::Value;

use super::{Call, Failure, Plugin, code, ips};
use crate::bridge::hash_name;
use crate::host_ports::{HostPort, PortProtocol, Published, forget_flows, whole_table};

pub(super) struct PortMap;

fn table(call: &Call) -> Result<Table, Failure> {
    let name = hash_name("cni-ports-", &format!("{}/{}", call.environment.container, call.interface()));
    Table::open(IpFamily::V4, &name, None, OwnGenerations::default()).map_err(Failure::of("nftables"))
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

fn address(result: &Value) -> Option<Ipv4Addr> {
    ips(result).into_iter().find_map(|ip| match ip.address {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(_) => None,
    })
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
    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let previous = call.needs_previous()?;
        let mappings = call.capability("portMappings").and_then(Value::as_array);
        let ports = mappings.into_iter().flatten().map(port).collect::<Result<Vec<_>, _>>()?;
        if ports.is_empty() {
            return Ok(previous.clone());
        }
        let address =
            address(previous).ok_or_else(|| Failure::config("the container has no address of IPv4"))?;
        let links = links(previous);
        let published = BTreeMap::from([(call.environment.container.clone(), Published { address, ports })]);
        table(call)?.apply(&whole_table(&links, &published), &[]).map_err(Failure::of("nftables"))?;
        let host = Netns::current().map_err(Failure::of("this namespace"))?;
        for link in &links {
            let name = format!("net.ipv4.conf.{link}.route_localnet");
            host.sysctl().set(&name, "1").map_err(Failure::of(format!("set {name}")))?;
        }
        Ok(previous.clone())
    }

    async fn del(&self, call: &Call) -> Result<(), Failure> {
        let mut table = table(call)?;
        if !table.exists().map_err(Failure::of("nftables"))? {
            return Ok(());
        }
        table.remove().map_err(Failure::of("nftables"))?;
        let host = Netns::current().map_err(Failure::of("this namespace"))?;
        match call.previous().and_then(address) {
            Some(address) => forget_flows(&host, address).await.map_err(Failure::of("connection tracking")),
            None => Ok(()),
        }
    }

    async fn check(&self, call: &Call) -> Result<(), Failure> {
        let wanted =
            call.capability("portMappings").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
        match !wanted || table(call)?.exists().map_err(Failure::of("nftables"))? {
            true => Ok(()),
            false => Err(Failure::new(code::OTHER, "the rules of host ports are gone")),
        }
    }
}
