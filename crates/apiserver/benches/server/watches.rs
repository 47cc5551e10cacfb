//! Many watchers of all pods.

use crate::client::{Client, PODS, pod};
use crate::process::Server;
use crate::report::{more_is_better, tell};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::task::JoinSet;

const WATCHERS: usize = 1000;
const EVENTS: usize = 500;
/// Frames that were made rather than shared. Upstream does not count them.
const ENCODINGS: &str = "ferrite_watch_encodings_total";

pub async fn run() {
    let servers = crate::servers().await;
    let (mut rates, mut of_processor) = (Vec::new(), Vec::new());
    for (index, server) in servers.iter().enumerate() {
        let seen = watched(server, index == 0).await;
        rates.push(seen.events / seen.seconds);
        of_processor.push(seen.events / seen.processor);
    }
    more_is_better("1,000 watchers: events told (/s)", &rates);
    more_is_better("1,000 watchers: events told per second of processor", &of_processor);
}

struct Seen {
    events: f64,
    seconds: f64,
    processor: f64,
}

async fn watched(server: &Server, ours: bool) -> Seen {
    let client = server.client().await;
    let before = server.pss();
    let seen = Arc::new(AtomicU64::new(0));
    let mut watchers = watchers(server, &seen).await;
    if ours {
        tell("a watcher, memory (KiB)", (server.pss() - before) as usize / WATCHERS);
    }
    let encodings = if ours { metric(&client, ENCODINGS).await } else { 0.0 };
    let processor = server.processor();
    let started = Instant::now();
    write(&client).await;
    while let Some(events) = watchers.join_next().await {
        assert_eq!(events.unwrap(), EVENTS);
    }
    let seen = Seen {
        events: seen.load(Ordering::Relaxed) as f64,
        seconds: started.elapsed().as_secs_f64(),
        processor: server.processor() - processor,
    };
    if ours {
        let encodings = metric(&client, ENCODINGS).await - encodings;
        tell("1,000 watchers: encodings for each event", format!("{:.2}", encodings / EVENTS as f64));
    }
    seen
}

/// Each ends when it has seen all events, and answers how many it saw.
async fn watchers(server: &Server, seen: &Arc<AtomicU64>) -> JoinSet<usize> {
    let mut watchers = JoinSet::new();
    // The watch does not repeat objects that were there before.
    let listed: ferrite_json::Value =
        ferrite_json::from_str(&server.client().await.text(&format!("{PODS}?limit=1")).await).unwrap();
    let version = listed["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    for group in 0..WATCHERS / 50 {
        let connection = server.client().await;
        for _ in 0..50 {
            let (connection, seen) = (connection.clone(), Arc::clone(seen));
            let path = format!("{PODS}?watch=1&resourceVersion={version}&group={group}");
            let mut body = connection.send("GET", &path, "").await.into_body();
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
    watchers
}

async fn write(client: &Client) {
    let mut writers = JoinSet::new();
    for worker in 0..8 {
        let client = client.clone();
        writers.spawn(async move {
            for number in (worker..EVENTS).step_by(8) {
                let pod = pod(&format!("m{number}"));
                assert_eq!(client.whole("POST", PODS, pod.to_string()).await.0, 201);
            }
        });
    }
    while let Some(ended) = writers.join_next().await {
        ended.unwrap();
    }
}

async fn metric(client: &Client, name: &str) -> f64 {
    let text = client.text("/metrics").await;
    let line = text.lines().find(|l| l.starts_with(name)).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}
