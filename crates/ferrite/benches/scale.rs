//! A control plane with thousands of nodes that exist only as objects: memory, and the time of requests. Numbers, not
//! tests.
//!
//! `cargo bench -p ferrite --bench scale`. `NODES` and `PODS` are the numbers of objects, 5,000 and 150,000 without them.
//! The nodes' leases are renewed as kubelets do. It runs in a network namespace of its own and in a temporary directory
//! below `FERRITE_BENCH_DIR` or the build directory, and removes both.

#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_json::{Value, json};
use ferrite_memory::usage::{processor_time, rollup};
use futures_util::StreamExt;
use http_body_util::BodyExt;
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};

/// Writes under way at once.
const WRITERS: usize = 64;
/// A kubelet renews its lease so often.
const HEARTBEAT: Duration = Duration::from_secs(10);
const SETTLE: Duration = Duration::from_secs(30);
/// Requests are timed for so long, by so many clients.
const TIMED: Duration = Duration::from_secs(20);
const CLIENTS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(900);

fn main() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let base = std::env::var_os("FERRITE_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let directory = tempfile::tempdir_in(base).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(run(directory.path()));
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn tell(what: &str, seen: f64) {
    println!("{what:<64} {seen:>12.1}");
}

async fn run(directory: &Path) {
    let (nodes, pods) = (number("NODES", 5000), number("PODS", 150_000));
    let server = Server::start(directory).await;
    tell("idle, PSS (MiB)", server.mebibytes());

    let began = Instant::now();
    each(0..nodes, |n| server.create("/api/v1/nodes", node(n))).await;
    each(0..nodes, |n| {
        server.create("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease(n))
    })
    .await;
    tell(&format!("{nodes} nodes and leases made (s)"), began.elapsed().as_secs_f64());
    let heartbeats = tokio::spawn(heartbeats(server.clone(), nodes));

    let (began, spent) = (Instant::now(), processor_time(server.pid));
    each(0..pods, |n| server.create("/api/v1/namespaces/default/pods", pod(n))).await;
    tell(&format!("{pods} pods made (/s)"), pods as f64 / began.elapsed().as_secs_f64());
    server.until_bound().await;
    let spent = processor_time(server.pid).saturating_sub(spent).as_secs_f64();
    tell(&format!("{pods} pods made and bound (/s)"), pods as f64 / began.elapsed().as_secs_f64());
    tell("processor time of the control plane for each (µs)", spent * 1e6 / pods as f64);
    tell("PSS at once (MiB)", server.mebibytes());
    tokio::time::sleep(SETTLE).await;
    tell("PSS after half a minute of heartbeats (MiB)", server.mebibytes());
    let before = processor_time(server.pid);
    tokio::time::sleep(SETTLE).await;
    let share = (processor_time(server.pid) - before).as_secs_f64() / SETTLE.as_secs_f64() * 100.0;
    tell("heartbeats alone (% of one processor)", share);

    timed(&server, nodes, pods).await;
    heartbeats.abort();
}

/// Calls `work` for each number, many at a time.
async fn each<F: Future<Output = ()>>(numbers: std::ops::Range<usize>, work: impl Fn(usize) -> F) {
    futures_util::stream::iter(numbers).for_each_concurrent(WRITERS, work).await;
}

fn node(number: usize) -> Value {
    let name = format!("node-{number}");
    let amounts = json!({"cpu": "32", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"});
    json!({"apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux",
            "topology.kubernetes.io/zone": format!("zone-{}", number % 3)}},
        "status": {"allocatable": amounts, "capacity": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the node is an object"}]}})
}

fn lease(number: usize) -> Value {
    json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": format!("node-{number}")},
        "spec": {"holderIdentity": format!("node-{number}"), "leaseDurationSeconds": 40, "renewTime": now()}})
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

fn pod(number: usize) -> Value {
    let environment: Vec<Value> =
        (0..4).map(|n| json!({"name": format!("SETTING_{n}"), "value": "a value of some length"})).collect();
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{number}"), "labels": {"app": format!("app-{}", number % 500)}},
        "spec": {"automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": "registry.example/app:1.0", "env": environment,
                "resources": {"requests": {"cpu": "100m", "memory": "100Mi"}}}]}})
}

/// Renews every lease in time, evenly spread.
async fn heartbeats(server: Server, nodes: usize) {
    let mut turns = tokio::time::interval(HEARTBEAT / u32::try_from(nodes.max(1)).unwrap());
    turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    for number in (0..nodes).cycle() {
        turns.tick().await;
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node-{number}");
        let patch = json!({"spec": {"renewTime": now()}});
        let server = server.clone();
        tokio::spawn(async move { server.send("PATCH", &path, &patch.to_string()).await });
    }
}

/// A request of the mix, and its name in the table.
async fn request(server: &Server, turn: usize, nodes: usize, pods: usize) -> &'static str {
    let (node, pod) = (rand::random_range(0..nodes), rand::random_range(0..pods));
    let (what, expected, code) = match turn % 5 {
        0 | 1 => {
            let path = format!("/api/v1/namespaces/default/pods/pod-{pod}");
            ("GET of a pod", 200, server.send("GET", &path, "").await.0)
        }
        2 => {
            let path = format!("/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-{node}");
            ("LIST of a node's pods", 200, server.send("GET", &path, "").await.0)
        }
        3 => {
            let path = format!("/api/v1/namespaces/default/pods/pod-{pod}/status");
            let patch = json!({"status": {"phase": "Running", "message": now()}});
            ("PATCH of a pod's status", 200, server.send("PATCH", &path, &patch.to_string()).await.0)
        }
        _ => {
            let name = format!("m-{turn}-{}", rand::random::<u64>());
            let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"k": "v"}});
            let path = "/api/v1/namespaces/default/configmaps";
            ("POST of a ConfigMap", 201, server.send("POST", path, &map.to_string()).await.0)
        }
    };
    assert_eq!(code, expected, "{what}");
    what
}

async fn timed(server: &Server, nodes: usize, pods: usize) {
    let is_over = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let (server, is_over) = (server.clone(), is_over.clone());
        clients.spawn(async move {
            let mut times: Vec<(&'static str, Duration)> = Vec::new();
            let mut turn = client;
            while !is_over.load(Ordering::Relaxed) {
                let began = Instant::now();
                let what = request(&server, turn, nodes, pods).await;
                times.push((what, began.elapsed()));
                turn += 1;
                // People and kubelets pause, too: the clients together are a load, not a flood.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            times
        });
    }
    tokio::time::sleep(TIMED).await;
    is_over.store(true, Ordering::Relaxed);
    let mut seen: BTreeMap<&'static str, Vec<Duration>> = BTreeMap::new();
    while let Some(times) = clients.join_next().await {
        times.unwrap().into_iter().for_each(|(what, time)| seen.entry(what).or_default().push(time));
    }
    for (what, mut times) in seen {
        times.sort();
        let at = |part: f64| times[((times.len() - 1) as f64 * part).round() as usize].as_secs_f64() * 1e3;
        tell(&format!("{what}, p50 of {} (ms)", times.len()), at(0.5));
        tell(&format!("{what}, p99 (ms)"), at(0.99));
    }
}

/// `ferrite server`, and a client of its administrator.
#[derive(Clone)]
struct Server {
    client: kube::Client,
    pid: u32,
    _process: Arc<Process>,
}

/// Ended when it is dropped.
struct Process(std::sync::Mutex<Child>);

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.0.get_mut().unwrap();
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Server {
    async fn start(directory: &Path) -> Self {
        let data = directory.join("d");
        let child = Command::new(env!("CARGO_BIN_EXE_ferrite"))
            .arg("server")
            .arg("--data-dir")
            .arg(&data)
            .args(["--bind-address", "127.0.0.1", "--cluster-cidr", "10.128.0.0/9"])
            .env("HOME", directory)
            .env("KUBECONFIG", directory.join("kubeconfig"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        let process = Arc::new(Process(std::sync::Mutex::new(child)));
        let file = data.join("config/admin.kubeconfig");
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < PATIENCE, "the server did not start");
            tokio::time::sleep(Duration::from_millis(50)).await;
            let Ok(kubeconfig) = Kubeconfig::read_from(&file) else { continue };
            let options = KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
            let client = kube::Client::try_from(config).unwrap();
            let server = Self { client, pid, _process: process.clone() };
            let account = "/api/v1/namespaces/default/serviceaccounts/default";
            if server.try_send("GET", account, "").await.is_some_and(|(code, _)| code == 200) {
                return server;
            }
        }
    }

    fn mebibytes(&self) -> f64 {
        rollup(self.pid, "Pss:") as f64 / 1024.0
    }

    async fn create(&self, path: &str, object: Value) {
        let (code, text) = self.send("POST", path, &object.to_string()).await;
        assert_eq!(code, 201, "{text}");
    }

    async fn send(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        self.try_send(method, path, body).await.expect("an answer")
    }

    async fn try_send(&self, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
        let content = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let request = http::Request::builder().method(method).uri(path).header("content-type", content);
        let request = request.body(Body::from(body.as_bytes().to_vec())).unwrap();
        let response = self.client.send(request).await.ok()?;
        let code = response.status().as_u16();
        let bytes = response.into_body().collect().await.ok()?.to_bytes();
        Some((code, String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Waits until every pod has a node.
    async fn until_bound(&self) {
        let began = Instant::now();
        loop {
            let path = "/api/v1/pods?fieldSelector=spec.nodeName%3D&limit=1";
            let (_, text) = self.send("GET", path, "").await;
            let list: Value = ferrite_json::from_str(&text).unwrap();
            if list["items"].as_array().is_some_and(Vec::is_empty) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "pods without a node");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}
