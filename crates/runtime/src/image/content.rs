//! Blobs by digest.
//!
//! A blob is written to `ingest/`, synced, and renamed to `blobs/sha256/<hex>` once its digest is known
//! to be right, so that every file there is complete. Interrupted downloads stay in `ingest/` under
//! their digest and are continued.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::digest::Hasher;
use super::{Digest, ImageError};

/// The blobs of one store.
#[derive(Debug)]
pub(crate) struct ContentStore {
    blobs: PathBuf,
    ingest: PathBuf,
    serial: AtomicU64,
}

impl ContentStore {
    /// Opens the store under `root`; temporary files of an earlier run are removed, except downloads
    /// that can go on.
    pub(crate) fn open(root: &Path) -> Result<Self, ImageError> {
        let (blobs, ingest) = (root.join("blobs/sha256"), root.join("ingest"));
        for dir in [&blobs, &ingest] {
            fs::create_dir_all(dir).map_err(ImageError::io("create", dir))?;
        }
        for entry in fs::read_dir(&ingest).map_err(ImageError::io("list", &ingest))? {
            let entry = entry.map_err(ImageError::io("list", &ingest))?;
            let resumable = entry.file_name().to_str().and_then(Digest::from_hex).is_some();
            // A file that stays takes space and does no other harm: it must not stop the start.
            if !resumable && let Err(error) = fs::remove_file(entry.path()) {
                tracing::warn!(path = %entry.path().display(), %error, "a half received blob could not be removed");
            }
        }
        Ok(Self { blobs, ingest, serial: AtomicU64::new(0) })
    }

    /// The store under `root` as it is; nothing is made or removed.
    pub(crate) fn look(root: &Path) -> Self {
        Self { blobs: root.join("blobs/sha256"), ingest: root.join("ingest"), serial: AtomicU64::new(0) }
    }

    pub(crate) fn path(&self, digest: &Digest) -> PathBuf {
        self.blobs.join(digest.hex())
    }

    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.path(digest).exists()
    }

    pub(crate) fn open_blob(&self, digest: &Digest) -> Result<File, ImageError> {
        let path = self.path(digest);
        File::open(&path).map_err(ImageError::io("open blob", path))
    }

    /// A whole blob, which may have at most `limit` bytes. Its digest is checked again: a blob that is
    /// small enough to read is small enough to check.
    pub(crate) fn read(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        let file = self.open_blob(digest)?;
        file.take(limit + 1)
            .read_to_end(&mut bytes)
            .map_err(ImageError::io("read blob", self.path(digest)))?;
        if bytes.len() as u64 > limit {
            return Err(ImageError::Limit { what: "size of a manifest or configuration", limit });
        }
        let actual = Digest::of(&bytes);
        if actual != *digest {
            return Err(ImageError::Corrupt {
                what: "a stored blob".into(),
                expected: digest.clone(),
                actual,
            });
        }
        Ok(bytes)
    }

    pub(crate) fn put(&self, bytes: &[u8]) -> Result<Digest, ImageError> {
        let digest = Digest::of(bytes);
        if !self.has(&digest) {
            let mut writer = self.writer()?;
            writer.write(bytes)?;
            writer.commit(Some(&digest))?;
        }
        Ok(digest)
    }

    /// A writer for a blob whose digest is not known yet.
    pub(crate) fn writer(&self) -> Result<BlobWriter<'_>, ImageError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let path = self.ingest.join(format!("tmp-{}-{serial}", std::process::id()));
        let file = File::create_new(&path).map_err(ImageError::io("create", &path))?;
        Ok(BlobWriter { store: self, path, file, hasher: Hasher::default(), written: 0, keep: false })
    }

    /// A writer for the blob `digest` that goes on where an interrupted one ended. The caller makes sure
    /// that there is only one at a time.
    pub(crate) fn resume(&self, digest: &Digest) -> Result<BlobWriter<'_>, ImageError> {
        let path = self.ingest.join(digest.hex());
        let fail = |what| ImageError::io(what, path.clone());
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(fail("create"))?;
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; 256 << 10];
        let mut written = 0;
        loop {
            match file.read(&mut buffer).map_err(fail("read"))? {
                0 => break,
                read => {
                    hasher.update(&buffer[..read]);
                    written += read as u64;
                }
            }
        }
        Ok(BlobWriter { store: self, path, file, hasher, written, keep: true })
    }

    /// The digests of all blobs and their sizes.
    pub(crate) fn list(&self) -> Result<Vec<(Digest, u64)>, ImageError> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.blobs).map_err(ImageError::io("list", &self.blobs))? {
            let entry = entry.map_err(ImageError::io("list", &self.blobs))?;
            if let Some(digest) = entry.file_name().to_str().and_then(Digest::from_hex) {
                let size = entry.metadata().map_err(ImageError::io("stat", entry.path()))?.len();
                found.push((digest, size));
            }
        }
        Ok(found)
    }

    /// Removes a blob, also one that was received and never became part of the store.
    pub(crate) fn remove(&self, digest: &Digest) -> Result<(), ImageError> {
        for path in [self.path(digest), self.ingest.join(digest.hex())] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(ImageError::io("remove", path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the remains of interrupted downloads.
    pub(crate) fn remove_partial(&self, keep: impl Fn(&Digest) -> bool) -> Result<(), ImageError> {
        for entry in fs::read_dir(&self.ingest).map_err(ImageError::io("list", &self.ingest))?.flatten() {
            if let Some(digest) = entry.file_name().to_str().and_then(Digest::from_hex)
                && !keep(&digest)
            {
                fs::remove_file(entry.path()).map_err(ImageError::io("remove", entry.path()))?;
            }
        }
        Ok(())
    }
}

/// A blob in the making. Dropping it discards it, unless it can be resumed.
pub(crate) struct BlobWriter<'a> {
    store: &'a ContentStore,
    path: PathBuf,
    file: File,
    hasher: Hasher,
    written: u64,
    keep: bool,
}

impl BlobWriter<'_> {
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        self.file.write_all(bytes).map_err(ImageError::io("write", &self.path))?;
        self.hasher.update(bytes);
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Starts over, for a sender that does not continue in the middle.
    pub(crate) fn restart(&mut self) -> Result<(), ImageError> {
        use std::io::Seek;
        self.file.set_len(0).map_err(ImageError::io("truncate", &self.path))?;
        self.file.rewind().map_err(ImageError::io("rewind", &self.path))?;
        self.hasher = Hasher::default();
        self.written = 0;
        Ok(())
    }

    /// Opens the data written so far, from its beginning.
    pub(crate) fn reader(&self) -> Result<File, ImageError> {
        File::open(&self.path).map_err(ImageError::io("open", &self.path))
    }

    /// Leaves a blob that nobody needs for long where it was written, not synced, if its digest is the expected one.
    pub(crate) fn settle(mut self, expected: &Digest) -> Result<(), ImageError> {
        self.check(Some(expected)).map(drop)
    }

    fn check(&mut self, expected: Option<&Digest>) -> Result<Digest, ImageError> {
        let actual = std::mem::take(&mut self.hasher).finish();
        match expected {
            Some(expected) if *expected != actual => {
                // Continuing from wrong bytes would never help.
                self.keep = false;
                let expected = expected.clone();
                Err(ImageError::Corrupt { what: "downloaded blob".into(), expected, actual })
            }
            _ => Ok(actual),
        }
    }

    /// Makes the blob part of the store if its digest is the expected one.
    pub(crate) fn commit(mut self, expected: Option<&Digest>) -> Result<Digest, ImageError> {
        let actual = self.check(expected)?;
        self.file.sync_data().map_err(ImageError::io("sync", &self.path))?;
        let target = self.store.path(&actual);
        fs::rename(&self.path, &target).map_err(ImageError::io("rename", target))?;
        sync_dir(&self.store.blobs)?;
        Ok(actual)
    }
}

impl Drop for BlobWriter<'_> {
    fn drop(&mut self) {
        if !self.keep {
            // Committed blobs were renamed; then there is nothing to remove.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes a rename in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), ImageError> {
    File::open(dir).and_then(|file| file.sync_all()).map_err(ImageError::io("sync", dir))
}

/// Replaces the file at `path` so that a crash leaves the old or the new content.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary).map_err(ImageError::io("create", &temporary))?;
    file.write_all(bytes).map_err(ImageError::io("write", &temporary))?;
    file.sync_data().map_err(ImageError::io("sync", &temporary))?;
    fs::rename(&temporary, path).map_err(ImageError::io("rename", path))?;
    sync_dir(path.parent().unwrap_or(Path::new(".")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs() {
        let root = tempfile::tempdir().unwrap();
        let store = ContentStore::open(root.path()).unwrap();
        let digest = store.put(b"hello").unwrap();
        assert_eq!(store.put(b"hello").unwrap(), digest);
        assert_eq!(store.read(&digest, 5).unwrap(), b"hello");
        assert!(matches!(store.read(&digest, 4), Err(ImageError::Limit { .. })));
        fs::write(store.path(&digest), "HELLO").unwrap();
        assert!(matches!(store.read(&digest, 5), Err(ImageError::Corrupt { .. })));
        store.remove(&digest).unwrap();
        store.remove(&digest).unwrap();
        assert!(!store.has(&digest));
    }

    #[test]
    fn a_download_goes_on_after_a_crash() {
        let root = tempfile::tempdir().unwrap();
        let digest = Digest::of(b"hello world");
        let store = ContentStore::open(root.path()).unwrap();
        let mut writer = store.resume(&digest).unwrap();
        writer.write(b"hello ").unwrap();
        std::mem::forget(store.writer().unwrap());
        drop(writer);
        let store = ContentStore::open(root.path()).unwrap();
        assert_eq!(
            fs::read_dir(root.path().join("ingest")).unwrap().count(),
            1,
            "other temporary files are gone"
        );
        let mut writer = store.resume(&digest).unwrap();
        assert_eq!(writer.written(), 6);
        writer.write(b"world").unwrap();
        writer.commit(Some(&digest)).unwrap();
        assert_eq!(store.list().unwrap(), [(digest, 11)]);
    }

    #[test]
    fn wrong_bytes_are_not_kept() {
        let root = tempfile::tempdir().unwrap();
        let store = ContentStore::open(root.path()).unwrap();
        let digest = Digest::of(b"right");
        let mut writer = store.resume(&digest).unwrap();
        writer.write(b"wrong").unwrap();
        assert!(matches!(writer.commit(Some(&digest)), Err(ImageError::Corrupt { .. })));
        assert!(!store.has(&digest));
        assert_eq!(store.resume(&digest).unwrap().written(), 0);
    }
}
