//! The metrics of clients and their queues, with upstream's names.

use std::sync::{Arc, LazyLock};

use ferrite_component::metrics::{Counter, DECADES, Family, Gauge, Histogram, registry};

struct Families {
    adds: Arc<Family<Counter>>,
    depth: Arc<Family<Gauge>>,
    queue_duration: Arc<Family<Histogram>>,
    work_duration: Arc<Family<Histogram>>,
    retries: Arc<Family<Counter>>,
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
}

impl QueueMetrics {
    pub(crate) fn new(name: &str) -> Self {
        let name = &[name];
        Self {
            adds: FAMILIES.adds.with(name),
            depth: FAMILIES.depth.with(name),
            queue_duration: FAMILIES.queue_duration.with(name),
            work_duration: FAMILIES.work_duration.with(name),
            retries: FAMILIES.retries.with(name),
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
