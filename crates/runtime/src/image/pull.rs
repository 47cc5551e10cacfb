//! Images from registries.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use oci_client::Reference as RegistryReference;
use oci_client::client::{
    BlobResponse, Certificate, CertificateEncoding, Client, ClientConfig, ClientProtocol,
};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use oci_spec::image::ImageIndex;
use serde::Deserialize;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::arriving::{Arriving, Piece};
use super::digest::chain_ids;
use super::registries::{Endpoint, HostSettings};
use super::store::{MAX_METADATA, NewImage, parse_config, parse_manifest};
use super::tar_reader::read_error;
use super::{Digest, ImageError, ImageRecord, ImageStore, Platform, Reference};

/// Manifests and indexes in both dialects.
const ACCEPTED: &[&str] = &[
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
/// Layers downloaded and unpacked at the same time, as Docker's default.
const PARALLEL_LAYERS: usize = 3;
/// Pieces of a blob that wait to be read.
const QUEUE: usize = 32;
/// An index may point to an index; more levels are nonsense.
const MAX_INDEX_DEPTH: usize = 3;

/// Who pulls.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Auth {
    /// Nobody in particular.
    #[default]
    Anonymous,
    /// A name and a password, sent to the registry or to the token server it names.
    Basic { username: String, password: String },
    /// A token for the registry itself.
    Bearer(String),
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Basic { .. } => "Basic(redacted)",
            Self::Bearer(_) => "Bearer(redacted)",
        })
    }
}

/// How registries are reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Registries (`host` or `host:port`) spoken to without TLS. Loopback addresses always are.
    pub plain_http: Vec<String>,
    /// Certificates in PEM form to trust besides the machine's own.
    pub ca_certificates: Vec<Vec<u8>>,
    /// Hosts to ask before a registry, in order; `*` stands for registries without mirrors of their own.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// How particular hosts are spoken to, registries and mirrors alike.
    pub hosts: BTreeMap<String, HostSettings>,
    /// How long to wait for a connection.
    pub connect_timeout: Duration,
    /// How long to wait for the next piece of an answer.
    pub read_timeout: Duration,
}

impl Default for RegistryConfig {
    fn default() -> Self {
        Self {
            plain_http: Vec::new(),
            ca_certificates: Vec::new(),
            mirrors: BTreeMap::new(),
            hosts: BTreeMap::new(),
            connect_timeout: Duration::from_secs(30),
            read_timeout: Duration::from_secs(60),
        }
    }
}

/// What happens during a pull or an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgressEvent {
    /// The name was resolved to a manifest.
    Resolved { digest: Digest },
    /// So much of a blob is here.
    Downloading { digest: Digest, done: u64, total: u64 },
    /// A layer was here already.
    Present { chain_id: Digest },
    /// A layer is unpacked.
    Unpacked { chain_id: Digest },
}

/// Told about [`ProgressEvent`]s; must not block.
pub type Progress = Arc<dyn Fn(ProgressEvent) + Send + Sync>;

/// At most one download per blob at a time; whoever comes second finds it done.
#[derive(Debug, Default)]
pub(crate) struct Flights(Mutex<HashMap<Digest, Arc<Semaphore>>>);

impl Flights {
    fn of(&self, digest: &Digest) -> Arc<Semaphore> {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        flights.retain(|_, flight| Arc::strong_count(flight) > 1);
        Arc::clone(flights.entry(digest.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))))
    }
}

/// What every version of a manifest has in common.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Versioned {
    schema_version: u32,
    manifests: Option<serde::de::IgnoredAny>,
}

/// One pull's connection.
struct Registry {
    client: Client,
    auth: RegistryAuth,
    /// Whom we talk to: the registry of the name, or a mirror of it.
    host: String,
    reference: Reference,
}

impl ImageStore {
    /// Brings an image from its registry. Finished blobs and layers that are here already are not
    /// fetched again, also those of a pull that was interrupted. Built-in images are never looked for
    /// elsewhere.
    pub async fn pull(
        self: &Arc<Self>,
        reference: &Reference,
        auth: Auth,
        platform: &Platform,
        config: &RegistryConfig,
        progress: Progress,
    ) -> Result<ImageRecord, ImageError> {
        let known = self.status(&reference.to_string())?;
        match known {
            Some(known) if reference.is_built_in() || reference.digest().is_some() => return Ok(known),
            None if reference.is_built_in() => return Err(ImageError::BuiltIn(reference.to_string())),
            _ => {}
        }
        let (registry, (top, manifest)) = Registry::find(reference, auth, platform, config).await?;
        progress(ProgressEvent::Resolved { digest: top.clone() });
        let manifest_digest = Digest::of(&manifest);
        let ((id, config_size), layers) = parse_manifest(&manifest)?;

        let metadata = self.lease([manifest_digest.clone(), id.clone()]);
        let store = Arc::clone(self);
        blocking(move || store.content.put(&manifest)).await?;
        if !self.content.has(&id) {
            let read = |blob: &mut dyn Read| io::copy(blob, &mut io::sink()).map(drop).map_err(read_error);
            self.receive(&registry, (&id, config_size), true, None, read).await?;
        }
        let (_, diff_ids) = parse_config(&self.content.read(&id, MAX_METADATA)?)?;
        if diff_ids.len() != layers.len() {
            return Err(ImageError::invalid(
                format!("image {reference}"),
                format!("its manifest has {} layers, its configuration {}", layers.len(), diff_ids.len()),
            ));
        }
        let chain = chain_ids(&diff_ids);
        let blobs = layers.iter().map(|(digest, _)| digest.clone());
        let content = self.lease(blobs.chain(chain.iter().cloned()));

        // Unpacking runs on another thread and must end with this future.
        let cancel = Cancel::default();
        let keep = self.keep_archives;
        let each = chain.iter().cloned().zip(diff_ids).zip(layers.clone());
        let work = each.map(|((chain_id, diff_id), (blob, size))| {
            let (registry, progress, cancel) = (&registry, &progress, cancel.flag());
            async move {
                if self.layers.has(&chain_id) {
                    progress(ProgressEvent::Present { chain_id });
                    return Ok(None);
                }
                let store = Arc::clone(self);
                let unpack = move |inner: &mut dyn Read| {
                    let archive = CancelledReader { inner, cancelled: cancel };
                    store.layers.stage(archive, &diff_id, &store.limits)
                };
                let staged = self.receive(registry, (&blob, size), keep, Some(progress), unpack).await?;
                progress(ProgressEvent::Unpacked { chain_id: chain_id.clone() });
                Ok::<_, ImageError>(Some((chain_id, staged)))
            }
        });
        let staged: Vec<_> = stream::iter(work)
            .buffer_unordered(PARALLEL_LAYERS)
            .try_filter_map(async |layer| Ok(layer))
            .try_collect()
            .await?;

        let new = NewImage {
            id: id.clone(),
            manifest: Some(manifest_digest),
            chain_ids: chain,
            archives: layers.iter().map(|(digest, _)| digest.clone()).collect(),
            repo_tags: reference.tag().map(|_| reference.to_string()).into_iter().collect(),
            repo_digests: vec![reference.at_digest(top).to_string()],
            pinned: false,
            stamp: None,
        };
        let store = Arc::clone(self);
        blocking(move || {
            store.layers.commit(staged)?;
            store.record_image(new)?;
            // The unpacked layers are what is used; keeping their archives would double the space.
            let archives: Vec<_> = layers.into_iter().map(|(digest, _)| digest).collect();
            store.discard(&archives, content)?;
            drop(metadata);
            store.status(&id.to_string())?.ok_or_else(|| ImageError::NotFound(id.to_string()))
        })
        .await
    }

    /// Gives a blob to `read` while it comes in, or from the content store if it is there. It becomes part of that
    /// if it is to be kept; else it can be continued and read again until it is removed.
    async fn receive<T: Send + 'static>(
        self: &Arc<Self>,
        registry: &Registry,
        (digest, size): (&Digest, u64),
        keep: bool,
        progress: Option<&Progress>,
        read: impl FnOnce(&mut dyn Read) -> Result<T, ImageError> + Send + 'static,
    ) -> Result<T, ImageError> {
        let flight = self.flights.of(digest);
        let turn =
            flight.acquire_owned().await.map_err(|error| ImageError::Interrupted(error.to_string()))?;
        let (store, expected) = (Arc::clone(self), digest.clone());
        if self.content.has(digest) {
            drop(turn);
            return blocking(move || read(&mut store.content.open_blob(&expected)?)).await;
        }
        // Whoever reads also hashes and writes, on a thread that may block; pieces reach it through a short queue.
        let (pieces, queue) = mpsc::channel::<Piece>(QUEUE);
        let (resumed, offset) = oneshot::channel();
        let reader = tokio::task::spawn_blocking(move || {
            // The turn ends with this thread's work, also when the pull is cancelled before that.
            let _turn = turn;
            let writer = store.content.resume(&expected)?;
            let _ = resumed.send(writer.written());
            let mut blob = Arriving::new(writer, queue)?;
            let result = read(&mut blob);
            // Wrong bytes may be why they made no sense: that is the better answer.
            blob.finish(&expected, keep)?;
            result
        });
        let sent = match offset.await {
            Ok(offset) => registry.send_blob(digest, size, offset, &pieces, progress).await,
            Err(_) => Ok(()),
        };
        drop(pieces);
        let read = reader.await.unwrap_or_else(|error| Err(ImageError::Interrupted(error.to_string())));
        // When sending failed the reader only knows that its queue closed.
        sent.and(read)
    }
}

/// Tells work on other threads that nobody waits for it any more.
#[derive(Default)]
struct Cancel(Arc<AtomicBool>);

impl Cancel {
    fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct CancelledReader<R> {
    inner: R,
    cancelled: Arc<AtomicBool>,
}

impl<R: Read> Read for CancelledReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(ImageError::Interrupted("the pull was cancelled".into()).into()),
            false => self.inner.read(buffer),
        }
    }
}

impl Registry {
    /// The first of the registry's mirrors, or the registry itself, that has the image; and its manifest.
    async fn find(
        reference: &Reference,
        auth: Auth,
        platform: &Platform,
        config: &RegistryConfig,
    ) -> Result<(Self, (Digest, Vec<u8>)), ImageError> {
        let mut failed = None;
        for endpoint in config.endpoints(reference.registry()) {
            // Credentials for the registry are no mirror's business.
            let given = if endpoint.mirror { Auth::Anonymous } else { auth.clone() };
            let auth = match (given, &endpoint.settings.auth) {
                (Auth::Anonymous, Some(configured)) => configured.clone(),
                (given, _) => given,
            };
            let (host, mirror) = (endpoint.host.clone(), endpoint.mirror);
            let found = async {
                let registry = Self::connect(reference.clone(), endpoint, auth, config).await?;
                let manifest = registry.manifest(platform).await?;
                Ok((registry, manifest))
            };
            match found.await {
                Ok(found) => return Ok(found),
                Err(error) if mirror => {
                    tracing::info!(%reference, mirror = host, %error, "the mirror does not have the image");
                    failed = Some(error);
                }
                // What the registry itself says is what counts.
                Err(error) => return Err(error),
            }
        }
        Err(failed.unwrap_or_else(|| ImageError::NotFound(reference.to_string())))
    }

    async fn connect(
        reference: Reference,
        endpoint: Endpoint,
        auth: Auth,
        config: &RegistryConfig,
    ) -> Result<Self, ImageError> {
        let Endpoint { host, settings, .. } = endpoint;
        let plain = is_loopback(&host) || settings.plain_http;
        let certificates = settings
            .ca_certificates
            .into_iter()
            .map(|data| Certificate { encoding: CertificateEncoding::Pem, data });
        let client = ClientConfig {
            protocol: match plain {
                true => ClientProtocol::HttpsExcept(vec![host.clone()]),
                false => ClientProtocol::Https,
            },
            accept_invalid_certificates: settings.skip_verify,
            extra_root_certificates: certificates.collect(),
            connect_timeout: Some(config.connect_timeout),
            read_timeout: Some(config.read_timeout),
            user_agent: concat!("ferrite/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let message = {
            // Reads the machine's certificates, and panics where there is no TLS to be had at all.
            let made = tokio::task::spawn_blocking(move || {
                let _ = rustls::crypto::ring::default_provider().install_default();
                Client::try_from(client)
            });
            match made.await {
                Ok(Ok(client)) => {
                    let auth = match auth {
                        Auth::Anonymous => RegistryAuth::Anonymous,
                        Auth::Basic { username, password } => RegistryAuth::Basic(username, password),
                        Auth::Bearer(token) => RegistryAuth::Bearer(token),
                    };
                    return Ok(Self { client, auth, host, reference });
                }
                Ok(Err(error)) => with_causes(&error),
                Err(error) => error.to_string(),
            }
        };
        Err(ImageError::Registry { reference: reference.to_string(), message })
    }

    fn at(&self, digest: Option<&Digest>) -> RegistryReference {
        let (registry, repository) = (self.host.clone(), self.reference.repository().to_owned());
        match (digest.or(self.reference.digest()), self.reference.tag()) {
            (Some(digest), _) => RegistryReference::with_digest(registry, repository, digest.to_string()),
            (None, tag) => {
                RegistryReference::with_tag(registry, repository, tag.unwrap_or("latest").to_owned())
            }
        }
    }

    /// What the name means at the registry, and the manifest for `platform`.
    async fn manifest(&self, platform: &Platform) -> Result<(Digest, Vec<u8>), ImageError> {
        let mut wanted: Option<Digest> = self.reference.digest().cloned();
        let mut top = None;
        for _ in 0..MAX_INDEX_DEPTH {
            let at = self.at(wanted.as_ref());
            let answer = self.client.pull_manifest_raw(&at, &self.auth, ACCEPTED);
            let (bytes, _) = self.guard(answer).await?;
            if bytes.len() as u64 > MAX_METADATA {
                return Err(ImageError::Limit {
                    what: "size of a manifest or configuration",
                    limit: MAX_METADATA,
                });
            }
            let actual = Digest::of(&bytes);
            if let Some(expected) = wanted
                && expected != actual
            {
                return Err(ImageError::Corrupt {
                    what: format!("manifest of {}", self.reference),
                    expected,
                    actual,
                });
            }
            let top = top.get_or_insert(actual).clone();
            let fail = |error: serde_json::Error| {
                ImageError::invalid(format!("manifest of {}", self.reference), error)
            };
            let versioned: Versioned = serde_json::from_slice(&bytes).map_err(fail)?;
            if versioned.schema_version != 2 {
                let text = format!("manifest schema {} of {}", versioned.schema_version, self.reference);
                return Err(ImageError::Unsupported(text));
            }
            if versioned.manifests.is_none() {
                return Ok((top, bytes.to_vec()));
            }
            let index: ImageIndex = serde_json::from_slice(&bytes).map_err(fail)?;
            wanted = Some(platform.choose(&self.reference.to_string(), &index)?);
        }
        Err(ImageError::invalid(format!("index of {}", self.reference), "it is nested too deeply"))
    }

    /// Sends a blob from `offset` on to the writer's queue. A closed queue means that the writer failed
    /// and will say why.
    async fn send_blob(
        &self,
        digest: &Digest,
        size: u64,
        offset: u64,
        pieces: &mpsc::Sender<Piece>,
        progress: Option<&Progress>,
    ) -> Result<(), ImageError> {
        let name = digest.to_string();
        let (at, name) = (self.at(None), name.as_str());
        self.client.store_auth_if_needed(at.resolve_registry(), &self.auth).await;
        let mut done = offset;
        if offset < size || size == 0 || offset == 0 {
            let answer = async {
                match offset {
                    0 => self.client.pull_blob_stream(&at, name).await.map(BlobResponse::Full),
                    _ => self.client.pull_blob_stream_partial(&at, name, offset, None).await,
                }
            };
            let mut body = match self.guard(answer).await? {
                BlobResponse::Partial(body) => body,
                BlobResponse::Full(body) => {
                    done = 0;
                    if offset > 0 && pieces.send(Piece::Restart).await.is_err() {
                        return Ok(());
                    }
                    body
                }
            };
            while let Some(bytes) = body.next().await {
                let bytes = match bytes {
                    Ok(bytes) => bytes,
                    // All bytes came and the client dislikes their digest: the writer says so better.
                    Err(_) if done == size => break,
                    Err(error) => {
                        let reference = self.reference.to_string();
                        return Err(ImageError::Unreachable { reference, message: with_causes(&error) });
                    }
                };
                done += bytes.len() as u64;
                if done > size {
                    return Err(ImageError::Limit { what: "announced size of a blob", limit: size });
                }
                if pieces.send(Piece::Data(bytes)).await.is_err() {
                    return Ok(());
                }
                if let Some(progress) = progress {
                    progress(ProgressEvent::Downloading { digest: digest.clone(), done, total: size });
                }
            }
        }
        let _ = pieces.send(Piece::End).await;
        Ok(())
    }

    /// The client panics on some answers that only a broken or hostile server gives (a token that fits in
    /// no header); that is the server's failure, not this program's.
    async fn guard<T>(
        &self,
        call: impl Future<Output = Result<T, OciDistributionError>>,
    ) -> Result<T, ImageError> {
        match AssertUnwindSafe(call).catch_unwind().await {
            Ok(answer) => answer.map_err(|error| self.explain(error)),
            Err(_) => Err(ImageError::Registry {
                reference: self.reference.to_string(),
                message: "its answer makes no sense".into(),
            }),
        }
    }

    /// The registry's answer in the kubelet's distinctions.
    fn explain(&self, error: OciDistributionError) -> ImageError {
        let reference = self.reference.to_string();
        let message = with_causes(&error);
        match &error {
            OciDistributionError::UnauthorizedError { .. }
            | OciDistributionError::AuthenticationFailure(_) => {
                ImageError::Unauthorized { reference, message }
            }
            OciDistributionError::ImageManifestNotFoundError(_) => ImageError::NotFound(reference),
            OciDistributionError::RegistryError { envelope, .. } => {
                let has =
                    |codes: &[OciErrorCode]| envelope.errors.iter().any(|error| codes.contains(&error.code));
                use OciErrorCode as C;
                if has(&[
                    C::ManifestUnknown,
                    C::NameUnknown,
                    C::NotFound,
                    C::BlobUnknown,
                    C::ManifestBlobUnknown,
                ]) {
                    ImageError::NotFound(reference)
                } else if has(&[C::Unauthorized, C::Denied]) {
                    ImageError::Unauthorized { reference, message }
                } else {
                    ImageError::Registry { reference, message }
                }
            }
            OciDistributionError::ServerError { code: 404, .. } => ImageError::NotFound(reference),
            OciDistributionError::ServerError { code: 401 | 403, .. } => {
                ImageError::Unauthorized { reference, message }
            }
            OciDistributionError::ServerError { code: 500.., .. } | OciDistributionError::IoError(_) => {
                ImageError::Unreachable { reference, message }
            }
            OciDistributionError::RequestError(request)
                if request.is_connect()
                    || request.is_timeout()
                    || request.is_request()
                    || request.is_body() =>
            {
                ImageError::Unreachable { reference, message }
            }
            _ => ImageError::Registry { reference, message },
        }
    }
}

/// An error and what it came from, in one line; bounded, since registries put pages into their answers.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text.chars().filter(|c| !c.is_control()).take(1024).collect()
}

/// Whether a registry is on this machine: nobody in between, so no TLS.
fn is_loopback(registry: &str) -> bool {
    let host = match registry.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => registry.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Runs work that hashes, unpacks or syncs on the pool for blocking work.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> Result<T, ImageError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ImageError::Interrupted(error.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback() {
        for (registry, want) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("127.0.0.1:5000", true),
            ("127.9.9.9", true),
            ("[::1]:5000", true),
            ("10.0.0.1:5000", false),
            ("localhost.example.com", false),
            ("docker.io", false),
        ] {
            assert_eq!(is_loopback(registry), want, "{registry}");
        }
    }
}
