//! Large answers go compressed to clients that say they can read it.

use super::Facts;
use crate::http::{Body, BoxError, Response};
use ::http::{HeaderMap, HeaderValue, header};
use bytes::{Buf, Bytes};
use flate2::Compression;
use flate2::write::GzEncoder;
use http_body::Frame;
use http_body_util::BodyExt;
use std::io::Write;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// Smaller answers are faster as they are, as upstream decides.
const THRESHOLD: u64 = 128 << 10;
/// Compressed in one go; between two of these, others have their turn.
const STEP: usize = 128 << 10;

pub(super) fn after(facts: &Facts, answer: Response) -> Response {
    // A stream is flushed event by event, so it is never compressed.
    if facts.accepts_gzip && !facts.kind.is_long_running() { gzip(answer) } else { answer }
}

pub(super) fn is_accepted(headers: &HeaderMap) -> bool {
    let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|v| v.to_str().ok()).unwrap_or_default();
    accepted.split(',').any(|clause| {
        let mut parts = clause.split(';').map(str::trim);
        parts.next() == Some("gzip") && !parts.any(|p| matches!(p, "q=0" | "q=0.0"))
    })
}

/// Compresses an answer that is known to be large, as it goes out.
fn gzip(answer: Response) -> Response {
    let at_least = http_body::Body::size_hint(answer.body()).lower();
    if at_least < THRESHOLD || answer.headers().contains_key(header::CONTENT_ENCODING) {
        return answer;
    }
    let (mut parts, body) = answer.into_parts();
    parts.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    parts.headers.append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    parts.headers.remove(header::CONTENT_LENGTH);
    // As upstream: speed counts for more than the last few percent.
    let encoder = Some(GzEncoder::new(Vec::new(), Compression::fast()));
    let body = Gzip { plain: Bytes::new(), body, encoder };
    Response::from_parts(parts, body.boxed_unsync())
}

struct Gzip {
    body: Body,
    /// Bytes taken from the body that are not compressed yet.
    plain: Bytes,
    /// None once the end is written.
    encoder: Option<GzEncoder<Vec<u8>>>,
}

impl http_body::Body for Gzip {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        loop {
            let Some(encoder) = &mut this.encoder else { return Poll::Ready(None) };
            if !this.plain.is_empty() {
                let step = this.plain.len().min(STEP);
                if let Err(error) = encoder.write_all(&this.plain[..step]) {
                    return Poll::Ready(Some(Err(error.into())));
                }
                this.plain.advance(step);
                let done = std::mem::take(encoder.get_mut());
                if !done.is_empty() {
                    return Poll::Ready(Some(Ok(Frame::data(done.into()))));
                }
                continue;
            }
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        this.plain = data;
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    let end = this.encoder.take().map(GzEncoder::finish);
                    return Poll::Ready(
                        end.map(|end| end.map(|b| Frame::data(b.into())).map_err(Into::into)),
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http;
    use std::io::Read;

    #[tokio::test]
    async fn large_answers_are_compressed_as_they_go() {
        let text: String = (0..60_000).map(|n| format!("{n} ")).collect();
        let answer = gzip(http::text(200, text.clone()));
        assert_eq!(answer.headers()[header::CONTENT_ENCODING], "gzip");
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        let mut plain = String::new();
        flate2::read::GzDecoder::new(&*bytes).read_to_string(&mut plain).unwrap();
        assert_eq!(plain, text);
        let small = gzip(http::text(200, "small"));
        assert!(!small.headers().contains_key(header::CONTENT_ENCODING));
    }

    #[test]
    fn only_those_who_can_read_it_get_it() {
        for (accepted, expected) in
            [("gzip", true), ("br, gzip;q=0.5", true), ("gzip;q=0", false), ("", false), ("deflate", false)]
        {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(accepted));
            assert_eq!(is_accepted(&headers), expected, "{accepted}");
        }
    }
}
