//! Changes of the Services behind APIServices and of their EndpointSlices.

use ferrite_store::{Revision, Store, Watch, WatchEnd};
use futures_util::{FutureExt, future};
use std::collections::{BTreeMap, BTreeSet};

/// Watches by prefix of the store's keys.
#[derive(Default)]
pub(super) struct BackendWatches {
    watches: BTreeMap<String, Watch>,
    /// A watch could not begin: its changes may have been missed.
    missed: bool,
}

impl BackendWatches {
    /// Watches these prefixes and no others. New ones are watched from a revision on.
    pub fn follow(&mut self, store: &Store, prefixes: &BTreeSet<String>, after: Revision) {
        self.watches.retain(|prefix, _| prefixes.contains(prefix));
        for prefix in prefixes {
            if self.watches.contains_key(prefix) {
                continue;
            }
            match store.watch(prefix.as_bytes(), after) {
                Ok(watch) => drop(self.watches.insert(prefix.clone(), watch)),
                Err(WatchEnd::Compacted { .. }) => self.missed = true,
                Err(WatchEnd::Closed) => {}
            }
        }
    }

    /// Waits for a change below any prefix. A watch that ends is a change, too: the next [`Self::follow`] begins it anew.
    pub async fn changed(&mut self) {
        if std::mem::take(&mut self.missed) {
            return;
        }
        if self.watches.is_empty() {
            return future::pending().await;
        }
        let all = self.watches.iter_mut().map(|(prefix, watch)| {
            async move { watch.next().await.map(drop).map_err(|_| prefix.clone()) }.boxed()
        });
        let (ended, _, others) = future::select_all(all).await;
        drop(others);
        if let Err(prefix) = ended {
            self.watches.remove(&prefix);
        }
    }
}
