//! Metrics of the scheduler, with upstream's names: the stable and beta families that mean something here.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferrite_component::metrics::{Counter, Family, Gauge, Histogram, registry};
use tokio::time::Instant;

type Histograms = LazyLock<Arc<Family<Histogram>>>;

/// Doubling bounds from a millisecond.
const ATTEMPT: &[f64] = &[
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384,
];
/// Doubling bounds from ten milliseconds.
const SLI: &[f64] = &[
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68,
    655.36, 1310.72, 2621.44, 5242.88,
];
/// Doubling bounds from a tenth of a millisecond.
const POINT: &[f64] =
    &[0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.0256, 0.0512, 0.1024, 0.2048];

static ATTEMPTS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "scheduler_schedule_attempts_total",
        "Number of attempts to schedule pods, by the result.",
        &["result", "profile"],
    )
});
static ATTEMPT_DURATION: Histograms = LazyLock::new(|| {
    registry().histogram(
        "scheduler_scheduling_attempt_duration_seconds",
        "Scheduling attempt latency in seconds (scheduling algorithm + binding).",
        &["result", "profile"],
        ATTEMPT,
    )
});
static POD_ATTEMPTS: LazyLock<Arc<Histogram>> = LazyLock::new(|| {
    let help = "Number of attempts to successfully schedule a pod.";
    registry()
        .histogram("scheduler_pod_scheduling_attempts", help, &[], &[1.0, 2.0, 4.0, 8.0, 16.0])
        .with(&[])
});
static POD_DURATION: Histograms = LazyLock::new(|| {
    registry().histogram(
        "scheduler_pod_scheduling_sli_duration_seconds",
        "Latency of a pod being scheduled, from the time it enters the queue, over all its attempts.",
        &["attempts"],
        SLI,
    )
});
static POINTS: Histograms = LazyLock::new(|| {
    registry().histogram(
        "scheduler_framework_extension_point_duration_seconds",
        "Latency of all plugins of an extension point.",
        &["extension_point", "status", "profile"],
        POINT,
    )
});
static PERMIT_WAIT: Histograms = LazyLock::new(|| {
    registry().histogram(
        "scheduler_permit_wait_duration_seconds",
        "Duration of waiting on permit.",
        &["result"],
        ATTEMPT,
    )
});
static VICTIMS: LazyLock<Arc<Histogram>> = LazyLock::new(|| {
    let bounds = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
    let help = "Number of selected preemption victims.";
    registry().histogram("scheduler_preemption_victims", help, &[], bounds).with(&[])
});
static PREEMPTIONS: LazyLock<Arc<Counter>> = LazyLock::new(|| {
    let help = "Total preemption attempts in the cluster till now.";
    registry().counter("scheduler_preemption_attempts_total", help, &[]).with(&[])
});
static PENDING: LazyLock<[Arc<Gauge>; 4]> = LazyLock::new(|| {
    let help = "Number of pending pods, by the part of the queue that they are in.";
    let family = registry().gauge("scheduler_pending_pods", help, &["queue"]);
    ["active", "backoff", "unschedulable", "gated"].map(|queue| family.with(&[queue]))
});
static INCOMING: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "scheduler_queue_incoming_pods_total",
        "Number of pods added to the parts of the queue, by event and part.",
        &["queue", "event"],
    )
});

static EVALUATIONS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "scheduler_plugin_evaluation_total",
        "Number of evaluations by each plugin at PreFilter, Filter, PreScore and Score; at Filter and Score, of each node.",
        &["plugin", "extension_point", "profile"],
    )
});
static UNSCHEDULABLE: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
    registry().gauge(
        "scheduler_unschedulable_pods",
        "Number of pods that each plugin has rejected, until their next attempt. A pod counts for every plugin that rejected it.",
        &["plugin", "profile"],
    )
});
static BINDING: LazyLock<Arc<Gauge>> = LazyLock::new(|| {
    let help = "Number of tasks that run beside the scheduling cycle, by their work.";
    registry().gauge("scheduler_goroutines", help, &["operation"]).with(&["binding"])
});

/// The evaluations of a plugin at an extension point. Keep it: finding it takes a lock.
pub(crate) fn evaluations(plugin: &str, point: &str, profile: &str) -> Arc<Counter> {
    EVALUATIONS.with(&[plugin, point, profile])
}

/// Counts something for as long as it exists.
#[derive(Debug, Default)]
pub(crate) struct Counted(Vec<Arc<Gauge>>);

impl Counted {
    fn new(gauges: Vec<Arc<Gauge>>) -> Self {
        gauges.iter().for_each(|gauge| gauge.add(1));
        Self(gauges)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.iter().for_each(|gauge| gauge.add(-1));
    }
}

/// A pod waits because these plugins rejected it.
pub(crate) fn unschedulable(plugins: &[&str], profile: &str) -> Counted {
    Counted::new(plugins.iter().map(|plugin| UNSCHEDULABLE.with(&[plugin, profile])).collect())
}

#[cfg(test)]
pub(crate) fn unschedulable_pods(plugin: &str, profile: &str) -> i64 {
    UNSCHEDULABLE.with(&[plugin, profile]).get()
}

/// A pod is being bound.
pub(crate) fn binding() -> Counted {
    Counted::new(vec![Arc::clone(&BINDING)])
}

fn number(count: usize) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or(u64::MAX))
}

/// An attempt to schedule a pod ended: `scheduled`, `unschedulable` or `error`.
pub(crate) fn attempt(result: &str, profile: &str, started: Instant) {
    ATTEMPTS.with(&[result, profile]).increment();
    ATTEMPT_DURATION.with(&[result, profile]).observe(started.elapsed());
}

/// A pod was bound after so many attempts.
pub(crate) fn scheduled(attempts: u32, since: Instant) {
    POD_ATTEMPTS.observe(Duration::from_secs(attempts.into()));
    // As upstream, so that the number of series is bounded.
    let label = if attempts >= 15 { "15+".to_owned() } else { attempts.to_string() };
    POD_DURATION.with(&[&label]).observe(since.elapsed());
}

/// The plugins of an extension point have run.
pub(crate) fn point(point: &str, status: &str, profile: &str, started: std::time::Instant) {
    POINTS.with(&[point, status, profile]).observe(started.elapsed());
}

pub(crate) fn permit_wait(result: &str, started: Instant) {
    PERMIT_WAIT.with(&[result]).observe(started.elapsed());
}

pub(crate) fn preemption_attempt() {
    PREEMPTIONS.increment();
}

pub(crate) fn victims(count: usize) {
    VICTIMS.observe(number(count));
}

/// The number of pods that are active, backing off, unschedulable and gated.
pub(crate) fn pending(counts: [usize; 4]) {
    for (gauge, count) in PENDING.iter().zip(counts) {
        gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

/// A pod entered a part of the queue.
pub(crate) fn incoming(queue: &str, event: &str) {
    INCOMING.with(&[queue, event]).increment();
}
