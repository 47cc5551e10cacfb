//! Answers of one connection leave together.
//!
//! HTTP/2 asks for a flush after every frame of data. Taken at its word, each answer would be a TLS record and a system
//! call of its own. Here a flush waits until the connection has nothing more to do: see [`driven`].

use crate::http::BoxError;
use std::cell::Cell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// More than this does not wait. Two TLS records, so that a system call is well used.
const WAITING: usize = 32 << 10;
/// Writes of at least this size bypass the buffer: they fill a system call by themselves.
const LARGE: usize = 8 << 10;

/// A stream whose writes wait for [`CoalescingWriter::poll_out`], or go straight on if it does not hold them.
pub(crate) struct CoalescingWriter<S>(Arc<Mutex<Inner<S>>>);

struct Inner<S> {
    stream: S,
    holds: bool,
    waiting: Vec<u8>,
    /// Number of waiting bytes that have been sent.
    sent: usize,
}

thread_local! {
    /// A buffer for waiting bytes. A connection needs it only while it is polled, so one for each thread is
    /// enough, and an idle connection keeps no memory.
    static ROOM: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The other handle is for the task that polls the connection.
impl<S> Clone for CoalescingWriter<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: AsyncWrite + Unpin> CoalescingWriter<S> {
    pub fn new(stream: S, holds: bool) -> Self {
        Self(Arc::new(Mutex::new(Inner { stream, holds, waiting: Vec::new(), sent: 0 })))
    }

    /// Sends the waiting bytes.
    pub fn poll_out(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        ready!(inner.poll_drain(cx))?;
        Pin::new(&mut inner.stream).poll_flush(cx)
    }

    fn lock(&self) -> MutexGuard<'_, Inner<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: AsyncWrite + Unpin> Inner<S> {
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.waiting.is_empty() {
            return Poll::Ready(Ok(()));
        }
        while self.sent < self.waiting.len() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.waiting[self.sent..]))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += sent;
        }
        let mut room = std::mem::take(&mut self.waiting);
        room.clear();
        self.sent = 0;
        ROOM.set(room);
        Poll::Ready(Ok(()))
    }

    /// Buffers small writes, and sends large ones.
    fn poll_take(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        if length >= LARGE || self.waiting.len() + length > WAITING {
            ready!(self.poll_drain(cx))?;
        }
        if length >= LARGE {
            return Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        }
        if self.waiting.is_empty() {
            self.waiting = ROOM.take();
            self.waiting.reserve(WAITING);
        }
        slices.iter().for_each(|slice| self.waiting.extend_from_slice(slice));
        Poll::Ready(Ok(length))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CoalescingWriter<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Pin::new(&mut inner.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CoalescingWriter<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.lock();
        match inner.holds {
            true => inner.poll_take(cx, slices),
            false => Pin::new(&mut inner.stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        match inner.holds {
            true => Poll::Ready(Ok(())),
            false => Pin::new(&mut inner.stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        ready!(inner.poll_drain(cx))?;
        Pin::new(&mut inner.stream).poll_shutdown(cx)
    }
}

/// Polls a connection, and sends its buffered writes whenever it has to wait.
pub(crate) async fn driven<S, C, E>(
    mut connection: Pin<&mut C>,
    out: &CoalescingWriter<S>,
) -> Result<(), BoxError>
where
    S: AsyncWrite + Unpin,
    C: Future<Output = Result<(), E>>,
    E: Into<BoxError>,
{
    std::future::poll_fn(|cx| match connection.as_mut().poll(cx) {
        Poll::Ready(ended) => Poll::Ready(ended.map_err(Into::into)),
        Poll::Pending => match out.poll_out(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
            _ => Poll::Pending,
        },
    })
    .await
}

/// Polls a future once where it is made; only a future that is not ready becomes a task. Then a get of one
/// object needs neither a task nor two wake-ups, and requests that came together are answered together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InlineExecutor;

impl<F> hyper::rt::Executor<F> for InlineExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        let mut future = Box::pin(future);
        // Nobody has to be woken: a future that is not done is polled again as a task.
        let mut cx = Context::from_waker(Waker::noop());
        if future.as_mut().poll(&mut cx).is_pending() {
            tokio::spawn(future);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn writes_wait_until_the_connection_does() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut writer = CoalescingWriter::new(near, true);
        let out = writer.clone();
        let connection = std::pin::pin!(async move {
            writer.write_all(b"one").await?;
            writer.flush().await?;
            writer.write_all(b"two").await?;
            assert_eq!(writer.lock().waiting, &b"onetwo"[..]);
            tokio::task::yield_now().await;
            assert_eq!(writer.lock().waiting, &b""[..]);
            writer.write_all(b"three").await?;
            writer.shutdown().await
        });
        driven(connection, &out).await.unwrap();
        drop(out);
        let mut all = String::new();
        far.read_to_string(&mut all).await.unwrap();
        assert_eq!(all, "onetwothree");
    }

    #[tokio::test]
    async fn a_slow_reader_makes_the_connection_wait() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut writer = CoalescingWriter::new(near, true);
        let out = writer.clone();
        let sent: Vec<u8> = (0..WAITING * 3 + 7).map(|n| n as u8).collect();
        let connection = std::pin::pin!(async {
            let (small, large) = sent.split_at(WAITING * 2);
            for piece in small.chunks(1000) {
                writer.write_all(piece).await?;
            }
            writer.write_all(large).await?;
            writer.shutdown().await
        });
        let read = async {
            let mut all = Vec::new();
            far.read_to_end(&mut all).await.unwrap();
            all
        };
        let (ended, all) = tokio::join!(driven(connection, &out), read);
        ended.unwrap();
        assert!(all == sent);
    }

    #[tokio::test]
    async fn a_stream_that_is_not_held_passes_through() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut writer = CoalescingWriter::new(near, false);
        writer.write_all(b"now").await.unwrap();
        let mut got = [0; 3];
        far.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"now");
    }

    #[tokio::test]
    async fn what_has_to_wait_becomes_a_task() {
        use hyper::rt::Executor;
        let (tell, told) = tokio::sync::oneshot::channel();
        let (done, mut is_done) = tokio::sync::mpsc::channel(2);
        let first = done.clone();
        InlineExecutor.execute(async move {
            let _ = first.try_send("at once");
        });
        assert_eq!(is_done.try_recv(), Ok("at once"));
        InlineExecutor.execute(async move {
            let _ = told.await;
            let _ = done.try_send("later");
        });
        assert!(is_done.try_recv().is_err());
        tell.send(()).unwrap();
        assert_eq!(is_done.recv().await, Some("later"));
    }
}
