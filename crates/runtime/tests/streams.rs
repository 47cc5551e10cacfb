//! Exec, attach and port-forward through the streaming server, as kubectl's bytes arrive there.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

#[path = "../src/streaming/dictionary.rs"]
mod dictionary;
#[allow(dead_code)]
#[path = "../src/streaming/spdy_codec.rs"]
mod spdy_codec;
mod world;

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_cri::RuntimeService;
use ferrite_cri::v1::*;
use futures_util::{SinkExt, StreamExt};
use hyper::body::Bytes;
use spdy_codec::{Frame, Headers};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use world::{LIMIT, World, shell};

async fn websocket(url: &str, protocol: &str) -> WebSocketStream<TcpStream> {
    let uri = url.replace("http://", "ws://");
    let mut request = uri.as_str().into_client_request().unwrap();
    if !protocol.is_empty() {
        request.headers_mut().insert("sec-websocket-protocol", protocol.parse().unwrap());
    }
    let host = request.uri().authority().unwrap().to_string();
    let socket = TcpStream::connect(host).await.unwrap();
    let (stream, response) = tokio_tungstenite::client_async(request, socket).await.unwrap();
    let agreed = response.headers().get("sec-websocket-protocol").map_or("", |value| value.to_str().unwrap());
    assert_eq!(agreed, protocol);
    stream
}

/// Everything until the server closes, by channel.
async fn read_all(stream: &mut WebSocketStream<TcpStream>) -> BTreeMap<u8, Vec<u8>> {
    let mut channels: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
    let all = async {
        while let Some(Ok(message)) = stream.next().await {
            match message {
                Message::Binary(bytes) => channels.entry(bytes[0]).or_default().extend(&bytes[1..]),
                Message::Text(text) => {
                    let bytes = STANDARD.decode(&text.as_str()[1..]).expect("base64 after the channel");
                    channels.entry(text.as_bytes()[0] - b'0').or_default().extend(bytes);
                }
                _ => {}
            }
        }
    };
    tokio::time::timeout(LIMIT, all).await.expect("the server closes");
    channels
}

fn exec(id: &str, command: &[&str], tty: bool) -> ExecRequest {
    ExecRequest {
        container_id: id.into(),
        cmd: command.iter().map(|part| (*part).to_owned()).collect(),
        tty,
        stdin: true,
        stdout: true,
        stderr: !tty,
    }
}

fn code(status: &[u8]) -> (String, Option<String>) {
    let status: serde_json::Value = serde_json::from_slice(status).unwrap();
    let cause = status["details"]["causes"][0]["message"].as_str().map(str::to_owned);
    (status["status"].as_str().unwrap().to_owned(), cause)
}

#[tokio::test]
async fn exec_over_websocket() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    let script = "cat; echo oops >&2; exit 3";
    let url = world.runtime().exec(exec(&id, &["/bin/sh", "-c", script], false)).await.unwrap().url;
    let mut stream = websocket(&url, "v5.channel.k8s.io").await;
    stream.send(Message::Binary(b"\x00typed".to_vec().into())).await.unwrap();
    stream.send(Message::Binary(vec![255, 0].into())).await.unwrap();
    let channels = read_all(&mut stream).await;
    assert_eq!(channels[&1], b"typed");
    assert_eq!(channels[&2], b"oops\n");
    assert_eq!(code(&channels[&3]), ("Failure".into(), Some("3".into())));
    let text = String::from_utf8(channels[&3].clone()).unwrap();
    assert!(text.contains("command terminated with non-zero exit code"), "{text}");

    // A URL works once.
    let mut again = TcpStream::connect(url.split('/').nth(2).unwrap()).await.unwrap();
    let path = url.splitn(4, '/').nth(3).unwrap();
    let request = format!(
        "GET /{path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         Sec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n"
    );
    again.write_all(request.as_bytes()).await.unwrap();
    let mut head = [0; 12];
    again.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 404");

    let url = world.runtime().exec(exec(&id, &["nope"], false)).await.unwrap().url;
    let channels = read_all(&mut websocket(&url, "v4.channel.k8s.io").await).await;
    assert_eq!(code(&channels[&3]).0, "Failure");
    assert!(String::from_utf8_lossy(&channels[&3]).contains("executable file not found in $PATH"));
    let url = world.runtime().exec(exec(&id, &["true"], false)).await.unwrap().url;
    let channels = read_all(&mut websocket(&url, "v4.channel.k8s.io").await).await;
    assert_eq!(channels[&3], br#"{"metadata":{},"status":"Success"}"#);
}

#[tokio::test]
async fn exec_over_older_websocket_protocols() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    for (protocol, says_success) in [
        ("", false),
        ("channel.k8s.io", false),
        ("base64.channel.k8s.io", false),
        ("v4.channel.k8s.io", true),
        ("v4.base64.channel.k8s.io", true),
    ] {
        let is_text = protocol.contains("base64");
        let message = |bytes: &[u8]| match is_text {
            true => Message::text(format!("0{}", STANDARD.encode(bytes))),
            false => Message::Binary([&[0], bytes].concat().into()),
        };
        let script = "read word; echo got $word; echo oops >&2";
        let url = world.runtime().exec(exec(&id, &["/bin/sh", "-c", script], false)).await.unwrap().url;
        let mut stream = websocket(&url, protocol).await;
        if is_text {
            // The server ignores input that is not base64.
            stream.send(Message::text("0!!")).await.unwrap();
        }
        stream.send(message(b"typed\n")).await.unwrap();
        let channels = read_all(&mut stream).await;
        assert_eq!(channels[&1], b"got typed\n", "{protocol}");
        assert_eq!(channels[&2], b"oops\n", "{protocol}");
        let last: &[u8] = if says_success { br#"{"metadata":{},"status":"Success"}"# } else { b"" };
        assert_eq!(channels.get(&3).map_or(&b""[..], Vec::as_slice), last, "{protocol}");
    }
    let url = world.runtime().exec(exec(&id, &["/bin/sh", "-c", "exit 3"], false)).await.unwrap().url;
    let channels = read_all(&mut websocket(&url, "channel.k8s.io").await).await;
    assert_eq!(channels[&3], b"command terminated with non-zero exit code: exit status 3");
}

#[tokio::test]
async fn idle_connections_keep_nobody_out() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    let url = world.runtime().exec(exec(&id, &["echo", "in"], false)).await.unwrap().url;
    let address = url.split('/').nth(2).unwrap().to_owned();
    let mut idle = Vec::new();
    for _ in 0..600 {
        idle.push(TcpStream::connect(&address).await.unwrap());
    }
    let channels = read_all(&mut websocket(&url, "v4.channel.k8s.io").await).await;
    assert_eq!(channels[&1], b"in\n");
    let mut closed = 0;
    for stream in &mut idle[..300] {
        closed += usize::from(stream.read(&mut [0]).await.is_ok_and(|count| count == 0));
    }
    assert_eq!(closed, 300, "the oldest gave their places away");
}

#[tokio::test]
async fn a_terminal_has_a_size_and_one_output() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    let script = "tty; read line; stty size; echo err >&2; exit 0";
    let url = world.runtime().exec(exec(&id, &["/bin/sh", "-c", script], true)).await.unwrap().url;
    let mut stream = websocket(&url, "v4.channel.k8s.io").await;
    let size = br#"{"Width":97,"Height":41}"#;
    stream.send(Message::Binary([&[4], &size[..]].concat().into())).await.unwrap();
    stream.send(Message::Binary(b"\x00go\n".to_vec().into())).await.unwrap();
    let channels = read_all(&mut stream).await;
    let text = String::from_utf8(channels[&1].clone()).unwrap();
    assert!(text.contains("/dev/pts/0") && text.contains("41 97") && text.contains("err"), "{text}");
    assert_eq!(code(&channels[&3]).0, "Success");
}

#[tokio::test]
async fn attach_talks_to_the_first_process() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let mut config = shell("a", "while read line; do echo got $line; [ $line = end ] && exit 6; done");
    config.stdin = true;
    let id = world.start(&sandbox, config).await;
    let request =
        AttachRequest { container_id: id.clone(), stdin: true, tty: false, stdout: true, stderr: true };
    let url = world.runtime().attach(request).await.unwrap().url;
    let mut stream = websocket(&url, "v4.channel.k8s.io").await;
    stream.send(Message::Binary(b"\x00one\nend\n".to_vec().into())).await.unwrap();
    let channels = read_all(&mut stream).await;
    assert_eq!(String::from_utf8_lossy(&channels[&1]), "got one\ngot end\n");
    assert_eq!(world.wait(&id).await.exit_code, 6);
    assert_eq!(world.output(&id).await, "got one\ngot end\n", "the log has it too");

    let mut config = shell("b", "stty size; read x; stty size; echo bye");
    (config.tty, config.stdin) = (true, true);
    let id = world.start(&sandbox, config).await;
    let request =
        AttachRequest { container_id: id.clone(), stdin: true, tty: true, stdout: true, stderr: false };
    let url = world.runtime().attach(request).await.unwrap().url;
    let mut stream = websocket(&url, "v4.channel.k8s.io").await;
    let size = br#"{"Width":80,"Height":24}"#;
    stream.send(Message::Binary([&[4], &size[..]].concat().into())).await.unwrap();
    // An exec is a round trip through the supervisor: the size has arrived when it answers.
    for _ in 0..20 {
        world.exec_out(&id, "true").await;
    }
    stream.send(Message::Binary(b"\x00\n".to_vec().into())).await.unwrap();
    let channels = read_all(&mut stream).await;
    let text = String::from_utf8_lossy(&channels[&1]).into_owned();
    assert!(text.contains("24 80") && text.contains("bye"), "{text}");
    assert!(world.output(&id).await.contains("bye"));
}

/// A client that speaks SPDY as kubectl does.
struct Spdy {
    socket: TcpStream,
    writer: spdy_codec::Writer,
    reader: spdy_codec::Reader,
}

impl Spdy {
    async fn connect(url: &str, protocols: &[&str]) -> (Self, String) {
        let mut parts = url.splitn(4, '/').skip(2);
        let (host, path) = (parts.next().unwrap(), parts.next().unwrap());
        let mut socket = TcpStream::connect(host).await.unwrap();
        let mut request =
            format!("POST /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n");
        for protocol in protocols {
            request += &format!("X-Stream-Protocol-Version: {protocol}\r\n");
        }
        socket.write_all((request + "\r\n").as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 101"), "{head}");
        let spdy = Self { socket, writer: spdy_codec::Writer::new().unwrap(), reader: Default::default() };
        (spdy, head)
    }

    async fn send(&mut self, frame: Frame) {
        let bytes = self.writer.frame(&frame).unwrap();
        self.socket.write_all(&bytes).await.unwrap();
    }

    async fn open(&mut self, id: u32, headers: &[(&str, &str)]) {
        let headers: Headers = headers.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.send(Frame::Syn { id, headers, fin: false }).await;
    }

    async fn receive(&mut self) -> Option<Frame> {
        let mut start = [0; 8];
        self.socket.read_exact(&mut start).await.ok()?;
        let head = spdy_codec::head(&start).unwrap();
        let mut body = vec![0; head.length];
        self.socket.read_exact(&mut body).await.unwrap();
        Some(self.reader.frame(head, Bytes::from(body)).unwrap())
    }

    /// Data by stream until the server closes or `until` streams have ended.
    async fn read_all(&mut self, until: usize) -> BTreeMap<u32, Vec<u8>> {
        let mut streams: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        let mut ended = 0;
        let all = async {
            while let Some(frame) = self.receive().await {
                if let Frame::Data { id, bytes, fin } = frame {
                    streams.entry(id).or_default().extend(bytes);
                    ended += usize::from(fin);
                    if ended == until {
                        break;
                    }
                }
            }
        };
        tokio::time::timeout(LIMIT, all).await.expect("the server answers");
        streams
    }
}

#[tokio::test]
async fn exec_over_spdy() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    let url = world
        .runtime()
        .exec(exec(&id, &["/bin/sh", "-c", "cat; echo e >&2; exit 9"], false))
        .await
        .unwrap()
        .url;
    let (mut spdy, head) = Spdy::connect(&url, &["v4.channel.k8s.io", "v3.channel.k8s.io"]).await;
    assert!(head.contains("x-stream-protocol-version: v4.channel.k8s.io"), "{head}");
    for (id, kind) in [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "stderr")] {
        spdy.open(id, &[("streamType", kind)]).await;
    }
    spdy.send(Frame::Ping { id: 1 }).await;
    spdy.send(Frame::Data { id: 3, bytes: Bytes::from_static(b"hello "), fin: false }).await;
    spdy.send(Frame::Data { id: 3, bytes: Bytes::from_static(b"spdy"), fin: true }).await;
    let streams = spdy.read_all(usize::MAX).await;
    assert_eq!(streams[&5], b"hello spdy");
    assert_eq!(streams[&7], b"e\n");
    assert_eq!(code(&streams[&1]), ("Failure".into(), Some("9".into())));
}

#[tokio::test]
async fn ports_are_forwarded_into_the_pod() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "exec nc -ll -p 8080 -e cat")).await;
    for _ in 0..500 {
        if world.exec_out(&id, "cat /proc/net/tcp /proc/net/tcp6").await.contains(":1F90") {
            break;
        }
    }
    let request = PortForwardRequest { pod_sandbox_id: sandbox.clone(), port: vec![] };
    let url = world.runtime().port_forward(request.clone()).await.unwrap().url;
    let (mut spdy, _) = Spdy::connect(&url, &["portforward.k8s.io"]).await;
    spdy.open(1, &[("streamType", "error"), ("port", "8080"), ("requestID", "0")]).await;
    spdy.open(3, &[("streamType", "data"), ("port", "8080"), ("requestID", "0")]).await;
    spdy.send(Frame::Data { id: 3, bytes: Bytes::from_static(b"echo me"), fin: true }).await;
    let streams = spdy.read_all(2).await;
    assert_eq!(streams[&3], b"echo me");
    assert_eq!(streams.get(&1).map(Vec::len), Some(0), "no error");
    // Nobody listens there.
    spdy.open(5, &[("streamType", "error"), ("port", "9"), ("requestID", "1")]).await;
    spdy.open(7, &[("streamType", "data"), ("port", "9"), ("requestID", "1")]).await;
    let streams = spdy.read_all(2).await;
    assert!(
        String::from_utf8_lossy(&streams[&5]).contains("failed to connect to localhost:9 inside the pod")
    );

    // Without SPDY: two channels for each port, which name it first.
    let request = PortForwardRequest { port: vec![8080, 9], ..request };
    let url = world.runtime().port_forward(request.clone()).await.unwrap().url;
    let mut channels = websocket(&url, "v4.channel.k8s.io").await;
    channels.send(Message::Binary(b"\x00echo me".to_vec().into())).await.unwrap();
    let mut seen: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
    let answered = async {
        while seen.get(&0).is_none_or(|data| data.len() < 9)
            || seen.get(&3).is_none_or(|error| error.len() < 3)
        {
            let message = channels.next().await.expect("the connection stays").unwrap().into_data();
            seen.entry(message[0]).or_default().extend(&message[1..]);
        }
    };
    tokio::time::timeout(LIMIT, answered).await.expect("both ports answer");
    assert_eq!(seen[&0], b"\x90\x1fecho me");
    assert_eq!((&seen[&1][..], &seen[&2][..]), (&b"\x90\x1f"[..], &b"\x09\x00"[..]));
    assert!(String::from_utf8_lossy(&seen[&3][2..]).contains("failed to connect to localhost:9"));
    let refused = PortForwardRequest { port: vec![70000], ..request };
    assert!(world.runtime().port_forward(refused).await.is_err());
}
