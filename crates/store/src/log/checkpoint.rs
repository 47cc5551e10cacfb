//! Checkpoints: every key at one revision, in one file.

use super::disk::{Disk, DiskFile};
use super::format::{self, FileKind, Salt, put_entry, put_frame, put_lease};
use crate::entry::{Lease, Revision};
use crate::leases::Leases;
use crate::replica::Snapshot;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Entries are framed in pieces of about this size.
const FRAME: usize = 1 << 20;
/// Written back in steps of this size, so that the log's own synchronisations never wait behind all of it.
const SYNC_EVERY: u64 = 8 << 20;

/// What a checkpoint holds.
#[derive(Debug)]
pub(crate) struct Contents {
    pub snapshot: Snapshot,
    pub leases: Leases,
}

/// Writes a checkpoint to `path` and makes it durable. Answers its length. Gives up once `cancel` is set.
pub(crate) fn write(
    disk: &dyn Disk,
    path: &Path,
    contents: &Contents,
    cancel: &AtomicBool,
) -> io::Result<u64> {
    let Contents { snapshot, leases } = contents;
    let mut file = Sequential { file: disk.open(path, true)?, written: 0, synced: 0 };
    let salt = Salt::random();
    file.write(&format::header(FileKind::Checkpoint, format::Header { salt, reused: false }))?;
    let mut buffer = Vec::with_capacity(FRAME + FRAME / 4);
    put_frame(&mut buffer, salt, |out| {
        let Revision(revision) = snapshot.revision();
        out.extend_from_slice(&revision.to_le_bytes());
        out.extend_from_slice(&(snapshot.len() as u64).to_le_bytes());
        out.extend_from_slice(&(leases.len() as u32).to_le_bytes());
        for (id, state) in leases.iter() {
            put_lease(out, Lease { id, expires_at: state.expires_at }, state.ttl);
        }
    });
    file.write(&buffer)?;
    let mut entries = snapshot.map.iter().peekable();
    while entries.peek().is_some() {
        if cancel.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the store is closing"));
        }
        buffer.clear();
        put_frame(&mut buffer, salt, |out| {
            let start = out.len();
            while out.len() - start < FRAME {
                let Some((key, entry)) = entries.next() else { break };
                put_entry(out, key, entry);
            }
        });
        file.write(&buffer)?;
    }
    file.file.sync()?;
    Ok(file.written)
}

struct Sequential {
    file: Box<dyn DiskFile>,
    written: u64,
    synced: u64,
}

impl Sequential {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.written)?;
        self.written += bytes.len() as u64;
        if self.written - self.synced >= SYNC_EVERY {
            self.file.sync()?;
            self.synced = self.written;
        }
        Ok(())
    }
}
