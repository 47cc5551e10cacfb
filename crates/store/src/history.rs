//! The recent past: a bounded list of changes that watches read from.

use crate::entry::{Entry, Key, Revision};
use std::collections::VecDeque;
use std::sync::Arc;

/// One key's change at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub revision: Revision,
    pub key: Key,
    /// What the key holds after the change; none when it was deleted.
    pub entry: Option<Arc<Entry>>,
    /// What it held before; none when it was created.
    pub previous: Option<Arc<Entry>>,
}

impl Change {
    fn cost(&self) -> usize {
        // A value replaced by a later change is kept alive by the history alone, so each change is charged
        // for what it replaced; the rest is bookkeeping.
        128 + self.previous.as_ref().map_or(0, |e| e.value.len())
    }
}

/// How much of the past is kept.
#[derive(Debug, Clone, Copy)]
pub struct HistoryLimits {
    pub changes: usize,
    pub bytes: usize,
}

impl Default for HistoryLimits {
    fn default() -> Self {
        Self { changes: 100_000, bytes: 32 << 20 }
    }
}

/// Changes in the order of their revisions, oldest first, trimmed from the front.
#[derive(Debug)]
pub(crate) struct History {
    changes: VecDeque<Change>,
    bytes: usize,
    limits: HistoryLimits,
    /// The last revision whose changes are gone. Watches can start after it, not before.
    compacted: Revision,
}

impl History {
    pub fn new(limits: HistoryLimits, compacted: Revision) -> Self {
        Self { changes: VecDeque::new(), bytes: 0, limits, compacted }
    }

    pub fn compacted(&self) -> Revision {
        self.compacted
    }

    pub fn push(&mut self, change: Change) {
        debug_assert!(self.changes.back().is_none_or(|last| last.revision <= change.revision));
        self.bytes += change.cost();
        self.changes.push_back(change);
        while self.changes.len() > self.limits.changes || self.bytes > self.limits.bytes {
            let Some(front) = self.changes.front() else { break };
            let revision = front.revision;
            self.drop_through(revision);
        }
    }

    /// Forgets everything up to and including `revision`. All changes of one revision go together.
    pub fn drop_through(&mut self, revision: Revision) {
        while let Some(front) = self.changes.front() {
            if front.revision > revision {
                break;
            }
            self.bytes -= front.cost();
            self.changes.pop_front();
        }
        self.compacted = self.compacted.max(revision);
    }

    /// The changes after `after`, oldest first. The caller has checked `after >= compacted()`.
    pub fn after(&self, after: Revision) -> impl DoubleEndedIterator<Item = &Change> {
        let start = self.changes.partition_point(|c| c.revision <= after);
        self.changes.range(start..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn change(revision: u64, previous: usize) -> Change {
        let entry = |len: usize| {
            Arc::new(Entry {
                value: Bytes::from(vec![0; len]),
                created: Revision(1),
                modified: Revision(revision),
                version: 1,
                lease: crate::LeaseId::NONE,
            })
        };
        Change {
            revision: Revision(revision),
            key: Key::from("k"),
            entry: None,
            previous: (previous > 0).then(|| entry(previous)),
        }
    }

    #[test]
    fn keeps_no_more_than_the_limit() {
        let mut history = History::new(HistoryLimits { changes: 3, bytes: 1 << 20 }, Revision(0));
        (1..=5).for_each(|r| history.push(change(r, 0)));
        assert_eq!(history.compacted(), Revision(2));
        assert_eq!(history.after(Revision(2)).count(), 3);
        assert_eq!(history.after(Revision(4)).map(|c| c.revision.0).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn is_bounded_by_bytes_too() {
        let mut history = History::new(HistoryLimits { changes: 1000, bytes: 10_000 }, Revision(0));
        (1..=5).for_each(|r| history.push(change(r, 4000)));
        assert_eq!(history.compacted(), Revision(3));
    }

    #[test]
    fn changes_of_one_revision_go_together() {
        let mut history = History::new(HistoryLimits { changes: 2, bytes: 1 << 20 }, Revision(0));
        history.push(change(1, 0));
        history.push(change(1, 0));
        history.push(change(2, 0));
        assert_eq!(history.compacted(), Revision(1));
        assert_eq!(history.after(Revision(1)).count(), 1);
    }
}
