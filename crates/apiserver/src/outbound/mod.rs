//! Calls from the server to others: webhooks, conversions, aggregated servers.
//!
//! One client for all of them. A [`Destination`] has the address of a call and the trusted authorities;
//! [`Outbound::call`] sends one
//! request and reads the whole answer. Connections are kept per address and shared over HTTP/2 where the other side has
//! it. Whatever the other side does, a call ends with its deadline and holds no more memory than it may.

mod connection;
mod credentials;
mod destination;
mod resolve;
mod token_file;
mod trust;

pub(crate) use credentials::Credentials;
pub(crate) use destination::{Destination, DestinationError};

use crate::registry::View;
use crate::tunnel::{TunnelError, Tunnels};
use ::http::{HeaderValue, Method, Request, header};
use bytes::{Bytes, BytesMut};
use connection::{Connections, Origin, Sender};
use http_body_util::{BodyExt, Full};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// All answers that are being read may take this much together, beside the first [`FREE`] bytes of each.
const BUDGET: usize = 128 << 20;
/// The part of it that answers of one destination may take: others have room even if it never finishes its answers. The
/// largest answer of a call fits.
const SHARE: usize = 32 << 20;
const FREE: usize = 64 << 10;
const KIB: usize = 1 << 10;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("{0}")]
    Destination(String),
    #[error("service {0:?} not found")]
    NoService(String),
    #[error("unsupported service type {0:?}")]
    ServiceType(String),
    #[error("no service port {port} found for service {service:?}")]
    NoPort { service: String, port: u16 },
    #[error("no endpoints available for service {0:?}")]
    NoEndpoints(String),
    #[error("dial tcp: lookup {host}: {}", in_go_words(source))]
    Lookup { host: String, source: std::io::Error },
    #[error("dial tcp {address}: connect: {}", in_go_words(source))]
    Connect { address: std::net::SocketAddr, source: std::io::Error },
    #[error("dial tcp {address}: {source}")]
    Tunnel { address: std::net::SocketAddr, source: TunnelError },
    #[error("tls: failed to verify certificate: {0}")]
    Tls(std::io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("context deadline exceeded")]
    Timeout,
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
    #[error("too many large answers are being read at once")]
    Busy,
}

/// A request to somebody else.
pub(crate) struct Call<'a> {
    pub destination: &'a Destination,
    pub body: Bytes,
    /// Added to the destination's own query.
    pub query: &'a str,
    pub deadline: Instant,
    /// The largest answer that is read.
    pub limit: usize,
}

/// A document to read.
pub(crate) struct Fetch<'a> {
    pub destination: &'a Destination,
    pub deadline: Instant,
    /// The largest document that is read.
    pub limit: usize,
}

/// An answer, read to its end.
pub(crate) struct Answered {
    pub code: u16,
    pub body: Bytes,
}

/// The client.
pub(crate) struct Outbound {
    connections: Connections,
    budget: Arc<Semaphore>,
}

impl Outbound {
    /// Calls to pods go through these tunnels where there are any.
    pub fn new(tunnels: Arc<Tunnels>) -> Self {
        Self { connections: Connections::new(tunnels), budget: Arc::new(Semaphore::new(BUDGET / KIB)) }
    }

    /// Sends a POST of JSON and reads the answer. Redirects are answers as any other.
    pub async fn call(&self, view: &View, call: Call<'_>) -> Result<Answered, CallError> {
        let deadline = call.deadline;
        let sent = self.send(view, &Method::POST, call);
        tokio::time::timeout_at(deadline, sent).await.map_err(|_| CallError::Timeout)?
    }

    /// Reads a document. Redirects are answers as any other.
    pub async fn get(&self, view: &View, fetch: Fetch<'_>) -> Result<Answered, CallError> {
        let Fetch { destination, deadline, limit } = fetch;
        let call = Call { destination, body: Bytes::new(), query: "", deadline, limit };
        let sent = self.send(view, &Method::GET, call);
        tokio::time::timeout_at(deadline, sent).await.map_err(|_| CallError::Timeout)?
    }

    async fn send(&self, view: &View, method: &Method, call: Call<'_>) -> Result<Answered, CallError> {
        let addresses = call.destination.addresses(view).await?;
        let mut last = None;
        for address in addresses {
            let origin = Origin { destination: Arc::clone(&call.destination.shared), address };
            // A connection that was kept may have ended since. Then the request is sent on a new one.
            for fresh in [false, true] {
                let sender = match self.connections.get(view, &origin, fresh).await {
                    Ok(sender) => sender,
                    Err(error) => {
                        last = Some(error);
                        break;
                    }
                };
                let kept = sender.was_kept;
                match self.exchange(&origin, sender, method, &call).await {
                    Err(CallError::Http(error)) if kept && is_stale(method, &error) => continue,
                    other => return other,
                }
            }
        }
        Err(last.unwrap_or(CallError::Timeout))
    }

    async fn exchange(
        &self,
        origin: &Origin,
        mut sender: Sender,
        method: &Method,
        call: &Call<'_>,
    ) -> Result<Answered, CallError> {
        let authorization = call.destination.shared.credentials.authorization().await;
        let request = self.request(&sender, method, call, authorization)?;
        let response = sender.send(request).await?;
        let code = response.status().as_u16();
        let body = self.read(response.into_body(), call).await?;
        self.connections.put_back(origin, sender);
        Ok(Answered { code, body })
    }

    fn request(
        &self,
        sender: &Sender,
        method: &Method,
        call: &Call<'_>,
        authorization: Option<HeaderValue>,
    ) -> Result<Request<Full<Bytes>>, CallError> {
        let bad = |error: &dyn std::fmt::Display| CallError::Destination(error.to_string());
        let destination = &call.destination.shared;
        let target = destination.target(call.query);
        // HTTP/2 names the authority in the request's address, HTTP/1 in a header.
        let uri = match sender.is_shared() {
            true => format!("https://{}{target}", destination.authority),
            false => target,
        };
        let mut request = Request::builder()
            .method(method)
            .uri(uri)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, */*")
            .header(header::USER_AGENT, "kube-apiserver-admission")
            .body(Full::new(call.body.clone()))
            .map_err(|error| bad(&error))?;
        let headers = request.headers_mut();
        if !sender.is_shared() {
            headers.insert(header::HOST, HeaderValue::from_str(&destination.authority).map_err(|e| bad(&e))?);
        }
        if let Some(authorization) = authorization {
            headers.insert(header::AUTHORIZATION, authorization);
        }
        Ok(request)
    }

    async fn read(&self, mut body: hyper::body::Incoming, call: &Call<'_>) -> Result<Bytes, CallError> {
        let limit = call.limit;
        let mut read = BytesMut::new();
        let mut held = Vec::new();
        let mut paid = FREE;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            if read.len() + data.len() > limit {
                return Err(CallError::TooLarge(limit));
            }
            while read.len() + data.len() > paid {
                for budget in [&call.destination.shared.share, &self.budget] {
                    held.push(take(budget)?);
                }
                paid += FREE;
            }
            read.extend_from_slice(&data);
        }
        Ok(read.freeze())
    }

    /// Ends all connections.
    pub async fn close(&self) {
        self.connections.close().await;
    }
}

/// An error of the system as Go words it.
fn in_go_words(error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

/// The room that the answers of one destination may take together.
fn share() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(SHARE / KIB))
}

/// Takes the room for the next [`FREE`] bytes of an answer.
fn take(budget: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, CallError> {
    let permits = u32::try_from(FREE / KIB).unwrap_or(u32::MAX);
    Arc::clone(budget).try_acquire_many_owned(permits).map_err(|_| CallError::Busy)
}

/// Returns true if a kept connection ended before the other side can have seen the request, or if seeing it twice does no
/// harm: a webhook is not called twice for one request.
fn is_stale(method: &Method, error: &hyper::Error) -> bool {
    error.is_canceled() || error.is_closed() || (*method == Method::GET && error.is_incomplete_message())
}

/// The deadline of a call that may take `timeout`.
pub(crate) fn until(timeout: Duration) -> Instant {
    Instant::now() + timeout
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_destination_leaves_room_for_others() {
        let (all, first, second) = (Arc::new(Semaphore::new(BUDGET / KIB)), share(), share());
        let mut held = Vec::new();
        while let (Ok(own), Ok(common)) = (take(&first), take(&all)) {
            held.push((own, common));
        }
        assert_eq!(held.len(), SHARE / FREE);
        assert!(take(&second).is_ok() && take(&all).is_ok());
    }
}
