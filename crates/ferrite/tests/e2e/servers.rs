//! Several servers on one real etcd: killed, paused and cut off, under clients that count failures.

use crate::world::*;
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The machine of the clients and of etcd.
const HOST: &str = "192.0.2.1";

/// A process that ends with this value.
pub struct Process(Child);

impl Process {
    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.0.id()).unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A paused process hears nothing else.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A machine with a server.
pub struct Machine {
    pub netns: Netns,
    pub data: PathBuf,
    pub address: String,
    port: String,
    log: PathBuf,
    process: Option<Process>,
}

pub struct Fleet {
    pub world: World,
    pub machines: Vec<Machine>,
    _etcd: Process,
}

impl Fleet {
    /// Machines on one segment, and an etcd. No server runs yet.
    pub fn new(size: u8) -> Self {
        let world = World::prepare(&[]);
        let machines: Vec<Machine> = (0..size)
            .map(|n| Machine {
                netns: Netns::new(),
                data: world.path(&format!("s{n}")),
                address: format!("192.0.2.{}", 11 + n),
                port: format!("cable{n}"),
                log: world.path(&format!("s{n}.log")),
                process: None,
            })
            .collect();
        let cables: Vec<_> =
            machines.iter().map(|m| (m.port.clone(), m.netns.path(), m.address.parse().unwrap())).collect();
        world.netns.run(move || {
            block_on(async {
                let range = "192.0.2.0/24".parse().unwrap();
                let segment = ferrite_network::Segment::open("machines", range, "none").await.unwrap();
                for (port, netns, address) in cables {
                    segment.attach(&port, &netns, address).await.unwrap();
                }
            });
        });
        let url = |port: u16| format!("http://{HOST}:{port}");
        let mut etcd = world.command("etcd", &["--data-dir", world.path("etcd").to_str().unwrap()]);
        etcd.args(["--listen-client-urls", &url(2379), "--advertise-client-urls", &url(2379)]);
        etcd.args(["--listen-peer-urls", &url(2380), "--initial-advertise-peer-urls", &url(2380)]);
        etcd.args(["--initial-cluster", &format!("default={}", url(2380)), "--logger", "zap"]);
        let log = File::create(world.path("etcd.log")).unwrap();
        let etcd = etcd.stdout(Stdio::null()).stderr(log).spawn();
        let etcd = Process(etcd.expect("etcd is not installed: run `cargo xtask test --install`"));
        let healthy = format!("{HOST}:2379").parse().unwrap();
        eventually("etcd serves", || world.netns.http_get(healthy, "/health").ok());
        Self { world, machines, _etcd: etcd }
    }

    pub fn command(&self, n: usize, arguments: &[&str]) -> Command {
        let machine = &self.machines[n];
        let mut command = Command::new(ferrite());
        command.args(arguments).arg("--data-dir").arg(&machine.data).env("HOME", self.world.path("home"));
        machine.netns.enter(&mut command);
        command
    }

    fn server_command(&self, n: usize, extra: &[&str]) -> Command {
        let machine = &self.machines[n];
        let fixed = ["server", "-v", "2", "--advertise-address", &machine.address];
        let mut command = self.command(n, &fixed);
        command.args(["--etcd-servers", &format!("http://{HOST}:2379")]).args(extra);
        command
    }

    /// Starts a server and waits until it serves.
    pub fn start(&mut self, n: usize, extra: &[&str]) {
        let mut command = self.server_command(n, extra);
        let log = File::options().create(true).append(true).open(&self.machines[n].log).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let up = lines.by_ref().map_while(Result::ok).any(|line| line.starts_with("serving"));
        self.machines[n].process = Some(Process(child));
        assert!(up, "server {n} did not start:\n{}", self.log(n));
        std::thread::spawn(move || lines.for_each(drop));
    }

    pub fn log(&self, n: usize) -> String {
        std::fs::read_to_string(&self.machines[n].log).unwrap_or_default()
    }

    /// The error of a server that does not start.
    fn refused(&self, n: usize, extra: &[&str]) -> String {
        let output = self.server_command(n, extra).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }

    pub fn server_token(&self, n: usize) -> String {
        let output = self.command(n, &["token", "create", "--server"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Starts further servers, which get the keys from the first.
    pub fn join(&mut self, n: usize) {
        let token = self.server_token(0);
        let url = format!("https://{}:6443", self.machines[0].address);
        self.start(n, &["--server", &url, "--token", &token]);
    }

    pub fn kill(&mut self, n: usize) {
        self.machines[n].process = None;
    }

    pub fn signal(&self, n: usize, signal: Signal) {
        kill(self.machines[n].process.as_ref().expect("it runs").pid(), signal).unwrap();
    }

    /// Cuts a server off from etcd, the other servers and the clients, or connects it again.
    fn connect(&self, n: usize, up: bool) {
        let port = self.machines[n].port.clone();
        self.world.netns.run(move || block_on(ferrite_network::set_port(&port, up)).unwrap());
    }

    /// kubectl against one server.
    pub fn kubectl(&self, n: usize, arguments: &[&str]) -> String {
        let machine = &self.machines[n];
        let config = machine.data.join("config/admin.kubeconfig");
        let server = format!("--server=https://{}:6443", machine.address);
        let mut command = self.world.command("kubectl", &[&[server.as_str()], arguments].concat());
        let output = command.env("KUBECONFIG", config).output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "kubectl {arguments:?}: {complaint}\n{}", self.log(n));
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn get(&self, n: usize, arguments: &[&str]) -> Value {
        let text = self.kubectl(n, &[&["get", "-o", "json"], arguments].concat());
        ferrite_json::from_str(&text).unwrap()
    }

    /// The server that holds a lease, according to another one.
    fn leader(&self, asked: usize, lease: &str) -> Option<usize> {
        let leases = self.get(asked, &["leases", "-n", "kube-system"]);
        let lease =
            leases["items"].as_array()?.iter().find(|item| item["metadata"]["name"] == lease)?.clone();
        let holder = lease["spec"]["holderIdentity"].as_str()?;
        let id = |n: &usize| std::fs::read_to_string(self.machines[*n].data.join("server-id")).ok();
        (0..self.machines.len()).find(|n| id(n).is_some_and(|id| holder.ends_with(&id)))
    }

    fn wait_for_leader(&self, asked: usize, not: Option<usize>) -> usize {
        eventually("a manager leads", || {
            self.leader(asked, "kube-controller-manager").filter(|n| Some(*n) != not)
        })
    }

    /// Waits until the `kubernetes` Service has exactly these servers.
    pub fn wait_for_endpoints(&self, asked: usize, servers: &[usize]) {
        let want: Vec<&str> = servers.iter().map(|n| self.machines[*n].address.as_str()).collect();
        eventually(&format!("the endpoints are {want:?}"), || {
            let endpoints = self.get(asked, &["endpoints", "kubernetes"]);
            let listed = endpoints["subsets"][0]["addresses"].as_array()?;
            let listed: Vec<&str> = listed.iter().filter_map(|a| a["ip"].as_str()).collect();
            let slice = self.get(asked, &["endpointslice", "kubernetes"]);
            let sliced = slice["endpoints"].as_array()?;
            let sliced: Vec<&str> = sliced.iter().filter_map(|e| e["addresses"][0].as_str()).collect();
            (listed == want && sliced == want).then_some(())
        });
    }

    fn clients(&self) -> Arc<Clients> {
        let config = self.machines[0].data.join("config/admin.kubeconfig");
        let urls = self.machines.iter().map(|m| format!("https://{}:6443", m.address)).collect();
        Arc::new(Clients { config, urls, netns: self.world.netns.clone() })
    }
}

pub fn block_on<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(task)
}

/// Clients of all servers that go on with the next one when one fails.
pub struct Clients {
    pub config: PathBuf,
    pub urls: Vec<String>,
    pub netns: Netns,
}

impl Clients {
    async fn connect(&self) -> Vec<kube::Client> {
        let mut clients = Vec::new();
        for url in &self.urls {
            let file = kube::config::Kubeconfig::read_from(&self.config).unwrap();
            let mut config = kube::Config::from_custom_kubeconfig(file, &Default::default()).await.unwrap();
            config.cluster_url = url.parse().unwrap();
            config.connect_timeout = Some(Duration::from_secs(2));
            config.read_timeout = Some(Duration::from_secs(5));
            config.write_timeout = Some(Duration::from_secs(5));
            clients.push(kube::Client::try_from(config).unwrap());
        }
        clients
    }
}

/// Creates ConfigMaps one after the other, each until a server acknowledges it.
pub struct Writer {
    stop: Arc<AtomicBool>,
    /// Names that were acknowledged.
    acknowledged: Arc<Mutex<Vec<String>>>,
    /// Requests that failed on one server and were made again on the next.
    failed: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Writer {
    pub fn start(clients: &Arc<Clients>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(Mutex::new(Vec::new()));
        let failed = Arc::new(AtomicUsize::new(0));
        let task = {
            let (clients, stop) = (Arc::clone(clients), Arc::clone(&stop));
            let (acknowledged, failed) = (Arc::clone(&acknowledged), Arc::clone(&failed));
            async move {
                let all = clients.connect().await;
                let mut current = 0;
                for number in 0.. {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let name = format!("written-{number}");
                    let map: ConfigMap = ferrite_json::from_value(
                        json!({"metadata": {"name": name, "labels": {"by": "writer"}}}),
                    )
                    .unwrap();
                    let mut attempts = 0;
                    loop {
                        let api = kube::Api::<ConfigMap>::namespaced(all[current].clone(), "default");
                        match api.create(&PostParams::default(), &map).await {
                            Ok(_) => break,
                            // A request that failed may have been done all the same.
                            Err(kube::Error::Api(status))
                                if status.reason == "AlreadyExists" && attempts > 0 =>
                            {
                                break;
                            }
                            Err(_) => {
                                failed.fetch_add(1, Ordering::SeqCst);
                                attempts += 1;
                                current = (current + 1) % all.len();
                                tokio::time::sleep(Duration::from_millis(20)).await;
                            }
                        }
                    }
                    acknowledged.lock().unwrap().push(name);
                }
            }
        };
        let netns = clients.netns.clone();
        let thread = std::thread::spawn(move || netns.run(move || block_on(task)));
        Self { stop, acknowledged, failed, thread }
    }

    /// Waits until `count` more writes were acknowledged.
    pub fn more(&self, count: usize) {
        let before = self.acknowledged.lock().unwrap().len();
        eventually("writes go on", || {
            (self.acknowledged.lock().unwrap().len() >= before + count).then_some(())
        });
    }

    pub fn end(self) -> (Vec<String>, usize) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
        (self.acknowledged.lock().unwrap().clone(), self.failed.load(Ordering::SeqCst))
    }
}

/// Watches the writer's ConfigMaps and goes on at another server from the version it saw last.
pub struct Watcher {
    stop: Arc<AtomicBool>,
    /// Names in the order in which they were added, and how often a watch was begun.
    pub seen: Arc<Mutex<(Vec<String>, usize)>>,
    thread: JoinHandle<()>,
}

impl Watcher {
    pub fn start(clients: &Arc<Clients>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new((Vec::new(), 0)));
        let task = {
            let (clients, stop, seen) = (Arc::clone(clients), Arc::clone(&stop), Arc::clone(&seen));
            async move {
                use futures_util::StreamExt;
                let all = clients.connect().await;
                let api = |n: usize| kube::Api::<ConfigMap>::namespaced(all[n].clone(), "default");
                let list = api(0).list(&ListParams::default().labels("by=writer")).await.unwrap();
                assert!(list.items.is_empty());
                let mut version = list.metadata.resource_version.unwrap();
                let params = WatchParams::default().labels("by=writer");
                let mut current = 0;
                while !stop.load(Ordering::SeqCst) {
                    seen.lock().unwrap().1 += 1;
                    if let Ok(stream) = api(current).watch(&params, &version).await {
                        let mut stream = Box::pin(stream);
                        while let Some(Ok(event)) = stream.next().await {
                            match event {
                                WatchEvent::Added(map) => {
                                    version = map.metadata.resource_version.unwrap();
                                    seen.lock().unwrap().0.push(map.metadata.name.unwrap());
                                }
                                WatchEvent::Bookmark(mark) => version = mark.metadata.resource_version,
                                WatchEvent::Error(status) if status.code == 410 => {
                                    panic!("a gap: {status:?}")
                                }
                                WatchEvent::Error(_) => break,
                                other => panic!("{other:?}"),
                            }
                            if stop.load(Ordering::SeqCst) {
                                return;
                            }
                        }
                    }
                    current = (current + 1) % all.len();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        let netns = clients.netns.clone();
        let thread = std::thread::spawn(move || netns.run(move || block_on(task)));
        Self { stop, seen, thread }
    }

    /// Waits until it has seen all of them; returns them and how often a watch was begun.
    pub fn end(self, count: usize) -> (Vec<String>, usize) {
        eventually("the watch sees all", || (self.seen.lock().unwrap().0.len() >= count).then_some(()));
        self.stop.store(true, Ordering::SeqCst);
        // The stream ends by its read timeout at the latest.
        self.thread.join().unwrap();
        self.seen.lock().unwrap().clone()
    }
}

/// Every pod that was ever made for a label, by UID, whoever made it.
struct PodHistory {
    made: Arc<Mutex<BTreeMap<String, String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PodHistory {
    fn start(fleet: &Fleet, server: usize) -> Self {
        let (made, stop) = (Arc::<Mutex<BTreeMap<_, _>>>::default(), Arc::new(AtomicBool::new(false)));
        let clients = fleet.clients();
        let task = {
            let (made, stop, clients) = (Arc::clone(&made), Arc::clone(&stop), Arc::clone(&clients));
            async move {
                use futures_util::StreamExt;
                let api = kube::Api::<Pod>::namespaced(clients.connect().await[server].clone(), "default");
                let mut version =
                    api.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
                while !stop.load(Ordering::SeqCst) {
                    let Ok(stream) = api.watch(&WatchParams::default(), &version).await else { continue };
                    let mut stream = Box::pin(stream);
                    while let Some(Ok(event)) = stream.next().await {
                        let pod = match event {
                            WatchEvent::Added(pod) | WatchEvent::Modified(pod) | WatchEvent::Deleted(pod) => {
                                pod
                            }
                            _ => continue,
                        };
                        version = pod.metadata.resource_version.unwrap();
                        made.lock().unwrap().insert(pod.metadata.uid.unwrap(), pod.metadata.name.unwrap());
                        if stop.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                }
            }
        };
        let netns = clients.netns.clone();
        let thread = std::thread::spawn(move || netns.run(move || block_on(task)));
        Self { made, stop, thread: Some(thread) }
    }

    fn count(&self) -> usize {
        self.made.lock().unwrap().len()
    }
}

impl Drop for PodHistory {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let joined = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || joined.is_none_or(|joined| joined.is_ok()));
    }
}

fn living_pods(fleet: &Fleet, n: usize) -> usize {
    let pods = fleet.get(n, &["pods", "-l", "app=web"]);
    let living = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
    pods["items"].as_array().unwrap().iter().filter(living).count()
}

fn wait_for_pods(fleet: &Fleet, n: usize, count: usize) {
    eventually(&format!("there are {count} pods"), || (living_pods(fleet, n) == count).then_some(()));
}

#[test]
fn servers_join_share_and_replace_each_other() {
    let mut fleet = Fleet::new(3);
    fleet.start(0, &[]);
    // Keys come with a token or not at all, and nothing is left behind by an attempt.
    assert!(fleet.refused(1, &[]).contains("token create --server"));
    assert!(!fleet.machines[1].data.join("pki/ca.crt").exists());
    let url = format!("https://{}:6443", fleet.machines[0].address);
    let token = fleet.server_token(0);
    let (hash, rest) = token.split_once('.').unwrap();
    let stranger = format!("{}.{rest}", hash.chars().rev().collect::<String>());
    assert!(fleet.refused(1, &["--server", &url, "--token", &stranger]).contains("another key"));
    let output = fleet.command(0, &["token", "create"]).output().unwrap();
    let for_agents = String::from_utf8(output.stdout).unwrap();
    let refused = fleet.refused(1, &["--server", &url, "--token", for_agents.trim()]);
    assert!(refused.contains("that token is for agents"), "{refused}");
    // The bearer of an agent's token may not read the keys, sealed as they are.
    let bearer = for_agents.trim().split_once('.').unwrap().1.to_owned();
    let id = rest.split('.').next().unwrap();
    let secret = format!("{url}/api/v1/namespaces/kube-system/secrets/ferrite-server-keys-{id}");
    let header = format!("Authorization: Bearer {bearer}");
    let curl = fleet.world.command("curl", &["-sk", "-H", &header, &secret]).output().unwrap();
    assert!(String::from_utf8_lossy(&curl.stdout).contains("Forbidden"), "{curl:?}");
    fleet.start(1, &["--server", &url, "--token", &token]);
    fleet.join(2);
    let file = |n: usize, name: &str| {
        std::fs::read_to_string(fleet.machines[n].data.join("pki").join(name)).unwrap()
    };
    for name in ["ca.key", "sa.key", "front-proxy-ca.key"] {
        assert_eq!(file(0, name), file(1, name), "{name}");
        assert_eq!(file(0, name), file(2, name), "{name}");
    }
    fleet.wait_for_endpoints(1, &[0, 1, 2]);
    let leases = fleet
        .get(2, &["leases", "-n", "kube-system", "-l", "apiserver.kubernetes.io/identity=kube-apiserver"]);
    assert_eq!(leases["items"].as_array().unwrap().len(), 3, "one of each server");
    // A token of one server is good on all.
    fleet.kubectl(0, &["create", "serviceaccount", "traveller"]);
    let token = fleet.kubectl(0, &["create", "token", "traveller"]);
    let header = format!("Authorization: Bearer {}", token.trim());
    let review = format!(
        "https://{}:6443/apis/authentication.k8s.io/v1/selfsubjectreviews",
        fleet.machines[2].address
    );
    let body = r#"{"kind":"SelfSubjectReview","apiVersion":"authentication.k8s.io/v1"}"#;
    let arguments = ["-sk", "-H", &header, "-H", "Content-Type: application/json", "-d", body, &review];
    let curl = fleet.world.command("curl", &arguments).output().unwrap();
    assert!(
        String::from_utf8_lossy(&curl.stdout).contains("system:serviceaccount:default:traveller"),
        "{curl:?}"
    );

    let leader = fleet.wait_for_leader(1, None);
    assert_eq!(leader, 0, "the first server leads");
    assert_eq!(fleet.leader(1, "kube-scheduler"), Some(0));
    let history = PodHistory::start(&fleet, 1);
    let clients = fleet.clients();
    let watcher = Watcher::start(&clients);
    eventually("the watch begins", || (watcher.seen.lock().unwrap().1 > 0).then_some(()));
    let writer = Writer::start(&clients);
    fleet.kubectl(1, &["create", "deployment", "web", "--image=none", "--replicas=5"]);
    wait_for_pods(&fleet, 1, 5);
    writer.more(20);

    // The leader dies in the middle of its work. The clients go on with another server.
    fleet.kubectl(1, &["scale", "deployment", "web", "--replicas=25"]);
    fleet.kill(0);
    writer.more(20);
    let second = fleet.wait_for_leader(1, Some(0));
    wait_for_pods(&fleet, 1, 25);
    fleet.wait_for_endpoints(1, &[1, 2]);
    let scheduler = eventually("a scheduler leads", || fleet.leader(1, "kube-scheduler").filter(|n| *n != 0));
    eventually("the scheduler says why each pod waits", || {
        let pods = fleet.get(1, &["pods", "-l", "app=web"]);
        let waits = |pod: &Value| condition(pod, "PodScheduled") == Some("False");
        pods["items"].as_array()?.iter().all(waits).then_some(())
    });

    // It comes back without a token, and follows.
    fleet.start(0, &[]);
    fleet.wait_for_endpoints(2, &[0, 1, 2]);
    assert_eq!(fleet.leader(0, "kube-controller-manager"), Some(second));
    assert_eq!(fleet.leader(0, "kube-scheduler"), Some(scheduler));

    // A server that ends in order hands over and leaves the endpoints at once.
    fleet.signal(second, Signal::SIGTERM);
    let other = if second == 1 { 2 } else { 1 };
    fleet.wait_for_leader(other, Some(second));
    fleet.wait_for_endpoints(other, &[0, other]);
    let ended = fleet.machines[second].process.as_mut().unwrap().0.wait().unwrap();
    assert!(ended.success(), "{}", fleet.log(second));
    let endpoints = format!("--endpoints=http://{HOST}:2379");
    let arguments = [&endpoints, "get", "--prefix", "--keys-only", "/registry/masterleases/"];
    let keys = fleet.world.command("etcdctl", &arguments).env("ETCDCTL_API", "3").output().unwrap();
    let keys = String::from_utf8(keys.stdout).unwrap();
    assert!(keys.contains(&fleet.machines[other].address), "{keys}");
    assert!(!keys.contains(&fleet.machines[second].address), "it left no lease behind: {keys}");

    writer.more(20);
    let (acknowledged, failed) = writer.end();
    let (seen, watches) = watcher.end(acknowledged.len());
    let stored = fleet.get(other, &["configmaps", "-l", "by=writer"]);
    let stored: BTreeSet<&str> =
        stored["items"].as_array().unwrap().iter().filter_map(|m| m["metadata"]["name"].as_str()).collect();
    let lost: Vec<&String> = acknowledged.iter().filter(|name| !stored.contains(name.as_str())).collect();
    assert!(lost.is_empty(), "lost writes: {lost:?}");
    assert_eq!(seen, acknowledged, "the watch saw each once, in order");
    assert!(watches >= 2, "the watch went on at another server");
    // A request fails when its server dies; on the servers that live none does.
    assert!(failed <= 20, "{failed} requests failed");
    assert_eq!(history.count(), 25, "no pod was made twice");
}

/// Enough pods that a leader is paused before it has made them all.
const MANY: usize = 200;
/// Most pods that a ReplicaSet's controller creates in parallel for this number of replicas: batches double
/// in size.
const BATCH: usize = 68;

#[test]
fn a_leader_that_was_paused_or_cut_off_does_not_go_on() {
    let mut fleet = Fleet::new(2);
    fleet.start(0, &[]);
    fleet.join(1);
    fleet.wait_for_endpoints(1, &[0, 1]);
    assert_eq!(fleet.wait_for_leader(1, None), 0);
    let history = PodHistory::start(&fleet, 1);
    fleet.kubectl(1, &["create", "deployment", "web", "--image=none", "--replicas=5"]);
    wait_for_pods(&fleet, 1, 5);

    // Paused while it works: the other one finishes, and the first finds its time over when it wakes up.
    let scale = |fleet: &Fleet, server: usize, pods: usize| {
        fleet.kubectl(server, &["scale", "deployment", "web", &format!("--replicas={pods}")]);
    };
    scale(&fleet, 1, MANY);
    eventually("the leader works", || (history.count() > 5).then_some(()));
    fleet.signal(0, Signal::SIGSTOP);
    let done = history.count();
    assert!(done < MANY, "the leader was faster than the pause");
    assert_eq!(fleet.wait_for_leader(1, Some(0)), 1);
    wait_for_pods(&fleet, 1, MANY);
    fleet.wait_for_endpoints(1, &[1]);
    fleet.signal(0, Signal::SIGCONT);
    eventually("the paused leader finds its lease lost", || {
        fleet.log(0).matches("lost the lease").nth(1).map(|_| ())
    });
    fleet.wait_for_endpoints(1, &[0, 1]);
    scale(&fleet, 0, MANY + 1);
    wait_for_pods(&fleet, 0, MANY + 1);
    // Writes that were on their way to the etcd when the process stopped may arrive when it wakes up: those of one
    // batch of the ReplicaSet at most. A leader that went on with its work would make all that it had left.
    let (twice, left) = (history.count() - (MANY + 1), MANY - done);
    assert!(twice <= BATCH, "{twice} pods were made twice, {left} were left to make");

    // Cut off: it gives up, the other stays, and afterwards it serves the other's writes.
    fleet.kubectl(1, &["create", "configmap", "before"]);
    fleet.connect(1, false);
    assert_eq!(fleet.wait_for_leader(0, Some(1)), 0);
    fleet.wait_for_endpoints(0, &[0]);
    scale(&fleet, 0, MANY + 2);
    eventually("a pod is made without the server that is cut off", || {
        (living_pods(&fleet, 0) == MANY + 2).then_some(())
    });
    fleet.kubectl(0, &["create", "configmap", "meanwhile"]);
    eventually("the server that is cut off gives up", || {
        fleet.log(1).contains("lost the lease").then_some(())
    });
    fleet.connect(1, true);
    fleet.wait_for_endpoints(0, &[0, 1]);
    eventually("it serves what was written meanwhile", || {
        let maps = fleet.kubectl(1, &["get", "configmaps", "-o", "name"]);
        (maps.contains("before") && maps.contains("meanwhile")).then_some(())
    });
    assert_eq!(fleet.leader(1, "kube-controller-manager"), Some(0));
    eventually("the history is complete", || (history.count() == MANY + 2 + twice).then_some(()));
}

/// A machine with an agent, on the same segment.
pub struct Worker {
    pub netns: Netns,
    pub data: PathBuf,
    log: PathBuf,
}

pub const WORKER: &str = "192.0.2.100";

impl Worker {
    pub fn new(fleet: &Fleet) -> Self {
        let netns = Netns::new();
        let path = netns.path();
        fleet.world.netns.run(move || {
            block_on(async {
                let segment = ferrite_network::Segment::find("machines", "none").await.unwrap().unwrap();
                segment.attach("worker", &path, WORKER.parse().unwrap()).await.unwrap();
            });
        });
        Self { netns, data: fleet.world.path("worker"), log: fleet.world.path("worker.log") }
    }

    pub fn ferrite(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(ferrite());
        command.args(arguments).arg("--data-dir").arg(&self.data);
        self.netns.enter(&mut command);
        command
    }

    pub fn agent(&self, extra: &[&str]) -> Process {
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let mut command = self.ferrite(&["agent", "-v", "2", "--node-name", "worker", "--node-ip", WORKER]);
        Process(command.args(extra).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    /// Joins the cluster through the first server, and waits until server `n` shows the node as ready.
    pub fn join(&self, fleet: &Fleet, n: usize) -> Process {
        let url = format!("https://{}:6443", fleet.machines[0].address);
        let output = fleet.command(0, &["token", "create"]).output().unwrap();
        let token = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        let agent = self.agent(&["--server", &url, "--token", &token]);
        eventually("the node is registered", || {
            fleet.kubectl(n, &["get", "nodes", "-o", "name"]).contains("node/worker").then_some(())
        });
        wait_ready(fleet, n, "node", "worker");
        agent
    }

    fn certificate(&self, name: &str) -> String {
        std::fs::read_to_string(self.data.join("pki").join(format!("{name}.crt"))).unwrap_or_default()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- agent\n{}", self.log());
        }
        let output = self.ferrite(&["down"]).output().unwrap();
        assert!(output.status.success() || std::thread::panicking(), "{output:?}");
    }
}

pub fn create_pod(fleet: &Fleet, n: usize, name: &str) {
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - {{name: c, image: {TOOLS}, command: [/ferrite, tools, http]}}\n"
    );
    let path = fleet.world.write(&format!("{name}.yaml"), &manifest);
    fleet.kubectl(n, &["create", "-f", path.to_str().unwrap()]);
}

pub fn wait_ready(fleet: &Fleet, n: usize, kind: &str, name: &str) -> Value {
    eventually(&format!("{kind} {name} is Ready"), || {
        Some(fleet.get(n, &[kind, name])).filter(|object| condition(object, "Ready") == Some("True"))
    })
}

pub fn echo(fleet: &Fleet, n: usize, pod: &str) -> String {
    fleet.kubectl(n, &["exec", pod, "--", "/ferrite", "tools", "echo", "here"])
}

#[test]
fn an_agent_goes_on_with_another_server_and_renews_its_certificates() {
    let mut fleet = Fleet::new(2);
    let short = ["--cluster-signing-duration", "30s"];
    fleet.start(0, &short);
    let token = fleet.server_token(0);
    let url = format!("https://{}:6443", fleet.machines[0].address);
    fleet.start(1, &[&short[..], &["--server", &url, "--token", &token]].concat());
    fleet.wait_for_endpoints(1, &[0, 1]);
    let worker = Worker::new(&fleet);
    let agent = worker.join(&fleet, 1);
    create_pod(&fleet, 0, "first");
    wait_ready(&fleet, 1, "pod", "first");
    let known = || std::fs::read_to_string(worker.data.join("servers.json")).unwrap_or_default();
    eventually("the agent knows both servers", || {
        fleet.machines.iter().all(|machine| known().contains(&machine.address)).then_some(())
    });

    // All certificates are replaced while the agent runs, and those it began with have ended.
    const NAMES: [&str; 4] = ["kubelet-client", "kubelet", "kube-proxy", "dns"];
    let begun = NAMES.map(|name| worker.certificate(name));
    let has_ended = |certificate: &str| {
        let (_, pem) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()).unwrap();
        let ends = pem.parse_x509().unwrap().validity().not_after.timestamp();
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64 > ends
    };
    eventually("all certificates are replaced", || {
        let replaced =
            |(name, begun): (&&str, &String)| worker.certificate(name) != *begun && has_ended(begun);
        NAMES.iter().zip(&begun).all(replaced).then_some(())
    });
    assert_eq!(echo(&fleet, 1, "first").trim(), "here");
    create_pod(&fleet, 1, "second");
    wait_ready(&fleet, 1, "pod", "second");

    // The server that the agent uses dies: pods are still made, and the node stays Ready.
    fleet.kill(0);
    create_pod(&fleet, 1, "third");
    wait_ready(&fleet, 1, "pod", "third");
    assert_eq!(echo(&fleet, 1, "third").trim(), "here");

    // After a reboot of the machine the first server is still gone; the list on disk has the other.
    drop(agent);
    let _agent = worker.agent(&[]);
    create_pod(&fleet, 1, "fourth");
    wait_ready(&fleet, 1, "pod", "fourth");

    // A server that is paused takes connections and answers nothing.
    fleet.start(0, &short);
    fleet.wait_for_endpoints(0, &[0, 1]);
    eventually("the agent knows both servers", || {
        fleet.machines.iter().all(|machine| known().contains(&machine.address)).then_some(())
    });
    fleet.signal(1, Signal::SIGSTOP);
    eventually("the agent leaves the paused server", || {
        worker.log().contains("going on with the next").then_some(())
    });
    eventually("the other server leads", || fleet.leader(0, "kube-scheduler").filter(|n| *n == 0));
    create_pod(&fleet, 0, "fifth");
    wait_ready(&fleet, 0, "pod", "fifth");
    assert_eq!(echo(&fleet, 0, "fifth").trim(), "here");
}
