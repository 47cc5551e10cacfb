//! The store as a whole: images in, directories out, garbage away.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{Flock, FlockArg};
use oci_spec::image::{ImageConfiguration, ImageManifest};

use super::content::ContentStore;
use super::digest::chain_ids;
use super::index::{Index, StoredImage};
use super::layer::LayerStore;
use super::{Digest, ImageError, Limits};

/// Larger manifests and configurations are refused: none in use comes near.
pub(crate) const MAX_METADATA: u64 = 8 << 20;
/// overlayfs takes this many lower layers.
const MAX_LAYERS: usize = 500;

/// Images, their layers and their names under one directory.
///
/// Methods that hash or unpack block; the async ones move that work to the blocking pool.
#[derive(Debug)]
pub struct ImageStore {
    root: PathBuf,
    pub(crate) content: ContentStore,
    pub(crate) layers: LayerStore,
    pub(crate) limits: Limits,
    index: Mutex<Index>,
    /// True if the store keeps the layers' archives, so that it can export them unchanged.
    pub(crate) keep_archives: bool,
    /// A view that others may change under us has none.
    _lock: Option<Flock<File>>,
    leases: Mutex<Leases>,
    pub(crate) flights: super::pull::Flights,
}

/// An image as others see it.
#[derive(Debug, Clone)]
pub struct ImageRecord {
    /// The digest of the configuration: the kubelet uses it as the image's id.
    pub id: Digest,
    /// Entry point, environment, user and the like.
    pub config: ImageConfiguration,
    /// Names with tags, sorted.
    pub repo_tags: Vec<String>,
    /// Names with digests, sorted.
    pub repo_digests: Vec<String>,
    /// Unpacked layers and metadata, in bytes.
    pub size: u64,
    /// Base first.
    pub chain_ids: Vec<Digest>,
    /// Never collected.
    pub pinned: bool,
}

/// Disk usage of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub inodes: u64,
}

/// The things that a garbage collection removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    pub layers: usize,
    pub blobs: usize,
    pub bytes: u64,
}

impl ImageStore {
    /// Opens the store under `root`, making it if needed. Unfinished work of an earlier run is removed, or
    /// kept to be continued.
    pub fn open(root: PathBuf) -> Result<Arc<Self>, ImageError> {
        Self::open_with(root, Limits::default())
    }

    /// [`open`](Self::open) with other limits on the contents of a layer.
    pub fn open_with(root: PathBuf, limits: Limits) -> Result<Arc<Self>, ImageError> {
        // Layers have set-user-id programs: users of the node must not reach them.
        ferrite_hostfs::private_dir(&root).map_err(ImageError::io("create", &root))?;
        let lock = lock(&root, FlockArg::LockExclusiveNonblock)?;
        Self::open_locked(root, limits, lock, false)
    }

    /// [`open`](Self::open) for a store that several processes use in turn: waits until the others are
    /// done, and keeps the archives of layers so that images can be exported. Blocks.
    pub fn open_in_turn(root: PathBuf) -> Result<Arc<Self>, ImageError> {
        // Layers have set-user-id programs: users of the node must not reach them.
        ferrite_hostfs::private_dir(&root).map_err(ImageError::io("create", &root))?;
        let lock = lock(&root, FlockArg::LockExclusive)?;
        Self::open_locked(root, Limits::default(), lock, true)
    }

    fn open_locked(
        root: PathBuf,
        limits: Limits,
        lock: Flock<File>,
        keep_archives: bool,
    ) -> Result<Arc<Self>, ImageError> {
        let mut index = Index::load(&root.join("index.json"))?;
        let content = ContentStore::open(&root)?;
        let layers = LayerStore::open(&root)?;
        // An image that lost a layer or its configuration (a damaged disk, a hand in the directory)
        // is as good as absent: the next pull brings it back.
        let before = index.images.len();
        index
            .images
            .retain(|id, image| content.has(id) && image.chain_ids.iter().all(|chain| layers.has(chain)));
        if index.images.len() != before {
            tracing::warn!(lost = before - index.images.len(), "images with missing content were dropped");
            index.save(&root.join("index.json"))?;
        }
        Ok(Arc::new(Self {
            root,
            content,
            layers,
            limits,
            index: Mutex::new(index),
            keep_archives,
            _lock: Some(lock),
            leases: Mutex::default(),
            flights: Default::default(),
        }))
    }

    /// Opens the store for reading only, even while another process uses it.
    pub(crate) fn look(root: PathBuf) -> Result<Self, ImageError> {
        let content = ContentStore::look(&root);
        let layers = LayerStore::look(&root);
        let mut index = Index::load(&root.join("index.json"))?;
        index.images.retain(|id, image| content.has(id) && image.chain_ids.iter().all(|c| layers.has(c)));
        Ok(Self {
            root,
            content,
            layers,
            limits: Limits::default(),
            index: Mutex::new(index),
            keep_archives: true,
            _lock: None,
            leases: Mutex::default(),
            flights: Default::default(),
        })
    }

    /// The directory the store is in.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All images.
    pub fn list(&self) -> Result<Vec<ImageRecord>, ImageError> {
        let images = self.index().images.clone();
        images.into_iter().map(|(id, image)| self.record(id, image)).collect()
    }

    /// The image a reference or id means, if the store has it.
    pub fn status(&self, reference_or_id: &str) -> Result<Option<ImageRecord>, ImageError> {
        let found = {
            let index = self.index();
            index.resolve(reference_or_id)?.and_then(|id| Some((id.clone(), index.images.get(&id)?.clone())))
        };
        found.map(|(id, image)| self.record(id, image)).transpose()
    }

    /// [`status`](Self::status) for callers that treat an unreadable image as an absent one.
    pub fn image(&self, reference_or_id: &str) -> Option<ImageRecord> {
        self.status(reference_or_id).unwrap_or_else(|error| {
            tracing::warn!(image = reference_or_id, %error, "image cannot be used");
            None
        })
    }

    /// The directories to mount for an image, top-most first as overlayfs wants them. Empty for an
    /// unknown image and for one without layers.
    pub fn lower_dirs(&self, reference_or_id: &str) -> Vec<PathBuf> {
        let index = self.index();
        let Ok(Some(id)) = index.resolve(reference_or_id) else { return Vec::new() };
        let chain = index.images.get(&id).map(|image| image.chain_ids.as_slice()).unwrap_or_default();
        chain.iter().rev().map(|chain| self.layers.path(chain)).collect()
    }

    /// Gives an image one more name.
    pub fn tag(&self, reference_or_id: &str, name: &super::Reference) -> Result<(), ImageError> {
        let mut index = self.index();
        let id = index
            .resolve(reference_or_id)?
            .ok_or_else(|| ImageError::NotFound(reference_or_id.to_owned()))?;
        let mut next = index.clone();
        let Some(image) = index.images.get(&id) else { return Ok(()) };
        let mut image = image.clone();
        image.repo_tags.insert(name.to_string());
        next.add(id, image);
        next.save(&self.root.join("index.json"))?;
        *index = next;
        Ok(())
    }

    /// Removes a name; with the last one, or when given an id, the image itself with everything no other
    /// image needs. An absent image is no error. An image in `used` (ids a container was made from) or a
    /// pinned one is refused.
    pub fn remove(&self, reference_or_id: &str, used: &HashSet<Digest>) -> Result<(), ImageError> {
        {
            let mut index = self.index();
            let Some(id) = index.resolve(reference_or_id)? else { return Ok(()) };
            let mut next = index.clone();
            let Some(image) = next.images.get_mut(&id) else { return Ok(()) };
            let by_tag = reference_or_id
                .parse::<super::Reference>()
                .ok()
                .filter(|reference| reference.tag().is_some());
            let tag =
                by_tag.map(|reference| reference.to_string()).filter(|tag| image.repo_tags.contains(tag));
            match tag {
                Some(tag) if image.repo_tags.len() > 1 => {
                    image.repo_tags.remove(&tag);
                }
                _ if image.pinned => return Err(ImageError::Pinned(reference_or_id.to_owned())),
                _ if used.contains(&id) => return Err(ImageError::InUse(reference_or_id.to_owned())),
                _ => {
                    next.images.remove(&id);
                }
            }
            next.save(&self.root.join("index.json"))?;
            *index = next;
        }
        self.collect(used).map(drop)
    }

    /// Drops an image's record, even if it is in use. Its layers stay as long as its id is in `used`.
    pub fn forget(&self, reference_or_id: &str, used: &HashSet<Digest>) -> Result<(), ImageError> {
        {
            let mut index = self.index();
            let Some(id) = index.resolve(reference_or_id)? else { return Ok(()) };
            let mut next = index.clone();
            next.images.remove(&id);
            next.save(&self.root.join("index.json"))?;
            *index = next;
        }
        self.collect(used).map(drop)
    }

    /// Removes blobs and layers that no image, no container (`used`: ids containers were made from) and
    /// no pull in progress needs. Images without any name stay: the kubelet decides about images.
    pub fn collect(&self, used: &HashSet<Digest>) -> Result<Collected, ImageError> {
        let mut collected = Collected::default();
        let mut doomed = Vec::new();
        {
            // Both are held so that nobody can start to use objects that are about to go.
            let index = self.index();
            let leases = self.leases();
            let mut needed: HashSet<&Digest> = leases.digests.keys().collect();
            for (id, image) in &index.images {
                needed.insert(id);
                needed.extend(image.manifest.iter());
                needed.extend(image.chain_ids.iter());
                needed.extend(image.archives.iter());
            }
            let kept = self.chains_of(used.iter().filter(|id| !index.images.contains_key(*id)));
            needed.extend(used.iter());
            needed.extend(kept.iter());
            let layers = if leases.holds > 0 { Vec::new() } else { self.layers.all() };
            for (chain, _) in layers {
                if !needed.contains(&chain) {
                    doomed.extend(self.layers.detach(&chain)?);
                }
            }
            // While an archive is read nobody knows yet which blobs it will need.
            let blobs = if leases.holds > 0 { Vec::new() } else { self.content.list()? };
            for (digest, size) in blobs {
                if !needed.contains(&digest) {
                    self.content.remove(&digest)?;
                    collected.blobs += 1;
                    collected.bytes += size;
                }
            }
            self.content.remove_partial(|digest| needed.contains(digest))?;
        }
        for (path, info) in doomed {
            // The layer is out of the store already; the next start removes the rest.
            super::layer::remove(&path);
            collected.layers += 1;
            collected.bytes += info.bytes;
        }
        Ok(collected)
    }

    /// Disk usage of blobs and layers, summed from their records without a walk of the disk.
    pub fn usage(&self) -> Result<Usage, ImageError> {
        let mut usage = Usage::default();
        for (_, info) in self.layers.all() {
            usage.bytes += info.bytes;
            usage.inodes += info.inodes;
        }
        for (_, size) in self.content.list()? {
            usage.bytes += size;
            usage.inodes += 1;
        }
        Ok(usage)
    }

    pub(crate) fn list_ids(&self) -> Vec<Digest> {
        self.index().images.keys().cloned().collect()
    }

    /// A blob a layer can be unpacked from, of whichever image it came with.
    pub(crate) fn archive_of(&self, diff_id: &Digest) -> Result<Option<Digest>, ImageError> {
        let images = self.index().images.clone();
        for (id, image) in images {
            let (_, diff_ids) = parse_config(&self.content.read(&id, MAX_METADATA)?)?;
            let place = diff_ids.iter().zip(&image.archives).find(|(known, _)| *known == diff_id);
            if let Some((_, blob)) = place.filter(|(_, blob)| self.content.has(blob)) {
                return Ok(Some(blob.clone()));
            }
        }
        Ok(None)
    }

    /// The chains of images whose record is gone but whose configuration is still here.
    fn chains_of<'a>(&self, ids: impl Iterator<Item = &'a Digest>) -> Vec<Digest> {
        ids.filter_map(|id| self.content.read(id, MAX_METADATA).ok())
            .filter_map(|bytes| parse_config(&bytes).ok())
            .flat_map(|(_, diff_ids)| chain_ids(&diff_ids))
            .collect()
    }

    fn record(&self, id: Digest, image: StoredImage) -> Result<ImageRecord, ImageError> {
        let (config, _) = parse_config(&self.content.read(&id, MAX_METADATA)?)?;
        Ok(ImageRecord {
            id,
            config,
            repo_tags: image.repo_tags.into_iter().collect(),
            repo_digests: image.repo_digests.into_iter().collect(),
            size: image.size,
            chain_ids: image.chain_ids,
            pinned: image.pinned,
        })
    }

    /// Records an image whose configuration and layers are complete; its names mean it from now on.
    pub(crate) fn record_image(&self, new: NewImage) -> Result<(), ImageError> {
        let NewImage { id, manifest, chain_ids, archives, repo_tags, repo_digests, pinned, stamp } = new;
        let metadata = [Some(&id), manifest.as_ref()].into_iter().flatten();
        let mut size: u64 =
            metadata.filter_map(|d| fs::metadata(self.content.path(d)).ok()).map(|m| m.len()).sum();
        for chain in &chain_ids {
            let info = self.layers.info(chain);
            size +=
                info.ok_or_else(|| ImageError::invalid(format!("image {id}"), "a layer is missing"))?.bytes;
        }
        let image = StoredImage {
            manifest,
            chain_ids,
            archives: if self.keep_archives { archives } else { Vec::new() },
            repo_tags: repo_tags.into_iter().collect(),
            repo_digests: repo_digests.into_iter().collect(),
            size,
            pinned,
            stamp,
        };
        let mut index = self.index();
        let mut next = index.clone();
        next.add(id, image);
        if next != *index {
            next.save(&self.root.join("index.json"))?;
            *index = next;
        }
        Ok(())
    }

    /// Keeps blobs and layers from being collected until the answer is dropped.
    pub(crate) fn lease(self: &Arc<Self>, digests: impl IntoIterator<Item = Digest>) -> Lease {
        let digests: Vec<Digest> = digests.into_iter().collect();
        let mut leases = self.leases();
        for digest in &digests {
            *leases.digests.entry(digest.clone()).or_default() += 1;
        }
        drop(leases);
        Lease { store: Arc::clone(self), digests }
    }

    /// Keeps everything from being collected until the answer is dropped.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        self.leases().holds += 1;
        Hold(Arc::clone(self))
    }

    /// Ends a lease and removes those of `digests` that are no image's metadata (or archives it keeps) and
    /// that nobody else has leased: of several users that finish with a blob at the same time, the last one
    /// removes it.
    pub(crate) fn discard(&self, digests: &[Digest], mut lease: Lease) -> Result<(), ImageError> {
        let index = self.index();
        let mut leases = self.leases();
        leases.release(&std::mem::take(&mut lease.digests));
        if leases.holds > 0 {
            return Ok(());
        }
        let is_metadata = |digest: &Digest| {
            index.images.iter().any(|(id, image)| {
                id == digest || image.manifest.as_ref() == Some(digest) || image.archives.contains(digest)
            })
        };
        digests
            .iter()
            .filter(|digest| !leases.digests.contains_key(digest) && !is_metadata(digest))
            .try_for_each(|digest| self.content.remove(digest))
    }

    pub(crate) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn save_index(&self, index: &Index) -> Result<(), ImageError> {
        index.save(&self.root.join("index.json"))
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opening cleans up unfinished work, which might be another process's, so there can be only one.
fn lock(root: &Path, how: FlockArg) -> Result<Flock<File>, ImageError> {
    let path = root.join("lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(ImageError::io("create", &path))?;
    Flock::lock(file, how).map_err(|(_, errno)| match errno {
        nix::errno::Errno::EWOULDBLOCK => ImageError::Locked(root.to_owned()),
        other => ImageError::io("lock", path)(other.into()),
    })
}

/// Inputs of [`ImageStore::record_image`].
pub(crate) struct NewImage {
    pub(crate) id: Digest,
    pub(crate) manifest: Option<Digest>,
    pub(crate) chain_ids: Vec<Digest>,
    /// The blobs the layers came in, base first.
    pub(crate) archives: Vec<Digest>,
    pub(crate) repo_tags: Vec<String>,
    pub(crate) repo_digests: Vec<String>,
    pub(crate) pinned: bool,
    pub(crate) stamp: Option<String>,
}

/// Blobs and layers somebody works with.
pub(crate) struct Lease {
    store: Arc<ImageStore>,
    digests: Vec<Digest>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.store.leases().release(&self.digests);
    }
}

/// Keeps garbage collection away altogether.
pub(crate) struct Hold(Arc<ImageStore>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.leases().holds -= 1;
    }
}

/// Objects that garbage collection must keep besides those in the index.
#[derive(Debug, Default)]
struct Leases {
    digests: HashMap<Digest, usize>,
    holds: usize,
}

impl Leases {
    fn release(&mut self, digests: &[Digest]) {
        for digest in digests {
            if let Some(count) = self.digests.get_mut(digest) {
                *count -= 1;
                if *count == 0 {
                    self.digests.remove(digest);
                }
            }
        }
    }
}

/// An image's configuration and the diff ids of its layers.
pub(crate) fn parse_config(bytes: &[u8]) -> Result<(ImageConfiguration, Vec<Digest>), ImageError> {
    let fail = |why: String| ImageError::invalid("image configuration", why);
    let config: ImageConfiguration =
        serde_json::from_slice(bytes).map_err(|error| fail(error.to_string()))?;
    let diff_ids = config.rootfs().diff_ids();
    if diff_ids.len() > MAX_LAYERS {
        return Err(ImageError::Limit { what: "number of layers", limit: MAX_LAYERS as u64 });
    }
    let diff_ids = diff_ids.iter().map(|id| id.parse()).collect::<Result<_, ImageError>>()?;
    Ok((config, diff_ids))
}

/// A blob and its announced size.
pub(crate) type SizedBlob = (Digest, u64);

/// A manifest's configuration and layers.
pub(crate) fn parse_manifest(bytes: &[u8]) -> Result<(SizedBlob, Vec<SizedBlob>), ImageError> {
    let fail = |why: String| ImageError::invalid("image manifest", why);
    let manifest: ImageManifest = serde_json::from_slice(bytes).map_err(|error| fail(error.to_string()))?;
    let config = manifest.config().digest().to_string().parse()?;
    let config_size = manifest.config().size();
    if config_size > MAX_METADATA {
        return Err(ImageError::Limit { what: "size of a manifest or configuration", limit: MAX_METADATA });
    }
    let layers = manifest
        .layers()
        .iter()
        .map(|layer| Ok((layer.digest().to_string().parse()?, layer.size())))
        .collect::<Result<_, ImageError>>()?;
    Ok(((config, config_size), layers))
}
