//! One request, carried to an endpoint and back.

use crate::backends::{Endpoints, Protocol, order};
use crate::body::{Payload, Streamed};
use crate::headers::{self, BadRequest, Origin, host_of, wants_websocket};
use crate::io::Guarded;
use crate::limits::{RequestPlace, Slot};
use crate::metrics;
use crate::pool::{ConnectError, Connection, Lease};
use crate::serve::Proxy;
use crate::table::{Backend, Found};
use http::header::{ALLOW, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Endpoints that are tried when connections fail.
const ATTEMPTS: usize = 3;

/// Why the proxy answers a request itself.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Bad(#[from] BadRequest),
    #[error("no rule matches this host and path")]
    NoRoute,
    #[error("the proxy does not know its routes yet")]
    NotReady,
    #[error("too many requests at once")]
    Busy,
    #[error("{0}")]
    Unavailable(String),
    #[error("the server behind the proxy cannot be reached")]
    Unreachable(#[source] ConnectError),
    #[error("the server behind the proxy did not answer as HTTP does")]
    Broken(#[source] hyper::Error),
    #[error("the server behind the proxy switched to a protocol that nobody asked for")]
    Switched,
    #[error("the server behind the proxy did not answer in time")]
    Late,
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Bad(BadRequest::Loop) => StatusCode::LOOP_DETECTED,
            Self::Bad(BadRequest::Connect) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Bad(_) => StatusCode::BAD_REQUEST,
            Self::NoRoute => StatusCode::NOT_FOUND,
            Self::NotReady | Self::Busy | Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unreachable(_) | Self::Broken(_) | Self::Switched => StatusCode::BAD_GATEWAY,
            Self::Late => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    fn response(&self) -> Response<Payload> {
        let mut response = Response::new(Payload::text(format!("{self}\n")));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        if matches!(self, Self::Bad(BadRequest::Connect)) {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"));
        }
        response
    }
}

/// Answers a request of a client. The connection's place stays taken while a WebSocket lasts.
pub(crate) async fn answer(
    proxy: Arc<Proxy>,
    request: Request<Incoming>,
    origin: Origin,
    slot: Arc<Slot>,
) -> Response<Payload> {
    let response = match Box::pin(route(&proxy, request, origin, slot)).await {
        Ok(response) => response,
        Err(refusal) => {
            tracing::debug!(client = %origin.client, %refusal, "the ingress proxy answers itself");
            refusal.response()
        }
    };
    metrics::answered(response.status());
    response
}

async fn route(
    proxy: &Arc<Proxy>,
    mut request: Request<Incoming>,
    origin: Origin,
    slot: Arc<Slot>,
) -> Result<Response<Payload>, Refusal> {
    let host = host_of(&request)?;
    let table = proxy.tables.current().ok_or(Refusal::NotReady)?;
    let backend = match table.find(&host, request.uri().path()) {
        Found::Backend(backend) => backend,
        Found::Nothing => return Err(Refusal::NoRoute),
        Found::Unsupported => {
            return Err(Refusal::Unavailable("the backend of this path is no Service".into()));
        }
    };
    drop(table);
    let place = slot.request(&proxy.limits).ok_or(Refusal::Busy)?;
    let websocket = wants_websocket(request.headers(), request.method(), request.version());
    let client = websocket.then(|| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    headers::forwarded(&mut parts.headers, &parts.uri, origin, websocket)?;
    let endpoints = match &backend.endpoints {
        Ok(endpoints) => endpoints,
        Err(why) => return Err(Refusal::Unavailable(why.to_string())),
    };
    let protocol = if websocket { Protocol::Http1 } else { endpoints.protocol };
    let outgoing = Outgoing::new(parts, body, protocol, proxy);
    let (response, lease) = send(proxy, &backend, endpoints, protocol, outgoing, origin).await?;
    finish(proxy, response, lease, client, Held { place, _slot: slot })
}

/// The resources that a request occupies.
struct Held {
    place: RequestPlace,
    _slot: Arc<Slot>,
}

/// A request that goes on, until it is sent.
struct Outgoing {
    request: Request<Payload>,
    /// A copy of a request that has no body and may be sent twice without harm.
    again: Option<Request<()>>,
    /// Closes when the body has been sent; None without a body.
    sent: Option<oneshot::Receiver<()>>,
}

impl Outgoing {
    fn new(parts: Parts, body: Incoming, protocol: Protocol, proxy: &Proxy) -> Self {
        let mut request = Request::new(());
        *request.method_mut() = parts.method;
        *request.headers_mut() = parts.headers;
        *request.uri_mut() = target(&parts.uri, request.headers(), protocol);
        *request.version_mut() = match protocol {
            Protocol::Http1 => Version::HTTP_11,
            Protocol::Http2 => Version::HTTP_2,
        };
        if protocol == Protocol::Http2 {
            request.headers_mut().remove(http::header::HOST);
        }
        let empty = body.is_end_stream();
        let safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
        let again = (empty && safe).then(|| request.clone());
        let (payload, sent) = match empty {
            true => (Payload::empty(), None),
            false => {
                let (body, sent) = Streamed::request(body, proxy.limits.request_body);
                (Payload::Streamed(body), Some(sent))
            }
        };
        Self { request: request.map(|()| payload), again, sent }
    }
}

/// The target of a request that goes on: only the path for HTTP/1.1, a whole address for HTTP/2.
fn target(uri: &Uri, headers: &http::HeaderMap, protocol: Protocol) -> Uri {
    let path = uri.path_and_query().cloned().unwrap_or_else(|| http::uri::PathAndQuery::from_static("/"));
    if protocol == Protocol::Http2 {
        let host =
            headers.get(http::header::HOST).map(|value| value.as_bytes()).filter(|host| !host.is_empty());
        let built = Uri::builder()
            .scheme("http")
            .authority(host.unwrap_or(b"ingress.invalid"))
            .path_and_query(path.clone())
            .build();
        if let Ok(whole) = built {
            return whole;
        }
    }
    Uri::from(path)
}

/// Sends the request to the first endpoint that takes a connection.
async fn send(
    proxy: &Arc<Proxy>,
    backend: &Backend,
    endpoints: &Endpoints,
    protocol: Protocol,
    mut outgoing: Outgoing,
    origin: Origin,
) -> Result<(Response<Incoming>, Option<Lease>), Refusal> {
    let mut failure = None;
    let turn = backend.next_turn();
    for endpoint in order(endpoints, turn, origin.client.ip().to_canonical()).take(ATTEMPTS) {
        if protocol == Protocol::Http1
            && let Some(kept) = proxy.pool.take(endpoint)
        {
            match send_kept(proxy, endpoint, kept, outgoing).await? {
                Ok((response, lease)) => return Ok((response, Some(lease))),
                Err(back) => outgoing = *back,
            }
        }
        match proxy.pool.connect(endpoint, protocol).await {
            Err(error) => {
                tracing::debug!(%endpoint, %error, "an endpoint takes no connection");
                failure = Some(error);
            }
            Ok(Connection::Http1(mut sender)) => {
                let limit = proxy.limits.response;
                let answer = sender.send_request(outgoing.request);
                let response = in_time(answer, outgoing.sent, limit).await?.map_err(Refusal::Broken)?;
                return Ok((response, Some(Lease::new(&proxy.pool, endpoint, sender))));
            }
            Ok(Connection::Http2(mut sender)) => {
                let limit = proxy.limits.response;
                let answer = sender.send_request(outgoing.request);
                let response = in_time(answer, outgoing.sent, limit).await?.map_err(Refusal::Broken)?;
                return Ok((response, None));
            }
        }
    }
    Err(failure.map_or_else(|| Refusal::Unavailable("no endpoint".into()), Refusal::Unreachable))
}

/// The answer, or the request again: the connection had ended before, and the request may go elsewhere.
type Sent = Result<(Response<Incoming>, Lease), Box<Outgoing>>;

/// Sends the request over a connection that has carried others, and that the endpoint may be closing right now.
async fn send_kept(
    proxy: &Arc<Proxy>,
    endpoint: SocketAddr,
    mut sender: hyper::client::conn::http1::SendRequest<Payload>,
    outgoing: Outgoing,
) -> Result<Sent, Refusal> {
    let Outgoing { request, again, mut sent } = outgoing;
    let answer = sender.try_send_request(request);
    let limit = proxy.limits.response;
    // The channel is needed again if the request comes back unsent; without a body there is none.
    let mut failed: TrySendError<Request<Payload>> = match in_time_of(answer, sent.as_mut(), limit).await? {
        Ok(response) => return Ok(Ok((response, Lease::new(&proxy.pool, endpoint, sender)))),
        Err(failed) => failed,
    };
    if let Some(request) = failed.take_message() {
        return Ok(Err(Box::new(Outgoing { request, again, sent })));
    }
    match again {
        Some(request) if failed.error().is_incomplete_message() || failed.error().is_canceled() => {
            let (copy, request) = (request.clone(), request.map(|()| Payload::empty()));
            Ok(Err(Box::new(Outgoing { request, again: Some(copy), sent: None })))
        }
        _ => Err(Refusal::Broken(failed.into_error())),
    }
}

/// Waits for the answer; the time runs from the moment when the whole request is out.
async fn in_time<T>(
    answer: impl Future<Output = T>,
    mut sent: Option<oneshot::Receiver<()>>,
    limit: std::time::Duration,
) -> Result<T, Refusal> {
    in_time_of(answer, sent.as_mut(), limit).await
}

async fn in_time_of<T>(
    answer: impl Future<Output = T>,
    sent: Option<&mut oneshot::Receiver<()>>,
    limit: std::time::Duration,
) -> Result<T, Refusal> {
    let late = async {
        if let Some(sent) = sent {
            // Nothing is ever sent over it.
            let _ = sent.await;
        }
        tokio::time::sleep(limit).await;
    };
    tokio::select! {
        answer = answer => Ok(answer),
        () = late => Err(Refusal::Late),
    }
}

/// The answer as the client gets it.
fn finish(
    proxy: &Arc<Proxy>,
    mut response: Response<Incoming>,
    lease: Option<Lease>,
    client: Option<OnUpgrade>,
    held: Held,
) -> Result<Response<Payload>, Refusal> {
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let client = client.ok_or(Refusal::Switched)?;
        let endpoint = hyper::upgrade::on(&mut response);
        let (mut parts, _) = response.into_parts();
        headers::answered(&mut parts.headers, true);
        let limits = Arc::clone(&proxy.limits);
        proxy.scope.spawn(async move {
            let (Ok(client), Ok(endpoint)) = tokio::join!(client, endpoint) else { return };
            let guarded = |io| Guarded::new(TokioIo::new(io), Some(limits.tunnel), limits.write);
            // However it ends, both ends see it.
            let _ = tokio::io::copy_bidirectional(&mut guarded(client), &mut guarded(endpoint)).await;
            drop((held, lease));
        });
        return Ok(Response::from_parts(parts, Payload::empty()));
    }
    let (mut parts, body) = response.into_parts();
    headers::answered(&mut parts.headers, false);
    parts.version = Version::HTTP_11;
    let body = Streamed::answer(body, proxy.limits.response_body, lease, held.place);
    Ok(Response::from_parts(parts, Payload::Streamed(body)))
}
