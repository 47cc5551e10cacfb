//! The copy an informer keeps, and its indices.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::Change;
use crate::{Object, ObjectKey};

struct Index<K> {
    f: fn(&K) -> Vec<String>,
    keys: HashMap<String, BTreeSet<ObjectKey>>,
}

impl<K> Index<K> {
    fn insert(&mut self, key: &ObjectKey, object: &K) {
        for value in (self.f)(object) {
            self.keys.entry(value).or_default().insert(key.clone());
        }
    }

    fn remove(&mut self, key: &ObjectKey, object: &K) {
        for value in (self.f)(object) {
            if let Some(keys) = self.keys.get_mut(&value) {
                keys.remove(key);
                if keys.is_empty() {
                    self.keys.remove(&value);
                }
            }
        }
    }
}

struct Inner<K> {
    objects: BTreeMap<ObjectKey, Arc<K>>,
    indices: HashMap<&'static str, Index<K>>,
}

pub(super) struct Store<K> {
    inner: RwLock<Inner<K>>,
    /// Takes away what nobody here reads, before an object is kept.
    slim: fn(&mut K),
}

impl<K: Object> Store<K> {
    pub(super) fn new(slim: fn(&mut K)) -> Self {
        Self { inner: RwLock::new(Inner { objects: BTreeMap::new(), indices: HashMap::new() }), slim }
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner<K>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner<K>> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Option<Arc<K>> {
        self.read().objects.get(key).cloned()
    }

    pub(super) fn list(&self) -> Vec<Arc<K>> {
        self.read().objects.values().cloned().collect()
    }

    pub(super) fn list_in(&self, namespace: &str) -> Vec<Arc<K>> {
        self.read()
            .objects
            .range(ObjectKey::new(namespace, "")..)
            .take_while(|(key, _)| key.namespace == namespace)
            .map(|(_, object)| object.clone())
            .collect()
    }

    pub(super) fn len(&self) -> usize {
        self.read().objects.len()
    }

    pub(super) fn add_index(&self, name: &'static str, f: fn(&K) -> Vec<String>) {
        let mut inner = self.write();
        if inner.indices.contains_key(name) {
            return;
        }
        let mut index = Index { f, keys: HashMap::new() };
        for (key, object) in &inner.objects {
            index.insert(key, object);
        }
        inner.indices.insert(name, index);
    }

    pub(super) fn by_index(&self, name: &str, value: &str) -> Vec<Arc<K>> {
        let inner = self.read();
        let Some(keys) = inner.indices.get(name).and_then(|index| index.keys.get(value)) else {
            return Vec::new();
        };
        keys.iter().filter_map(|key| inner.objects.get(key).cloned()).collect()
    }

    pub(super) fn keys_except(&self, keep: impl Iterator<Item = ObjectKey>) -> Vec<ObjectKey> {
        let keep: HashSet<ObjectKey> = keep.collect();
        self.read().objects.keys().filter(|key| !keep.contains(*key)).cloned().collect()
    }

    /// What changed by `object` being as it is now: nothing when this version is already held.
    pub(super) fn apply(&self, mut object: K) -> Vec<Change<K>> {
        (self.slim)(&mut object);
        let key = ObjectKey::of(&object);
        let new = Arc::new(object);
        let mut inner = self.write();
        let old = inner.objects.get(&key).cloned();
        if let Some(old) = &old {
            let (before, after) = (old.meta(), new.meta());
            if before.resource_version.is_some()
                && before.resource_version == after.resource_version
                && before.uid == after.uid
            {
                return Vec::new();
            }
            inner.indices.values_mut().for_each(|index| index.remove(&key, old));
        }
        inner.indices.values_mut().for_each(|index| index.insert(&key, &new));
        inner.objects.insert(key, new.clone());
        match old {
            None => vec![Change::Added(new)],
            Some(old) if old.meta().uid != new.meta().uid => vec![Change::Deleted(old), Change::Added(new)],
            Some(old) => vec![Change::Updated { old, new }],
        }
    }

    pub(super) fn remove(&self, mut last: K) -> Option<Change<K>> {
        (self.slim)(&mut last);
        self.remove_key(&ObjectKey::of(&last)).map(|_| Change::Deleted(Arc::new(last)))
    }

    pub(super) fn remove_key(&self, key: &ObjectKey) -> Option<Change<K>> {
        let mut inner = self.write();
        let old = inner.objects.remove(key)?;
        inner.indices.values_mut().for_each(|index| index.remove(key, &old));
        Some(Change::Deleted(old))
    }
}
