//! Manifests behind a URL, asked for now and then.

use super::manifest::{self, MAX_BYTES, Origin};
use super::{LocalPods, Source};
use crate::clock::Clock;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;

/// A whole request, as upstream.
const LIMIT: Duration = Duration::from_secs(10);

/// Why a URL cannot be a source.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error(
        "staticPodURL {0:?} is not like http://192.0.2.1/pods.yaml; https is not supported, use a directory"
    )]
    Form(String),
    #[error("staticPodURLHeader {0:?} is no HTTP header")]
    Header(String),
}

/// One answer that could not be used.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("no answer in time")]
    Time(#[from] tokio::time::error::Elapsed),
    #[error("{0}")]
    Connect(#[from] std::io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("{0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    #[error("the server answers {0}")]
    Status(StatusCode),
    #[error("the answer is empty")]
    Empty,
    #[error("{0}")]
    Manifest(#[from] manifest::ManifestError),
}

pub(crate) struct UrlSource {
    url: Uri,
    place: String,
    headers: Vec<(hyper::header::HeaderName, hyper::header::HeaderValue)>,
    node: String,
    period: Duration,
    clock: Clock,
}

impl UrlSource {
    pub(crate) fn new(
        url: &str,
        headers: &[(String, String)],
        node: &str,
        period: Duration,
        clock: Clock,
    ) -> Result<Self, UrlError> {
        let parsed: Uri = url.parse().map_err(|_| UrlError::Form(url.to_owned()))?;
        if parsed.scheme_str() != Some("http") || parsed.host().is_none_or(str::is_empty) {
            return Err(UrlError::Form(url.to_owned()));
        }
        let header = |(name, value): &(String, String)| {
            let bad = || UrlError::Header(name.clone());
            Ok((name.parse().map_err(|_| bad())?, value.parse().map_err(|_| bad())?))
        };
        let headers = headers.iter().map(header).collect::<Result<Vec<_>, UrlError>>()?;
        Ok(Self { place: url.to_owned(), url: parsed, headers, node: node.to_owned(), period, clock })
    }

    /// Asks again and again. A server that does not answer takes no pod away.
    pub(crate) async fn run(self, pods: Arc<LocalPods>) {
        let mut complaint = String::new();
        loop {
            match self.read().await {
                Ok(wanted) => {
                    complaint.clear();
                    pods.set(Source::Url, wanted);
                }
                Err(FetchError::Empty) => pods.set(Source::Url, Vec::new()),
                Err(error) => {
                    let problem = error.to_string();
                    if problem != complaint {
                        tracing::error!(url = self.place, problem, "cannot read static pods");
                        complaint = problem;
                    }
                }
            }
            tokio::time::sleep(self.period).await;
        }
    }

    async fn read(&self) -> Result<Vec<k8s_openapi::api::core::v1::Pod>, FetchError> {
        let data = tokio::time::timeout(LIMIT, self.fetch()).await??;
        if data.is_empty() {
            return Err(FetchError::Empty);
        }
        let origin =
            Origin { source: Source::Url, place: &self.place, node: &self.node, seen: self.clock.now() };
        Ok(manifest::decode(&data, &origin)?)
    }

    async fn fetch(&self) -> Result<Bytes, FetchError> {
        let host = self.url.host().unwrap_or_default().trim_matches(['[', ']']);
        let stream = TcpStream::connect((host, self.url.port_u16().unwrap_or(80))).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.uri_mut() = match self.url.path_and_query() {
            Some(path) => Uri::from(path.clone()),
            None => Uri::from_static("/"),
        };
        if let Some(Ok(host)) = self.url.authority().map(|a| a.as_str().parse()) {
            request.headers_mut().insert(hyper::header::HOST, host);
        }
        for (name, value) in &self.headers {
            request.headers_mut().append(name.clone(), value.clone());
        }
        let answer = async {
            let response = sender.send_request(request).await?;
            if response.status() != StatusCode::OK {
                return Err(FetchError::Status(response.status()));
            }
            let limit = usize::try_from(MAX_BYTES).unwrap_or(usize::MAX);
            let body = Limited::new(response.into_body(), limit).collect().await;
            body.map(|body| body.to_bytes()).map_err(FetchError::Body)
        };
        let mut answer = std::pin::pin!(answer);
        tokio::select! {
            answer = &mut answer => answer,
            // The server may close the connection with the end of its answer.
            broken = connection => match broken {
                Ok(()) => answer.await,
                Err(e) => Err(e.into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[test]
    fn only_plain_urls_are_sources() {
        let source = |url: &str, headers: &[(String, String)]| {
            UrlSource::new(url, headers, "n", Duration::from_secs(20), Clock::System).map(drop)
        };
        assert_eq!(source("http://192.0.2.1:8080/pods", &[]), Ok(()));
        for url in ["https://192.0.2.1/", "file:///etc/passwd", "/x", "", "http://"] {
            assert_eq!(source(url, &[]), Err(UrlError::Form(url.to_owned())));
        }
        let bad = [("a b".to_owned(), "x".to_owned())];
        assert_eq!(source("http://192.0.2.1/", &bad), Err(UrlError::Header("a b".into())));
    }

    #[tokio::test]
    async fn pods_are_read_and_a_broken_server_takes_none_away() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/pods?x=1", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let item = "{metadata: {name: web}, spec: {containers: [{name: c, image: i}]}}";
            let list = format!("apiVersion: v1\nkind: PodList\nitems: [{item}]\n");
            let mut head = Vec::new();
            for answer in [
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{list}", list.len()),
                "HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n".to_owned(),
                "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{{{".to_owned(),
            ] {
                let (mut stream, _) = listener.accept().await.unwrap();
                head.clear();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            // A third request means that the second response was processed.
            drop(listener.accept().await);
            String::from_utf8(head).unwrap()
        });
        let headers = [("X-Node".to_owned(), "n".to_owned())];
        let source = UrlSource::new(&url, &headers, "n", Duration::from_millis(1), Clock::System).unwrap();
        let pods = Arc::new(LocalPods::new([Source::Url]));
        let task = tokio::spawn(source.run(pods.clone()));
        pods.ready().await;
        let head = server.await.unwrap().to_lowercase();
        assert!(head.starts_with("get /pods?x=1 ") && head.contains("x-node: n"), "{head}");
        assert_eq!(pods.list()[0].metadata.name.as_deref(), Some("web-n"));
        task.abort();
    }
}
