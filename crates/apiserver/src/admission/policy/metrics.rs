//! Upstream's metrics of policies.

use ferrite_component::metrics::{Counter, Family, Histogram, registry};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

const BUCKETS: &[f64] = &[0.000_000_5, 0.001, 0.01, 0.1, 1.0];

struct Checks {
    total: Arc<Family<Counter>>,
    duration: Arc<Family<Histogram>>,
}

static VALIDATING: LazyLock<Checks> = LazyLock::new(|| {
    const LABELS: &[&str] = &["policy", "policy_binding", "error_type", "enforcement_action"];
    Checks {
        total: registry().counter(
            "apiserver_validating_admission_policy_check_total",
            "Checks of validating admission policies by policy, binding, kind of error and action.",
            LABELS,
        ),
        duration: registry().histogram(
            "apiserver_validating_admission_policy_check_duration_seconds",
            "Time of single expressions of validating admission policies by policy, binding, kind of error and action.",
            LABELS,
            BUCKETS,
        ),
    }
});

static MUTATING: LazyLock<Checks> = LazyLock::new(|| {
    const LABELS: &[&str] = &["policy", "policy_binding", "error_type"];
    Checks {
        total: registry().counter(
            "apiserver_mutating_admission_policy_check_total",
            "Mutations by mutating admission policies by policy, binding and kind of error.",
            LABELS,
        ),
        duration: registry().histogram(
            "apiserver_mutating_admission_policy_check_duration_seconds",
            "Time of single mutations of mutating admission policies by policy, binding and kind of error.",
            LABELS,
            BUCKETS,
        ),
    }
});

/// The kind of an error by its message, as upstream derives it.
fn error_type(message: &str) -> &'static str {
    match message {
        message if message.starts_with("compilation") => "compile_error",
        message if message.starts_with("validation failed due to running out of cost budget") => {
            "out_of_budget"
        }
        _ => "invalid_error",
    }
}

/// Counts a validation that failed or had an error. `action` is the action that followed.
pub(super) fn validated(policy: &str, binding: &str, message: &str, action: &str, elapsed: Duration) {
    let labels = [policy, binding, error_type(message), action];
    VALIDATING.total.with(&labels).increment();
    VALIDATING.duration.with(&labels).observe(elapsed);
}

/// Counts a mutation, with its error if it had one.
pub(super) fn mutated(policy: &str, binding: &str, error: Option<&str>, elapsed: Duration) {
    let labels = [policy, binding, error.map_or("no_error", error_type)];
    MUTATING.total.with(&labels).increment();
    MUTATING.duration.with(&labels).observe(elapsed);
}
