//! Counters of the proxy.

use ferrite_component::metrics::{Counter, Family, registry};
use http::StatusCode;
use std::sync::{Arc, OnceLock};

/// Counts an answer by its status.
pub(crate) fn answered(status: StatusCode) {
    static REQUESTS: OnceLock<Arc<Family<Counter>>> = OnceLock::new();
    let requests = REQUESTS.get_or_init(|| {
        registry().counter(
            "ferrite_ingress_requests_total",
            "Requests by the status of their answers.",
            &["code"],
        )
    });
    // An endpoint may invent codes; they share a counter.
    let code = if status.canonical_reason().is_some() { status.as_str() } else { "other" };
    requests.with(&[code]).increment();
}

/// Counts a connection that was closed because there were too many.
pub(crate) fn refused() {
    static REFUSED: OnceLock<Arc<Family<Counter>>> = OnceLock::new();
    let refused = REFUSED.get_or_init(|| {
        registry().counter(
            "ferrite_ingress_refused_connections_total",
            "Connections that were closed because there were too many.",
            &[],
        )
    });
    refused.with(&[]).increment();
}
