//! The recent past: a bounded list of changes that watches read from.

use crate::entry::{Entry, Key, Revision};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One key's change at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub revision: Revision,
    pub key: Key,
    /// The entry after the change; `None` if the key was deleted.
    pub entry: Option<Arc<Entry>>,
    /// The entry before the change; `None` if the key was created.
    pub previous: Option<Arc<Entry>>,
}

impl Change {
    fn cost(&self) -> usize {
        // A value replaced by a later change is kept alive by the history alone, so each change is charged
        // for the replaced value; the rest is bookkeeping.
        128 + self.key.as_bytes().len() + self.previous.as_ref().map_or(0, |e| e.value.len() + 96)
    }
}

/// Limits of the history that the store keeps.
#[derive(Debug, Clone, Copy)]
pub struct HistoryLimits {
    pub changes: usize,
    pub bytes: usize,
    /// Changes older than this are forgotten, within a tenth of it.
    pub age: Duration,
}

impl Default for HistoryLimits {
    fn default() -> Self {
        // The age is that of upstream's API server, which compacts every five minutes.
        Self { changes: 100_000, bytes: 16 << 20, age: Duration::from_secs(300) }
    }
}

/// Room for this many changes is kept in any case.
const LEAST_ROOM: usize = 256;

/// Changes in the order of their revisions, oldest first, trimmed from the front.
#[derive(Debug)]
pub(crate) struct History {
    changes: VecDeque<Change>,
    bytes: usize,
    /// The newest revision at a time, oldest first and not closer than a tenth of the age limit: changes up
    /// to it are at least that old.
    marks: VecDeque<(Instant, Revision)>,
    limits: HistoryLimits,
    /// The last revision whose changes are gone. Watches can start after it, not before.
    compacted: Revision,
}

impl History {
    pub fn new(limits: HistoryLimits, compacted: Revision) -> Self {
        Self { changes: VecDeque::new(), bytes: 0, marks: VecDeque::new(), limits, compacted }
    }

    pub fn compacted(&self) -> Revision {
        self.compacted
    }

    pub fn push(&mut self, change: Change) {
        self.push_keeping(change, &mut Vec::new());
    }

    /// Adds a change. Values that have to be forgotten for it go to `past`: to free them takes longer than all the rest.
    pub fn push_keeping(&mut self, change: Change, past: &mut Vec<Arc<Entry>>) {
        debug_assert!(self.changes.back().is_none_or(|last| last.revision <= change.revision));
        self.bytes += change.cost();
        self.changes.push_back(change);
        while self.changes.len() > self.limits.changes || self.bytes > self.limits.bytes {
            let Some(front) = self.changes.front() else { break };
            let revision = front.revision;
            self.take_through(revision, past);
        }
    }

    /// Notes that everything up to `revision` was there at `now`.
    pub fn mark(&mut self, now: Instant, revision: Revision) {
        match self.marks.back_mut() {
            Some((at, _)) if now.duration_since(*at) >= self.limits.age / 10 => {
                self.marks.push_back((now, revision));
            }
            Some((_, newest)) => *newest = revision,
            None => self.marks.push_back((now, revision)),
        }
    }

    /// Drops changes that are too old at `now`. Returns the time of the next call; none when nothing is
    /// left.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        // A mark stands for everything up to the next one, which is younger by a tenth of the limit at most.
        let limit = self.limits.age + self.limits.age / 10;
        while let Some((at, revision)) = self.marks.front().copied() {
            let end = at.checked_add(limit)?;
            if end > now {
                return (!self.changes.is_empty()).then_some(end);
            }
            self.marks.pop_front();
            self.drop_through(revision);
            self.shrink();
        }
        None
    }

    /// Frees room that only a burst of changes needed.
    fn shrink(&mut self) {
        let needed = self.changes.len().max(LEAST_ROOM);
        if self.changes.capacity() > 4 * needed {
            self.changes.shrink_to(2 * needed);
        }
    }

    pub fn limits(&self) -> HistoryLimits {
        self.limits
    }

    pub fn newest(&self) -> Option<Revision> {
        self.changes.back().map(|c| c.revision)
    }

    pub fn len(&self) -> usize {
        self.changes.len()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets everything up to and including `revision`. All changes of one revision go together.
    pub fn drop_through(&mut self, revision: Revision) {
        self.take_through(revision, &mut Vec::new());
    }

    fn take_through(&mut self, revision: Revision, past: &mut Vec<Arc<Entry>>) {
        while let Some(front) = self.changes.pop_front_if(|c| c.revision <= revision) {
            self.bytes -= front.cost();
            past.extend(front.previous);
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
                plain: crate::Plain::default(),
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
        let mut history = History::new(HistoryLimits { changes: 3, ..HistoryLimits::default() }, Revision(0));
        (1..=5).for_each(|r| history.push(change(r, 0)));
        assert_eq!(history.compacted(), Revision(2));
        assert_eq!(history.after(Revision(2)).count(), 3);
        assert_eq!(history.after(Revision(4)).map(|c| c.revision.0).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn is_bounded_by_bytes_too() {
        let mut history =
            History::new(HistoryLimits { bytes: 10_000, ..HistoryLimits::default() }, Revision(0));
        (1..=5).for_each(|r| history.push(change(r, 4000)));
        assert_eq!(history.compacted(), Revision(3));
    }

    #[test]
    fn changes_of_one_revision_go_together() {
        let mut history = History::new(HistoryLimits { changes: 2, ..HistoryLimits::default() }, Revision(0));
        history.push(change(1, 0));
        history.push(change(1, 0));
        history.push(change(2, 0));
        assert_eq!(history.compacted(), Revision(1));
        assert_eq!(history.after(Revision(1)).count(), 1);
    }

    #[test]
    fn room_for_a_burst_is_freed_after_it() {
        let start = Instant::now();
        let limits = HistoryLimits { age: Duration::from_secs(100), ..HistoryLimits::default() };
        let mut history = History::new(limits, Revision(0));
        (1..=20_000).for_each(|revision| history.push(change(revision, 0)));
        history.mark(start, Revision(20_000));
        (20_001..=20_010).for_each(|revision| history.push(change(revision, 0)));
        history.mark(start + Duration::from_secs(60), Revision(20_010));
        assert!(history.changes.capacity() >= 20_000);
        history.expire(start + Duration::from_secs(120));
        assert_eq!((history.len(), history.compacted()), (10, Revision(20_000)));
        assert!(history.changes.capacity() <= 1024, "{}", history.changes.capacity());
    }

    #[test]
    fn forgets_what_is_too_old() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let limits = HistoryLimits { age: Duration::from_secs(100), ..HistoryLimits::default() };
        let mut history = History::new(limits, Revision(0));
        for (second, revision) in [(0, 1), (5, 2), (10, 3), (50, 4)] {
            history.push(change(revision, 0));
            history.mark(at(second), Revision(revision));
        }
        let rows = [(100, 0, Some(110)), (111, 2, Some(120)), (121, 3, Some(160)), (161, 4, None)];
        for (now, compacted, again) in rows {
            assert_eq!(history.expire(at(now)), again.map(at), "at {now}");
            assert_eq!(history.compacted(), Revision(compacted), "at {now}");
        }
    }
}
