//! The bytes on disk.
//!
//! A file is a 20-byte header (magic, format version u16, flags u16, salt, crc32 of these) followed by frames. In a log,
//! a frame is the data that one synchronisation made durable:
//!
//! ```text
//! magic u32 | length u32 | crc32 u32 (of salt, length and payload) | payload
//! ```
//!
//! Because a frame is only written once the one before it is durable, a broken frame at the very end is a write
//! that was cut off and never acknowledged, and a broken frame with a whole one behind it is damage. So that the last
//! one is not taken for cut off when it is damaged, a log that has been idle for a moment, or is closed, gets a frame
//! more that only says that everything before it is durable; the next frame overwrites it. The salt is
//! chosen anew for every file and is part of magic and checksum, so that no value a client stores can look like a
//! frame, nor like many that have to be looked into. A log may be written over an older one, whose blocks the file
//! system then need not find again; the remains of that one behind the last frame have other salts and are
//! ignored.
//!
//! In a file of blocks, header and frames begin at multiples of 4096 bytes, so that they can be written past the page
//! cache and no block that was acknowledged is ever written again. Behind the header there are zeros; zeros at the end
//! of a frame's payload are part of it. Integers are little-endian.

use super::disk::BLOCK;
use crate::entry::{Entry, Key, Lease, LeaseId, Plain, Revision};
use crate::history::Change;
use crate::txn::Op;
use bytes::{Buf, BufMut, Bytes};
use std::hash::BuildHasher;

pub(crate) const HEADER: usize = 20;
pub(crate) const FRAME_HEADER: usize = 12;
const FRAME_MAGIC: u32 = 0x4652_4D31;
const VERSION: u16 = 3;
/// The file is written over an older one.
const REUSED: u16 = 1;
/// Header and frames are whole blocks.
const BLOCKS: u16 = 2;
/// No frame is longer: limits the read for a damaged length.
pub(crate) const MAX_FRAME: usize = 1 << 30;

/// The purpose of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Log,
    Checkpoint,
}

impl FileKind {
    fn magic(self) -> &'static [u8; 8] {
        match self {
            Self::Log => b"FERRLOG\0",
            Self::Checkpoint => b"FERRCKP\0",
        }
    }
}

/// Makes the checksums of one file different from those of all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Salt(u32);

impl Salt {
    pub fn random() -> Self {
        // Keyed from the operating system's random source. Zeros behind the end must not look like a frame.
        match std::hash::RandomState::new().hash_one(0u8) as u32 {
            FRAME_MAGIC => Self(0),
            salt => Self(salt),
        }
    }

    fn magic(self) -> [u8; 4] {
        (FRAME_MAGIC ^ self.0).to_le_bytes()
    }
}

/// The header of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub salt: Salt,
    /// Behind the last frame there may be the remains of another file.
    pub reused: bool,
    /// Header and frames are whole blocks.
    pub blocks: bool,
}

impl Header {
    /// Where the first frame begins.
    pub fn end(self) -> usize {
        if self.blocks { BLOCK } else { HEADER }
    }
}

pub(crate) fn header(kind: FileKind, header: Header) -> [u8; HEADER] {
    let Header { salt, reused, blocks } = header;
    let flags = if reused { REUSED } else { 0 } | if blocks { BLOCKS } else { 0 };
    let mut out = [0; HEADER];
    out[..8].copy_from_slice(kind.magic());
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    out[10..12].copy_from_slice(&flags.to_le_bytes());
    out[12..16].copy_from_slice(&salt.0.to_le_bytes());
    let crc = crc32fast::hash(&out[..16]);
    out[16..].copy_from_slice(&crc.to_le_bytes());
    out
}

pub(crate) fn check_header(bytes: &[u8], kind: FileKind) -> Result<Header, String> {
    if bytes.len() < HEADER || &bytes[..8] != kind.magic() {
        return Err("this is not a file of the store".into());
    }
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let (version, flags) = (half(8), half(10));
    if version != VERSION {
        return Err(format!("written in format {version}, this program reads format {VERSION}"));
    }
    if bytes[16..HEADER] != crc32fast::hash(&bytes[..16]).to_le_bytes() {
        return Err("the checksum of the header does not match".into());
    }
    if flags & !(REUSED | BLOCKS) != 0 {
        return Err(format!("written with flags {flags:#x}, which this program does not know"));
    }
    let salt = Salt(u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]));
    Ok(Header { salt, reused: flags & REUSED != 0, blocks: flags & BLOCKS != 0 })
}

/// Appends a frame around the payload that fills whole blocks; `out` has had whole blocks since `base`.
pub(crate) fn put_blocks(out: &mut Vec<u8>, base: usize, salt: Salt, payload: impl FnOnce(&mut Vec<u8>)) {
    put_frame(out, salt, |out| {
        payload(out);
        let end = base + (out.len() - base).next_multiple_of(BLOCK);
        out.resize(end, 0);
    });
}

/// Appends a frame around the payload.
pub(crate) fn put_frame(out: &mut Vec<u8>, salt: Salt, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_HEADER]);
    payload(out);
    seal(out, start, salt);
}

/// Makes a frame of the bytes behind the room for its header at `start`.
pub(crate) fn seal(out: &mut [u8], start: usize, salt: Salt) {
    let length = (out.len() - start - FRAME_HEADER) as u32;
    out[start..start + 4].copy_from_slice(&salt.magic());
    out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
    let crc = checksum(salt, length, &out[start + FRAME_HEADER..]);
    out[start + 8..start + 12].copy_from_slice(&crc.to_le_bytes());
}

fn checksum(salt: Salt, length: u32, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&salt.0.to_le_bytes());
    hasher.update(&length.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

/// The header of a frame: the length and the checksum of its payload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameHeader {
    pub length: usize,
    crc: u32,
}

impl FrameHeader {
    pub fn read(bytes: &[u8], salt: Salt) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let (length, crc) = (word(4)? as usize, word(8)?);
        (bytes[..4] == salt.magic() && length <= MAX_FRAME).then_some(Self { length, crc })
    }

    pub fn fits(&self, salt: Salt, payload: &[u8]) -> bool {
        self.mismatch(salt, payload) == 0
    }

    /// The bits in which the stored checksum differs from the payload's.
    pub fn mismatch(&self, salt: Salt, payload: &[u8]) -> u32 {
        checksum(salt, self.length as u32, payload) ^ self.crc
    }
}

/// Returns true if a frame begins here, even a broken one.
pub(crate) fn begins_frame(bytes: &[u8], salt: Salt) -> bool {
    bytes.starts_with(&salt.magic())
}

/// Returns true if a whole, intact frame starts in `bytes` after position 0. Candidates are the starts of
/// blocks, or every byte for a file without blocks.
pub(crate) fn contains_frame(bytes: &[u8], salt: Salt, blocks: bool) -> bool {
    let step = if blocks { BLOCK } else { 1 };
    (step..bytes.len()).step_by(step).filter(|at| begins_frame(&bytes[*at..], salt)).any(|at| {
        let rest = &bytes[at..];
        FrameHeader::read(rest, salt).is_some_and(|h| {
            rest.get(FRAME_HEADER..FRAME_HEADER + h.length).is_some_and(|payload| h.fits(salt, payload))
        })
    })
}

/// Returns true if only the zeros that fill a frame's last block are left. No item begins with
/// `ITEM_HEADER` zeros.
pub(crate) fn is_padding(payload: &[u8]) -> bool {
    payload.iter().take(ITEM_HEADER).all(|byte| *byte == 0)
}

/// A change of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseRecord {
    /// Made, or renewed.
    Granted {
        lease: Lease,
        ttl: u64,
    },
    Revoked(LeaseId),
}

/// A transaction on its way into the log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made<'a> {
    pub revision: Revision,
    /// One for each operation.
    pub changes: &'a [Change],
    pub leases: &'a [LeaseRecord],
}

/// One transaction as the log keeps it: its operations, not their results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub revision: Revision,
    pub ops: Vec<Op>,
    pub leases: Vec<LeaseRecord>,
}

/// An item of a frame in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    Record(Record),
    /// Revisions up to this one may have been seen by readers without being in the log.
    Reserved(Revision),
    /// The log before this one ended at this byte.
    Follows(u64),
    /// Everything before this byte of the log is durable. Stands alone in a frame, which the next one overwrites.
    Confirmed(u64),
}

/// A number and how many operations follow, at least one.
const ITEM_HEADER: usize = 12;
const OP_PUT: u8 = 1;
const OP_DELETE: u8 = 2;
const OP_GRANT: u8 = 3;
const OP_REVOKE: u8 = 4;
const OP_RESERVE: u8 = 5;
const OP_FOLLOWS: u8 = 6;
const OP_CONFIRMED: u8 = 7;

impl Made<'_> {
    pub fn put(&self, out: &mut Vec<u8>) {
        out.put_u64_le(self.revision.0);
        out.put_u32_le((self.changes.len() + self.leases.len()) as u32);
        for Change { key, entry, .. } in self.changes {
            match entry {
                Some(entry) => {
                    out.put_u8(OP_PUT);
                    put_bytes(out, key.as_bytes());
                    put_bytes(out, &entry.value);
                    out.put_i64_le(entry.lease.0);
                }
                None => {
                    out.put_u8(OP_DELETE);
                    put_bytes(out, key.as_bytes());
                }
            }
        }
        for lease in self.leases {
            match *lease {
                LeaseRecord::Granted { lease, ttl } => {
                    out.put_u8(OP_GRANT);
                    put_lease(out, lease, ttl);
                }
                LeaseRecord::Revoked(id) => {
                    out.put_u8(OP_REVOKE);
                    out.put_i64_le(id.0);
                }
            }
        }
    }
}

pub(crate) fn put_reserved(out: &mut Vec<u8>, revision: Revision) {
    put_number(out, revision.0, OP_RESERVE);
}

pub(crate) fn put_follows(out: &mut Vec<u8>, length: u64) {
    put_number(out, length, OP_FOLLOWS);
}

pub(crate) fn put_confirmed(out: &mut Vec<u8>, length: u64) {
    put_number(out, length, OP_CONFIRMED);
}

fn put_number(out: &mut Vec<u8>, number: u64, op: u8) {
    out.put_u64_le(number);
    out.put_u32_le(1);
    out.put_u8(op);
}

impl Item {
    pub fn get(from: &mut Bytes) -> Option<Self> {
        let revision = Revision(from.try_get_u64_le().ok()?);
        let count = from.try_get_u32_le().ok()?;
        let mut record = Record { revision, ..Record::default() };
        for _ in 0..count {
            match from.try_get_u8().ok()? {
                OP_PUT => {
                    let key = Key::from(&get_bytes(from)?);
                    let value = get_bytes(from)?;
                    let lease = LeaseId(from.try_get_i64_le().ok()?);
                    record.ops.push(Op::Put { key, value, lease });
                }
                OP_DELETE => record.ops.push(Op::Delete { key: Key::from(&get_bytes(from)?) }),
                OP_GRANT => {
                    let (lease, ttl) = get_lease(from)?;
                    record.leases.push(LeaseRecord::Granted { lease, ttl });
                }
                OP_REVOKE => {
                    record.leases.push(LeaseRecord::Revoked(LeaseId(from.try_get_i64_le().ok()?)));
                }
                OP_RESERVE => return Some(Self::Reserved(revision)),
                OP_FOLLOWS => return Some(Self::Follows(revision.0)),
                OP_CONFIRMED => return Some(Self::Confirmed(revision.0)),
                _ => return None,
            }
        }
        Some(Self::Record(record))
    }
}

pub(crate) fn put_entry(out: &mut Vec<u8>, key: &Key, entry: &Entry) {
    put_bytes(out, key.as_bytes());
    put_bytes(out, &entry.value);
    out.put_u64_le(entry.created.0);
    out.put_u64_le(entry.modified.0);
    out.put_u64_le(entry.version);
    out.put_i64_le(entry.lease.0);
}

pub(crate) fn get_entry(from: &mut Bytes) -> Option<(Key, Entry)> {
    let key = Key::from(&get_bytes(from)?);
    // A copy of its own: a slice would keep the whole frame in memory for as long as one entry lives.
    let value = Bytes::copy_from_slice(&get_bytes(from)?);
    let created = Revision(from.try_get_u64_le().ok()?);
    let modified = Revision(from.try_get_u64_le().ok()?);
    let version = from.try_get_u64_le().ok()?;
    let lease = LeaseId(from.try_get_i64_le().ok()?);
    Some((key, Entry { value, created, modified, version, lease, plain: Plain::default() }))
}

pub(crate) fn put_lease(out: &mut Vec<u8>, lease: Lease, ttl: u64) {
    out.put_i64_le(lease.id.0);
    out.put_u64_le(lease.expires_at);
    out.put_u64_le(ttl);
}

pub(crate) fn get_lease(from: &mut Bytes) -> Option<(Lease, u64)> {
    let id = LeaseId(from.try_get_i64_le().ok()?);
    let expires_at = from.try_get_u64_le().ok()?;
    Some((Lease { id, expires_at }, from.try_get_u64_le().ok()?))
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.put_u32_le(bytes.len() as u32);
    out.extend_from_slice(bytes);
}

fn get_bytes(from: &mut Bytes) -> Option<Bytes> {
    let length = from.try_get_u32_le().ok()? as usize;
    (length <= from.len()).then(|| from.split_to(length))
}
