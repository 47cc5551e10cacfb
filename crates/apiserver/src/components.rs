//! ComponentStatuses: the health of the other parts of the control plane, found out when a client asks.
//!
//! A part that runs in this process reports by itself ([`crate::ApiServer::hosts`]). For any other part the server asks
//! the port that the part serves by default, as upstream does.

use crate::call::Call;
use crate::encode;
use crate::http::{BoxError, Response};
use crate::options::ListOptions;
use crate::registry::{Facts, Selectors};
use ::http::{Request, StatusCode, header};
use bytes::Bytes;
use ferrite_api::Status;
use ferrite_json::{Value, json};
use ferrite_store::Store;
use futures_util::future::join_all;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// A part of the control plane besides the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    Scheduler,
    ControllerManager,
}

impl Component {
    const ALL: [Self; 2] = [Self::Scheduler, Self::ControllerManager];

    fn name(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::ControllerManager => "controller-manager",
        }
    }

    /// The port on which a process of its own serves its health.
    fn port(self) -> u16 {
        match self {
            Self::Scheduler => 10259,
            Self::ControllerManager => 10257,
        }
    }
}

/// The name under which the store is listed, as upstream lists the first of its etcd servers.
const STORE: &str = "etcd-0";
/// Asking a port takes no longer than this.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The part of an answer that is read.
const LONGEST: usize = 10 * 1024;

type Check = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// The parts that run in this process.
#[derive(Default)]
pub(crate) struct Hosted(Mutex<BTreeMap<Component, Check>>);

impl Hosted {
    pub fn add(&self, component: Component, check: Check) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(component, check);
    }

    fn get(&self, component: Component) -> Option<Check> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&component).cloned()
    }
}

/// One component by its name.
pub(crate) async fn get(call: &Call) -> Result<Response, Status> {
    let name = call.name();
    let health = match Component::ALL.into_iter().find(|component| component.name() == name) {
        Some(component) => of_component(&call.server.hosted, component).await,
        None if name == STORE => of_store(&call.server.registry.store).await,
        None => return Err(Status::not_found("", "componentstatus", name)),
    };
    encode::object(200, &call.resource, &status(name, &health), call.representation, call.include_object()?)
}

pub(crate) async fn list(call: &Call) -> Result<Response, Status> {
    let options = ListOptions::parse(&call.query, false)?;
    let selectors = Selectors::parse(&call.resource, &options)?;
    let asked = join_all(Component::ALL.map(|component| async move {
        status(component.name(), &of_component(&call.server.hosted, component).await)
    }));
    let (mut all, store) = tokio::join!(asked, of_store(&call.server.registry.store));
    all.push(status(STORE, &store));
    all.retain(|object| selectors.matches(&Facts::of_name(ferrite_api::meta::name(object))));
    // The list has no version: nothing of it is stored.
    encode::values(&call.resource, all, json!({}), call.representation, call.include_object()?)
}

/// A message, as success or failure.
type Health = Result<String, String>;

async fn of_component(hosted: &Hosted, component: Component) -> Health {
    match hosted.get(component) {
        Some(check) => check().map(|()| "ok".to_owned()),
        None => probe(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), component.port())).await,
    }
}

async fn of_store(store: &Store) -> Health {
    store.check().await.map(|()| "ok".to_owned()).map_err(|error| error.to_string())
}

fn status(name: &str, health: &Health) -> Value {
    let (well, message) = match health {
        Ok(message) => ("True", message),
        Err(message) => ("False", message),
    };
    json!({
        "kind": "ComponentStatus",
        "apiVersion": "v1",
        "metadata": {"name": name},
        "conditions": [{"type": "Healthy", "status": well, "message": message}],
    })
}

/// Asks for `/healthz`. As upstream, the certificate is not checked: only this machine is asked, and nothing is sent.
async fn probe(address: SocketAddr) -> Health {
    let url = format!("https://{address}/healthz");
    let refused = |error: &dyn std::fmt::Display| format!("Get {url:?}: {error}");
    match tokio::time::timeout(TIMEOUT, ask(address)).await {
        Err(_) => Err(refused(&"context deadline exceeded")),
        Ok(Err(error)) => Err(refused(&error)),
        Ok(Ok((code, body))) if code.is_success() => Ok(body),
        Ok(Ok((_, body))) => Err(body),
    }
}

async fn ask(address: SocketAddr) -> Result<(StatusCode, String), BoxError> {
    let tcp = TcpStream::connect(address).await.map_err(|error| dial_error(address, &error))?;
    let tls = TlsConnector::from(Arc::new(ferrite_pki::unverified_client_config()?));
    let stream = tls.connect(ServerName::IpAddress(address.ip().into()), tcp).await?;
    let (mut sender, connection) = http1::handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await?;
    let request =
        Request::get("/healthz").header(header::HOST, address.to_string()).body(Empty::<Bytes>::new())?;
    let exchange = async {
        let answer = sender.send_request(request).await?;
        let code = answer.status();
        let body = Limited::new(answer.into_body(), LONGEST).collect().await?.to_bytes();
        Ok::<_, BoxError>((code, String::from_utf8_lossy(&body).into_owned()))
    };
    // The connection is driven here and ends with the exchange.
    let mut connection = std::pin::pin!(connection);
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        biased;
        done = &mut exchange => done,
        _ = &mut connection => exchange.await,
    }
}

/// A connection that could not be made, in upstream's words.
fn dial_error(address: SocketAddr, error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => {
            format!("dial tcp {address}: connect: connection refused")
        }
        _ => format!("dial tcp {address}: connect: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_that_nobody_serves_is_not_well() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let expected =
            format!("Get \"https://{address}/healthz\": dial tcp {address}: connect: connection refused");
        assert_eq!(probe(address).await, Err(expected));
    }

    #[tokio::test]
    async fn a_hosted_component_reports_by_itself() {
        let hosted = Hosted::default();
        hosted.add(Component::Scheduler, Arc::new(|| Ok(())));
        hosted.add(Component::ControllerManager, Arc::new(|| Err("it has stopped".into())));
        assert_eq!(of_component(&hosted, Component::Scheduler).await, Ok("ok".into()));
        assert_eq!(of_component(&hosted, Component::ControllerManager).await, Err("it has stopped".into()));
    }
}
