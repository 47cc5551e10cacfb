//! Durations of single filters, of those that upstream measures because they may take long.

use ferrite_component::metrics::{Family, Histogram, registry};
use std::sync::{Arc, LazyLock};

const BUCKETS: &[f64] = &[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0, 10.0, 15.0, 30.0];

static FAMILY: LazyLock<Arc<Family<Histogram>>> = LazyLock::new(|| {
    let name = "apiserver_request_filter_duration_seconds";
    registry().histogram(name, "How long a filter of requests took.", &["filter"], BUCKETS)
});

pub(super) static AUTHENTICATION: LazyLock<Arc<Histogram>> =
    LazyLock::new(|| FAMILY.with(&["authentication"]));
pub(super) static AUTHORIZATION: LazyLock<Arc<Histogram>> = LazyLock::new(|| FAMILY.with(&["authorization"]));
pub(super) static IMPERSONATION: LazyLock<Arc<Histogram>> = LazyLock::new(|| FAMILY.with(&["impersonation"]));
