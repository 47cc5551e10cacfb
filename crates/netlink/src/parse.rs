//! Reads messages of netlink. Nothing here trusts a length: what is damaged is as if it were not there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::message::{HEADER, flag};

/// An error, or the answer that there is none.
pub const ERROR: u16 = 2;
/// The end of a list.
pub const DONE: u16 = 3;

pub(crate) const INET: u8 = 2;
pub(crate) const INET6: u8 = 10;

/// A message from the kernel, without its header.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    pub body: &'a [u8],
}

impl<'a> Message<'a> {
    /// The attributes behind a fixed part of that length.
    pub fn attributes(&self, fixed: usize) -> Attributes<'a> {
        Attributes::new(self.body.get(fixed..).unwrap_or_default())
    }

    /// A byte of the fixed part.
    pub(crate) fn byte(&self, at: usize) -> Option<u8> {
        self.body.get(at).copied()
    }

    /// A number of the fixed part.
    pub(crate) fn number(&self, at: usize) -> Option<u32> {
        number(self.body.get(at..at.checked_add(4)?)?)
    }
}

/// Splits a datagram into its messages; a damaged rest is dropped.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let len = usize::try_from(number(bytes.get(0..4)?)?).ok().filter(|len| *len >= HEADER)?;
        let message = Message {
            kind: short(bytes.get(4..6)?)?,
            flags: short(bytes.get(6..8)?)?,
            sequence: number(bytes.get(8..12)?)?,
            body: bytes.get(HEADER..len)?,
        };
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes of a message or of another attribute.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Each attribute with its type and data; a damaged rest is dropped.
    pub fn iter(self) -> impl Iterator<Item = (u16, &'a [u8])> {
        const KIND: u16 = 0x3fff;
        let mut bytes = self.0;
        std::iter::from_fn(move || {
            let len = usize::from(short(bytes.get(0..2)?)?);
            let kind = short(bytes.get(2..4)?)? & KIND;
            let data = bytes.get(4..len)?;
            bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
            Some((kind, data))
        })
    }

    /// The data of the first attribute of that type.
    pub fn get(self, kind: u16) -> Option<&'a [u8]> {
        self.iter().find(|(found, _)| *found == kind).map(|(_, data)| data)
    }

    pub fn nested(self, kind: u16) -> Option<Self> {
        self.get(kind).map(Self)
    }

    /// A number in the byte order of the machine.
    pub fn number(self, kind: u16) -> Option<u32> {
        number(self.get(kind)?)
    }

    /// A number in the byte order of the network.
    pub fn network_number(self, kind: u16) -> Option<u32> {
        Some(u32::from_be_bytes(self.get(kind)?.try_into().ok()?))
    }

    /// A text without the zero at its end.
    pub fn text(self, kind: u16) -> Option<String> {
        let data = self.get(kind)?;
        let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
        Some(String::from_utf8_lossy(data.get(..end)?).into_owned())
    }

    /// An address, whose length tells the family.
    pub fn ip(self, kind: u16) -> Option<IpAddr> {
        let data = self.get(kind)?;
        let v4 = || <[u8; 4]>::try_from(data).ok().map(|bytes| Ipv4Addr::from(bytes).into());
        let v6 = || <[u8; 16]>::try_from(data).ok().map(|bytes| Ipv6Addr::from(bytes).into());
        v4().or_else(v6)
    }
}

fn short(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.try_into().ok()?))
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

/// The error number and the explanation of an [`ERROR`] or a [`DONE`]; none if all went well.
pub fn refusal(message: &Message<'_>) -> Option<(i32, Option<String>)> {
    const EXPLANATION: u16 = 1;
    const CODE: usize = 4;
    let code = message.number(0).unwrap_or(0).cast_signed();
    let errno = code.checked_neg().filter(|errno| *errno > 0)?;
    let repeated = match message.kind {
        ERROR if message.flags & flag::CAPPED != 0 => HEADER,
        ERROR => usize::try_from(message.number(CODE).unwrap_or(0)).unwrap_or(0).max(HEADER),
        _ => 0,
    };
    let explanation = (message.flags & flag::EXPLAINED != 0).then(|| {
        let start = CODE.checked_add(repeated)?.checked_next_multiple_of(4)?;
        message.attributes(start).text(EXPLANATION)
    });
    Some((errno, explanation.flatten()))
}

#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn damaged_datagrams_lose_their_rest() {
        let whole: &[u8] = &[20, 0, 0, 0, 16, 0, 2, 0, 7, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4];
        let twice = [whole, whole].concat();
        let mut short = twice.clone();
        short[20] = 15;
        let mut long = twice.clone();
        long[20] = 21;
        let mut huge = twice.clone();
        huge[20..24].fill(0xff);
        for (what, bytes, count) in [
            ("nothing", &[][..], 0),
            ("one", whole, 1),
            ("two", &twice, 2),
            ("a length below the header's", &short, 1),
            ("a length beyond the end", &long, 1),
            ("the largest length", &huge, 1),
            ("half a header", &twice[..30], 1),
            ("half a body", &twice[..38], 1),
        ] {
            let found: Vec<_> = messages(bytes).collect();
            assert_eq!(found.len(), count, "{what}");
            for message in found {
                assert_eq!((message.kind, message.flags, message.sequence), (16, 2, 7), "{what}");
                assert_eq!(message.body, [1, 2, 3, 4], "{what}");
            }
        }
    }

    #[test]
    fn attributes_of_all_kinds() {
        let bytes: &[u8] = &[
            7, 0, 3, 0, b'l', b'o', 0, 0, // text
            8, 0, 4, 0x80, 1, 2, 3, 4, // number, marked as nested
            8, 0, 5, 0, 192, 0, 2, 1, // address
            3, 0, 6, 0, // a length below its own header's
            8, 0, 7, 0, 1, 2, 3, 4,
        ];
        let all = Attributes::new(bytes);
        assert_eq!(all.iter().map(|(kind, _)| kind).collect::<Vec<_>>(), [3, 4, 5], "the rest is lost");
        assert_eq!(all.text(3).as_deref(), Some("lo"));
        assert_eq!((all.number(4), all.network_number(4)), (Some(0x0403_0201), Some(0x0102_0304)));
        assert_eq!(all.ip(5), Some([192, 0, 2, 1].into()));
        assert_eq!((all.number(3), all.ip(3), all.number(7)), (None, None, None), "of another size, or lost");
        let unended = [6, 0, 1, 0, b'a', b'b'];
        assert_eq!(Attributes::new(&unended).text(1).as_deref(), Some("ab"));
    }

    #[test]
    fn refusals() {
        let error = |code: i32| code.to_ne_bytes().to_vec();
        let request = [20_u32.to_ne_bytes(), [0; 4], [0; 4], [0; 4]].concat();
        let text = [7, 0, 1, 0, b'n', b'o', 0, 0];
        let row = |kind, flags, body: &[u8]| refusal(&Message { kind, flags, sequence: 1, body });
        let repeated = [error(-22), request.clone(), vec![0; 4], text.to_vec()].concat();
        let capped = [error(-22), request.clone(), text.to_vec()].concat();
        let done = [error(-22), text.to_vec()].concat();
        let said = Some((22, Some("no".to_owned())));
        assert_eq!(row(ERROR, flag::EXPLAINED, &repeated), said);
        assert_eq!(row(ERROR, flag::EXPLAINED | flag::CAPPED, &capped), said);
        assert_eq!(row(DONE, flag::EXPLAINED, &done), said);
        assert_eq!(row(ERROR, flag::CAPPED, &capped), Some((22, None)));
        for ok in [&error(0)[..], &[], &[1], &error(5), &error(i32::MIN)] {
            assert_eq!(row(ERROR, 0, ok), None, "{ok:?}");
        }
        let endless = [error(-1), vec![0xff; 16]].concat();
        assert_eq!(row(ERROR, flag::EXPLAINED, &endless), Some((1, None)));
    }

    /// Reads bytes in every way that this crate has.
    fn read_all(kind: u16, flags: u16, body: &[u8]) {
        for message in messages(body).chain([Message { kind, flags, sequence: 0, body }]) {
            let _ = refusal(&message);
            let _ = crate::link::Link::parse(&message);
            let _ = crate::address::AddressEntry::parse(&message);
            let _ = crate::route::RouteEntry::parse(&message);
            let _ = crate::rule::Rule::parse(&message);
            let _ = crate::neighbour::NeighbourEntry::parse(&message);
            let _ = crate::queue::Queue::parse(&message);
            let _ = crate::conntrack::Flow::parse(&message);
            let _ = crate::events::NetworkEvent::parse(&message);
            let _ = crate::events::module_path(body);
            for (kind, data) in message.attributes(12).iter() {
                let inner = Attributes::new(data);
                let _ = (inner.text(kind), inner.ip(kind), inner.number(kind), inner.network_number(kind));
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(kind in any::<u16>(), flags in any::<u16>(), body in proptest::collection::vec(any::<u8>(), 0..300)) {
            read_all(kind, flags, &body);
        }

        /// Attributes whose lengths are mostly possible get further.
        #[test]
        fn no_attributes_panic(
            kind in 0_u16..50,
            fixed in proptest::collection::vec(any::<u8>(), 20),
            parts in proptest::collection::vec((0_u16..40, 0_u16..30, proptest::collection::vec(any::<u8>(), 0..24)), 0..12),
        ) {
            for fixed_len in [4, 8, 12, 16, 20] {
                let mut body = fixed[..fixed_len].to_vec();
                for (len, kind, data) in &parts {
                    body.extend(len.to_ne_bytes());
                    body.extend(kind.to_ne_bytes());
                    body.extend(data);
                }
                read_all(kind, 0, &body);
            }
        }
    }
}
