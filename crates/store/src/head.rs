//! The head: everything numbered, durable or not. Pure: compares, applies, numbers.

use crate::entry::{Entry, Key, Lease, LeaseId, Revision};
use crate::history::Change;
use crate::leases::Leases;
use crate::log::{LeaseRecord, Record};
use crate::replica::{Map, Snapshot, range_of};
use crate::store::StoreError;
use crate::txn::{Durability, Op, Outcome, Txn};
use bytes::Bytes;
use std::ops::Bound;
use std::sync::Arc;

/// What the next transaction is compared with.
#[derive(Debug)]
pub(crate) struct State {
    pub map: Map,
    pub revision: Revision,
    pub leases: Leases,
}

/// What a transaction did to the state.
#[derive(Debug)]
pub(crate) struct Applied {
    /// None when nothing changed: the caller only waits for what it has seen to become durable.
    pub record: Option<Record>,
    pub changes: Vec<Change>,
    pub outcome: Outcome,
    pub durability: Durability,
}

/// A transaction that is being made: reads see its own writes, nobody else does.
#[derive(Debug)]
pub struct Draft {
    state: State,
    next: Revision,
    ops: Vec<Op>,
    changes: Vec<Change>,
    durability: Durability,
}

impl Draft {
    fn new(state: State) -> Self {
        let next = state.revision.next();
        Self { state, next, ops: Vec::new(), changes: Vec::new(), durability: Durability::Durable }
    }

    /// The revision this transaction will have, provided that it changes something.
    pub fn next_revision(&self) -> Revision {
        self.next
    }

    /// The revision of the store after what was done so far.
    pub fn revision(&self) -> Revision {
        if self.changes.is_empty() { self.state.revision } else { self.next }
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

    /// The state with what was done so far.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { map: self.state.map.clone(), revision: self.revision() }
    }

    pub fn lease_exists(&self, id: LeaseId) -> bool {
        id == LeaseId::NONE || self.state.leases.contains(id)
    }

    /// Writes a key. The lease has to exist.
    pub fn put(&mut self, key: Key, value: &Bytes, lease: LeaseId) -> Result<Arc<Entry>, StoreError> {
        if !self.lease_exists(lease) {
            return Err(StoreError::NoSuchLease(lease));
        }
        let previous = self.get(key.as_bytes()).cloned();
        // A copy of its own: the caller's bytes may be a small part of a large buffer that would live as long.
        let value = Bytes::copy_from_slice(value);
        let entry = Arc::new(Entry {
            value: value.clone(),
            created: previous.as_ref().map_or(self.next, |p| p.created),
            modified: self.next,
            version: previous.as_ref().map_or(1, |p| p.version + 1),
            lease,
        });
        self.state.leases.reattach(&key, previous.as_ref(), Some(&entry));
        self.state.map.insert(key.clone(), Arc::clone(&entry));
        self.ops.push(Op::Put { key: key.clone(), value, lease });
        self.changes.push(Change { revision: self.next, key, entry: Some(Arc::clone(&entry)), previous });
        Ok(entry)
    }

    /// Deletes a key and answers what it held. Deleting what is not there changes nothing.
    pub fn delete(&mut self, key: &Key) -> Option<Arc<Entry>> {
        let previous = self.state.map.remove(key.as_bytes())?;
        self.state.leases.reattach(key, Some(&previous), None);
        self.ops.push(Op::Delete { key: key.clone() });
        self.changes.push(Change {
            revision: self.next,
            key: key.clone(),
            entry: None,
            previous: Some(Arc::clone(&previous)),
        });
        Some(previous)
    }

    fn finish(mut self) -> (State, Applied) {
        let durability = self.durability;
        if self.changes.is_empty() {
            let outcome = Outcome::Committed { revision: self.state.revision };
            return (self.state, Applied { record: None, changes: Vec::new(), outcome, durability });
        }
        self.state.revision = self.next;
        let record = Some(Record { revision: self.next, ops: self.ops, leases: Vec::new() });
        let outcome = Outcome::Committed { revision: self.next };
        (self.state, Applied { record, changes: self.changes, outcome, durability })
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

    /// Compares, applies and numbers a transaction.
    pub fn commit(&mut self, txn: &Txn) -> Result<Applied, StoreError> {
        let failed = txn.compares.iter().find(|c| !c.holds(self.map.get(c.key().as_bytes()).map(|e| &**e)));
        if let Some(failed) = failed {
            let current = self.map.get(failed.key().as_bytes()).cloned();
            let outcome = Outcome::Conflict { revision: self.revision, current };
            return Ok(Applied { record: None, changes: Vec::new(), outcome, durability: txn.durability });
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
        let mut draft = Draft::new(self.take());
        draft.durability = txn.durability;
        let mut result = Ok(());
        for op in &txn.ops {
            match op {
                Op::Put { key, value, lease } => {
                    result = result.and(draft.put(key.clone(), value, *lease).map(|_| ()));
                }
                Op::Delete { key } => {
                    draft.delete(key);
                }
            }
        }
        let (state, applied) = draft.finish();
        *self = state;
        result.map(|()| applied)
    }

    /// Lets `make` read and write under the lock. An error leaves everything as it was.
    pub fn transact<T, E>(
        &mut self,
        make: impl FnOnce(&mut Draft) -> Result<T, E>,
    ) -> Result<(T, Applied), E> {
        let copy = Self { map: self.map.clone(), revision: self.revision, leases: self.leases.clone() };
        let mut draft = Draft::new(copy);
        let value = make(&mut draft)?;
        let (state, applied) = draft.finish();
        *self = state;
        Ok((value, applied))
    }

    /// Makes a lease, or renews one.
    pub fn grant(&mut self, lease: Lease, ttl: u64, durability: Durability) -> Applied {
        self.leases.grant(lease, ttl);
        let leases = vec![LeaseRecord::Granted { lease, ttl }];
        let record = Some(Record { revision: self.revision, ops: Vec::new(), leases });
        let outcome = Outcome::Committed { revision: self.revision };
        Applied { record, changes: Vec::new(), outcome, durability }
    }

    /// Ends a lease whose time was over at `now`. One that has been renewed in the meantime goes on.
    pub fn expire(&mut self, id: LeaseId, now: u64) -> Result<Applied, StoreError> {
        match self.leases.get(id) {
            Some(lease) if lease.expires_at > now => {
                let outcome = Outcome::Committed { revision: self.revision };
                Ok(Applied { record: None, changes: Vec::new(), outcome, durability: Durability::Durable })
            }
            _ => self.revoke(id),
        }
    }

    /// Ends a lease and deletes the keys attached to it, at one revision.
    pub fn revoke(&mut self, id: LeaseId) -> Result<Applied, StoreError> {
        let attached = self.leases.get(id).ok_or(StoreError::NoSuchLease(id))?.keys.clone();
        let mut draft = Draft::new(self.take());
        for key in &attached {
            draft.delete(key);
        }
        let (state, mut applied) = draft.finish();
        *self = state;
        self.leases.revoke(id);
        let record = applied.record.get_or_insert(Record { revision: self.revision, ..Record::default() });
        record.leases.push(LeaseRecord::Revoked(id));
        Ok(applied)
    }
}

/// The bounds of a range as the map wants them.
pub(crate) fn bounds<'a>(start: &'a [u8], end: Option<&'a [u8]>) -> (Bound<&'a [u8]>, Bound<&'a [u8]>) {
    (Bound::Included(start), end.map_or(Bound::Unbounded, Bound::Excluded))
}
