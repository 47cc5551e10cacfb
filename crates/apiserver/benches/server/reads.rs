//! Looks at pods, and lists of them.

use crate::client::{Client, PODS, pod, run as run_clients};
use crate::process::Server;
use crate::report::{more_is_better, tell};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const LISTED: usize = 10_000;

pub async fn run(with_gets: bool, with_lists: bool) {
    let servers = crate::servers().await;
    for server in &servers {
        fill(server).await;
    }
    if with_gets {
        gets(&servers).await;
    }
    if with_lists {
        lists(&servers).await;
    }
}

/// Creates the objects to read later, and prints our memory for them.
async fn fill(server: &Server) {
    let client = server.client().await;
    let before = server.pss();
    let mut tasks = JoinSet::new();
    for worker in 0..32 {
        let client = client.clone();
        tasks.spawn(async move {
            for number in (worker..LISTED).step_by(32) {
                let body = pod(&format!("pod-{number:05}")).to_string();
                assert_eq!(client.whole("POST", PODS, body).await.0, 201);
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let (_, object) = client.whole("GET", &format!("{PODS}/pod-00007"), "").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    if server.children.len() > 1 {
        // Upstream's memory depends on its garbage collector, so the figure means little.
        return;
    }
    let each = (server.pss() - before) as usize * 1024 / LISTED;
    tell("a pod, as JSON (bytes)", object);
    tell("memory for each of 10,000 stored pods (bytes)", each);
    tell("  of 1.5 × JSON + 400 (%)", each * 100 / (object * 3 / 2 + 400));
}

async fn gets(servers: &[Server]) {
    for (connections, streams) in [(1, 1), (8, 16)] {
        let (mut rates, mut of_processor) = (Vec::new(), Vec::new());
        for server in servers {
            let done = run_clients(server, connections, streams, |client, turn| async move {
                let path = format!("{PODS}/pod-{:05}", turn.number % LISTED as u64);
                assert_eq!(client.whole("GET", &path, "").await.0, 200);
            })
            .await;
            rates.push(done.per_second());
            of_processor.push(done.per_second_of_processor());
        }
        let what = format!("GET, {} in flight", connections * streams);
        more_is_better(&format!("{what} (/s)"), &rates);
        more_is_better(&format!("{what} (per second of processor)"), &of_processor);
    }
}

/// The cost of repeated lists.
struct Listed {
    megabytes: f64,
    seconds: f64,
    processor: f64,
    peak_kib: u64,
}

const ROUNDS: usize = 5;

async fn lists(servers: &[Server]) {
    let asked = [
        ("JSON", PODS.to_owned()),
        ("JSON, a label selector", format!("{PODS}?labelSelector=tier%3Dbackend")),
    ];
    for (what, path) in asked {
        let mut seen = Vec::new();
        for server in servers {
            seen.push(list(server, &server.client().await, &path).await);
        }
        let what = format!("LIST of {LISTED} pods, {what}");
        let column = |value: fn(&Listed) -> f64| seen.iter().map(value).collect::<Vec<f64>>();
        tell(&format!("{what} (MB)"), format!("{:.1}", seen[0].megabytes / ROUNDS as f64));
        more_is_better(&format!("{what} (MB/s)"), &column(|l| l.megabytes / l.seconds));
        more_is_better(
            &format!("{what} (MB per second of processor)"),
            &column(|l| l.megabytes / l.processor),
        );
        tell(&format!("{what}, peak memory (KiB)"), seen[0].peak_kib);
    }
}

async fn list(server: &Server, client: &Client, path: &str) -> Listed {
    let resident = server.kib("status", "VmRSS:");
    // Makes the kernel forget the highest mark.
    std::fs::write(format!("/proc/{}/clear_refs", server.id()), "5").unwrap();
    let before = server.processor();
    let started = Instant::now();
    let mut bytes = 0;
    for _ in 0..ROUNDS {
        let (code, length) = client.whole("GET", path, "").await;
        assert_eq!(code, 200);
        bytes += length;
    }
    Listed {
        megabytes: bytes as f64 / 1e6,
        seconds: started.elapsed().as_secs_f64(),
        processor: server.processor() - before,
        peak_kib: server.kib("status", "VmHWM:").saturating_sub(resident),
    }
}
