//! `bridge`: connects containers to a bridge of the node.

use async_trait::async_trait;
use ferrite_netlink::{BridgeLink, PortFlags};
use serde_json::{Value, json};

use super::refused::{Refused, key};
use super::{Call, Failure, IpConfig, Plugin, code, ip_json, ips, links};

pub(super) struct Bridge;

const DEFAULT_NAME: &str = "cni0";

fn name(call: &Call) -> Result<&str, Failure> {
    let name = call.text("bridge").unwrap_or(DEFAULT_NAME);
    match name.len() <= 15 && crate::ipam::is_sandbox_id(name) {
        true => Ok(name),
        false => Err(Failure::config(format!("{name:?} is no name of a bridge"))),
    }
}

fn is_gateway(call: &Call) -> bool {
    call.flag("isGateway") || call.flag("isDefaultGateway")
}

/// The bridge with the gateways' addresses.
async fn make_bridge(call: &Call, ips: &[IpConfig], mtu: Option<u32>) -> Result<(), Failure> {
    let (conn, name) = (links::outside()?, name(call)?);
    match links::find(&conn, name).await? {
        None => {
            let mut bridge = BridgeLink::new(name);
            if let Some(mtu) = mtu {
                bridge = bridge.mtu(mtu);
            }
            match conn.add_link(bridge).await {
                // Another container was faster.
                Err(error) if !error.is_already_exists() => {
                    return Err(Failure::of(format!("make {name}"))(error));
                }
                _ => {}
            }
        }
        Some(link) if link.is_kind("bridge") => {}
        Some(_) => return Err(Failure::new(code::OTHER, format!("link {name} exists and is no bridge"))),
    }
    if is_gateway(call) {
        for ip in ips {
            if let Some(gateway) = ip.gateway {
                links::add_address(&conn, name, gateway, ip.prefix).await?;
            }
        }
    }
    conn.set_link_up(name).await.map_err(Failure::of(name))
}

/// The addresses with the gateway that a bridge has by default: the first address of the subnet.
fn with_gateways(call: &Call, mut ips: Vec<IpConfig>) -> Vec<IpConfig> {
    for ip in ips.iter_mut().filter(|ip| ip.gateway.is_none() && is_gateway(call)) {
        let range = ferrite_nft::Cidr::new(ip.address, ip.prefix);
        ip.gateway = range.map(|range| match range.network() {
            std::net::IpAddr::V4(v4) => std::net::Ipv4Addr::from_bits(v4.to_bits() | 1).into(),
            std::net::IpAddr::V6(v6) => std::net::Ipv6Addr::from_bits(v6.to_bits() | 1).into(),
        });
    }
    ips
}

#[async_trait]
impl Plugin for Bridge {
    fn refused(&self) -> &'static [Refused] {
        const KEYS: &[Refused] = &[
            key("macspoofchk"),
            key("vlan"),
            key("vlanTrunk"),
            key("promiscMode"),
            key("forceAddress"),
            key("enabledad"),
            key("disableContainerInterface"),
            key("runtimeConfig.mac"),
            key("args.cni.mac"),
        ];
        KEYS
    }

    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let mtu = call.number("mtu").and_then(|mtu| u32::try_from(mtu).ok()).filter(|mtu| *mtu > 0);
        let given = call.ipam("ADD").await?;
        let made = connect(call, &given, mtu).await;
        if made.is_err() {
            // The address goes back; the first failure is the one to report.
            let _ = self.del(call).await;
        }
        made
    }

    async fn del(&self, call: &Call) -> Result<(), Failure> {
        call.ipam("DEL").await?;
        links::stop_masquerade(call)?;
        links::remove_pair(call).await
    }

    async fn check(&self, call: &Call) -> Result<(), Failure> {
        call.ipam("CHECK").await?;
        let name = name(call)?;
        match links::find(&links::outside()?, name).await? {
            None => return Err(Failure::new(code::OTHER, format!("bridge {name} is gone"))),
            Some(_) => links::check(call).await,
        }
    }

    async fn gc(&self, call: &Call, _: &[(String, String)]) -> Result<(), Failure> {
        call.ipam("GC").await.map(drop)
    }
}

async fn connect(call: &Call, given: &Value, mtu: Option<u32>) -> Result<Value, Failure> {
    let ips = with_gateways(call, ips(given));
    make_bridge(call, &ips, mtu).await?;
    let (conn, bridge) = (links::outside()?, name(call)?);
    let host_end = links::make_pair(call, mtu).await?;
    conn.set_link_master(&host_end, bridge).await.map_err(Failure::of("bridge port"))?;
    let flags =
        PortFlags { hairpin: Some(call.flag("hairpinMode")), isolated: Some(call.flag("portIsolation")) };
    conn.set_bridge_port(&host_end, flags).await.map_err(Failure::of("bridge port"))?;
    links::configure(call, &ips, given).await?;
    if call.flag("isDefaultGateway") {
        for ip in &ips {
            let everywhere = match ip.address {
                std::net::IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
                std::net::IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            };
            links::add_route(&links::inside(call)?, call.interface(), (everywhere, 0), ip.gateway).await?;
        }
    }
    if is_gateway(call) {
        links::forward(&ips)?;
    }
    if call.flag("ipMasq") {
        links::masquerade(call, &ips)?;
    }
    let ips: Vec<Value> = ips.iter().map(|ip| ip_json(ip, Some(2), &call.version)).collect();
    let interfaces = [
        links::interface(&conn, bridge).await?,
        links::interface(&conn, &host_end).await?,
        links::own_interface(call).await?,
    ];
    Ok(json!({
        "interfaces": interfaces,
        "ips": ips,
        "routes": given.get("routes").cloned().unwrap_or_else(|| json!([])),
        "dns": links::dns(call, given),
    }))
}
