//! Large answers go compressed to clients that say they can read it.

use crate::http::{self, Answer};
use ::http::{HeaderMap, HeaderValue, header};
use flate2::Compression;
use flate2::write::GzEncoder;
use http_body_util::BodyExt;
use std::io::Write;

/// Smaller answers are faster as they are, as upstream decides.
const THRESHOLD: u64 = 128 << 10;

pub(crate) fn wanted(headers: &HeaderMap) -> bool {
    let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|v| v.to_str().ok()).unwrap_or_default();
    accepted.split(',').any(|clause| {
        let mut parts = clause.split(';').map(str::trim);
        parts.next() == Some("gzip") && !parts.any(|p| matches!(p, "q=0" | "q=0.0"))
    })
}

/// Compresses a large answer whose length is known; streams stay as they are.
pub(crate) async fn gzip(answer: Answer) -> Answer {
    let exact = http_body::Body::size_hint(answer.body()).exact();
    if exact.is_none_or(|size| size < THRESHOLD) || answer.headers().contains_key(header::CONTENT_ENCODING) {
        return answer;
    }
    let (mut parts, body) = answer.into_parts();
    let Ok(collected) = body.collect().await else { return http::text(500, "the answer was lost") };
    let plain = collected.to_bytes();
    // As upstream: speed counts for more than the last few percent.
    let compressed = tokio::task::spawn_blocking(move || {
        let mut encoder = GzEncoder::new(Vec::with_capacity(plain.len() / 4), Compression::fast());
        let written = encoder.write_all(&plain).and_then(|()| encoder.finish());
        written.map_err(|_| plain)
    })
    .await;
    let body = match compressed {
        Ok(Ok(bytes)) => {
            parts.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            parts.headers.append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
            parts.headers.remove(header::CONTENT_LENGTH);
            http::full(bytes)
        }
        Ok(Err(plain)) => http::full(plain),
        Err(_) => return http::text(500, "the answer was lost"),
    };
    Answer::from_parts(parts, body)
}
