//! The common parts of all backends: truncation, the queue, and waiting.

use super::event::{Event, Level, Stage};
use super::log::AuditFormat;
use super::{Written, metrics};
use bytes::Bytes;
use futures_util::FutureExt;
use jiff::Timestamp;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

/// Events that wait for a backend may take this much memory together.
const BUDGET: usize = 128 << 20;
const KIB: usize = 1 << 10;
/// Events of requests that wait until they are stored.
const BLOCKING_QUEUE: usize = 1024;

/// The party that waits until an event is stored.
#[derive(Debug, Clone)]
pub enum AuditMode {
    /// Nobody. Events that do not fit into the buffer are lost, and counted.
    Batch(AuditBatch),
    /// The request waits, and goes on if the event is lost.
    Blocking,
    /// The request waits, and fails if the event of its arrival is lost.
    BlockingStrict,
}

/// Limits for collecting events before they are stored.
#[derive(Debug, Clone)]
pub struct AuditBatch {
    /// Events that may wait.
    pub buffer_size: usize,
    /// Events that are stored together at most.
    pub max_size: usize,
    /// The longest that an event waits for others.
    pub max_wait: Duration,
    pub throttle: Option<AuditThrottle>,
}

/// The rate limit of batches.
#[derive(Debug, Clone, Copy)]
pub struct AuditThrottle {
    /// Batches per second.
    pub rate: f64,
    /// Batches at once after a time without any.
    pub burst: u32,
}

/// The size in bytes above which events go without their objects or, if that is not enough, are dropped.
#[derive(Debug, Clone, Copy)]
pub struct AuditTruncate {
    pub max_event_size: usize,
    /// A batch that is larger is sent in parts.
    pub max_batch_size: usize,
}

/// An event on its way to a backend.
pub(super) struct Queued {
    pub line: Bytes,
    done: Option<oneshot::Sender<bool>>,
    _memory: OwnedSemaphorePermit,
}

impl Queued {
    /// Tells the request that waits for the event, if there is one.
    pub fn finish(self, stored: bool) {
        if let Some(done) = self.done {
            // The request may have ended.
            let _ = done.send(stored);
        }
    }
}

/// The near side of a backend.
pub(super) struct Backend {
    name: &'static str,
    format: AuditFormat,
    mode: AuditMode,
    truncate: Option<AuditTruncate>,
    /// None once the server stops.
    queue: Mutex<Option<mpsc::Sender<Queued>>>,
    memory: Arc<Semaphore>,
}

impl Backend {
    /// The near side, and the queue that the worker of the far side reads from.
    pub fn new(
        name: &'static str,
        format: AuditFormat,
        mode: AuditMode,
        truncate: Option<AuditTruncate>,
    ) -> (Self, mpsc::Receiver<Queued>) {
        let capacity = match &mode {
            AuditMode::Batch(batch) => batch.buffer_size.max(1),
            AuditMode::Blocking | AuditMode::BlockingStrict => BLOCKING_QUEUE,
        };
        let (sender, receiver) = mpsc::channel(capacity);
        let memory = Arc::new(Semaphore::new(BUDGET / KIB));
        (Self { name, format, mode, truncate, queue: Mutex::new(Some(sender)), memory }, receiver)
    }

    /// Takes no more events.
    pub fn close(&self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The event as this backend stores it. None if it is too large.
    fn encode(&self, event: &Event, stage: Stage, time: Timestamp) -> Option<Bytes> {
        let mut line = event.to_json(stage, time, true);
        if let Some(limit) = self.truncate
            && line.len() > limit.max_event_size
        {
            if event.level >= Level::Request {
                line = event.to_json(stage, time, false);
            }
            if line.len() > limit.max_event_size {
                metrics::failed("truncate", 1, &"event is too large even after truncating");
                return None;
            }
        }
        Some(match self.format {
            AuditFormat::Json => line.into(),
            AuditFormat::Legacy => event.to_legacy(stage).into(),
        })
    }

    /// Queues an event. The future, if there is one, answers whether it was stored; it queues the event when it is
    /// first polled.
    pub fn send(&self, event: &Event, stage: Stage, time: Timestamp) -> Option<Written> {
        let line = self.encode(event, stage, time)?;
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(queue) = queue else {
            metrics::failed(self.name, 1, &"audit backend shut down");
            return None;
        };
        let permits = u32::try_from(line.len().min(BUDGET).div_ceil(KIB)).unwrap_or(u32::MAX);
        let memory = Arc::clone(&self.memory);
        let strict = match self.mode {
            AuditMode::Batch(_) => {
                let memory = memory.try_acquire_many_owned(permits).ok();
                let sent = memory.is_some_and(|memory| {
                    queue.try_send(Queued { line, done: None, _memory: memory }).is_ok()
                });
                if !sent {
                    metrics::failed("buffered", 1, &"audit buffer queue blocked");
                }
                return None;
            }
            AuditMode::Blocking => false,
            AuditMode::BlockingStrict => true,
        };
        let stored = async move {
            let memory = memory.acquire_many_owned(permits).await.ok()?;
            let (done, stored) = oneshot::channel();
            queue.send(Queued { line, done: Some(done), _memory: memory }).await.ok()?;
            stored.await.ok()
        };
        Some(stored.map(move |stored| stored.unwrap_or(false) || !strict).boxed())
    }
}

/// Spaces batches out: a bucket of `burst` tokens that fills at `rate`.
pub(super) struct Throttle {
    interval: Duration,
    ahead: Duration,
    /// When the bucket is full again.
    full_at: Instant,
}

impl Throttle {
    pub fn new(limit: AuditThrottle, now: Instant) -> Self {
        let interval = Duration::from_secs_f64(1.0 / limit.rate.max(1e-6));
        Self { interval, ahead: interval * (limit.burst.max(1) - 1), full_at: now }
    }

    /// Takes a token. Returns the time at which it may be used.
    pub fn take(&mut self, now: Instant) -> Instant {
        let usable = self.full_at.checked_sub(self.ahead).unwrap_or(now).max(now);
        self.full_at = self.full_at.max(now) + self.interval;
        usable
    }
}

/// Waits for the events that are stored next. None when there will be no more.
pub(super) async fn next_batch(
    queue: &mut mpsc::Receiver<Queued>,
    limits: &AuditBatch,
    max_bytes: Option<usize>,
    carried: &mut Option<Queued>,
) -> Option<Vec<Queued>> {
    let first = match carried.take() {
        Some(first) => first,
        None => queue.recv().await?,
    };
    let mut bytes = first.line.len();
    let mut batch = vec![first];
    let deadline = Instant::now() + limits.max_wait;
    while batch.len() < limits.max_size {
        match tokio::time::timeout_at(deadline, queue.recv()).await {
            Ok(Some(event)) if max_bytes.is_some_and(|most| bytes + event.line.len() > most) => {
                *carried = Some(event);
                break;
            }
            Ok(Some(event)) => {
                bytes += event.line.len();
                batch.push(event);
            }
            Ok(None) | Err(_) => break,
        }
    }
    Some(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_come_in_bursts_and_then_at_a_rate() {
        let start = Instant::now();
        let mut throttle = Throttle::new(AuditThrottle { rate: 10.0, burst: 3 }, start);
        let waits: Vec<u128> =
            (0..5).map(|_| throttle.take(start).duration_since(start).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        let later = start + Duration::from_secs(10);
        let waits: Vec<u128> =
            (0..4).map(|_| throttle.take(later).duration_since(later).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100]);
    }
}
