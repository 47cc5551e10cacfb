//! Measures the number of queries that one core answers in a second, and how long an answer takes.
//!
//! `cargo xtask bench network`, or `cargo bench -p ferrite-dns --bench names -- [SECONDS]`, measures the answer itself, from packet to packet,
//! and the whole server over UDP on the loopback interface, with a client on another thread that has one query under way, and many.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_client::Scope;
use ferrite_dns::{Config, Dns, Listen, Patience};
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RecordType};
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};

const SERVICES: usize = 5000;
/// Queries that a busy client has under way.
const WINDOW: usize = 32;

fn query(id: u16, name: &str) -> Vec<u8> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).expect("a name"), RecordType::A));
    message.to_vec().expect("a message")
}

fn packets() -> Vec<Vec<u8>> {
    (0..1000u16)
        .map(|n| query(n, &format!("service-{}.shop.svc.cluster.local.", usize::from(n) * 5)))
        .collect()
}

fn start(scope: &Scope) -> Dns {
    let config = Config {
        domain: "cluster.local".into(),
        listen: vec![Listen {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            device: None,
            clients: Vec::new(),
        }],
        listen_if_free: Vec::new(),
        resolv_conf: "/nonexistent".into(),
        stub_domains: Vec::new(),
        patience: Patience::default(),
    };
    let dns = Dns::start(config, scope).expect("a free port");
    dns.server().update(1, |index| {
        index.apply_namespace("shop");
        for n in 0..SERVICES {
            let mut service = Service::default();
            service.metadata.namespace = Some("shop".into());
            service.metadata.name = Some(format!("service-{n}"));
            service.spec = Some(ServiceSpec {
                cluster_ip: Some(Ipv4Addr::from(0x0a60_0000 + u32::try_from(n).expect("few")).to_string()),
                ports: Some(vec![ServicePort { port: 80, ..ServicePort::default() }]),
                ..ServiceSpec::default()
            });
            index.apply_service(&service);
        }
    });
    dns.server().set_synced();
    dns
}

/// Processor time that this thread has used; the server runs on it. Load from other programs changes it
/// little.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0);
    Duration::from_nanos(nanoseconds)
}

fn main() {
    // Cargo adds an option of its own.
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let seconds = arguments.next().and_then(|s| s.parse().ok()).unwrap_or(3);
    let time = Duration::from_secs(seconds);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let scope = Scope::new();
    let dns = runtime.block_on(async { start(&scope) });
    let packets = packets();

    let (begun, mut answered) = (Instant::now(), 0u64);
    while begun.elapsed() < time {
        for packet in &packets {
            let reply = dns.server().answer_now(packet, Ipv4Addr::LOCALHOST.into()).expect("a reply");
            assert!(reply[3] & 0x0f == 0 && reply[7] == 1, "an address");
            answered += 1;
        }
    }
    println!(
        "packet to packet: {:.0} answers/s on one core",
        answered as f64 / begun.elapsed().as_secs_f64()
    );

    for window in [1, WINDOW] {
        let stop = Arc::new(AtomicBool::new(false));
        let client = {
            let (stop, packets, address) = (Arc::clone(&stop), packets.clone(), dns.addresses()[0]);
            std::thread::spawn(move || ask(&packets, address, window, &stop))
        };
        let (begun, used) = (Instant::now(), processor_time());
        runtime.block_on(async { tokio::time::sleep(time).await });
        let (elapsed, used) = (begun.elapsed(), processor_time() - used);
        stop.store(true, Ordering::Relaxed);
        let mut times = client.join().expect("the client");
        times.sort();
        let part = |part: f64| {
            let at = (times.len().saturating_sub(1) as f64 * part) as usize;
            times.get(at).copied().unwrap_or_default()
        };
        println!(
            "over UDP, {window} under way: {:.0} answers/s; {:.0} for each second of the server's processor time; \
             from query to answer p50 {:?}, p99 {:?}",
            times.len() as f64 / elapsed.as_secs_f64(),
            times.len() as f64 / used.as_secs_f64(),
            part(0.5),
            part(0.99)
        );
    }
    runtime.block_on(scope.shutdown());
}

/// A client that has as many queries under way as the window says. Returns the time from each query to its answer.
fn ask(packets: &[Vec<u8>], server: SocketAddr, window: usize, stop: &AtomicBool) -> Vec<Duration> {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(server).expect("connected");
    socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
    let mut buffer = [0; 512];
    let mut times = Vec::new();
    // The id of a query is its place among the packets, and the window is smaller than their number.
    let mut sent = vec![Instant::now(); packets.len()];
    let mut queries = packets.iter().enumerate().cycle();
    let mut send = |sent: &mut [Instant]| {
        if let Some((id, packet)) = queries.next() {
            sent[id] = Instant::now();
            let _ = socket.send(packet);
        }
    };
    for _ in 0..window {
        send(&mut sent);
    }
    while !stop.load(Ordering::Relaxed) {
        if socket.recv(&mut buffer).is_ok() {
            let id = usize::from(u16::from_be_bytes([buffer[0], buffer[1]]));
            times.push(sent[id].elapsed());
        }
        send(&mut sent);
    }
    times
}
