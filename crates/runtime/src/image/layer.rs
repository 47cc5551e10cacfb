//! Unpacked layers by chain id, shared between images.
//!
//! `layers/<hex>/fs` is the directory overlayfs uses, `layers/<hex>/layer.json` has its size. A layer is
//! unpacked under a temporary name and renamed when everything in it is on disk.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::content::sync_dir;
use super::digest::HashingReader;
use super::extract::{Extracted, Limits, extract};
use super::{Digest, ImageError};

const TEMPORARY: &str = "tmp-";
/// Number of bytes of an archive that are unpacked at once.
const PIECE: usize = 128 << 10;

/// The record of an unpacked layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayerInfo {
    pub(crate) diff_id: Digest,
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

/// The unpacked layers of one store.
#[derive(Debug)]
pub(crate) struct LayerStore {
    dir: PathBuf,
    known: Mutex<HashMap<Digest, LayerInfo>>,
    serial: AtomicU64,
}

/// A layer unpacked under a temporary name, removed unless committed.
#[derive(Debug)]
pub(crate) struct Staged {
    dir: PathBuf,
    info: LayerInfo,
    committed: bool,
}

impl LayerStore {
    /// Opens the layers under `root` and removes layers that an interrupted run left half unpacked. If
    /// removing one fails, it stays unused until the next start.
    pub(crate) fn open(root: &Path) -> Result<Self, ImageError> {
        let dir = root.join("layers");
        ferrite_hostfs::private_dir(&dir).map_err(ImageError::io("create", &dir))?;
        let mut known = HashMap::new();
        for entry in fs::read_dir(&dir).map_err(ImageError::io("list", &dir))? {
            let path = entry.map_err(ImageError::io("list", &dir))?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let info =
                fs::read(path.join("layer.json")).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            match (name.and_then(Digest::from_hex), info) {
                (Some(chain), Some(info)) => {
                    known.insert(chain, info);
                }
                _ => remove(&path),
            }
        }
        Ok(Self { dir, known: Mutex::new(known), serial: AtomicU64::new(0) })
    }

    /// The layers under `root` as they are; nothing is made or removed.
    pub(crate) fn look(root: &Path) -> Self {
        let dir = root.join("layers");
        let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
        let known = entries.filter_map(|entry| {
            let chain = entry.file_name().to_str().and_then(Digest::from_hex)?;
            let info = fs::read(entry.path().join("layer.json")).ok()?;
            Some((chain, serde_json::from_slice(&info).ok()?))
        });
        Self { known: Mutex::new(known.collect()), dir, serial: AtomicU64::new(0) }
    }

    /// The directory overlayfs takes as a lower layer.
    pub(crate) fn path(&self, chain: &Digest) -> PathBuf {
        self.dir.join(chain.hex()).join("fs")
    }

    pub(crate) fn info(&self, chain: &Digest) -> Option<LayerInfo> {
        self.known().get(chain).cloned()
    }

    pub(crate) fn has(&self, chain: &Digest) -> bool {
        self.known().contains_key(chain)
    }

    pub(crate) fn all(&self) -> Vec<(Digest, LayerInfo)> {
        self.known().iter().map(|(chain, info)| (chain.clone(), info.clone())).collect()
    }

    /// Unpacks a layer, compressed or not, and checks that it is the one `diff_id` names.
    pub(crate) fn stage(
        &self,
        blob: impl Read,
        diff_id: &Digest,
        limits: &Limits,
    ) -> Result<Staged, ImageError> {
        let mut staged = self.stage_with(diff_id, |_| Ok(Extracted::default()))?;
        // Hashed and unpacked in large pieces, however small those are that the archive is read in.
        let mut reader = BufReader::with_capacity(PIECE, HashingReader::new(decompress(blob)?));
        let taken = extract(&mut reader, &staged.dir.join("fs"), limits)?;
        let (actual, _) = reader.into_inner().finish();
        if actual != *diff_id {
            return Err(ImageError::Corrupt { what: "layer".into(), expected: diff_id.clone(), actual });
        }
        staged.info = LayerInfo { diff_id: diff_id.clone(), bytes: taken.bytes, inodes: taken.inodes };
        Ok(staged)
    }

    /// A layer whose content `fill` puts into the directory it is given.
    pub(crate) fn stage_with(
        &self,
        diff_id: &Digest,
        fill: impl FnOnce(&Path) -> Result<Extracted, ImageError>,
    ) -> Result<Staged, ImageError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let dir = self.dir.join(format!("{TEMPORARY}{}-{serial}", std::process::id()));
        let info = LayerInfo { diff_id: diff_id.clone(), bytes: 0, inodes: 0 };
        fs::create_dir(&dir).map_err(ImageError::io("create", &dir))?;
        let mut staged = Staged { dir, info, committed: false };
        let fs_dir = staged.dir.join("fs");
        fs::create_dir(&fs_dir).map_err(ImageError::io("create", &fs_dir))?;
        // A layer that says nothing about its root has an ordinary one, whatever the umask here.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&fs_dir, mode).map_err(ImageError::io("set mode of", &fs_dir))?;
        let taken = fill(&fs_dir)?;
        (staged.info.bytes, staged.info.inodes) = (taken.bytes, taken.inodes);
        Ok(staged)
    }

    /// Makes unpacked layers part of the store, after everything in them reached the disk.
    pub(crate) fn commit(&self, layers: Vec<(Digest, Staged)>) -> Result<(), ImageError> {
        if layers.is_empty() {
            return Ok(());
        }
        for (_, staged) in &layers {
            let path = staged.dir.join("layer.json");
            let bytes =
                serde_json::to_vec(&staged.info).map_err(|e| ImageError::invalid("layer record", e))?;
            fs::write(&path, bytes).map_err(ImageError::io("write", path))?;
        }
        let root = File::open(&self.dir).map_err(ImageError::io("open", &self.dir))?;
        nix::unistd::syncfs(&root).map_err(|errno| ImageError::io("sync", &self.dir)(errno.into()))?;
        for (chain, mut staged) in layers {
            let target = self.dir.join(chain.hex());
            // Another image may have brought the same layer meanwhile; both are the same by digest.
            if let Entry::Vacant(place) = self.known().entry(chain) {
                fs::rename(&staged.dir, &target).map_err(ImageError::io("rename", &target))?;
                staged.committed = true;
                place.insert(staged.info.clone());
            }
        }
        sync_dir(&self.dir)
    }

    /// Takes a layer out of the store. The name goes at once, so that nobody mounts it any more; deleting
    /// the returned directory is the slow part.
    pub(crate) fn detach(&self, chain: &Digest) -> Result<Option<(PathBuf, LayerInfo)>, ImageError> {
        let mut known = self.known();
        let Some(info) = known.get(chain).cloned() else { return Ok(None) };
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let doomed = self.dir.join(format!("{TEMPORARY}{}-{serial}", std::process::id()));
        let path = self.dir.join(chain.hex());
        fs::rename(&path, &doomed).map_err(ImageError::io("rename", path))?;
        known.remove(chain);
        Ok(Some((doomed, info)))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Digest, LayerInfo>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.committed {
            remove(&self.dir);
        }
    }
}

/// Removes the directory of a layer that is not in the store. The image shaped it, so it may have any depth.
pub(crate) fn remove(path: &Path) {
    if let Err(error) = ferrite_hostfs::remove_tree(path) {
        tracing::warn!(path = %path.display(), %error,
            "a layer that is not used could not be removed; the next start tries again");
    }
}

/// The plain archive, whatever its compression: the content decides, because media types are often wrong.
pub(crate) fn decompress<'a>(blob: impl Read + 'a) -> Result<Box<dyn Read + 'a>, ImageError> {
    let mut blob = BufReader::with_capacity(256 << 10, blob);
    let start = blob.fill_buf().map_err(super::tar_reader::read_error)?;
    if start.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(blob)));
    }
    if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let decoder =
            zstd::stream::read::Decoder::with_buffer(blob).map_err(super::tar_reader::read_error)?;
        return Ok(Box::new(decoder));
    }
    Ok(Box::new(blob))
}
