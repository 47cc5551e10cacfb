//! The members of a cluster: one is used until it fails, then the next.

use super::{ConnectError, EtcdOptions};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// Files to speak TLS with, as `--etcd-cafile`, `--etcd-certfile` and `--etcd-keyfile` name them. They are read again for
/// every connection, so that renewed certificates count.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    pub ca: PathBuf,
    /// Certificate and key of this client.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Which requests may be made again with another member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    /// It changes nothing.
    Always,
    /// Only when it certainly did not reach anybody: the outcome of a change that was cut off is unknown.
    IfNotSent,
}

#[derive(Debug)]
pub(super) struct Members {
    channels: Vec<Channel>,
    current: AtomicUsize,
    timeout: Duration,
}

/// Between two rounds through all members.
const PAUSE: Duration = Duration::from_millis(200);

impl Members {
    pub fn new(options: &EtcdOptions) -> Result<Self, ConnectError> {
        if options.servers.is_empty() {
            return Err(ConnectError::NoMembers);
        }
        // Files that cannot be used are an error at the start.
        let tls = options.tls.clone().map(TlsSource::open).transpose()?.map(Arc::new);
        let channels =
            options.servers.iter().map(|url| channel(url, tls.as_ref())).collect::<Result<_, _>>()?;
        Ok(Self { channels, current: AtomicUsize::new(0), timeout: options.timeout })
    }

    /// The member in use, and its number.
    pub fn current(&self) -> (usize, Channel) {
        let at = self.current.load(Ordering::Relaxed) % self.channels.len();
        (at, self.channels[at].clone())
    }

    /// The member `failed` did not answer: use another, unless somebody has noticed already.
    pub fn next(&self, failed: usize) {
        let next = (failed + 1) % self.channels.len();
        let _ = self.current.compare_exchange(failed, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Makes a request with one member after the other, until one answers or the time is over.
    pub async fn call<T, F>(&self, repeat: Repeat, make: impl Fn(Channel) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let deadline = tokio::time::Instant::now() + self.timeout;
        // One member that hangs must not use up the time of all.
        let share = self.timeout / u32::try_from(self.channels.len().min(4)).unwrap_or(1);
        let mut tried = 0;
        loop {
            let (at, channel) = self.current();
            let limit = match repeat {
                Repeat::Always => deadline.min(tokio::time::Instant::now() + share),
                Repeat::IfNotSent => deadline,
            };
            let answer = tokio::time::timeout_at(limit, make(channel)).await;
            let status = match answer {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("no answer in time"),
            };
            if !is_members_fault(&status) {
                return Err(status);
            }
            self.next(at);
            tried += 1;
            let again = repeat == Repeat::Always || was_not_sent(&status);
            if !again || tokio::time::Instant::now() + PAUSE >= deadline {
                return Err(status);
            }
            if tried % self.channels.len() == 0 {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Returns true if another member could succeed.
fn is_members_fault(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled)
}

/// Returns true if the request certainly was not carried out.
fn was_not_sent(status: &Status) -> bool {
    if status.message() == "etcdserver: no leader" {
        return true;
    }
    let source = std::error::Error::source(status);
    std::iter::successors(source, |error| error.source()).any(|error| {
        // No connection, or one that turned out to have ended while nobody used it.
        error.is::<tonic::ConnectError>()
            || error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled)
    })
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// The settings of TLS as the files are now.
#[derive(Debug)]
struct TlsSource {
    files: TlsFiles,
    /// Of the last files that could be used: a file may be in the middle of being written.
    usable: Mutex<Arc<rustls::ClientConfig>>,
}

impl TlsSource {
    fn open(files: TlsFiles) -> Result<Self, ConnectError> {
        let usable = Mutex::new(client_config(&files)?);
        Ok(Self { files, usable })
    }

    async fn config(self: Arc<Self>) -> Arc<rustls::ClientConfig> {
        let source = Arc::clone(&self);
        let read = tokio::task::spawn_blocking(move || client_config(&source.files)).await;
        let mut usable = self.usable.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(Ok(config)) => *usable = config,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the files for TLS with etcd cannot be used; going on with the earlier ones");
            }
            // The runtime is ending.
            Err(_) => {}
        }
        Arc::clone(&usable)
    }
}

fn channel(url: &str, tls: Option<&Arc<TlsSource>>) -> Result<Channel, ConnectError> {
    let bad = |problem: &str| ConnectError::Url { url: url.to_owned(), problem: problem.to_owned() };
    let uri: http::Uri = url.parse().map_err(|_| bad("it cannot be read"))?;
    let host = uri.host().ok_or_else(|| bad("it has no host"))?.to_owned();
    let port = uri.port_u16().unwrap_or(2379);
    let tls = match (uri.scheme_str(), tls) {
        (Some("http"), _) => None,
        (Some("https"), Some(tls)) => Some(Arc::clone(tls)),
        (Some("https"), None) => return Err(bad("https needs a CA file")),
        _ => return Err(bad("it has to begin with http:// or https://")),
    };
    let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
        .map_err(|_| bad("its host is no name"))?;
    // TLS is the connector's affair, so that the endpoint itself is always plain.
    let endpoint = Endpoint::from_shared(format!("http://{host}:{port}"))
        .map_err(|_| bad("it cannot be read"))?
        .connect_timeout(Duration::from_secs(3))
        // A member that is gone without a word is noticed. More often than this, etcd calls it a flood.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    let connector = tower::service_fn(move |_: http::Uri| {
        let (host, name, tls) = (host.trim_matches(['[', ']']).to_owned(), name.clone(), tls.clone());
        async move {
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let stream: Box<dyn Stream> = match tls {
                None => Box::new(stream),
                Some(source) => {
                    Box::new(TlsConnector::from(source.config().await).connect(name, stream).await?)
                }
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    Ok(endpoint.connect_with_connector_lazy(connector))
}

fn client_config(files: &TlsFiles) -> Result<Arc<rustls::ClientConfig>, ConnectError> {
    let bad = |path: &Path, problem: String| ConnectError::Tls { path: path.display().to_string(), problem };
    let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, ConnectError> {
        let read = CertificateDer::pem_file_iter(path).map_err(|e| bad(path, e.to_string()))?;
        read.collect::<Result<_, _>>().map_err(|e| bad(path, e.to_string()))
    };
    let mut roots = rustls::RootCertStore::empty();
    // The bundle of a system may have certificates that are of no use here.
    if roots.add_parsable_certificates(certificates(&files.ca)?).0 == 0 {
        return Err(bad(&files.ca, "it has no certificate of an authority".into()));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| bad(&files.ca, e.to_string()))?
        .with_root_certificates(roots);
    let mut config = match &files.client {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(certificate)?;
            let read = PrivateKeyDer::from_pem_file(key).map_err(|e| bad(key, e.to_string()))?;
            builder.with_client_auth_cert(chain, read).map_err(|e| bad(key, e.to_string()))?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}
