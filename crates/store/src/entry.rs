//! Keys, values and their revisions.

use bytes::Bytes;
use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// The number of a committed change. Zero is the empty store; the first change is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

impl Revision {
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A key. The usual ones are kept in place: a search in the map then follows no pointer to compare, and a copy of a
/// part of the map is a copy of memory.
#[derive(Clone)]
pub struct Key(Repr);

/// Longer keys are shared.
const IN_PLACE: usize = 62;

#[derive(Clone)]
enum Repr {
    InPlace { length: u8, bytes: [u8; IN_PLACE] },
    Shared(Arc<[u8]>),
}

impl Key {
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::InPlace { length, bytes } => &bytes[..usize::from(*length).min(IN_PLACE)],
            Repr::Shared(bytes) => bytes,
        }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl<T: AsRef<[u8]> + ?Sized> From<&T> for Key {
    fn from(bytes: &T) -> Self {
        let bytes = bytes.as_ref();
        match u8::try_from(bytes.len()) {
            Ok(length) if bytes.len() <= IN_PLACE => {
                let mut place = [0; IN_PLACE];
                place[..bytes.len()].copy_from_slice(bytes);
                Self(Repr::InPlace { length, bytes: place })
            }
            _ => Self(Repr::Shared(bytes.into())),
        }
    }
}

impl Borrow<[u8]> for Key {
    #[inline]
    fn borrow(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(self.as_bytes()))
    }
}

/// Identifies a lease. Zero means "no lease".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LeaseId(pub i64);

impl LeaseId {
    pub const NONE: Self = Self(0);
}

/// A promise to delete the keys attached to it when its time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    pub id: LeaseId,
    /// Seconds since the Unix epoch. Wall-clock time, so that a lease goes on counting while the store is down.
    pub expires_at: u64,
}

/// The value of a key and its metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The value as it is stored.
    pub value: Bytes,
    /// The revision that created the key (after its last deletion).
    pub created: Revision,
    /// The revision that last changed it.
    pub modified: Revision,
    /// Number of writes since the key was created; 1 after creation.
    pub version: u64,
    pub lease: LeaseId,
    /// The value as readers of objects see it, where that is not what is stored.
    pub plain: Plain,
}

impl Entry {
    /// The value as it was before a [`Transformer`](crate::Transformer) made the stored one of it.
    #[inline]
    pub fn plain(&self) -> &Bytes {
        self.plain.revealed.get().map_or(&self.value, |plain| plain)
    }

    /// The note of [`Entry::note_field`]. An index and the watches read the same field of an entry several times: when it
    /// comes and, as the state before the next change, when it goes.
    #[inline]
    pub fn field_place(&self) -> Option<FieldPlace> {
        match self.plain.field.load(Relaxed) {
            UNSOUGHT => None,
            ABSENT => Some(FieldPlace::Absent),
            at => Some(FieldPlace::At(at as usize)),
        }
    }

    /// Notes where the field is that readers look for in values of this kind; there is one such field for a kind. A place that
    /// is too far away is not noted.
    pub fn note_field(&self, place: FieldPlace) {
        let noted = match place {
            FieldPlace::Absent => ABSENT,
            FieldPlace::At(at) => u32::try_from(at).unwrap_or(UNSOUGHT),
        };
        self.plain.field.store(noted, Relaxed);
    }

    /// True if the transformer cannot read the stored value.
    #[inline]
    pub fn is_unreadable(&self) -> bool {
        self.plain.unreadable.load(Relaxed)
    }
}

/// Where a reader of fields has found the one that it reads from values of this kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldPlace {
    Absent,
    /// The first byte of the field's value.
    At(usize),
}

/// Nobody has looked for the field yet.
const UNSOUGHT: u32 = 0;
const ABSENT: u32 = u32::MAX;

/// The value of an entry before it was transformed for storage. An entry is shared by the head, the replica and the
/// history, so that its value is revealed in place, once for all of them.
#[derive(Debug, Default)]
pub struct Plain {
    /// Unset where the value is stored as it is. Boxed, because that is so for most entries.
    revealed: OnceLock<Box<Bytes>>,
    unreadable: AtomicBool,
    /// See [`Entry::field_place`].
    field: AtomicU32,
}

impl Plain {
    pub(crate) fn is_revealed(&self) -> bool {
        self.revealed.get().is_some()
    }

    pub(crate) fn reveal(&self, value: Option<Bytes>) {
        if let Some(value) = value {
            // Another thread was faster and has revealed the same value.
            let _ = self.revealed.set(Box::new(value));
        }
        self.unreadable.store(false, Relaxed);
    }

    pub(crate) fn hide(&self) {
        self.unreadable.store(true, Relaxed);
    }
}

impl Clone for Plain {
    fn clone(&self) -> Self {
        Self {
            revealed: self.revealed.clone(),
            unreadable: AtomicBool::new(self.unreadable.load(Relaxed)),
            field: AtomicU32::new(self.field.load(Relaxed)),
        }
    }
}

/// Two entries are the same if the same is stored.
impl PartialEq for Plain {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Plain {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_their_bytes_however_they_are_kept() {
        let lengths = [0, 1, IN_PLACE - 1, IN_PLACE, IN_PLACE + 1, 300];
        for bytes in lengths.map(|length| vec![b'k'; length]) {
            let key = Key::from(&bytes);
            assert_eq!(key.as_bytes(), bytes);
            assert_eq!(key, key.clone());
            let longer = Key::from(&[&bytes[..], b"\0"].concat());
            assert!(key < longer && key != longer);
            assert!(Key::from("l") > key);
        }
        assert!(size_of::<Key>() <= 64);
    }

    #[test]
    fn a_note_costs_no_memory() {
        assert_eq!(size_of::<Plain>(), 3 * size_of::<usize>());
        let entry = Entry {
            value: Bytes::new(),
            created: Revision(1),
            modified: Revision(1),
            version: 1,
            lease: LeaseId::NONE,
            plain: Plain::default(),
        };
        assert_eq!(entry.field_place(), None);
        for (place, noted) in [
            (FieldPlace::Absent, Some(FieldPlace::Absent)),
            (FieldPlace::At(7), Some(FieldPlace::At(7))),
            (FieldPlace::At(usize::MAX), None),
        ] {
            entry.note_field(place);
            assert_eq!(entry.clone().field_place(), noted);
        }
    }
}
