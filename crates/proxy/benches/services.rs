//! Measures the time and memory of a table with many Services: `cargo xtask bench network`, or
//! `cargo bench -p ferrite-proxy --bench services -- 10000 10`.
//!
//! Needs root. It works in a network namespace of its own, which ends with it. Times are followed by the processor time
//! in the program and in the kernel: other work on the machine changes those little.

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use ferrite_memory::usage::rollup;
use ferrite_nft::{Monitor, OwnGenerations, Table};
use ferrite_proxy::layout::{LayoutConfig, LocalTraffic, NodePortAddresses};
use ferrite_proxy::model::{IpFamily, NodeFacts};
use ferrite_proxy::sync::{FamilyProxy, ServedPort, served_ports};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::json;

#[global_allocator]
static ALLOCATOR: ferrite_memory::Allocator = ferrite_memory::Allocator;

const CHANGES: u32 = 100;
const TABLE: &str = "kube-proxy-scale";

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
    let own = OwnGenerations::default();
    let table = Table::open(IpFamily::V4, TABLE, None, own.clone())?;
    let mut proxy = FamilyProxy::new(config, table);
    let memory = Memory::start();

    println!("{services} Services with {endpoints} endpoints each");
    let deciding = Watch::start();
    // The proxy keeps the ports of every Service, to see what a change changes.
    let mut kept: HashMap<String, Vec<ServedPort>> = HashMap::new();
    for number in 0..services {
        let ports = ports(number, &(0..endpoints).collect::<Vec<_>>())?;
        let name = format!("s{number}");
        proxy.update("ns", &name, &ports);
        kept.insert(name, ports);
    }
    println!("  objects parsed and elements decided: {}", deciding.stop());
    let watch = Watch::start();
    let synced = proxy.sync()?;
    println!("  first table: {}; {} elements, {} chains", watch.stop(), synced.added, synced.chains);
    println!("  memory for it: {}", memory.since());
    ferrite_memory::give_back();
    println!("  memory after free pages went back to the system: {}", memory.since());

    // Every change is another Service's, so that none is like the one before.
    let (mut replaced, mut removed) = (Vec::new(), Vec::new());
    for number in 0..CHANGES.min(services) {
        let mut list: Vec<u32> = (0..endpoints).collect();
        list[0] = endpoints;
        replaced.push(measure(&mut proxy, number, &list)?);
        list.pop();
        removed.push(measure(&mut proxy, number, &list)?);
    }
    println!("  one endpoint replaced: median {:?}", median(replaced));
    println!("  one endpoint removed: median {:?}", median(removed));
    proxy.invalidate();
    let watch = Watch::start();
    proxy.sync()?;
    println!("  the whole table again: {}", watch.stop());
    // The proxy has a monitor, and the kernel writes it a notice of every element.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let monitor = Monitor::open(TABLE, None, own)?;
    proxy.invalidate();
    let watch = Watch::start();
    proxy.sync()?;
    println!("  the whole table again, with a monitor: {}", watch.stop());
    drop((monitor, guard, kept));
    Ok(())
}

fn measure(proxy: &mut FamilyProxy, service: u32, endpoints: &[u32]) -> Result<Duration, Box<dyn Error>> {
    let ports = ports(service, endpoints)?;
    let started = Instant::now();
    proxy.update("ns", &format!("s{service}"), &ports);
    proxy.sync()?;
    Ok(started.elapsed())
}

/// Time on the clock, and of a processor in the program and in the kernel.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    wall: Duration,
    user: Duration,
    system: Duration,
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [wall, user, system] = [self.wall, self.user, self.system].map(|time| time.as_secs_f64() * 1e3);
        write!(f, "{wall:.1} ms ({user:.1} ms in the program, {system:.1} ms in the kernel)")
    }
}

struct Watch(Instant, Times);

impl Watch {
    fn start() -> Self {
        Self(Instant::now(), used())
    }

    fn stop(self) -> Times {
        let now = used();
        Times { wall: self.0.elapsed(), user: now.user - self.1.user, system: now.system - self.1.system }
    }
}

/// The processor time of this process.
fn used() -> Times {
    let time = |value: nix::sys::time::TimeVal| {
        Duration::new(value.tv_sec().unsigned_abs(), u32::try_from(value.tv_usec() * 1000).unwrap_or(0))
    };
    getrusage(UsageWho::RUSAGE_SELF).map_or_else(
        |_| Times::default(),
        |usage| Times {
            wall: Duration::ZERO,
            user: time(usage.user_time()),
            system: time(usage.system_time()),
        },
    )
}

/// KiB that this process alone has, and the most that were resident since the start.
struct Memory {
    private: u64,
    resident: u64,
}

impl Memory {
    fn start() -> Self {
        // The most so far is forgotten.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        Self { private: rollup(std::process::id(), "Private_"), resident: status("VmRSS:") }
    }

    fn since(&self) -> String {
        let private = rollup(std::process::id(), "Private_").saturating_sub(self.private);
        let most = status("VmHWM:").saturating_sub(self.resident);
        format!("{private} KiB private, {most} KiB at most")
    }
}

fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(key));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
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
