//! Our container runtime beside Debian's containerd and runc: the same client, the same images, taking turns in one
//! run. Numbers, not tests.
//!
//! `cargo bench -p ferrite --bench runtime` prints a table; parts can be chosen: `-- pull start pod exec memory`.
//! Everything happens in namespaces of its own (network, mounts, processes), so that whatever is left when the run
//! ends badly ends with it. Columns of missing programs stay empty. ext4 is slow to use inodes again that
//! were
//! given back less than five minutes ago: pulls measured soon after an earlier run has cleaned up are slower for all.

#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

#[path = "../../../runtime/tests/docker_registry/mod.rs"]
mod docker_registry;
#[path = "../../../runtime/tests/image_fixtures/mod.rs"]
mod image_fixtures;
mod images;
mod measure;
mod runc;
mod sides;
mod table;

use std::process::{Command, ExitCode};

use docker_registry::Registry;
use sides::{Containerd, Ferrite};
use table::Table;

/// Set to the directory of the run in the process that measures.
const INSIDE: &str = "FERRITE_BENCH_INSIDE";
/// The parent of all control groups of the run.
const GROUP: &str = "/ferrite-bench";
const PARTS: &[&str] = &["pull", "start", "pod", "exec", "memory"];

fn main() -> ExitCode {
    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    if let Some(unknown) = parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
        eprintln!("no part {unknown:?}: there are {}", PARTS.join(", "));
        return ExitCode::from(2);
    }
    match std::env::var_os(INSIDE) {
        Some(dir) => measure_all(dir.as_ref(), &|part| parts.is_empty() || parts.iter().any(|p| p == part)),
        None => isolate(&parts),
    }
}

/// Runs this program again in namespaces that take everything along when they end, and removes the things
/// that the kernel keeps beyond them: control groups and files.
fn isolate(parts: &[String]) -> ExitCode {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("the benchmark runs containers and needs root");
        return ExitCode::FAILURE;
    }
    let dir = tempfile::Builder::new().prefix("fb").tempdir().unwrap();
    let status = Command::new("unshare")
        .args(["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(parts)
        .env(INSIDE, dir.path())
        .status()
        .unwrap();
    let rounds = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.path());
    let rounds = rounds
        .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(measure::ROUND)));
    for runtime in rounds.chain([dir.path().to_owned()]) {
        // In an empty network: the command sees no links of this machine.
        let down = Command::new("unshare")
            .args(["--net", "--", env!("CARGO_BIN_EXE_ferrite"), "down", "--data-dir"])
            .arg(runtime.join(sides::DATA))
            .output()
            .unwrap();
        if !down.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&down.stderr));
        }
    }
    sides::remove_groups(GROUP);
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn measure_all(dir: &std::path::Path, wanted: &dyn Fn(&str) -> bool) -> ExitCode {
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let registry = Registry::start(false);
    let large = wanted("pull").then(images::large);
    let pushed = images::Pushed::new(&registry, large.as_ref());
    drop(large);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut table = Table::begin();
        if wanted("pull") {
            measure::pull(&mut table, dir, &pushed).await;
        }
        let ours = Ferrite::start(dir).await;
        let theirs = Containerd::start(dir, &pushed.pause).await;
        let sides = measure::Sides { ours: &ours.side, theirs: theirs.as_ref().map(|c| &c.side) };
        sides.pull_small(&pushed.app).await;
        let runc = runc::Runc::new(dir);
        if wanted("start") {
            measure::start(&mut table, &sides, runc.as_ref(), &pushed.app).await;
        }
        if wanted("pod") {
            measure::pod(&mut table, &sides, &pushed.app).await;
        }
        if wanted("exec") {
            measure::exec(&mut table, &sides, runc.as_ref(), &pushed.app).await;
        }
        if wanted("memory") {
            measure::memory(&mut table, &sides, &pushed.app).await;
        }
        table.end();
    });
    ExitCode::SUCCESS
}
