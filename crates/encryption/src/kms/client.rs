//! Calls to a key management service over its socket.

use super::proto::{
    DecryptRequest, DecryptResponse, EncryptRequest, EncryptResponse, StatusRequest, StatusResponse,
};
use crate::config::ConfigError;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use std::os::linux::net::SocketAddrExt;
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Answers are a few kilobytes; a longer one is an error.
const MAX_ANSWER: usize = 64 << 10;

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    #[error("rpc error: code = DeadlineExceeded desc = context deadline exceeded")]
    Timeout,
    #[error("rpc error: code = {code:?} desc = {message}")]
    Refused { code: tonic::Code, message: String },
}

/// Where the service listens.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Socket {
    File(PathBuf),
    /// A name of Linux' own, which no file has.
    Abstract(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Client {
    channel: Channel,
    timeout: Duration,
}

fn socket(endpoint: &str) -> Option<Socket> {
    let path = endpoint.strip_prefix("unix:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    match path.strip_prefix("/@").or_else(|| path.strip_prefix('@')) {
        Some(name) => Some(Socket::Abstract(name.to_owned())),
        None if path.starts_with('/') => Some(Socket::File(path.into())),
        None => None,
    }
}

async fn connect(socket: Socket) -> std::io::Result<TokioIo<UnixStream>> {
    let stream = match socket {
        Socket::File(path) => UnixStream::connect(path).await?,
        Socket::Abstract(name) => {
            let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            // Answered by the kernel at once: the other side does not have to accept.
            let stream = std::os::unix::net::UnixStream::connect_addr(&address)?;
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)?
        }
    };
    Ok(TokioIo::new(stream))
}

impl Client {
    /// Connects with the first call, and again when the service has restarted.
    pub fn new(name: &str, endpoint: &str, timeout: Duration) -> Result<Self, ConfigError> {
        let problem = |problem: &str| ConfigError::Kms { name: name.to_owned(), problem: problem.to_owned() };
        let socket = socket(endpoint)
            .ok_or_else(|| problem("the endpoint is not the path of a socket like unix:///run/kms.sock"))?;
        let connector = tower::service_fn(move |_: http::Uri| connect(socket.clone()));
        // The address is never resolved: the connector knows where to go.
        let endpoint = Endpoint::from_static("http://localhost").connect_timeout(timeout);
        Ok(Self { channel: endpoint.connect_with_connector_lazy(connector), timeout })
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A, CallError>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let refused = |status: tonic::Status| CallError::Refused {
            code: status.code(),
            message: status.message().chars().take(512).collect(),
        };
        let call = async {
            let mut grpc =
                tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER);
            grpc.ready().await.map_err(|error| CallError::Refused {
                code: tonic::Code::Unavailable,
                message: format!("connection error: {error}"),
            })?;
            let codec = tonic_prost::ProstCodec::<Q, A>::default();
            let answer = grpc.unary(tonic::Request::new(request), PathAndQuery::from_static(path), codec);
            answer.await.map(tonic::Response::into_inner).map_err(refused)
        };
        tokio::time::timeout(self.timeout, call).await.map_err(|_| CallError::Timeout)?
    }

    pub async fn status(&self) -> Result<StatusResponse, CallError> {
        self.call("/v2.KeyManagementService/Status", StatusRequest {}).await
    }

    pub async fn encrypt(&self, plaintext: Vec<u8>) -> Result<EncryptResponse, CallError> {
        let request = EncryptRequest { plaintext, uid: uuid::Uuid::new_v4().to_string() };
        self.call("/v2.KeyManagementService/Encrypt", request).await
    }

    pub async fn decrypt(&self, request: DecryptRequest) -> Result<DecryptResponse, CallError> {
        let request = DecryptRequest { uid: uuid::Uuid::new_v4().to_string(), ..request };
        self.call("/v2.KeyManagementService/Decrypt", request).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_sockets() {
        for (endpoint, expected) in [
            ("unix:///run/kms.sock", Some(Socket::File("/run/kms.sock".into()))),
            ("unix:/run/kms.sock", Some(Socket::File("/run/kms.sock".into()))),
            ("unix:///@kms", Some(Socket::Abstract("kms".into()))),
            ("unix://@kms", Some(Socket::Abstract("kms".into()))),
            ("unix://relative", None),
            ("tcp://a", None),
        ] {
            assert_eq!(socket(endpoint), expected, "{endpoint}");
        }
    }
}
