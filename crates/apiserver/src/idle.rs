//! Closes connections that have been idle for a while, as upstream does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// The activity of a connection.
pub(crate) struct Activity {
    begun: Instant,
    running: AtomicUsize,
    /// When something last ended, in milliseconds after the begin.
    last: AtomicU64,
}

/// One thing the connection is busy with, until dropped.
pub(crate) struct Busy(Arc<Activity>);

impl Activity {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { begun: Instant::now(), running: AtomicUsize::new(0), last: AtomicU64::new(0) })
    }

    pub fn begin(self: &Arc<Self>) -> Busy {
        self.running.fetch_add(1, Ordering::AcqRel);
        Busy(Arc::clone(self))
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Ends when nothing has been going on for so long.
    pub async fn idle_for(&self, limit: Duration) {
        loop {
            let since = Duration::from_millis(self.now().saturating_sub(self.last.load(Ordering::Acquire)));
            let busy = self.running.load(Ordering::Acquire) > 0;
            match limit.checked_sub(since).filter(|left| !left.is_zero()) {
                _ if busy => tokio::time::sleep(limit).await,
                Some(left) => tokio::time::sleep(left).await,
                None => return,
            }
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.last.store(self.0.now(), Ordering::Release);
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_after_its_last_request() {
        let begun = Instant::now();
        let activity = Activity::new();
        let busy = activity.begin();
        let limit = Duration::from_secs(90);
        let working = async {
            tokio::time::sleep(Duration::from_secs(200)).await;
            drop(busy);
        };
        tokio::join!(working, activity.idle_for(limit));
        assert_eq!(begun.elapsed().as_secs(), 290);
    }
}
