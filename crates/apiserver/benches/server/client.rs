//! Clients and their requests.

use crate::process::Server;
use bytes::Bytes;
use ferrite_json::{Value, json};
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

pub const PODS: &str = "/api/v1/namespaces/default/pods";
const FOR: Duration = Duration::from_secs(4);

#[derive(Clone)]
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    address: SocketAddr,
}

impl Client {
    pub async fn connect(address: SocketAddr, tls: &TlsConnector) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let stream = tls.connect("localhost".try_into().unwrap(), stream).await?;
        let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(16 << 20)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(std::io::Error::other)?;
        tokio::spawn(connection);
        Ok(Self { sender, address })
    }

    pub async fn send(&self, method: &str, path: &str, body: impl Into<Bytes>) -> http::Response<Incoming> {
        self.send_as("application/json", method, path, body).await
    }

    async fn send_as(
        &self,
        content_type: &str,
        method: &str,
        path: &str,
        body: impl Into<Bytes>,
    ) -> http::Response<Incoming> {
        let request = Request::builder()
            .method(method)
            .uri(format!("https://{}{path}", self.address))
            .header("content-type", content_type)
            .body(Full::new(body.into()))
            .unwrap();
        self.sender.clone().send_request(request).await.unwrap()
    }

    /// Reads an answer to its end. Returns its code and length.
    pub async fn whole(&self, method: &str, path: &str, body: impl Into<Bytes>) -> (u16, usize) {
        measured(self.send(method, path, body).await).await
    }

    /// As [`Client::whole`], for a patch.
    pub async fn patch(&self, content_type: &str, path: &str, body: impl Into<Bytes>) -> (u16, usize) {
        measured(self.send_as(content_type, "PATCH", path, body).await).await
    }

    pub async fn text(&self, path: &str) -> String {
        text(self.send("GET", path, "").await).await
    }

    /// As [`Client::text`], in a representation that the client names.
    pub async fn accept(&self, representation: &str, path: &str) -> String {
        let request = Request::builder()
            .uri(format!("https://{}{path}", self.address))
            .header("accept", representation)
            .body(Full::default())
            .unwrap();
        text(self.sender.clone().send_request(request).await.unwrap()).await
    }
}

async fn text(answer: http::Response<Incoming>) -> String {
    String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

async fn measured(answer: http::Response<Incoming>) -> (u16, usize) {
    let code = answer.status().as_u16();
    let mut body = answer.into_body();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        length += frame.unwrap().data_ref().map_or(0, Bytes::len);
    }
    (code, length)
}

/// A pod of the size that pods have.
pub fn pod(name: &str) -> Value {
    let environment: Vec<Value> =
        (0..8).map(|n| json!({"name": format!("SETTING_{n}"), "value": "a value of some length"})).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "bench", "tier": "backend"}, "annotations": {"note": name}},
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "main", "image": "registry.example/app:1.0", "env": environment,
                "ports": [{"containerPort": 8080, "name": "http"}],
                "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}},
            }],
        },
    })
}

/// Makes the account that pods run as: no controller does it here.
pub async fn account(client: &Client) {
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    let path = "/api/v1/namespaces/default/serviceaccounts";
    let (code, _) = client.whole("POST", path, account.to_string()).await;
    assert!(code == 201 || code == 409, "{code}");
}

/// One request of many.
#[derive(Clone, Copy)]
pub struct Turn {
    /// Which of the clients it is.
    pub worker: usize,
    /// Number of earlier requests.
    pub number: u64,
}

/// The result of many clients' work.
pub struct Done {
    requests: u64,
    elapsed: Duration,
    /// Seconds of the server's processor.
    processor: f64,
}

impl Done {
    pub fn per_second(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }

    pub fn per_second_of_processor(&self) -> f64 {
        self.requests as f64 / self.processor
    }

    pub fn microseconds_of_processor(&self) -> f64 {
        self.processor * 1e6 / self.requests as f64
    }
}

/// Runs `work` with as many clients for a while.
pub async fn run<F>(
    server: &Server,
    connections: usize,
    streams: usize,
    work: impl Fn(Client, Turn) -> F + Clone + Send + 'static,
) -> Done
where
    F: Future<Output = ()> + Send,
{
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(server.client().await);
    }
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    let before = server.processor();
    let started = Instant::now();
    for worker in 0..connections * streams {
        let (client, done, work) = (clients[worker % connections].clone(), Arc::clone(&done), work.clone());
        tasks.spawn(async move {
            while started.elapsed() < FOR {
                let number = done.fetch_add(1, Ordering::Relaxed);
                work(client.clone(), Turn { worker, number }).await;
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    Done {
        requests: done.load(Ordering::Relaxed),
        elapsed: started.elapsed(),
        processor: server.processor() - before,
    }
}
