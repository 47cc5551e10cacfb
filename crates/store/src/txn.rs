//! Transactions: compare, then do one of two lists of operations.

use crate::entry::{Entry, Key, LeaseId, Revision};
use bytes::Bytes;
use std::sync::Arc;

/// A condition on one key. A key that does not exist has revision 0 and version 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    /// The key does not exist.
    Absent(Key),
    /// The key exists.
    Present(Key),
    /// The key was last changed at this revision.
    ModifiedAt(Key, Revision),
    /// The key was created at this revision.
    CreatedAt(Key, Revision),
    /// The key has been written this many times.
    VersionIs(Key, u64),
    /// The key holds exactly these bytes.
    ValueIs(Key, Bytes),
}

impl Compare {
    pub fn key(&self) -> &Key {
        match self {
            Self::Absent(k)
            | Self::Present(k)
            | Self::ModifiedAt(k, _)
            | Self::CreatedAt(k, _)
            | Self::VersionIs(k, _)
            | Self::ValueIs(k, _) => k,
        }
    }

    /// Returns true if the condition holds for the key's current entry.
    pub fn holds(&self, entry: Option<&Entry>) -> bool {
        match self {
            Self::Absent(_) => entry.is_none(),
            Self::Present(_) => entry.is_some(),
            Self::ModifiedAt(_, r) => entry.map_or(Revision(0), |e| e.modified) == *r,
            Self::CreatedAt(_, r) => entry.map_or(Revision(0), |e| e.created) == *r,
            Self::VersionIs(_, v) => entry.map_or(0, |e| e.version) == *v,
            Self::ValueIs(_, v) => entry.is_some_and(|e| e.value == *v),
        }
    }
}

/// One change of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Put {
        key: Key,
        value: Bytes,
        lease: LeaseId,
    },
    /// Deleting a key that does not exist changes nothing.
    Delete {
        key: Key,
    },
}

impl Op {
    pub fn put(key: Key, value: Bytes) -> Self {
        Self::Put { key, value, lease: LeaseId::NONE }
    }

    pub fn key(&self) -> &Key {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// When a change reaches the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// Before it is acknowledged or visible.
    #[default]
    Durable,
    /// Visible and acknowledged at once, on disk within [`LogOptions::relaxed_window`](crate::LogOptions) or with
    /// the next durable change, whichever comes first. For heartbeats: a crash may lose the last ones, but never
    /// gives their revisions to other changes.
    Relaxed,
}

/// All conditions hold: the operations happen together, at one revision. Otherwise nothing does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    pub compares: Vec<Compare>,
    pub ops: Vec<Op>,
    pub durability: Durability,
}

impl Txn {
    pub fn when(mut self, compare: Compare) -> Self {
        self.compares.push(compare);
        self
    }

    pub fn then(mut self, op: Op) -> Self {
        // Most have one operation, and a vector that grows by itself has room for four.
        self.ops.reserve_exact(usize::from(self.ops.is_empty()));
        self.ops.push(op);
        self
    }

    /// Lets the change reach the disk a little later.
    pub fn relaxed(mut self) -> Self {
        self.durability = Durability::Relaxed;
        self
    }

    /// The bytes of its keys and values.
    pub(crate) fn size(&self) -> usize {
        self.ops
            .iter()
            .map(|op| match op {
                Op::Put { key, value, .. } => key.as_bytes().len() + value.len(),
                Op::Delete { key } => key.as_bytes().len(),
            })
            .sum()
    }
}

/// The result of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The operations are durable. `revision` is the store's revision after them: unchanged when nothing
    /// changed (deletes of absent keys).
    Committed { revision: Revision },
    /// A condition did not hold. `current` is the entry of the first such condition's key.
    Conflict { revision: Revision, current: Option<Arc<Entry>> },
}

impl Outcome {
    /// The store's revision after the transaction.
    pub fn revision(&self) -> Revision {
        match self {
            Self::Committed { revision } | Self::Conflict { revision, .. } => *revision,
        }
    }
}
