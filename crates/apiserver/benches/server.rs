//! The API server as a process of its own, seen from outside, on loopback with TLS. Prints a table; numbers, not
//! tests.
//!
//! `cargo bench -p ferrite-apiserver` runs all of it; parts can be chosen: `-- start creates gets lists watches`.
//! Files go to a directory below `FERRITE_BENCH_DIR`, or below the build directory: not to a file system in memory,
//! where a synchronisation costs nothing. What the server can do is told per second of its own processor time where
//! the clients would otherwise be the limit: they run on the same machine.
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

use bytes::Bytes;
use ferrite_apiserver::{ApiServer, Config};
use ferrite_pki::{ClusterPki, Purpose, Subject};
use ferrite_store::{HistoryLimits, LogOptions, Store};
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

/// Set for the process that is the server: where its files are.
const SERVER: &str = "FERRITE_BENCH_SERVER";
const PODS: &str = "/api/v1/namespaces/default/pods";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const FOR: Duration = Duration::from_secs(4);
const LISTED: usize = 10_000;
const WATCHERS: usize = 1000;
const EVENTS: usize = 500;

fn main() {
    if let Some(dir) = std::env::var_os(SERVER) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        return runtime.block_on(serve(Path::new(&dir)));
    }
    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    println!("{:<58} {:>14}", "what", "seen");
    runtime.block_on(async {
        if wanted("start") {
            starts().await;
        }
        if wanted("creates") {
            creates().await;
        }
        if wanted("gets") || wanted("lists") {
            let server = Server::start(&scratch());
            let client = server.client().await;
            fill(&server, &client).await;
            if wanted("gets") {
                gets(&server).await;
            }
            if wanted("lists") {
                lists(&server, &client).await;
            }
        }
        if wanted("watches") {
            watches().await;
        }
    });
}

fn tell(what: &str, seen: impl std::fmt::Display) {
    println!("{what:<58} {seen:>14}");
}

fn scratch() -> Arc<tempfile::TempDir> {
    let base = std::env::var_os("FERRITE_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    Arc::new(tempfile::tempdir_in(base).unwrap())
}

/// The server's side: what `ferrite kube-apiserver` does, without its command line.
async fn serve(dir: &Path) {
    let store = Store::open(&dir.join("store"), LogOptions::default(), HistoryLimits::default()).unwrap();
    let pki = ClusterPki::open(&dir.join("pki")).unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let subject = Subject { common_name: "kube-apiserver".into(), organization: None, names };
    let serving = pki.ensure("apiserver", &subject, Purpose::Server).unwrap();
    pki.ensure("admin", &Subject::client("admin", Some("system:masters")), Purpose::Client).unwrap();
    let tls = ferrite_pki::server_config(&serving, pki.ca(), &["h2", "http/1.1"]).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let config =
        Config { service_account_key: Some(pki.service_account_key().unwrap()), ..Config::new(address) };
    let server = ApiServer::start(Arc::new(store), config).await.unwrap();
    println!("{address}");
    server.serve(listener, Arc::new(tls)).await;
}

/// A server in a process of its own, ended when it is dropped.
struct Server {
    child: Child,
    address: SocketAddr,
    tls: TlsConnector,
    ready: Duration,
    _dir: Arc<tempfile::TempDir>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(dir: &Arc<tempfile::TempDir>) -> Self {
        let started = Instant::now();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(SERVER, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready = started.elapsed();
        let pki = ClusterPki::open(&dir.path().join("pki")).unwrap();
        let subject = Subject::client("admin", Some("system:masters"));
        let admin = pki.ensure("admin", &subject, Purpose::Client).unwrap();
        let mut tls = ferrite_pki::client_config(pki.ca(), Some(&admin)).unwrap();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        Self {
            child,
            address: line.trim().parse().unwrap(),
            tls: TlsConnector::from(Arc::new(tls)),
            ready,
            _dir: Arc::clone(dir),
        }
    }

    async fn client(&self) -> Client {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let stream = self.tls.connect("localhost".try_into().unwrap(), stream).await.unwrap();
        let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(16 << 20)
            .handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        Client { sender, address: self.address }
    }

    fn proc(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap()
    }

    fn kib(&self, file: &str, key: &str) -> u64 {
        let text = self.proc(file);
        let line = text.lines().find(|l| l.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    fn pss(&self) -> u64 {
        self.kib("smaps_rollup", "Pss:")
    }

    /// Processor time used so far.
    fn processor(&self) -> f64 {
        let stat = self.proc("stat");
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    }
}

#[derive(Clone)]
struct Client {
    sender: SendRequest<Full<Bytes>>,
    address: SocketAddr,
}

impl Client {
    async fn send(&self, method: &str, path: &str, body: Bytes) -> http::Response<hyper::body::Incoming> {
        let request = Request::builder()
            .method(method)
            .uri(format!("https://{}{path}", self.address))
            .header("content-type", "application/json")
            .body(Full::new(body))
            .unwrap();
        self.sender.clone().send_request(request).await.unwrap()
    }

    /// Reads an answer to its end. Answers its code and length.
    async fn whole(&self, method: &str, path: &str, body: Bytes) -> (u16, usize) {
        let answer = self.send(method, path, body).await;
        let code = answer.status().as_u16();
        let mut body = answer.into_body();
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            length += frame.unwrap().data_ref().map_or(0, Bytes::len);
        }
        (code, length)
    }

    async fn metric(&self, name: &str) -> f64 {
        let body = self.send("GET", "/metrics", Bytes::new()).await.into_body();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes);
        let line = text.lines().find(|l| l.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

/// A pod of the size that pods have.
fn pod(name: &str) -> Value {
    let environment: Vec<Value> =
        (0..8).map(|n| json!({"name": format!("SETTING_{n}"), "value": "a value of some length"})).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "bench", "tier": "backend"}, "annotations": {"note": name}},
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "main", "image": "registry.example/app:1.0", "env": environment,
                "ports": [{"containerPort": 8080, "name": "http"}],
                "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}},
            }],
        },
    })
}

async fn account(client: &Client) {
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    let path = "/api/v1/namespaces/default/serviceaccounts";
    let (code, _) = client.whole("POST", path, account.to_string().into()).await;
    assert!(code == 201 || code == 409, "{code}");
}

async fn starts() {
    let dir = scratch();
    let first = Server::start(&dir);
    tell("exec to ready, first start (ms)", format!("{:.1}", first.ready.as_secs_f64() * 1e3));
    drop(first);
    let mut later: Vec<Duration> = Vec::new();
    let mut last = None;
    for _ in 0..5 {
        drop(last.take());
        let server = Server::start(&dir);
        later.push(server.ready);
        last = Some(server);
    }
    later.sort();
    tell("exec to ready, later starts, median (ms)", format!("{:.1}", later[2].as_secs_f64() * 1e3));
    let server = last.unwrap();
    let client = server.client().await;
    assert_eq!(client.whole("GET", "/readyz", Bytes::new()).await.0, 200);
    tokio::time::sleep(Duration::from_secs(2)).await;
    tell("idle, PSS (KiB)", server.pss());
    tell("idle, anonymous (KiB)", server.kib("smaps_rollup", "Anonymous:"));
}

/// Runs `work` with as many clients for a while. Answers what was done in how long.
async fn run<F>(
    server: &Server,
    connections: usize,
    streams: usize,
    work: impl Fn(Client, u64) -> F + Clone + Send + 'static,
) -> (u64, Duration)
where
    F: Future<Output = ()> + Send,
{
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for _ in 0..connections {
        let client = server.client().await;
        for _ in 0..streams {
            let (client, done, work) = (client.clone(), Arc::clone(&done), work.clone());
            tasks.spawn(async move {
                while started.elapsed() < FOR {
                    let number = done.fetch_add(1, Ordering::Relaxed);
                    work(client.clone(), number).await;
                }
            });
        }
    }
    while tasks.join_next().await.is_some() {}
    (done.load(Ordering::Relaxed), started.elapsed())
}

async fn creates() {
    let server = Server::start(&scratch());
    account(&server.client().await).await;
    for clients in [1, 64] {
        let before = server.processor();
        let (done, elapsed) =
            run(&server, clients.min(16), clients.div_ceil(16), move |client, number| async move {
                let body = pod(&format!("c{clients}-{number}")).to_string();
                let (code, _) = client.whole("POST", PODS, body.into()).await;
                assert_eq!(code, 201);
            })
            .await;
        let rate = done as f64 / elapsed.as_secs_f64();
        tell(&format!("durable creates of pods, {clients} clients (/s)"), format!("{rate:.0}"));
        let cost = (server.processor() - before) / done as f64;
        tell(
            &format!("durable creates of pods, {clients} clients (µs of processor)"),
            format!("{:.1}", cost * 1e6),
        );
    }
}

/// Creates what is listed later, and tells what it takes in memory.
async fn fill(server: &Server, client: &Client) {
    account(client).await;
    let before = server.pss();
    let mut tasks = JoinSet::new();
    for worker in 0..32 {
        let client = client.clone();
        tasks.spawn(async move {
            for number in (worker..LISTED).step_by(32) {
                let body = pod(&format!("pod-{number:05}")).to_string();
                assert_eq!(client.whole("POST", PODS, body.into()).await.0, 201);
            }
        });
    }
    while tasks.join_next().await.is_some() {}
    let (_, object) = client.whole("GET", &format!("{PODS}/pod-00007"), Bytes::new()).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let each = (server.pss() - before) as usize * 1024 / LISTED;
    tell("a pod, as JSON (bytes)", object);
    tell("memory for each of 10,000 stored pods (bytes)", each);
    tell("  of 1.5 × JSON + 400 (%)", each * 100 / (object * 3 / 2 + 400));
}

async fn gets(server: &Server) {
    for (connections, streams) in [(1, 1), (8, 16)] {
        let before = server.processor();
        let (done, elapsed) = run(server, connections, streams, |client, number| async move {
            let path = format!("{PODS}/pod-{:05}", number % LISTED as u64);
            assert_eq!(client.whole("GET", &path, Bytes::new()).await.0, 200);
        })
        .await;
        let used = server.processor() - before;
        let what = format!("GET, {} in flight", connections * streams);
        tell(&format!("{what} (/s)"), format!("{:.0}", done as f64 / elapsed.as_secs_f64()));
        tell(&format!("{what} (per second of processor)"), format!("{:.0}", done as f64 / used));
    }
}

async fn lists(server: &Server, client: &Client) {
    let accepts = [
        ("JSON", PODS.to_owned()),
        ("JSON, a label selector", format!("{PODS}?labelSelector=tier%3Dbackend")),
    ];
    for (what, path) in accepts {
        let resident = server.kib("status", "VmRSS:");
        // Makes the kernel forget the highest mark.
        std::fs::write(format!("/proc/{}/clear_refs", server.child.id()), "5").unwrap();
        let before = server.processor();
        let started = Instant::now();
        let mut bytes = 0;
        const ROUNDS: usize = 5;
        for _ in 0..ROUNDS {
            let (code, length) = client.whole("GET", &path, Bytes::new()).await;
            assert_eq!(code, 200);
            bytes += length;
        }
        let megabytes = bytes as f64 / 1e6;
        let elapsed = started.elapsed().as_secs_f64();
        let what = format!("LIST of {LISTED} pods, {what}");
        tell(&format!("{what} (MB)"), format!("{:.1}", megabytes / ROUNDS as f64));
        tell(&format!("{what} (MB/s)"), format!("{:.0}", megabytes / elapsed));
        let used = server.processor() - before;
        tell(&format!("{what} (MB per second of processor)"), format!("{:.0}", megabytes / used));
        let peak = server.kib("status", "VmHWM:").saturating_sub(resident);
        tell(&format!("{what}, peak memory (KiB)"), peak);
    }
}

async fn watches() {
    let server = Server::start(&scratch());
    let client = server.client().await;
    let before = server.pss();
    let seen = Arc::new(AtomicU64::new(0));
    let mut watchers = JoinSet::new();
    for group in 0..WATCHERS / 50 {
        let connection = server.client().await;
        for _ in 0..50 {
            let (connection, seen) = (connection.clone(), Arc::clone(&seen));
            let path = format!("{MAPS}?watch=1&group={group}");
            let mut body = connection.send("GET", &path, Bytes::new()).await.into_body();
            watchers.spawn(async move {
                let _connection = connection;
                let mut events = 0;
                while events < EVENTS {
                    let Some(Ok(frame)) = body.frame().await else { return events };
                    let data = frame.into_data().unwrap();
                    let lines = data.iter().filter(|b| **b == b'\n').count();
                    events += lines;
                    seen.fetch_add(lines as u64, Ordering::Relaxed);
                }
                events
            });
        }
    }
    tell("a watcher, memory (KiB)", (server.pss() - before) as usize / WATCHERS);
    let encodings = client.metric("ferrite_watch_encodings_total").await;
    let processor = server.processor();
    let started = Instant::now();
    let mut writers = JoinSet::new();
    for worker in 0..8 {
        let client = client.clone();
        writers.spawn(async move {
            for number in (worker..EVENTS).step_by(8) {
                let map = json!({
                    "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": format!("m{number}")},
                    "data": {"k": "v".repeat(1000)},
                });
                assert_eq!(client.whole("POST", MAPS, map.to_string().into()).await.0, 201);
            }
        });
    }
    while writers.join_next().await.is_some() {}
    while let Some(events) = watchers.join_next().await {
        assert_eq!(events.unwrap(), EVENTS);
    }
    let elapsed = started.elapsed().as_secs_f64();
    let told = seen.load(Ordering::Relaxed) as f64;
    tell("1,000 watchers: events told (/s)", format!("{:.0}", told / elapsed));
    let used = server.processor() - processor;
    tell("1,000 watchers: events told per second of processor", format!("{:.0}", told / used));
    let encodings = client.metric("ferrite_watch_encodings_total").await - encodings;
    tell("1,000 watchers: encodings for each event", format!("{:.2}", encodings / EVENTS as f64));
}
