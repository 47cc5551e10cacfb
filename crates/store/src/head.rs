//! The head: everything numbered, durable or not. Pure: compares, applies, numbers.

use crate::entry::{Entry, Key, Lease, LeaseId, Plain, Revision};
use crate::history::Change;
use crate::leases::Leases;
use crate::log::LeaseRecord;
use crate::replica::{Map, Snapshot, range_of};
use crate::store::StoreError;
use crate::txn::{Durability, Op, Outcome, Txn};
use bytes::Bytes;
use std::ops::Bound;
use std::sync::Arc;

/// The state that the next transaction's conditions are checked against.
#[derive(Debug)]
pub(crate) struct State {
    pub map: Map,
    pub revision: Revision,
    pub leases: Leases,
}

/// The effect of a transaction on the state. Its changes are kept in the list shared by the batch.
#[derive(Debug)]
pub(crate) struct Applied {
    /// None when nothing changed: the caller only waits until the state that it has seen is durable.
    pub record: Option<Record>,
    pub outcome: Outcome,
    pub durability: Durability,
}

/// The part of a transaction that the log stores.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub revision: Revision,
    /// Number of changes that it made.
    pub changes: usize,
    pub leases: Vec<LeaseRecord>,
}

/// A transaction that is being made: reads see its own writes, nobody else does.
#[derive(Debug)]
pub struct Draft {
    state: State,
    next: Revision,
    /// Its own begin at `first`.
    changes: Vec<Change>,
    first: usize,
    durability: Durability,
}

impl Draft {
    /// Changes are added to those that are there.
    fn new(state: State, changes: Vec<Change>) -> Self {
        let (next, first) = (state.revision.next(), changes.len());
        Self { state, next, changes, first, durability: Durability::Durable }
    }

    /// The revision this transaction will have, provided that it changes something.
    pub fn next_revision(&self) -> Revision {
        self.next
    }

    /// The revision of the store after the operations so far.
    pub fn revision(&self) -> Revision {
        if self.changes.len() == self.first { self.state.revision } else { self.next }
    }

    pub fn get(&self, key: &[u8]) -> Option<&Arc<Entry>> {
        self.state.map.get(key)
    }

    /// Entries with `start <= key`, and below `end` where given.
    pub fn range<'a>(
        &'a self,
        start: &'a [u8],
        end: Option<&'a [u8]>,
    ) -> impl DoubleEndedIterator<Item = (&'a Key, &'a Arc<Entry>)> + 'a {
        range_of(&self.state.map, start, end)
    }

    /// The state after the operations so far.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::new(self.state.map.clone(), self.revision())
    }

    pub fn lease_exists(&self, id: LeaseId) -> bool {
        id == LeaseId::NONE || self.state.leases.contains(id)
    }

    /// Writes a key. The lease has to exist.
    pub fn put(&mut self, key: Key, value: &Bytes, lease: LeaseId) -> Result<Arc<Entry>, StoreError> {
        if !self.lease_exists(lease) {
            return Err(StoreError::NoSuchLease(lease));
        }
        // A copy of its own: the caller's bytes may be a small part of a large buffer that would live as long.
        Ok(self.put_own(key, Bytes::copy_from_slice(value), lease))
    }

    /// Writes a key with a lease that exists and a value that keeps nothing else in memory.
    fn put_own(&mut self, key: Key, value: Bytes, lease: LeaseId) -> Arc<Entry> {
        let mut entry = Entry {
            value,
            created: self.next,
            modified: self.next,
            version: 1,
            lease,
            plain: Plain::default(),
        };
        let (entry, previous) = match self.state.map.get_mut(key.as_bytes()) {
            // One search for both.
            Some(place) => {
                (entry.created, entry.version) = (place.created, place.version + 1);
                let entry = Arc::new(entry);
                let previous = std::mem::replace(place, Arc::clone(&entry));
                (entry, Some(previous))
            }
            None => {
                let entry = Arc::new(entry);
                self.state.map.insert(key.clone(), Arc::clone(&entry));
                (entry, None)
            }
        };
        self.state.leases.reattach(&key, previous.as_ref(), Some(&entry));
        self.changes.push(Change { revision: self.next, key, entry: Some(Arc::clone(&entry)), previous });
        entry
    }

    /// Deletes a key and returns its entry. Deleting a missing key changes nothing.
    pub fn delete(&mut self, key: &Key) -> Option<Arc<Entry>> {
        let previous = self.state.map.remove(key.as_bytes())?;
        self.state.leases.reattach(key, Some(&previous), None);
        self.changes.push(Change {
            revision: self.next,
            key: key.clone(),
            entry: None,
            previous: Some(Arc::clone(&previous)),
        });
        Some(previous)
    }

    fn finish(mut self) -> (State, Vec<Change>, Applied) {
        let (durability, changes) = (self.durability, self.changes.len() - self.first);
        self.state.revision = self.revision();
        let revision = self.state.revision;
        let record = (changes > 0).then(|| Record { revision, changes, leases: Vec::new() });
        (self.state, self.changes, Applied { record, outcome: Outcome::Committed { revision }, durability })
    }
}

impl State {
    fn take(&mut self) -> Self {
        Self {
            map: std::mem::take(&mut self.map),
            revision: self.revision,
            leases: std::mem::take(&mut self.leases),
        }
    }

    /// Checks, applies and numbers a transaction. Its changes are appended to `changes`.
    pub fn commit(&mut self, txn: Txn, changes: &mut Vec<Change>) -> Result<Applied, StoreError> {
        let failed = txn.compares.iter().find(|c| !c.holds(self.map.get(c.key().as_bytes()).map(|e| &**e)));
        if let Some(failed) = failed {
            let current = self.map.get(failed.key().as_bytes()).cloned();
            let outcome = Outcome::Conflict { revision: self.revision, current };
            return Ok(Applied { record: None, outcome, durability: txn.durability });
        }
        // Checked before anything is touched: the draft below works on the state itself, not on a copy.
        for op in &txn.ops {
            if let Op::Put { lease, .. } = op
                && *lease != LeaseId::NONE
                && !self.leases.contains(*lease)
            {
                return Err(StoreError::NoSuchLease(*lease));
            }
        }
        let mut draft = Draft::new(self.take(), std::mem::take(changes));
        draft.durability = txn.durability;
        for op in txn.ops {
            match op {
                Op::Put { key, value, lease } => drop(draft.put_own(key, alone(value), lease)),
                Op::Delete { key } => drop(draft.delete(&key)),
            }
        }
        let applied;
        (*self, *changes, applied) = draft.finish();
        Ok(applied)
    }

    /// Lets `make` read and write under the lock. An error leaves everything as it was.
    pub fn transact<T, E>(
        &mut self,
        changes: &mut Vec<Change>,
        make: impl FnOnce(&mut Draft) -> Result<T, E>,
    ) -> Result<(T, Applied), E> {
        let copy = Self { map: self.map.clone(), revision: self.revision, leases: self.leases.clone() };
        let mut draft = Draft::new(copy, Vec::new());
        let value = make(&mut draft)?;
        let (state, mut made, applied) = draft.finish();
        *self = state;
        changes.append(&mut made);
        Ok((value, applied))
    }

    /// Makes a lease, or renews one.
    pub fn grant(&mut self, lease: Lease, ttl: u64, durability: Durability) -> Applied {
        self.leases.grant(lease, ttl);
        let leases = vec![LeaseRecord::Granted { lease, ttl }];
        let record = Some(Record { revision: self.revision, changes: 0, leases });
        let outcome = Outcome::Committed { revision: self.revision };
        Applied { record, outcome, durability }
    }

    /// Ends a lease whose time was over at `now`. One that has been renewed in the meantime goes on.
    pub fn expire(
        &mut self,
        id: LeaseId,
        now: u64,
        changes: &mut Vec<Change>,
    ) -> Result<Applied, StoreError> {
        match self.leases.get(id) {
            Some(lease) if lease.expires_at > now => {
                let outcome = Outcome::Committed { revision: self.revision };
                Ok(Applied { record: None, outcome, durability: Durability::Durable })
            }
            _ => self.revoke(id, changes),
        }
    }

    /// Ends a lease and deletes the keys attached to it, at one revision.
    pub fn revoke(&mut self, id: LeaseId, changes: &mut Vec<Change>) -> Result<Applied, StoreError> {
        let attached = self.leases.get(id).ok_or(StoreError::NoSuchLease(id))?.keys.clone();
        let mut draft = Draft::new(self.take(), std::mem::take(changes));
        for key in &attached {
            draft.delete(key);
        }
        let mut applied;
        (*self, *changes, applied) = draft.finish();
        self.leases.revoke(id);
        let record = applied.record.get_or_insert(Record { revision: self.revision, ..Record::default() });
        record.leases.push(LeaseRecord::Revoked(id));
        Ok(applied)
    }
}

/// A value that keeps nothing else in memory: the caller's value if it is all of its buffer and nobody else
/// has it, or else a copy.
fn alone(value: Bytes) -> Bytes {
    let own = Vec::from(value);
    match own.capacity() - own.len() > own.len() / 8 {
        true => Bytes::copy_from_slice(&own),
        false => Bytes::from(own),
    }
}

/// The bounds of a range as the map wants them.
pub(crate) fn bounds<'a>(start: &'a [u8], end: Option<&'a [u8]>) -> (Bound<&'a [u8]>, Bound<&'a [u8]>) {
    (Bound::Included(start), end.map_or(Bound::Unbounded, Bound::Excluded))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(value: Bytes) -> Arc<Entry> {
        let mut state = State { map: Map::new(), revision: Revision(0), leases: Leases::default() };
        let put = Op::put(Key::from("a"), value);
        state.commit(Txn::default().then(put), &mut Vec::new()).unwrap();
        Arc::clone(state.map.get(&b"a"[..]).unwrap())
    }

    #[test]
    fn a_value_keeps_nothing_else_in_memory() {
        let large = Bytes::from(vec![7; 100_000]);
        let tail = large.slice(99_000..);
        // Nobody else has the large buffer, and it would live as long as its last hundredth.
        drop(large);
        let at = tail.as_ptr();
        let entry = stored(tail);
        assert_eq!(entry.value, vec![7; 1000]);
        assert_ne!(entry.value.as_ptr(), at);

        let mut roomy = Vec::with_capacity(10_000);
        roomy.extend_from_slice(&[7; 1000]);
        let at = roomy.as_ptr();
        assert_ne!(stored(Bytes::from(roomy)).value.as_ptr(), at);

        let shared = Bytes::from(vec![7; 1000]);
        assert_ne!(stored(shared.clone()).value.as_ptr(), shared.as_ptr());
    }

    #[test]
    fn a_value_that_is_alone_is_not_copied() {
        let value = Bytes::from(vec![7; 1000]);
        let at = value.as_ptr();
        assert_eq!(stored(value).value.as_ptr(), at);
    }

    #[test]
    fn changes_are_added_to_those_of_the_neighbours() {
        let mut state = State { map: Map::new(), revision: Revision(0), leases: Leases::default() };
        let mut changes = Vec::new();
        let put = |key: &str| Op::put(Key::from(key), Bytes::from("1"));
        let both = Txn::default().then(put("a")).then(put("b"));
        let counts: Vec<_> = [both, Txn::default().then(put("a")), Txn::default()]
            .map(|txn| state.commit(txn, &mut changes).unwrap().record.map(|r| (r.revision.0, r.changes)))
            .into();
        assert_eq!(counts, [Some((1, 2)), Some((2, 1)), None]);
        let seen: Vec<_> = changes.iter().map(|c| (c.revision.0, c.previous.is_some())).collect();
        assert_eq!(seen, [(1, false), (1, false), (2, true)]);
        let (_, applied) = state
            .transact(&mut changes, |draft| {
                assert_eq!(draft.revision(), Revision(2));
                draft.delete(&Key::from("a"));
                assert_eq!(draft.revision(), Revision(3));
                Ok::<_, StoreError>(())
            })
            .unwrap();
        assert_eq!((applied.record.unwrap().changes, changes.len()), (1, 4));
    }
}
