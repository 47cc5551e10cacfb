//! A cache whose entries expire, with a limit for their number and their size.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::Duration;
use tokio::time::Instant;

struct Entry<V> {
    value: V,
    cost: usize,
    expires: Instant,
    /// The entry's place in the order of use.
    used: u64,
}

/// The entries that were used last. When one of the limits is reached, the entry that was not used for longest goes.
pub(crate) struct ExpiringCache<K, V> {
    entries: HashMap<K, Entry<V>>,
    order: BTreeMap<u64, K>,
    uses: u64,
    cost: usize,
    max_entries: usize,
    max_cost: usize,
}

impl<K: Clone + Eq + Hash, V: Clone> ExpiringCache<K, V> {
    pub fn new(max_entries: usize, max_cost: usize) -> Self {
        Self { entries: HashMap::new(), order: BTreeMap::new(), uses: 0, cost: 0, max_entries, max_cost }
    }

    pub fn get(&mut self, key: &K, now: Instant) -> Option<V> {
        let entry = self.entries.get_mut(key)?;
        if entry.expires <= now {
            self.remove(key);
            return None;
        }
        self.uses += 1;
        self.order.remove(&entry.used);
        entry.used = self.uses;
        self.order.insert(entry.used, key.clone());
        Some(entry.value.clone())
    }

    /// Adds an entry for a time. One that is larger than the whole cache is not kept.
    pub fn insert(&mut self, key: K, value: V, cost: usize, ttl: Duration, now: Instant) {
        let Some(expires) = now.checked_add(ttl).filter(|expires| *expires > now) else { return };
        self.remove(&key);
        if cost > self.max_cost {
            return;
        }
        self.uses += 1;
        self.cost += cost;
        self.order.insert(self.uses, key.clone());
        self.entries.insert(key, Entry { value, cost, expires, used: self.uses });
        while self.entries.len() > self.max_entries || self.cost > self.max_cost {
            let Some((_, oldest)) = self.order.pop_first() else { return };
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &K) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.used);
            self.cost -= entry.cost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_expire_and_the_least_used_go_first() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let minute = Duration::from_secs(60);
        let mut cache = ExpiringCache::new(3, 100);
        for key in [1, 2, 3] {
            cache.insert(key, key * 10, 10, minute, at(0));
        }
        assert_eq!((cache.get(&1, at(59)), cache.get(&9, at(59))), (Some(10), None));
        cache.insert(4, 40, 10, minute, at(10));
        // 1 was used after 2.
        assert_eq!([1, 2, 3, 4].map(|key| cache.get(&key, at(20))), [Some(10), None, Some(30), Some(40)]);
        assert_eq!([1, 3, 4].map(|key| cache.get(&key, at(60))), [None, None, Some(40)]);
        // No time, no entry; a large one drives others out; one that is too large is not kept.
        cache.insert(5, 50, 10, Duration::ZERO, at(60));
        assert_eq!(cache.get(&5, at(60)), None);
        cache.insert(6, 60, 95, minute, at(60));
        assert_eq!((cache.get(&4, at(60)), cache.get(&6, at(60))), (None, Some(60)));
        cache.insert(7, 70, 101, minute, at(60));
        assert_eq!((cache.get(&7, at(60)), cache.get(&6, at(60))), (None, Some(60)));
        cache.insert(6, 61, 5, minute, at(61));
        assert_eq!((cache.cost, cache.entries.len(), cache.order.len()), (5, 1, 1));
    }
}
