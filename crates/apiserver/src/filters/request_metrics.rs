//! Counts requests by kind and code; streams are counted until they end.

use super::Facts;
use crate::http::{self, Response};
use crate::metrics::{Metrics, RequestKind};
use crate::options::Query;
use ::http::Method;
use ferrite_component::metrics::{Family, Histogram, registry};
use std::sync::{Arc, LazyLock};

const BUCKETS: &[f64] = &[
    0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0,
];

static FIELD_VALIDATION: LazyLock<Arc<Family<Histogram>>> = LazyLock::new(|| {
    let help = "How long writes took, by the treatment of unknown fields that they asked for.";
    registry().histogram("field_validation_request_duration_seconds", help, &["field_validation"], BUCKETS)
});

/// The treatment of unknown fields that a write asks for; empty for the default. None for other requests.
fn field_validation(method: &Method, kind: &RequestKind, query: Option<&str>) -> Option<&'static str> {
    let writes = matches!(*method, Method::POST | Method::PUT | Method::PATCH);
    (writes && kind.is_of_resource()).then(|| {
        let query = Query::parse(query);
        let asked = query.get("fieldValidation").unwrap_or_default();
        ["Strict", "Warn", "Ignore"].into_iter().find(|known| *known == asked).unwrap_or_default()
    })
}

pub(super) fn after(facts: &Facts, answer: Response) -> Response {
    let (server, kind) = (&facts.server, &facts.kind);
    let (code, elapsed) = (answer.status().as_u16(), facts.started.elapsed());
    let length = http_body::Body::size_hint(answer.body()).exact();
    server.metrics.record(kind, code, elapsed, length, facts.body_length);
    if let Some(validation) = field_validation(&facts.method, kind, facts.uri.query()) {
        FIELD_VALIDATION.with(&[validation]).observe(elapsed);
    }
    tracing::debug!(method = %facts.method, path = facts.uri.path(), code, ?elapsed, "request");
    if kind.is_long_running() {
        let streaming = Metrics::streaming(server, kind, facts.started);
        return answer.map(|body| http::held(body, streaming));
    }
    answer
}
