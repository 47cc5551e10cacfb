//! The file operations the log stands on, as a seam: tests put faults in between.

use nix::fcntl::OFlag;
use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Alignment of direct writes, in the file and in memory: each begins and ends at a multiple of this. No
/// current device requires more.
pub(crate) const BLOCK: usize = 4096;

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
    /// Writes whole blocks from aligned memory past the page cache. With `durable`, they and the file's length are
    /// durable when it returns. [`io::ErrorKind::Unsupported`] where that is not possible, and nothing was written.
    fn write_blocks(&self, blocks: &[u8], offset: u64, durable: bool) -> io::Result<()>;
    /// Writes zeros from `start` to `end`. Blocks that were written before are cheaper to synchronise than blocks that
    /// are only set aside: the file system has nothing more to note about them.
    fn fill(&self, start: u64, end: u64) -> io::Result<()> {
        let mut blocks = Blocks::default();
        blocks.zeros((end - start).min(ROOM as u64) as usize);
        let mut at = start;
        while at < end {
            let count = (end - at).min(ROOM as u64);
            let zeros = &blocks.as_slice()[..count as usize];
            match self.write_blocks(zeros, at, false) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => self.write_all_at(zeros, at)?,
                done => done?,
            }
            at += count;
        }
        Ok(())
    }
}

/// Zeros written at a time.
const ROOM: usize = 256 << 10;

/// Bytes at an aligned place in memory.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    bytes: Vec<u8>,
    /// The offset at which the blocks begin; the bytes before it are padding for the alignment.
    start: usize,
}

impl Blocks {
    /// Empties the buffer and reserves room for about `size` bytes.
    pub fn clear(&mut self, size: usize) {
        self.bytes.clear();
        self.bytes.reserve(size + 2 * BLOCK);
        self.start = self.bytes.as_ptr().align_offset(BLOCK).min(BLOCK);
        self.bytes.resize(self.start, 0);
    }

    /// Makes the buffer hold `size` zeros and nothing else.
    fn zeros(&mut self, size: usize) {
        self.clear(size);
        self.bytes.resize(self.start + size, 0);
    }

    /// Lets `put` append to the buffer. It receives the offset at which the blocks begin and must not
    /// change earlier bytes.
    pub fn put(&mut self, put: impl FnOnce(&mut Vec<u8>, usize)) {
        put(&mut self.bytes, self.start);
    }

    /// Number of bytes in the buffer.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Adds zeros up to the end of the block.
    pub fn pad(&mut self) {
        let end = self.start + self.len().next_multiple_of(BLOCK);
        self.bytes.resize(end, 0);
    }

    /// The bytes, at an aligned place.
    pub fn as_slice(&mut self) -> &[u8] {
        let place = self.bytes.as_ptr().align_offset(BLOCK);
        if place != self.start {
            // It has outgrown its memory and was moved.
            let length = self.len();
            self.bytes.reserve(BLOCK);
            let place = self.bytes.as_ptr().align_offset(BLOCK).min(BLOCK);
            let from = self.start;
            self.bytes.resize(from.max(place) + length, 0);
            self.bytes.copy_within(from..from + length, place);
            self.bytes.truncate(place + length);
            self.start = place;
        }
        &self.bytes[self.start..]
    }

    /// Forgets the first `count` bytes.
    pub fn drain(&mut self, count: usize) {
        let (from, length) = (self.start + count, self.len() - count);
        self.bytes.copy_within(from.., self.start);
        self.bytes.truncate(self.start + length);
    }

    /// Gives the memory back when it is more than `most` and most of it was not needed.
    pub fn shrink(&mut self, most: usize) {
        if self.bytes.capacity() > most && self.len() < self.bytes.capacity() / 4 {
            *self = Self::default();
        }
    }
}

/// The real thing.
#[derive(Debug)]
pub(crate) struct RealDisk;

impl Disk for RealDisk {
    fn open(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>> {
        // Objects of the cluster, secrets among them: for the owner alone.
        let file = OpenOptions::new().mode(0o600).create(true).truncate(truncate).write(true).open(path)?;
        // Not every file system can; then everything goes through the page cache.
        let past_cache = |flags: OFlag| {
            OpenOptions::new().write(true).custom_flags((OFlag::O_DIRECT | flags).bits()).open(path).ok()
        };
        let (direct, durable) = (past_cache(OFlag::empty()), past_cache(OFlag::O_DSYNC));
        Ok(Box::new(RealFile { file, direct, durable }))
    }
}

/// A file and two more ways into it: past the page cache, and past it with every write durable at once.
#[derive(Debug)]
struct RealFile {
    file: File,
    direct: Option<File>,
    durable: Option<File>,
}

impl DiskFile for RealFile {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn write_blocks(&self, blocks: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        let aligned = blocks.as_ptr().align_offset(BLOCK) == 0
            && blocks.len().is_multiple_of(BLOCK)
            && offset.is_multiple_of(BLOCK as u64);
        let file = if durable { &self.durable } else { &self.direct };
        let Some(file) = file.as_ref().filter(|_| aligned) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut done = 0;
        while done < blocks.len() {
            match file.write_at(&blocks[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A file system that takes the flag and does not mean it says so with the first write.
                Err(error) if done == 0 && error.kind() == io::ErrorKind::InvalidInput => {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Makes creations, renames and removals in a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_stay_aligned_however_they_grow() {
        let mut blocks = Blocks::default();
        let mut expected = Vec::new();
        for round in 0..40u8 {
            blocks.put(|out, _| out.extend_from_slice(&vec![round; 3000]));
            expected.extend_from_slice(&vec![round; 3000]);
            let slice = blocks.as_slice();
            assert_eq!(slice.as_ptr().align_offset(BLOCK), 0);
            assert_eq!(slice, expected);
            if round % 7 == 0 {
                let full = expected.len() / BLOCK * BLOCK;
                blocks.drain(full);
                expected.drain(..full);
            }
        }
        blocks.pad();
        expected.resize(expected.len().next_multiple_of(BLOCK), 0);
        assert_eq!(blocks.as_slice(), expected);
        blocks.clear(10);
        assert_eq!(blocks.len(), 0);
        blocks.put(|out, base| assert_eq!(out.len(), base));
    }

    #[test]
    fn memory_that_was_not_needed_is_given_back() {
        // Room, bytes in it, how much may be kept: whether it is.
        for (room, used, most, kept) in
            [(100_000, 90_000, 50_000, true), (100_000, 10, 50_000, false), (100_000, 10, 200_000, true)]
        {
            let mut blocks = Blocks::default();
            blocks.clear(room);
            blocks.put(|out, _| out.resize(out.len() + used, 1));
            blocks.shrink(most);
            assert_eq!(blocks.len() == used, kept, "{used} of {room}, {most} may stay");
        }
    }

    #[test]
    fn only_whole_blocks_are_written_past_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let file = RealDisk.open(&dir.path().join("f"), true).unwrap();
        let mut blocks = Blocks::default();
        blocks.clear(2 * BLOCK);
        blocks.put(|out, _| out.extend_from_slice(&[1; 2 * BLOCK]));
        let bytes = blocks.as_slice();
        for (slice, offset) in [(&bytes[..100], 0), (&bytes[1..=BLOCK], 0), (&bytes[..BLOCK], 512)] {
            let error = file.write_blocks(slice, offset, true).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        }
        assert_eq!(std::fs::metadata(dir.path().join("f")).unwrap().len(), 0);
    }
}
