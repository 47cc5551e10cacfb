//! Finds the entries in which a field has a value, without reading all entries below a prefix.
//!
//! The index is a part of the snapshot and shares structure as the map does: it is always of the snapshot's revision.

use crate::entry::{Entry, Key};
use crate::replica::Map;
use crate::subscribers::ReadField;
use imbl::OrdSet;
use std::ops::Bound;
use std::sync::Arc;

/// A field of the entries below a prefix by which a [`Snapshot`](crate::Snapshot) finds them.
#[derive(Debug, Clone)]
pub struct IndexedField {
    pub prefix: Vec<u8>,
    pub field: &'static str,
    pub read: ReadField,
}

/// The second byte of a place: the value of the field follows, or it is unknown.
const KNOWN: u8 = 1;
const UNKNOWN: u8 = 0;
/// Ends a value. A value that contains it is unknown.
const END: u8 = 0;

/// For each entry and field one place: the number of the field, its value, and the end of the entry's key.
#[derive(Debug, Clone, Default)]
pub(crate) struct Index {
    fields: Arc<[IndexedField]>,
    places: OrdSet<Key>,
}

impl Index {
    /// An index of fields over everything in the map. Fields beyond 256 are left out.
    pub fn new(fields: impl IntoIterator<Item = IndexedField>, map: &Map) -> Self {
        let mut index = Self { fields: fields.into_iter().take(256).collect(), places: OrdSet::new() };
        if !index.fields.is_empty() {
            map.iter().for_each(|(key, entry)| index.update(key, None, Some(entry)));
        }
        index
    }

    pub fn fields(&self) -> &[IndexedField] {
        &self.fields
    }

    /// Follows the change of one key.
    pub fn update(&mut self, key: &Key, previous: Option<&Entry>, entry: Option<&Entry>) {
        for (number, field) in (0..=u8::MAX).zip(self.fields.iter()) {
            let Some(suffix) = key.as_bytes().strip_prefix(&*field.prefix) else { continue };
            let before = previous.map(|entry| (field.read)(field.field, key, entry));
            let after = entry.map(|entry| (field.read)(field.field, key, entry));
            // The usual case: the field is as it was.
            if before == after {
                continue;
            }
            if let Some(value) = before {
                self.places.remove(place(number, value, suffix).as_bytes());
            }
            if let Some(value) = after {
                self.places.insert(place(number, value, suffix));
            }
        }
    }

    /// The keys below `prefix` in which the field has the value, and those in which it is unknown, in order. None if the
    /// field is not indexed there.
    pub fn find(&self, prefix: &[u8], field: &str, value: &[u8]) -> Option<Vec<Vec<u8>>> {
        let covers = |indexed: &IndexedField| indexed.field == field && prefix.starts_with(&indexed.prefix);
        let (number, indexed) = (0..=u8::MAX).zip(self.fields.iter()).find(|(_, indexed)| covers(indexed))?;
        let below = &prefix[indexed.prefix.len()..];
        let keys = |value: Option<&[u8]>| {
            let first = place(number, value, below);
            let cut = first.as_bytes().len() - below.len();
            self.places
                .range::<(Bound<&[u8]>, Bound<&[u8]>), [u8]>((
                    Bound::Included(first.as_bytes()),
                    Bound::Unbounded,
                ))
                .take_while(|place| place.as_bytes().starts_with(first.as_bytes()))
                .map(|place| [&*indexed.prefix, &place.as_bytes()[cut..]].concat())
                .collect::<Vec<_>>()
        };
        // No place is at a value with an end in it.
        let mut found = if value.contains(&END) { Vec::new() } else { keys(Some(value)) };
        let unknown = keys(None);
        if !unknown.is_empty() {
            found.extend(unknown);
            found.sort_unstable();
            // A value that was unknown when it came, and could be read later, may be at both places.
            found.dedup();
        }
        Some(found)
    }
}

fn place(number: u8, value: Option<&[u8]>, suffix: &[u8]) -> Key {
    Key::from(&match value.filter(|value| !value.contains(&END)) {
        Some(value) => [&[number, KNOWN], value, &[END], suffix].concat(),
        None => [&[number, UNKNOWN], suffix].concat(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{LeaseId, Plain, Revision};
    use bytes::Bytes;
    use proptest::prelude::*;

    /// The value is the text after `=`; `?` is a value that cannot be read.
    fn read<'a>(_: &str, _: &'a Key, entry: &'a Entry) -> Option<&'a [u8]> {
        Some(&*entry.value).filter(|value| *value != b"?")
    }

    fn entry(value: &str) -> Arc<Entry> {
        Arc::new(Entry {
            value: Bytes::copy_from_slice(value.as_bytes()),
            created: Revision(1),
            modified: Revision(1),
            version: 1,
            lease: LeaseId::NONE,
            plain: Plain::default(),
        })
    }

    fn fields() -> [IndexedField; 2] {
        ["/pods/", "/nodes/"].map(|prefix| IndexedField { prefix: prefix.into(), field: "f", read })
    }

    /// All keys below a prefix that have the value or an unknown one, by reading all entries.
    fn scan(map: &Map, prefix: &str, value: &str) -> Vec<Vec<u8>> {
        let has = |entry: &Entry| {
            entry.value == value.as_bytes() || &*entry.value == b"?" || entry.value.contains(&0)
        };
        let below = map.iter().filter(|(key, _)| key.as_bytes().starts_with(prefix.as_bytes()));
        below.filter(|(_, entry)| has(entry)).map(|(key, _)| key.as_bytes().to_vec()).collect()
    }

    proptest! {
        #[test]
        fn finds_what_a_scan_finds(
            changes in proptest::collection::vec(
                ("(/pods/a/|/pods/b/|/nodes/|/other/)[xyz]{1,2}", proptest::option::of("(|n|n1|n1x|\\?|n\x00)")), 0..60),
            begin in 0usize..60,
        ) {
            let mut map = Map::new();
            let mut index = Index::default();
            for (number, (key, value)) in changes.iter().enumerate() {
                if number == begin {
                    index = Index::new(fields(), &map);
                }
                let (key, new) = (Key::from(key), value.as_deref().map(entry));
                let previous = match &new {
                    Some(new) => map.insert(key.clone(), Arc::clone(new)),
                    None => map.remove(key.as_bytes()),
                };
                index.update(&key, previous.as_deref(), new.as_deref());
            }
            if begin >= changes.len() {
                index = Index::new(fields(), &map);
            }
            for prefix in ["/pods/", "/pods/a/", "/pods/b/", "/nodes/"] {
                for value in ["", "n", "n1", "n1x", "m"] {
                    prop_assert_eq!(index.find(prefix.as_bytes(), "f", value.as_bytes()), Some(scan(&map, prefix, value)));
                }
            }
            prop_assert_eq!(index.find(b"/other/", "f", b"n"), None);
            prop_assert_eq!(index.find(b"/pods/", "g", b"n"), None);
        }
    }
}
