//! The webhook: events go to another server, many at once.

use super::backend::{AuditBatch, AuditMode, AuditTruncate, Backend, Queued, Throttle, next_batch};
use super::log::AuditFormat;
use super::{event, metrics};
use crate::http::BoxError;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use rand::RngExt;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// Attempts to send a batch, with upstream's growth and jitter between two attempts.
const ATTEMPTS: u32 = 5;
const GROWTH: f64 = 1.5;
const JITTER: f64 = 0.2;
/// One attempt may take this long.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Most parallel requests to the webhook. Beyond it, events wait in the queue.
const SENDING: usize = 32;

/// Sends events to the server of a webhook.
pub trait AuditSender: Debug + Send + Sync {
    /// Posts an EventList as JSON. An answer other than success is an error.
    fn post(&self, body: Bytes) -> BoxFuture<'_, Result<(), BoxError>>;
}

/// A server that takes events.
#[derive(Debug, Clone)]
pub struct AuditWebhook {
    pub sender: Arc<dyn AuditSender>,
    /// The time before the second attempt.
    pub initial_backoff: Duration,
    pub mode: AuditMode,
    pub truncate: Option<AuditTruncate>,
}

pub(super) fn start(webhook: &AuditWebhook, stopping: &CancellationToken) -> (Backend, JoinHandle<()>) {
    let mode = webhook.mode.clone();
    let (backend, queue) = Backend::new("webhook", AuditFormat::Json, mode, webhook.truncate);
    (backend, tokio::spawn(run(queue, webhook.clone(), stopping.clone())))
}

async fn run(mut queue: mpsc::Receiver<Queued>, webhook: AuditWebhook, stopping: CancellationToken) {
    // A request that waits for its event does not wait for those of others.
    let alone = AuditBatch { buffer_size: 1, max_size: 1, max_wait: Duration::ZERO, throttle: None };
    let limits = match &webhook.mode {
        AuditMode::Batch(batch) => batch.clone(),
        AuditMode::Blocking | AuditMode::BlockingStrict => alone,
    };
    let mut throttle = limits.throttle.map(|limit| Throttle::new(limit, tokio::time::Instant::now()));
    let max_bytes = webhook.truncate.map(|limit| limit.max_batch_size);
    let mut carried = None;
    let mut sending = JoinSet::new();
    loop {
        while sending.len() >= SENDING {
            sending.join_next().await;
        }
        while sending.try_join_next().is_some() {}
        let gathered = next_batch(&mut queue, &limits, max_bytes, &mut carried);
        let Some(events) = gathered.await else { break };
        if let Some(throttle) = &mut throttle {
            let usable = throttle.take(tokio::time::Instant::now());
            tokio::select! {
                () = tokio::time::sleep_until(usable) => {}
                () = stopping.cancelled() => {}
            }
        }
        sending.spawn(deliver(events, webhook.clone(), stopping.clone()));
    }
    while sending.join_next().await.is_some() {}
}

/// Sends a batch, and again after a while if that fails. Once the server stops it is sent only once more.
async fn deliver(events: Vec<Queued>, webhook: AuditWebhook, stopping: CancellationToken) {
    let body = Bytes::from(event::to_list(events.iter().map(|event| &event.line[..])));
    let mut wait = webhook.initial_backoff;
    let mut attempt = 1;
    let stored = loop {
        let last = attempt == ATTEMPTS || stopping.is_cancelled();
        let error = match tokio::time::timeout(TIMEOUT, webhook.sender.post(body.clone())).await {
            Ok(Ok(())) => break true,
            Ok(Err(error)) => error,
            Err(_) => "the webhook did not answer in time".into(),
        };
        if last {
            metrics::failed("webhook", events.len(), &error);
            break false;
        }
        tracing::debug!(%error, attempt, "an audit webhook failed and is called again");
        let pause = wait.mul_f64(1.0 + JITTER * rand::rng().random::<f64>());
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stopping.cancelled() => {}
        }
        wait = wait.mul_f64(GROWTH);
        attempt += 1;
    };
    events.into_iter().for_each(|event| event.finish(stored));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Fails the first `failures` requests, then keeps the bodies.
    #[derive(Debug, Default)]
    struct Server {
        failures: AtomicUsize,
        bodies: Mutex<Vec<String>>,
    }

    impl AuditSender for Server {
        fn post(&self, body: Bytes) -> BoxFuture<'_, Result<(), BoxError>> {
            Box::pin(async move {
                let left = self.failures.load(Ordering::Relaxed);
                if left > 0 {
                    self.failures.store(left - 1, Ordering::Relaxed);
                    return Err("not now".into());
                }
                self.bodies.lock().unwrap().push(String::from_utf8_lossy(&body).into_owned());
                Ok(())
            })
        }
    }

    fn event() -> event::Event {
        event::Event {
            level: event::Level::Request,
            audit_id: "1".into(),
            request_uri: "/".into(),
            verb: "get".into(),
            user: None,
            impersonated: None,
            constraint: None,
            sources: Vec::new(),
            user_agent: String::new(),
            object: None,
            response: None,
            request_object: Some("{\"a\":\"0123456789\"}".into()),
            response_object: None,
            received: jiff::Timestamp::UNIX_EPOCH,
            annotations: std::collections::BTreeMap::new(),
            truncated: false,
        }
    }

    fn webhook(server: &Arc<Server>, batch: AuditBatch) -> AuditWebhook {
        AuditWebhook {
            sender: Arc::clone(server) as Arc<dyn AuditSender>,
            initial_backoff: Duration::from_secs(10),
            mode: AuditMode::Batch(batch),
            truncate: None,
        }
    }

    fn batch(buffer_size: usize, max_size: usize) -> AuditBatch {
        AuditBatch { buffer_size, max_size, max_wait: Duration::from_secs(30), throttle: None }
    }

    fn items(body: &str) -> usize {
        let list: ferrite_json::Value = body.parse().unwrap();
        assert_eq!(list["kind"], "EventList");
        assert!(list["items"][0].get("kind").is_none() && list["items"][0]["verb"] == "get");
        list["items"].as_array().unwrap().len()
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_gathered_and_sent_again_until_the_server_has_them() {
        let server = Arc::<Server>::default();
        server.failures.store(2, Ordering::Relaxed);
        let stopping = CancellationToken::new();
        let (backend, worker) = start(&webhook(&server, batch(100, 3)), &stopping);
        for _ in 0..5 {
            let sent = backend.send(&event(), event::Stage::ResponseComplete, jiff::Timestamp::UNIX_EPOCH);
            assert!(sent.is_none(), "nobody waits for a batch");
        }
        backend.close();
        worker.await.unwrap();
        let mut sizes: Vec<usize> = server.bodies.lock().unwrap().iter().map(|body| items(body)).collect();
        sizes.sort_unstable();
        assert_eq!(sizes, [2, 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_server_holds_nobody_up_and_no_more_than_the_buffer() {
        let server = Arc::<Server>::default();
        server.failures.store(usize::MAX, Ordering::Relaxed);
        let stopping = CancellationToken::new();
        let (backend, worker) = start(&webhook(&server, batch(2, 1)), &stopping);
        for _ in 0..1000 {
            assert!(backend.send(&event(), event::Stage::Panic, jiff::Timestamp::UNIX_EPOCH).is_none());
        }
        stopping.cancel();
        backend.close();
        worker.await.unwrap();
        // Each event in the buffer was tried, and those that did not fit were not.
        assert!(usize::MAX - server.failures.load(Ordering::Relaxed) <= 3);
    }

    #[tokio::test(start_paused = true)]
    async fn large_events_go_without_their_objects() {
        let server = Arc::<Server>::default();
        let limit = event().to_json(event::Stage::Panic, jiff::Timestamp::UNIX_EPOCH, false).len();
        for (spare, sent) in [(0, true), (-1, false)] {
            let max_event_size = limit.checked_add_signed(spare).unwrap();
            let truncate = Some(AuditTruncate { max_event_size, max_batch_size: 1 << 20 });
            let webhook = AuditWebhook { truncate, ..webhook(&server, batch(10, 10)) };
            let large = event::Event { request_object: Some("1".repeat(1000).into()), ..event() };
            let (backend, worker) = start(&webhook, &CancellationToken::new());
            backend.send(&large, event::Stage::Panic, jiff::Timestamp::UNIX_EPOCH);
            backend.close();
            worker.await.unwrap();
            let bodies = std::mem::take(&mut *server.bodies.lock().unwrap());
            assert_eq!(bodies.len(), usize::from(sent));
            if let Some(body) = bodies.first() {
                assert!(
                    body.contains("\"audit.k8s.io/truncated\":\"true\"") && !body.contains("111"),
                    "{body}"
                );
            }
        }
    }
}
