//! Measures the time and memory of a table with many Services: `cargo xtask bench network`, or
//! `cargo bench -p ferrite-proxy --bench services -- 10000 10`.
//!
//! Needs root. It works in a network namespace of its own, which ends with it.

use std::error::Error;
use std::time::{Duration, Instant};

use ferrite_nft::{OwnGenerations, Table};
use ferrite_proxy::layout::{LayoutConfig, LocalTraffic, NodePortAddresses};
use ferrite_proxy::model::{IpFamily, NodeFacts};
use ferrite_proxy::sync::{FamilyProxy, ServedPort, served_ports};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;

const CHANGES: u32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo adds an option of its own.
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let services: u32 = arguments.next().as_deref().unwrap_or("10000").parse()?;
    let endpoints: u32 = arguments.next().as_deref().unwrap_or("10").parse()?;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
    let config = LayoutConfig {
        family: IpFamily::V4,
        masquerade_mark: 1 << 14,
        masquerade_all: false,
        local_traffic: LocalTraffic::Cidrs(vec!["10.244.0.0/16".parse()?]),
        node_ip: None,
        node_port_addresses: NodePortAddresses::All,
        untracked_bridge: None,
        service_cidrs: vec!["10.96.0.0/12".parse()?],
    };
    let table = Table::open(IpFamily::V4, "kube-proxy-scale", None, OwnGenerations::default())?;
    let mut proxy = FamilyProxy::new(config, table);
    let empty = private_memory();

    let started = Instant::now();
    for number in 0..services {
        proxy.update("ns", &format!("s{number}"), &ports(number, &(0..endpoints).collect::<Vec<_>>())?);
    }
    println!("{services} Services with {endpoints} endpoints each: decided in {:?}", started.elapsed());
    let started = Instant::now();
    let synced = proxy.sync()?;
    println!(
        "first transaction: {:?}, {} elements, {} chains",
        started.elapsed(),
        synced.added,
        synced.chains
    );

    println!("private memory for it: {} KiB", private_memory().saturating_sub(empty));

    // Every change is another Service's, so that none is like the one before.
    let mut replaced = Vec::new();
    let mut removed = Vec::new();
    for number in 0..CHANGES.min(services) {
        let mut list: Vec<u32> = (0..endpoints).collect();
        list[0] = endpoints;
        replaced.push(measure(&mut proxy, number, &list)?);
        list.pop();
        removed.push(measure(&mut proxy, number, &list)?);
    }
    println!("one endpoint replaced: median {:?}", median(replaced));
    println!("one endpoint removed: median {:?}", median(removed));
    proxy.invalidate();
    let started = Instant::now();
    proxy.sync()?;
    println!("the whole table again: {:?}", started.elapsed());
    Ok(())
}

fn measure(proxy: &mut FamilyProxy, service: u32, endpoints: &[u32]) -> Result<Duration, Box<dyn Error>> {
    let ports = ports(service, endpoints)?;
    let started = Instant::now();
    proxy.update("ns", &format!("s{service}"), &ports);
    proxy.sync()?;
    Ok(started.elapsed())
}

/// KiB that this process alone has.
fn private_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let private = text.lines().filter(|line| line.starts_with("Private_"));
    private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn ports(service: u32, endpoints: &[u32]) -> Result<Vec<ServedPort>, Box<dyn Error>> {
    let ip = std::net::Ipv4Addr::from_bits(0x0a60_0000 + service + 10);
    let object: Service =
        serde_json::from_value(json!({"metadata": {"namespace": "ns", "name": format!("s{service}")},
        "spec": {"clusterIP": ip, "ports": [{"port": 80}]}}))?;
    let addresses = endpoints.iter().map(|endpoint| {
        let pod = std::net::Ipv4Addr::from_bits(0x0af4_0000 + (service * 11 + endpoint) % 0xffff);
        json!({"addresses": [pod]})
    });
    let slice: EndpointSlice =
        serde_json::from_value(json!({"metadata": {"name": "s"}, "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080}], "endpoints": addresses.collect::<Vec<_>>()}))?;
    Ok(served_ports(&object, std::iter::once(&slice), IpFamily::V4, &NodeFacts::default()))
}
