//! The way of packets between two pods of one node, beside a bare pair of links.

use crate::api::{Api, PATIENCE, container_process, is_ready, text};
use crate::node::PODS;
use crate::{Bench, percentile, tell};
use ferrite_json::{Value, json};
use nix::sched::{CloneFlags, setns};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

const PORT: u16 = 5001;
/// The Service leads to another port: a connection through it would meet the tracked one of a direct connection that had the
/// same port of the client.
const SERVED_PORT: u16 = 5002;
const STREAM_PORT: u16 = 5003;
const CONNECTS: usize = 4000;
const SECONDS: u64 = 3;
const TURNS: usize = 3;

pub fn run(bench: &Bench) {
    let api = Api::start(bench);
    let changes = api.watch(PODS);
    for name in ["left", "right"] {
        let container = json!({"name": "c", "image": "ferrite.local/tools:latest", "imagePullPolicy": "IfNotPresent", "args": ["sleep"]});
        api.create(
            PODS,
            &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"name": name}},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}),
        );
    }
    let mut pods: HashMap<String, Value> = HashMap::new();
    while pods.len() < 2 {
        let (pod, _) = changes.recv_timeout(PATIENCE).unwrap();
        if is_ready(&pod) {
            pods.insert(text(&pod, "name").to_owned(), pod);
        }
    }
    let namespace =
        |name: &str| File::open(format!("/proc/{}/ns/net", container_process(&pods[name]))).unwrap();
    let (left, right) = (namespace("left"), namespace("right"));
    let address: IpAddr = pods["right"]["status"]["podIP"].as_str().unwrap().parse().unwrap();
    let servers = [PORT, SERVED_PORT].map(|port| listen(&right, SocketAddr::new(address, port)));

    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "right"},
        "spec": {"selector": {"name": "right"}, "ports": [{"port": 80, "targetPort": SERVED_PORT}]}});
    let (code, made) = api.send("POST", "/api/v1/namespaces/default/services", &service.to_string());
    assert_eq!(code, 201, "{made}");
    let made: Value = ferrite_json::from_str(&made).unwrap();
    let cluster_ip: IpAddr = made["spec"]["clusterIP"].as_str().unwrap().parse().unwrap();
    connects(&left, SocketAddr::new(address, PORT), SocketAddr::new(cluster_ip, 80));
    drop(servers);

    let bare = bare_pair();
    let direct = |(from, to, address): (&File, &File, IpAddr)| throughput(from, to, address);
    let (mut pods_rates, mut bare_rates) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        pods_rates.push(direct((&left, &right, address)));
        bare_rates.push(direct((&bare.0, &bare.1, IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)))));
    }
    let median = |mut rates: Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let (pods_rate, bare_rate) = (median(pods_rates), median(bare_rates));
    tell("pod to pod, MB/s", pods_rate);
    tell("a bare pair of links, MB/s", bare_rate);
    tell("  the first as a part of the second, %", pods_rate / bare_rate * 100.0);
    let mut delete = bench.kubectl(&["delete", "service/right", "pod/left", "pod/right"]);
    assert!(delete.output().unwrap().status.success());
}

/// Runs `work` on a thread in a network namespace.
fn inside<T: Send + 'static>(
    namespace: &File,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    let namespace = namespace.try_clone().unwrap();
    std::thread::spawn(move || {
        setns(&namespace, CloneFlags::CLONE_NEWNET).unwrap();
        work()
    })
}

/// Accepts connections and closes them, until the value is dropped.
struct Listening {
    namespace: File,
    address: SocketAddr,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn listen(namespace: &File, address: SocketAddr) -> Listening {
    let listener = inside(namespace, move || TcpListener::bind(address).unwrap()).join().unwrap();
    let thread = std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut first = [0];
            // A byte asks to end.
            if (&stream).read(&mut first).is_ok_and(|read| read == 1) {
                return;
            }
        }
    });
    Listening { namespace: namespace.try_clone().unwrap(), address, thread: Some(thread) }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let address = self.address;
        let _ =
            inside(&self.namespace, move || TcpStream::connect(address).and_then(|mut s| s.write_all(b".")))
                .join();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Connections to the pod and to its Service, by turns.
fn connects(from: &File, pod: SocketAddr, service: SocketAddr) {
    let (direct, through) = inside(from, move || {
        let connect = |address| TcpStream::connect_timeout(&address, Duration::from_secs(1));
        let began = Instant::now();
        while connect(service).is_err() {
            assert!(began.elapsed() < PATIENCE, "the Service leads nowhere");
        }
        let timed = |address| {
            let began = Instant::now();
            let stream = connect(address).unwrap();
            let took = began.elapsed();
            drop(stream);
            took
        };
        (0..CONNECTS).map(|_| (timed(pod), timed(service))).unzip::<_, _, Vec<_>, Vec<_>>()
    })
    .join()
    .unwrap();
    let middle = |mut times: Vec<Duration>| {
        times.sort();
        percentile(&times, 0.5) * 1e3
    };
    let (direct, through) = (middle(direct), middle(through));
    tell(&format!("connection to a pod, p50 of {CONNECTS}, µs"), direct);
    tell(&format!("connection through its Service, p50 of {CONNECTS}, µs"), through);
    tell("  the second above the first, %", (through / direct - 1.0) * 100.0);
}

/// One stream for some seconds, in MB/s.
fn throughput(from: &File, to: &File, address: IpAddr) -> f64 {
    let listener = inside(to, move || TcpListener::bind((address, STREAM_PORT)).unwrap()).join().unwrap();
    let reader = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = vec![0; 256 << 10];
        let began = Instant::now();
        let mut total = 0u64;
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            total += read as u64;
        }
        total as f64 / began.elapsed().as_secs_f64() / 1e6
    });
    let writer = inside(from, move || {
        let mut stream = TcpStream::connect((address, STREAM_PORT)).unwrap();
        let block = vec![0; 256 << 10];
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(SECONDS) {
            stream.write_all(&block).unwrap();
        }
    });
    writer.join().unwrap();
    reader.join().unwrap()
}

/// Two namespaces with a link between them, which go with their files.
fn bare_pair() -> (File, File) {
    let fresh = || {
        std::thread::spawn(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let id = nix::unistd::gettid();
            (id, File::open(format!("/proc/self/task/{id}/ns/net")).unwrap())
        })
        .join()
        .unwrap()
        .1
    };
    let (left, right) = (fresh(), fresh());
    let ip = |arguments: String| {
        move || {
            let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
            assert!(status.success(), "ip {arguments}");
        }
    };
    let link = |name: &str, address: u8| {
        [format!("addr add 192.0.2.{address}/24 dev {name}"), format!("link set {name} mtu 1500 up")]
    };
    let other = right.try_clone().unwrap();
    inside(&left, move || {
        // A process of its own namespace names the other end.
        let holder = inside(&other, || Command::new("sleep").arg("30").spawn().unwrap()).join().unwrap();
        ip(format!("link add v0 type veth peer name v1 netns {}", holder.id()))();
        let mut holder = holder;
        holder.kill().unwrap();
        holder.wait().unwrap();
    })
    .join()
    .unwrap();
    for command in link("v0", 1) {
        inside(&left, ip(command)).join().unwrap();
    }
    for command in link("v1", 2) {
        inside(&right, ip(command)).join().unwrap();
    }
    (left, right)
}
