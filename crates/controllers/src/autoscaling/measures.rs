//! Metrics of the autoscaler, with upstream's names.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferrite_client::ObjectKey;
use ferrite_component::metrics::{Counter, Family, Gauge, Histogram, registry};

/// 1 ms to 16 s, each twice the one before.
const BUCKETS: &[f64] = &[
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384,
];

/// The direction of a scale that was made or proposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    ScaleUp,
    ScaleDown,
    None,
}

impl Action {
    /// The way from one number of replicas to another.
    pub(super) fn between(current: i32, desired: i32) -> Self {
        match desired.cmp(&current) {
            std::cmp::Ordering::Greater => Self::ScaleUp,
            std::cmp::Ordering::Less => Self::ScaleDown,
            std::cmp::Ordering::Equal => Self::None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::ScaleUp => "scale_up",
            Self::ScaleDown => "scale_down",
            Self::None => "none",
        }
    }
}

/// Whose fault it is that something failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The autoscaler's specification asks for something that there is not.
    Spec,
    Internal,
    None,
}

impl Fault {
    fn as_str(self) -> &'static str {
        match self {
            Self::Spec => "spec",
            Self::Internal => "internal",
            Self::None => "none",
        }
    }
}

struct Measures {
    looks: Arc<Family<Counter>>,
    look_times: Arc<Family<Histogram>>,
    metrics: Arc<Family<Counter>>,
    metric_times: Arc<Family<Histogram>>,
    autoscalers: Arc<Gauge>,
    desired: Arc<Family<Gauge>>,
}

static MEASURES: LazyLock<Measures> = LazyLock::new(|| {
    let registry = registry();
    let labels: &[&str] = &["action", "error"];
    let typed: &[&str] = &["action", "error", "metric_type"];
    Measures {
        looks: registry.counter(
            "horizontal_pod_autoscaler_controller_reconciliations_total",
            "Number of reconciliations of HPA controller.",
            labels,
        ),
        look_times: registry.histogram(
            "horizontal_pod_autoscaler_controller_reconciliation_duration_seconds",
            "The time that the HPA controller takes to reconcile once.",
            labels,
            BUCKETS,
        ),
        metrics: registry.counter(
            "horizontal_pod_autoscaler_controller_metric_computation_total",
            "Number of metric computations.",
            typed,
        ),
        metric_times: registry.histogram(
            "horizontal_pod_autoscaler_controller_metric_computation_duration_seconds",
            "The time that the HPA controller takes to calculate one metric.",
            typed,
            BUCKETS,
        ),
        autoscalers: registry
            .gauge(
                "horizontal_pod_autoscaler_controller_num_horizontal_pod_autoscalers",
                "Current number of controlled HPA objects.",
                &[],
            )
            .with(&[]),
        desired: registry.gauge(
            "horizontal_pod_autoscaler_controller_desired_replicas",
            "Current desired replica count for HPA objects.",
            &["namespace", "hpa_name"],
        ),
    }
});

pub(super) fn looked(action: Action, fault: Fault, elapsed: Duration) {
    let labels = [action.as_str(), fault.as_str()];
    MEASURES.looks.with(&labels).increment();
    MEASURES.look_times.with(&labels).observe(elapsed);
}

/// `kind` is the metric's type; the API server admits only those that there are.
pub(super) fn computed(action: Action, fault: Fault, kind: &str, elapsed: Duration) {
    let labels = [action.as_str(), fault.as_str(), kind];
    MEASURES.metrics.with(&labels).increment();
    MEASURES.metric_times.with(&labels).observe(elapsed);
}

pub(super) fn added() {
    MEASURES.autoscalers.add(1);
}

pub(super) fn deleted(autoscaler: &ObjectKey) {
    MEASURES.autoscalers.add(-1);
    MEASURES.desired.remove(&[&autoscaler.namespace, &autoscaler.name]);
}

pub(super) fn desires(autoscaler: &ObjectKey, replicas: i32) {
    MEASURES.desired.with(&[&autoscaler.namespace, &autoscaler.name]).set(i64::from(replicas));
}
