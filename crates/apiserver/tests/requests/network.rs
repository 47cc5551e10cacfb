//! The network side: TLS on loopback, HTTP/1.1 and HTTP/2.

use crate::world::*;
use bytes::Bytes;
use ferrite_apiserver::{BoxError, RequestHeader, Serving, ServingTls};
use ferrite_json::{Value, json};
use ferrite_pki::{Authority, Identity, Purpose, Subject};
use futures_util::StreamExt;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls_pki_types::pem::PemObject;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, Message};

/// A server on loopback and the administrator's access to it.
pub struct Network {
    pub world: World,
    pub authority: Authority,
    pub address: SocketAddr,
    tls: rustls::ClientConfig,
    /// The server's side.
    server_tls: ServingTls,
    serving: JoinHandle<()>,
}

impl Network {
    async fn start(serving: Serving) -> Self {
        Self::serve(World::start_with(serving).await).await
    }

    pub async fn serve(world: World) -> Self {
        let authority = Authority::create("test").expect("an authority");
        let names = vec!["localhost".to_owned()];
        let subject = Subject { common_name: "server".into(), organization: None, names };
        let server = authority.issue(&subject, Purpose::Server).expect("a certificate");
        let admin = Subject::client("admin", Some("system:masters"));
        let admin = authority.issue(&admin, Purpose::Client).expect("a certificate");
        let ca = authority.certificate();
        let tls = ferrite_pki::server_config(&server, ca, &["h2", "http/1.1"]).expect("a configuration");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let server_tls = ServingTls::from(tls);
        let serving = tokio::spawn(world.server().serve(listener, server_tls.clone()));
        let tls = ferrite_pki::client_config(ca, Some(&admin)).expect("a configuration");
        Self { world, authority, address, tls, server_tls, serving }
    }

    async fn connect(&self, protocol: &str) -> TlsStream<TcpStream> {
        let mut tls = self.tls.clone();
        tls.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let stream = TcpStream::connect(self.address).await.expect("a connection");
        let name = "localhost".try_into().expect("a name");
        TlsConnector::from(Arc::new(tls)).connect(name, stream).await.expect("a handshake")
    }

    async fn http2<B>(&self) -> hyper::client::conn::http2::SendRequest<B>
    where
        B: http_body::Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let stream = TokioIo::new(self.connect("h2").await);
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.expect("a handshake");
        // Ends with the connection, which the test ends.
        tokio::spawn(connection);
        sender
    }

    fn get(&self, path: &str) -> Request<Empty<Bytes>> {
        Request::get(format!("https://{}{path}", self.address)).body(Empty::new()).expect("a request")
    }
}

async fn text(answer: Response<Incoming>) -> String {
    let bytes = answer.into_body().collect().await.expect("a body").to_bytes();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn a_connection_serves_one_request_after_another() {
    let network = Network::start(Serving::default()).await;
    let stream = TokioIo::new(network.connect("http/1.1").await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.expect("a handshake");
    tokio::spawn(connection);
    for path in ["/version", "/livez", MAPS] {
        let mut request = network.get(path);
        request.headers_mut().insert("host", "localhost".parse().expect("a header"));
        let answer = sender.send_request(request).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        assert!(!text(answer).await.is_empty());
    }
}

#[tokio::test]
async fn a_client_of_an_authority_that_is_gone_is_unknown_from_the_next_request_on() {
    let network = Network::start(Serving::default()).await;
    let mut sender = network.http2().await;
    assert_eq!(sender.send_request(network.get(MAPS)).await.expect("an answer").status(), 200);
    let mut watch = sender.send_request(network.get(&format!("{MAPS}?watch=1"))).await.expect("an answer");
    let other = Authority::create("other").expect("an authority");
    let names = vec!["localhost".to_owned()];
    let subject = Subject { common_name: "new".into(), organization: None, names };
    let identity = network.authority.issue(&subject, Purpose::Server).expect("a certificate");
    let replace = |clients: &str| {
        let tls = ferrite_pki::server_config(&identity, clients, &["h2"]).expect("a configuration");
        network.server_tls.set(tls);
    };
    replace(other.certificate());
    assert_eq!(sender.send_request(network.get(MAPS)).await.expect("an answer").status(), 401);
    // As upstream: a watch that has begun goes on.
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}});
    assert_eq!(network.world.post(MAPS, &map).await.code, 201);
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("late") {
        let frame = watch.frame().await.expect("an event").expect("a frame");
        seen.extend_from_slice(frame.data_ref().expect("data"));
    }
    // New connections see the new certificate, and an authority that comes back counts again.
    let fresh = network.connect("h2").await;
    let shown = &fresh.get_ref().1.peer_certificates().expect("a certificate")[0];
    let mut expected = identity.certificate.as_bytes();
    let expected = rustls_pki_types::CertificateDer::from_pem_reader(&mut expected).expect("a certificate");
    assert_eq!(*shown, expected);
    replace(network.authority.certificate());
    assert_eq!(sender.send_request(network.get(MAPS)).await.expect("an answer").status(), 200);
}

#[tokio::test]
async fn many_requests_share_a_connection_up_to_a_limit() {
    let serving = Serving { http2_max_streams: 3, ..Serving::default() };
    let network = Network::start(serving).await;
    let mut sender = network.http2().await;
    let watches: Vec<_> =
        [(); 3].map(|()| sender.send_request(network.get(&format!("{MAPS}?watch=1")))).into();
    let mut bodies = Vec::new();
    for watch in watches {
        bodies.push(watch.await.expect("an answer").into_body());
    }
    let mut fourth = Box::pin(sender.send_request(network.get("/version")));
    assert!(
        tokio::time::timeout(Duration::from_millis(200), &mut fourth).await.is_err(),
        "no stream is free"
    );
    drop(bodies.pop());
    assert_eq!(fourth.await.expect("an answer").status(), StatusCode::OK);
}

#[tokio::test]
async fn clients_are_asked_to_connect_anew() {
    let network = Network::start(Serving { goaway_chance: 1.0, ..Serving::default() }).await;
    let mut sender = network.http2().await;
    let answer = sender.send_request(network.get("/version")).await.expect("the request itself is answered");
    assert!(text(answer).await.contains("gitVersion"));
    let closed = async {
        while sender.ready().await.is_ok() {
            let _ = sender.send_request(network.get("/version")).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), closed).await.expect("the connection ends");
}

#[tokio::test]
async fn headers_that_never_end_are_not_waited_for() {
    let network = Network::start(Serving::default()).await;
    let mut stream = network.connect("http/1.1").await;
    stream.write_all(b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: ").await.expect("sent");
    tokio::time::pause();
    let mut rest = Vec::new();
    // However the server puts it: the connection is over.
    let _ = stream.read_to_end(&mut rest).await;
    assert!(!String::from_utf8_lossy(&rest).contains("200 OK"));
}

#[tokio::test]
async fn headers_without_measure_are_refused() {
    let network = Network::start(Serving::default()).await;
    let mut stream = network.connect("http/1.1").await;
    let line = format!("GET /version HTTP/1.1\r\nhost: localhost\r\nx: {}", "y".repeat(2 << 20));
    let _ = stream.write_all(line.as_bytes()).await;
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(!String::from_utf8_lossy(&rest).contains("200 OK"));
}

#[tokio::test]
async fn a_stopping_server_finishes_what_it_has_begun() {
    let network = Network::start(Serving::default()).await;
    let mut sender = network.http2().await;
    let (body, pieces) = tokio::sync::mpsc::channel::<Result<Frame<Bytes>, BoxError>>(1);
    let pieces = futures_util::stream::unfold(pieces, |mut pieces| async move {
        let piece = pieces.recv().await?;
        Some((piece, pieces))
    });
    let request = Request::post(format!("https://{}{MAPS}", network.address))
        .header("content-type", "application/json")
        .body(StreamBody::new(Box::pin(pieces)))
        .expect("a request");
    let answer = tokio::spawn(sender.send_request(request));
    let map = config_map("late", json!({})).to_string();
    let (first, second) = map.split_at(10);
    body.send(Ok(Frame::data(Bytes::copy_from_slice(first.as_bytes())))).await.expect("sent");
    // The request has arrived once it counts as one in flight.
    let counted = "apiserver_current_inflight_requests{request_kind=\"mutating\"} 1";
    for _ in 0..1000 {
        let metrics = network.world.get("/metrics").await;
        if String::from_utf8_lossy(&metrics.bytes).contains(counted) {
            break;
        }
        tokio::task::yield_now().await;
    }
    let server = network.world.server();
    let stopping = tokio::spawn(async move { server.shutdown().await });
    network.serving.await.expect("no more connections are taken");
    assert!(TcpStream::connect(network.address).await.is_err());
    let finish = async {
        body.send(Ok(Frame::data(Bytes::copy_from_slice(second.as_bytes())))).await.expect("sent");
        drop(body);
        answer.await.expect("a task").expect("an answer").status()
    };
    assert_eq!(finish.await, StatusCode::CREATED);
    drop(sender);
    stopping.await.expect("the server ends");
}

#[tokio::test]
async fn a_watcher_that_leaves_is_forgotten() {
    let network = Network::start(Serving::default()).await;
    let mut sender = network.http2().await;
    let watch = sender.send_request(network.get(&format!("{MAPS}?watch=1"))).await.expect("an answer");
    let running = async |network: &Network| {
        let metrics = network.world.get("/metrics").await;
        let text = String::from_utf8_lossy(&metrics.bytes).into_owned();
        let line = text.lines().find(|l| l.starts_with("apiserver_longrunning_requests{")).map(str::to_owned);
        line.is_some_and(|l| l.ends_with(" 1"))
    };
    assert!(running(&network).await);
    drop((watch, sender));
    let gone = async {
        while running(&network).await {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.expect("the watch ends with its client");
}

#[tokio::test]
async fn an_idle_connection_ends_and_a_watch_keeps_one() {
    let idle_timeout = Duration::from_millis(300);
    let network = Network::start(Serving { idle_timeout, ..Serving::default() }).await;
    let mut quiet = network.http2::<Empty<Bytes>>().await;
    assert_eq!(
        quiet.send_request(network.get("/version")).await.expect("an answer").status(),
        StatusCode::OK
    );
    let mut watching = network.http2::<Empty<Bytes>>().await;
    let watch = network.get("/api/v1/namespaces/default/configmaps?watch=true");
    let watch = watching.send_request(watch).await.expect("an answer");
    // Closed by the server: the client's side becomes unusable.
    let ended = async {
        while quiet.ready().await.is_ok() {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("the idle connection ends");
    assert_eq!(network.world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
    let mut body = watch.into_body();
    let frame = body.frame().await.expect("the watch goes on").expect("a frame");
    assert!(frame.into_data().is_ok_and(|data| data.windows(5).any(|w| w == b"ADDED")));
    network.world.stop().await;
    network.serving.await.expect("the end");
}

impl Network {
    /// The server's view of a client with that identity and those headers.
    async fn as_client(&self, identity: Option<&Identity>, headers: &[(&str, &str)]) -> (u16, Value) {
        let ca = self.authority.certificate();
        let mut tls = ferrite_pki::client_config(ca, identity).expect("a configuration");
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        let stream = TcpStream::connect(self.address).await.expect("a connection");
        let name = "localhost".try_into().expect("a name");
        let stream = TlsConnector::from(Arc::new(tls)).connect(name, stream).await.expect("a handshake");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("a handshake");
        tokio::spawn(connection);
        let body = r#"{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}"#;
        let mut request = Request::post("/apis/authentication.k8s.io/v1/selfsubjectreviews")
            .header("host", "localhost")
            .header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(body))).expect("a request");
        let answer = sender.send_request(request).await.expect("an answer");
        let code = answer.status().as_u16();
        (code, ferrite_json::from_str(&text(answer).await).expect("JSON"))
    }
}

#[tokio::test]
async fn front_proxies_say_for_whom_they_ask() {
    let proxies = Authority::create("proxies").expect("an authority");
    let list = |name: &str| vec![name.to_owned()];
    let request_header = RequestHeader {
        client_ca: proxies.certificate().to_owned(),
        allowed_names: list("front"),
        username_headers: list("X-Remote-User"),
        uid_headers: Vec::new(),
        group_headers: list("X-Remote-Group"),
        extra_headers_prefix: list("X-Remote-Extra-"),
    };
    let network = Network::serve(World::start_behind(request_header).await).await;
    let map = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
    let data = network.world.get(map).await.at("/data");
    let expected = json!({
        "client-ca-file": "the authority of clients",
        "requestheader-allowed-names": r#"["front"]"#,
        "requestheader-client-ca-file": proxies.certificate(),
        "requestheader-extra-headers-prefix": r#"["X-Remote-Extra-"]"#,
        "requestheader-group-headers": r#"["X-Remote-Group"]"#,
        "requestheader-username-headers": r#"["X-Remote-User"]"#,
    });
    assert_eq!(data, expected);

    let issue = |authority: &Authority, name: &str| {
        authority.issue(&Subject::client(name, None), Purpose::Client).expect("a certificate")
    };
    let front = issue(&proxies, "front");
    let said = [("x-remote-user", "alice"), ("x-remote-group", "staff"), ("x-remote-extra-k", "v")];
    let (code, review) = network.as_client(Some(&front), &said).await;
    let user = &review["status"]["userInfo"];
    assert_eq!((code, &user["username"]), (201, &json!("alice")), "{review}");
    assert_eq!(user["groups"], json!(["staff", "system:authenticated"]));
    assert_eq!(user["extra"], json!({"k": ["v"]}));
    // The proxy itself has no user, and a client without a certificate cannot name one.
    assert_eq!(network.as_client(Some(&front), &[]).await.0, 401);
    assert_eq!(network.as_client(Some(&issue(&proxies, "other")), &said).await.0, 401);
    assert_eq!(network.as_client(None, &said).await.0, 403);
    let (_, review) = network.as_client(Some(&issue(&network.authority, "front")), &said).await;
    assert_eq!(review["status"]["userInfo"]["username"], "front", "a client's own certificate");
}

#[tokio::test]
async fn a_certificate_that_proves_no_identity_is_unauthorized() {
    let network = Network::start(Serving::default()).await;
    let admin = Subject::client("admin", Some("system:masters"));
    let ours = network.authority.issue(&admin, Purpose::Client).expect("a certificate");
    let wrong = ("authorization", "Bearer wrong");
    for headers in [&[][..], &[wrong]] {
        let (code, review) = network.as_client(Some(&ours), headers).await;
        assert_eq!((code, &review["status"]["userInfo"]["username"]), (201, &json!("admin")), "{headers:?}");
    }
    assert_eq!(network.as_client(None, &[]).await.0, 403, "anonymous");
    let foreign = Authority::create("test").expect("an authority");
    let foreign = foreign.issue(&admin, Purpose::Client).expect("a certificate");
    let server = network.authority.issue(&admin, Purpose::Server).expect("a certificate");
    for (row, identity) in [("of another authority", &foreign), ("for servers", &server)] {
        for headers in [&[][..], &[wrong], &[("authorization", "Basic eDp5")]] {
            let (code, status) = network.as_client(Some(identity), headers).await;
            assert_eq!((code, &status["reason"]), (401, &json!("Unauthorized")), "{row}: {headers:?}");
        }
    }
}

impl Network {
    /// A WebSocket to `path`, or the code of the refusal.
    async fn websocket(
        &self,
        path: &str,
        headers: &[(&'static str, &'static str)],
    ) -> Result<(WebSocketStream<TlsStream<TcpStream>>, http::HeaderMap), u16> {
        let mut request =
            format!("wss://localhost{path}").into_client_request().expect("a request for a WebSocket");
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().expect("a header"));
        }
        let stream = self.connect("http/1.1").await;
        match tokio_tungstenite::client_async(request, stream).await {
            Ok((socket, answer)) => Ok((socket, answer.headers().clone())),
            Err(tungstenite::Error::Http(answer)) => Err(answer.status().as_u16()),
            Err(other) => panic!("the handshake failed: {other}"),
        }
    }
}

const ORIGIN: (&str, &str) = ("origin", "https://localhost");

#[tokio::test]
async fn a_watch_goes_on_as_messages_of_a_websocket() {
    let network = Network::start(Serving::default()).await;
    let path = format!("{MAPS}?watch=1");
    let (mut events, headers) = network.websocket(&path, &[ORIGIN]).await.expect("a WebSocket");
    assert!(headers.get("sec-websocket-protocol").is_none());
    let (mut named, headers) = network
        .websocket(&path, &[ORIGIN, ("sec-websocket-protocol", "base64.binary.k8s.io")])
        .await
        .expect("a WebSocket");
    assert_eq!(headers["sec-websocket-protocol"], "base64.binary.k8s.io");
    let protobuf = ("accept", "application/vnd.kubernetes.protobuf");
    let (mut binary, _) = network.websocket(&path, &[ORIGIN, protobuf]).await.expect("a WebSocket");
    assert_eq!(network.world.post(MAPS, &config_map("m", json!({"k": "v"}))).await.code, 201);
    for socket in [&mut events, &mut named] {
        let message = socket.next().await.expect("a message").expect("no error");
        let Message::Text(text) = message else { panic!("an event in JSON is text: {message:?}") };
        let event: ferrite_json::Value = ferrite_json::from_str(&text).expect("an event");
        assert_eq!((&event["type"], &event["object"]["metadata"]["name"]), (&json!("ADDED"), &json!("m")));
    }
    let message = binary.next().await.expect("a message").expect("no error");
    let Message::Binary(bytes) = message else { panic!("an event in protobuf is binary: {message:?}") };
    // The first field of an event is its type. Its length was never sent.
    assert_eq!(bytes[..7], *b"\x0a\x05ADDED");
    assert_eq!(network.websocket(&path, &[]).await.err(), Some(403), "nobody says where they come from");
    let two = ("sec-websocket-protocol", "a, b");
    assert_eq!(network.websocket(&path, &[ORIGIN, two]).await.err(), Some(400));
    assert_eq!(
        network.websocket(&format!("{MAPS}?watch=1&timeoutSeconds=x"), &[ORIGIN]).await.err(),
        Some(400)
    );

    let (mut short, _) =
        network.websocket(&format!("{path}&timeoutSeconds=1"), &[ORIGIN]).await.expect("a WebSocket");
    let mut last = None;
    while let Some(Ok(message)) = short.next().await {
        last = Some(message);
    }
    assert!(last.is_some_and(|message| message.is_close()), "the end is announced");
}
