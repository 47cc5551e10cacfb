//! Entries that a webhook has converted, shared by those who read the same ones at about the same time.
//!
//! A change concerns every watcher of a version, and an entry that was written a moment ago is read again by the watch, by
//! lists and by the next write. Each entry is converted once for all of them: the first reader asks, others wait for it.

use ferrite_api::Status;
use ferrite_store::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// Converted entries are kept this long: a webhook may be replaced, and nothing reports that.
const MAX_AGE: Duration = Duration::from_secs(10);
/// Bytes of entries that are kept, with those that they were made of.
const MAX_BYTES: usize = 16 << 20;
/// Entries that are kept.
const MAX_ENTRIES: usize = 4096;

/// A version of a definition, and an entry by its address: whoever has the address holds the entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    version: Arc<str>,
    entry: usize,
}

type Outcome = Result<Arc<Entry>, Status>;

enum State {
    Made(Arc<Entry>),
    /// The reader that asks reports the outcome here.
    Asked(watch::Receiver<Option<Outcome>>),
}

struct Slot {
    /// Held, so that no other entry gets its address.
    _original: Arc<Entry>,
    state: State,
}

#[derive(Default)]
struct Kept {
    slots: HashMap<Key, Slot>,
    /// The made ones in the order of their making, with their bytes.
    made: VecDeque<(Key, Instant, usize)>,
    bytes: usize,
}

impl Kept {
    /// Drops what is too old or too much.
    fn trim(&mut self, now: Instant) {
        while let Some((key, at, bytes)) = self.made.front() {
            let fits = self.bytes <= MAX_BYTES && self.made.len() <= MAX_ENTRIES;
            if fits && now.duration_since(*at) < MAX_AGE {
                return;
            }
            self.slots.remove(key);
            self.bytes -= bytes;
            self.made.pop_front();
        }
    }
}

/// The converted entries of all kinds.
#[derive(Default)]
pub(super) struct ConvertedEntries {
    kept: Mutex<Kept>,
    filled: Notify,
}

/// The way to a converted entry.
pub(super) enum Found<'a> {
    Made(Arc<Entry>),
    /// Another reader asks for it.
    Asked(Waiting),
    /// This reader asks for it.
    Ask(Asking<'a>),
}

/// An entry that another reader asks for.
pub(super) struct Waiting(watch::Receiver<Option<Outcome>>);

impl Waiting {
    /// The outcome; none if the other reader went away before it had one.
    pub async fn outcome(mut self) -> Option<Outcome> {
        let outcome = self.0.wait_for(Option::is_some).await.ok()?;
        outcome.clone()
    }
}

/// The duty to report the outcome of a conversion. Without a report, waiting readers ask themselves.
pub(super) struct Asking<'a> {
    all: &'a ConvertedEntries,
    key: Key,
    bytes: usize,
    report: watch::Sender<Option<Outcome>>,
    is_made: bool,
}

impl Asking<'_> {
    pub fn made(mut self, entry: &Arc<Entry>) {
        let now = Instant::now();
        let mut kept = self.all.lock();
        if let Some(slot) = kept.slots.get_mut(&self.key) {
            slot.state = State::Made(Arc::clone(entry));
            let bytes = self.bytes + entry.value.len();
            kept.made.push_back((self.key.clone(), now, bytes));
            kept.bytes += bytes;
            self.is_made = true;
        }
        kept.trim(now);
        drop(kept);
        self.all.filled.notify_one();
        self.report.send_replace(Some(Ok(Arc::clone(entry))));
    }

    pub fn failed(self, status: &Status) {
        self.report.send_replace(Some(Err(status.clone())));
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if !self.is_made {
            self.all.lock().slots.remove(&self.key);
        }
    }
}

impl ConvertedEntries {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An entry in a version of a definition.
    pub fn find(&self, version: &Arc<str>, entry: &Arc<Entry>) -> Found<'_> {
        let key = Key { version: Arc::clone(version), entry: Arc::as_ptr(entry).addr() };
        let mut kept = self.lock();
        kept.trim(Instant::now());
        if let Some(slot) = kept.slots.get(&key) {
            return match &slot.state {
                State::Made(entry) => Found::Made(Arc::clone(entry)),
                State::Asked(outcome) => Found::Asked(Waiting(outcome.clone())),
            };
        }
        let (report, outcome) = watch::channel(None);
        let slot = Slot { _original: Arc::clone(entry), state: State::Asked(outcome) };
        kept.slots.insert(key.clone(), slot);
        Found::Ask(Asking { all: self, key, bytes: entry.value.len(), report, is_made: false })
    }

    /// Drops old entries, for as long as it is polled.
    pub async fn drop_old(&self) {
        loop {
            while !self.lock().made.is_empty() {
                tokio::time::sleep(MAX_AGE).await;
                let mut kept = self.lock();
                kept.trim(Instant::now());
                kept.slots.shrink_to_fit();
            }
            self.filled.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_store::{LeaseId, Plain, Revision};

    fn entry(bytes: usize) -> Arc<Entry> {
        Arc::new(Entry {
            value: vec![b' '; bytes].into(),
            created: Revision(1),
            modified: Revision(1),
            version: 1,
            lease: LeaseId::NONE,
            plain: Plain::default(),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn one_reader_asks_and_others_wait() {
        let all = ConvertedEntries::default();
        let (v1, v2): (Arc<str>, Arc<str>) = ("u/v1".into(), "u/v2".into());
        let (stored, converted) = (entry(1), entry(2));
        let Found::Ask(asking) = all.find(&v2, &stored) else { panic!("nobody has asked") };
        let Found::Asked(waiting) = all.find(&v2, &stored) else { panic!("somebody asks") };
        assert!(matches!(all.find(&v1, &stored), Found::Ask(_)), "another version");
        asking.made(&converted);
        let outcome = waiting.outcome().await.expect("an outcome").expect("an entry");
        assert!(Arc::ptr_eq(&outcome, &converted));
        assert!(matches!(all.find(&v2, &stored), Found::Made(_)));
        tokio::time::advance(MAX_AGE).await;
        assert!(matches!(all.find(&v2, &stored), Found::Ask(_)), "it is too old");
    }

    #[tokio::test]
    async fn failures_are_shared_but_not_kept() {
        let all = ConvertedEntries::default();
        let (version, stored): (Arc<str>, _) = ("u/v1".into(), entry(1));
        let Found::Ask(asking) = all.find(&version, &stored) else { panic!("nobody has asked") };
        let Found::Asked(waiting) = all.find(&version, &stored) else { panic!("somebody asks") };
        asking.failed(&Status::internal("no"));
        assert!(waiting.outcome().await.is_some_and(|outcome| outcome.is_err()));
        let Found::Ask(asking) = all.find(&version, &stored) else { panic!("failures are not kept") };
        let Found::Asked(waiting) = all.find(&version, &stored) else { panic!("somebody asks") };
        drop(asking);
        assert!(waiting.outcome().await.is_none(), "the reader went away");
        assert!(all.lock().slots.is_empty());
    }

    #[tokio::test]
    async fn entries_are_limited() {
        let all = ConvertedEntries::default();
        let version: Arc<str> = "u/v1".into();
        let stored: Vec<_> = (0..40).map(|_| entry(1 << 20)).collect();
        for stored in &stored {
            let Found::Ask(asking) = all.find(&version, stored) else { panic!("nobody has asked") };
            asking.made(&entry(0));
        }
        let kept = all.lock();
        assert_eq!((kept.slots.len(), kept.bytes), (16, MAX_BYTES));
    }
}
