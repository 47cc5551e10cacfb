//! Bodies on their way: never held, only passed on.

use crate::limits::RequestPlace;
use crate::pool::Lease;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Sleep;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("the body stopped coming")]
    Stalled,
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

/// A body that comes from the other side, piece by piece.
#[derive(Debug)]
pub(crate) struct Streamed {
    inner: Incoming,
    limit: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    /// The connection that is free again after the last piece.
    lease: Option<Lease>,
    /// The request's place, held until its answer is out.
    _place: Option<RequestPlace>,
    /// Dropped after the last piece.
    underway: Option<oneshot::Sender<()>>,
}

impl Streamed {
    pub fn new(inner: Incoming, limit: Duration) -> Self {
        Self { inner, limit, waiting: None, lease: None, _place: None, underway: None }
    }

    /// The body of a request, and a channel that closes after its last piece.
    pub fn request(inner: Incoming, limit: Duration) -> (Self, oneshot::Receiver<()>) {
        let (underway, ended) = oneshot::channel();
        (Self { underway: Some(underway), ..Self::new(inner, limit) }, ended)
    }

    /// The body of an answer.
    pub fn answer(inner: Incoming, limit: Duration, lease: Option<Lease>, place: RequestPlace) -> Self {
        let mut body = Self { _place: Some(place), lease, ..Self::new(inner, limit) };
        if body.inner.is_end_stream() {
            body.finish();
        }
        body
    }

    fn finish(&mut self) {
        self.underway = None;
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
    }
}

impl Body for Streamed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(frame) => {
                this.waiting = None;
                match &frame {
                    None => this.finish(),
                    Some(Ok(_)) if this.inner.is_end_stream() => this.finish(),
                    // The connection is of no more use: the lease closes it.
                    Some(Err(_)) => drop(this.lease.take()),
                    Some(Ok(_)) => {}
                }
                Poll::Ready(frame.map(|frame| frame.map_err(BodyError::Http)))
            }
            Poll::Pending => {
                let limit = this.limit;
                let waiting = this.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
                ready!(waiting.as_mut().poll(context));
                Poll::Ready(Some(Err(BodyError::Stalled)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A body: one that streams, or our own.
#[derive(Debug)]
pub(crate) enum Payload {
    Streamed(Streamed),
    Own(Full<Bytes>),
}

impl Payload {
    pub fn text(text: impl Into<Bytes>) -> Self {
        Self::Own(Full::new(text.into()))
    }

    pub fn empty() -> Self {
        Self::Own(Full::default())
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut *self {
            Self::Streamed(body) => Pin::new(body).poll_frame(context),
            Self::Own(body) => Pin::new(body)
                .poll_frame(context)
                .map(|frame| frame.map(|frame| frame.map_err(|never| match never {}))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Streamed(body) => body.is_end_stream(),
            Self::Own(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Streamed(body) => body.size_hint(),
            Self::Own(body) => body.size_hint(),
        }
    }
}
