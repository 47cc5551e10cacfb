//! The committed state, readable without locks held by the writer.

use crate::entry::{Entry, Key, Revision};
use crate::head::bounds;
use crate::index::Index;
use imbl::OrdMap;
use std::ops::Bound;
use std::sync::Arc;

pub(crate) type Map = OrdMap<Key, Arc<Entry>>;

/// The whole store at one revision. Cloning shares structure; holding one never blocks a writer.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(crate) map: Map,
    pub(crate) revision: Revision,
    pub(crate) index: Index,
}

impl Snapshot {
    /// A snapshot that finds entries by their keys alone.
    pub(crate) fn new(map: Map, revision: Revision) -> Self {
        Self { map, revision, index: Index::default() }
    }

    pub fn revision(&self) -> Revision {
        self.revision
    }

    pub fn get(&self, key: &[u8]) -> Option<&Arc<Entry>> {
        self.map.get(key)
    }

    /// Entries whose key starts with `prefix`, in key order, beginning at `from` where given (inclusive).
    pub fn range<'a>(
        &'a self,
        prefix: &'a [u8],
        from: Option<&'a [u8]>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Entry>)> + 'a {
        let start = from.filter(|f| *f > prefix).unwrap_or(prefix);
        self.map
            .range::<(Bound<&[u8]>, Bound<&[u8]>), [u8]>((Bound::Included(start), Bound::Unbounded))
            .take_while(move |(key, _)| key.as_bytes().starts_with(prefix))
    }

    /// Entries below `prefix` in which an indexed field has `value`, or may have it, in the order of their keys. None if
    /// nobody asked for an index of the field ([`Store::index`](crate::Store::index)), or the snapshot is of the past.
    pub fn find(&self, prefix: &[u8], field: &str, value: &[u8]) -> Option<Vec<Arc<Entry>>> {
        let keys = self.index.find(prefix, field, value)?;
        Some(keys.iter().filter_map(|key| self.map.get(key.as_slice()).cloned()).collect())
    }

    /// Entries with `start <= key`, and below `end` where given, in key order.
    pub fn between<'a>(
        &'a self,
        start: &'a [u8],
        end: Option<&'a [u8]>,
    ) -> impl DoubleEndedIterator<Item = (&'a Key, &'a Arc<Entry>)> + 'a {
        range_of(&self.map, start, end)
    }

    pub fn count(&self, prefix: &[u8]) -> usize {
        self.range(prefix, None).count()
    }

    pub fn len(&self) -> usize {
        self.map.len()
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

/// An empty range where `end` is not above `start`: the map itself would panic.
pub(crate) fn range_of<'a>(
    map: &'a Map,
    start: &'a [u8],
    end: Option<&'a [u8]>,
) -> impl DoubleEndedIterator<Item = (&'a Key, &'a Arc<Entry>)> + 'a {
    let end = end.map(|e| e.max(start));
    map.range::<(Bound<&[u8]>, Bound<&[u8]>), [u8]>(bounds(start, end))
}
