//! A small HTTP client for probes and hooks: one request, one connection, certificates not verified.

use super::redirect;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Bytes of an answer that are read at all.
const MAX_BODY: usize = 10 * 1024;

/// As upstream: requests that are sent for one, following redirects.
const MAX_REQUESTS: usize = 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HttpRequest {
    pub tls: bool,
    pub host: String,
    pub port: u16,
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl HttpRequest {
    pub(crate) fn url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}{}", authority(&self.host, self.port), self.path)
    }
}

#[derive(Debug)]
pub(crate) struct HttpAnswer {
    pub status: u16,
    pub body: Vec<u8>,
}

pub(crate) fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// A failed connection in the words people know from upstream.
pub(crate) fn dial_error(host: &str, port: u16, error: &io::Error) -> String {
    let what = match error.kind() {
        io::ErrorKind::ConnectionRefused => "connect: connection refused".to_string(),
        io::ErrorKind::HostUnreachable => "connect: no route to host".to_string(),
        io::ErrorKind::NetworkUnreachable => "connect: network is unreachable".to_string(),
        _ => error.to_string(),
    };
    format!("dial tcp {}: {what}", authority(host, port))
}

/// A request got no answer. The messages are those of upstream's client where people know them.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")]
    Timeout,
    /// As [`dial_error`] words it.
    #[error("{0}")]
    Dial(String),
    #[error(transparent)]
    Host(#[from] rustls::pki_types::InvalidDnsNameError),
    #[error(transparent)]
    Tls(io::Error),
    #[error("http: server gave HTTP response to HTTPS client")]
    NotTls,
    #[error("stopped after {0} redirects")]
    Redirects(usize),
    #[error(transparent)]
    Location(#[from] redirect::LocationError),
    #[error(transparent)]
    Request(#[from] hyper::http::Error),
    #[error(transparent)]
    Exchange(#[from] hyper::Error),
}

/// Sends the request. An answer of any status is an answer. Redirects within the host are followed.
pub(crate) async fn get(request: &HttpRequest, limit: Duration) -> Result<HttpAnswer, HttpError> {
    match tokio::time::timeout(limit, follow(request)).await {
        Ok(result) => result,
        Err(_) => Err(HttpError::Timeout),
    }
}

async fn follow(first: &HttpRequest) -> Result<HttpAnswer, HttpError> {
    let mut request = first.clone();
    for _ in 0..MAX_REQUESTS {
        let (answer, location) = exchange(&request).await?;
        match redirect::next(&request, answer.status, location.as_deref())? {
            // As upstream: the answer of a host that sends the client to another is the answer.
            Some(next) if next.host == first.host => request = next,
            _ => return Ok(answer),
        }
    }
    Err(HttpError::Redirects(MAX_REQUESTS))
}

/// One exchange. The second value is where the answer points to.
async fn exchange(request: &HttpRequest) -> Result<(HttpAnswer, Option<String>), HttpError> {
    let stream = TcpStream::connect((request.host.as_str(), request.port))
        .await
        .map_err(|e| HttpError::Dial(dial_error(&request.host, request.port, &e)))?;
    if !request.tls {
        return over(stream, request).await;
    }
    let name = ServerName::try_from(request.host.clone())?;
    let connecting = connector().connect(name, Sniffed { stream, begin: Vec::new() });
    let stream = connecting.into_fallible().await.map_err(|(error, sniffed)| {
        if sniffed.begin == PLAIN_BEGIN { HttpError::NotTls } else { HttpError::Tls(error) }
    })?;
    over(stream, request).await
}

/// The beginning of an answer without TLS.
const PLAIN_BEGIN: &[u8] = b"HTTP/";

/// A connection that remembers how the other side began.
struct Sniffed {
    stream: TcpStream,
    begin: Vec<u8>,
}

impl AsyncRead for Sniffed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let missing = PLAIN_BEGIN.len().saturating_sub(self.begin.len());
        self.begin.extend(buffer.filled()[before..].iter().take(missing));
        read
    }
}

impl AsyncWrite for Sniffed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

async fn over<S>(stream: S, request: &HttpRequest) -> Result<(HttpAnswer, Option<String>), HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let mut builder = hyper::Request::get(&request.path);
    let mut seen_host = false;
    for (name, value) in &request.headers {
        seen_host |= name.eq_ignore_ascii_case("host");
        builder = builder.header(name, value);
    }
    if !seen_host {
        builder = builder.header("Host", authority(&request.host, request.port));
    }
    if !request.headers.iter().any(|(n, _)| n.eq_ignore_ascii_case("user-agent")) {
        builder = builder.header("User-Agent", ferrite_api::version::PROBE_USER_AGENT);
    }
    let outgoing = builder.header("Connection", "close").body(Empty::<Bytes>::new())?;
    let exchange = async {
        let answer = sender.send_request(outgoing).await?;
        let status = answer.status().as_u16();
        let location = answer.headers().get(hyper::header::LOCATION);
        let location = location.map(|to| String::from_utf8_lossy(to.as_bytes()).into_owned());
        // Longer bodies are cut: nobody reads them.
        let body = Limited::new(answer.into_body(), MAX_BODY).collect().await;
        let body = body.map(|b| b.to_bytes().to_vec()).unwrap_or_default();
        Ok((HttpAnswer { status, body }, location))
    };
    tokio::pin!(exchange);
    tokio::pin!(connection);
    tokio::select! {
        answer = &mut exchange => answer,
        // The connection may end right after the answer was handed over.
        _ = &mut connection => exchange.await,
    }
}

/// Probes check that a server answers, not its identity: as upstream, its certificate is not verified.
fn connector() -> TlsConnector {
    static CONFIG: std::sync::LazyLock<Arc<rustls::ClientConfig>> = std::sync::LazyLock::new(|| {
        Arc::new(
            ferrite_pki::unverified_client_config().expect("ring supports the default protocol versions"),
        )
    });
    TlsConnector::from(CONFIG.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn an_answer_is_read_and_headers_are_sent() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut seen = vec![0; 4096];
            let n = stream.read(&mut seen).await.unwrap();
            stream.write_all(b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno").await.unwrap();
            String::from_utf8_lossy(&seen[..n]).into_owned()
        });
        let request = HttpRequest {
            tls: false,
            host: "127.0.0.1".into(),
            port,
            path: "/healthz".into(),
            headers: vec![("X-A".into(), "b".into())],
        };
        let answer = get(&request, Duration::from_secs(5)).await.unwrap();
        assert_eq!((answer.status, answer.body.as_slice()), (503, b"no".as_slice()));
        let seen = server.await.unwrap().to_lowercase();
        assert!(seen.starts_with("get /healthz http/1.1") && seen.contains("x-a: b"), "{seen}");
        let refused = get(&HttpRequest { port: 1, ..request }, Duration::from_secs(5)).await.unwrap_err();
        assert_eq!(refused.to_string(), "dial tcp 127.0.0.1:1: connect: connection refused");
    }

    #[tokio::test]
    async fn redirects_are_followed_within_the_host() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut seen = vec![0; 4096];
                let n = stream.read(&mut seen).await.unwrap();
                let seen = String::from_utf8_lossy(&seen[..n]).into_owned();
                let answer = match seen.split(' ').nth(1).unwrap() {
                    "/here" => "302 Found\r\nLocation: /broken".to_owned(),
                    "/broken" => "503 No".to_owned(),
                    "/away" => "302 Found\r\nLocation: http://127.0.0.2:1/".to_owned(),
                    _ => "302 Found\r\nLocation: /round".to_owned(),
                };
                let answer = format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let ask = |path: &str| {
            let path = path.to_owned();
            let request = HttpRequest { tls: false, host: "127.0.0.1".into(), port, path, headers: vec![] };
            async move { get(&request, Duration::from_secs(5)).await }
        };
        assert_eq!(ask("/here").await.unwrap().status, 503, "a health check behind a redirect counts");
        assert_eq!(ask("/away").await.unwrap().status, 302);
        assert_eq!(ask("/round").await.unwrap_err().to_string(), "stopped after 10 redirects");
        server.abort();
    }
}
