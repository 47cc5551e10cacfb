//! The head: everything numbered, durable or not. Pure: compares, applies, numbers.

use crate::entry::{Entry, Key, Lease, LeaseId, Revision};
use crate::history::Change;
use crate::leases::Leases;
use crate::log::{LeaseRecord, Record};
use crate::replica::{Map, Snapshot, range_of};
use crate::store::StoreError;
use crate::txn::{Durability, Op, Outcome, Txn};
use bytes::Bytes;
use std::collections::HashMap;
use std::ops::Bound;
use std::sync::Arc;

/// What a key was given at a revision that may not be published yet; none when it was deleted.
#[derive(Debug)]
struct Newer {
    revision: Revision,
    entry: Option<Arc<Entry>>,
}

/// What the next transaction is compared with, as far as it differs from what is published.
///
/// Only what is on its way to the disk is kept here. The map itself has one owner, the published state, so that it is
/// changed in place for as long as nobody holds a snapshot of it.
#[derive(Debug)]
pub(crate) struct State {
    newer: HashMap<Key, Newer>,
    pub revision: Revision,
    pub leases: Leases,
}

/// What a transaction did to the state.
#[derive(Debug)]
pub(crate) struct Applied {
    /// Empty when nothing changed: the caller only waits for what it has seen to become durable.
    pub record: Record,
    pub outcome: Outcome,
    pub durability: Durability,
}

impl Applied {
    fn nothing(outcome: Outcome, durability: Durability) -> Self {
        Self { record: Record::default(), outcome, durability }
    }
}

/// Keys that can be read and written.
trait Keys {
    fn get(&self, key: &[u8]) -> Option<&Arc<Entry>>;
    /// Gives a key something else at a revision; none deletes it.
    fn set(&mut self, key: Key, revision: Revision, entry: Option<Arc<Entry>>);
}

impl Keys for Map {
    fn get(&self, key: &[u8]) -> Option<&Arc<Entry>> {
        Map::get(self, key)
    }

    fn set(&mut self, key: Key, _: Revision, entry: Option<Arc<Entry>>) {
        match entry {
            Some(entry) => self.insert(key, entry),
            None => self.remove(key.as_bytes()),
        };
    }
}

/// The newest of every key: what is on its way, and what is published below it.
#[derive(Debug)]
struct Newest<'a> {
    newer: &'a mut HashMap<Key, Newer>,
    published: &'a Map,
}

impl Keys for Newest<'_> {
    fn get(&self, key: &[u8]) -> Option<&Arc<Entry>> {
        match self.newer.get(key) {
            Some(newer) => newer.entry.as_ref(),
            None => self.published.get(key),
        }
    }

    fn set(&mut self, key: Key, revision: Revision, entry: Option<Arc<Entry>>) {
        self.newer.insert(key, Newer { revision, entry });
    }
}

/// Keys being changed at one revision.
#[derive(Debug)]
struct Making<K> {
    keys: K,
    next: Revision,
    changes: Vec<Change>,
}

impl<K: Keys> Making<K> {
    /// Writes a key. The lease exists.
    fn put(&mut self, leases: &mut Leases, key: Key, value: Bytes, lease: LeaseId) -> Arc<Entry> {
        let previous = self.keys.get(key.as_bytes()).cloned();
        let entry = Arc::new(Entry {
            value: own(value),
            created: previous.as_ref().map_or(self.next, |p| p.created),
            modified: self.next,
            version: previous.as_ref().map_or(1, |p| p.version + 1),
            lease,
        });
        leases.reattach(&key, previous.as_ref(), Some(&entry));
        self.keys.set(key.clone(), self.next, Some(Arc::clone(&entry)));
        self.changes.push(Change { revision: self.next, key, entry: Some(Arc::clone(&entry)), previous });
        entry
    }

    /// Deletes a key and answers what it held.
    fn delete(&mut self, leases: &mut Leases, key: &Key) -> Option<Arc<Entry>> {
        let previous = self.keys.get(key.as_bytes()).cloned()?;
        leases.reattach(key, Some(&previous), None);
        self.keys.set(key.clone(), self.next, None);
        self.changes.push(Change {
            revision: self.next,
            key: key.clone(),
            entry: None,
            previous: Some(Arc::clone(&previous)),
        });
        Some(previous)
    }
}

/// The bytes without anything around them: they may be a small part of a large buffer that would live as long.
fn own(value: Bytes) -> Bytes {
    match value.try_into_mut() {
        Ok(alone) if alone.capacity() <= alone.len() + alone.len() / 8 => alone.freeze(),
        Ok(roomy) => Bytes::copy_from_slice(&roomy),
        Err(shared) => Bytes::copy_from_slice(&shared),
    }
}

/// A transaction that is being made: reads see its own writes, nobody else does.
#[derive(Debug)]
pub struct Draft {
    making: Making<Map>,
    revision: Revision,
    leases: Leases,
}

impl Draft {
    /// The revision this transaction will have, provided that it changes something.
    pub fn next_revision(&self) -> Revision {
        self.making.next
    }

    /// The revision of the store after what was done so far.
    pub fn revision(&self) -> Revision {
        if self.making.changes.is_empty() { self.revision } else { self.making.next }
    }

    pub fn get(&self, key: &[u8]) -> Option<&Arc<Entry>> {
        self.making.keys.get(key)
    }

    /// Entries with `start <= key`, and below `end` where given.
    pub fn range<'a>(
        &'a self,
        start: &'a [u8],
        end: Option<&'a [u8]>,
    ) -> impl DoubleEndedIterator<Item = (&'a Key, &'a Arc<Entry>)> + 'a {
        range_of(&self.making.keys, start, end)
    }

    /// The state with what was done so far.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { map: self.making.keys.clone(), revision: self.revision() }
    }

    pub fn lease_exists(&self, id: LeaseId) -> bool {
        id == LeaseId::NONE || self.leases.contains(id)
    }

    /// Writes a key. The lease has to exist.
    pub fn put(&mut self, key: Key, value: Bytes, lease: LeaseId) -> Result<Arc<Entry>, StoreError> {
        if !self.lease_exists(lease) {
            return Err(StoreError::NoSuchLease(lease));
        }
        Ok(self.making.put(&mut self.leases, key, value, lease))
    }

    /// Deletes a key and answers what it held. Deleting what is not there changes nothing.
    pub fn delete(&mut self, key: &Key) -> Option<Arc<Entry>> {
        self.making.delete(&mut self.leases, key)
    }
}

impl State {
    pub fn new(revision: Revision, leases: Leases) -> Self {
        Self { newer: HashMap::new(), revision, leases }
    }

    /// The state together with what is published: what transactions are made on.
    pub fn over<'a>(&'a mut self, published: &'a Map) -> View<'a> {
        View { state: self, published }
    }

    /// Forgets what is published.
    pub fn forget(&mut self, published: Revision) {
        self.newer.retain(|_, newer| newer.revision > published);
    }

    /// Goes back to what is published.
    pub fn undo(&mut self, revision: Revision, leases: Leases) {
        *self = Self::new(revision, leases);
    }
}

/// The head, ready for a transaction.
#[derive(Debug)]
pub(crate) struct View<'a> {
    state: &'a mut State,
    published: &'a Map,
}

impl View<'_> {
    pub fn leases(&mut self) -> &mut Leases {
        &mut self.state.leases
    }

    fn newest(&mut self) -> (Making<Newest<'_>>, &mut Leases) {
        let State { newer, revision, leases } = &mut *self.state;
        let keys = Newest { newer, published: self.published };
        (Making { keys, next: revision.next(), changes: Vec::new() }, leases)
    }

    /// Numbers what was changed.
    fn finish(&mut self, changes: Vec<Change>, leases: Vec<LeaseRecord>, durability: Durability) -> Applied {
        if !changes.is_empty() {
            self.state.revision = self.state.revision.next();
        }
        let revision = self.state.revision;
        let outcome = Outcome::Committed { revision };
        Applied { record: Record { revision, changes, leases }, outcome, durability }
    }

    /// Compares, applies and numbers a transaction.
    pub fn commit(&mut self, txn: Txn) -> Result<Applied, StoreError> {
        let Txn { compares, ops, durability } = txn;
        let revision = self.state.revision;
        let (mut making, leases) = self.newest();
        let held = |key: &Key| making.keys.get(key.as_bytes());
        if let Some(failed) = compares.iter().find(|c| !c.holds(held(c.key()).map(|e| &**e))) {
            let outcome = Outcome::Conflict { revision, current: held(failed.key()).cloned() };
            return Ok(Applied::nothing(outcome, durability));
        }
        // Checked before anything is touched.
        for op in &ops {
            if let Op::Put { lease, .. } = op
                && *lease != LeaseId::NONE
                && !leases.contains(*lease)
            {
                return Err(StoreError::NoSuchLease(*lease));
            }
        }
        for op in ops {
            match op {
                Op::Put { key, value, lease } => drop(making.put(leases, key, value, lease)),
                Op::Delete { key } => drop(making.delete(leases, &key)),
            }
        }
        let changes = making.changes;
        Ok(self.finish(changes, Vec::new(), durability))
    }

    /// Lets `make` read and write under the lock. An error leaves everything as it was.
    pub fn transact<T, E>(
        &mut self,
        make: impl FnOnce(&mut Draft) -> Result<T, E>,
    ) -> Result<(T, Applied), E> {
        let State { newer, revision, leases } = &*self.state;
        let mut keys = self.published.clone();
        for (key, newer) in newer {
            keys.set(key.clone(), newer.revision, newer.entry.clone());
        }
        let mut draft = Draft {
            making: Making { keys, next: revision.next(), changes: Vec::new() },
            revision: *revision,
            leases: leases.clone(),
        };
        let value = make(&mut draft)?;
        let Draft { making: Making { changes, .. }, leases, .. } = draft;
        let mut newest = self.newest().0.keys;
        changes.iter().for_each(|c| newest.set(c.key.clone(), c.revision, c.entry.clone()));
        self.state.leases = leases;
        Ok((value, self.finish(changes, Vec::new(), Durability::Durable)))
    }

    /// Makes a lease, or renews one.
    pub fn grant(&mut self, lease: Lease, ttl: u64, durability: Durability) -> Applied {
        self.state.leases.grant(lease, ttl);
        self.finish(Vec::new(), vec![LeaseRecord::Granted { lease, ttl }], durability)
    }

    /// Ends a lease whose time was over at `now`. One that has been renewed in the meantime goes on.
    pub fn expire(&mut self, id: LeaseId, now: u64) -> Result<Applied, StoreError> {
        match self.state.leases.get(id) {
            Some(lease) if lease.expires_at > now => {
                let outcome = Outcome::Committed { revision: self.state.revision };
                Ok(Applied::nothing(outcome, Durability::Durable))
            }
            _ => self.revoke(id),
        }
    }

    /// Ends a lease and deletes the keys attached to it, at one revision.
    pub fn revoke(&mut self, id: LeaseId) -> Result<Applied, StoreError> {
        let attached = self.state.leases.get(id).ok_or(StoreError::NoSuchLease(id))?.keys.clone();
        let (mut making, leases) = self.newest();
        for key in &attached {
            making.delete(leases, key);
        }
        leases.revoke(id);
        let changes = making.changes;
        Ok(self.finish(changes, vec![LeaseRecord::Revoked(id)], Durability::Durable))
    }
}

/// The bounds of a range as the map wants them.
pub(crate) fn bounds<'a>(start: &'a [u8], end: Option<&'a [u8]>) -> (Bound<&'a [u8]>, Bound<&'a [u8]>) {
    (Bound::Included(start), end.map_or(Bound::Unbounded, Bound::Excluded))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Compare;

    fn put(key: &str, value: &str) -> Txn {
        Txn::default().then(Op::put(Key::from(key), Bytes::copy_from_slice(value.as_bytes())))
    }

    #[test]
    fn what_is_on_its_way_covers_what_is_published() {
        let (mut state, mut map) = (State::new(Revision(0), Leases::default()), Map::new());
        let absent = |key| Txn::default().when(Compare::Absent(Key::from(key)));
        let conflict = |applied: &Applied| matches!(applied.outcome, Outcome::Conflict { .. });
        let publish = |state: &mut State, map: &mut Map, applied: &Applied| {
            for change in &applied.record.changes {
                map.set(change.key.clone(), change.revision, change.entry.clone());
                state.forget(change.revision);
            }
        };
        let first = state.over(&map).commit(put("a", "1")).unwrap();
        assert!(conflict(&state.over(&map).commit(absent("a")).unwrap()), "not published");
        let second =
            state.over(&map).commit(Txn::default().then(Op::Delete { key: Key::from("a") })).unwrap();
        publish(&mut state, &mut map, &first);
        assert!(!conflict(&state.over(&map).commit(absent("a")).unwrap()), "deleted since it was published");
        let (seen, third) = state
            .over(&map)
            .transact(|draft| {
                let before = draft.get(b"a").is_some();
                draft
                    .put(Key::from("a"), Bytes::from("3"), LeaseId::NONE)
                    .map(|entry| (before, entry.version))
            })
            .unwrap();
        assert_eq!(seen, (false, 1), "a transaction of many steps sees the same");
        publish(&mut state, &mut map, &second);
        assert!(conflict(&state.over(&map).commit(absent("a")).unwrap()));
        publish(&mut state, &mut map, &third);
        assert!(state.newer.is_empty());
        assert_eq!(map.get(&b"a"[..]).unwrap().created, Revision(3));
        state.over(&map).commit(put("b", "1")).unwrap();
        state.undo(Revision(3), Leases::default());
        assert!(!conflict(&state.over(&map).commit(absent("b")).unwrap()), "it never happened");
        assert_eq!(state.over(&map).commit(put("c", "1")).unwrap().outcome.revision(), Revision(4));
    }

    #[test]
    fn values_do_not_keep_what_is_around_them() {
        let large = Bytes::from(vec![7; 1 << 16]);
        let rows =
            [Bytes::new(), Bytes::from_static(b"static"), large.slice(100..200), Bytes::from(vec![7; 64])];
        for value in rows {
            let before = value.to_vec();
            let kept = own(value);
            assert_eq!(kept, before);
            assert!(kept.is_empty() || kept.try_into_mut().is_ok_and(|alone| alone.capacity() < 1 << 10));
        }
    }
}
