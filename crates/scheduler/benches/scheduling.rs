//! The scheduler beside an API server with a durable store, both in this process, in the shapes of upstream's
//! `scheduler_perf`. Prints a table; numbers, not tests.
//!
//! `cargo bench -p ferrite-scheduler` runs all of it; shapes can be chosen: `-- basic node-affinity spread
//! pod-affinity anti-affinity preemption unschedulable one thirty-thousand`. `NODES` is the number of nodes, 5,000
//! without it. `METRICS` is a list of beginnings of names: the metrics with such names that changed during the
//! measurement are printed with their change. `TIMELINE` prints the steps of a few of the last pods. Nodes are objects without kubelets. The time of a shape is that from the first create to the last binding.
//!
//! The load is prepared before the clock starts, and its responses are not decoded: the numbers are those of server and
//! scheduler. Memory is that of the whole process at the end; for `thirty-thousand` once more when it has come to rest.
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

use std::collections::{HashMap, HashSet};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferrite_apiserver::{ApiServer, Config as ServerConfig, User};
use ferrite_client::{Events, Informer, Informers, Scope};
use ferrite_json::{Value, json};
use ferrite_scheduler::{Configuration, Registry, SchedulerContext};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::client::Body;
use tokio::sync::Notify;

#[global_allocator]
static ALLOCATOR: ferrite_memory::Allocator = ferrite_memory::Allocator;

/// Writes under way at once, as many as upstream's load has.
const WRITERS: usize = 64;

/// A load: pods that are there before the clock starts, pods that count, and what they look like.
struct Shape {
    name: &'static str,
    /// Scheduled before the measurement.
    before: usize,
    measured: usize,
    /// Pods that fit nowhere, made before those that count.
    hopeless: usize,
    /// A node can hold four pods.
    is_tight: bool,
    pod: fn(usize) -> Value,
    /// The pods that are there before; `pod` without it.
    earlier: Option<fn(usize) -> Value>,
}

/// The shape whose memory is promised.
const THIRTY_THOUSAND: &str = "thirty-thousand";
/// Decoded objects and free memory are given back some time after the last request.
const REST: Duration = Duration::from_secs(60);

const SHAPES: &[Shape] = &[
    Shape {
        name: "basic",
        before: 1000,
        measured: 10_000,
        hopeless: 0,
        is_tight: false,
        pod: plain,
        earlier: None,
    },
    Shape {
        name: "node-affinity",
        before: 1000,
        measured: 10_000,
        hopeless: 0,
        is_tight: false,
        pod: |n| {
            let terms = json!([{"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In",
                "values": ["zone-1", "zone-2"]}]}]);
            with(
                n,
                "affinity",
                json!({"nodeAffinity":
                {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}),
            )
        },
        earlier: None,
    },
    Shape {
        name: "spread",
        before: 1000,
        measured: 5000,
        hopeless: 0,
        is_tight: false,
        pod: |n| {
            with(
                n,
                "topologySpreadConstraints",
                json!([{"maxSkew": 5, "whenUnsatisfiable": "DoNotSchedule",
                "topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": {"app": "web"}}}]),
            )
        },
        earlier: Some(plain),
    },
    Shape {
        name: "pod-affinity",
        before: 1000,
        measured: 5000,
        hopeless: 0,
        is_tight: false,
        pod: |n| with(n, "affinity", json!({"podAffinity": same_zone("topology.kubernetes.io/zone")})),
        earlier: None,
    },
    Shape {
        name: "anti-affinity",
        before: 500,
        measured: 2000,
        hopeless: 0,
        is_tight: false,
        pod: |n| with(n, "affinity", json!({"podAntiAffinity": same_zone("kubernetes.io/hostname")})),
        earlier: None,
    },
    Shape {
        name: "preemption",
        before: 20_000,
        measured: 5000,
        hopeless: 0,
        is_tight: true,
        pod: |n| {
            let mut pod = sized(n, "3000m");
            pod["spec"]["priorityClassName"] = json!("high");
            pod
        },
        earlier: Some(|n| sized(n, "900m")),
    },
    Shape {
        name: "unschedulable",
        before: 0,
        measured: 10_000,
        hopeless: 200,
        is_tight: false,
        pod: plain,
        earlier: None,
    },
    Shape { name: "one", before: 1000, measured: 1, hopeless: 0, is_tight: false, pod: plain, earlier: None },
    Shape {
        name: THIRTY_THOUSAND,
        before: 0,
        measured: 30_000,
        hopeless: 0,
        is_tight: false,
        pod: plain,
        earlier: None,
    },
];

fn plain(number: usize) -> Value {
    sized(number, "100m")
}

fn sized(number: usize, cpu: &str) -> Value {
    json!({"metadata": {"name": format!("pod-{number}"), "labels": {"app": "web"}},
        // No kubelet ends it.
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "registry.k8s.io/pause:3.10",
            "resources": {"requests": {"cpu": cpu, "memory": "100Mi"}}}]}})
}

fn with(number: usize, field: &str, value: Value) -> Value {
    let mut pod = plain(number);
    pod["spec"][field] = value;
    pod
}

fn same_zone(key: &str) -> Value {
    json!({"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": key, "labelSelector": {"matchLabels": {"app": "web"}}}]})
}

/// Given to the process of one shape, whose parent has printed the head of the table.
const ALONE: &str = "--alone";

fn main() {
    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let nodes = std::env::var("NODES").ok().and_then(|n| n.parse().ok()).unwrap_or(5000);
    let is_chosen = |shape: &&Shape| parts.is_empty() || parts.iter().any(|part| part == shape.name);
    let chosen: Vec<&Shape> = SHAPES.iter().filter(is_chosen).collect();
    if !std::env::args().any(|argument| argument == ALONE) {
        println!(
            "{:<16} {:>8} {:>8} {:>10} {:>12} {:>10}",
            "shape", "nodes", "pods", "pods/s", "cpu/pod", "memory"
        );
        // What one shape leaves in memory would slow the next one down.
        for shape in chosen {
            let program = std::env::current_exe().unwrap();
            assert!(Command::new(program).args([ALONE, shape.name]).status().unwrap().success());
        }
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for shape in chosen {
        runtime.block_on(run(shape, nodes));
    }
}

async fn run(shape: &Shape, nodes: usize) {
    let directory = tempfile::tempdir().unwrap();
    let world = World::start(directory.path()).await;
    world.prepare(nodes, shape.is_tight).await;
    let earlier = shape.earlier.unwrap_or(shape.pod);
    world.schedule(bodies(shape.before, |n| renamed(earlier(n), format!("before-{n}")))).await;
    let hopeless = bodies(shape.hopeless, |n| renamed(sized(n, "1000"), format!("hopeless-{n}")));
    create_many(&world.client, PODS, hopeless).await;
    let measured = bodies(shape.measured, shape.pod);
    let before = metrics();
    let (began, spent) = (Instant::now(), processor_time());
    world.schedule(measured).await;
    let (elapsed, spent) = (began.elapsed(), processor_time() - spent);
    let count = shape.measured as f64;
    println!(
        "{:<16} {:>8} {:>8} {:>10.0} {:>9.0} µs {:>6} MiB",
        shape.name,
        nodes,
        shape.measured,
        count / elapsed.as_secs_f64(),
        spent.as_secs_f64() * 1e6 / count,
        proportional_memory() / 1024
    );
    print_changes(&before);
    world.print_timelines();
    if shape.name == THIRTY_THOUSAND {
        tokio::time::sleep(REST).await;
        println!("{:<16} {:>70}", "  at rest", format!("{} MiB", proportional_memory() / 1024));
    }
    world.stop().await;
}

fn renamed(mut pod: Value, name: String) -> Value {
    pod["metadata"]["name"] = json!(name);
    pod
}

struct World {
    client: Client,
    server: Arc<ApiServer>,
    scope: Scope,
    /// Pods that were seen with a node.
    bound: Arc<AtomicUsize>,
    changed: Arc<Notify>,
    pods: Informer<Pod>,
}

impl World {
    async fn start(directory: &std::path::Path) -> Self {
        let store =
            ferrite_store::Store::open(&directory.join("store"), Default::default(), Default::default())
                .unwrap();
        let mut config = ServerConfig {
            service_ranges: vec![ferrite_api::Cidr::parse("10.96.0.0/12").unwrap()],
            ..ServerConfig::new("192.0.2.1:6443".parse().unwrap())
        };
        // No controller takes the taint of new nodes away here.
        config.admission.disable.push("TaintNodesByCondition".into());
        let server = ApiServer::start(Arc::new(store), config).await.unwrap();
        let client_of = |user| Client::new(server.in_process_client(user), "default");
        let client = client_of(User::new("system:admin", ["system:masters"]));
        let scheduler = client_of(User::new("system:kube-scheduler", ["system:authenticated"]));
        let scope = Scope::new();
        let informers = Informers::new(scheduler.clone(), scope.clone());
        let pods: Informer<Pod> = informers.get();
        let (bound, changed) = (Arc::default(), Arc::default());
        let world = Self { client, server, scope, bound, changed, pods: pods.clone() };
        ferrite_scheduler::start(&SchedulerContext {
            client: scheduler.clone(),
            informers: informers.clone(),
            events: Events::start(scheduler, &world.scope),
            scope: world.scope.clone(),
            configuration: Configuration::default(),
            registry: Registry::default(),
            extenders: Vec::new(),
        })
        .unwrap();
        let (bound, changed) = (world.bound.clone(), world.changed.clone());
        let seen = Mutex::new(HashSet::new());
        pods.subscribe(move |change| {
            let pod = change.object();
            let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
            if has_node && seen.lock().unwrap().insert(pod.metadata.name.clone()) {
                bound.fetch_add(1, Ordering::Relaxed);
                changed.notify_one();
            }
        });
        world
    }

    /// Makes the nodes, the account and the class that pods need.
    async fn prepare(&self, nodes: usize, is_tight: bool) {
        let account = bodies(1, |_| json!({"metadata": {"name": "default"}}));
        create_many(&self.client, "/api/v1/namespaces/default/serviceaccounts", account).await;
        let class = bodies(1, |_| json!({"metadata": {"name": "high"}, "value": 1000}));
        create_many(&self.client, "/apis/scheduling.k8s.io/v1/priorityclasses", class).await;
        let cpu = if is_tight { "4" } else { "32" };
        let amounts = json!({"cpu": cpu, "memory": "64Gi", "pods": "110"});
        let nodes = bodies(nodes, |number| {
            let name = format!("node-{number}");
            json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name,
                    "topology.kubernetes.io/zone": format!("zone-{}", number % 3)}},
                "status": {"allocatable": amounts, "capacity": amounts, "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}})
        });
        create_many(&self.client, "/api/v1/nodes", nodes).await;
    }

    /// Makes pods and waits until each has a node.
    async fn schedule(&self, pods: Vec<Vec<u8>>) {
        let target = self.bound.load(Ordering::Relaxed) + pods.len();
        let all_bound = async {
            while self.bound.load(Ordering::Relaxed) < target {
                self.changed.notified().await;
            }
        };
        let both = async { tokio::join!(create_many(&self.client, PODS, pods), all_bound) };
        let bound = || self.bound.load(Ordering::Relaxed);
        assert!(
            tokio::time::timeout(Duration::from_secs(600), both).await.is_ok(),
            "{} of {target} pods have a node",
            bound()
        );
    }

    /// Prints the steps in the lives of some pods that the process remembers, in milliseconds since the first.
    fn print_timelines(&self) {
        if std::env::var("TIMELINE").is_err() {
            return;
        }
        let pods = self.pods.list();
        for pod in pods.iter().filter(|pod| pod.metadata.name.as_deref().is_some_and(|n| n.ends_with("77"))) {
            let mut steps = ferrite_component::steps::of(pod.metadata.uid.as_deref()).steps;
            steps.sort_by_key(|step| step.began);
            let Some(first) = steps.first().map(|step| step.began) else { continue };
            let ms = |micros: u64| micros as f64 / 1e3;
            println!("  {}", pod.metadata.name.as_deref().unwrap_or_default());
            for step in &steps {
                let (began, took) = (ms(step.began - first), ms(step.took));
                println!("    {began:9.1} +{took:7.1} {} {}: {}", step.component, step.name, step.detail);
            }
        }
    }

    async fn stop(self) {
        self.scope.shutdown().await;
        self.server.shutdown().await;
    }
}

/// Where pods are made.
const PODS: &str = "/api/v1/namespaces/default/pods";

/// The bodies of requests that create objects.
fn bodies(count: usize, object: impl Fn(usize) -> Value) -> Vec<Vec<u8>> {
    (0..count).map(|number| ferrite_json::to_vec(&object(number)).unwrap()).collect()
}

/// Makes objects, several at a time.
async fn create_many(client: &Client, path: &str, bodies: Vec<Vec<u8>>) {
    futures_util::stream::iter(bodies)
        .for_each_concurrent(WRITERS, |body| async move {
            let request = http::Request::post(path).header("content-type", "application/json");
            let response = client.send(request.body(Body::from(body)).unwrap()).await.unwrap();
            assert!(response.status().is_success(), "{path}: {}", response.status());
        })
        .await;
}

/// The metrics that `METRICS` asks for.
fn metrics() -> HashMap<String, f64> {
    let Ok(names) = std::env::var("METRICS") else { return HashMap::new() };
    let names: Vec<&str> = names.split(',').collect();
    let text = ferrite_component::metrics::registry().text();
    let wanted = text.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
    wanted
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().ok()?))
        })
        .collect()
}

fn print_changes(before: &HashMap<String, f64>) {
    let mut after: Vec<_> = metrics().into_iter().collect();
    after.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (series, value) in after {
        let change = value - before.get(&series).copied().unwrap_or(0.0);
        if change != 0.0 {
            println!("  {series} {change}");
        }
    }
}

/// The processor time of this process.
fn processor_time() -> Duration {
    ferrite_memory::usage::processor_time(std::process::id())
}

/// The PSS of this process in KiB.
fn proportional_memory() -> u64 {
    ferrite_memory::usage::rollup(std::process::id(), "Pss:")
}
