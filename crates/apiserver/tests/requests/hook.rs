//! A webhook server on loopback, as a test needs it.

use base64::Engine;
use bytes::Bytes;
use ferrite_json::{Value, json};
use ferrite_pki::{Authority, Purpose, Subject};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// A request that the server got.
#[derive(Clone)]
pub struct Seen {
    pub path: String,
    /// Host and port as the request names them.
    pub authority: String,
    pub query: String,
    pub version: http::Version,
    pub headers: HeaderMap,
    pub body: Value,
}

/// An answer of the server.
pub enum Says {
    Json(Value),
    Bytes(u16, &'static str, Vec<u8>),
    /// Nothing, ever.
    Nothing,
    /// A body that begins and never ends.
    Trickle,
}

type Answers = dyn Fn(&Seen) -> Says + Send + Sync;

pub struct HookServer {
    port: u16,
    authority: Authority,
    seen: Arc<Mutex<Vec<Seen>>>,
    connections: Arc<Mutex<usize>>,
    _tasks: JoinSet<()>,
}

impl HookServer {
    pub async fn start(answers: impl Fn(&Seen) -> Says + Send + Sync + 'static) -> Self {
        Self::start_with(&["h2", "http/1.1"], answers).await
    }

    pub async fn start_with(
        protocols: &[&str],
        answers: impl Fn(&Seen) -> Says + Send + Sync + 'static,
    ) -> Self {
        let authority = Authority::create("hooks").expect("an authority");
        let subject =
            Subject { names: vec!["127.0.0.1".into(), "localhost".into()], ..Subject::client("hook", None) };
        let identity = authority.issue(&subject, Purpose::Server).expect("a certificate");
        let tls = ferrite_pki::anonymous_server_config(&identity, protocols).expect("a configuration");
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let connections: Arc<Mutex<usize>> = Arc::default();
        let (log, count, answers): (_, _, Arc<Answers>) =
            (Arc::clone(&seen), Arc::clone(&connections), Arc::new(answers));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut serving = JoinSet::new();
            loop {
                let Ok((tcp, _)) = listener.accept().await else { return };
                *count.lock().expect("a lock") += 1;
                let (acceptor, log, answers) = (acceptor.clone(), Arc::clone(&log), Arc::clone(&answers));
                serving.spawn(async move {
                    let Ok(stream) = acceptor.accept(tcp).await else { return };
                    let service = service_fn(move |request: Request<Incoming>| {
                        answer(request, Arc::clone(&log), Arc::clone(&answers))
                    });
                    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { port, authority, seen, connections, _tasks: tasks }
    }

    pub fn url(&self, path: &str) -> String {
        format!("https://127.0.0.1:{}{path}", self.port)
    }

    /// The `clientConfig` of a path.
    pub fn config(&self, path: &str) -> Value {
        let bundle = base64::engine::general_purpose::STANDARD.encode(self.authority.certificate());
        json!({"url": self.url(path), "caBundle": bundle})
    }

    /// The authority of its certificate, as PEM.
    pub fn authority(&self) -> &str {
        self.authority.certificate()
    }

    /// The requests that it got under a path.
    pub fn seen(&self, path: &str) -> Vec<Seen> {
        self.seen.lock().expect("a lock").iter().filter(|seen| seen.path == path).cloned().collect()
    }

    pub fn connections(&self) -> usize {
        *self.connections.lock().expect("a lock")
    }
}

type HookBody = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

async fn answer(
    request: Request<Incoming>,
    log: Arc<Mutex<Vec<Seen>>>,
    answers: Arc<Answers>,
) -> Result<Response<HookBody>, Infallible> {
    let (parts, body) = request.into_parts();
    let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let seen = Seen {
        path: parts.uri.path().to_owned(),
        authority: match (parts.uri.authority(), parts.headers.get(http::header::HOST)) {
            (Some(authority), _) => authority.to_string(),
            (None, host) => host.and_then(|host| host.to_str().ok()).unwrap_or_default().to_owned(),
        },
        query: parts.uri.query().unwrap_or_default().to_owned(),
        version: parts.version,
        headers: parts.headers,
        body: ferrite_json::from_slice(&bytes).unwrap_or(Value::Null),
    };
    log.lock().expect("a lock").push(seen.clone());
    let response = Response::builder();
    let response = match answers(&seen) {
        Says::Json(value) => response
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(value.to_string())).boxed_unsync()),
        Says::Bytes(code, location, bytes) => response
            .status(code)
            .header("location", location)
            .body(Full::new(Bytes::from(bytes)).boxed_unsync()),
        Says::Nothing => std::future::pending().await,
        Says::Trickle => {
            let first = futures_util::stream::iter([Ok(http_body::Frame::data(Bytes::from_static(b"{")))]);
            let never = futures_util::stream::pending();
            let body = http_body_util::StreamBody::new(futures_util::StreamExt::chain(first, never));
            response.body(BodyExt::boxed_unsync(body))
        }
    };
    Ok(response.expect("a response"))
}

/// The UID of the question.
pub fn uid(seen: &Seen) -> Value {
    seen.body.pointer("/request/uid").cloned().unwrap_or_default()
}

fn review(response: Value) -> Says {
    Says::Json(json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "response": response}))
}

pub fn allow(seen: &Seen) -> Says {
    review(json!({"uid": uid(seen), "allowed": true}))
}

pub fn deny(seen: &Seen, why: &str) -> Says {
    review(
        json!({"uid": uid(seen), "allowed": false, "status": {"message": why, "code": 403, "reason": "Forbidden"}}),
    )
}

/// Admits with further members of the response.
pub fn allow_with(seen: &Seen, more: Value) -> Says {
    let mut response = json!({"uid": uid(seen), "allowed": true});
    response.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
    review(response)
}

pub fn patch(seen: &Seen, patch: &Value) -> Says {
    let encoded = base64::engine::general_purpose::STANDARD.encode(patch.to_string());
    allow_with(seen, json!({"patch": encoded, "patchType": "JSONPatch"}))
}
