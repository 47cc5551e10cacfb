//! Leases and the keys attached to them.

use crate::entry::{Entry, Key, Lease, LeaseId};
use imbl::{OrdMap, OrdSet};
use std::sync::Arc;

/// One lease as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseState {
    /// Seconds since the Unix epoch.
    pub expires_at: u64,
    /// Seconds it was granted for: what a renewal adds to the clock. Zero when it was granted until a time.
    pub ttl: u64,
    /// The keys that end with it.
    pub keys: OrdSet<Key>,
}

/// All leases. Shares structure with its clones, like the map of the entries, so that a batch that failed is
/// undone by going back to the published one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases(OrdMap<LeaseId, LeaseState>);

impl Leases {
    pub fn get(&self, id: LeaseId) -> Option<&LeaseState> {
        self.0.get(&id)
    }

    pub fn contains(&self, id: LeaseId) -> bool {
        self.0.contains_key(&id)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// An identifier nobody uses.
    pub fn free_id(&self) -> LeaseId {
        LeaseId(self.0.get_max().map_or(1, |(id, _)| id.0.saturating_add(1).max(1)))
    }

    /// Makes the lease, or changes when it ends.
    pub fn grant(&mut self, lease: Lease, ttl: u64) {
        let keys = self.0.get(&lease.id).map(|s| s.keys.clone()).unwrap_or_default();
        self.0.insert(lease.id, LeaseState { expires_at: lease.expires_at, ttl, keys });
    }

    pub fn revoke(&mut self, id: LeaseId) {
        self.0.remove(&id);
    }

    /// Moves a key from the lease of `before` to that of `after`.
    pub fn reattach(&mut self, key: &Key, before: Option<&Arc<Entry>>, after: Option<&Arc<Entry>>) {
        let before = before.map_or(LeaseId::NONE, |e| e.lease);
        let after = after.map_or(LeaseId::NONE, |e| e.lease);
        if before == after {
            return;
        }
        if let Some(state) = self.0.get_mut(&before) {
            state.keys.remove(key);
        }
        if let Some(state) = self.0.get_mut(&after) {
            state.keys.insert(key.clone());
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (LeaseId, &LeaseState)> {
        self.0.iter().map(|(id, state)| (*id, state))
    }

    /// The leases, soonest end first.
    pub fn by_end(&self) -> Vec<Lease> {
        let mut leases: Vec<Lease> =
            self.iter().map(|(id, s)| Lease { id, expires_at: s.expires_at }).collect();
        leases.sort_by_key(|l| l.expires_at);
        leases
    }
}
