//! Measures the set-up of connections between two pods of one bridge, directly and through a Service:
//! `cargo xtask bench network`, or `cargo bench -p ferrite-proxy --bench connections -- [SERVICES]`.
//!
//! Needs root. Nodes and pods are network namespaces of its own. The ways take turns, so that other work on the machine
//! meets all of them alike.
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

#[path = "../tests/world/mod.rs"]
mod world;

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ferrite_proxy::model::{IpFamily, NodeFacts};
use ferrite_proxy::sync::served_ports;
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::json;
use world::World;

/// Each way leads to a port of its own: a connection through the Service would meet the tracked entry of a direct
/// connection that had the same port of the client.
const DIRECT: u16 = 9001;
const SERVED: u16 = 9002;
const CONNECTIONS: usize = 10_000;

fn main() {
    let services: u32 = std::env::args().skip(1).find_map(|text| text.parse().ok()).unwrap_or(1000);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let mut world = runtime.block_on(World::new(2));
    let server = world.ip(1);
    for port in [DIRECT, SERVED] {
        accept(world.in_pod(1, || TcpListener::bind((server, port)).unwrap()));
    }
    let direct = SocketAddr::new(server, DIRECT);
    let bare = world.in_pod(0, || middle(&mut (0..CONNECTIONS).map(|_| connect(direct)).collect::<Vec<_>>()));
    println!("connection between two pods, no table of Services: {bare:?}");

    // The Service that is measured, and others beside it.
    for number in 0..services {
        let address = std::net::Ipv4Addr::from_bits(0x0a60_0100 + number);
        let pod = if number == 0 { server } else { world.ip(0) };
        let service = json!({"metadata": {"namespace": "ns", "name": format!("s{number}")},
            "spec": {"clusterIP": address, "ports": [{"port": 80}]}});
        let slice = json!({"metadata": {"name": "s"}, "addressType": "IPv4",
            "ports": [{"name": "", "port": SERVED}], "endpoints": [{"addresses": [pod], "nodeName": "node"}]});
        let slice = serde_json::from_value(slice).unwrap();
        let node = NodeFacts { name: "node".into(), zone: String::new() };
        let service = serde_json::from_value(service).unwrap();
        let ports = served_ports(&service, std::iter::once(&slice), IpFamily::V4, &node);
        world.proxy.update("ns", &format!("s{number}"), &ports);
    }
    world.sync();
    let service: SocketAddr = "10.96.1.0:80".parse().unwrap();
    let pairs: Vec<(Duration, Duration)> =
        world.in_pod(0, || (0..CONNECTIONS).map(|_| (connect(direct), connect(service))).collect());
    let (mut directly, mut through): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
    // Neighbours in time meet the same load of the machine.
    let mut above: Vec<f64> = pairs.iter().map(|(d, t)| t.as_secs_f64() - d.as_secs_f64()).collect();
    above.sort_by(f64::total_cmp);
    let (directly, through) = (middle(&mut directly), middle(&mut through));
    let above = above[above.len() / 2];
    println!("connection between two pods, {services} Services: {directly:?}");
    println!(
        "connection through a Service: {through:?}, {:.2} µs or {:.1} % above its neighbour",
        above * 1e6,
        above / directly.as_secs_f64() * 100.0
    );
}

/// Accepts connections and waits until their clients are gone, until the process ends.
fn accept(listener: TcpListener) {
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0]);
        }
    });
}

/// The time of one connection, which ends with a reset: it leaves no port waiting.
fn connect(address: SocketAddr) -> Duration {
    let started = Instant::now();
    let stream = TcpStream::connect(address).unwrap();
    let took = started.elapsed();
    setsockopt(&stream, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
    took
}

fn middle(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}
