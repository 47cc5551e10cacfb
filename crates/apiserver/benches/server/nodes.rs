//! Writes of pods while the kubelets of many nodes watch their own.

use crate::client::{Client, Done, PODS, Turn, pod, run as run_clients};
use crate::process::Server;
use crate::report::{more_is_better, tell};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::task::JoinSet;

const NODES: usize = 5000;
/// Watches that share a connection.
const STREAMS: usize = 50;
const CONNECTIONS: usize = 16;
const WRITERS: usize = 64;

pub async fn run() {
    let servers = crate::servers().await;
    let (mut alone, mut watched, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for (index, server) in servers.iter().enumerate() {
        let before = creates(server, "alone").await.per_second();
        let seen = Arc::new(AtomicU64::new(0));
        let watchers = watchers(server, &seen).await;
        let after = creates(server, "watched").await.per_second();
        if index == 0 {
            tell("5,000 watchers of a node: events told", seen.load(Ordering::Relaxed));
        }
        drop(watchers);
        alone.push(before);
        watched.push(after);
        kept.push(100.0 * after / before);
    }
    more_is_better("creates of pods, 64 clients, nobody watches (/s)", &alone);
    more_is_better("creates of pods, 64 clients, 5,000 watchers of a node (/s)", &watched);
    more_is_better("creates of pods that watchers of nodes leave (%)", &kept);
}

/// Each pod is on a node of its own turn.
async fn creates(server: &Server, run: &'static str) -> Done {
    run_clients(server, CONNECTIONS, WRITERS / CONNECTIONS, move |client: Client, turn: Turn| async move {
        let mut pod = pod(&format!("{run}-{}-{}", turn.worker, turn.number));
        pod["spec"]["nodeName"] = node(turn.number as usize % NODES).into();
        let (code, _) = client.whole("POST", PODS, pod.to_string()).await;
        assert_eq!(code, 201);
    })
    .await
}

fn node(number: usize) -> String {
    format!("node-{number}")
}

/// A watch of the pods of each node. They end when they are dropped.
async fn watchers(server: &Server, seen: &Arc<AtomicU64>) -> JoinSet<()> {
    let mut watchers = JoinSet::new();
    for group in 0..NODES / STREAMS {
        let connection = server.client().await;
        for number in group * STREAMS..(group + 1) * STREAMS {
            let (connection, seen) = (connection.clone(), Arc::clone(seen));
            let path = format!("/api/v1/pods?watch=1&fieldSelector=spec.nodeName={}", node(number));
            let mut body = connection.send("GET", &path, "").await.into_body();
            watchers.spawn(async move {
                let _connection = connection;
                while let Some(Ok(frame)) = body.frame().await {
                    let lines =
                        frame.into_data().map_or(0, |data| data.iter().filter(|b| **b == b'\n').count());
                    seen.fetch_add(lines as u64, Ordering::Relaxed);
                }
            });
        }
    }
    watchers
}
