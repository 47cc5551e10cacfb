//! Watches: a position in the shared history and a bell.

use crate::entry::Revision;
use crate::history::Change;
use crate::shared::Shared;
use std::sync::{Arc, Weak};
use tokio::sync::Notify;

/// Why a watch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WatchEnd {
    /// The history no longer reaches back to where the reader is: list and watch anew.
    #[error("required revision {wanted} has been compacted, the oldest retained is {oldest}")]
    Compacted { wanted: Revision, oldest: Revision },
    /// The store is closed.
    #[error("the store is closed")]
    Closed,
}

/// Someone who wants to be woken when a key under a prefix changes.
#[derive(Debug)]
pub(crate) struct Subscriber {
    pub prefix: Vec<u8>,
    pub bell: Weak<Notify>,
}

/// Changes under a prefix, in order, without gap or repetition, after a revision.
#[derive(Debug)]
pub struct Watch {
    pub(crate) shared: Arc<Shared>,
    pub(crate) prefix: Vec<u8>,
    pub(crate) bell: Arc<Notify>,
    /// Everything up to here has been handed out.
    pub(crate) position: Revision,
    pub(crate) epoch: u64,
}

/// Changes handed out at once.
const BATCH: usize = 512;
/// Changes looked at while the history is locked.
const SCAN: usize = 4096;

impl Watch {
    /// Waits for the next changes under the prefix. Never answers an empty list.
    pub async fn next(&mut self) -> Result<Vec<Change>, WatchEnd> {
        loop {
            let bell = Arc::clone(&self.bell);
            let rung = bell.notified();
            let batch = self.ready()?;
            if !batch.is_empty() {
                return Ok(batch);
            }
            if self.position < self.shared.published().snapshot.revision {
                continue;
            }
            if self.shared.is_closed() {
                return Err(WatchEnd::Closed);
            }
            rung.await;
        }
    }

    /// What is there already; may be empty. Afterwards [`Watch::position`] is the revision up to which the
    /// reader has seen everything.
    pub fn ready(&mut self) -> Result<Vec<Change>, WatchEnd> {
        let published = self.shared.published();
        let oldest = published.history.compacted();
        if self.position < oldest || self.epoch != published.epoch {
            return Err(WatchEnd::Compacted { wanted: self.position.next(), oldest: oldest.next() });
        }
        let mut batch: Vec<Change> = Vec::new();
        let mut position = None;
        for (looked_at, change) in published.history.after(self.position).enumerate() {
            // Changes of one revision are never split over two batches.
            if (batch.len() >= BATCH || looked_at >= SCAN) && position != Some(change.revision) {
                break;
            }
            position = Some(change.revision);
            if change.key.as_bytes().starts_with(&self.prefix) {
                batch.push(change.clone());
            }
        }
        let newest = published.history.newest();
        self.position = match position {
            Some(position) if Some(position) != newest => position,
            _ => self.position.max(published.snapshot.revision),
        };
        Ok(batch)
    }

    /// The revision up to which everything has been handed out: what a bookmark may say.
    pub fn position(&self) -> Revision {
        self.position
    }
}
