//! Watches: a mailbox with changes, and a position in the shared history for watches that fall behind.

use crate::entry::Revision;
use crate::history::Change;
use crate::shared::Shared;
use crate::subscribers::Subscription;
use std::sync::Arc;

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

/// Changes under a prefix, in order, without gap or repetition, after a revision.
#[derive(Debug)]
pub struct Watch {
    pub(crate) shared: Arc<Shared>,
    pub(crate) subscription: Subscription,
    /// Everything up to here has been handed out.
    pub(crate) position: Revision,
    /// The history has changes that were never put into the mailbox.
    pub(crate) behind: bool,
    pub(crate) epoch: u64,
}

/// Changes handed out at once.
const BATCH: usize = 512;
/// Most changes examined while the history is locked.
const SCAN: usize = 4096;

impl Watch {
    /// Waits for the next changes under the prefix. Never answers an empty list.
    pub async fn next(&mut self) -> Result<Vec<Change>, WatchEnd> {
        loop {
            let mailbox = Arc::clone(&self.subscription.mailbox);
            let rung = mailbox.bell.notified();
            let batch = self.delivered()?;
            if !batch.is_empty() {
                return Ok(batch);
            }
            if self.behind {
                continue;
            }
            if self.shared.is_closed() {
                return Err(WatchEnd::Closed);
            }
            rung.await;
        }
    }

    /// Returns the changes that are available now; may be empty. Afterwards [`Watch::position`] is the
    /// revision up to which the reader has seen everything. Sees everything that readers of the store can
    /// see.
    pub fn ready(&mut self) -> Result<Vec<Change>, WatchEnd> {
        let batch = self.delivered()?;
        if !batch.is_empty() || self.behind {
            return Ok(batch);
        }
        // A change published just now may not be in the mailbox yet.
        let published = self.shared.published().snapshot.revision;
        if self.position < published { self.read_history() } else { Ok(batch) }
    }

    /// The revision up to which everything has been handed out: the version of a bookmark.
    pub fn position(&self) -> Revision {
        self.position
    }

    /// Takes the changes from the mailbox, or from the history if the watch is behind.
    fn delivered(&mut self) -> Result<Vec<Change>, WatchEnd> {
        // Read before the mailbox: changes dispatched up to here are in it.
        let dispatched = self.shared.dispatched();
        if !self.behind {
            match self.subscription.mailbox.take() {
                Some(batches) => {
                    self.check_epoch()?;
                    let position = self.position;
                    let new = batches.iter().flat_map(|batch| batch.iter());
                    let batch: Vec<Change> =
                        new.filter(|change| change.revision > position).cloned().collect();
                    let last = batch.last().map_or(position, |change| change.revision);
                    self.position = position.max(dispatched).max(last);
                    return Ok(batch);
                }
                None => {
                    self.subscription.mailbox.clear();
                    self.behind = true;
                }
            }
        }
        self.read_history()
    }

    /// Changes in the history that the watch has not seen, as many as are read in one go. The watch is behind until it
    /// has seen all of them.
    fn read_history(&mut self) -> Result<Vec<Change>, WatchEnd> {
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
            if self.subscription.wants(change) {
                batch.push(change.clone());
            }
        }
        let newest = published.history.newest();
        (self.position, self.behind) = match position {
            Some(position) if Some(position) != newest => (position, true),
            _ => (self.position.max(published.snapshot.revision), false),
        };
        Ok(batch)
    }

    fn check_epoch(&self) -> Result<(), WatchEnd> {
        let published = self.shared.published();
        if self.epoch == published.epoch {
            return Ok(());
        }
        let oldest = published.history.compacted();
        Err(WatchEnd::Compacted { wanted: self.position.next(), oldest: oldest.next() })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.subscribers().remove(&self.subscription);
    }
}
