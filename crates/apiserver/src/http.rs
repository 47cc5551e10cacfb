//! Bodies and answers.

use crate::traffic::Held;
use bytes::{Bytes, BytesMut};
use ferrite_api::Status;
use ferrite_json::Value;
use http::{HeaderValue, StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A body of a request or a response, over the network or within the process.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;
pub type Response = ::http::Response<Body>;

pub(crate) const JSON: &str = "application/json";

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pub(crate) fn answer(code: u16, content_type: &'static str, bytes: impl Into<Bytes>) -> Response {
    let mut response = Response::new(full(bytes));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

pub(crate) fn json(code: u16, value: &Value) -> Response {
    answer(code, JSON, value.to_string())
}

pub(crate) fn text(code: u16, text: impl Into<String>) -> Response {
    answer(code, "text/plain; charset=utf-8", text.into())
}

/// A message of a [`pipe`].
pub(crate) enum Piece {
    Data(Bytes),
    /// Data that counts as somebody's until it has been sent.
    Counted(Bytes, Held),
    /// Nothing is missing.
    End,
}

/// A body that somebody else writes, `waiting` pieces ahead of the reader at most.
///
/// `at_least` is the known part of its length. Without [`Piece::End`] it is cut off, unless it is
/// `endless`: the client must see that the body is incomplete.
pub(crate) fn pipe(waiting: usize, at_least: u64, endless: bool) -> (mpsc::Sender<Piece>, Body) {
    let (sender, pieces) = mpsc::channel(waiting);
    (sender, Pipe { pieces, counted: None, at_least, complete: endless }.boxed_unsync())
}

struct Pipe {
    pieces: mpsc::Receiver<Piece>,
    /// Counts the last piece. It has been sent when the next one is asked for.
    counted: Option<Held>,
    at_least: u64,
    complete: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("the answer was not completed in time")]
struct CutOff;

impl http_body::Body for Pipe {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.counted = None;
        loop {
            match std::task::ready!(self.pieces.poll_recv(cx)) {
                Some(Piece::Data(bytes)) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Some(Piece::Counted(bytes, held)) => {
                    self.counted = Some(held);
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Some(Piece::End) => self.complete = true,
                None if self.complete => return Poll::Ready(None),
                None => {
                    self.complete = true;
                    return Poll::Ready(Some(Err(Box::new(CutOff))));
                }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        hint.set_lower(self.at_least);
        hint
    }
}

/// A body that drops `held` when it is over.
pub(crate) fn held<T: Send + Unpin + 'static>(body: Body, held: T) -> Body {
    Holding { body, _held: held }.boxed_unsync()
}

struct Holding<T> {
    body: Body,
    _held: T,
}

impl<T: Unpin> http_body::Body for Holding<T> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
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

/// Reads a body whole, refusing it as soon as it is longer than `limit`, or when no more bytes may be taken.
pub(crate) async fn read(
    mut body: Body,
    limit: usize,
    mut may_take: impl FnMut(usize) -> bool,
) -> Result<Bytes, Status> {
    let mut collected = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Status::bad_request(format!("cannot read the request: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if collected.len() + data.len() > limit {
            drain(body, DRAINED - limit.min(DRAINED)).await;
            return Err(Status::too_large(limit));
        }
        if !may_take(data.len()) {
            return Err(Status::too_many_requests("Too many requests, please try again later."));
        }
        collected.extend_from_slice(&data);
    }
    Ok(collected.freeze())
}
