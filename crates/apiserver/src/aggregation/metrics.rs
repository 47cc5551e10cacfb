//! Metrics of the availability of APIServices.

use ferrite_component::metrics::{Counter, Family, Gauge, registry};
use std::sync::{Arc, LazyLock};

static UNAVAILABLE: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
    registry().gauge(
        "aggregator_unavailable_apiservice",
        "Gauge of APIServices which are marked as unavailable broken down by APIService name.",
        &["name"],
    )
});

static UNAVAILABLE_TOTAL: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "aggregator_unavailable_apiservice_total",
        "Counter of APIServices which are marked as unavailable broken down by APIService name and reason.",
        &["name", "reason"],
    )
});

/// Records the state of an APIService.
pub(super) fn set_available(name: &str, available: bool) {
    UNAVAILABLE.with(&[name]).set(i64::from(!available));
}

/// Records that an APIService that was available no longer is.
pub(super) fn became_unavailable(name: &str, reason: &str) {
    UNAVAILABLE_TOTAL.with(&[name, reason]).increment();
}

/// Drops the state of an APIService that is gone.
pub(super) fn forget(name: &str) {
    UNAVAILABLE.remove(&[name]);
}
