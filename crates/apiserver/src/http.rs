//! Bodies and answers.

use bytes::{Bytes, BytesMut};
use ferrite_api::Status;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use serde_json::Value;

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A body of a request or an answer, whichever door it came through.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;
pub type Answer = Response<Body>;

pub(crate) const JSON: &str = "application/json";

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pub(crate) fn answer(code: u16, content_type: &str, bytes: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(full(bytes));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let value = HeaderValue::from_str(content_type).unwrap_or(HeaderValue::from_static(JSON));
    response.headers_mut().insert(header::CONTENT_TYPE, value);
    response
}

pub(crate) fn json(code: u16, value: &Value) -> Answer {
    answer(code, JSON, value.to_string())
}

pub(crate) fn text(code: u16, text: impl Into<String>) -> Answer {
    answer(code, "text/plain; charset=utf-8", text.into())
}

/// A body that is refused is read this far, so that the client is there to hear it.
const DRAINED: usize = 16 << 20;

async fn drain(mut body: Body, mut left: usize) {
    while let Some(Ok(frame)) = body.frame().await {
        let length = frame.data_ref().map_or(0, Bytes::len);
        if length >= left {
            return;
        }
        left -= length;
    }
}

/// Reads a body whole, refusing it as soon as it is longer than `limit`.
pub(crate) async fn read(mut body: Body, limit: usize) -> Result<Bytes, Status> {
    let mut collected = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Status::bad_request(format!("cannot read the request: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if collected.len() + data.len() > limit {
            drain(body, DRAINED - limit.min(DRAINED)).await;
            return Err(Status::too_large(limit));
        }
        collected.extend_from_slice(&data);
    }
    Ok(collected.freeze())
}
