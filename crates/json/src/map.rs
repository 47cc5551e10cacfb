//! The members of an object.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::{Text, Value};

/// Most members kept in one sorted vector. A lookup costs no more than in a tree, and moving members to
/// make room for a new one is cheap.
const FEW: usize = 64;

/// Members by key, in the order of their keys.
#[derive(Clone, Default)]
pub struct Map(Members);

#[derive(Clone)]
enum Members {
    /// In the order of their keys, each key once.
    Few(Vec<(Text, Value)>),
    #[expect(clippy::box_collection, reason = "it is rare, and a map stays three words long")]
    Many(Box<BTreeMap<Text, Value>>),
}

impl Default for Members {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

/// Where a key is, or would be.
fn position(members: &[(Text, Value)], key: &str) -> Result<usize, usize> {
    // Most maps are built in order.
    if members.last().is_none_or(|(last, _)| last.as_str() < key) {
        return Err(members.len());
    }
    members.binary_search_by(|(other, _)| other.as_str().cmp(key))
}

/// Keys of other lengths, or with another first letter, are skipped without comparing the rest.
fn find(members: &[(Text, Value)], key: &str) -> Option<usize> {
    let (first, length) = (key.as_bytes().first(), key.len());
    members.iter().position(|(other, _)| {
        let other = other.as_bytes();
        other.len() == length && other.first() == first && other == key.as_bytes()
    })
}

impl Map {
    pub const fn new() -> Self {
        Self(Members::Few(Vec::new()))
    }

    pub fn with_capacity(capacity: usize) -> Self {
        Self(Members::Few(Vec::with_capacity(capacity.min(FEW))))
    }

    /// A map of these members; of two with one key the later one counts.
    pub fn from_members(mut members: Vec<(Text, Value)>) -> Self {
        if !members.is_sorted_by(|(a, _), (b, _)| a.as_str() < b.as_str()) {
            members.sort_by(|(a, _), (b, _)| a.cmp(b));
            members.dedup_by(|later, kept| {
                let same = later.0 == kept.0;
                if same {
                    std::mem::swap(later, kept);
                }
                same
            });
        }
        if members.len() > FEW {
            return Self(Members::Many(Box::new(members.into_iter().collect())));
        }
        Self(Members::Few(members))
    }

    pub fn len(&self) -> usize {
        match &self.0 {
            Members::Few(members) => members.len(),
            Members::Many(members) => members.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn clear(&mut self) {
        *self = Self::new();
    }

    pub fn get<Q: AsRef<str> + ?Sized>(&self, key: &Q) -> Option<&Value> {
        match &self.0 {
            Members::Few(members) => find(members, key.as_ref()).map(|at| &members[at].1),
            Members::Many(members) => members.get(key.as_ref()),
        }
    }

    pub fn get_mut<Q: AsRef<str> + ?Sized>(&mut self, key: &Q) -> Option<&mut Value> {
        match &mut self.0 {
            Members::Few(members) => find(members, key.as_ref()).map(|at| &mut members[at].1),
            Members::Many(members) => members.get_mut(key.as_ref()),
        }
    }

    pub fn get_key_value<Q: AsRef<str> + ?Sized>(&self, key: &Q) -> Option<(&Text, &Value)> {
        match &self.0 {
            Members::Few(members) => find(members, key.as_ref()).map(|at| (&members[at].0, &members[at].1)),
            Members::Many(members) => members.get_key_value(key.as_ref()),
        }
    }

    pub fn contains_key<Q: AsRef<str> + ?Sized>(&self, key: &Q) -> bool {
        self.get(key).is_some()
    }

    /// The value that was there before, if any.
    pub fn insert(&mut self, key: impl Into<Text>, value: Value) -> Option<Value> {
        let key = key.into();
        match self.room() {
            Members::Few(members) => match position(members, &key) {
                Ok(at) => Some(std::mem::replace(&mut members[at].1, value)),
                Err(at) => {
                    members.insert(at, (key, value));
                    None
                }
            },
            Members::Many(members) => members.insert(key, value),
        }
    }

    /// The members, with room for one more.
    fn room(&mut self) -> &mut Members {
        if let Members::Few(members) = &mut self.0
            && members.len() >= FEW
        {
            self.0 = Members::Many(Box::new(std::mem::take(members).into_iter().collect()));
        }
        &mut self.0
    }

    pub fn remove<Q: AsRef<str> + ?Sized>(&mut self, key: &Q) -> Option<Value> {
        self.remove_entry(key).map(|(_, value)| value)
    }

    pub fn remove_entry<Q: AsRef<str> + ?Sized>(&mut self, key: &Q) -> Option<(Text, Value)> {
        match &mut self.0 {
            Members::Few(members) => find(members, key.as_ref()).map(|at| members.remove(at)),
            Members::Many(members) => members.remove_entry(key.as_ref()),
        }
    }

    /// Takes over all members of another map, which is left empty.
    pub fn append(&mut self, other: &mut Self) {
        self.extend(std::mem::take(other));
    }

    pub fn entry(&mut self, key: impl Into<Text>) -> Entry<'_> {
        Entry { map: self, key: key.into() }
    }

    pub fn retain(&mut self, mut keep: impl FnMut(&Text, &mut Value) -> bool) {
        match &mut self.0 {
            Members::Few(members) => members.retain_mut(|(key, value)| keep(key, value)),
            Members::Many(members) => members.retain(keep),
        }
    }

    pub fn iter(&self) -> Iter<'_> {
        match &self.0 {
            Members::Few(members) => Iter(Either::Few(members.iter())),
            Members::Many(members) => Iter(Either::Many(members.iter())),
        }
    }

    pub fn iter_mut(&mut self) -> IterMut<'_> {
        match &mut self.0 {
            Members::Few(members) => IterMut(Either::Few(members.iter_mut())),
            Members::Many(members) => IterMut(Either::Many(members.iter_mut())),
        }
    }

    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &Text> + ExactSizeIterator + Clone {
        self.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl DoubleEndedIterator<Item = &Value> + ExactSizeIterator + Clone {
        self.iter().map(|(_, value)| value)
    }

    pub fn values_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut Value> + ExactSizeIterator {
        self.iter_mut().map(|(_, value)| value)
    }

    pub fn into_values(self) -> impl DoubleEndedIterator<Item = Value> + ExactSizeIterator {
        self.into_iter().map(|(_, value)| value)
    }
}

/// A place in a map, taken or not.
pub struct Entry<'a> {
    map: &'a mut Map,
    key: Text,
}

impl<'a> Entry<'a> {
    pub fn or_insert(self, value: Value) -> &'a mut Value {
        self.or_insert_with(|| value)
    }

    pub fn or_default(self) -> &'a mut Value {
        self.or_insert_with(Value::default)
    }

    pub fn or_insert_with(self, value: impl FnOnce() -> Value) -> &'a mut Value {
        match self.map.room() {
            Members::Few(members) => {
                let at = find(members, &self.key).unwrap_or_else(|| {
                    let at = position(members, &self.key).unwrap_or_else(|at| at);
                    members.insert(at, (self.key, value()));
                    at
                });
                &mut members[at].1
            }
            Members::Many(members) => members.entry(self.key).or_insert_with(value),
        }
    }

    #[must_use]
    pub fn and_modify(self, change: impl FnOnce(&mut Value)) -> Self {
        if let Some(value) = self.map.get_mut(&self.key) {
            change(value);
        }
        self
    }
}

#[derive(Clone)]
enum Either<F, M> {
    Few(F),
    Many(M),
}

/// Implements the common part of both layouts' iterators.
macro_rules! iterator {
    ($(#[$doc:meta])* $name:ident $(<$life:lifetime>)?, $few:ty, $many:ty, $item:ty, $member:pat => $pair:expr) => {
        $(#[$doc])*
        pub struct $name $(<$life>)? (Either<$few, $many>);

        impl $(<$life>)? Iterator for $name $(<$life>)? {
            type Item = $item;

            fn next(&mut self) -> Option<Self::Item> {
                match &mut self.0 {
                    Either::Few(members) => members.next().map(|$member| $pair),
                    Either::Many(members) => members.next(),
                }
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                match &self.0 {
                    Either::Few(members) => members.size_hint(),
                    Either::Many(members) => members.size_hint(),
                }
            }
        }

        impl $(<$life>)? DoubleEndedIterator for $name $(<$life>)? {
            fn next_back(&mut self) -> Option<Self::Item> {
                match &mut self.0 {
                    Either::Few(members) => members.next_back().map(|$member| $pair),
                    Either::Many(members) => members.next_back(),
                }
            }
        }

        impl $(<$life>)? ExactSizeIterator for $name $(<$life>)? {}
    };
}

iterator!(
    #[derive(Clone)]
    Iter<'a>,
    std::slice::Iter<'a, (Text, Value)>,
    std::collections::btree_map::Iter<'a, Text, Value>,
    (&'a Text, &'a Value),
    (key, value) => (key, value)
);
iterator!(
    IterMut<'a>,
    std::slice::IterMut<'a, (Text, Value)>,
    std::collections::btree_map::IterMut<'a, Text, Value>,
    (&'a Text, &'a mut Value),
    (key, value) => (&*key, value)
);
iterator!(
    IntoIter,
    std::vec::IntoIter<(Text, Value)>,
    std::collections::btree_map::IntoIter<Text, Value>,
    (Text, Value),
    member => member
);

impl IntoIterator for Map {
    type Item = (Text, Value);
    type IntoIter = IntoIter;

    fn into_iter(self) -> IntoIter {
        match self.0 {
            Members::Few(members) => IntoIter(Either::Few(members.into_iter())),
            Members::Many(members) => IntoIter(Either::Many(members.into_iter())),
        }
    }
}

impl<'a> IntoIterator for &'a Map {
    type Item = (&'a Text, &'a Value);
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl<'a> IntoIterator for &'a mut Map {
    type Item = (&'a Text, &'a mut Value);
    type IntoIter = IterMut<'a>;

    fn into_iter(self) -> IterMut<'a> {
        self.iter_mut()
    }
}

impl<K: Into<Text>> FromIterator<(K, Value)> for Map {
    fn from_iter<I: IntoIterator<Item = (K, Value)>>(members: I) -> Self {
        Self::from_members(members.into_iter().map(|(key, value)| (key.into(), value)).collect())
    }
}

impl<K: Into<Text>> Extend<(K, Value)> for Map {
    fn extend<I: IntoIterator<Item = (K, Value)>>(&mut self, members: I) {
        for (key, value) in members {
            self.insert(key, value);
        }
    }
}

impl<Q: AsRef<str> + ?Sized> ops::Index<&Q> for Map {
    type Output = Value;

    #[expect(clippy::expect_used, reason = "as every map does when a key is missing")]
    fn index(&self, key: &Q) -> &Value {
        self.get(key).expect("no entry found for key")
    }
}

impl PartialEq for Map {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Members::Few(a), Members::Few(b)) => a == b,
            _ => self.len() == other.len() && self.iter().eq(other),
        }
    }
}

impl Eq for Map {}

impl std::hash::Hash for Map {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_usize(self.len());
        self.iter().for_each(|member| member.hash(state));
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl Serialize for Map {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len()))?;
        for (key, value) in self {
            map.serialize_entry::<str, _>(key.borrow(), value)?;
        }
        map.end()
    }
}

/// Reads members up to the end of an object.
pub struct MapVisitor;

impl<'de> Visitor<'de> for MapVisitor {
    type Value = Map;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_unit<E>(self) -> Result<Map, E> {
        Ok(Map::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Map, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = access.next_entry()? {
            members.push(member);
        }
        Ok(Map::from_members(members))
    }
}

impl<'de> Deserialize<'de> for Map {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MapVisitor)
    }
}
