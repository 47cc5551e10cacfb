//! Keyed, de-duplicating, delaying, rate-limited queue with client-go's semantics.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::measures::{QueueMetrics, WorkId};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Limits for the retries of failing keys.
#[derive(Debug, Clone, Copy)]
pub struct RateLimits {
    /// Delay after a key's first failure; doubles with each further one.
    pub base: Duration,
    /// Longest delay of one key.
    pub cap: Duration,
    /// Retries per second over all keys.
    pub per_second: f64,
    /// Retries that may come at once over all keys.
    pub burst: f64,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self {
            base: Duration::from_millis(5),
            cap: Duration::from_secs(1000),
            per_second: 10.0,
            burst: 100.0,
        }
    }
}

struct Inner<T> {
    queue: VecDeque<T>,
    /// Wanted, whether queued or waiting for the worker that has the key now.
    dirty: HashSet<T>,
    /// The keys that workers have, with their work where the queue is measured.
    processing: HashMap<T, Option<WorkId>>,
    /// Since when a key is wanted that no worker has taken; only for queues that are measured.
    added: HashMap<T, Instant>,
    metrics: Option<QueueMetrics>,
    /// When a delayed key falls due; the heap may hold stale, later entries for it.
    waiting: HashMap<T, Instant>,
    due: BinaryHeap<Reverse<(Instant, u64)>>,
    due_keys: HashMap<u64, T>,
    sequence: u64,
    failures: HashMap<T, u32>,
    tokens: f64,
    tokens_at: Option<Instant>,
    shut_down: bool,
}

/// A queue of keys to work on.
///
/// A key added several times before a worker takes it is worked on once; a key added while a worker has it comes
/// back after [`done`](WorkQueue::done). So two workers never have the same key. Its length is bounded by the
/// number of distinct keys.
pub struct WorkQueue<T> {
    inner: Mutex<Inner<T>>,
    notify: Notify,
    limits: RateLimits,
}

impl<T> std::fmt::Debug for WorkQueue<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkQueue").finish_non_exhaustive()
    }
}

impl<T: Clone + Eq + Hash> Default for WorkQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Clone + Eq + Hash> WorkQueue<T> {
    pub fn new() -> Self {
        Self::with_limits(RateLimits::default())
    }

    pub fn with_limits(limits: RateLimits) -> Self {
        Self {
            inner: Mutex::new(Inner {
                queue: VecDeque::new(),
                dirty: HashSet::new(),
                processing: HashMap::new(),
                added: HashMap::new(),
                metrics: None,
                waiting: HashMap::new(),
                due: BinaryHeap::new(),
                due_keys: HashMap::new(),
                sequence: 0,
                failures: HashMap::new(),
                tokens: limits.burst,
                tokens_at: None,
                shut_down: false,
            }),
            notify: Notify::new(),
            limits,
        }
    }

    /// A queue whose metrics carry `name`.
    pub fn named(name: &str, limits: RateLimits) -> Self {
        let queue = Self::with_limits(limits);
        queue.lock().metrics = Some(QueueMetrics::new(name));
        queue
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wants `key` worked on as soon as a worker is free.
    pub fn add(&self, key: T) {
        if self.lock().add(key) {
            self.notify.notify_one();
        }
    }

    /// Wants `key` worked on after `delay`, or sooner if it is already due sooner.
    pub fn add_after(&self, key: T, delay: Duration) {
        if delay.is_zero() {
            return self.add(key);
        }
        let at = Instant::now() + delay;
        let mut inner = self.lock();
        if inner.shut_down || inner.waiting.get(&key).is_some_and(|due| *due <= at) {
            return;
        }
        let sequence = inner.sequence;
        inner.sequence += 1;
        inner.waiting.insert(key.clone(), at);
        inner.due.push(Reverse((at, sequence)));
        inner.due_keys.insert(sequence, key);
        drop(inner);
        self.notify.notify_one();
    }

    /// Wants `key` worked on again after a failure: after its own growing delay and the queue's overall limit.
    pub fn add_rate_limited(&self, key: T) {
        let delay = {
            let mut inner = self.lock();
            if let Some(metrics) = &inner.metrics {
                metrics.retries.increment();
            }
            let failures = inner.failures.entry(key.clone()).or_insert(0);
            let own = self.limits.base.saturating_mul(1u32.checked_shl(*failures).unwrap_or(u32::MAX));
            *failures = failures.saturating_add(1);
            own.min(self.limits.cap).max(inner.reserve(Instant::now(), self.limits))
        };
        self.add_after(key, delay);
    }

    /// Number of failures of `key` since it was last forgotten.
    pub fn failures(&self, key: &T) -> u32 {
        self.lock().failures.get(key).copied().unwrap_or(0)
    }

    /// Forgets past failures of `key`; it stays queued if it is.
    pub fn forget(&self, key: &T) {
        self.lock().failures.remove(key);
    }

    /// Number of keys that are ready for a worker.
    pub fn len(&self) -> usize {
        self.lock().queue.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next key, when there is one; `None` once the queue is shut down. Every key must be given back by
    /// [`done`](WorkQueue::done). Safe to cancel: a key is taken only when it is returned.
    pub async fn get(&self) -> Option<T> {
        loop {
            let notified = self.notify.notified();
            let next = {
                let mut inner = self.lock();
                if inner.shut_down {
                    return None;
                }
                inner.promote(Instant::now());
                if let Some(key) = inner.queue.pop_front() {
                    inner.dirty.remove(&key);
                    inner.taken(&key);
                    // One wake-up may stand for several keys, and the timer of the waiter that takes the first
                    // delayed key covers the later ones too: pass it on.
                    if !inner.queue.is_empty() || !inner.due.is_empty() {
                        self.notify.notify_one();
                    }
                    return Some(key);
                }
                inner.due.peek().map(|Reverse((at, _))| *at)
            };
            match next {
                None => notified.await,
                Some(at) => {
                    tokio::select! {
                        () = notified => {}
                        () = sleep_until(at) => {}
                    }
                }
            }
        }
    }

    /// Gives `key` back; if it was added meanwhile it becomes ready again.
    pub fn done(&self, key: &T) {
        let mut inner = self.lock();
        let work = inner.processing.remove(key).flatten();
        if let (Some(metrics), Some(work)) = (&inner.metrics, work) {
            metrics.end(work);
        }
        if inner.dirty.contains(key) {
            inner.ready(key.clone());
            drop(inner);
            self.notify.notify_one();
        }
    }

    /// Makes every present and future [`get`](WorkQueue::get) return `None`.
    pub fn shut_down(&self) {
        self.lock().shut_down = true;
        self.notify.notify_waiters();
        self.notify.notify_one();
    }
}

impl<T: Clone + Eq + Hash> Inner<T> {
    /// Adds a key. Returns true if the key is now ready for a worker.
    fn add(&mut self, key: T) -> bool {
        if self.shut_down || !self.dirty.insert(key.clone()) {
            return false;
        }
        if let Some(metrics) = &self.metrics {
            metrics.adds.increment();
            self.added.entry(key.clone()).or_insert_with(Instant::now);
        }
        if self.processing.contains_key(&key) {
            return false;
        }
        self.ready(key);
        true
    }

    fn ready(&mut self, key: T) {
        self.queue.push_back(key);
        self.measure_depth();
    }

    /// A worker has taken `key` from the queue.
    fn taken(&mut self, key: &T) {
        let now = Instant::now();
        let work = self.metrics.as_ref().map(QueueMetrics::begin);
        self.processing.insert(key.clone(), work);
        if let (Some(metrics), Some(added)) = (&self.metrics, self.added.remove(key)) {
            metrics.queue_duration.observe(now.saturating_duration_since(added));
        }
        self.measure_depth();
    }

    fn measure_depth(&self) {
        if let Some(metrics) = &self.metrics {
            metrics.depth.set(i64::try_from(self.queue.len()).unwrap_or(i64::MAX));
        }
    }

    fn promote(&mut self, now: Instant) {
        while let Some(Reverse((at, sequence))) = self.due.peek().copied() {
            let stale = self
                .due_keys
                .get(&sequence)
                .is_none_or(|key| self.waiting.get(key).is_none_or(|due| *due != at));
            if !stale && at > now {
                return;
            }
            self.due.pop();
            if let Some(key) = self.due_keys.remove(&sequence)
                && !stale
            {
                self.waiting.remove(&key);
                self.add(key);
            }
        }
    }

    /// Takes one token, possibly from the future, and returns the time until it exists.
    fn reserve(&mut self, now: Instant, limits: RateLimits) -> Duration {
        let since = self.tokens_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.tokens_at = Some(now);
        self.tokens = (self.tokens + since.as_secs_f64() * limits.per_second).min(limits.burst) - 1.0;
        if self.tokens >= 0.0 {
            Duration::ZERO
        } else {
            Duration::from_secs_f64(-self.tokens / limits.per_second)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_key_is_queued_once_and_never_processed_twice_at_once() {
        let queue = WorkQueue::new();
        queue.add("a");
        queue.add("a");
        queue.add("b");
        assert_eq!(queue.len(), 2);
        assert_eq!(queue.get().await, Some("a"));
        queue.add("a");
        assert_eq!(queue.len(), 1, "a is with a worker");
        assert_eq!(queue.get().await, Some("b"));
        queue.done(&"a");
        assert_eq!(queue.get().await, Some("a"));
        queue.done(&"a");
        queue.done(&"b");
        assert!(queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn delayed_keys_come_in_order_of_their_time_and_the_sooner_wish_wins() {
        let queue = WorkQueue::new();
        let begun = Instant::now();
        queue.add_after("late", Duration::from_secs(60));
        queue.add_after("early", Duration::from_secs(90));
        queue.add_after("early", Duration::from_secs(10));
        queue.add_after("early", Duration::from_secs(30));
        assert_eq!(queue.get().await, Some("early"));
        assert_eq!(begun.elapsed().as_secs(), 10);
        queue.done(&"early");
        assert_eq!(queue.get().await, Some("late"));
        assert_eq!(begun.elapsed().as_secs(), 60);
        queue.done(&"late");
        let again = tokio::time::timeout(Duration::from_secs(600), queue.get()).await;
        assert!(again.is_err(), "the later wishes for early were replaced");
    }

    #[tokio::test(start_paused = true)]
    async fn failures_double_the_delay_until_forgotten() {
        let queue = WorkQueue::new();
        let mut delays = Vec::new();
        for _ in 0..4 {
            let begun = Instant::now();
            queue.add_rate_limited("a");
            queue.get().await;
            queue.done(&"a");
            delays.push(begun.elapsed().as_millis());
        }
        assert_eq!(delays, [5, 10, 20, 40]);
        assert_eq!(queue.failures(&"a"), 4);
        queue.forget(&"a");
        assert_eq!(queue.failures(&"a"), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_overall_limit_delays_beyond_the_burst() {
        let queue =
            WorkQueue::with_limits(RateLimits { burst: 2.0, per_second: 1.0, ..RateLimits::default() });
        let begun = Instant::now();
        for key in 0..4 {
            queue.add_rate_limited(key);
        }
        for _ in 0..4 {
            queue.get().await;
        }
        assert_eq!(begun.elapsed().as_secs(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn shut_down_wakes_everybody() {
        let queue = WorkQueue::<u8>::new();
        let (a, b, ()) = tokio::join!(queue.get(), queue.get(), async { queue.shut_down() });
        assert_eq!((a, b), (None, None));
        queue.add(1);
        assert_eq!(queue.get().await, None);
    }
}
