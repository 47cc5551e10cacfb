//! Response bodies whose end completes the audit of their request.

use super::record::Holds;
use super::{Level, Record, Written};
use crate::http::{self, Body, BoxError, Response};
use ::http::{StatusCode, header};
use bytes::Bytes;
use futures_util::FutureExt;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Longer bodies are not captured: they are no object that an event could have.
const LIMIT: usize = super::objects::LIMIT;

/// Notes a response in the record of its request and completes the record, at once or when the body ends.
pub(crate) fn audited(
    record: &Arc<Record>,
    response: Response,
    long_running: bool,
    has_object: bool,
) -> Response {
    let code = response.status().as_u16();
    let whole = response.body().size_hint().exact().is_some();
    let (parts, mut body) = response.into_parts();
    let media_type =
        parts.headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    // A body that is there already is looked into without waiting; one that somebody else sends is not touched.
    let mut first = None;
    if whole && body.size_hint().upper().is_some_and(|upper| upper as usize <= LIMIT + 1) {
        first = body.frame().now_or_never().flatten();
    }
    let data = first.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()).cloned();
    let complete = data.filter(|_| body.is_end_stream() || body.size_hint().exact() == Some(0));
    let is_stream = long_running && code < 400;
    let holds = match (has_object, long_running) {
        (false, _) => Holds::NoObject,
        // The far side of a stream may answer anything; a Status is ours.
        (true, true) => Holds::Status,
        (true, false) => Holds::Object,
    };
    record.response(code, media_type, complete.as_deref(), holds);
    if long_running {
        record.started();
    }
    let media_type = media_type.to_owned();
    let body = match (complete, first) {
        (Some(bytes), _) => http::full(bytes),
        (None, None) => body,
        (None, first) => Rest { first, body }.boxed_unsync(),
    };
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        // The stream goes on without this body; the task that serves it holds the record.
        return Response::from_parts(parts, body);
    }
    if whole && !is_stream {
        record.complete();
        return Response::from_parts(parts, body);
    }
    let captures = has_object && !long_running && record.level() == Level::RequestResponse;
    let captured = captures.then(|| Captured { media_type, bytes: Some(Vec::new()) });
    let record = Some(Arc::clone(record));
    let body = Audited { body, record, captured, pending: Vec::new() }.boxed_unsync();
    Response::from_parts(parts, body)
}

/// A body of which one frame was taken.
struct Rest {
    first: Option<Result<Frame<Bytes>, BoxError>>,
    body: Body,
}

impl http_body::Body for Rest {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(first)),
            None => Pin::new(&mut self.body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let taken =
            self.first.as_ref().and_then(|first| first.as_ref().ok()?.data_ref()).map_or(0, Bytes::len);
        let rest = self.body.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + taken as u64);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + taken as u64);
        }
        hint
    }
}

/// The pieces of a body, as far as they may become an object.
struct Captured {
    media_type: String,
    /// None once they are too many.
    bytes: Option<Vec<u8>>,
}

impl Captured {
    fn add(&mut self, data: &[u8]) {
        match &mut self.bytes {
            Some(bytes) if bytes.len() + data.len() <= LIMIT => bytes.extend_from_slice(data),
            bytes => *bytes = None,
        }
    }
}

impl Drop for Audited {
    fn drop(&mut self) {
        // The client has left before the end.
        if let Some(record) = self.record.take() {
            record.abandon();
        }
    }
}

struct Audited {
    body: Body,
    /// None once it is complete.
    record: Option<Arc<Record>>,
    captured: Option<Captured>,
    /// The end of the body waits for these.
    pending: Vec<Written>,
}

impl http_body::Body for Audited {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if this.record.is_some() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let (Some(captured), Some(data)) = (&mut this.captured, frame.data_ref()) {
                        captured.add(data);
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {}
            }
        }
        if let Some(record) = this.record.take() {
            if let Some(captured) = this.captured.take() {
                record.response_object(&captured.media_type, captured.bytes.as_deref());
            }
            record.complete();
            this.pending = record.take_pending();
        }
        while let Some(written) = this.pending.last_mut() {
            ready!(written.as_mut().poll(cx));
            this.pending.pop();
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.record.is_none() && self.pending.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
