//! Counts requests by kind and code; streams are counted until they end.

use super::Facts;
use crate::http::{self, Answer};
use crate::metrics::Metrics;

pub(super) fn after(facts: &Facts, answer: Answer) -> Answer {
    let (server, kind) = (&facts.server, &facts.kind);
    let (code, elapsed) = (answer.status().as_u16(), facts.started.elapsed());
    let length = http_body::Body::size_hint(answer.body()).exact();
    server.metrics.record(kind, code, elapsed, length, facts.body_length);
    tracing::debug!(method = %facts.method, path = facts.uri.path(), code, ?elapsed, "request");
    if kind.is_long_running() {
        let streaming = Metrics::streaming(server, kind);
        return answer.map(|body| http::held(body, streaming));
    }
    answer
}
