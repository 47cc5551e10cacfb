//! Leases and the keys attached to them.

use crate::entry::{Entry, Key, Lease, LeaseId};
use imbl::{OrdMap, OrdSet};
use std::sync::Arc;

/// One lease as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseState {
    /// Seconds since the Unix epoch.
    pub expires_at: u64,
    /// Seconds it was granted for: a renewal adds them to the clock. Zero when it was granted until a time.
    pub ttl: u64,
    /// The keys that end with it.
    pub keys: OrdSet<Key>,
}

/// All leases. Shares structure with its clones, like the map of the entries, so that a batch that failed is
/// undone by going back to the published one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases {
    by_id: OrdMap<LeaseId, LeaseState>,
    /// The last identifier that was chosen here.
    last: i64,
}

impl Leases {
    pub fn get(&self, id: LeaseId) -> Option<&LeaseState> {
        self.by_id.get(&id)
    }

    pub fn contains(&self, id: LeaseId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// An identifier that nobody uses or has used: a holder of an old one must not get a new lease by it.
    /// `now` in seconds keeps it apart from those that were chosen before the store was opened.
    pub fn choose_id(&mut self, now: u64) -> LeaseId {
        let by_clock = i64::try_from(now).unwrap_or(0).saturating_mul(1 << 20);
        let mut id = self.last.saturating_add(1).max(by_clock).max(1);
        while self.by_id.contains_key(&LeaseId(id)) {
            id = id.wrapping_add(1).max(1);
        }
        self.last = id;
        LeaseId(id)
    }

    /// Makes the lease, or changes when it ends.
    pub fn grant(&mut self, lease: Lease, ttl: u64) {
        let keys = self.by_id.get(&lease.id).map(|s| s.keys.clone()).unwrap_or_default();
        self.by_id.insert(lease.id, LeaseState { expires_at: lease.expires_at, ttl, keys });
    }

    pub fn revoke(&mut self, id: LeaseId) {
        self.by_id.remove(&id);
    }

    /// Moves a key from the lease of `before` to that of `after`.
    pub fn reattach(&mut self, key: &Key, before: Option<&Arc<Entry>>, after: Option<&Arc<Entry>>) {
        let before = before.map_or(LeaseId::NONE, |e| e.lease);
        let after = after.map_or(LeaseId::NONE, |e| e.lease);
        if before == after {
            return;
        }
        if let Some(state) = self.by_id.get_mut(&before) {
            state.keys.remove(key);
        }
        if let Some(state) = self.by_id.get_mut(&after) {
            state.keys.insert(key.clone());
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (LeaseId, &LeaseState)> {
        self.by_id.iter().map(|(id, state)| (*id, state))
    }

    /// The leases, soonest end first.
    pub fn by_end(&self) -> Vec<Lease> {
        let mut leases: Vec<Lease> =
            self.iter().map(|(id, s)| Lease { id, expires_at: s.expires_at }).collect();
        leases.sort_by_key(|l| l.expires_at);
        leases
    }
}
