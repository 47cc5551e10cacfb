//! The file operations the log stands on, as a seam: tests put faults in between.

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
    /// Writes zeros from `start` to `end`. Blocks that were written before are cheaper to synchronise than blocks that
    /// are only set aside: the file system has nothing more to note about them.
    fn fill(&self, start: u64, end: u64) -> io::Result<()> {
        static ZEROS: [u8; 128 << 10] = [0; 128 << 10];
        let mut at = start;
        while at < end {
            let count = (end - at).min(ZEROS.len() as u64);
            self.write_all_at(&ZEROS[..count as usize], at)?;
            at += count;
        }
        Ok(())
    }
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
}

/// Makes creations, renames and removals in a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
