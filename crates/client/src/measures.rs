//! The metrics of clients and their queues, with upstream's names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use ferrite_component::metrics::{Counter, DECADES, Family, Gauge, Histogram, Value, registry};

struct Families {
    adds: Arc<Family<Counter>>,
    depth: Arc<Family<Gauge>>,
    queue_duration: Arc<Family<Histogram>>,
    work_duration: Arc<Family<Histogram>>,
    retries: Arc<Family<Counter>>,
    unfinished: Arc<Family<Unfinished>>,
    longest: Arc<Family<LongestRunning>>,
}

/// When the work on each key began that is not done. Read when the metrics are, so that work that hangs shows.
#[derive(Debug, Default)]
pub(crate) struct Running {
    next: u64,
    begun: BTreeMap<u64, Instant>,
}

/// Begun work, to be ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkId(u64);

type Shared = Arc<Mutex<Running>>;

fn lock(running: &Shared) -> MutexGuard<'_, Running> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The seconds that workers have spent on keys that are not done, together.
#[derive(Debug, Default)]
pub(crate) struct Unfinished(Shared);

/// The seconds of the worker that has been at its key for the longest time.
#[derive(Debug, Default)]
pub(crate) struct LongestRunning(OnceLock<Shared>);

fn write_seconds(out: &mut String, name: &str, labels: &str, seconds: f64) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{name}{{{labels}}} {seconds}");
}

impl Value for Unfinished {
    const TYPE: &'static str = "gauge";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let seconds = lock(&self.0).begun.values().map(|begun| begun.elapsed().as_secs_f64()).sum();
        write_seconds(out, name, labels, seconds);
    }
}

impl Value for LongestRunning {
    const TYPE: &'static str = "gauge";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let running = self.0.get();
        // Keys are numbered as work on them begins: the first is the oldest.
        let oldest = running.and_then(|running| lock(running).begun.values().next().copied());
        write_seconds(out, name, labels, oldest.map_or(0.0, |begun| begun.elapsed().as_secs_f64()));
    }
}

static FAMILIES: LazyLock<Families> = LazyLock::new(|| {
    let labels = &["name"];
    Families {
        adds: registry().counter("workqueue_adds_total", "Keys added to the queue.", labels),
        depth: registry().gauge("workqueue_depth", "Keys that wait for a worker.", labels),
        queue_duration: registry().histogram(
            "workqueue_queue_duration_seconds",
            "How long a key waited for a worker.",
            labels,
            DECADES,
        ),
        work_duration: registry().histogram(
            "workqueue_work_duration_seconds",
            "How long a worker took for a key.",
            labels,
            DECADES,
        ),
        retries: registry().counter(
            "workqueue_retries_total",
            "Keys that came back after a failure.",
            labels,
        ),
        unfinished: registry().family(
            "workqueue_unfinished_work_seconds",
            "Seconds spent so far on keys that are not done.",
            labels,
        ),
        longest: registry().family(
            "workqueue_longest_running_processor_seconds",
            "Seconds of the worker that has been at its key for the longest time.",
            labels,
        ),
    }
});

/// The values of one queue.
#[derive(Debug)]
pub(crate) struct QueueMetrics {
    pub(crate) adds: Arc<Counter>,
    pub(crate) depth: Arc<Gauge>,
    pub(crate) queue_duration: Arc<Histogram>,
    pub(crate) work_duration: Arc<Histogram>,
    pub(crate) retries: Arc<Counter>,
    unfinished: Arc<Unfinished>,
}

impl QueueMetrics {
    pub(crate) fn new(name: &str) -> Self {
        let name = &[name];
        let unfinished = FAMILIES.unfinished.with(name);
        FAMILIES.longest.with(name).0.get_or_init(|| Arc::clone(&unfinished.0));
        Self {
            unfinished,
            adds: FAMILIES.adds.with(name),
            depth: FAMILIES.depth.with(name),
            queue_duration: FAMILIES.queue_duration.with(name),
            work_duration: FAMILIES.work_duration.with(name),
            retries: FAMILIES.retries.with(name),
        }
    }
}

impl QueueMetrics {
    /// A worker has begun with a key.
    pub(crate) fn begin(&self) -> WorkId {
        let mut running = lock(&self.unfinished.0);
        running.next += 1;
        let id = running.next;
        running.begun.insert(id, Instant::now());
        WorkId(id)
    }

    /// The worker is done.
    pub(crate) fn end(&self, work: WorkId) {
        if let Some(begun) = lock(&self.unfinished.0).begun.remove(&work.0) {
            self.work_duration.observe(begun.elapsed());
        }
    }
}

static REQUESTS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "rest_client_requests_total",
        "Requests by status code and method.",
        &["code", "method"],
    )
});

/// Counts a request of this process; `code` is none when there was no response.
pub(crate) fn count_request(method: &http::Method, code: Option<http::StatusCode>) {
    let code = code.as_ref().map_or("<error>", http::StatusCode::as_str);
    REQUESTS.with(&[code, method.as_str()]).increment();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_is_not_done_shows() {
        let metrics = QueueMetrics::new("tested-work");
        let value = |family: &str| {
            let text = registry().text();
            let line = text.lines().find(|line| line.starts_with(&format!("{family}{{name=\"tested-work\"")));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).expect("a value")
        };
        let (first, second) = (metrics.begin(), metrics.begin());
        let longest = value("workqueue_longest_running_processor_seconds");
        assert!(longest > 0.0);
        assert!(value("workqueue_unfinished_work_seconds") > longest);
        metrics.end(first);
        metrics.end(second);
        assert_eq!(value("workqueue_unfinished_work_seconds"), 0.0);
        assert_eq!(value("workqueue_longest_running_processor_seconds"), 0.0);
        assert_eq!(metrics.work_duration.count(), 2);
    }
}
