//! Start-up, pod start and memory of a whole cluster, printed as a table. Numbers, not tests.
//!
//! `cargo xtask bench cluster` runs all of it; parts can be chosen with `cargo bench -p ferrite --bench cluster --
//! start pods node network`. It runs in a network namespace of its own and in a temporary directory, and removes both.
//! `FERRITE_BENCH_BINARY` names another build of the program to measure.

#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

mod api;
mod data_path;
mod node;

use ferrite_json::Value;
use ferrite_memory::usage::rollup;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The environment variable that names another build of the program to measure.
const BINARY: &str = "FERRITE_BENCH_BINARY";
const PODS: usize = 50;
const SETTLE: Duration = Duration::from_secs(60);

fn main() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("the benchmark runs containers and needs root");
        std::process::exit(1);
    }
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let dir = tempfile::Builder::new().prefix("fb").tempdir().unwrap();
    let bench = Bench { dir: dir.path().to_owned() };

    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    println!("{:<76} {:>12}", "what", "seen");
    if wanted("start") {
        for round in 0..5 {
            let (child, steps) = bench.up();
            let what = if round == 0 { "first start" } else { "later start" };
            for (step, at) in &steps {
                tell(&format!("exec to {step}, {what}, ms"), at.as_secs_f64() * 1e3);
            }
            bench.finish(child);
        }
    }
    let (mut child, _) = bench.up();
    if wanted("pods") {
        bench.pods();
        bench.memory(&child);
    }
    if wanted("network") {
        data_path::run(&bench);
    }
    if wanted("node") {
        child = node::run(&bench, child);
    }
    bench.finish(child);
    bench.ferrite(&["down"]).output().unwrap();
}

fn tell(what: &str, seen: f64) {
    println!("{what:<76} {seen:>12.1}");
}

/// A percentile of sorted times, in milliseconds.
fn percentile(times: &[Duration], part: f64) -> f64 {
    times[((times.len() - 1) as f64 * part).round() as usize].as_secs_f64() * 1e3
}

struct Bench {
    dir: PathBuf,
}

impl Bench {
    fn ferrite(&self, arguments: &[&str]) -> Command {
        let program = std::env::var_os(BINARY).unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrite").into());
        let mut command = Command::new(program);
        command.args(&arguments[..1]).arg("--data-dir").arg(self.dir.join("d")).args(&arguments[1..]);
        command.env("HOME", &self.dir).env("KUBECONFIG", self.dir.join("kubeconfig"));
        command
    }

    /// Starts a cluster and notes when it says that the API and the node are ready.
    fn up(&self) -> (Child, Vec<(&'static str, Duration)>) {
        let started = Instant::now();
        let mut child = self
            .ferrite(&["up", "--node-name", "bench"])
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut steps = Vec::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for line in lines.by_ref().map_while(Result::ok) {
            if line.contains("API server") {
                steps.push(("API ready", started.elapsed()));
            } else if line.contains("is Ready") {
                steps.push(("node Ready", started.elapsed()));
            } else if line.contains("removes every trace") {
                break;
            }
        }
        std::thread::spawn(move || lines.for_each(drop));
        (child, steps)
    }

    fn finish(&self, mut child: Child) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        child.wait().unwrap();
    }

    fn kubectl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(arguments).env("HOME", &self.dir).env("KUBECONFIG", self.dir.join("kubeconfig"));
        command
    }

    /// Creates pods one after another and takes, from the objects themselves, the time from creation to Ready as the
    /// watch shows it.
    fn pods(&self) {
        let mut watch =
            self.kubectl(&["get", "pods", "-w", "-o", "json"]).stdout(Stdio::piped()).spawn().unwrap();
        let (seen, ready) = std::sync::mpsc::channel::<(String, Instant)>();
        let stdout = BufReader::new(watch.stdout.take().unwrap());
        std::thread::spawn(move || {
            for pod in ferrite_json::Deserializer::from_reader(stdout).into_iter::<Value>() {
                let Ok(pod) = pod else { return };
                let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
                if conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True") {
                    let _ = seen.send((pod["metadata"]["name"].as_str().unwrap().to_owned(), Instant::now()));
                }
            }
        });
        let mut times = Vec::new();
        for number in 0..PODS {
            let name = format!("pod-{number}");
            let manifest = self.dir.join("pod.json");
            let pod = ferrite_json::json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [{
                    "name": "c", "image": "ferrite.local/tools:latest", "imagePullPolicy": "IfNotPresent",
                    "args": ["sleep"],
                }]},
            });
            std::fs::write(&manifest, pod.to_string()).unwrap();
            let mut create = self.kubectl(&["create", "--validate=false", "-f", manifest.to_str().unwrap()]);
            let output = create.output().unwrap();
            // kubectl's own start is not ours to count: the object exists when it has answered.
            let created = Instant::now();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let at = loop {
                let (ready_name, at) = ready.recv_timeout(Duration::from_secs(60)).unwrap();
                if ready_name == name {
                    break at;
                }
            };
            times.push(at.saturating_duration_since(created));
        }
        let _ = watch.kill();
        let _ = watch.wait();
        times.sort();
        tell(&format!("pod created to Ready, p50 of {PODS}, ms"), percentile(&times, 0.5));
        tell(&format!("pod created to Ready, p99 of {PODS}, ms"), percentile(&times, 0.99));
    }

    /// Memory of our processes, after a minute in which nothing is asked of them.
    fn memory(&self, child: &Child) {
        let supervisors: Vec<i32> = processes_named("ferrite-supervisor", &self.dir);
        let private: Vec<u64> =
            supervisors.iter().map(|pid| rollup(pid.unsigned_abs(), "Private_")).collect();
        if !private.is_empty() {
            let sum: u64 = private.iter().sum();
            tell("supervisor, private memory each, KiB", sum as f64 / private.len() as f64);
        }
        let mut delete = self.kubectl(&["delete", "pods", "--all"]);
        assert!(delete.output().unwrap().status.success());
        let (_keep, never) = std::sync::mpsc::channel::<()>();
        let _ = never.recv_timeout(SETTLE);
        let main = i32::try_from(child.id()).unwrap();
        let all: u64 = std::iter::once(main)
            .chain(processes_named("ferrite-supervisor", &self.dir))
            .map(|pid| rollup(pid.unsigned_abs(), "Pss:"))
            .sum();
        tell("idle cluster, PSS of all processes, KiB", all as f64);
        tell("  of that anonymous, KiB", rollup(main.unsigned_abs(), "Pss_Anon:") as f64);
    }
}

fn processes_named(name: &str, dir: &Path) -> Vec<i32> {
    let dir = dir.to_string_lossy().into_owned();
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| {
                let command = String::from_utf8_lossy(&c).into_owned();
                command.starts_with(name) && command.contains(&dir)
            })
        })
        .collect()
}
