//! Connections from the server to kubelets, pods and services, on behalf of a request.

use crate::audit::Record;
use crate::http::{BoxError, Response};
use crate::server::ApiServer;
use crate::stream::{Guarded, Stream};
use crate::traffic::Account;
use crate::tunnel::TunnelError;
use ::http::request::Parts;
use ::http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use ferrite_api::Status;
use http_body::Body;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Where a request goes.
pub(crate) struct Place {
    pub address: IpAddr,
    pub port: u16,
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// The name that the far side's certificate must have; its address if none.
    pub server_name: Option<String>,
    /// The node whose kubelet is meant. Its agent's tunnel is used if there is one.
    pub kubelet_of: Option<String>,
}

impl Place {
    /// The address and the port, as a `Host` header has them.
    pub fn host(&self) -> String {
        SocketAddr::new(self.address, self.port).to_string()
    }
}

/// Nobody answered for too long.
#[derive(Debug, thiserror::Error)]
#[error("timed out")]
pub(crate) struct TimedOut;

/// The address is not one to send a client to.
#[derive(Debug, thiserror::Error)]
#[error("address not allowed")]
pub(super) struct NotAllowed;

/// Returns true if an address is neither loopback, link-local nor multicast. Objects name addresses, and
/// their authors must not reach through the server what they cannot reach themselves.
fn is_proxyable(address: IpAddr) -> bool {
    let address = address.to_canonical();
    let local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !address.is_loopback() && !address.is_unspecified() && !address.is_multicast() && !local
}

pub(super) fn check_address(address: IpAddr) -> Result<(), Status> {
    if is_proxyable(address) { Ok(()) } else { Err(Status::bad_request(NotAllowed.to_string())) }
}

/// Returns true for an address of a Service, which leads to endpoints that nobody has checked. The first one is this
/// server's own.
pub(super) fn is_service(server: &ApiServer, address: IpAddr) -> bool {
    let address = address.to_canonical();
    server.config.service_ranges.iter().any(|range| range.contains_host(address))
}

/// Returns true if a connection ends at this server: at its port, from an address to the same address.
fn is_to_ourselves(server: &ApiServer, stream: &TcpStream) -> std::io::Result<bool> {
    let (here, there) = (stream.local_addr()?, stream.peer_addr()?);
    let port = server.config.advertise.port();
    Ok(there.port() == port && here.ip().to_canonical() == there.ip().to_canonical())
}

/// Connects through the tunnel of the node's agent, or else directly. A tunnel is there where the agent's machine is, and
/// costs no attempt at an address that may be out of reach.
async fn connect(
    server: &ApiServer,
    account: Option<&Account>,
    place: &Place,
) -> Result<Box<dyn Stream>, BoxError> {
    let address = SocketAddr::new(place.address, place.port);
    let tunnelled = match &place.kubelet_of {
        Some(node) => server.tunnels.connect(account, node, address).await,
        None => server.tunnels.connect_pod(account, || server.registry.view(), address).await,
    };
    let tunnelled = tunnelled.map_err(|error| match error {
        TunnelError::TooMany(error) => BoxError::from(error),
        error => error.into(),
    })?;
    if let Some(stream) = tunnelled {
        return Ok(Box::new(stream));
    }
    let tcp = TcpStream::connect((place.address, place.port)).await?;
    // Nobody speaks to this server as the server.
    if is_to_ourselves(server, &tcp)? {
        return Err(NotAllowed.into());
    }
    tcp.set_nodelay(true)?;
    Ok(Box::new(tcp))
}

/// Sends one request on a connection of its own, which counts as `account`'s. The connection ends with the response, or with the stream
/// that it is upgraded to.
pub(crate) async fn send<B>(
    server: &ApiServer,
    account: Option<&Account>,
    place: &Place,
    mut request: Request<B>,
) -> Result<::http::Response<hyper::body::Incoming>, BoxError>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    request.headers_mut().entry(header::HOST).or_insert(HeaderValue::from_str(&place.host())?);
    let counted = account.map(Account::connect).transpose()?;
    let connect = async {
        if !is_proxyable(place.address) || is_service(server, place.address) {
            return Err(NotAllowed.into());
        }
        let transport: Box<dyn Stream> =
            Box::new(Guarded::new(connect(server, account, place).await?, counted));
        let stream: Box<dyn Stream> = match &place.tls {
            None => transport,
            Some(tls) => {
                let name = match &place.server_name {
                    Some(name) => ServerName::try_from(name.clone())?,
                    None => ServerName::IpAddress(place.address.into()),
                };
                Box::new(TlsConnector::from(Arc::clone(tls)).connect(name, transport).await?)
            }
        };
        Ok::<_, BoxError>(http1::handshake(TokioIo::new(stream)).await?)
    };
    let (mut sender, connection) = tokio::time::timeout(TIMEOUT, connect).await.map_err(|_| TimedOut)??;
    server.spawn(async move {
        // An error shows up on the response as well.
        let _ = connection.with_upgrades().await;
    });
    Ok(sender.send_request(request).await?)
}

/// Headers that make an upgrade; everything else stays between the client and us.
fn is_upgrade_header(name: &HeaderName) -> bool {
    let name = name.as_str();
    name == "connection"
        || name == "upgrade"
        || name.starts_with("sec-websocket-")
        || name.starts_with("x-stream-protocol-version")
        || name == "x-accepted-stream-protocol-versions"
}

pub(crate) fn copy_upgrade_headers(from: &HeaderMap, to: &mut HeaderMap) {
    for (name, value) in from {
        if is_upgrade_header(name) {
            to.append(name.clone(), value.clone());
        }
    }
}

/// Joins the client's connection with the one that has just been upgraded.
pub(crate) fn join(
    server: &ApiServer,
    parts: &mut Parts,
    mut response: ::http::Response<hyper::body::Incoming>,
) -> Result<Response, Status> {
    let Some(client_side) = parts.extensions.remove::<hyper::upgrade::OnUpgrade>() else {
        return Err(Status::bad_request("this connection cannot be upgraded; use HTTP/1.1"));
    };
    let far_side = hyper::upgrade::on(&mut response);
    let stopping = server.stopping();
    // The audit of the request is complete when the stream ends.
    let audit = parts.extensions.get::<Arc<Record>>().cloned();
    server.spawn(async move {
        let _audit = audit;
        let (Ok(client), Ok(far)) = tokio::join!(client_side, far_side) else { return };
        let (mut client, mut far) = (TokioIo::new(client), TokioIo::new(far));
        tokio::select! {
            // Either side may simply go away.
            _ = tokio::io::copy_bidirectional(&mut client, &mut far) => {}
            () = stopping.cancelled() => {}
        }
    });
    let mut answer = Response::new(crate::http::full(Bytes::new()));
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    copy_upgrade_headers(response.headers(), answer.headers_mut());
    Ok(answer)
}

/// For pods and services, whose certificates nobody here can know: as upstream, `https` to them is only private.
pub(super) fn unverified() -> Arc<rustls::ClientConfig> {
    Arc::new(ferrite_pki::unverified_client_config().expect("ring knows the default versions of TLS"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_sent_to_the_server_itself() {
        for address in [
            "127.0.0.1",
            "127.8.9.1",
            "::1",
            "::ffff:127.0.0.1",
            "0.0.0.0",
            "::",
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "fe80::1",
            "224.0.0.1",
            "ff02::1",
            "255.255.255.255",
        ] {
            assert!(check_address(address.parse().unwrap()).is_err(), "{address}");
        }
        for address in ["10.0.0.1", "192.0.2.1", "fd00::1"] {
            assert!(check_address(address.parse().unwrap()).is_ok(), "{address}");
        }
    }
}
