//! Checkpoints: every key at one revision, in one file.

use super::disk::{BLOCK, Blocks, Disk, DiskFile};
use super::format::{self, FileKind, Salt, put_entry, put_frame, put_lease};
use crate::entry::{Lease, Revision};
use crate::leases::Leases;
use crate::replica::Snapshot;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Entries are framed in pieces of about this size.
const FRAME: usize = 256 << 10;
/// Where it has to go through the page cache it is written back in steps of this size, so that the log's own
/// synchronisations never wait behind all of it.
const SYNC_EVERY: u64 = 8 << 20;

/// The contents of a checkpoint.
#[derive(Debug)]
pub(crate) struct Contents {
    pub snapshot: Snapshot,
    pub leases: Leases,
}

/// Writes a checkpoint to `path` and makes it durable. Returns its length. Gives up once `cancel` is set.
pub(crate) fn write(
    disk: &dyn Disk,
    path: &Path,
    contents: &Contents,
    cancel: &AtomicBool,
) -> io::Result<u64> {
    let Contents { snapshot, leases } = contents;
    let mut file = Sequential::new(disk.open(path, true)?);
    let salt = Salt::random();
    let header = format::Header { salt, reused: false, blocks: false };
    file.buffer.put(|out, _| out.extend_from_slice(&format::header(FileKind::Checkpoint, header)));
    file.frame(salt, |out| {
        let Revision(revision) = snapshot.revision();
        out.extend_from_slice(&revision.to_le_bytes());
        out.extend_from_slice(&(snapshot.len() as u64).to_le_bytes());
        out.extend_from_slice(&(leases.len() as u32).to_le_bytes());
        for (id, state) in leases.iter() {
            put_lease(out, Lease { id, expires_at: state.expires_at }, state.ttl);
        }
    })?;
    let mut entries = snapshot.map.iter().peekable();
    while entries.peek().is_some() {
        if cancel.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the store is closing"));
        }
        file.frame(salt, |out| {
            let start = out.len();
            while out.len() - start < FRAME {
                let Some((key, entry)) = entries.next() else { break };
                put_entry(out, key, entry);
            }
        })?;
    }
    file.finish()
}

/// A file that is written from its beginning to its end, in whole blocks.
struct Sequential {
    file: Box<dyn DiskFile>,
    buffer: Blocks,
    written: u64,
    synced: u64,
}

impl Sequential {
    fn new(file: Box<dyn DiskFile>) -> Self {
        let mut buffer = Blocks::default();
        buffer.clear(FRAME + FRAME / 4);
        Self { file, buffer, written: 0, synced: 0 }
    }

    /// Adds a frame and writes the blocks that are full.
    fn frame(&mut self, salt: Salt, payload: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        self.buffer.put(|out, _| put_frame(out, salt, payload));
        let full = self.buffer.len() / BLOCK * BLOCK;
        self.write(full)?;
        self.buffer.drain(full);
        Ok(())
    }

    fn write(&mut self, count: usize) -> io::Result<()> {
        let blocks = &self.buffer.as_slice()[..count];
        match self.file.write_blocks(blocks, self.written, false) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                self.file.write_all_at(blocks, self.written)?;
                if self.written + count as u64 - self.synced >= SYNC_EVERY {
                    self.file.sync()?;
                    self.synced = self.written + count as u64;
                }
            }
            done => done?,
        }
        self.written += count as u64;
        Ok(())
    }

    /// Writes the rest and makes everything durable. Returns the file's length.
    fn finish(mut self) -> io::Result<u64> {
        let length = self.written + self.buffer.len() as u64;
        self.buffer.pad();
        self.write(self.buffer.len())?;
        self.file.set_len(length)?;
        self.file.sync()?;
        Ok(length)
    }
}
