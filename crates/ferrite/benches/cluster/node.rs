//! A full node: its pods, what they cost while nothing happens, and a restart under them.

use crate::api::{Api, PATIENCE, container_process, is_ready, text};
use crate::{Bench, percentile, processes_named, tell};
use ferrite_json::{Value, json};
use ferrite_memory::usage::{processor_time, rollup};
use std::collections::HashSet;
use std::process::Child;
use std::time::{Duration, Instant};

/// As many as a node takes.
const FULL: usize = 110;
const EXITS: usize = 50;
const IDLE: Duration = Duration::from_secs(30);
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";
pub const PODS: &str = "/api/v1/namespaces/default/pods";

/// Returns the process of the cluster, which is another one after the restart.
pub fn run(bench: &Bench, child: Child) -> Child {
    let api = Api::start(bench);
    let changes = api.watch(PODS);
    let began = Instant::now();
    api.create(DEPLOYMENTS, &deployment());
    let mut ready: HashSet<String> = HashSet::new();
    let mut pods: Vec<Value> = Vec::new();
    let mut last = began;
    while ready.len() < FULL {
        let (pod, at) = changes.recv_timeout(PATIENCE).unwrap();
        if is_ready(&pod) && ready.insert(text(&pod, "name").to_owned()) {
            last = at;
            pods.push(pod);
        }
    }
    tell(&format!("{FULL} pods, created to all Ready, ms"), (last - began).as_secs_f64() * 1e3);

    let processes = || std::iter::once(child.id()).chain(supervisors(bench));
    let spent = || processes().map(processor_time).sum::<Duration>();
    let (_keep, never) = std::sync::mpsc::channel::<()>();
    let _ = never.recv_timeout(IDLE);
    let before = spent();
    let _ = never.recv_timeout(IDLE);
    let share = (spent() - before).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    tell(&format!("idle with {FULL} pods, % of one processor"), share);
    tell("  PSS of the cluster besides supervisors, KiB", rollup(child.id(), "Pss:") as f64);
    let private: u64 = supervisors(bench).map(|pid| rollup(pid, "Private_")).sum();
    tell("  private memory of supervisors, KiB", private as f64);
    drop(changes);
    drop(api);

    let child = restart(bench, child);
    exits(bench);
    let mut delete = bench.kubectl(&["delete", "deployment,pods", "--all", "--wait=true"]);
    assert!(delete.output().unwrap().status.success());
    child
}

fn deployment() -> Value {
    let container = json!({"name": "c", "image": "ferrite.local/tools:latest", "imagePullPolicy": "IfNotPresent", "args": ["sleep"]});
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "full"},
        "spec": {"replicas": FULL, "selector": {"matchLabels": {"app": "full"}},
            "template": {"metadata": {"labels": {"app": "full"}},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}}})
}

fn supervisors(bench: &Bench) -> impl Iterator<Item = u32> + use<> {
    processes_named("ferrite-supervisor", &bench.dir).into_iter().map(i32::unsigned_abs)
}

/// Kills everything but supervisors and containers, and waits until the next process knows all pods again.
fn restart(bench: &Bench, mut child: Child) -> Child {
    child.kill().unwrap();
    child.wait().unwrap();
    let began = Instant::now();
    let (child, steps) = bench.up();
    for (step, at) in steps {
        tell(&format!("restart with {FULL} pods: {step}, ms"), at.as_secs_f64() * 1e3);
    }
    let api = Api::start(bench);
    let wanted = format!("kubelet_running_pods {FULL}");
    let adopted = loop {
        let (code, text) = api.send("GET", "/api/v1/nodes/bench/proxy/metrics", "");
        if code == 200 && text.lines().any(|line| line == wanted) {
            break began.elapsed();
        }
        assert!(began.elapsed() < PATIENCE, "{code}: {text}");
    };
    tell(
        "  the kubelet's metrics count all of them, ms (with the start of kubectl)",
        adopted.as_secs_f64() * 1e3,
    );
    let (_, list) = api.send("GET", PODS, "");
    let list: Value = ferrite_json::from_str(&list).unwrap();
    let pods = list["items"].as_array().unwrap();
    let restarts = pods.iter().filter(|pod| pod["status"]["containerStatuses"][0]["restartCount"] != 0);
    tell("  containers that were restarted", restarts.count() as f64);
    child
}

/// Ends the process of a container, and waits for the watch to show it.
fn exits(bench: &Bench) {
    let mut scale = bench.kubectl(&["scale", "deployment", "full", "--replicas=0"]);
    assert!(scale.output().unwrap().status.success());
    let mut wait = bench.kubectl(&["wait", "--for=delete", "pods", "-l", "app=full", "--timeout=120s"]);
    assert!(wait.output().unwrap().status.success());
    let api = Api::start(bench);
    let changes = api.watch(PODS);
    let mut times = Vec::new();
    for number in 0..EXITS {
        let name = format!("exit-{number}");
        let container = json!({"name": "c", "image": "ferrite.local/tools:latest", "imagePullPolicy": "IfNotPresent", "args": ["sleep"]});
        api.create(
            PODS,
            &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
                "spec": {"restartPolicy": "Never", "containers": [container]}}),
        );
        let await_pod = |check: &dyn Fn(&Value) -> bool| loop {
            let (pod, at) = changes.recv_timeout(PATIENCE).unwrap();
            if text(&pod, "name") == name && check(&pod) {
                break (pod, at);
            }
        };
        let (pod, _) = await_pod(&is_ready);
        let process = nix::unistd::Pid::from_raw(container_process(&pod));
        let began = Instant::now();
        nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGKILL).unwrap();
        let (_, at) = await_pod(&|pod| pod["status"]["phase"] == "Failed");
        times.push(at - began);
    }
    times.sort();
    tell(
        &format!("exit of a container to its status in the API, p50 of {EXITS}, ms"),
        percentile(&times, 0.5),
    );
    tell(
        &format!("exit of a container to its status in the API, p99 of {EXITS}, ms"),
        percentile(&times, 0.99),
    );
}
