//! SPDY/3.1 connections: streams in both directions, for exec, attach and port-forward.
//!
//! Kubernetes' peers keep no flow-control windows, so neither do we: a stream that is not read holds the
//! connection up, as it does with them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::budget::{Budget, Piece};
use super::session::{self, DEPTH, Size};
use super::spdy_codec::{self as codec, Frame, HEADER_LENGTH, Headers};
use super::{Action, forward};
use crate::service::Inner;

pub const PROTOCOLS: &[&str] =
    &["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
pub const FORWARD_PROTOCOLS: &[&str] = &["portforward.k8s.io"];

/// Streams a client may have open at once.
const MAX_STREAMS: usize = 512;
/// Longest wait for a client to open the streams that it announced.
const OPENING: Duration = Duration::from_secs(30);

/// The headers of a stream that anybody reads, and their longest values. Streams keep no others.
const HEADERS: &[&str] = &["streamtype", "requestid", "port"];
const MAX_VALUE: usize = 256;

/// A stream the client opened.
pub struct Stream {
    pub id: u32,
    pub headers: Headers,
    /// Data from the client; ends with its half of the stream.
    pub incoming: mpsc::Receiver<Piece>,
    pub outgoing: Outgoing,
}

/// Our half of a stream.
#[derive(Clone)]
pub struct Outgoing {
    id: u32,
    frames: mpsc::Sender<Frame>,
}

impl Outgoing {
    /// Sends; `Err` when the connection is gone.
    pub async fn send(&self, bytes: Bytes) -> Result<(), ()> {
        self.frames.send(Frame::Data { id: self.id, bytes, fin: false }).await.map_err(|_| ())
    }

    /// Ends our half.
    pub async fn finish(&self) {
        let _ = self.frames.send(Frame::Data { id: self.id, bytes: Bytes::new(), fin: true }).await;
    }
}

/// Runs a connection until the client goes away or `done` says that no more is to come. New streams are
/// answered and handed over through `accepted`.
async fn run<S>(io: S, accepted: mpsc::Sender<Stream>, done: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (read, write) = tokio::io::split(io);
    let (frames, queue) = mpsc::channel(DEPTH);
    let writing = write_frames(write, queue);
    tokio::pin!(writing);
    {
        let reading = read_frames(read, accepted, frames);
        tokio::select! {
            () = &mut writing => return,
            () = reading => {}
            () = done.cancelled() => {}
        }
    }
    // Queued data still goes out; then the last sender is gone and the connection closes.
    writing.await;
}

async fn write_frames(mut io: impl AsyncWrite + Unpin, mut queue: mpsc::Receiver<Frame>) {
    let Ok(mut writer) = codec::Writer::new() else { return };
    while let Some(frame) = queue.recv().await {
        let Ok(bytes) = writer.frame(&frame) else { return };
        if io.write_all(&bytes).await.is_err() || io.flush().await.is_err() {
            return;
        }
    }
    let _ = io.shutdown().await;
}

async fn read_frames(
    mut io: impl AsyncRead + Unpin,
    accepted: mpsc::Sender<Stream>,
    frames: mpsc::Sender<Frame>,
) {
    let mut reader = codec::Reader::default();
    let mut open: HashMap<u32, mpsc::Sender<Piece>> = HashMap::new();
    let budget = Budget::default();
    loop {
        let mut start = [0; HEADER_LENGTH];
        if io.read_exact(&mut start).await.is_err() {
            return;
        }
        let Ok(head) = codec::head(&start) else { return };
        let mut body = vec![0; head.length];
        if io.read_exact(&mut body).await.is_err() {
            return;
        }
        let Ok(frame) = reader.frame(head, Bytes::from(body)) else { return };
        match frame {
            Frame::Syn { id, mut headers, fin } => {
                headers.retain(|name, value| HEADERS.contains(&name.as_str()) && value.len() <= MAX_VALUE);
                if open.len() >= MAX_STREAMS || open.contains_key(&id) {
                    const REFUSED: u32 = 3;
                    if frames.send(Frame::Reset { id, status: REFUSED }).await.is_err() {
                        return;
                    }
                    continue;
                }
                let (sender, incoming) = mpsc::channel(DEPTH);
                if !fin {
                    open.insert(id, sender);
                }
                let outgoing = Outgoing { id, frames: frames.clone() };
                let reply = Frame::Reply { id, headers: Headers::new(), fin: false };
                if frames.send(reply).await.is_err()
                    || accepted.send(Stream { id, headers, incoming, outgoing }).await.is_err()
                {
                    return;
                }
            }
            Frame::Data { id, bytes, fin } => {
                if let Some(stream) = open.get(&id)
                    && !bytes.is_empty()
                {
                    // A stream that nobody reads any more discards further data.
                    let _ = stream.send(budget.take(bytes).await).await;
                }
                if fin {
                    open.remove(&id);
                }
            }
            Frame::Reset { id, .. } => {
                open.remove(&id);
            }
            Frame::Ping { id } => {
                // Odd numbers are the client's; even ones would answer ours.
                if id % 2 == 1 && frames.send(Frame::Ping { id }).await.is_err() {
                    return;
                }
            }
            Frame::GoAway { .. } => return,
            Frame::Reply { .. } | Frame::Other => {}
        }
    }
}

/// Collects the streams an exec or attach needs, by type.
async fn collect(
    accepted: &mut mpsc::Receiver<Stream>,
    expected: &[&str],
) -> Option<HashMap<String, Stream>> {
    let mut streams = HashMap::new();
    let all = async {
        while streams.len() < expected.len() {
            let stream = accepted.recv().await?;
            let kind = stream.headers.get("streamtype").cloned().unwrap_or_default();
            if expected.contains(&kind.as_str()) {
                streams.insert(kind, stream);
            }
        }
        Some(())
    };
    tokio::time::timeout(OPENING, all).await.ok()??;
    Some(streams)
}

/// Serves an exec or attach.
pub async fn serve<S>(inner: &Arc<Inner>, io: S, action: Action, protocol: &str)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (accepting, mut accepted) = mpsc::channel(DEPTH);
    let done = CancellationToken::new();
    let wanted = action.wanted();
    let resizes = wanted.tty && !matches!(protocol, "channel.k8s.io" | "v2.channel.k8s.io");
    let expected: Vec<&str> = [
        ("error", true),
        ("stdin", wanted.stdin),
        ("stdout", wanted.stdout),
        ("stderr", wanted.stderr),
        ("resize", resizes),
    ]
    .into_iter()
    .filter_map(|(kind, wanted)| wanted.then_some(kind))
    .collect();
    let connection = run(io, accepting, done.clone());
    let work = async {
        let Some(mut streams) = collect(&mut accepted, &expected).await else { return };
        // Kept so that the reader does not stop when the client opens more.
        let _accepted = accepted;
        let (channels, mut ends) = session::channels();
        let out = streams.remove("stdout").map(|stream| stream.outgoing);
        let err = streams.remove("stderr").map(|stream| stream.outgoing);
        let stdin = streams.remove("stdin");
        let resize = streams.remove("resize");
        let (to_stdin, to_resize) = (ends.stdin.take(), ends.resize.take());
        let input = async {
            let typing = async {
                if let (Some(mut stream), Some(to)) = (stdin, to_stdin) {
                    while let Some(bytes) = stream.incoming.recv().await {
                        if to.send(bytes).await.is_err() {
                            break;
                        }
                    }
                }
            };
            let sizing = async {
                if let (Some(mut stream), Some(to)) = (resize, to_resize) {
                    while let Some(bytes) = stream.incoming.recv().await {
                        if let Ok(size) = serde_json::from_slice::<Size>(&bytes)
                            && to.send(size).await.is_err()
                        {
                            break;
                        }
                    }
                }
            };
            tokio::join!(typing, sizing);
            std::future::pending::<()>().await;
        };
        let session = async {
            let (outcome, (), ()) = tokio::join!(
                session::run(inner, &action, channels),
                relay(ends.stdout, out),
                relay(ends.stderr, err)
            );
            outcome
        };
        let outcome = tokio::select! {
            outcome = session => outcome,
            () = input => return,
        };
        if let Some(error) = streams.remove("error") {
            let text = if protocol == PROTOCOLS[0] { outcome.status().to_string() } else { outcome.text() };
            if !text.is_empty() {
                let _ = error.outgoing.send(Bytes::from(text)).await;
            }
            error.outgoing.finish().await;
        }
    };
    tokio::pin!(connection);
    {
        tokio::pin!(work);
        tokio::select! {
            () = &mut work => {}
            // As upstream: a client that goes away does not end the command; its terminal hangs up.
            () = &mut connection => {
                if !wanted.tty {
                    work.await;
                }
                return;
            }
        }
    }
    done.cancel();
    connection.await;
}

async fn relay(mut from: mpsc::Receiver<Bytes>, to: Option<Outgoing>) {
    let Some(to) = to else {
        // Nobody asked for it; it must not fill up either.
        while from.recv().await.is_some() {}
        return;
    };
    while let Some(bytes) = from.recv().await {
        if to.send(bytes).await.is_err() {
            return;
        }
    }
    to.finish().await;
}

/// Serves port-forward: pairs of an error and a data stream per connection.
pub async fn forward<S>(inner: &Arc<Inner>, io: S, sandbox: &str)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (accepting, accepted) = mpsc::channel(DEPTH);
    let connection = run(io, accepting, CancellationToken::new());
    tokio::join!(connection, forward::serve(inner, sandbox, accepted));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client opens streams until it is refused, and sends on each; nobody reads. Returns the bytes that were taken.
    async fn flood(headers: &Headers, streams: u32, piece: usize) -> usize {
        let (mut client, server) = tokio::io::duplex(1024);
        let (accepting, mut accepted) = mpsc::channel(DEPTH);
        let (frames, mut replies) = mpsc::channel(DEPTH);
        let mut kept = Vec::new();
        let keeping = async {
            while let Some(stream) = accepted.recv().await {
                kept.push(stream)
            }
        };
        let replying = async { while replies.recv().await.is_some() {} };
        let mut taken = 0;
        let sending = async {
            let mut writer = codec::Writer::new().unwrap();
            for round in 0..4 {
                for id in (0..streams).map(|n| 2 * n + 1) {
                    let mut all = Vec::new();
                    if round == 0 {
                        let syn = Frame::Syn { id, headers: headers.clone(), fin: false };
                        all.extend(writer.frame(&syn).unwrap());
                    }
                    let bytes = Bytes::from(vec![b'x'; piece]);
                    all.extend(writer.frame(&Frame::Data { id, bytes, fin: false }).unwrap());
                    client.write_all(&all).await.unwrap();
                    taken += piece;
                }
            }
        };
        let all = async { tokio::join!(sending, read_frames(server, accepting, frames), keeping, replying) };
        // The clock stands still until nothing else moves.
        let _ = tokio::time::timeout(Duration::from_secs(1), all).await;
        for stream in &kept {
            assert!(stream.headers.len() <= HEADERS.len());
            assert!(stream.headers.values().all(|value| value.len() <= MAX_VALUE));
        }
        taken
    }

    #[tokio::test(start_paused = true)]
    async fn streams_that_nobody_reads_hold_little_memory() {
        let headers = Headers::from([("streamtype".into(), "data".into()), ("requestid".into(), "1".into())]);
        let taken = flood(&headers, 500, 1 << 18).await;
        assert!((1 << 20..3 << 20).contains(&taken), "{taken}");
        let long =
            Headers::from([("requestid".into(), "x".repeat(30_000)), ("x".into(), "y".repeat(30_000))]);
        assert_eq!(flood(&long, 500, 16).await, 500 * 4 * 16);
    }
}
