//! Images from registries.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use oci_spec::image::ImageIndex;
use serde::Deserialize;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::arriving::{Arriving, Piece};
use super::digest::chain_ids;
use super::registries::HostSettings;
use super::registry::Registry;
use super::store::{MAX_METADATA, NewImage, parse_config, parse_manifest};
use super::tar_reader::read_error;
use super::{Digest, ImageError, ImageRecord, ImageStore, Platform, Reference};

/// Layers downloaded and unpacked at the same time, as Docker's default.
const PARALLEL_LAYERS: usize = 3;
/// Pieces of a blob that wait to be read.
const QUEUE: usize = 32;
/// An index may point to an index; more levels are nonsense.
const MAX_INDEX_DEPTH: usize = 3;

/// The credentials for a pull.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Auth {
    /// Nobody in particular.
    #[default]
    Anonymous,
    /// A name and a password, sent to the registry or to the token server it names.
    Basic { username: String, password: String },
    /// A token for the registry itself.
    Bearer(String),
    /// A token for the registry's token server, which gives those for the registry.
    Identity(String),
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Basic { .. } => "Basic(redacted)",
            Self::Bearer(_) => "Bearer(redacted)",
            Self::Identity(_) => "Identity(redacted)",
        })
    }
}

/// Settings for connections to registries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Registries (`host` or `host:port`) spoken to without TLS. Loopback addresses always are.
    pub plain_http: Vec<String>,
    /// Certificates in PEM form to trust besides the machine's own.
    pub ca_certificates: Vec<Vec<u8>>,
    /// Hosts to ask before a registry, in order; `*` stands for registries without mirrors of their own.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Settings for particular hosts, registries and mirrors alike.
    pub hosts: BTreeMap<String, HostSettings>,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest wait for the next piece of a response.
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

/// An event of a pull or an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgressEvent {
    /// The name was resolved to a manifest.
    Resolved { digest: Digest },
    /// `done` of `total` bytes of a blob have arrived.
    Downloading { digest: Digest, done: u64, total: u64 },
    /// A layer was here already.
    Present { chain_id: Digest },
    /// A layer is unpacked.
    Unpacked { chain_id: Digest },
}

/// Told about [`ProgressEvent`]s; must not block.
pub type Progress = Arc<dyn Fn(ProgressEvent) + Send + Sync>;

/// At most one download per blob at a time; a second caller finds it done.
#[derive(Debug, Default)]
pub(crate) struct Flights(Mutex<HashMap<Digest, Arc<Semaphore>>>);

impl Flights {
    fn of(&self, digest: &Digest) -> Arc<Semaphore> {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        flights.retain(|_, flight| Arc::strong_count(flight) > 1);
        Arc::clone(flights.entry(digest.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))))
    }
}

/// The fields that every version of a manifest has.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Versioned {
    schema_version: u32,
    manifests: Option<serde::de::IgnoredAny>,
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
            // Only the unpacked layers are used; keeping their archives would double the space.
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
        // The reader hashes and writes on a thread that may block; pieces reach it through a short queue.
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
                let manifest = registry.resolve(platform).await?;
                Ok((registry, manifest))
            };
            match found.await {
                Ok(found) => return Ok(found),
                Err(error) if mirror => {
                    tracing::info!(%reference, mirror = host, %error, "the mirror does not have the image");
                    failed = Some(error);
                }
                // The registry's own error counts.
                Err(error) => return Err(error),
            }
        }
        Err(failed.unwrap_or_else(|| ImageError::NotFound(reference.to_string())))
    }

    /// Resolves the name at the registry, and fetches the manifest for `platform`.
    async fn resolve(&self, platform: &Platform) -> Result<(Digest, Vec<u8>), ImageError> {
        let reference = self.reference();
        let mut wanted: Option<Digest> = reference.digest().cloned();
        let mut top = None;
        for _ in 0..MAX_INDEX_DEPTH {
            let bytes = self.manifest(wanted.as_ref()).await?;
            let actual = Digest::of(&bytes);
            if let Some(expected) = wanted
                && expected != actual
            {
                return Err(ImageError::Corrupt {
                    what: format!("manifest of {reference}"),
                    expected,
                    actual,
                });
            }
            let top = top.get_or_insert(actual).clone();
            let fail =
                |error: serde_json::Error| ImageError::invalid(format!("manifest of {reference}"), error);
            let versioned: Versioned = serde_json::from_slice(&bytes).map_err(fail)?;
            if versioned.schema_version != 2 {
                let text = format!("manifest schema {} of {}", versioned.schema_version, reference);
                return Err(ImageError::Unsupported(text));
            }
            if versioned.manifests.is_none() {
                return Ok((top, bytes));
            }
            let index: ImageIndex = serde_json::from_slice(&bytes).map_err(fail)?;
            wanted = Some(platform.choose(&reference.to_string(), &index)?);
        }
        Err(ImageError::invalid(format!("index of {reference}"), "it is nested too deeply"))
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
        let mut done = offset;
        if offset < size || size == 0 || offset == 0 {
            let mut blob = self.blob(digest, offset).await?;
            if !blob.partial {
                done = 0;
                if offset > 0 && pieces.send(Piece::Restart).await.is_err() {
                    return Ok(());
                }
            }
            while let Some(bytes) = self.next(&mut blob).await? {
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
}

/// Returns true if the registry is on this machine. Such a connection needs no TLS.
pub(super) fn is_loopback(registry: &str) -> bool {
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
