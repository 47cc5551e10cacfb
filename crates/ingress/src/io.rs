//! A stream whose other end must go on.

use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// Fails a read or a write for which nothing has moved in a time.
#[derive(Debug)]
pub(crate) struct Guarded<S> {
    stream: S,
    read: Watch,
    write: Watch,
}

/// Runs from the first poll that found nothing to do.
#[derive(Debug)]
struct Watch {
    limit: Option<Duration>,
    running: Option<Pin<Box<Sleep>>>,
}

impl Watch {
    fn new(limit: Option<Duration>) -> Self {
        Self { limit, running: None }
    }

    fn see<T>(&mut self, polled: Poll<Result<T>>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let (Poll::Pending, Some(limit)) = (&polled, self.limit) else {
            self.running = None;
            return polled;
        };
        let running = self.running.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        match running.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the other end has stopped"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S> Guarded<S> {
    pub fn new(stream: S, read: Option<Duration>, write: Duration) -> Self {
        Self { stream, read: Watch::new(read), write: Watch::new(Some(write)) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        this.read.see(polled, context)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.write.see(polled, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[std::io::IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.stream).poll_write_vectored(context, pieces);
        this.write.see(polled, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.stream).poll_flush(context);
        this.write.see(polled, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.stream).poll_shutdown(context);
        this.write.see(polled, context)
    }
}
