//! The end of a log in memory, in whole blocks.
//!
//! Whole blocks, from memory that begins where a block may begin, go to the disk as they are: one request, and no copy
//! in the page cache. The last block is seldom full. It is kept, and written again with what comes next.

/// A multiple of what every usual disk and file system asks for.
pub(crate) const BLOCK: usize = 4096;
/// The memory is given back when one large batch has blown it up.
const KEEP: usize = 1 << 20;

/// What a file has in its last block that is not full, and what is to follow it.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    bytes: Vec<u8>,
    /// What is before this only brings the rest to where a block may begin.
    start: usize,
    /// Where the bytes end that were put in; zeros may follow.
    end: usize,
    /// How many of them the file has.
    written: usize,
}

impl Blocks {
    /// Begins with what a file has behind its last full block.
    pub fn after(tail: &[u8]) -> Self {
        let mut blocks = Self::default();
        blocks.append(tail.len(), |out| out.extend_from_slice(tail));
        blocks.written = tail.len();
        blocks
    }

    /// Adds what `put` appends, about `size` bytes.
    pub fn append(&mut self, size: usize, put: impl FnOnce(&mut Vec<u8>)) {
        self.make_room(size);
        put(&mut self.bytes);
        self.end = self.bytes.len();
    }

    /// All of it, filled up to whole blocks with zeros.
    pub fn whole(&mut self) -> &[u8] {
        self.make_room(0);
        let end = self.start + (self.end - self.start).next_multiple_of(BLOCK);
        self.bytes.resize(end, 0);
        &self.bytes[self.start..]
    }

    /// The file has everything. Answers how many bytes were new to it.
    pub fn written(&mut self) -> usize {
        let length = self.end - self.start;
        let added = length - self.written;
        let tail = self.end - length % BLOCK..self.end;
        self.written = tail.len();
        if self.bytes.capacity() > KEEP {
            *self = Self::after(&self.bytes[tail]);
        } else {
            self.bytes.copy_within(tail, self.start);
            self.end = self.start + self.written;
        }
        added
    }

    /// Forgets what the file does not have.
    pub fn undo(&mut self) {
        self.end = self.start + self.written;
    }

    /// Ends where the bytes end that were put in, and has room for so many more without being moved.
    fn make_room(&mut self, size: usize) {
        self.bytes.truncate(self.end);
        // A block for moving what there is, another for filling up.
        self.bytes.reserve(size + 2 * BLOCK);
        let (old, start) = (self.start, self.bytes.as_ptr().align_offset(BLOCK));
        if start != old {
            let length = self.end - old;
            self.bytes.resize(old.max(start) + length, 0);
            self.bytes.copy_within(old..old + length, start);
            self.bytes.truncate(start + length);
            (self.start, self.end) = (start, start + length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_file_made_of_blocks_is_what_was_appended(
            tail in 0..BLOCK,
            steps in proptest::collection::vec((0..3 * BLOCK, 0..6 * BLOCK, any::<bool>()), 1..12),
        ) {
            let mut expected = vec![7; BLOCK + tail];
            let mut file = expected.clone();
            let mut blocks = Blocks::after(&file[BLOCK..]);
            for (n, (expected_size, size, succeeds)) in steps.into_iter().enumerate() {
                let bytes = vec![n as u8 + 1; size];
                blocks.append(expected_size, |out| out.extend_from_slice(&bytes));
                let whole = blocks.whole();
                prop_assert_eq!(whole.as_ptr().align_offset(BLOCK), 0);
                prop_assert_eq!(whole.len() % BLOCK, 0);
                if succeeds {
                    let at = expected.len() - expected.len() % BLOCK;
                    file.truncate(at);
                    file.extend_from_slice(whole);
                    expected.extend_from_slice(&bytes);
                    prop_assert_eq!(blocks.written(), size);
                } else {
                    blocks.undo();
                }
                prop_assert_eq!(&file[..expected.len()], &expected[..]);
                prop_assert!(file.iter().skip(expected.len()).all(|byte| *byte == 0) || !succeeds);
            }
        }
    }

    #[test]
    fn a_large_batch_does_not_stay() {
        let mut blocks = Blocks::default();
        blocks.append(3 << 20, |out| out.extend_from_slice(&vec![1; (3 << 20) + 5]));
        blocks.whole();
        assert_eq!(blocks.written(), (3 << 20) + 5);
        assert!(blocks.bytes.capacity() < KEEP);
        assert_eq!(&blocks.whole()[..6], [1, 1, 1, 1, 1, 0]);
    }
}
