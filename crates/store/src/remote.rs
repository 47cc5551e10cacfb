//! The seam for a store that lives elsewhere: it commits, and feeds the replica in order.

use crate::entry::{Entry, Key, LeaseId, Revision};
use crate::history::{Change, History};
use crate::index::Index;
use crate::replica::{Map, Snapshot};
use crate::shared::Shared;
use crate::store::StoreError;
use crate::txn::{Outcome, Txn};
use std::fmt::Debug;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

/// An answer that takes a while.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Commits transactions in another process. Ends its tasks when it is dropped.
pub trait Remote: Debug + Send + Sync {
    fn commit(&self, txn: Txn) -> Answer<'_, Outcome>;
    fn grant(&self, expires_at: u64) -> Answer<'_, LeaseId>;
    fn revoke(&self, id: LeaseId) -> Answer<'_, Outcome>;
    /// A revision that includes everything acknowledged to anybody before the call. The feed reaches it.
    fn revision(&self) -> Answer<'_, Revision>;
}

/// Feeds changes that were committed elsewhere into the replica.
#[derive(Debug, Clone)]
pub struct Feed(Arc<Shared>);

impl Feed {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// The revision up to which the replica has everything.
    pub fn revision(&self) -> Revision {
        self.0.published().snapshot.revision
    }

    /// The replica's entry for a key.
    pub fn get(&self, key: &[u8]) -> Option<Arc<Entry>> {
        self.0.published().snapshot.get(key).cloned()
    }

    /// Lets the transformer ask others for what it needs to read these values, before they are applied.
    pub async fn prepare(&self, entries: impl Iterator<Item = (&Key, &Arc<Entry>)>) {
        let Some(transformer) = self.0.transformer.get() else { return };
        let sealed = |(key, entry): &(&Key, &Arc<Entry>)| transformer.unseal(key, &entry.value).is_err();
        let stored: Vec<_> = entries.filter(sealed).map(|(k, e)| (k.clone(), e.value.clone())).collect();
        if !stored.is_empty() {
            transformer.prepare(stored).await;
        }
    }

    /// Starts anew with everything there is at `revision`. Watches of an older position are ended as compacted,
    /// because nobody knows what happened in between; all of them are when `revision` is one that was passed before:
    /// the remote store was put back to an earlier state.
    pub fn reset(&self, entries: impl IntoIterator<Item = (Key, Arc<Entry>)>, revision: Revision) {
        let map: Map = entries.into_iter().collect();
        map.iter().for_each(|(key, entry)| self.0.reveal(key, entry));
        {
            let mut published = self.0.published_mut();
            let limits = published.history.limits();
            if revision < published.snapshot.revision {
                published.epoch += 1;
            }
            let index = Index::new(published.snapshot.index.fields().to_vec(), &map);
            published.snapshot = Snapshot { map, revision, index };
            published.history = History::new(limits, revision);
        }
        self.0.reached.send_replace(revision);
        self.0.subscribers().reset(revision);
        self.0.ring_all();
    }

    /// Adds committed changes, in order. Each change is a key and its present entry; `revision` is the
    /// remote store's progress, at least the last change's.
    pub fn apply(&self, batch: Vec<(Revision, Key, Option<Arc<Entry>>)>, revision: Revision) {
        for (_, key, entry) in &batch {
            entry.iter().for_each(|entry| self.0.reveal(key, entry));
        }
        let mut changes = Vec::with_capacity(batch.len());
        let reached;
        {
            let mut published = self.0.published_mut();
            // Seen already: a watch that was begun anew may repeat earlier changes.
            let known = published.snapshot.revision;
            for (at, key, entry) in batch.into_iter().filter(|(at, ..)| *at > known) {
                let map = &mut published.snapshot.map;
                let previous = match &entry {
                    Some(entry) => map.insert(key.clone(), Arc::clone(entry)),
                    None => map.remove(key.as_bytes()),
                };
                if entry.is_some() || previous.is_some() {
                    published.snapshot.index.update(&key, previous.as_deref(), entry.as_deref());
                    let change = Change { revision: at, key, entry, previous };
                    published.history.push(change.clone());
                    changes.push(change);
                }
            }
            // Never back: a repeated batch ends before the known revision.
            reached = known.max(revision);
            published.snapshot.revision = reached;
            let now = Instant::now();
            published.history.mark(now, reached);
            published.history.expire(now);
        }
        self.0.reached.send_replace(reached);
        self.0.dispatch(&changes, reached);
    }
}
