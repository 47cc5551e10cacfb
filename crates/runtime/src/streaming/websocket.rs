//! Kubernetes' channels over WebSocket: the first byte of a message names the channel.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream::FuturesUnordered;
use futures_util::{SinkExt, StreamExt};
use hyper::body::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};

use super::budget::{Budget, Piece};
use super::session::{self, Size};
use super::{Action, forward as ports, spdy};
use crate::service::Inner;

const V5: &str = "v5.channel.k8s.io";
const V4: &str = "v4.channel.k8s.io";
const V4_BASE64: &str = "v4.base64.channel.k8s.io";
const BASE64: &str = "base64.channel.k8s.io";
/// The oldest protocol; clients that name none get it.
pub const OLDEST: &str = "channel.k8s.io";
pub const PROTOCOLS: &[&str] = &[V5, V4, V4_BASE64, OLDEST, BASE64];
/// A whole SPDY connection in binary messages.
pub const FORWARD_SPDY: &str = "SPDY/3.1+portforward.k8s.io";
/// Clients without SPDY (Python's, kube-rs) forward over channels.
pub const FORWARD_PROTOCOLS: &[&str] = &[FORWARD_SPDY, V4, V4_BASE64];
/// A port takes two channels, and a channel is a byte.
pub const MAX_PORTS: usize = 128;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// Version 5: the byte after it names a channel that ends.
const CLOSE: u8 = 255;

/// Messages that may wait for a slow reader.
const DEPTH: usize = 16;

/// Longest message accepted from a client.
const MAX_MESSAGE: usize = 1 << 20;

async fn accept<S: AsyncRead + AsyncWrite + Unpin>(io: S) -> WebSocketStream<S> {
    let config =
        WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// The form of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Coding {
    /// The channel's number, then the bytes.
    Binary,
    /// Text: the channel's number as a digit, then the bytes in base64. For clients that cannot send bytes.
    Base64,
}

impl Coding {
    fn of(protocol: &str) -> Self {
        if matches!(protocol, V4_BASE64 | BASE64) { Self::Base64 } else { Self::Binary }
    }

    fn frame(self, channel: u8, bytes: &[u8]) -> Message {
        match self {
            Self::Binary => {
                let mut message = Vec::with_capacity(bytes.len() + 1);
                message.push(channel);
                message.extend_from_slice(bytes);
                Message::Binary(message.into())
            }
            Self::Base64 => {
                let mut text = String::from(char::from(b'0'.saturating_add(channel)));
                STANDARD.encode_string(bytes, &mut text);
                Message::text(text)
            }
        }
    }

    /// Channel and content of a message. None if it has no channel, or its content cannot be read.
    fn parse(self, message: Bytes) -> Option<(u8, Bytes)> {
        let first = *message.first()?;
        match self {
            Self::Binary => Some((first, message.slice(1..))),
            Self::Base64 => {
                let channel = first.checked_sub(b'0')?;
                STANDARD.decode(&message[1..]).ok().map(|bytes| (channel, bytes.into()))
            }
        }
    }
}

/// Serves an exec or attach.
pub async fn serve<S>(inner: &Arc<Inner>, io: S, action: Action, protocol: &str)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sink, mut source) = accept(io).await.split();
    let coding = Coding::of(protocol);
    let wanted = action.wanted();
    // Clients wait for a first, empty message on the lowest channel that can be written.
    let first = if wanted.stdout {
        STDOUT
    } else if wanted.stderr {
        STDERR
    } else {
        ERROR
    };
    if sink.send(coding.frame(first, &[])).await.is_err() {
        return;
    }
    let (closes, budget) = (protocol == V5, Budget::default());
    let (channels, ends) = session::channels();
    let session::Ends { mut stdin, mut resize, mut stdout, mut stderr } = ends;
    let incoming = async {
        while let Some(Ok(message)) = source.next().await {
            let bytes: Bytes = match message {
                Message::Binary(bytes) => bytes,
                Message::Text(text) => text.into(),
                Message::Close(_) => break,
                _ => continue,
            };
            let Some((channel, rest)) = coding.parse(bytes) else { continue };
            match channel {
                STDIN if !rest.is_empty() => {
                    if let Some(stdin) = &stdin {
                        // A command that reads no more must not stop resizes and the close.
                        let _ = stdin.send(budget.take(rest).await).await;
                    }
                }
                RESIZE => {
                    if let (Some(resize), Ok(size)) = (&resize, serde_json::from_slice::<Size>(&rest)) {
                        let _ = resize.send(size).await;
                    }
                }
                CLOSE if closes && rest.first() == Some(&STDIN) => stdin = None,
                _ => {}
            }
        }
        // The client is gone: no more input; output goes nowhere from now on.
        stdin = None;
        resize = None;
    };
    let outgoing = async {
        let work = session::run(inner, &action, channels);
        let relay = async {
            let (mut out, mut err) = (true, true);
            while out || err {
                let message = tokio::select! {
                    bytes = stdout.recv(), if out => match bytes {
                        Some(bytes) => coding.frame(STDOUT, &bytes),
                        None => { out = false; continue }
                    },
                    bytes = stderr.recv(), if err => match bytes {
                        Some(bytes) => coding.frame(STDERR, &bytes),
                        None => { err = false; continue }
                    },
                };
                if sink.send(message).await.is_err() {
                    break;
                }
            }
            // Nobody receives an error: closing the channels lets the session see it.
            stdout.close();
            stderr.close();
        };
        let (outcome, ()) = tokio::join!(work, relay);
        let text = match protocol {
            OLDEST | BASE64 => outcome.text(),
            _ => outcome.status().to_string(),
        };
        if !text.is_empty() {
            let _ = sink.send(coding.frame(ERROR, text.as_bytes())).await;
        }
        // Clients take any other code, or none, for a connection that broke.
        let _ =
            sink.send(Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() }))).await;
        let _ = sink.close().await;
    };
    tokio::pin!(incoming, outgoing);
    tokio::select! {
        () = &mut outgoing => {}
        // As upstream: a client that goes away does not end the command; its terminal hangs up.
        () = &mut incoming => {
            if !wanted.tty {
                outgoing.await;
            }
        }
    }
}

/// Port-forward: the messages carry a SPDY connection.
pub async fn forward<S>(inner: &Arc<Inner>, io: S, sandbox: &str)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sink, mut source) = accept(io).await.split();
    let (near, far) = tokio::io::duplex(64 * 1024);
    let (mut read, mut write) = tokio::io::split(near);
    let incoming = async {
        while let Some(Ok(message)) = source.next().await {
            match message {
                Message::Binary(bytes) if write.write_all(&bytes).await.is_ok() => {}
                Message::Ping(_) | Message::Pong(_) => {}
                _ => break,
            }
        }
        let _ = write.shutdown().await;
    };
    let outgoing = async {
        let mut buffer = vec![0; 32 * 1024];
        while let Ok(count) = read.read(&mut buffer).await {
            if count == 0
                || sink.send(Message::Binary(Bytes::copy_from_slice(&buffer[..count]))).await.is_err()
            {
                break;
            }
        }
        let _ = sink.close().await;
    };
    tokio::join!(spdy::forward(inner, far, sandbox), incoming, outgoing);
}

/// Port-forward without SPDY: one connection per port, with a channel for its data and the next one for its error.
/// Ends when every connection has, or when the client goes.
pub async fn forward_channels<S>(inner: &Arc<Inner>, io: S, sandbox: &str, ports: &[u16], protocol: &str)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let coding = Coding::of(protocol);
    let (mut sink, mut source) = accept(io).await.split();
    let (outgoing, mut queue) = mpsc::channel(DEPTH);
    let budget = Budget::default();
    let mut inputs = Vec::with_capacity(ports.len());
    let mut running = FuturesUnordered::new();
    for (channel, port) in (0..=u8::MAX).step_by(2).zip(ports) {
        let (input, incoming) = mpsc::channel(DEPTH);
        inputs.push(input);
        running.push(forward_port(inner, sandbox, *port, (coding, channel), incoming, outgoing.clone()));
    }
    drop(outgoing);
    let working = async { while running.next().await.is_some() {} };
    let writing = async {
        while let Some(message) = queue.recv().await {
            if sink.send(message).await.is_err() {
                break;
            }
        }
        queue.close();
        let _ = sink.close().await;
    };
    let reading = async {
        while let Some(Ok(message)) = source.next().await {
            let bytes: Bytes = match message {
                Message::Binary(bytes) => bytes,
                Message::Text(text) => text.into(),
                Message::Close(_) => break,
                _ => continue,
            };
            let Some((channel, bytes)) = coding.parse(bytes).filter(|(channel, _)| channel % 2 == 0) else {
                continue;
            };
            if let Some(input) = inputs.get(usize::from(channel / 2)) {
                // A connection that has ended discards further data.
                let _ = input.send(budget.take(bytes).await).await;
            }
        }
    };
    tokio::select! {
        _ = async { tokio::join!(working, writing) } => {}
        () = reading => {}
    }
}

async fn forward_port(
    inner: &Arc<Inner>,
    sandbox: &str,
    port: u16,
    (coding, channel): (Coding, u8),
    mut incoming: mpsc::Receiver<Piece>,
    outgoing: mpsc::Sender<Message>,
) {
    // As upstream: each channel begins by naming its port.
    for channel in [channel, channel + 1] {
        if outgoing.send(coding.frame(channel, &port.to_le_bytes())).await.is_err() {
            return;
        }
    }
    let socket = match ports::open(inner, sandbox, port).await {
        Ok(socket) => socket,
        Err(message) => {
            let _ = outgoing.send(coding.frame(channel + 1, message.as_bytes())).await;
            return;
        }
    };
    let (mut read, mut write) = socket.into_split();
    let from_pod = async {
        let mut buffer = vec![0; 32 * 1024];
        while let Ok(count) = read.read(&mut buffer).await {
            if count == 0 || outgoing.send(coding.frame(channel, &buffer[..count])).await.is_err() {
                break;
            }
        }
    };
    let to_pod = async {
        while let Some(bytes) = incoming.recv().await {
            // The other direction may still have data, and reports when all is over.
            let _ = write.write_all(&bytes).await;
        }
    };
    tokio::select! {
        () = from_pod => {}
        () = to_pod => {}
    }
}
