//! A cache of decoded objects that every write reads and that change seldom.

use super::stored;
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use ferrite_store::{Entry, Key};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// Most cached objects. The cache is cleared when full: such workloads have no hot set.
const KEPT: usize = 256;
/// Larger objects are not cached.
const LARGE: usize = 16 << 10;
/// An object that no request needed for at least this time is dropped. Each consists of dozens of small allocations,
/// and many are of namespaces that are gone.
const UNUSED: Duration = Duration::from_secs(60);

/// An object, with the entry that it was decoded from: it holds for no other.
struct Decoded {
    from: Arc<Entry>,
    object: Arc<Value>,
    /// False if no request needed it since unused objects were last dropped.
    used: bool,
}

/// Decoded objects by key.
#[derive(Default)]
pub(super) struct DecodedObjects {
    kept: Mutex<HashMap<Key, Decoded>>,
    filled: Notify,
}

impl DecodedObjects {
    /// The object of an entry. None if its value is not in our format.
    pub fn get(&self, resource: &Resource, key: &Key, entry: &Arc<Entry>) -> Option<Arc<Value>> {
        let decode = || stored::decode(resource, entry).map(Arc::new);
        // An object that is stored as another version is decoded into a different one for each version that is read.
        if !resource.is_read_as_stored() || entry.plain().len() > LARGE {
            return decode();
        }
        if let Some(known) = self.lock().get_mut(key)
            && Arc::ptr_eq(&known.from, entry)
        {
            known.used = true;
            return Some(Arc::clone(&known.object));
        }
        let object = decode()?;
        let mut kept = self.lock();
        if kept.len() >= KEPT {
            kept.clear();
        }
        let decoded = Decoded { from: Arc::clone(entry), object: Arc::clone(&object), used: true };
        let was_empty = kept.is_empty();
        kept.insert(key.clone(), decoded);
        drop(kept);
        if was_empty {
            self.filled.notify_one();
        }
        Some(object)
    }

    /// Drops unused objects, for as long as it is polled.
    pub async fn drop_unused(&self) {
        loop {
            while !self.lock().is_empty() {
                tokio::time::sleep(UNUSED).await;
                let mut kept = self.lock();
                kept.retain(|_, decoded| std::mem::take(&mut decoded.used));
                kept.shrink_to_fit();
            }
            self.filled.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Decoded>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::fixture;
    use ferrite_api::resource::Strategy;
    use ferrite_json::json;
    use ferrite_store::{LeaseId, Revision};

    struct Plain;
    impl Strategy for Plain {}

    fn entry(note: &str, modified: u64) -> Arc<Entry> {
        let object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"}, "spec": note});
        Arc::new(Entry {
            value: stored::encode(&fixture::pods(Plain), &object),
            created: Revision(1),
            modified: Revision(modified),
            version: 1,
            lease: LeaseId::NONE,
            plain: ferrite_store::Plain::default(),
        })
    }

    #[test]
    fn an_object_is_decoded_once_for_each_of_its_versions() {
        let (pods, objects) = (fixture::pods(Plain), DecodedObjects::default());
        let key = Key::from("/registry/pods/default/a");
        let (old, new) = (entry("old", 1), entry("new", 2));
        let first = objects.get(&pods, &key, &old).unwrap();
        assert_eq!(first["spec"], "old");
        assert!(Arc::ptr_eq(&first, &objects.get(&pods, &key, &old).unwrap()));
        let changed = objects.get(&pods, &key, &new).unwrap();
        assert_eq!((&changed["spec"], &changed["metadata"]["resourceVersion"]), (&json!("new"), &json!("2")));
        // The same revision of another history is another object.
        assert_eq!(objects.get(&pods, &key, &entry("other", 2)).unwrap()["spec"], "other");
    }

    #[tokio::test(start_paused = true)]
    async fn unused_objects_are_dropped() {
        let (pods, objects) = (fixture::pods(Plain), DecodedObjects::default());
        let (used, unused) = (Key::from("/registry/pods/default/a"), Key::from("/registry/pods/default/b"));
        let entry = entry("x", 1);
        objects.get(&pods, &unused, &entry).unwrap();
        let uses = async {
            for _ in 0..5 {
                objects.get(&pods, &used, &entry).unwrap();
                tokio::time::sleep(UNUSED / 2).await;
            }
            assert!(objects.lock().contains_key(&used) && !objects.lock().contains_key(&unused));
            tokio::time::sleep(UNUSED * 3).await;
            assert!(objects.lock().is_empty());
            // An object that comes later goes, too.
            objects.get(&pods, &used, &entry).unwrap();
            tokio::time::sleep(UNUSED * 3).await;
            assert!(objects.lock().is_empty());
        };
        tokio::select! { () = objects.drop_unused() => {}, () = uses => {} }
    }

    #[test]
    fn no_more_are_kept_than_fit() {
        let (pods, objects) = (fixture::pods(Plain), DecodedObjects::default());
        for number in 0..=KEPT {
            let key = Key::from(&format!("/registry/pods/default/{number}"));
            objects.get(&pods, &key, &entry("x", 1)).unwrap();
            assert!(objects.lock().len() <= KEPT);
        }
        let large = entry(&"x".repeat(LARGE), 1);
        let key = Key::from("/registry/pods/default/large");
        assert!(objects.get(&pods, &key, &large).is_some());
        assert!(!objects.lock().contains_key(&key));
    }
}
