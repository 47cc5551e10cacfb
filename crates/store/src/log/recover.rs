//! Reading back what is on disk.

use super::format::{self, FRAME_HEADER, FileKind, HEADER, Record};
use super::{CorruptError, checkpoint_path, log_path};
use crate::entry::{Entry, Lease, LeaseId, Revision};
use crate::history::Change;
use crate::replica::{Map, Snapshot};
use crate::store::OpenError;
use crate::txn::Op;
use bytes::{Buf, Bytes};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// What the files held.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub map: Map,
    pub revision: Revision,
    pub leases: BTreeMap<LeaseId, Lease>,
    /// The revision of the checkpoint: history starts after it.
    pub base: Revision,
    pub changes: Vec<Change>,
    pub log_length: u64,
    pub checkpoint_length: u64,
}

impl Default for Recovered {
    fn default() -> Self {
        let Snapshot { map, revision } = Snapshot::empty();
        Self {
            map,
            revision,
            leases: BTreeMap::new(),
            base: revision,
            changes: Vec::new(),
            log_length: 0,
            checkpoint_length: 0,
        }
    }
}

/// Finds the newest checkpoint and replays the log that belongs to it.
pub(crate) fn recover(dir: &Path) -> Result<Recovered, OpenError> {
    let io = |source| OpenError::Io { path: dir.display().to_string(), source };
    let mut bases: Vec<u64> = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if let Some(base) = name.to_str().and_then(|n| n.strip_prefix("checkpoint-")) {
            bases.extend(base.parse::<u64>().ok());
        }
    }
    let mut recovered = Recovered::default();
    if let Some(base) = bases.into_iter().max() {
        read_checkpoint(&checkpoint_path(dir, Revision(base)), &mut recovered)?;
    }
    replay(&log_path(dir, recovered.base), &mut recovered)?;
    Ok(recovered)
}

fn read(path: &Path) -> Result<Option<Bytes>, OpenError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes.into())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(OpenError::Io { path: path.display().to_string(), source }),
    }
}

fn corrupt(path: &Path, offset: usize, problem: impl Into<String>) -> CorruptError {
    CorruptError { path: path.to_owned(), offset: offset as u64, problem: problem.into() }
}

fn read_checkpoint(path: &Path, into: &mut Recovered) -> Result<(), OpenError> {
    let bytes = read(path)?.unwrap_or_default();
    format::check_header(&bytes, FileKind::Checkpoint).map_err(|p| corrupt(path, 0, p))?;
    let mut at = HEADER;
    let next = |at: &mut usize| -> Result<Bytes, CorruptError> {
        let payload = format::frame(&bytes[*at..])
            .ok_or_else(|| corrupt(path, *at, "a checkpoint ends early or its checksum does not match"))?;
        let payload = bytes.slice_ref(payload);
        *at += FRAME_HEADER + payload.len();
        Ok(payload)
    };
    let mut head = next(&mut at)?;
    let malformed = |at: usize| corrupt(path, at, "a frame of a checkpoint does not read as one");
    let fields = (|| {
        let revision = head.try_get_u64_le().ok()?;
        let count = head.try_get_u64_le().ok()?;
        for _ in 0..head.try_get_u32_le().ok()? {
            let lease = format::get_lease(&mut head)?;
            into.leases.insert(lease.id, lease);
        }
        Some((Revision(revision), count))
    })();
    let (revision, count) = fields.ok_or_else(|| malformed(HEADER))?;
    while (into.map.len() as u64) < count {
        let start = at;
        let mut frame = next(&mut at)?;
        while frame.has_remaining() {
            let (key, entry) = format::get_entry(&mut frame).ok_or_else(|| malformed(start))?;
            into.map.insert(key, Arc::new(entry));
        }
    }
    into.revision = revision;
    into.base = revision;
    into.checkpoint_length = bytes.len() as u64;
    Ok(())
}

fn replay(path: &Path, into: &mut Recovered) -> Result<(), OpenError> {
    let Some(bytes) = read(path)? else { return Ok(()) };
    if bytes.len() < HEADER {
        // Cut off while it was made: nothing in it was ever acknowledged.
        return Ok(());
    }
    format::check_header(&bytes, FileKind::Log).map_err(|p| corrupt(path, 0, p))?;
    let mut at = HEADER;
    while at < bytes.len() {
        let Some(payload) = format::frame(&bytes[at..]) else {
            if format::contains_frame(&bytes[at + 1..]) {
                return Err(corrupt(path, at, "the checksum of a batch does not match").into());
            }
            tracing::info!(
                offset = at,
                bytes = bytes.len() - at,
                "the last write was cut off and had not been acknowledged: dropped"
            );
            break;
        };
        let mut payload = bytes.slice_ref(payload);
        let length = payload.len();
        while payload.has_remaining() {
            let record = Record::get(&mut payload)
                .ok_or_else(|| corrupt(path, at, "a record of the log does not read as one"))?;
            apply(record, into);
        }
        at += FRAME_HEADER + length;
    }
    into.log_length = at as u64;
    Ok(())
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
            })),
            Op::Delete { .. } => None,
        };
        match &entry {
            Some(entry) => into.map.insert(key.clone(), Arc::clone(entry)),
            None => into.map.remove(key.as_bytes()),
        };
        into.changes.push(Change { revision, key, entry, previous });
    }
    if let Some(lease) = record.granted {
        into.leases.insert(lease.id, lease);
    }
    if let Some(id) = record.revoked {
        into.leases.remove(&id);
    }
    into.revision = into.revision.max(revision);
}
