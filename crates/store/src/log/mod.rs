//! The embedded backend: a checkpoint of everything and a log of what happened since.
//!
//! `checkpoint-<revision>` holds every key at that revision; `log-<revision>` what came after it. Appending is
//! one write and one fdatasync for all transactions that waited. When the log has outgrown the data, a new
//! checkpoint is written beside the old files, made durable, and only then are the old ones removed: a crash
//! at any instant leaves one whole pair.

mod format;
mod recover;

pub(crate) use format::Record;
pub(crate) use recover::Recovered;

use crate::entry::{Lease, LeaseId, Revision};
use crate::replica::Snapshot;
use crate::store::OpenError;
use format::{FileKind, put_entry, put_frame, put_lease};
use nix::fcntl::{Flock, FlockArg};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that is not what was written.
#[derive(Debug, thiserror::Error)]
#[error("{} is damaged at byte {offset}: {problem}. Restore a snapshot, or move the file away to start without it", .path.display())]
pub struct CorruptError {
    pub path: PathBuf,
    pub offset: u64,
    pub problem: String,
}

/// When a checkpoint is due.
#[derive(Debug, Clone, Copy)]
pub struct LogOptions {
    /// The log never triggers a checkpoint below this size.
    pub min_log: u64,
    /// Above it, the log may be this many times as large as the last checkpoint.
    pub max_ratio: u64,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { min_log: 16 << 20, max_ratio: 2 }
    }
}

/// Why a batch is not durable.
#[derive(Debug)]
pub(crate) enum AppendError {
    /// The file is as it was before: the batch can be given up and others may follow.
    Undone(io::Error),
    /// Nobody knows what is on the disk.
    Unknown(io::Error),
}

/// The open log. Holds the directory against other processes.
#[derive(Debug)]
pub(crate) struct Log {
    dir: PathBuf,
    options: LogOptions,
    file: File,
    length: u64,
    checkpoint_length: u64,
    buffer: Vec<u8>,
    _held: Flock<File>,
}

/// The write buffer is given back when one large batch has blown it up.
const KEEP_BUFFER: usize = 1 << 20;
/// Entries of a checkpoint are framed in pieces of about this size.
const CHECKPOINT_FRAME: usize = 1 << 20;

impl Log {
    pub fn open(dir: &Path, options: LogOptions) -> Result<(Self, Recovered), OpenError> {
        let io = |source| OpenError::Io { path: dir.display().to_string(), source };
        std::fs::create_dir_all(dir).map_err(io)?;
        let lock = private().create(true).truncate(false).write(true).open(dir.join("lock")).map_err(io)?;
        let held = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            if errno == nix::errno::Errno::EWOULDBLOCK {
                OpenError::Held { path: dir.display().to_string() }
            } else {
                io(errno.into())
            }
        })?;
        let recovered = recover::recover(dir)?;
        let path = log_path(dir, recovered.base);
        let file = private().create(true).truncate(false).read(true).write(true).open(&path).map_err(io)?;
        // What lies behind the last whole frame was never acknowledged.
        file.set_len(recovered.log_length).map_err(io)?;
        let mut log = Self {
            dir: dir.to_owned(),
            options,
            file,
            length: recovered.log_length,
            checkpoint_length: recovered.checkpoint_length,
            buffer: Vec::new(),
            _held: held,
        };
        if log.length == 0 {
            log.write_header().map_err(io)?;
        }
        log.file.sync_all().map_err(io)?;
        sync_dir(dir).map_err(io)?;
        remove_others(dir, recovered.base);
        Ok((log, recovered))
    }

    fn write_header(&mut self) -> io::Result<()> {
        self.file.write_all_at(&format::header(FileKind::Log), 0)?;
        self.length = format::HEADER as u64;
        Ok(())
    }

    /// Writes the records as one frame and waits until it is durable.
    pub fn append(&mut self, records: &[&Record]) -> Result<(), AppendError> {
        self.buffer.clear();
        put_frame(&mut self.buffer, |out| records.iter().for_each(|r| r.put(out)));
        if let Err(error) = self.file.write_all_at(&self.buffer, self.length) {
            return match self.file.set_len(self.length) {
                Ok(()) => Err(AppendError::Undone(error)),
                Err(_) => Err(AppendError::Unknown(error)),
            };
        }
        // After a failed fdatasync the kernel may have dropped the dirty pages: a later success proves nothing.
        self.file.sync_data().map_err(AppendError::Unknown)?;
        self.length += self.buffer.len() as u64;
        if self.buffer.capacity() > KEEP_BUFFER {
            self.buffer = Vec::new();
        }
        Ok(())
    }

    /// Writes a checkpoint when the log has outgrown the data. A failure leaves everything as it was: the
    /// log goes on growing and the next batch tries again.
    pub fn checkpoint_if_due(&mut self, snapshot: &Snapshot, leases: &BTreeMap<LeaseId, Lease>) {
        let limit = self.options.min_log.max(self.options.max_ratio * self.checkpoint_length);
        if self.length < limit {
            return;
        }
        if let Err(error) = self.checkpoint(snapshot, leases) {
            tracing::warn!(%error, "the store could not write a checkpoint and keeps its log");
        }
    }

    fn checkpoint(&mut self, snapshot: &Snapshot, leases: &BTreeMap<LeaseId, Lease>) -> io::Result<()> {
        let base = snapshot.revision();
        let temporary = self.dir.join("checkpoint.tmp");
        let length = write_checkpoint(&temporary, snapshot, leases)?;
        let log =
            private().create(true).truncate(true).read(true).write(true).open(log_path(&self.dir, base))?;
        log.write_all_at(&format::header(FileKind::Log), 0)?;
        log.sync_all()?;
        std::fs::rename(&temporary, checkpoint_path(&self.dir, base))?;
        sync_dir(&self.dir)?;
        self.file = log;
        self.length = format::HEADER as u64;
        self.checkpoint_length = length;
        remove_others(&self.dir, base);
        Ok(())
    }
}

fn write_checkpoint(path: &Path, snapshot: &Snapshot, leases: &BTreeMap<LeaseId, Lease>) -> io::Result<u64> {
    let mut file = private().create(true).truncate(true).write(true).open(path)?;
    let mut written = 0;
    let mut write = |bytes: &[u8]| -> io::Result<()> {
        written += bytes.len() as u64;
        file.write_all(bytes)
    };
    write(&format::header(FileKind::Checkpoint))?;
    let mut buffer = Vec::new();
    put_frame(&mut buffer, |out| {
        out.extend_from_slice(&snapshot.revision().0.to_le_bytes());
        out.extend_from_slice(&(snapshot.len() as u64).to_le_bytes());
        out.extend_from_slice(&(leases.len() as u32).to_le_bytes());
        leases.values().for_each(|lease| put_lease(out, *lease));
    });
    write(&buffer)?;
    let mut entries = snapshot.map.iter().peekable();
    while entries.peek().is_some() {
        buffer.clear();
        put_frame(&mut buffer, |out| {
            let start = out.len();
            while out.len() - start < CHECKPOINT_FRAME {
                let Some((key, entry)) = entries.next() else { break };
                put_entry(out, key, entry);
            }
        });
        write(&buffer)?;
    }
    file.sync_all()?;
    Ok(written)
}

/// Objects of the cluster, secrets among them: for the owner alone.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

fn log_path(dir: &Path, base: Revision) -> PathBuf {
    dir.join(format!("log-{:020}", base.0))
}

fn checkpoint_path(dir: &Path, base: Revision) -> PathBuf {
    dir.join(format!("checkpoint-{:020}", base.0))
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Removes what belongs to other checkpoints than `base`. Failing is harmless: the next open tries again.
fn remove_others(dir: &Path, base: Revision) {
    let keep = [log_path(dir, base), checkpoint_path(dir, base)];
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|e| e.path()) {
        let ours = path
            .file_name()
            .and_then(|n| n.to_str())
            .is_some_and(|n| n.starts_with("log-") || n.starts_with("checkpoint"));
        if ours && !keep.contains(&path) {
            let _ = std::fs::remove_file(&path);
        }
    }
}
