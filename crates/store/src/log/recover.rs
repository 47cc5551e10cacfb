//! Reads the files on disk. Changes nothing, so it can also read a store that another process holds.

use super::damage;
use super::disk::BLOCK;
use super::format::{
    self, FRAME_HEADER, FileKind, FrameHeader, HEADER, Header, Item, LeaseRecord, Record, Salt,
};
use super::{CorruptError, checkpoint_path, log_path, numbered};
use crate::entry::{Entry, Plain, Revision};
use crate::history::{Change, History, HistoryLimits};
use crate::leases::Leases;
use crate::replica::Map;
use crate::store::OpenError;
use crate::txn::Op;
use bytes::{Buf, Bytes};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The state read from the files.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub map: Map,
    pub revision: Revision,
    pub leases: Leases,
    pub history: History,
    /// The chain of logs that was read.
    pub first_log: u64,
    pub last_log: u64,
    /// Of the last log: its salt, and how long its intact part is.
    pub salt: Salt,
    pub blocks: bool,
    pub log_length: u64,
    pub checkpoint_length: u64,
    /// Bytes of all logs.
    pub logs_length: u64,
    /// Bytes behind the last whole frame of the last log.
    pub torn: u64,
}

impl Recovered {
    pub fn empty(limits: HistoryLimits) -> Self {
        Self {
            map: Map::new(),
            revision: Revision(0),
            leases: Leases::default(),
            history: History::new(limits, Revision(0)),
            first_log: 0,
            last_log: 0,
            salt: Salt::random(),
            blocks: false,
            log_length: 0,
            checkpoint_length: 0,
            logs_length: 0,
            torn: 0,
        }
    }

    fn attach_all(&mut self) {
        for (key, entry) in &self.map {
            if entry.lease != crate::LeaseId::NONE {
                self.leases.reattach(key, None, Some(entry));
            }
        }
    }
}

/// Finds the newest checkpoint and replays the logs that follow it.
pub(crate) fn recover(dir: &Path, limits: HistoryLimits) -> Result<Recovered, OpenError> {
    let io = |source| OpenError::Io { path: dir.display().to_string(), source };
    let mut recovered = Recovered::empty(limits);
    if let Some(newest) = numbered(dir, "checkpoint-").map_err(io)?.pop() {
        read_checkpoint(&checkpoint_path(dir, newest), &mut recovered)?;
        recovered.first_log = newest;
        recovered.history = History::new(limits, recovered.revision);
    }
    let first = recovered.first_log;
    let logs: Vec<u64> = numbered(dir, "log-").map_err(io)?.into_iter().filter(|n| *n >= first).collect();
    let has_checkpoint = recovered.checkpoint_length > 0;
    let last = logs.last().copied();
    recovered.last_log = last.unwrap_or(first);
    let mut reserved = Revision(0);
    // The chain has no holes: a missing part would silently undo its changes.
    let mut before = None;
    for (expected, found) in (first..).zip(&logs) {
        if expected != *found {
            let problem = format!("the log is missing, although {} exists", log_path(dir, *found).display());
            return Err(corrupt(&log_path(dir, expected), 0, problem).into());
        }
        let path = log_path(dir, *found);
        let end = replay(&path, Some(*found) == last, before.take(), &mut recovered, &mut reserved)?;
        before = Some(Before { path, at: recovered.log_length, end });
    }
    if has_checkpoint && logs.is_empty() {
        let problem = "the log that follows the checkpoint is missing";
        return Err(corrupt(&log_path(dir, first), 0, problem).into());
    }
    if reserved > recovered.revision {
        // Readers may have seen changes up to here that did not reach the disk. Their revisions are not
        // used again, and a reader that has seen one has to list anew.
        tracing::info!(
            written = recovered.revision.0,
            next = reserved.0 + 1,
            "not closed cleanly: revisions of relaxed changes are skipped"
        );
        recovered.revision = reserved;
        recovered.history.drop_through(reserved);
    }
    Ok(recovered)
}

/// Reads a file that is a checkpoint and nothing else: a snapshot.
pub(crate) fn read_checkpoint_file(path: &Path) -> Result<Recovered, OpenError> {
    let mut recovered = Recovered::empty(HistoryLimits::default());
    read_checkpoint(path, &mut recovered)?;
    Ok(recovered)
}

const DAMAGED_TAIL: &str = "the last batch was changed after it was written, and may have been acknowledged";

fn corrupt(path: &Path, offset: u64, problem: impl Into<String>) -> CorruptError {
    CorruptError { path: path.to_owned(), offset, problem: problem.into() }
}

/// A file read frame by frame.
struct Frames<'a> {
    path: &'a Path,
    file: BufReader<File>,
    length: u64,
    at: u64,
    header: Header,
}

/// The next part of a file.
enum Next {
    Frame(Bytes),
    /// Not a whole, intact frame.
    Broken,
    End,
}

/// The kind of data behind the last whole frame of a log.
enum Rest {
    /// Made ahead and never written: zeros, or the remains of the log this one is written over.
    Room,
    /// A write that was cut off.
    CutOff,
    /// A frame that was whole once.
    Damaged,
    /// Intact frames behind a broken one.
    Frames,
}

impl<'a> Frames<'a> {
    /// None when the file is too short to have a header.
    fn open(path: &'a Path, kind: FileKind) -> Result<Option<Self>, OpenError> {
        let io = |source| OpenError::Io { path: path.display().to_string(), source };
        let file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        if length < HEADER as u64 {
            return Ok(None);
        }
        let mut file = BufReader::with_capacity(256 << 10, file);
        let mut header = [0; HEADER];
        file.read_exact(&mut header).map_err(io)?;
        let header = format::check_header(&header, kind).map_err(|p| corrupt(path, 0, p))?;
        if header.blocks {
            let mut filling = [0; BLOCK - HEADER];
            match file.read_exact(&mut filling) {
                Ok(()) if filling.iter().all(|byte| *byte == 0) => {}
                Ok(()) => {
                    return Err(corrupt(path, HEADER as u64, "the header is followed by something").into());
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                Err(error) => return Err(io(error)),
            }
        }
        Ok(Some(Self { path, file, length, at: header.end() as u64, header }))
    }

    fn io(&self, source: io::Error) -> OpenError {
        OpenError::Io { path: self.path.display().to_string(), source }
    }

    fn next(&mut self) -> Result<Next, OpenError> {
        match self.read()? {
            Next::Broken => {
                // Another process may be writing to the file: the buffer may hold outdated data.
                self.file.seek(SeekFrom::Start(self.at)).map_err(|e| self.io(e))?;
                self.read()
            }
            next => Ok(next),
        }
    }

    fn read(&mut self) -> Result<Next, OpenError> {
        let left = self.length - self.at;
        if left == 0 {
            return Ok(Next::End);
        }
        if left < FRAME_HEADER as u64 {
            return Ok(Next::Broken);
        }
        let mut header = [0; FRAME_HEADER];
        self.file.read_exact(&mut header).map_err(|e| self.io(e))?;
        let Some(header) = FrameHeader::read(&header, self.header.salt) else { return Ok(Next::Broken) };
        if header.length as u64 > left - FRAME_HEADER as u64 {
            return Ok(Next::Broken);
        }
        let mut payload = vec![0; header.length];
        self.file.read_exact(&mut payload).map_err(|e| self.io(e))?;
        if !header.fits(self.header.salt, &payload) {
            return Ok(Next::Broken);
        }
        self.at += (FRAME_HEADER + header.length) as u64;
        Ok(Next::Frame(payload.into()))
    }

    /// Classifies the data behind the last whole frame.
    fn rest(&self) -> Result<Rest, OpenError> {
        let mut rest = vec![0; (self.length - self.at) as usize];
        std::os::unix::fs::FileExt::read_exact_at(self.file.get_ref(), &mut rest, self.at)
            .map_err(|e| self.io(e))?;
        let Header { salt, reused, blocks } = self.header;
        Ok(match rest.iter().all(|byte| *byte == 0) {
            true => Rest::Room,
            false if format::contains_frame(&rest, salt, blocks) => Rest::Frames,
            false if damage::was_whole(&rest, salt) => Rest::Damaged,
            false if reused && !format::begins_frame(&rest, salt) => Rest::Room,
            false => Rest::CutOff,
        })
    }
}

fn read_checkpoint(path: &Path, into: &mut Recovered) -> Result<(), OpenError> {
    let Some(mut frames) = Frames::open(path, FileKind::Checkpoint)? else {
        return Err(corrupt(path, 0, "the file is shorter than its header").into());
    };
    let malformed = |at| corrupt(path, at, "a frame of a checkpoint does not read as one");
    let next = |frames: &mut Frames<'_>| -> Result<Bytes, OpenError> {
        let at = frames.at;
        match frames.next()? {
            Next::Frame(bytes) => Ok(bytes),
            Next::Broken => {
                Err(corrupt(path, at, "a checkpoint ends early or its checksum does not match").into())
            }
            Next::End => Err(corrupt(path, at, "a checkpoint ends before all its entries").into()),
        }
    };
    let mut head = next(&mut frames)?;
    let fields = (|| {
        let revision = head.try_get_u64_le().ok()?;
        let count = head.try_get_u64_le().ok()?;
        for _ in 0..head.try_get_u32_le().ok()? {
            let (lease, ttl) = format::get_lease(&mut head)?;
            into.leases.grant(lease, ttl);
        }
        Some((Revision(revision), count))
    })();
    let (revision, count) = fields.ok_or_else(|| malformed(HEADER as u64))?;
    while (into.map.len() as u64) < count {
        let start = frames.at;
        let mut frame = next(&mut frames)?;
        while frame.has_remaining() {
            let (key, entry) = format::get_entry(&mut frame).ok_or_else(|| malformed(start))?;
            into.map.insert(key, Arc::new(entry));
        }
    }
    if frames.at != frames.length {
        return Err(corrupt(path, frames.at, "there is something behind the end of a checkpoint").into());
    }
    into.attach_all();
    into.revision = revision;
    into.checkpoint_length = frames.length;
    Ok(())
}

/// The way a log ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// With its last frame.
    Exact,
    /// With room that was not used.
    Room,
}

/// The log before the one that is read.
struct Before {
    path: PathBuf,
    /// Where its last whole frame ended.
    at: u64,
    end: End,
}

impl Before {
    /// It had to end at this byte.
    fn check(&self, length: u64) -> Result<(), CorruptError> {
        match self.at == length {
            true => Ok(()),
            false => Err(corrupt(&self.path, self.at, "the checksum of a batch does not match")),
        }
    }

    /// The log after it does not say where it ended: its end has to speak for itself.
    fn check_alone(&self) -> Result<(), CorruptError> {
        match self.end {
            End::Exact => Ok(()),
            End::Room => Err(corrupt(&self.path, self.at, "the checksum of a batch does not match")),
        }
    }
}

fn replay(
    path: &Path,
    last: bool,
    mut before: Option<Before>,
    into: &mut Recovered,
    reserved: &mut Revision,
) -> Result<End, OpenError> {
    let Some(mut frames) = Frames::open(path, FileKind::Log)? else {
        if last {
            before.map_or(Ok(()), |before| before.check_alone())?;
            // Cut off while it was made: nothing in it was ever acknowledged.
            into.log_length = 0;
            into.salt = Salt::random();
            into.blocks = false;
            return Ok(End::Exact);
        }
        return Err(corrupt(path, 0, "the file is shorter than its header").into());
    };
    let mut confirmed = false;
    let (end, data_ends) = loop {
        let data_ends = frames.at;
        match frames.next()? {
            Next::Frame(mut payload) => {
                while payload.has_remaining() && !(frames.header.blocks && format::is_padding(&payload)) {
                    let item = Item::get(&mut payload);
                    // It is the first that a log of blocks says.
                    match (before.take(), &item) {
                        (Some(before), Some(Item::Follows(length))) => before.check(*length)?,
                        (Some(before), _) => before.check_alone()?,
                        (None, _) => {}
                    }
                    match item {
                        Some(Item::Record(record)) => apply(record, into),
                        Some(Item::Reserved(revision)) => *reserved = revision,
                        Some(Item::Follows(_)) => {}
                        Some(Item::Confirmed(length)) if length == data_ends => confirmed = true,
                        Some(Item::Confirmed(_)) | None => {
                            return Err(
                                corrupt(path, frames.at, "a record of the log does not read as one").into()
                            );
                        }
                    }
                }
                if confirmed {
                    // The next frame was to be written over this one: nothing behind it counts.
                    break (End::Room, data_ends);
                }
            }
            Next::End => break (End::Exact, data_ends),
            Next::Broken => match frames.rest()? {
                Rest::Room if last => break (End::Room, data_ends),
                // Only the last log can have been cut off: it was whole and durable before the next was begun.
                Rest::Damaged => return Err(corrupt(path, frames.at, DAMAGED_TAIL).into()),
                Rest::CutOff if last => {
                    into.torn = frames.length - frames.at;
                    break (End::Room, data_ends);
                }
                // The next log records if this one had to end here. If so, the bytes behind do not matter.
                Rest::Room | Rest::CutOff if frames.header.blocks => break (End::Room, data_ends),
                _ => return Err(corrupt(path, frames.at, "the checksum of a batch does not match").into()),
            },
        }
    };
    before.map_or(Ok(()), |before| before.check_alone())?;
    into.log_length = data_ends;
    into.logs_length += data_ends;
    into.salt = frames.header.salt;
    into.blocks = frames.header.blocks;
    Ok(end)
}

fn apply(record: Record, into: &mut Recovered) {
    let revision = record.revision;
    for op in record.ops {
        let key = op.key().clone();
        let previous = into.map.get(key.as_bytes()).cloned();
        let entry = match op {
            Op::Put { value, lease, .. } => Some(Arc::new(Entry {
                value: Bytes::copy_from_slice(&value),
                created: previous.as_ref().map_or(revision, |p| p.created),
                modified: revision,
                version: previous.as_ref().map_or(1, |p| p.version + 1),
                lease,
                plain: Plain::default(),
            })),
            Op::Delete { .. } => None,
        };
        into.leases.reattach(&key, previous.as_ref(), entry.as_ref());
        match &entry {
            Some(entry) => into.map.insert(key.clone(), Arc::clone(entry)),
            None => into.map.remove(key.as_bytes()),
        };
        into.history.push(Change { revision, key, entry, previous });
    }
    for lease in record.leases {
        match lease {
            LeaseRecord::Granted { lease, ttl } => into.leases.grant(lease, ttl),
            LeaseRecord::Revoked(id) => into.leases.revoke(id),
        }
    }
    into.revision = into.revision.max(revision);
}
