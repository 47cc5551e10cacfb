//! The bytes on disk.
//!
//! A file is a 16-byte header followed by frames. A frame is what one synchronisation made durable:
//!
//! ```text
//! magic u32 | length u32 | crc32 u32 (of length and payload) | payload
//! ```
//!
//! Because a frame is only written once the one before it is durable, a broken frame at the very end is a write
//! that was cut off and never acknowledged, and a broken frame with a whole one behind it is damage.
//! Integers are little-endian.

use crate::entry::{Entry, Key, Lease, LeaseId, Revision};
use crate::txn::Op;
use bytes::{Buf, BufMut, Bytes};

pub(crate) const HEADER: usize = 16;
pub(crate) const FRAME_HEADER: usize = 12;
const FRAME_MAGIC: u32 = 0x4652_4D31;
const VERSION: u32 = 1;
/// No frame is longer: bounds what a damaged length can make us read.
pub(crate) const MAX_FRAME: usize = 1 << 30;

/// What a file is for.
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

pub(crate) fn header(kind: FileKind) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[..8].copy_from_slice(kind.magic());
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out
}

pub(crate) fn check_header(bytes: &[u8], kind: FileKind) -> Result<(), String> {
    if bytes.len() < HEADER || &bytes[..8] != kind.magic() {
        return Err("this is not a file of the store".into());
    }
    let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    if version != VERSION {
        return Err(format!("written in format {version}, this program reads format {VERSION}"));
    }
    Ok(())
}

/// Appends a frame around what `payload` writes.
pub(crate) fn put_frame(out: &mut Vec<u8>, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_HEADER]);
    payload(out);
    let length = (out.len() - start - FRAME_HEADER) as u32;
    out[start..start + 4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
    out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
    let crc = checksum(length, &out[start + FRAME_HEADER..]);
    out[start + 8..start + 12].copy_from_slice(&crc.to_le_bytes());
}

fn checksum(length: u32, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

/// Reads the frame at the start of `bytes`; none when there is no whole, intact one.
pub(crate) fn frame(bytes: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    if word(0)? != FRAME_MAGIC {
        return None;
    }
    let length = word(4)?;
    if length as usize > MAX_FRAME {
        return None;
    }
    let payload = bytes.get(FRAME_HEADER..FRAME_HEADER + length as usize)?;
    (checksum(length, payload) == word(8)?).then_some(payload)
}

/// Whether a whole, intact frame starts anywhere in `bytes`.
pub(crate) fn contains_frame(bytes: &[u8]) -> bool {
    let magic = FRAME_MAGIC.to_le_bytes();
    bytes.windows(4).enumerate().any(|(at, w)| w == magic && frame(&bytes[at..]).is_some())
}

/// One transaction as the log keeps it: its operations, not their results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub revision: Revision,
    pub ops: Vec<Op>,
    pub granted: Option<Lease>,
    pub revoked: Option<LeaseId>,
}

const OP_PUT: u8 = 1;
const OP_DELETE: u8 = 2;
const OP_GRANT: u8 = 3;
const OP_REVOKE: u8 = 4;

impl Record {
    pub fn put(&self, out: &mut Vec<u8>) {
        out.put_u64_le(self.revision.0);
        let extra = usize::from(self.granted.is_some()) + usize::from(self.revoked.is_some());
        out.put_u32_le((self.ops.len() + extra) as u32);
        for op in &self.ops {
            match op {
                Op::Put { key, value, lease } => {
                    out.put_u8(OP_PUT);
                    put_bytes(out, key.as_bytes());
                    put_bytes(out, value);
                    out.put_i64_le(lease.0);
                }
                Op::Delete { key } => {
                    out.put_u8(OP_DELETE);
                    put_bytes(out, key.as_bytes());
                }
            }
        }
        if let Some(lease) = self.granted {
            out.put_u8(OP_GRANT);
            put_lease(out, lease);
        }
        if let Some(id) = self.revoked {
            out.put_u8(OP_REVOKE);
            out.put_i64_le(id.0);
        }
    }

    pub fn get(from: &mut Bytes) -> Option<Self> {
        let revision = Revision(from.try_get_u64_le().ok()?);
        let count = from.try_get_u32_le().ok()?;
        let mut record = Self { revision, ..Self::default() };
        for _ in 0..count {
            match from.try_get_u8().ok()? {
                OP_PUT => {
                    let key = Key::from(&get_bytes(from)?);
                    let value = get_bytes(from)?;
                    let lease = LeaseId(from.try_get_i64_le().ok()?);
                    record.ops.push(Op::Put { key, value, lease });
                }
                OP_DELETE => record.ops.push(Op::Delete { key: Key::from(&get_bytes(from)?) }),
                OP_GRANT => record.granted = Some(get_lease(from)?),
                OP_REVOKE => record.revoked = Some(LeaseId(from.try_get_i64_le().ok()?)),
                _ => return None,
            }
        }
        Some(record)
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
    Some((key, Entry { value, created, modified, version, lease }))
}

pub(crate) fn put_lease(out: &mut Vec<u8>, lease: Lease) {
    out.put_i64_le(lease.id.0);
    out.put_u64_le(lease.expires_at);
}

pub(crate) fn get_lease(from: &mut Bytes) -> Option<Lease> {
    let id = LeaseId(from.try_get_i64_le().ok()?);
    Some(Lease { id, expires_at: from.try_get_u64_le().ok()? })
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.put_u32_le(bytes.len() as u32);
    out.extend_from_slice(bytes);
}

fn get_bytes(from: &mut Bytes) -> Option<Bytes> {
    let length = from.try_get_u32_le().ok()? as usize;
    (length <= from.len()).then(|| from.split_to(length))
}
