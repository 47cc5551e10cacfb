//! The embedded backend: a checkpoint of everything and a log of what happened since.
//!
//! `checkpoint-<n>` holds every key as it was when `log-<n>` was begun; `log-<n>`, `log-<n+1>`, ... hold
//! the later changes. Appending is one write and one fdatasync for all transactions that waited. When the
//! log has outgrown
//! the data, the writer begins the next log and goes on; meanwhile a thread writes the checkpoint that belongs
//! to it from a snapshot, makes it durable under its name, and only then removes the earlier files: a crash
//! at
//! any instant leaves one whole chain. Every byte appended costs at most one byte of checkpoint.
//!
//! A log that is no longer needed becomes `spare`, and the next log is written over it: to synchronise
//! blocks that have been written before takes the file system half the time. The log writes whole blocks
//! with direct I/O. The unused rest of the older file stays behind the end of the new log; each log begins
//! with the byte at which its predecessor ended.

pub(crate) mod checkpoint;
mod damage;
pub(crate) mod disk;
#[cfg(test)]
mod faults;
mod format;
mod recover;

pub(crate) use checkpoint::Contents;
pub(crate) use format::{LeaseRecord, Made};
pub(crate) use recover::{Recovered, read_checkpoint_file, recover};

use crate::entry::Revision;
use crate::history::HistoryLimits;
use crate::store::OpenError;
use disk::{BLOCK, Blocks, Disk, DiskFile, RealDisk, sync_dir};
use format::{
    FRAME_HEADER, FileKind, Header, Salt, put_blocks, put_confirmed, put_follows, put_frame, put_reserved,
    seal,
};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A file with other contents than were written.
#[derive(Debug, thiserror::Error)]
#[error("{} is damaged at byte {offset}: {problem}. Restore a snapshot; if this is the last log, `ferrite store repair` can drop what is damaged", .path.display())]
pub struct CorruptError {
    pub path: PathBuf,
    pub offset: u64,
    pub problem: String,
}

/// When a checkpoint is due, and how long relaxed changes may wait.
#[derive(Debug, Clone, Copy)]
pub struct LogOptions {
    /// The log never triggers a checkpoint below this size.
    pub min_log: u64,
    /// Above it, the log may be this many times as large as the last checkpoint.
    pub max_ratio: u64,
    /// A change committed with [`Durability::Relaxed`](crate::Durability) is on disk after at most this long.
    pub relaxed_window: Duration,
    /// The log's file is filled with zeros in steps of this size before it is written to, and old logs are written over:
    /// a synchronisation then only has to bring data to the disk, nothing about the file. Zero for never; frames then
    /// follow each other without gaps.
    pub ahead: u64,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { min_log: 16 << 20, max_ratio: 1, relaxed_window: Duration::from_secs(10), ahead: 1 << 20 }
    }
}

/// Why a batch is not durable.
#[derive(Debug)]
pub(crate) enum AppendError {
    /// The file is as it was before: the batch can be given up and others may follow.
    Undone(io::Error),
    /// The state of the disk is unknown.
    Unknown(io::Error),
}

/// Holds a directory against other processes for as long as it lives.
#[derive(Debug)]
pub(crate) struct Held(#[expect(dead_code, reason = "held for its destructor")] Flock<File>);

/// Changes that are visible but not yet written.
#[derive(Debug, Default)]
struct Deferred {
    /// As the log keeps them.
    records: Vec<u8>,
    /// The revision of the last one.
    last: Option<Revision>,
    /// When the first of them was made.
    since: Option<Instant>,
}

/// Transactions in the log's format, behind room for the header of a frame, and the revision of the last.
/// Their callers encode them, while the disk is busy with earlier ones.
#[derive(Debug)]
pub(crate) struct Records(Blocks, Option<Revision>);

impl Default for Records {
    fn default() -> Self {
        let mut records = Self(Blocks::default(), None);
        records.clear();
        records
    }
}

impl Records {
    pub fn clear(&mut self) {
        self.0.shrink(KEEP_BUFFER);
        self.0.clear(0);
        self.0.put(|out, _| out.extend_from_slice(&[0; FRAME_HEADER]));
        self.1 = None;
    }

    pub fn push(&mut self, made: &Made<'_>) {
        self.0.put(|out, _| made.put(out));
        self.1 = Some(made.revision);
    }

    /// The revision of the last one.
    pub fn last(&self) -> Option<Revision> {
        self.1
    }
}

/// The open log.
#[derive(Debug)]
pub(crate) struct Log {
    dir: PathBuf,
    options: LogOptions,
    disk: Arc<dyn Disk>,
    /// Which log of the chain is being written.
    sequence: u64,
    file: Box<dyn DiskFile>,
    salt: Salt,
    /// Frames are whole blocks.
    blocks: bool,
    length: u64,
    /// Length of the file. Behind the written part are zeros, or the remains of an older log.
    allocated: u64,
    checkpoint_length: u64,
    buffer: Blocks,
    deferred: Deferred,
    /// Revisions up to this one may be shown without being written: recovery will not use them again.
    reserved: Revision,
    /// When the last frame was written, until the log says behind it that it is durable.
    unconfirmed: Option<Instant>,
    checkpointing: Option<Checkpointing>,
    _held: Held,
}

#[derive(Debug)]
struct Checkpointing {
    thread: JoinHandle<io::Result<u64>>,
    cancel: Arc<AtomicBool>,
}

/// Called with the result of a checkpoint.
pub(crate) type Notice = Box<dyn FnOnce(Result<(), String>) + Send>;

/// A larger write buffer is given back after a batch that did not need it.
const KEEP_BUFFER: usize = 1 << 20;
/// No more than this waits in memory, however long the window is.
const MAX_DEFERRED: usize = 4 << 20;
/// A log that was idle for this long says that its last frame is durable.
const CONFIRM_AFTER: Duration = Duration::from_secs(1);
/// Revisions reserved at once for relaxed changes: one heartbeat a second for half an hour.
const RESERVE: u64 = 2000;

impl Log {
    pub fn open(
        dir: &Path,
        options: LogOptions,
        limits: HistoryLimits,
    ) -> Result<(Self, Recovered), OpenError> {
        Self::open_on(Arc::new(RealDisk), dir, options, limits)
    }

    pub fn open_on(
        disk: Arc<dyn Disk>,
        dir: &Path,
        options: LogOptions,
        limits: HistoryLimits,
    ) -> Result<(Self, Recovered), OpenError> {
        let io = |source| OpenError::Io { path: dir.display().to_string(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io)?;
        let held = hold(dir)?;
        let recovered = recover(dir, limits)?;
        let sequence = recovered.last_log;
        let path = log_path(dir, sequence);
        let file = disk.open(&path, false).map_err(io)?;
        // The bytes behind the last whole frame were never acknowledged, as far as we can know.
        keep_torn(dir, &path, &recovered).map_err(io)?;
        file.set_len(recovered.log_length).map_err(io)?;
        let mut log = Self {
            dir: dir.to_owned(),
            options,
            disk,
            sequence,
            file,
            salt: recovered.salt,
            blocks: recovered.blocks,
            length: recovered.log_length,
            allocated: recovered.log_length,
            checkpoint_length: recovered.checkpoint_length,
            buffer: Blocks::default(),
            deferred: Deferred::default(),
            // The reserved revisions are used up: recovery has moved the revision past them.
            reserved: Revision(0),
            unconfirmed: Some(Instant::now()),
            checkpointing: None,
            _held: held,
        };
        if log.length == 0 {
            log.blocks = options.ahead > 0;
            let header = Header { salt: log.salt, reused: false, blocks: log.blocks };
            let mut bytes = format::header(FileKind::Log, header).to_vec();
            bytes.resize(header.end(), 0);
            log.file.write_all_at(&bytes, 0).map_err(io)?;
            log.length = bytes.len() as u64;
            log.allocated = log.length;
        }
        log.file.sync().map_err(io)?;
        sync_dir(dir).map_err(io)?;
        remove_before(dir, recovered.first_log);
        remove_spare(dir);
        Ok((log, recovered))
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns true if readers may see changes up to `revision` before they are written.
    pub fn may_defer(&self, revision: Revision) -> bool {
        revision <= self.reserved && self.deferred.records.len() < MAX_DEFERRED
    }

    /// Keeps records for later. The caller has asked [`Self::may_defer`].
    pub fn defer(&mut self, records: &mut Records, now: Instant) {
        self.deferred.records.extend_from_slice(&records.0.as_slice()[FRAME_HEADER..]);
        self.deferred.last = records.1.or(self.deferred.last);
        self.deferred.since.get_or_insert(now);
    }

    /// The time at which deferred records have to be written.
    pub fn flush_at(&self) -> Option<Instant> {
        self.deferred.since.map(|since| since + self.options.relaxed_window)
    }

    /// Gives records that could not be written another window: with a full disk there is nothing better to
    /// do.
    pub fn postpone(&mut self, now: Instant) {
        self.deferred.since = self.deferred.since.map(|_| now);
    }

    pub fn has_deferred(&self) -> bool {
        !self.deferred.records.is_empty()
    }

    /// Writes the deferred records and `records` as one frame and waits until it is durable. With
    /// `reserve`, relaxed changes may follow it without a write of their own.
    pub fn append(&mut self, records: &mut Records, reserve: bool) -> Result<(), AppendError> {
        let last = records.1.or(self.deferred.last);
        let reserved =
            last.filter(|r| reserve && r.0 + RESERVE / 2 > self.reserved.0).map(|r| Revision(r.0 + RESERVE));
        std::mem::swap(&mut self.buffer, &mut records.0);
        if self.has_deferred() {
            let at = self.buffer.len() - FRAME_HEADER;
            self.buffer.put(|out, _| {
                out.extend_from_slice(&self.deferred.records);
                // They came first.
                let all = out.len() - at - self.deferred.records.len();
                out[all..].rotate_left(at);
            });
        }
        if let Some(reserved) = reserved {
            self.buffer.put(|out, _| put_reserved(out, reserved));
        }
        self.write_frame()?;
        self.deferred = Deferred::default();
        self.reserved = reserved.unwrap_or(self.reserved);
        Ok(())
    }

    /// Appends a frame with the payload that is in the buffer and waits until it is durable.
    fn write_frame(&mut self) -> Result<(), AppendError> {
        if self.blocks {
            self.buffer.pad();
        }
        self.buffer.put(|out, base| seal(out, base, self.salt));
        self.write_buffer()
    }

    /// Extends the file for the next writes and more. A failure is harmless: writing extends the file as
    /// well, and reports a full disk.
    fn make_room(&mut self) {
        let end = self.length + self.buffer.len() as u64;
        if self.options.ahead == 0 || end <= self.allocated {
            return;
        }
        let ahead = self.options.ahead.next_multiple_of(BLOCK as u64);
        let filled = self.file.fill(end, end + ahead);
        self.allocated = end + ahead;
        if let Err(error) = filled {
            tracing::debug!(%error, "no room was made ahead for the log");
            // It is unknown how far it got. If this fails too, the bytes there are still only room.
            let _ = self.give_room_back();
        }
    }

    /// Cuts off space that was allocated and not written.
    fn give_room_back(&mut self) -> io::Result<()> {
        if self.allocated > self.length {
            self.file.set_len(self.length)?;
            self.allocated = self.length;
        }
        Ok(())
    }

    fn write_buffer(&mut self) -> Result<(), AppendError> {
        self.make_room();
        let bytes = self.buffer.as_slice();
        let written = match self.blocks {
            true => self.file.write_blocks(bytes, self.length, true),
            false => Err(io::ErrorKind::Unsupported.into()),
        };
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                if let Err(error) = self.file.write_all_at(bytes, self.length) {
                    return Err(self.take_back(error));
                }
                // After a failed fdatasync the kernel may have dropped the dirty pages: a later success proves nothing.
                self.file.sync().map_err(AppendError::Unknown)?;
            }
            Err(error)
                if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                return Err(self.take_back(error));
            }
            Err(error) => return Err(AppendError::Unknown(error)),
        }
        self.length += self.buffer.len() as u64;
        self.unconfirmed = Some(Instant::now());
        self.buffer.shrink(KEEP_BUFFER);
        Ok(())
    }

    /// When the log should say that its last frame is durable, unless another follows before.
    pub fn confirm_at(&self) -> Option<Instant> {
        self.unconfirmed.filter(|_| self.blocks).map(|since| since + CONFIRM_AFTER)
    }

    /// Says behind the last frame that it is durable, so that nobody takes it for cut off should it be damaged. This
    /// itself need not be durable, and the next frame is written over it.
    pub fn confirm(&mut self) {
        self.unconfirmed = None;
        if !self.blocks {
            return;
        }
        let length = self.length;
        self.buffer.clear(BLOCK);
        self.buffer.put(|out, base| put_blocks(out, base, self.salt, |out| put_confirmed(out, length)));
        let bytes = self.buffer.as_slice();
        let written = match self.file.write_blocks(bytes, length, false) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => self.file.write_all_at(bytes, length),
            done => done,
        };
        match written {
            Ok(()) => self.allocated = self.allocated.max(length + bytes.len() as u64),
            // Nothing is lost: the next frame overwrites whatever is there.
            Err(error) => tracing::debug!(%error, "the end of the log was not confirmed"),
        }
    }

    /// Cuts off the remains of a failed write.
    fn take_back(&mut self, error: io::Error) -> AppendError {
        // The disk may be full, and this takes room that is not needed.
        remove_spare(&self.dir);
        self.allocated = self.length;
        match self.file.set_len(self.length).and_then(|()| self.file.sync()) {
            Ok(()) => AppendError::Undone(error),
            Err(_) => AppendError::Unknown(error),
        }
    }

    /// Writes the deferred records and gives back the revisions that were reserved and not used.
    pub fn close(&mut self, revision: Revision) -> Result<(), AppendError> {
        if self.has_deferred() || self.reserved > revision {
            self.buffer.clear(self.deferred.records.len());
            self.buffer.put(|out, _| {
                out.extend_from_slice(&[0; FRAME_HEADER]);
                out.extend_from_slice(&self.deferred.records);
                put_reserved(out, revision);
            });
            self.write_frame()?;
            self.deferred = Deferred::default();
            self.reserved = revision;
        }
        remove_spare(&self.dir);
        // Everything is durable as it is; a file that stays longer is read all the same.
        if let Err(error) = self.give_room_back() {
            tracing::debug!(%error, "the log stays longer than it has to be");
        }
        self.confirm();
        Ok(())
    }

    /// Returns true if the log has become larger than its limit.
    pub fn checkpoint_due(&mut self) -> bool {
        if self.checkpointing.as_ref().is_some_and(|c| c.thread.is_finished()) {
            self.finish_checkpoint();
        }
        let limit = self.limit();
        if self.checkpointing.is_some() && self.length >= limit.saturating_mul(2) {
            // Writers are faster than the checkpoint: they have to wait, or the disk fills up.
            self.finish_checkpoint();
        }
        self.checkpointing.is_none() && self.length >= limit
    }

    /// Length of the log at which a checkpoint is due.
    fn limit(&self) -> u64 {
        self.options.min_log.max(self.options.max_ratio.saturating_mul(self.checkpoint_length))
    }

    /// Begins the next log, and a thread that writes the checkpoint it starts from. Nothing may be deferred. A
    /// failure leaves everything as it was: the log goes on growing.
    pub fn checkpoint(&mut self, contents: Contents, notice: Option<Notice>) {
        debug_assert!(!self.has_deferred());
        self.finish_checkpoint();
        if let Err(error) = self.rotate() {
            tracing::warn!(%error, "the store could not begin a new log and goes on with the old one");
            if let Some(notice) = notice {
                notice(Err(error.to_string()));
            }
            return;
        }
        let (disk, dir, sequence) = (Arc::clone(&self.disk), self.dir.clone(), self.sequence);
        let cancel = Arc::new(AtomicBool::new(false));
        let cancelled = Arc::clone(&cancel);
        let thread = std::thread::Builder::new().name("store-checkpoint".into()).stack_size(256 << 10).spawn(
            move || {
                let result = write_checkpoint(&*disk, &dir, sequence, &contents, &cancelled);
                if let Some(notice) = notice {
                    notice(result.as_ref().map(|_| ()).map_err(ToString::to_string));
                }
                result
            },
        );
        match thread {
            Ok(thread) => self.checkpointing = Some(Checkpointing { thread, cancel }),
            Err(error) => tracing::warn!(%error, "the store could not start a thread for a checkpoint"),
        }
    }

    fn rotate(&mut self) -> io::Result<()> {
        // A log whose successor does not say where it ended has to end with its last frame.
        let blocks = self.options.ahead > 0;
        if !(blocks && self.blocks) && self.allocated > self.length {
            self.give_room_back()?;
            self.file.sync()?;
        }
        let path = log_path(&self.dir, self.sequence + 1);
        let spare = self.dir.join(SPARE);
        let room = std::fs::metadata(&spare).map_or(0, |found| found.len());
        let reused = room > 0 && blocks;
        let salt = Salt::random();
        let header = Header { salt, reused, blocks };
        self.buffer.clear(2 * BLOCK);
        self.buffer.put(|out, base| {
            out.extend_from_slice(&format::header(FileKind::Log, header));
            if blocks {
                out.resize(base + BLOCK, 0);
                put_blocks(out, base, salt, |out| {
                    put_follows(out, self.length);
                    put_reserved(out, self.reserved);
                });
            } else if self.reserved > Revision(0) {
                put_frame(out, salt, |out| put_reserved(out, self.reserved));
            }
        });
        let length = self.buffer.len() as u64;
        // A store that has shrunk does not keep the file size that it once needed.
        let most = self.limit().saturating_mul(2).saturating_add(self.options.ahead);
        let bytes = self.buffer.as_slice();
        let made = (|| {
            // It gets its name when it is whole: from then on the log before it has ended.
            let file = self.disk.open(&spare, !reused)?;
            let mut room = room;
            if reused && room > most {
                room = self.options.min_log.max(length);
                file.set_len(room)?;
            }
            file.write_all_at(bytes, 0)?;
            file.sync()?;
            std::fs::rename(&spare, &path)?;
            sync_dir(&self.dir)?;
            Ok((file, room))
        })();
        match made {
            Ok((file, room)) => {
                self.file = file;
                self.salt = salt;
                self.blocks = blocks;
                self.length = length;
                self.allocated = if reused { room.max(length) } else { length };
                self.sequence += 1;
                Ok(())
            }
            Err(error) => {
                // A file that was begun is the end of the chain for the next open: it must not stay behind while
                // the old log goes on.
                match std::fs::remove_file(&path) {
                    Ok(()) => sync_dir(&self.dir)?,
                    Err(gone) if gone.kind() == io::ErrorKind::NotFound => {}
                    Err(stuck) => return Err(stuck),
                }
                Err(error)
            }
        }
    }

    /// Waits for a checkpoint that is being written.
    fn finish_checkpoint(&mut self) {
        let Some(running) = self.checkpointing.take() else { return };
        match running.thread.join() {
            Ok(Ok(length)) => self.checkpoint_length = length,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the store could not write a checkpoint and keeps its logs");
            }
            Err(_) => tracing::error!("the thread that writes a checkpoint panicked; the logs are kept"),
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if let Some(running) = &self.checkpointing {
            running.cancel.store(true, Ordering::Relaxed);
        }
        self.finish_checkpoint();
    }
}

/// Writes `checkpoint-<sequence>` and removes the files that it makes superfluous.
pub(crate) fn write_checkpoint(
    disk: &dyn Disk,
    dir: &Path,
    sequence: u64,
    contents: &Contents,
    cancel: &AtomicBool,
) -> io::Result<u64> {
    let temporary = dir.join("checkpoint.tmp");
    let written = checkpoint::write(disk, &temporary, contents, cancel).and_then(|length| {
        std::fs::rename(&temporary, checkpoint_path(dir, sequence))?;
        sync_dir(dir)?;
        Ok(length)
    });
    match written {
        Ok(_) => remove_before(dir, sequence),
        // The unfinished file would only take up space.
        Err(_) => drop(std::fs::remove_file(&temporary)),
    }
    written
}

/// Begins an empty log.
pub(crate) fn start_log(path: &Path) -> io::Result<()> {
    let file = RealDisk.open(path, true)?;
    let header = Header { salt: Salt::random(), reused: false, blocks: false };
    file.write_all_at(&format::header(FileKind::Log, header), 0)?;
    file.sync()
}

/// Room for an object of the largest size there is.
const PROBE: u64 = 2 << 20;

/// Writes a file and removes it, to see whether the disk has room again.
pub(crate) fn probe(dir: &Path) -> io::Result<()> {
    let path = dir.join("probe");
    let file = RealDisk.open(&path, true)?;
    let written = file.fill(0, PROBE).and_then(|()| file.sync());
    std::fs::remove_file(&path)?;
    written
}

/// Takes the directory for this process.
pub(crate) fn hold(dir: &Path) -> Result<Held, OpenError> {
    let io = |source| OpenError::Io { path: dir.display().to_string(), source };
    let lock = OpenOptions::new()
        .mode(0o600)
        .create(true)
        .truncate(false)
        .write(true)
        .open(dir.join("lock"))
        .map_err(io)?;
    let held = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
        if errno == nix::errno::Errno::EWOULDBLOCK {
            OpenError::Held { path: dir.display().to_string() }
        } else {
            io(errno.into())
        }
    })?;
    Ok(Held(held))
}

pub(crate) fn log_path(dir: &Path, sequence: u64) -> PathBuf {
    dir.join(format!("log-{sequence:012}"))
}

pub(crate) fn checkpoint_path(dir: &Path, sequence: u64) -> PathBuf {
    dir.join(format!("checkpoint-{sequence:012}"))
}

/// The log that is written to, or was last.
pub(crate) fn last_log(dir: &Path) -> io::Result<Option<PathBuf>> {
    Ok(numbered(dir, "log-")?.pop().map(|sequence| log_path(dir, sequence)))
}

/// The files of a directory that begin with `prefix` and end with a number.
fn numbered(dir: &Path, prefix: &str) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        numbers
            .extend(name.to_str().and_then(|n| n.strip_prefix(prefix)).and_then(|n| n.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Prefix of the files that keep bytes cut off behind the end of a log, for later analysis. The newest
/// `TORN_KEPT` are kept.
const TORN: &str = "torn-";
const TORN_KEPT: usize = 3;
/// No batch is larger by much.
const MOST_TORN: u64 = 64 << 20;

/// Copies the bytes that are about to be cut off the last log, and logs a warning.
fn keep_torn(dir: &Path, log: &Path, recovered: &Recovered) -> io::Result<()> {
    if recovered.torn == 0 {
        return Ok(());
    }
    let kept = dir.join(format!("{TORN}{:012}-{:012}", recovered.last_log, recovered.log_length));
    let mut from = File::open(log)?;
    from.seek(io::SeekFrom::Start(recovered.log_length))?;
    let mut to = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&kept)?;
    io::copy(&mut from.take(recovered.torn.min(MOST_TORN)), &mut to)?;
    to.sync_all()?;
    tracing::warn!(
        file = %log.display(), offset = recovered.log_length, bytes = recovered.torn, kept = %kept.display(),
        "the last write was cut off before it was acknowledged; its bytes are kept aside"
    );
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)?.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(TORN.as_bytes()))
    });
    files.sort_unstable();
    for old in files.iter().rev().skip(TORN_KEPT) {
        std::fs::remove_file(old)?;
    }
    Ok(())
}

/// A log that is no longer needed, to be written over.
const SPARE: &str = "spare";

fn remove_spare(dir: &Path) {
    let _ = std::fs::remove_file(dir.join(SPARE));
}

/// Removes files that a newer checkpoint made superfluous, but for one log. Failing is harmless: the next
/// open tries again.
fn remove_before(dir: &Path, sequence: u64) {
    let _ = std::fs::remove_file(dir.join("checkpoint.tmp"));
    if let Some(old) = numbered(dir, "log-").unwrap_or_default().into_iter().rfind(|n| *n < sequence) {
        let _ = std::fs::rename(log_path(dir, old), dir.join(SPARE));
    }
    for (prefix, path) in [("checkpoint-", checkpoint_path as fn(&Path, u64) -> PathBuf), ("log-", log_path)]
    {
        for old in numbered(dir, prefix).unwrap_or_default().into_iter().filter(|n| *n < sequence) {
            let _ = std::fs::remove_file(path(dir, old));
        }
    }
}
