//! The copy an informer keeps, and its indices. It is compiled once: the kind only matters to the functions that
//! decode and index, and those are the caller's.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferrite_json::Text;

use super::raw::RawObject;
use crate::{ObjectKey, Uid};

/// Most decoded objects held besides the text. A reconcile reads the same objects again and again; memory
/// is for those, not for the ten thousand that nobody reads.
pub(super) const DECODED: usize = 1024;

/// A decoded object whose type the informer knows.
pub(super) type Decoded = Arc<dyn Any + Send + Sync>;

/// The values an index gives for an object, by the index's name.
pub(super) type IndexValues = Vec<(&'static str, Vec<String>)>;

struct Entry {
    uid: Uid,
    version: Text,
    json: Arc<[u8]>,
    decoded: Option<Decoded>,
    /// Where the object stands in the indices, to be taken out without decoding it again.
    indexed: Box<[(&'static str, Arc<str>)]>,
}

#[derive(Default)]
struct Inner {
    objects: BTreeMap<Arc<ObjectKey>, Entry>,
    indices: HashMap<&'static str, HashMap<Arc<str>, BTreeSet<Arc<ObjectKey>>>>,
    /// The objects that were decoded, oldest first.
    decoded: VecDeque<Arc<ObjectKey>>,
}

impl Inner {
    fn index(&mut self, key: &Arc<ObjectKey>, values: IndexValues) -> Box<[(&'static str, Arc<str>)]> {
        let mut indexed = Vec::new();
        for (name, values) in values {
            let index = self.indices.entry(name).or_default();
            for value in values {
                let value =
                    index.get_key_value(value.as_str()).map_or_else(|| Arc::from(value), |(v, _)| v.clone());
                index.entry(value.clone()).or_default().insert(key.clone());
                indexed.push((name, value));
            }
        }
        indexed.into()
    }

    fn unindex(&mut self, key: &ObjectKey, indexed: &[(&'static str, Arc<str>)]) {
        for (name, value) in indexed {
            let Some(index) = self.indices.get_mut(name) else { continue };
            if let Some(keys) = index.get_mut(value) {
                keys.remove(key);
                if keys.is_empty() {
                    index.remove(value);
                }
            }
        }
    }

    /// Notes that `key` was decoded, and drops the decoded form of the one that was longest ago.
    fn note_decoded(&mut self, key: Arc<ObjectKey>) {
        self.decoded.push_back(key);
        if self.decoded.len() > DECODED
            && let Some(oldest) = self.decoded.pop_front()
            && let Some(entry) = self.objects.get_mut(&oldest)
        {
            entry.decoded = None;
        }
    }
}

/// The stored form of an object: decoded, or as text with the data needed to store the decoded form later.
#[derive(Clone)]
pub(super) enum Held {
    Decoded(Decoded),
    Text { key: Arc<ObjectKey>, version: Text, json: Arc<[u8]> },
}

impl Held {
    fn of(key: &Arc<ObjectKey>, entry: &Entry) -> Self {
        match &entry.decoded {
            Some(decoded) => Self::Decoded(decoded.clone()),
            None => Self::Text { key: key.clone(), version: entry.version.clone(), json: entry.json.clone() },
        }
    }
}

/// The stored form of an object before a change.
pub(super) struct Previous {
    pub(super) held: Held,
    /// False when the object was deleted and made again under the same name.
    pub(super) same: bool,
}

/// The stored form of an object that was removed.
pub(super) struct Removed {
    pub(super) held: Held,
    version: Text,
    json: Arc<[u8]>,
}

impl Removed {
    /// True if `object` is the same but for its resource version.
    pub(super) fn differs_by_version(&self, object: &RawObject) -> bool {
        let member = |version: &Text| format!("\"resourceVersion\":\"{version}\"").into_bytes();
        let (old, new) = (member(&self.version), member(&object.version));
        let Some(at) = memchr::memmem::find(&self.json, &old) else { return false };
        // Each text has its version in its metadata. If all else is equal, the members found here are those.
        let (before, after) = (&self.json[..at], &self.json[at + old.len()..]);
        object
            .json
            .strip_prefix(before)
            .and_then(|rest| rest.strip_prefix(new.as_slice()))
            .is_some_and(|rest| rest == after)
    }
}

#[derive(Default)]
pub(super) struct Store {
    inner: RwLock<Inner>,
}

impl Store {
    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Option<Held> {
        self.read().objects.get_key_value(key).map(|(key, entry)| Held::of(key, entry))
    }

    pub(super) fn uid(&self, key: &ObjectKey) -> Option<Uid> {
        self.read().objects.get(key).map(|entry| entry.uid.clone())
    }

    pub(super) fn list(&self) -> Vec<Held> {
        self.read().objects.iter().map(|(key, entry)| Held::of(key, entry)).collect()
    }

    pub(super) fn list_in(&self, namespace: &str) -> Vec<Held> {
        self.read()
            .objects
            .range(ObjectKey::new(namespace, "")..)
            .take_while(|(key, _)| key.namespace == namespace)
            .map(|(key, entry)| Held::of(key, entry))
            .collect()
    }

    pub(super) fn keys(&self) -> Vec<Arc<ObjectKey>> {
        self.read().objects.keys().cloned().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.read().objects.len()
    }

    pub(super) fn by_index(&self, name: &str, value: &str) -> Vec<Held> {
        let inner = self.read();
        let Some(keys) = inner.indices.get(name).and_then(|index| index.get(value)) else {
            return Vec::new();
        };
        keys.iter().filter_map(|key| Some(Held::of(key, inner.objects.get(key)?))).collect()
    }

    pub(super) fn count_by_index(&self, name: &str, value: &str) -> usize {
        self.read().indices.get(name).and_then(|index| index.get(value)).map_or(0, BTreeSet::len)
    }

    pub(super) fn has_index(&self, name: &str) -> bool {
        self.read().indices.contains_key(name)
    }

    /// Adds an index with the values of the objects held. The caller lets no change happen meanwhile.
    pub(super) fn add_index(&self, name: &'static str, values: Vec<(Arc<ObjectKey>, Vec<String>)>) {
        let mut inner = self.write();
        inner.indices.entry(name).or_default();
        for (key, values) in values {
            let added = inner.index(&key, vec![(name, values)]);
            if let Some(entry) = inner.objects.get_mut(&key) {
                entry.indexed = entry.indexed.iter().cloned().chain(added).collect();
            }
        }
    }

    /// True if exactly this version of the object is held.
    pub(super) fn is_current(&self, object: &RawObject) -> bool {
        let inner = self.read();
        inner.objects.get(&object.key).is_some_and(|entry| {
            !entry.version.is_empty() && entry.version == object.version && entry.uid == object.uid
        })
    }

    /// Stores `object` in place of the former one of its name.
    pub(super) fn apply(
        &self,
        object: RawObject,
        decoded: Option<Decoded>,
        values: IndexValues,
    ) -> Option<Previous> {
        let mut inner = self.write();
        let previous = inner.objects.remove_entry(&object.key);
        // The key of the entry before is kept: the indices share it.
        let (key, previous) = match previous {
            Some((key, entry)) => (key, Some(entry)),
            None => (object.key, None),
        };
        if let Some(entry) = &previous {
            inner.unindex(&key, &entry.indexed);
        }
        let indexed = inner.index(&key, values);
        let listed = previous.as_ref().is_some_and(|entry| entry.decoded.is_some());
        let previous =
            previous.map(|entry| Previous { held: Held::of(&key, &entry), same: entry.uid == object.uid });
        let entry = Entry { uid: object.uid, version: object.version, json: object.json, decoded, indexed };
        let is_decoded = entry.decoded.is_some();
        inner.objects.insert(key.clone(), entry);
        if is_decoded && !listed {
            inner.note_decoded(key);
        }
        previous
    }

    pub(super) fn remove(&self, key: &ObjectKey) -> Option<Removed> {
        let mut inner = self.write();
        let (key, entry) = inner.objects.remove_entry(key)?;
        inner.unindex(&key, &entry.indexed);
        let Entry { version, json, decoded, .. } = entry;
        let held = match decoded {
            Some(decoded) => Held::Decoded(decoded),
            None => Held::Text { key, version: version.clone(), json: json.clone() },
        };
        Some(Removed { held, version, json })
    }

    /// Keeps the decoded form of objects that were held as text.
    pub(super) fn keep_decoded(&self, objects: Vec<(Arc<ObjectKey>, Text, Decoded)>) {
        let mut inner = self.write();
        for (key, version, decoded) in objects {
            if let Some(entry) = inner.objects.get_mut(&key)
                && entry.version == version
                && entry.decoded.is_none()
            {
                entry.decoded = Some(decoded);
                inner.note_decoded(key);
            }
        }
    }

    /// Drops all decoded forms.
    pub(super) fn drop_decoded(&self) {
        let mut inner = self.write();
        for key in std::mem::take(&mut inner.decoded) {
            if let Some(entry) = inner.objects.get_mut(&key) {
                entry.decoded = None;
            }
        }
    }

    pub(super) fn keys_except(&self, keep: &HashSet<Arc<ObjectKey>>) -> Vec<Arc<ObjectKey>> {
        self.read().objects.keys().filter(|key| !keep.contains(*key)).cloned().collect()
    }
}
