//! Writes messages of netlink.

use std::net::IpAddr;

/// The flags of a request.
pub mod flag {
    pub const REQUEST: u16 = 1;
    /// The kernel answers when it is done.
    pub const ACK: u16 = 4;
    /// Every object, not one.
    pub const DUMP: u16 = 0x300;
    pub const REPLACE: u16 = 0x100;
    /// Only if it does not exist.
    pub const EXCLUSIVE: u16 = 0x200;
    pub const CREATE: u16 = 0x400;
    /// Behind those that are there.
    pub const APPEND: u16 = 0x800;
    /// Of an answer: what is listed changed in between.
    pub const DUMP_INTERRUPTED: u16 = 0x10;
    /// Of an error: it does not repeat the request.
    pub const CAPPED: u16 = 0x100;
    /// Of an error: attributes follow.
    pub const EXPLAINED: u16 = 0x200;
}

/// The attribute's data are attributes. Part of its type.
pub const NESTED: u16 = 0x8000;

/// The length of a message's header.
pub(crate) const HEADER: usize = 16;

/// Messages one after the other in one buffer. Each is numbered.
#[derive(Debug, Clone, Default)]
pub struct Messages {
    bytes: Vec<u8>,
    /// The number of the next message.
    sequence: u32,
    /// Where the last message begins.
    last: usize,
}

/// The position of a length that is filled in at the end.
#[derive(Debug)]
pub struct Open(usize);

impl Open {
    /// Where the attribute begins.
    pub fn position(&self) -> usize {
        self.0
    }
}

impl Messages {
    /// No messages yet; the first one gets the number.
    pub fn new(sequence: u32) -> Self {
        Self { sequence, ..Self::default() }
    }

    /// One request. It gets its number when it is sent.
    pub(crate) fn request(kind: u16, flags: u16) -> Self {
        let mut request = Self::default();
        request.start(kind, flag::REQUEST | flag::ACK | flags);
        request
    }

    /// Numbers the only message, and completes it.
    pub(crate) fn numbered(&mut self, sequence: u32) -> &[u8] {
        self.finish();
        if let Some(field) = self.bytes.get_mut(8..12) {
            field.copy_from_slice(&sequence.to_ne_bytes());
        }
        &self.bytes
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Makes room for that many bytes at once.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve(bytes);
    }

    pub fn next_sequence(&self) -> u32 {
        self.sequence
    }

    /// Begins a message.
    pub fn start(&mut self, kind: u16, flags: u16) {
        self.last = self.bytes.len();
        self.bytes.extend_from_slice(&0_u32.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&self.sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&0_u32.to_ne_bytes());
        self.sequence = self.sequence.wrapping_add(1);
    }

    /// Ends the message that was started last.
    pub fn finish(&mut self) {
        let len = u32::try_from(self.bytes.len() - self.last).unwrap_or(u32::MAX);
        if let Some(field) = self.bytes.get_mut(self.last..self.last + 4) {
            field.copy_from_slice(&len.to_ne_bytes());
        }
    }

    /// Adds flags to the message that was started last.
    pub fn add_flags(&mut self, flags: u16) {
        if let Some([first, second]) = self.bytes.get_mut(self.last + 6..self.last + 8) {
            [*first, *second] = (u16::from_ne_bytes([*first, *second]) | flags).to_ne_bytes();
        }
    }

    /// The fixed part behind the header, whose length is a multiple of four.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Begins an attribute.
    pub fn open(&mut self, kind: u16) -> Open {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&0_u16.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        Open(start)
    }

    /// Ends an attribute. The kernel has 16 bits for its length.
    pub fn close(&mut self, open: &Open) {
        let len = u16::try_from(self.bytes.len() - open.0).unwrap_or(u16::MAX);
        if let Some(field) = self.bytes.get_mut(open.0..open.0 + 2) {
            field.copy_from_slice(&len.to_ne_bytes());
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    pub fn attribute(&mut self, kind: u16, data: &[u8]) {
        let open = self.open(kind);
        self.push(data);
        self.close(&open);
    }

    /// A text with the zero at its end.
    pub fn text(&mut self, kind: u16, text: &str) {
        let open = self.open(kind);
        self.push(text.as_bytes());
        self.push(&[0]);
        self.close(&open);
    }

    /// A number in the byte order of the machine.
    pub fn number(&mut self, kind: u16, number: u32) {
        self.attribute(kind, &number.to_ne_bytes());
    }

    pub fn ip(&mut self, kind: u16, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => self.attribute(kind, &v4.octets()),
            IpAddr::V6(v6) => self.attribute(kind, &v6.octets()),
        }
    }

    /// An attribute that is made of attributes.
    pub fn nest(&mut self, kind: u16, body: impl FnOnce(&mut Self)) {
        let open = self.open(kind);
        body(self);
        self.close(&open);
    }
}

/// The kernel's number of an address's family.
pub(crate) fn family_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => crate::parse::INET,
        IpAddr::V6(_) => crate::parse::INET6,
    }
}

#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_messages() {
        let mut all = Messages::new(7);
        all.start(16, flag::REQUEST);
        all.push(&[1, 2, 3, 4]);
        all.text(3, "lo");
        all.nest(18 | NESTED, |m| m.number(1, 0x0102_0304));
        all.finish();
        all.start(17, flag::REQUEST);
        all.attribute(9, &[5]);
        all.finish();
        all.add_flags(flag::ACK);
        let first: &[u8] = &[
            40, 0, 0, 0, 16, 0, 1, 0, 7, 0, 0, 0, 0, 0, 0, 0, // header
            1, 2, 3, 4, // fixed part
            7, 0, 3, 0, b'l', b'o', 0, 0, // text, padded
            12, 0, 18, 0x80, 8, 0, 1, 0, 4, 3, 2, 1, // nested
        ];
        let second: &[u8] = &[24, 0, 0, 0, 17, 0, 5, 0, 8, 0, 0, 0, 0, 0, 0, 0, 5, 0, 9, 0, 5, 0, 0, 0];
        assert_eq!(all.bytes(), [first, second].concat());
        assert_eq!((all.next_sequence(), all.len()), (9, 64));
    }

    #[test]
    fn a_request_is_numbered_when_it_is_sent() {
        let mut request = Messages::request(18, flag::DUMP);
        request.ip(1, [192, 0, 2, 1].into());
        for number in [1_u8, 2] {
            let want: &[u8] = &[
                24, 0, 0, 0, 18, 0, 5, 3, number, 0, 0, 0, 0, 0, 0, 0, // header
                8, 0, 1, 0, 192, 0, 2, 1,
            ];
            assert_eq!(request.numbered(number.into()), want);
        }
    }
}
