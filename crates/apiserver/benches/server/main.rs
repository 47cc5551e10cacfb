//! The API server as a process of its own, seen from outside, on loopback with TLS. Prints a table; numbers, not
//! tests.
//!
//! `cargo bench -p ferrite-apiserver` runs all of it; parts can be chosen: `-- start writes gets lists watches nodes
//! extensions`, and of the writes `creates updates patches applies`.
//! Files go to a directory below `FERRITE_BENCH_DIR`, or below the build directory: not to a file system in
//! memory, where a synchronisation costs nothing. Where the clients would be the limit, because they run on
//! the same machine, throughput is given per second of the server's own processor time.
//!
//! Where `FERRITE_BENCH_UPSTREAM` names a kube-apiserver and `etcd` can be run, the same clients turn to
//! that server after each measurement of ours. Resources that its etcd uses count as its own.
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

mod client;
mod extensions;
mod nodes;
mod process;
mod reads;
mod report;
mod upstream;
mod watches;
mod writes;

use process::Server;
use report::tell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: ferrite_memory::Allocator = ferrite_memory::Allocator;

fn main() {
    if let Some(dir) = std::env::var_os(process::SERVER) {
        return runtime().block_on(process::serve(Path::new(&dir)));
    }
    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    report::head();
    runtime().block_on(async {
        if wanted("start") {
            starts().await;
        }
        writes::run(|part| wanted("writes") || wanted(part)).await;
        if wanted("gets") || wanted("lists") {
            reads::run(wanted("gets"), wanted("lists")).await;
        }
        if wanted("watches") {
            watches::run().await;
        }
        if wanted("nodes") {
            nodes::run().await;
        }
        if wanted("extensions") {
            extensions::run().await;
        }
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn scratch() -> Arc<tempfile::TempDir> {
    let base = std::env::var_os("FERRITE_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    Arc::new(tempfile::tempdir_in(base).unwrap())
}

/// Our server, and upstream's if it is available.
async fn servers() -> Vec<Server> {
    let ours = Server::start(&scratch());
    let mut servers = vec![ours];
    servers.extend(upstream::start(&scratch()).await);
    for server in &servers {
        client::account(&server.client().await).await;
    }
    servers
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
    assert_eq!(client.whole("GET", "/readyz", "").await.0, 200);
    tokio::time::sleep(Duration::from_secs(2)).await;
    tell("idle, PSS (KiB)", server.pss());
    tell("idle, anonymous (KiB)", server.kib("smaps_rollup", "Anonymous:"));
}
