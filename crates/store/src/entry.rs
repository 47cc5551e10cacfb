//! Keys, values and their revisions.

use bytes::Bytes;
use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

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

/// A key. Shared between the map, the history and readers.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<[u8]>);

impl Key {
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl<T: AsRef<[u8]> + ?Sized> From<&T> for Key {
    fn from(bytes: &T) -> Self {
        Self(bytes.as_ref().into())
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
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

/// What a key holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub value: Bytes,
    /// The revision that created the key (after its last deletion).
    pub created: Revision,
    /// The revision that last changed it.
    pub modified: Revision,
    /// How many times it was written since it was created; 1 after creation.
    pub version: u64,
    pub lease: LeaseId,
}
