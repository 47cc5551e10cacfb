//! Short byte strings: the keys and values of elements.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

/// Bytes that need no allocation of their own.
const INLINE: usize = 22;

/// The bytes of a key or value. A large table has hundreds of thousands of them; those of IPv4, and most of IPv6, are
/// stored in place.
#[derive(Clone)]
pub struct Bytes(Repr);

#[derive(Clone)]
enum Repr {
    Inline { len: u8, bytes: [u8; INLINE] },
    Heap(Box<[u8]>),
}

impl Bytes {
    /// The fields one after the other, each padded to whole 32-bit words as the kernel has them.
    pub fn fields(fields: &[&[u8]]) -> Self {
        let total: usize = fields.iter().map(|field| field.len().next_multiple_of(4)).sum();
        let fill = |target: &mut [u8]| {
            let mut at = 0;
            for field in fields {
                target[at..at + field.len()].copy_from_slice(field);
                at += field.len().next_multiple_of(4);
            }
        };
        match u8::try_from(total) {
            Ok(len) if total <= INLINE => {
                let mut bytes = [0; INLINE];
                fill(&mut bytes);
                Self(Repr::Inline { len, bytes })
            }
            _ => {
                let mut bytes = vec![0; total].into_boxed_slice();
                fill(&mut bytes);
                Self(Repr::Heap(bytes))
            }
        }
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        let mut inline = [0; INLINE];
        match (u8::try_from(bytes.len()), inline.get_mut(..bytes.len())) {
            (Ok(len), Some(target)) => {
                target.copy_from_slice(bytes);
                Self(Repr::Inline { len, bytes: inline })
            }
            _ => Self(Repr::Heap(bytes.into())),
        }
    }
}

impl<const N: usize> From<[u8; N]> for Bytes {
    fn from(bytes: [u8; N]) -> Self {
        Self::from(bytes.as_slice())
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => bytes.get(..usize::from(*len)).unwrap_or(bytes),
            Repr::Heap(bytes) => bytes,
        }
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Bytes {}

impl Hash for Bytes {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl PartialOrd for Bytes {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Bytes {
    fn cmp(&self, other: &Self) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_bytes_inline_and_on_the_heap() {
        let long: Vec<u8> = (0..100).collect();
        for len in 0..long.len() {
            let bytes = Bytes::from(&long[..len]);
            assert_eq!(&*bytes, &long[..len]);
            assert_eq!(bytes, bytes.clone());
            assert_eq!(matches!(bytes.0, Repr::Inline { .. }), len <= INLINE, "{len}");
            assert!(bytes < Bytes::from(&long[..=len]));
        }
        assert_eq!(size_of::<Bytes>(), size_of::<Vec<u8>>());
    }

    #[test]
    fn fields_are_padded_to_words() {
        let rows: [(&[&[u8]], &[u8]); 4] = [
            (&[], &[]),
            (&[&[1]], &[1, 0, 0, 0]),
            (&[&[1, 2, 3, 4], &[5, 6], &[7]], &[1, 2, 3, 4, 5, 6, 0, 0, 7, 0, 0, 0]),
            (&[&[9; 16], &[8; 16]], &[[9; 16], [8; 16]].concat()),
        ];
        for (fields, want) in rows {
            assert_eq!(&*Bytes::fields(fields), want);
        }
    }
}
