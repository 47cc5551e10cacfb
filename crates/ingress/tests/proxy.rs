//! The proxy with real sockets on loopback: endpoints, clients, and clients that mean harm.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use bytes::Bytes;
use ferrite_client::{ObjectKey, Scope};
use ferrite_ingress::backends::{Endpoints, Protocol};
use ferrite_ingress::certificates::certified;
use ferrite_ingress::routes::{Routes, build};
use ferrite_ingress::{Backend, Entrance, Limits, Proxy, Table, Tables};
use futures_util::{SinkExt, StreamExt};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use rustls_pki_types::ServerName;
use serde_json::json;
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Routes of `ns/site`: all of a.example to `web`, `/grpc` to `grpc`; TLS with the Secret `key`.
fn routes() -> Routes {
    let class: IngressClass = serde_json::from_value(
        json!({"metadata": {"name": "c"}, "spec": {"controller": ferrite_ingress::CONTROLLER}}),
    )
    .unwrap();
    let backend = |name: &str| json!({"service": {"name": name, "port": {"number": 80}}});
    let ingress: Ingress = serde_json::from_value(json!({
        "metadata": {"name": "site", "namespace": "ns"},
        "spec": {
            "ingressClassName": "c",
            "rules": [{"host": "a.example", "http": {"paths": [
                {"path": "/", "pathType": "Prefix", "backend": backend("web")},
                {"path": "/grpc", "pathType": "Prefix", "backend": backend("grpc")},
            ]}}],
            "tls": [{"hosts": ["a.example"], "secretName": "key"}],
        },
    }))
    .unwrap();
    build(&[Arc::new(ingress)], &[Arc::new(class)]).0
}

fn table(web: &[SocketAddr], grpc: &[SocketAddr]) -> Table {
    let routes = routes();
    let backends = routes.backends.iter().map(|reference| {
        let (addresses, protocol) = match reference.service.name.as_str() {
            "web" => (web.to_vec(), Protocol::Http1),
            _ => (grpc.to_vec(), Protocol::Http2),
        };
        let endpoints = Endpoints { addresses, protocol, sticky: false };
        (Arc::clone(reference), Arc::new(Backend::new(Ok(endpoints))))
    });
    Table { backends: backends.collect(), routes: Arc::new(routes), certificates: Arc::default() }
}

struct World {
    scope: Scope,
    tables: Arc<Tables>,
    http: SocketAddr,
    https: SocketAddr,
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

impl World {
    async fn start(limits: Limits) -> Self {
        let scope = Scope::new();
        let tables = Arc::new(Tables::default());
        let proxy = Proxy::new(Arc::clone(&tables), limits, &scope).unwrap();
        let (listener, http) = listen().await;
        proxy.serve(Entrance { listener, tls: false });
        let (listener, https) = listen().await;
        proxy.serve(Entrance { listener, tls: true });
        Self { scope, tables, http, https }
    }

    /// Sends the bytes and reads until the proxy closes.
    async fn raw(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.http).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn get(&self, path: &str) -> String {
        self.raw(&format!("GET {path} HTTP/1.1\r\nhost: a.example\r\nconnection: close\r\n\r\n")).await
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

/// An endpoint that answers with `text`, the path, the headers it saw and the size of the body.
async fn endpoint(scope: &Scope, text: &'static str, http2: bool) -> SocketAddr {
    let (listener, address) = listen().await;
    let tasks = scope.clone();
    scope.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(move |request: Request<Incoming>| async move {
                let (parts, body) = request.into_parts();
                let size = body.collect().await.map(|body| body.to_bytes().len()).unwrap_or_default();
                let mut lines = format!("{text} {} {:?} {size}\n", parts.uri.path(), parts.version);
                for (name, value) in &parts.headers {
                    lines.push_str(&format!("{name}: {}\n", value.to_str().unwrap()));
                }
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(lines))))
            });
            let io = TokioIo::new(stream);
            tasks.spawn(async move {
                let _ = match http2 {
                    true => {
                        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                        server.serve_connection(io, service).await
                    }
                    false => hyper::server::conn::http1::Builder::new().serve_connection(io, service).await,
                };
            });
        }
    });
    address
}

/// An endpoint that gives each connection, counted, to `speak`.
async fn scripted<F, Fut>(scope: &Scope, speak: F) -> SocketAddr
where
    F: Fn(usize, TcpStream) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let (listener, address) = listen().await;
    let tasks = scope.clone();
    scope.spawn(async move {
        let mut count = 0;
        while let Ok((stream, _)) = listener.accept().await {
            tasks.spawn(speak(count, stream));
            count += 1;
        }
    });
    address
}

/// Reads the head of a request.
async fn head(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).await.unwrap_or(0) == 0 {
            break;
        }
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn a_request_reaches_its_endpoint_with_a_true_origin() {
    let world = World::start(Limits::default()).await;
    assert!(world.get("/x").await.starts_with("HTTP/1.1 503 "), "no routes are known yet");
    let web = endpoint(&world.scope, "web", false).await;
    world.tables.replace(table(&[web], &[]));
    let answer = world
        .raw("POST /x HTTP/1.1\r\nhost: A.Example:80\r\nx-forwarded-for: 6.6.6.6\r\nconnection: close, x-hop\r\nx-hop: 1\r\ncontent-length: 3\r\n\r\nabc")
        .await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for line in [
        "web /x HTTP/1.1 3\n",
        "host: A.Example:80\n",
        "x-forwarded-for: 127.0.0.1\n",
        "x-forwarded-proto: http\n",
        "content-length: 3\n",
    ] {
        assert!(answer.contains(line), "{line} in {answer}");
    }
    assert!(!answer.contains("x-hop") && !answer.contains("6.6.6.6"), "{answer}");
    let nowhere = world.raw("GET / HTTP/1.1\r\nhost: b.example\r\nconnection: close\r\n\r\n").await;
    assert!(nowhere.starts_with("HTTP/1.1 404 ") && nowhere.contains("no rule matches"), "{nowhere}");
}

#[tokio::test]
async fn endpoints_take_turns_and_dead_ones_are_passed_over() {
    let world = World::start(Limits::default()).await;
    let one = endpoint(&world.scope, "one", false).await;
    let two = endpoint(&world.scope, "two", false).await;
    let (gone, dead) = listen().await;
    drop(gone);
    world.tables.replace(table(&[one, dead, two], &[]));
    let mut seen = Vec::new();
    for _ in 0..6 {
        let answer = world.get("/").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        seen.push(answer.contains("one /"));
    }
    assert!(seen.contains(&true) && seen.contains(&false), "{seen:?}");
    world.tables.replace(table(&[dead], &[]));
    let answer = world.get("/").await;
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
}

#[tokio::test]
async fn an_endpoint_sees_one_request_where_the_client_sent_one() {
    let world = World::start(Limits::default()).await;
    let web = endpoint(&world.scope, "web", false).await;
    world.tables.replace(table(&[web], &[]));
    // The length of a request is said twice, and differently: the second half must not become a request.
    for (request, want) in [
        (
            "POST / HTTP/1.1\r\nhost: a.example\r\nconnection: close\r\ncontent-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /secret HTTP/1.1\r\nhost: a.example\r\n\r\n",
            "HTTP/1.1 ",
        ),
        (
            "POST / HTTP/1.1\r\nhost: a.example\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
            "HTTP/1.1 400 ",
        ),
        (
            "POST / HTTP/1.1\r\nhost: a.example\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
            "HTTP/1.1 400 ",
        ),
        (
            "GET / HTTP/1.1\r\nhost: a.example\r\nhost: b.example\r\nconnection: close\r\n\r\n",
            "HTTP/1.1 400 ",
        ),
        ("GET http://b.example/ HTTP/1.1\r\nhost: a.example\r\nconnection: close\r\n\r\n", "HTTP/1.1 400 "),
        ("GET / HTTP/1.1\r\nhost : a.example\r\nconnection: close\r\n\r\n", "HTTP/1.1 400 "),
        (
            "GET / HTTP/1.1\r\nhost: a.example\r\nvia: 1.1 ferrite-ingress\r\nconnection: close\r\n\r\n",
            "HTTP/1.1 508 ",
        ),
        ("CONNECT a.example:80 HTTP/1.1\r\nhost: a.example:80\r\nconnection: close\r\n\r\n", "HTTP/1.1 405 "),
    ] {
        let answer = world.raw(request).await;
        assert!(answer.starts_with(want), "{request:?}: {answer}");
        assert!(!answer.contains("/secret"), "{answer}");
    }
    let long = format!("GET / HTTP/1.1\r\nhost: a.example\r\nx: {}\r\n\r\n", "x".repeat(100_000));
    let mut stream = TcpStream::connect(world.http).await.unwrap();
    // The proxy may close before it has read everything.
    let _ = stream.write_all(long.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 431 "),
        "{}",
        String::from_utf8_lossy(&answer)
    );
}

#[tokio::test]
async fn a_client_that_stalls_loses_its_connection() {
    let short = Duration::from_millis(100);
    let world =
        World::start(Limits { head: short, request_body: short, handshake: short, ..Limits::default() })
            .await;
    let web = endpoint(&world.scope, "web", false).await;
    world.tables.replace(table(&[web], &[]));
    let mut answer = Vec::new();
    // Half of a head.
    let mut stream = TcpStream::connect(world.http).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: a.ex").await.unwrap();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&answer));
    // Half of a body.
    let mut stream = TcpStream::connect(world.http).await.unwrap();
    stream.write_all(b"POST / HTTP/1.1\r\nhost: a.example\r\ncontent-length: 10\r\n\r\nabc").await.unwrap();
    answer.clear();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 502 "),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    // No handshake.
    let mut stream = TcpStream::connect(world.https).await.unwrap();
    assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn one_client_cannot_take_all_connections() {
    let world = World::start(Limits { connections: 8, each_client: 2, ..Limits::default() }).await;
    let web = endpoint(&world.scope, "web", false).await;
    world.tables.replace(table(&[web], &[]));
    let request = b"GET / HTTP/1.1\r\nhost: a.example\r\n\r\n";
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(world.http).await.unwrap();
        stream.write_all(request).await.unwrap();
        assert!(stream.read(&mut [0; 12]).await.unwrap() > 0);
        held.push(stream);
    }
    let mut third = TcpStream::connect(world.http).await.unwrap();
    assert_eq!(third.read(&mut [0]).await.unwrap_or(0), 0, "the third connection is closed");
}

#[tokio::test]
async fn an_endpoint_that_does_not_answer_is_given_up() {
    let short = Duration::from_millis(100);
    let world = World::start(Limits { response: short, response_body: short, ..Limits::default() }).await;
    let silent = scripted(&world.scope, |_, mut stream| async move {
        let request = head(&mut stream).await;
        if request.contains("/half") {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc").await.unwrap();
        }
        std::future::pending::<()>().await;
    })
    .await;
    world.tables.replace(table(&[silent], &[]));
    assert!(world.get("/").await.starts_with("HTTP/1.1 504 "));
    let mut stream = TcpStream::connect(world.http).await.unwrap();
    stream.write_all(b"GET /half HTTP/1.1\r\nhost: a.example\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.ends_with(b"\r\n\r\nabc"), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test]
async fn connections_to_endpoints_are_used_again_and_a_safe_request_survives_their_end() {
    let world = World::start(Limits::default()).await;
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    // The first connection answers twice and ends when the third request is out.
    let web = scripted(&world.scope, move |count, mut stream| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            for turn in 0.. {
                if head(&mut stream).await.is_empty() || (count == 0 && turn == 2) {
                    return;
                }
                let body = format!("connection {count}");
                let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        }
    })
    .await;
    world.tables.replace(table(&[web], &[]));
    for want in ["connection 0", "connection 0", "connection 1"] {
        let answer = world.get("/").await;
        assert!(answer.ends_with(want), "{want}: {answer}");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn bodies_stream_both_ways_and_a_new_table_disturbs_nobody() {
    let world = World::start(Limits::default()).await;
    // Sends back each piece as it comes.
    let (listener, web) = listen().await;
    world.scope.spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let service = service_fn(|request: Request<Incoming>| async move {
            let pieces = request.into_body().into_data_stream().map(|piece| piece.map(Frame::data));
            Ok::<_, Infallible>(Response::new(StreamBody::new(pieces)))
        });
        let server = hyper::server::conn::http1::Builder::new();
        let _ = server.serve_connection(TokioIo::new(stream), service).await;
    });
    world.tables.replace(table(&[web], &[]));
    let stream = TcpStream::connect(world.http).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    world.scope.spawn(async move { drop(connection.await) });
    let (pieces, receiver) = mpsc::channel::<Result<Frame<Bytes>, Infallible>>(1);
    let body = StreamBody::new(futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece, receiver))
    }));
    let request = Request::post("/").header("host", "a.example").body(Box::pin(body)).unwrap();
    let answer = sender.send_request(request).await.unwrap();
    let mut answer = answer.into_body();
    for word in ["one", "two"] {
        pieces.send(Ok(Frame::data(Bytes::from(word)))).await.unwrap();
        assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), word);
        // The route goes away under the request.
        world.tables.replace(Table::default());
    }
    drop(pieces);
    assert!(answer.frame().await.is_none());
    assert!(world.get("/").await.starts_with("HTTP/1.1 404 "));
}

#[tokio::test]
async fn a_websocket_passes() {
    let world = World::start(Limits::default()).await;
    let web = scripted(&world.scope, |_, stream| async move {
        let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if socket.send(message).await.is_err() {
                return;
            }
        }
    })
    .await;
    world.tables.replace(table(&[web], &[]));
    let stream = TcpStream::connect(world.http).await.unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async("ws://a.example/chat", stream).await.unwrap();
    for word in ["hello", "again"] {
        socket.send(word.into()).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap().to_text().unwrap(), word);
    }
    // Another protocol is not switched to: the request is answered as if nobody had asked.
    let plain = endpoint(&world.scope, "plain", false).await;
    world.tables.replace(table(&[plain], &[]));
    let answer = world
        .raw("GET / HTTP/1.1\r\nhost: a.example\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n")
        .await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && !answer.contains("h2c"), "{answer}");
}

fn client_tls() -> tokio_rustls::TlsConnector {
    let mut config = ferrite_pki::unverified_client_config().unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    tokio_rustls::TlsConnector::from(Arc::new(config))
}

/// Connects with a name, and answers the certificate that the proxy showed.
async fn connect(world: &World, name: &str) -> (tokio_rustls::client::TlsStream<TcpStream>, Vec<u8>) {
    let stream = TcpStream::connect(world.https).await.unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let stream = client_tls().connect(name, stream).await.unwrap();
    let shown = stream.get_ref().1.peer_certificates().unwrap()[0].to_vec();
    (stream, shown)
}

#[tokio::test]
async fn tls_shows_the_certificate_of_the_name_and_speaks_http2() {
    let world = World::start(Limits::default()).await;
    let web = endpoint(&world.scope, "web", false).await;
    let grpc = endpoint(&world.scope, "grpc", true).await;
    let authority = ferrite_pki::Authority::create("test").unwrap();
    let subject = ferrite_pki::Subject {
        common_name: "a.example".into(),
        organization: None,
        names: vec!["a.example".into()],
    };
    let identity = authority.issue(&subject, ferrite_pki::Purpose::Server).unwrap();
    let secret = serde_json::from_value(json!({
        "type": "kubernetes.io/tls",
        "metadata": {"name": "key"},
    }))
    .map(|mut secret: k8s_openapi::api::core::v1::Secret| {
        let bytes = |text: &str| k8s_openapi::ByteString(text.as_bytes().to_vec());
        secret.data = Some(
            [
                ("tls.crt".to_owned(), bytes(&identity.certificate)),
                ("tls.key".to_owned(), bytes(&identity.key)),
            ]
            .into(),
        );
        secret
    })
    .unwrap();
    let own = Arc::new(certified(&secret).unwrap());
    let mut with = table(&[web], &[grpc]);
    with.certificates = Arc::new(HashMap::from([(ObjectKey::new("ns", "key"), Arc::clone(&own))]));
    world.tables.replace(with);

    let (stream, shown) = connect(&world, "a.example").await;
    assert_eq!(shown, own.cert[0].to_vec());
    let (other, shown) = connect(&world, "b.example").await;
    assert_ne!(shown, own.cert[0].to_vec(), "another name gets the self-made certificate");
    drop(other);

    let io = TokioIo::new(stream);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    world.scope.spawn(async move { drop(connection.await) });
    for (path, want) in [("/x", "web /x HTTP/1.1 3\n"), ("/grpc/y", "grpc /grpc/y HTTP/2.0 3\n")] {
        let body = Full::new(Bytes::from_static(b"abc"));
        let request = Request::post(format!("https://a.example{path}")).body(body).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&text);
        assert!(text.starts_with(want) && text.contains("x-forwarded-proto: https\n"), "{text}");
    }
}
