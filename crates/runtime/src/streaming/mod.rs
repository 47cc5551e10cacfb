//! The streaming server: exec, attach and port-forward over an upgraded connection.
//!
//! The kubelet asks for a URL and tunnels its client's bytes there. The server listens on loopback only;
//! a URL is random, good for one connection and for one minute.

mod budget;
mod dictionary;
mod forward;
mod session;
mod spdy;
pub(crate) mod spdy_codec;
mod status;
mod websocket;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrite_cri::v1::{AttachRequest, ExecRequest};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::service::Inner;

/// Lifetime of a URL.
const LIFETIME: Duration = Duration::from_secs(60);
/// Most URLs waiting to be used; the oldest go first.
const MAX_WAITING: usize = 1024;
/// Connections that have not shown a URL yet; the oldest go first, so that nobody can keep others out.
const MAX_STRANGERS: usize = 256;
/// Longest wait for the request headers of a connection.
const HEADER_LIMIT: Duration = Duration::from_secs(10);
/// Streams in use at the same time.
const MAX_SESSIONS: usize = 512;
/// Of these, streams of one container or of one sandbox's ports, and those of all pods of one namespace: nobody can take
/// them all.
const MAX_SHARE: usize = 64;
const MAX_NAMESPACE_SHARE: usize = 128;

/// The action behind a URL.
#[derive(Debug, Clone)]
pub(crate) enum Action {
    Exec(ExecRequest),
    Attach(AttachRequest),
    /// The ports matter only to clients that cannot name them later.
    Forward {
        sandbox: String,
        ports: Vec<u16>,
    },
}

/// The URLs given out.
pub(crate) struct Tickets {
    address: SocketAddr,
    waiting: Mutex<HashMap<String, (Instant, Action)>>,
    sessions: Arc<Semaphore>,
    /// Places of each container, sandbox and namespace that has streams.
    shares: Mutex<HashMap<String, Weak<Semaphore>>>,
}

impl Action {
    /// Whose share of the streams this takes from.
    fn of(&self) -> &str {
        match self {
            Self::Exec(request) => &request.container_id,
            Self::Attach(request) => &request.container_id,
            Self::Forward { sandbox, .. } => sandbox,
        }
    }
}

impl Tickets {
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            waiting: Mutex::default(),
            sessions: Arc::new(Semaphore::new(MAX_SESSIONS)),
            shares: Mutex::default(),
        }
    }

    /// The places for streams of one container or sandbox. They are forgotten with the last stream.
    fn share(&self, of: &str) -> Arc<Semaphore> {
        self.places(of.to_owned(), MAX_SHARE)
    }

    /// The places for streams of all pods of one namespace.
    fn namespace_share(&self, namespace: &str) -> Arc<Semaphore> {
        // No ID has a colon.
        self.places(format!("namespace:{namespace}"), MAX_NAMESPACE_SHARE)
    }

    fn places(&self, of: String, count: usize) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = shares.get(&of).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Semaphore::new(count));
        shares.insert(of, Arc::downgrade(&share));
        share
    }

    /// A fresh URL for the action.
    pub fn issue(&self, action: Action) -> String {
        let token: String = rand::random::<[u8; 16]>().iter().map(|byte| format!("{byte:02x}")).collect();
        let kind = match &action {
            Action::Exec(_) => "exec",
            Action::Attach(_) => "attach",
            Action::Forward { .. } => "portforward",
        };
        let now = Instant::now();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|_, (issued, _)| now.duration_since(*issued) < LIFETIME);
        if waiting.len() >= MAX_WAITING
            && let Some(oldest) =
                waiting.iter().min_by_key(|(_, (issued, _))| *issued).map(|(key, _)| key.clone())
        {
            waiting.remove(&oldest);
        }
        waiting.insert(token.clone(), (now, action));
        format!("http://{}/{kind}/{token}", self.address)
    }

    /// Returns the action behind the path. A path works once.
    fn redeem(&self, path: &str) -> Option<Action> {
        let token = path.rsplit('/').next()?;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (issued, action) = waiting.remove(token)?;
        (issued.elapsed() < LIFETIME).then_some(action)
    }
}

/// Binds the server; `serve` runs it.
pub(crate) fn bind(address: SocketAddr) -> io::Result<(std::net::TcpListener, SocketAddr)> {
    if !address.ip().is_loopback() {
        let message = format!("the streaming server must listen on loopback, not on {}", address.ip());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Accepts connections until the runtime closes.
pub(crate) async fn serve(inner: Weak<Inner>, listener: std::net::TcpListener) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let mut strangers: VecDeque<(CancellationToken, CancellationToken)> = VecDeque::new();
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection to the streaming server");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        strangers.retain(|(_, done)| !done.is_cancelled());
        if strangers.len() >= MAX_STRANGERS
            && let Some((evict, _)) = strangers.pop_front()
        {
            evict.cancel();
        }
        let (evict, done) = (CancellationToken::new(), CancellationToken::new());
        strangers.push_back((evict.clone(), done.clone()));
        let Some(strong) = inner.upgrade() else { return };
        let (weak, closing) = (inner.clone(), strong.closing().clone());
        strong.tasks().spawn(async move {
            let service = hyper::service::service_fn(move |request| {
                let inner = weak.clone();
                async move { Ok::<_, std::convert::Infallible>(answer(inner, request)) }
            });
            let _done = done.drop_guard();
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_LIMIT)
                .serve_connection(TokioIo::new(socket), service)
                .with_upgrades();
            tokio::select! {
                _ = connection => {}
                () = evict.cancelled() => {}
                () = closing.cancelled() => {}
            }
        });
    }
}

fn refuse(status: StatusCode, message: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(message.to_owned() + "\n")));
    *response.status_mut() = status;
    response
}

/// Every value of a header, also of those given several times or with commas.
fn values<'a>(headers: &'a HeaderMap, name: &'a str) -> impl Iterator<Item = &'a str> {
    let all = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    all.flat_map(|value| value.split(',')).map(str::trim).filter(|value| !value.is_empty())
}

/// The first protocol the client names that we speak.
fn choose<'a>(headers: &'a HeaderMap, name: &'a str, known: &[&'static str]) -> Option<&'static str> {
    values(headers, name).find_map(|wanted| known.iter().copied().find(|k| k.eq_ignore_ascii_case(wanted)))
}

fn answer(inner: Weak<Inner>, mut request: Request<Incoming>) -> Response<Full<Bytes>> {
    let Some(strong) = inner.upgrade() else {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "the runtime is closing");
    };
    if !matches!(*request.method(), Method::GET | Method::POST) {
        return refuse(StatusCode::METHOD_NOT_ALLOWED, "only GET and POST are served");
    }
    let headers = request.headers().clone();
    let upgrade = values(&headers, "upgrade").next().unwrap_or_default().to_ascii_lowercase();
    if upgrade != "websocket" && upgrade != "spdy/3.1" {
        return refuse(StatusCode::BAD_REQUEST, "an upgrade to SPDY/3.1 or websocket is required");
    }
    let Ok(session) = strong.tickets().sessions.clone().try_acquire_owned() else {
        return refuse(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many streams are in use; close some or try again later",
        );
    };
    let Some(action) = strong.tickets().redeem(request.uri().path()) else {
        return refuse(StatusCode::NOT_FOUND, "the URL is unknown, was used before or is too old");
    };
    let namespace = strong.namespace(&action).unwrap_or_default();
    let tickets = strong.tickets();
    let own = tickets.share(action.of()).try_acquire_owned();
    let (Ok(own), Ok(of_namespace)) = (own, tickets.namespace_share(&namespace).try_acquire_owned()) else {
        return refuse(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many streams of this pod or its namespace are in use; close some or try again later",
        );
    };
    let forward = matches!(action, Action::Forward { .. });
    let mut response = Response::new(Full::new(Bytes::new()));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let out = response.headers_mut();
    out.insert(header::CONNECTION, header::HeaderValue::from_static("Upgrade"));

    let protocol = if upgrade == "websocket" {
        let known = if forward { websocket::FORWARD_PROTOCOLS } else { websocket::PROTOCOLS };
        let named = choose(&headers, "sec-websocket-protocol", known);
        let is_unnamed = values(&headers, "sec-websocket-protocol").next().is_none();
        // As upstream: a client that names none talks the first protocol that there was.
        let unnamed = if forward { known[1] } else { websocket::OLDEST };
        let Some(protocol) = named.or(is_unnamed.then_some(unnamed)) else {
            return refuse(StatusCode::BAD_REQUEST, "none of the WebSocket protocols offered is supported");
        };
        if let Action::Forward { ports, .. } = &action
            && protocol != websocket::FORWARD_SPDY
            && !(1..=websocket::MAX_PORTS).contains(&ports.len())
        {
            let message =
                format!("between 1 and {} query parameters \"port\" are required", websocket::MAX_PORTS);
            return refuse(StatusCode::BAD_REQUEST, &message);
        }
        let Some(key) = headers.get("sec-websocket-key") else {
            return refuse(StatusCode::BAD_REQUEST, "Sec-WebSocket-Key is missing");
        };
        let accept = tokio_tungstenite::tungstenite::handshake::derive_accept_key(key.as_bytes());
        let Ok(accept) = accept.parse() else {
            return refuse(StatusCode::BAD_REQUEST, "Sec-WebSocket-Key is malformed");
        };
        out.insert(header::UPGRADE, header::HeaderValue::from_static("websocket"));
        out.insert("sec-websocket-accept", accept);
        if named.is_some() {
            out.insert("sec-websocket-protocol", header::HeaderValue::from_static(protocol));
        }
        protocol
    } else {
        let known = if forward { spdy::FORWARD_PROTOCOLS } else { spdy::PROTOCOLS };
        let named = choose(&headers, "x-stream-protocol-version", known);
        // The oldest clients name none.
        let none_named = values(&headers, "x-stream-protocol-version").next().is_none();
        let Some(protocol) = named.or(none_named.then(|| known[known.len() - 1])) else {
            return refuse(StatusCode::FORBIDDEN, "none of the stream protocols offered is supported");
        };
        out.insert(header::UPGRADE, header::HeaderValue::from_static("SPDY/3.1"));
        out.insert("x-stream-protocol-version", header::HeaderValue::from_static(protocol));
        protocol
    };

    let upgraded = hyper::upgrade::on(&mut request);
    let closing = strong.closing().clone();
    let worker = strong.clone();
    strong.tasks().spawn(async move {
        let _places = (session, own, of_namespace);
        let Ok(upgraded) = upgraded.await else { return };
        let io = TokioIo::new(upgraded);
        let work = async {
            match (upgrade.as_str(), action) {
                ("websocket", Action::Forward { sandbox, .. }) if protocol == websocket::FORWARD_SPDY => {
                    websocket::forward(&worker, io, &sandbox).await;
                }
                ("websocket", Action::Forward { sandbox, ports }) => {
                    websocket::forward_channels(&worker, io, &sandbox, &ports, protocol).await;
                }
                ("websocket", action) => websocket::serve(&worker, io, action, protocol).await,
                (_, Action::Forward { sandbox, .. }) => spdy::forward(&worker, io, &sandbox).await,
                (_, action) => spdy::serve(&worker, io, action, protocol).await,
            }
        };
        tokio::select! {
            () = work => {}
            () = closing.cancelled() => {}
        }
    });
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_good_once() {
        let tickets = Tickets::new(([127, 0, 0, 1], 7).into());
        let url = tickets.issue(Action::Forward { sandbox: "s".into(), ports: Vec::new() });
        assert!(url.starts_with("http://127.0.0.1:7/portforward/"));
        assert!(tickets.redeem(&url).is_some());
        assert!(tickets.redeem(&url).is_none());
        assert!(tickets.redeem("/portforward/guess").is_none());
        for _ in 0..MAX_WAITING + 10 {
            tickets.issue(Action::Forward { sandbox: "s".into(), ports: Vec::new() });
        }
        assert_eq!(tickets.waiting.lock().unwrap().len(), MAX_WAITING);
    }

    #[test]
    fn nobody_takes_more_than_a_share() {
        let tickets = Tickets::new(([127, 0, 0, 1], 7).into());
        let place = |of: &str| tickets.share(of).try_acquire_owned().ok();
        let mut held: Vec<_> = (0..MAX_SHARE).map(|_| place("one").unwrap()).collect();
        assert!(place("one").is_none(), "the share is used up");
        assert!(place("other").is_some(), "others have their own");
        held.pop();
        held.push(place("one").expect("a place that was given back"));
        assert!(place("one").is_none());
        held.clear();
        assert!(place("third").is_some());
        assert!(tickets.shares.lock().unwrap().len() <= 1, "shares without streams are forgotten");
        let place = |namespace: &str| tickets.namespace_share(namespace).try_acquire_owned().ok();
        let _held: Vec<_> = (0..MAX_NAMESPACE_SHARE).map(|_| place("a").unwrap()).collect();
        assert!(place("a").is_none(), "more pods have no more streams");
        assert!(place("b").is_some());
    }

    #[test]
    fn only_loopback() {
        assert!(bind(([0, 0, 0, 0], 0).into()).is_err());
        assert!(bind(([127, 0, 0, 1], 0).into()).is_ok());
    }

    #[test]
    fn protocols_in_the_clients_order() {
        let mut headers = HeaderMap::new();
        headers.append("p", "x, v5.channel.k8s.io".parse().unwrap());
        headers.append("p", "v4.channel.k8s.io".parse().unwrap());
        assert_eq!(
            choose(&headers, "p", &["v4.channel.k8s.io", "v5.channel.k8s.io"]),
            Some("v5.channel.k8s.io")
        );
        assert_eq!(choose(&headers, "p", &["v1.channel.k8s.io"]), None);
    }
}
