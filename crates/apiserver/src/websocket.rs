//! Answers over WebSocket: a log or a watch that goes on as messages, for clients (browsers) that read no stream of
//! HTTP. The client only listens; whatever it sends is dropped.

use crate::call::Call;
use crate::connections::Slot;
use crate::http::{self, Body, Response};
use ::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::sync::Arc;
use std::time::Duration;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};

const BINARY: &str = "binary.k8s.io";
const BASE64: &str = "base64.binary.k8s.io";
const VERSION: &str = "13";
/// The largest message taken from a client that has nothing to say.
const MAX_RECEIVED: usize = 32 << 10;
/// Bytes of a log in one message.
const CHUNK: usize = 16 << 10;
/// A client that takes nothing for so long is not there any more.
const STALLED: Duration = Duration::from_secs(60);
/// The prefix of a protobuf event that says its length. A message has its own.
const LENGTH_PREFIX: usize = 4;

/// The way to turn bytes into messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// One binary message for each piece, cut where it is long, after an empty first one.
    LogBinary,
    /// The same as text, each message in base64.
    LogBase64,
    /// One message of text for each event.
    EventText,
    /// One binary message for each event, without the prefix that says its length.
    EventBinary,
}

impl Framing {
    fn is_log(self) -> bool {
        matches!(self, Self::LogBinary | Self::LogBase64)
    }

    /// The message of one piece. None when an event is not text where text is expected.
    fn message(self, bytes: Bytes) -> Option<Message> {
        Some(match self {
            Self::LogBinary => Message::Binary(bytes),
            Self::LogBase64 => Message::Text(STANDARD.encode(&bytes).into()),
            Self::EventText => Message::Text(bytes.try_into().ok()?),
            Self::EventBinary => Message::Binary(bytes.slice(LENGTH_PREFIX.min(bytes.len())..)),
        })
    }
}

/// The client's side of a handshake.
#[derive(Debug, PartialEq, Eq)]
struct Handshake<'a> {
    key: &'a str,
    protocols: Vec<&'a str>,
    has_origin: bool,
}

/// Why a handshake fails. The answers are those of upstream's library.
#[derive(Debug, PartialEq, Eq)]
enum Refused {
    Key,
    Version,
    /// A protocol or an origin that is not accepted.
    Forbidden,
    /// Several protocols where none is chosen.
    Ambiguous,
    /// The connection is one that cannot become another, such as one of HTTP/2.
    Connection,
}

impl Refused {
    fn answer(&self) -> Response {
        match self {
            Self::Key => http::text(400, "mismatch challenge/response"),
            Self::Version => {
                let mut answer = http::text(400, "missing or bad WebSocket Version");
                let version = HeaderValue::from_static(VERSION);
                answer.headers_mut().insert(header::SEC_WEBSOCKET_VERSION, version);
                answer
            }
            Self::Forbidden => http::text(403, ""),
            Self::Ambiguous => http::text(400, ""),
            Self::Connection => http::text(400, "this connection cannot be upgraded; use HTTP/1.1"),
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Returns true if a request asks for a WebSocket.
pub(crate) fn is_requested(headers: &HeaderMap) -> bool {
    let connection = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    text(headers, &header::UPGRADE).eq_ignore_ascii_case("websocket")
        && connection.into_iter().any(|value| value.to_ascii_lowercase().contains("upgrade"))
}

impl<'a> Handshake<'a> {
    fn read(headers: &'a HeaderMap) -> Result<Self, Refused> {
        let key = text(headers, &header::SEC_WEBSOCKET_KEY);
        if key.is_empty() {
            return Err(Refused::Key);
        }
        if text(headers, &header::SEC_WEBSOCKET_VERSION) != VERSION {
            return Err(Refused::Version);
        }
        let protocols = text(headers, &header::SEC_WEBSOCKET_PROTOCOL).trim();
        let protocols = match protocols {
            "" => Vec::new(),
            list => list.split(',').map(str::trim).collect(),
        };
        let origin = text(headers, &header::ORIGIN);
        let has_origin = origin.parse::<::http::Uri>().is_ok_and(|uri| uri.scheme().is_some());
        Ok(Self { key, protocols, has_origin })
    }

    /// The protocol of a log: the first that both know.
    fn log(&self) -> Result<(Option<&'a str>, Framing), Refused> {
        if self.protocols.is_empty() {
            return Ok((None, Framing::LogBinary));
        }
        let known = |protocol: &&&str| matches!(**protocol, BINARY | BASE64);
        match self.protocols.iter().find(known).copied() {
            Some(BASE64) => Ok((Some(BASE64), Framing::LogBase64)),
            Some(protocol) => Ok((Some(protocol), Framing::LogBinary)),
            None => Err(Refused::Forbidden),
        }
    }

    /// The protocol of a watch: the only one that the client names, whichever it is. As upstream, a client must say
    /// where it comes from.
    fn watch(&self) -> Result<Option<&'a str>, Refused> {
        match self.protocols.as_slice() {
            _ if !self.has_origin => Err(Refused::Forbidden),
            [] => Ok(None),
            [protocol] => Ok(Some(protocol)),
            _ => Err(Refused::Ambiguous),
        }
    }
}

/// Sends the body of a log as messages.
pub(crate) fn log(call: &mut Call, answer: Response) -> Response {
    let chosen = Handshake::read(&call.parts.headers)
        .and_then(|handshake| Ok((accepted(handshake.key, handshake.log()?.0), handshake.log()?.1)));
    let (switching, framing) = match chosen {
        Ok(chosen) => chosen,
        Err(refused) => return refused.answer(),
    };
    stream(call, answer.into_body(), framing, switching)
}

/// Sends the body of a watch as messages, one for each event.
pub(crate) fn watch(call: &mut Call, answer: Response, is_text: bool) -> Response {
    let chosen = Handshake::read(&call.parts.headers)
        .and_then(|handshake| Ok(accepted(handshake.key, handshake.watch()?)));
    let switching = match chosen {
        Ok(switching) => switching,
        Err(refused) => return refused.answer(),
    };
    let framing = if is_text { Framing::EventText } else { Framing::EventBinary };
    stream(call, answer.into_body(), framing, switching)
}

/// The answer that accepts a handshake.
fn accepted(key: &str, protocol: Option<&str>) -> Response {
    let mut answer = Response::new(http::full(Bytes::new()));
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = answer.headers_mut();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    if let Ok(accept) = HeaderValue::from_str(&derive_accept_key(key.as_bytes())) {
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    }
    if let Some(protocol) = protocol.and_then(|protocol| HeaderValue::from_str(protocol).ok()) {
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
    }
    answer
}

/// Answers with the switch, and sends the body as messages once the connection has switched. The connection keeps its
/// place among the others until then.
fn stream(call: &mut Call, body: Body, framing: Framing, switching: Response) -> Response {
    let Some(upgrade) = call.parts.extensions.remove::<OnUpgrade>() else {
        return Refused::Connection.answer();
    };
    let slot = call.parts.extensions.get::<Arc<Slot>>().cloned();
    let stopping = call.server.stopping();
    // The audit of the request is complete when the stream ends.
    let audit = call.audit().cloned();
    call.server.spawn(async move {
        let _audit = audit;
        let Ok(upgraded) = upgrade.await else { return };
        let limits = WebSocketConfig::default()
            .max_message_size(Some(MAX_RECEIVED))
            .max_frame_size(Some(MAX_RECEIVED));
        let io = TokioIo::new(upgraded);
        let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(limits)).await;
        let evicted = async {
            match &slot {
                Some(slot) => slot.evicted().cancelled_owned().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = send_all(socket, body, framing) => {}
            () = stopping.cancelled() => {}
            () = evicted => {}
        }
    });
    switching
}

async fn send_all<S>(socket: WebSocketStream<S>, body: Body, framing: Framing)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let (mut sink, mut source) = socket.split();
    let gone = async {
        while let Some(Ok(message)) = source.next().await {
            if message.is_close() {
                return;
            }
        }
    };
    let sending = async {
        // Clients take the first, empty message for the start of the log.
        let first = framing.is_log().then(Bytes::new);
        if let Some(first) = first.and_then(|first| framing.message(first))
            && sink.send(first).await.is_err()
        {
            return;
        }
        let mut body = body;
        while let Some(Ok(frame)) = body.frame().await {
            let Ok(mut bytes) = frame.into_data() else { continue };
            while !bytes.is_empty() {
                let length = if framing.is_log() { bytes.len().min(CHUNK) } else { bytes.len() };
                let Some(message) = framing.message(bytes.split_to(length)) else { return };
                let sent = match framing.is_log() {
                    // A reader of a log may pause.
                    true => sink.send(message).await.is_ok(),
                    false => matches!(tokio::time::timeout(STALLED, sink.send(message)).await, Ok(Ok(()))),
                };
                if !sent {
                    return;
                }
            }
        }
        let close = CloseFrame { code: CloseCode::Normal, reason: "".into() };
        let _ = tokio::time::timeout(STALLED, sink.send(Message::Close(Some(close)))).await;
    };
    tokio::select! {
        () = sending => {}
        () = gone => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(k, v)| (HeaderName::from_static(k), HeaderValue::from_static(v))).collect()
    }

    #[test]
    fn a_request_for_a_websocket_has_both_headers() {
        for (upgrade, connection, expected) in [
            ("websocket", "Upgrade", true),
            ("WebSocket", "keep-alive, upgrade", true),
            ("SPDY/3.1", "Upgrade", false),
            ("websocket", "keep-alive", false),
        ] {
            let headers = headers(&[("upgrade", upgrade), ("connection", connection)]);
            assert_eq!(is_requested(&headers), expected, "{upgrade} {connection}");
        }
    }

    #[test]
    fn a_handshake_needs_key_and_version() {
        assert_eq!(Handshake::read(&headers(&[("sec-websocket-version", "13")])), Err(Refused::Key));
        let old = headers(&[("sec-websocket-key", "k"), ("sec-websocket-version", "8")]);
        assert_eq!(Handshake::read(&old), Err(Refused::Version));
    }

    #[test]
    fn protocols_are_chosen_as_upstream() {
        use Framing::{LogBase64, LogBinary};
        use Refused::{Ambiguous, Forbidden};
        let rows = [
            ("", Ok((None, LogBinary)), Ok(None)),
            (BINARY, Ok((Some(BINARY), LogBinary)), Ok(Some(BINARY))),
            (BASE64, Ok((Some(BASE64), LogBase64)), Ok(Some(BASE64))),
            ("x, base64.binary.k8s.io", Ok((Some(BASE64), LogBase64)), Err(Ambiguous)),
            ("x", Err(Forbidden), Ok(Some("x"))),
        ];
        for (protocols, log, watch) in rows {
            let mut given = headers(&[("sec-websocket-key", "k"), ("sec-websocket-version", "13")]);
            given.insert("sec-websocket-protocol", HeaderValue::from_static(protocols));
            assert_eq!(
                Handshake::read(&given).and_then(|h| h.watch().map(drop)),
                Err(Forbidden),
                "no origin"
            );
            given.insert("origin", HeaderValue::from_static("http://localhost"));
            let handshake = Handshake::read(&given).expect("a handshake");
            assert_eq!(handshake.log(), log, "{protocols}");
            assert_eq!(handshake.watch(), watch, "{protocols}");
        }
    }

    /// The messages that a client receives when `pieces` are sent as a log.
    async fn received(framing: Framing, pieces: &[&str]) -> Vec<Message> {
        let (sender, body) = http::pipe(pieces.len(), 0, true);
        for piece in pieces {
            let sent = sender.send(http::Piece::Data(Bytes::copy_from_slice(piece.as_bytes()))).await;
            assert!(sent.is_ok());
        }
        drop(sender);
        let (near, far) = tokio::io::duplex(1 << 10);
        let server = WebSocketStream::from_raw_socket(near, Role::Server, None).await;
        let mut client = WebSocketStream::from_raw_socket(far, Role::Client, None).await;
        let reading = async {
            let mut messages = Vec::new();
            while !messages.last().is_some_and(Message::is_close) {
                messages.push(client.next().await.expect("no end before the close").expect("a message"));
            }
            messages
        };
        tokio::join!(send_all(server, body, framing), reading).1
    }

    #[tokio::test]
    async fn a_log_begins_with_an_empty_message_and_ends_with_a_close() {
        let close = Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() }));
        let binary = |text: &str| Message::Binary(Bytes::copy_from_slice(text.as_bytes()));
        let messages = received(Framing::LogBinary, &["one\n", "two\n"]).await;
        assert_eq!(messages, [binary(""), binary("one\n"), binary("two\n"), close.clone()]);
        let messages = received(Framing::LogBase64, &["one\n", "two\n"]).await;
        assert_eq!(
            messages,
            ["", "b25lCg==", "dHdvCg=="].map(Message::text).into_iter().chain([close]).collect::<Vec<_>>()
        );
        let long = "x".repeat(CHUNK + 1);
        let lengths: Vec<_> = received(Framing::LogBinary, &[&long]).await.iter().map(Message::len).collect();
        assert_eq!(lengths, [0, CHUNK, 1, 0]);
    }

    #[tokio::test]
    async fn a_client_that_closes_ends_the_stream() {
        let (_sender, body) = http::pipe(1, 0, true);
        let (near, far) = tokio::io::duplex(1 << 10);
        let server = WebSocketStream::from_raw_socket(near, Role::Server, None).await;
        let mut client = WebSocketStream::from_raw_socket(far, Role::Client, None).await;
        let leaving = async {
            client.send(Message::text("nobody reads this")).await.expect("sent");
            client.close(None).await.expect("closed");
        };
        tokio::join!(send_all(server, body, Framing::EventText), leaving);
    }
}
