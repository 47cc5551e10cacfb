//! Tells a batch that was damaged after it was written from one whose writing was cut off.
//!
//! Both are a frame whose checksum does not match. One that was cut off was never acknowledged and may be dropped; one
//! that was damaged may have been, and dropping it would lose it silently. A frame with a whole one behind it is
//! damaged: frames are written one after the other. For the very last one its bytes have to speak.

use super::format::{FRAME_HEADER, FrameHeader, Salt};

/// Returns true if the broken frame at the start of `rest` was once whole: one flipped bit explains the
/// mismatch. The remains of an interrupted write match by chance about once in 100,000 times for each
/// block.
pub(super) fn was_whole(rest: &[u8], salt: Salt) -> bool {
    let Some((header, _)) = rest.split_at_checked(FRAME_HEADER) else { return false };
    // The magic number and the length decide how much is read: every way to mend them is tried.
    for bit in 0..64 {
        let mut mended: [u8; FRAME_HEADER] = [0; FRAME_HEADER];
        mended.copy_from_slice(header);
        mended[bit / 8] ^= 1 << (bit % 8);
        if let Some((header, payload)) = frame(&mended, rest, salt)
            && header.fits(salt, payload)
        {
            return true;
        }
    }
    frame(header, rest, salt)
        .is_some_and(|(header, payload)| is_one_bit(header.mismatch(salt, payload), payload.len()))
}

/// The frame that `header` says follows it in `rest`, if all of it is there.
fn frame<'a>(header: &[u8], rest: &'a [u8], salt: Salt) -> Option<(FrameHeader, &'a [u8])> {
    let header = FrameHeader::read(header, salt)?;
    Some((header, rest.get(FRAME_HEADER..FRAME_HEADER.checked_add(header.length)?)?))
}

/// Returns true if one flipped bit, in the checksum itself or in one of the `length` bytes that it covers
/// last, changes a CRC-32 by `mismatch`. The checksum is linear: the change depends on the place of the bit
/// alone.
fn is_one_bit(mismatch: u32, length: usize) -> bool {
    if mismatch.count_ones() == 1 {
        return true;
    }
    let table = table();
    let mut changes: [u32; 8] = std::array::from_fn(|bit| table[1 << bit]);
    for _ in 0..length {
        if changes.contains(&mismatch) {
            return true;
        }
        for change in &mut changes {
            *change = table[(*change & 0xff) as usize] ^ (*change >> 8);
        }
    }
    false
}

/// The contribution of each byte to a CRC-32, reflected, polynomial 0x04C11DB7.
fn table() -> [u32; 256] {
    std::array::from_fn(|byte| {
        (0..8).fold(byte as u32, |value, _| (value >> 1) ^ if value & 1 == 1 { 0xEDB8_8320 } else { 0 })
    })
}

#[cfg(test)]
mod tests {
    use super::super::disk::BLOCK;
    use super::super::format::{Made, put_blocks};
    use super::*;
    use crate::entry::{Entry, Key, LeaseId, Plain, Revision};
    use crate::history::Change;
    use bytes::Bytes;
    use std::sync::Arc;

    /// A device writes this much whole or not at all.
    const SECTOR: usize = 512;

    fn written(salt: Salt, size: usize) -> Vec<u8> {
        let value = Bytes::from((0..size).map(|i| (i % 251) as u8 | 1).collect::<Vec<_>>());
        let revision = Revision(7);
        let entry = Entry {
            value,
            created: revision,
            modified: revision,
            version: 1,
            lease: LeaseId::NONE,
            plain: Plain::default(),
        };
        let changes = [Change {
            revision,
            key: Key::from("/registry/k"),
            entry: Some(Arc::new(entry)),
            previous: None,
        }];
        let mut out = Vec::new();
        put_blocks(&mut out, 0, salt, |out| Made { revision, changes: &changes, leases: &[] }.put(out));
        out
    }

    #[test]
    fn every_flipped_bit_is_known() {
        let salt = Salt::random();
        let whole = written(salt, 900);
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            assert!(was_whole(&bytes, salt), "byte {at}");
        }
    }

    #[test]
    fn a_write_that_was_cut_off_is_not_damage() {
        let salt = Salt::random();
        let whole = written(salt, 9000);
        for cut in (1..whole.len()).step_by(SECTOR / 2) {
            let mut bytes = whole.clone();
            bytes[cut / SECTOR * SECTOR..].fill(0);
            // Padding may be missing: then nothing was lost, and the frame is whole.
            if bytes != whole {
                assert!(!was_whole(&bytes, salt), "cut at {cut}");
            }
        }
        for missing in 0..whole.len() / BLOCK {
            for left in [0, 0x5a] {
                let mut bytes = whole.clone();
                bytes[missing * BLOCK..(missing + 1) * BLOCK].fill(left);
                assert!(!was_whole(&bytes, salt), "block {missing}");
            }
        }
        assert!(!was_whole(&[], salt));
        assert!(!was_whole(&whole[..7], salt));
    }
}
