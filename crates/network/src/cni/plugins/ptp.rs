//! `ptp`: a pair between the container and the node, and a route to the container on the node.

use std::net::IpAddr;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::refused::{Refused, key};
use super::{Call, Failure, IpConfig, Plugin, ip_json, ips, links};

pub(super) struct PointToPoint;

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

#[async_trait]
impl Plugin for PointToPoint {
    fn refused(&self) -> &'static [Refused] {
        const KEYS: &[Refused] = &[key("runtimeConfig.mac"), key("args.cni.mac")];
        KEYS
    }

    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let given = call.ipam("ADD").await?;
        let made = connect(call, &given).await;
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
        links::check(call).await
    }

    async fn gc(&self, call: &Call, _: &[(String, String)]) -> Result<(), Failure> {
        call.ipam("GC").await.map(drop)
    }
}

async fn connect(call: &Call, given: &Value) -> Result<Value, Failure> {
    let ips: Vec<IpConfig> = ips(given);
    if ips.is_empty() || ips.iter().any(|ip| ip.gateway.is_none()) {
        return Err(Failure::config("IPAM plugin returned missing IP config or gateway"));
    }
    let mtu = call.number("mtu").and_then(|mtu| u32::try_from(mtu).ok()).filter(|mtu| *mtu > 0);
    let host_end = links::make_pair(call, mtu).await?;
    links::enable_ipv6(call, &ips)?;
    let (outside, inside) = (links::outside()?, links::inside(call)?);
    for ip in &ips {
        let gateway = ip.gateway.unwrap_or(ip.address);
        // Everything, neighbours of the subnet included, goes through the node.
        links::add_address(&inside, call.interface(), ip.address, bits(ip.address)).await?;
        links::add_address(&outside, &host_end, gateway, bits(gateway)).await?;
        links::add_route(&outside, &host_end, (ip.address, bits(ip.address)), None).await?;
    }
    inside.set_link_up(call.interface()).await.map_err(Failure::of(call.interface()))?;
    for ip in &ips {
        let gateway = ip.gateway.unwrap_or(ip.address);
        links::add_route(&inside, call.interface(), (gateway, bits(gateway)), None).await?;
        let subnet = ferrite_nft::Cidr::new(ip.address, ip.prefix).map(|range| (range.network(), ip.prefix));
        if let Some(subnet) = subnet {
            links::add_route(&inside, call.interface(), subnet, Some(gateway)).await?;
        }
    }
    for (destination, gateway) in links::routes(given) {
        let of_family = |ip: &&IpConfig| ip.address.is_ipv4() == destination.0.is_ipv4();
        let gateway = gateway.or_else(|| ips.iter().find(of_family).and_then(|ip| ip.gateway));
        links::add_route(&inside, call.interface(), destination, gateway).await?;
    }
    links::forward(&ips)?;
    if call.flag("ipMasq") {
        links::masquerade(call, &ips)?;
    }
    let ips: Vec<Value> = ips.iter().map(|ip| ip_json(ip, Some(1), &call.version)).collect();
    let interfaces = [links::interface(&outside, &host_end).await?, links::own_interface(call).await?];
    Ok(json!({
        "interfaces": interfaces,
        "ips": ips,
        "routes": given.get("routes").cloned().unwrap_or_else(|| json!([])),
        "dns": links::dns(call, given),
    }))
}
