//! Protobuf's primitives, written from the end to the beginning.

const VARINT: u32 = 0;
const FIXED64: u32 = 1;
const BYTES: u32 = 2;

/// Writes a message from its end to its beginning, so that a length is known when it is written.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// The message is at the end, behind room for more.
    buffer: Vec<u8>,
    start: usize,
}

impl Writer {
    /// Forgets the message and keeps the room.
    pub fn clear(&mut self) {
        self.start = self.buffer.len();
    }

    pub fn written(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    pub fn len(&self) -> usize {
        self.buffer.len() - self.start
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        if bytes.len() > self.start {
            self.grow(bytes.len());
        }
        let start = self.start - bytes.len();
        self.buffer[start..self.start].copy_from_slice(bytes);
        self.start = start;
    }

    fn grow(&mut self, least: usize) {
        const FIRST: usize = 4 << 10;
        let old = self.buffer.len();
        let room = old.max(least).max(FIRST);
        self.buffer.resize(old + room, 0);
        self.buffer.copy_within(self.start..old, self.start + room);
        self.start += room;
    }

    pub fn varint(&mut self, mut number: u64) {
        if number <= 0x7f {
            return self.raw(&[number as u8]);
        }
        let mut buffer = [0u8; 10];
        let mut length = 0;
        loop {
            let more = number > 0x7f;
            buffer[length] = (number & 0x7f) as u8 | if more { 0x80 } else { 0 };
            length += 1;
            number >>= 7;
            if !more {
                break;
            }
        }
        self.raw(&buffer[..length]);
    }

    fn key(&mut self, tag: u32, wire_type: u32) {
        self.varint(u64::from(tag << 3 | wire_type));
    }

    pub fn bytes(&mut self, tag: u32, bytes: &[u8]) {
        self.raw(bytes);
        self.varint(bytes.len() as u64);
        self.key(tag, BYTES);
    }

    pub fn number(&mut self, tag: u32, number: u64) {
        self.varint(number);
        self.key(tag, VARINT);
    }

    /// Negative numbers take ten bytes, as protobuf's int32 and int64 do.
    #[allow(clippy::cast_sign_loss)]
    pub fn signed(&mut self, tag: u32, number: i64) {
        self.number(tag, number as u64);
    }

    pub fn double(&mut self, tag: u32, number: f64) {
        self.raw(&number.to_le_bytes());
        self.key(tag, FIXED64);
    }

    /// Ends a nested message of which everything is written that came after `length` bytes.
    pub fn close(&mut self, tag: u32, length: usize) {
        self.varint((self.len() - length) as u64);
        self.key(tag, BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_first_comes_last_however_much_it_is() {
        let mut writer = Writer::default();
        for length in [0, 1, 4095, 4096, 5000, 100_000] {
            let bytes: Vec<u8> = (0..length).map(|at: u32| at as u8).collect();
            writer.clear();
            for byte in bytes.iter().rev() {
                writer.raw(&[*byte]);
            }
            assert_eq!(writer.written(), bytes);
            writer.clear();
            writer.raw(&bytes);
            writer.raw(b"ab");
            assert_eq!(writer.len(), bytes.len() + 2);
            assert_eq!(writer.written(), [b"ab", &bytes[..]].concat());
        }
    }
}
