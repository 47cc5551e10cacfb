//! Metrics of conversion webhooks.

use crate::metrics::BoundedSeries;
use ferrite_component::metrics::{Counter, Family, Histogram, registry};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Upstream's buckets.
const SECONDS: &[f64] =
    &[0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];
const KIND_SECONDS: &[f64] = &[
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384,
];

struct Calls {
    total: Arc<Family<Counter>>,
    duration: Arc<Family<Histogram>>,
    by_kind: Arc<Family<Histogram>>,
    kinds: BoundedSeries,
}

static CALLS: LazyLock<Calls> = LazyLock::new(|| {
    const LABELS: &[&str] = &["failure_type", "result"];
    Calls {
        total: registry().counter(
            "apiserver_conversion_webhook_request_total",
            "Counter for conversion webhook requests with success/failure and failure error type",
            LABELS,
        ),
        duration: registry().histogram(
            "apiserver_conversion_webhook_duration_seconds",
            "Conversion webhook request latency",
            LABELS,
            SECONDS,
        ),
        by_kind: registry().histogram(
            "apiserver_crd_conversion_webhook_duration_seconds",
            "CRD webhook conversion duration in seconds",
            &["crd_name", "from_version", "succeeded", "to_version"],
            KIND_SECONDS,
        ),
        kinds: BoundedSeries::default(),
    }
});

/// The kind of failure of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    Call,
    Malformed,
    Partial,
    InvalidObject,
}

impl Failure {
    fn name(self) -> &'static str {
        match self {
            Self::Call => "conversion_webhook_call_failure",
            Self::Malformed => "conversion_webhook_malformed_response_failure",
            Self::Partial => "conversion_webhook_partial_response_failure",
            Self::InvalidObject => "conversion_webhook_invalid_converted_object_failure",
        }
    }
}

/// Counts a call of the webhook of `definition`.
pub(super) fn converted(
    definition: &str,
    (from, to): (&str, &str),
    failure: Option<Failure>,
    elapsed: Duration,
) {
    let labels = match failure {
        None => ["", "success"],
        Some(failure) => [failure.name(), "failure"],
    };
    CALLS.total.with(&labels).increment();
    CALLS.duration.with(&labels).observe(elapsed);
    let labels = [definition, from, if failure.is_none() { "true" } else { "false" }, to];
    if CALLS.kinds.admits(&labels) {
        CALLS.by_kind.with(&labels).observe(elapsed);
    }
}
