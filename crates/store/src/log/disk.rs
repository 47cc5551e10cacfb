//! The file operations the log stands on, as a seam: tests put faults in between.

use nix::fcntl::OFlag;
use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why bytes are not durable.
#[derive(Debug)]
pub(crate) enum AppendError {
    /// Not all of them were written: the file is as it was before, once it has its old length.
    Undone(io::Error),
    /// Nobody knows what is on the disk.
    Unknown(io::Error),
}

/// Opens files for writing.
pub(crate) trait Disk: Debug + Send + Sync {
    /// Opens or creates a file, empty where `truncate` says so.
    fn open(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>>;
    /// The same for a file that will be appended to in whole blocks.
    fn open_log(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>>;
}

/// A file being written.
pub(crate) trait DiskFile: Debug + Send {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Contents and length are durable when it returns.
    fn sync(&self) -> io::Result<()>;
    /// Writes whole blocks and makes them durable.
    fn append(&self, blocks: &[u8], offset: u64) -> Result<(), AppendError> {
        self.write_all_at(blocks, offset).map_err(AppendError::Undone)?;
        // After a failed fdatasync the kernel may have dropped the dirty pages: a later success proves nothing.
        self.sync().map_err(AppendError::Unknown)
    }
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

/// Objects of the cluster, secrets among them: for the owner alone.
fn owners() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600).create(true).write(true);
    options
}

impl Disk for RealDisk {
    fn open(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(owners().truncate(truncate).open(path)?))
    }

    fn open_log(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>> {
        let buffered = owners().truncate(truncate).open(path)?;
        let direct = OFlag::O_DIRECT | OFlag::O_DSYNC;
        match OpenOptions::new().write(true).custom_flags(direct.bits()).open(path) {
            Ok(direct) => Ok(Box::new(Direct { buffered, direct, refused: AtomicBool::new(false) })),
            // A file system without it.
            Err(_) => Ok(Box::new(buffered)),
        }
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

/// A file that is appended to past the page cache: a block is durable when its write returns.
#[derive(Debug)]
struct Direct {
    buffered: File,
    direct: File,
    /// The file system opens files for this, and then does not do it.
    refused: AtomicBool,
}

impl DiskFile for Direct {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        DiskFile::write_all_at(&self.buffered, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.buffered.sync()
    }

    fn append(&self, blocks: &[u8], offset: u64) -> Result<(), AppendError> {
        if self.refused.load(Ordering::Relaxed) {
            return self.buffered.append(blocks, offset);
        }
        match FileExt::write_all_at(&self.direct, blocks, offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                self.refused.store(true, Ordering::Relaxed);
                self.buffered.append(blocks, offset)
            }
            // Told before anything was written. Any other error may stand for a write that went half the way.
            Err(error) if is_no_room(&error) => Err(AppendError::Undone(error)),
            Err(error) => Err(AppendError::Unknown(error)),
        }
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        DiskFile::set_len(&self.buffered, length)
    }

    fn fill(&self, start: u64, end: u64) -> io::Result<()> {
        self.buffered.fill(start, end)?;
        // An append would have to wait until the pages below it are on the disk.
        self.buffered.sync()
    }
}

fn is_no_room(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Makes creations, renames and removals in a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
