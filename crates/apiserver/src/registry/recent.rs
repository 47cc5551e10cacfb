//! Objects that were just written, as they were before they became bytes.
//!
//! Writes of one object often follow one another: a condition and then a deletion, a nomination and then a binding. The
//! next one need not decode the bytes that the last one has encoded.

use super::stored;
use bytes::Bytes;
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use ferrite_store::{Entry, Key, Revision};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Places for objects. An object goes to the place of its key, and takes that of another.
const PLACES: usize = 512;
/// Larger objects are not kept.
const LARGE: usize = 16 << 10;
/// Objects stay no longer than this after the last write.
const MAX_AGE: Duration = Duration::from_secs(10);

/// A written object, with the bytes that it was encoded to: it holds for no other bytes.
struct Recent {
    key: Key,
    revision: Revision,
    value: Bytes,
    object: Arc<Value>,
}

impl Recent {
    fn is_of(&self, key: &Key, entry: &Entry) -> bool {
        self.revision == entry.modified && self.key == *key && self.value == *entry.plain()
    }
}

#[derive(Default)]
struct Places {
    /// Empty until the first write, and after a pause.
    recent: Vec<Option<Recent>>,
    last: Option<Instant>,
}

#[derive(Default)]
pub(super) struct RecentWrites {
    places: Mutex<Places>,
    hasher: RandomState,
}

impl RecentWrites {
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, key: &Key) -> usize {
        self.hasher.hash_one(key) as usize % PLACES
    }

    /// Keeps an object that was stored as `value`. The object has its resource version.
    pub fn keep(
        &self,
        resource: &Resource,
        key: &Key,
        value: &Bytes,
        revision: Revision,
        object: &Arc<Value>,
    ) {
        // Others are not decoded to what was encoded: they are stored in another version, or pruned.
        if !resource.is_read_as_stored() || value.len() > LARGE {
            return;
        }
        let recent = Recent { key: key.clone(), revision, value: value.clone(), object: Arc::clone(object) };
        let place = self.place(key);
        // Dropped after the lock.
        let _former = {
            let mut places = self.lock();
            if places.recent.is_empty() {
                places.recent.resize_with(PLACES, || None);
            }
            places.last = Some(Instant::now());
            places.recent[place].replace(recent)
        };
    }

    /// The object of an entry, if it was just written. It is not kept any longer: whoever asks is about to write.
    fn take(&self, key: &Key, entry: &Entry) -> Option<Arc<Value>> {
        let place = self.place(key);
        let mut places = self.lock();
        let recent = places.recent.get_mut(place)?.take_if(|recent| recent.is_of(key, entry));
        drop(places);
        recent.map(|recent| recent.object)
    }

    /// The object of an entry, for a write. None if its value is not in our format.
    pub fn take_or_decode(&self, resource: &Resource, key: &Key, entry: &Entry) -> Option<Arc<Value>> {
        let kept = self.take(key, entry);
        debug_assert!(
            kept.as_deref().is_none_or(|kept| stored::decode(resource, entry).as_ref() == Some(kept)),
            "an object differs from what was stored: {kept:?}"
        );
        kept.or_else(|| stored::decode(resource, entry).map(Arc::new))
    }

    /// Forgets everything after a pause.
    pub fn forget_old(&self) {
        let _former = {
            let mut places = self.lock();
            if places.last.is_none_or(|last| last.elapsed() < MAX_AGE) {
                return;
            }
            std::mem::take(&mut *places)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::fixture;
    use ferrite_api::resource::Strategy;
    use ferrite_json::json;
    use ferrite_store::{LeaseId, Plain};

    struct Simple;
    impl Strategy for Simple {}

    fn written(note: &str, revision: u64) -> (Arc<Value>, Arc<Entry>) {
        let object = json!({"kind": "Pod", "apiVersion": "v1", "spec": note,
            "metadata": {"name": "a", "resourceVersion": revision.to_string()}});
        let entry = Entry {
            value: stored::encode(&fixture::pods(Simple), &object),
            created: Revision(1),
            modified: Revision(revision),
            version: 1,
            lease: LeaseId::NONE,
            plain: Plain::default(),
        };
        (Arc::new(object), Arc::new(entry))
    }

    #[test]
    fn an_object_is_of_the_bytes_that_it_was_written_as() {
        let (pods, recent) = (fixture::pods(Simple), RecentWrites::default());
        let key = Key::from("/registry/pods/default/a");
        let keep = |(object, entry): &(Arc<Value>, Arc<Entry>)| {
            recent.keep(&pods, &key, &entry.value, entry.modified, object);
        };
        let first = written("first", 1);
        keep(&first);
        let taken = recent.take(&key, &first.1).expect("just written");
        assert!(Arc::ptr_eq(&taken, &first.0));
        assert!(recent.take(&key, &first.1).is_none(), "once");

        keep(&first);
        let second = written("second", 2);
        assert!(recent.take(&key, &second.1).is_none(), "another revision");
        let other = written("other", 1);
        assert!(recent.take(&key, &other.1).is_none(), "the same revision of another history");
        let decoded = recent.take_or_decode(&pods, &key, &second.1).expect("an object");
        assert_eq!(decoded, second.0);
        assert!(recent.take(&Key::from("/registry/pods/default/b"), &first.1).is_none());
        recent.forget_old();
        assert!(recent.take(&key, &first.1).is_some(), "too young to be forgotten");
    }

    #[test]
    fn large_objects_are_not_kept() {
        let (pods, recent) = (fixture::pods(Simple), RecentWrites::default());
        let key = Key::from("/registry/pods/default/a");
        let (object, entry) = written(&"x".repeat(LARGE), 1);
        recent.keep(&pods, &key, &entry.value, entry.modified, &object);
        assert!(recent.take(&key, &entry).is_none());
    }
}
