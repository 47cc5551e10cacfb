//! The kubelet API over its real port: TLS on loopback.

use super::*;
use crate::testing::Harness;
use ferrite_json::json;
use ferrite_pki::{Authority, Identity, Purpose, Subject};
use http_body_util::Empty;
use hyper::client::conn::http1::{self, SendRequest};
use std::io::Write;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct Door {
    harness: Harness,
    authority: Authority,
    address: SocketAddr,
    scope: Scope,
}

impl Door {
    async fn open() -> Self {
        let harness = Harness::start().await;
        let authority = Authority::create("test").unwrap();
        let subject =
            Subject { common_name: "node".into(), organization: None, names: vec!["127.0.0.1".into()] };
        let serving = authority.issue(&subject, Purpose::Server).unwrap();
        let tls = ferrite_pki::server_config(&serving, authority.certificate(), &["http/1.1"]).unwrap();
        let mut config = Config::new("node", "192.0.2.1".parse().unwrap());
        config.server_address = "127.0.0.1:0".parse().unwrap();
        let scope = Scope::new();
        let tls = watch::channel(Some(tls)).1;
        let address = start(harness.context.clone(), Arc::new(config), tls, &scope).await.unwrap();
        Self { harness, authority, address, scope }
    }

    /// A connection as that user; without one, no certificate is shown.
    async fn connect(&self, user: Option<(&str, Option<&str>)>) -> Option<SendRequest<Empty<Bytes>>> {
        let identity = user.map(|(name, group)| {
            self.authority.issue(&Subject::client(name, group), Purpose::Client).unwrap()
        });
        self.connect_as(identity.as_ref()).await
    }

    async fn connect_as(&self, identity: Option<&Identity>) -> Option<SendRequest<Empty<Bytes>>> {
        let config = ferrite_pki::client_config(self.authority.certificate(), identity).unwrap();
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = "127.0.0.1".try_into().unwrap();
        let stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.ok()?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
        self.scope.spawn(async move {
            let _ = connection.with_upgrades().await;
        });
        Some(sender)
    }

    async fn get(&self, user: Option<(&str, Option<&str>)>, path: &str) -> Option<(u16, String)> {
        let sender = self.connect(user).await?;
        Self::send(sender, path).await
    }

    async fn get_as(&self, identity: Option<&Identity>, path: &str) -> Option<(u16, String)> {
        Self::send(self.connect_as(identity).await?, path).await
    }

    async fn send(sender: SendRequest<Empty<Bytes>>, path: &str) -> Option<(u16, String)> {
        Self::send_with(sender, "GET", path, None).await
    }

    /// Shows a token and no certificate.
    async fn with_token(&self, token: &str, method: &str, path: &str) -> (u16, String) {
        let sender = self.connect(None).await.unwrap();
        Self::send_with(sender, method, path, Some(token)).await.unwrap()
    }

    async fn send_with(
        mut sender: SendRequest<Empty<Bytes>>,
        method: &str,
        path: &str,
        token: Option<&str>,
    ) -> Option<(u16, String)> {
        let mut request = Request::builder().method(method).uri(path).header("Host", "node");
        if let Some(token) = token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let request = request.body(Empty::new()).unwrap();
        let answer = sender.send_request(request).await.ok()?;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.ok()?.to_bytes();
        Some((status, String::from_utf8_lossy(&body).into_owned()))
    }

    async fn ask(&self, path: &str) -> (u16, String) {
        self.get(Some(("kube-apiserver-kubelet-client", None)), path).await.unwrap()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

fn one() -> ferrite_json::Value {
    json!({"containers": [{"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent"}]})
}

fn ready(pod: &ferrite_json::Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

#[tokio::test]
async fn callers_are_told_apart() {
    let door = Door::open().await;
    assert_eq!(door.ask("/healthz").await, (200, "ok".into()));
    let admin = Some(("admin", Some("system:masters")));
    assert_eq!(door.get(admin, "/healthz").await.unwrap().0, 200);
    let (status, body) = door.get(Some(("system:node:other", Some("system:nodes"))), "/pods").await.unwrap();
    let forbidden =
        "Forbidden (user=system:node:other, verb=get, resource=nodes, subresource(s)=[pods proxy])\n";
    assert_eq!((status, body.as_str()), (403, forbidden));
    let unauthorized = (401, "Unauthorized".to_owned());
    assert_eq!(door.get(None, "/healthz").await.unwrap(), unauthorized);
    assert_eq!(door.ask("/nothing").await.0, 404);
    let stranger = Authority::create("stranger").unwrap();
    let identity =
        stranger.issue(&Subject::client("kube-apiserver-kubelet-client", None), Purpose::Client).unwrap();
    assert_eq!(door.get_as(Some(&identity), "/healthz").await.unwrap(), unauthorized, "a foreign authority");
    let server = Subject::client("kube-apiserver-kubelet-client", None);
    let server = door.authority.issue(&server, Purpose::Server).unwrap();
    assert_eq!(door.get_as(Some(&server), "/healthz").await.unwrap(), unauthorized, "a server's certificate");
}

#[tokio::test]
async fn the_api_server_says_who_callers_are_and_what_they_may() {
    let door = Door::open().await;
    for (token, method, path, status) in [
        ("token-of-may-metrics", "GET", "/metrics", 200),
        ("token-of-may-metrics", "GET", "/metrics/resource", 200),
        ("token-of-may-metrics", "GET", "/pods", 403),
        ("token-of-may-metrics", "GET", "/stats/summary", 403),
        ("token-of-may-pods", "GET", "/pods", 200),
        ("token-of-may-pods", "GET", "/runningpods/", 200),
        ("token-of-may-pods", "POST", "/run/default/p/c?cmd=id", 403),
        ("token-of-may-proxy", "GET", "/pods", 200),
        ("token-of-may-proxy", "GET", "/configz", 200),
        ("token-of-may-proxy", "GET", "/metrics", 403),
        ("token-of-may-configz", "GET", "/configz", 200),
        ("token-of-may-healthz", "GET", "/healthz/syncloop", 200),
        ("token-of-may-log", "GET", "/logs/", 200),
        ("token-of-may-stats", "GET", "/stats/summary", 200),
        ("token-of-kube-apiserver-kubelet-client", "GET", "/debug/pprof/", 405),
        ("token-of-kube-apiserver-kubelet-client", "POST", "/checkpoint/default/none/c", 404),
        ("token-of-unsure", "GET", "/pods", 500),
        ("token-of-nobody-knows", "GET", "/pods", 401),
        ("made-up", "GET", "/healthz", 401),
    ] {
        let answer = door.with_token(token, method, path).await;
        assert_eq!(answer.0, status, "{token} {method} {path}: {}", answer.1);
    }
    let asked = |resource: &str| {
        let reviews = door.harness.api.list("reviews");
        reviews.iter().filter(|r| r["resource"] == resource).count()
    };
    let before = (asked("tokenreviews"), asked("subjectaccessreviews"));
    for _ in 0..5 {
        assert_eq!(door.with_token("token-of-may-metrics", "GET", "/metrics").await.0, 200);
        assert_eq!(door.with_token("token-of-may-metrics", "GET", "/pods").await.0, 403);
        assert_eq!(door.with_token("made-up", "GET", "/healthz").await.0, 401);
    }
    assert_eq!((asked("tokenreviews"), asked("subjectaccessreviews")), before, "verdicts are remembered");
    let reviews = door.harness.api.list("reviews");
    let one = reviews.iter().find(|r| r["review"]["spec"]["user"] == "may-metrics").unwrap();
    assert_eq!(
        one["review"]["spec"]["resourceAttributes"],
        json!({"verb": "get", "version": "v1", "resource": "nodes", "subresource": "metrics", "name": "node"})
    );
}

#[tokio::test]
async fn what_runs_is_told_and_commands_are_run() {
    let door = Door::open().await;
    door.harness.create("p", one());
    door.harness.until("p", "ready", ready).await;
    let (status, body) = door.ask("/runningpods/").await;
    let pods: ferrite_json::Value = ferrite_json::from_str(&body).unwrap();
    assert_eq!((status, &pods["items"][0]["metadata"]["uid"]), (200, &json!("uid-p")));
    assert_eq!(pods["items"][0]["spec"]["containers"][0]["name"], "c");
    let token = "token-of-kube-apiserver-kubelet-client";
    assert_eq!(door.with_token(token, "POST", "/run/default/p/c?cmd=echo+hello").await.0, 200);
    assert_eq!(door.with_token(token, "POST", "/run/default/p/none?cmd=id").await.0, 404);
    assert_eq!(door.with_token(token, "GET", "/run/default/p/c?cmd=id").await.0, 404);
    assert_eq!(door.with_token(token, "POST", "/checkpoint/default/p/c").await.0, 404, "the runtime cannot");
}

#[tokio::test]
async fn health_is_told_without_credentials_on_its_own_port() {
    let (scope, h) = (Scope::new(), Harness::start().await);
    let address = start_health(h.context.clone(), "127.0.0.1:0".parse().unwrap(), &scope).await.unwrap();
    for (path, expected) in [
        ("/healthz", "200 OK"),
        ("/healthz?verbose", "[+]syncloop ok\nhealthz check passed"),
        ("/healthz/log", "200 OK"),
        ("/healthz/other", "404 Not Found"),
        ("/healthzx", "404 Not Found"),
        ("/pods", "404 Not Found"),
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.contains(expected), "{path}: {answer}");
    }
    scope.shutdown().await;
}

#[tokio::test]
async fn idle_connections_keep_nobody_out() {
    let door = Door::open().await;
    let mut idle = Vec::new();
    for _ in 0..1100 {
        idle.push(TcpStream::connect(door.address).await.unwrap());
    }
    // Strangers whose handshake succeeded are still strangers.
    let nodes = Some(("system:node:other", Some("system:nodes")));
    for _ in 0..gate::MAX_STRANGERS / 4 {
        door.connect(nodes).await.unwrap();
    }
    assert_eq!(door.ask("/healthz").await, (200, "ok".into()));
    let mut closed = 0;
    for stream in &mut idle[..800] {
        closed += usize::from(stream.read(&mut [0]).await.is_ok_and(|count| count == 0));
    }
    assert_eq!(closed, 800, "the oldest connections gave their places away");
}

#[tokio::test]
async fn documents_are_served() {
    let door = Door::open().await;
    door.harness.create("p", one());
    door.harness.until("p", "ready", ready).await;
    let (status, body) = door.ask("/pods").await;
    let pods: ferrite_json::Value = ferrite_json::from_str(&body).unwrap();
    assert_eq!(
        (status, &pods["kind"], &pods["items"][0]["metadata"]["name"]),
        (200, &json!("PodList"), &json!("p"))
    );
    let (_, body) = door.ask("/stats/summary").await;
    let summary: ferrite_json::Value = ferrite_json::from_str(&body).unwrap();
    assert_eq!(summary["node"]["nodeName"], "node");
    assert!(door.ask("/configz").await.1.contains("\"maxPods\":110"));
    assert!(door.ask("/metrics").await.1.contains("kubelet_node_name{node=\"node\"} 1"));
    assert!(door.ask("/metrics/cadvisor").await.1.contains("machine_cpu_cores "));
    assert_eq!(door.ask("/metrics/probes").await.1, "");
    assert!(door.ask("/metrics/resource").await.1.contains("node_memory_working_set_bytes"));
}

#[tokio::test]
async fn logs_are_read_and_followed_to_the_end() {
    let door = Door::open().await;
    door.harness.create("p", one());
    door.harness.until("p", "ready", ready).await;
    let path = door.harness.dir.path().join("logs/pods/default_p_uid-p/c/0.log");
    let line = |text: &str| format!("2024-01-01T00:00:00Z stdout F {text}\n");
    std::fs::write(&path, line("a") + &line("b")).unwrap();
    assert_eq!(door.ask("/containerLogs/default/p/c").await, (200, "a\nb\n".into()));
    assert_eq!(
        door.ask("/containerLogs/default/p/c?tailLines=1&timestamps=true").await.1,
        "2024-01-01T00:00:00Z b\n"
    );
    assert_eq!(door.ask("/containerLogs/default/p/c?tailLines=x").await.0, 400);
    assert_eq!(door.ask("/containerLogs/default/p/none").await.0, 404);
    assert_eq!(door.ask("/containerLogs/default/none/c").await.0, 404);
    let (status, body) = door.ask("/containerLogs/default/p/c?previous=true").await;
    assert_eq!(
        (status, body.as_str()),
        (400, "previous terminated container \"c\" in pod \"p\" not found\n")
    );

    let mut sender = door.connect(Some(("kube-apiserver-kubelet-client", None))).await.unwrap();
    let request = Request::get("/containerLogs/default/p/c?follow=true&tailLines=1").header("Host", "node");
    let answer = sender.send_request(request.body(Empty::new()).unwrap()).await.unwrap();
    let mut body = answer.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "b\n");
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(line("c").as_bytes()).unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "c\n");
    door.harness.runtime.exit("c", 0);
    assert!(body.frame().await.is_none(), "the log ends with the container");
}

#[tokio::test]
async fn an_upgraded_connection_is_passed_through() {
    let door = Door::open().await;
    door.harness.create("p", one());
    door.harness.until("p", "ready", ready).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/exec/token", listener.local_addr().unwrap());
    door.harness.runtime.stream_at(&url);
    let runtime = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
        let mut bytes = [0; 5];
        stream.read_exact(&mut bytes).await.unwrap();
        bytes.reverse();
        stream.write_all(&bytes).await.unwrap();
        String::from_utf8(head).unwrap()
    });
    let mut sender = door.connect(Some(("kube-apiserver-kubelet-client", None))).await.unwrap();
    let request = Request::post("/exec/default/p/c?command=sh&output=1")
        .header("Host", "node")
        .header("Connection", "Upgrade")
        .header("Upgrade", "SPDY/3.1")
        .header("X-Stream-Protocol-Version", "v4.channel.k8s.io");
    let mut answer = sender.send_request(request.body(Empty::new()).unwrap()).await.unwrap();
    assert_eq!(answer.status(), 101);
    assert_eq!(answer.headers()["X-Stream-Protocol-Version"], "v4.channel.k8s.io");
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut answer).await.unwrap());
    stream.write_all(b"hello").await.unwrap();
    let mut bytes = [0; 5];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"olleh");
    let head = runtime.await.unwrap().to_lowercase();
    assert!(head.starts_with("post /exec/token http/1.1") && head.contains("upgrade: spdy/3.1"), "{head}");

    assert_eq!(
        door.ask("/exec/default/p/c?command=sh&output=1").await,
        (400, "Upgrade request required\n".into())
    );
    assert_eq!(door.ask("/exec/default/p/none?command=sh&output=1").await.0, 404);
}
