//! The file operations the log stands on, as a seam: tests put faults in between.

use nix::fcntl::FallocateFlags;
use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Opens files for writing.
pub(crate) trait Disk: Debug + Send + Sync {
    /// Opens or creates a file, empty where `truncate` says so.
    fn open(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>>;
}

/// A file being written.
pub(crate) trait DiskFile: Debug + Send {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Contents and length are durable when it returns.
    fn sync(&self) -> io::Result<()>;
    fn set_len(&self, length: u64) -> io::Result<()>;
    /// Makes the file `length` bytes long, with room on the disk for all of them. What is new reads as zeros.
    fn allocate(&self, length: u64) -> io::Result<()>;
}

/// The real thing.
#[derive(Debug)]
pub(crate) struct RealDisk;

impl Disk for RealDisk {
    fn open(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>> {
        // Objects of the cluster, secrets among them: for the owner alone.
        let file = OpenOptions::new().mode(0o600).create(true).truncate(truncate).write(true).open(path)?;
        Ok(Box::new(file))
    }
}

impl DiskFile for File {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        File::set_len(self, length)
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        let length = i64::try_from(length).map_err(io::Error::other)?;
        Ok(nix::fcntl::fallocate(self, FallocateFlags::empty(), 0, length)?)
    }
}

/// Makes creations, renames and removals in a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
