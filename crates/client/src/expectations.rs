//! The changes that a controller has requested and not yet seen through its watch.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::ObjectKey;

/// After this long an expectation no longer holds anybody back: the event it waits for was lost, or never comes.
const EXPIRY: Duration = Duration::from_secs(5 * 60);

struct Record {
    creations: i64,
    /// Names of deleted objects: a deletion counts once, however many events report it.
    deletions: HashSet<String>,
    since: Instant,
}

/// Outstanding creations and deletions per owner, so that a controller does not act again on a copy that does not
/// yet show its own writes.
#[derive(Default)]
pub struct Expectations {
    records: Mutex<HashMap<ObjectKey, Record>>,
}

impl std::fmt::Debug for Expectations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Expectations").finish_non_exhaustive()
    }
}

impl Expectations {
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectKey, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if every change requested for `owner` was seen or has expired, or none was requested.
    pub fn satisfied(&self, owner: &ObjectKey) -> bool {
        self.lock().get(owner).is_none_or(|record| {
            (record.creations <= 0 && record.deletions.is_empty()) || record.since.elapsed() > EXPIRY
        })
    }

    /// Replaces the expectations of `owner` by `count` creations.
    pub fn expect_creations(&self, owner: &ObjectKey, count: usize) {
        self.expect(owner, count, []);
    }

    /// Replaces the expectations of `owner` by deletions of these names.
    pub fn expect_deletions(&self, owner: &ObjectKey, names: impl IntoIterator<Item = String>) {
        self.expect(owner, 0, names);
    }

    /// Replaces the expectations of `owner` by creations and by deletions of these names.
    pub fn expect(&self, owner: &ObjectKey, creations: usize, deletions: impl IntoIterator<Item = String>) {
        let creations = i64::try_from(creations).unwrap_or(i64::MAX);
        let record = Record { creations, deletions: deletions.into_iter().collect(), since: Instant::now() };
        self.lock().insert(owner.clone(), record);
    }

    /// One creation was seen, or failed and will never be.
    pub fn creation_observed(&self, owner: &ObjectKey) {
        self.creations_observed(owner, 1);
    }

    /// Several creations were seen, or given up.
    pub fn creations_observed(&self, owner: &ObjectKey, count: usize) {
        if let Some(record) = self.lock().get_mut(owner) {
            record.creations = record.creations.saturating_sub(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// The deletion of `name` was seen, or failed and will never be.
    pub fn deletion_observed(&self, owner: &ObjectKey, name: &str) {
        if let Some(record) = self.lock().get_mut(owner) {
            record.deletions.remove(name);
        }
    }

    /// Drops the record of an owner that is gone, so that a successor of the same name starts clean.
    pub fn forget(&self, owner: &ObjectKey) {
        self.lock().remove(owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn satisfied_when_all_was_seen_or_after_five_minutes() {
        let expectations = Expectations::new();
        let owner = ObjectKey::new("ns", "rs");
        assert!(expectations.satisfied(&owner), "nothing asked");

        expectations.expect_creations(&owner, 2);
        expectations.creation_observed(&owner);
        assert!(!expectations.satisfied(&owner));
        expectations.creation_observed(&owner);
        assert!(expectations.satisfied(&owner));

        expectations.expect_deletions(&owner, ["a".to_owned(), "b".to_owned()]);
        expectations.deletion_observed(&owner, "a");
        expectations.deletion_observed(&owner, "a");
        assert!(!expectations.satisfied(&owner), "a deletion counts once");
        tokio::time::advance(EXPIRY + Duration::from_secs(1)).await;
        assert!(expectations.satisfied(&owner), "expired");

        expectations.expect_creations(&owner, 1);
        expectations.forget(&owner);
        assert!(expectations.satisfied(&owner));
    }
}
