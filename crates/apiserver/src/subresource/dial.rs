//! Connections from the server to kubelets, pods and services, on behalf of a request.

use crate::call::Call;
use crate::http::{Answer, BoxError};
use ::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use bytes::Bytes;
use ferrite_api::Status;
use http_body::Body;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Where a request goes.
pub(super) struct Place {
    pub address: IpAddr,
    pub port: u16,
    pub tls: Option<Arc<rustls::ClientConfig>>,
}

impl Place {
    /// The address and the port, as a `Host` header has them.
    pub fn host(&self) -> String {
        std::net::SocketAddr::new(self.address, self.port).to_string()
    }
}

/// Nobody answered for too long.
#[derive(Debug, thiserror::Error)]
#[error("timed out")]
pub(super) struct TimedOut;

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// Sends one request on a connection of its own. The connection ends with the answer, or with what it becomes.
pub(super) async fn send<B>(
    call: &Call,
    place: &Place,
    mut request: Request<B>,
) -> Result<Response<hyper::body::Incoming>, BoxError>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    request.headers_mut().entry(header::HOST).or_insert(HeaderValue::from_str(&place.host())?);
    let connect = async {
        let tcp = TcpStream::connect((place.address, place.port)).await?;
        tcp.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match &place.tls {
            None => Box::new(tcp),
            Some(tls) => {
                let name = ServerName::IpAddress(place.address.into());
                Box::new(TlsConnector::from(Arc::clone(tls)).connect(name, tcp).await?)
            }
        };
        Ok::<_, BoxError>(http1::handshake(TokioIo::new(stream)).await?)
    };
    let (mut sender, connection) = tokio::time::timeout(TIMEOUT, connect).await.map_err(|_| TimedOut)??;
    call.server.spawn(async move {
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

pub(super) fn copy_upgrade_headers(from: &HeaderMap, to: &mut HeaderMap) {
    for (name, value) in from {
        if is_upgrade_header(name) {
            to.append(name.clone(), value.clone());
        }
    }
}

/// Joins the client's connection with the one that has just been upgraded.
pub(super) fn join(call: &mut Call, mut response: Response<hyper::body::Incoming>) -> Result<Answer, Status> {
    let Some(client_side) = call.parts.extensions.remove::<hyper::upgrade::OnUpgrade>() else {
        return Err(Status::bad_request("this connection cannot be upgraded; use HTTP/1.1"));
    };
    let far_side = hyper::upgrade::on(&mut response);
    let stopping = call.server.stopping();
    call.server.spawn(async move {
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
