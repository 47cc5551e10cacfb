//! Memory that goes back to the system once a burst of requests is over.
//!
//! An allocator keeps freed memory in case it is needed again. After some hundred requests that is more
//! than all an idle server uses, and no other process can use it.

use super::{Exchange, Refusal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// After this many requests the allocator holds enough free memory to give back.
const BURST: u64 = 500;
/// A burst is over when in this time there were fewer requests than a tenth of one.
const QUIET: Duration = Duration::from_secs(20);

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let server = &exchange.facts.server;
    if server.memory.note() {
        let (owner, stopping) = (Arc::clone(server), server.stopping());
        server.spawn(async move {
            tokio::select! {
                () = owner.memory.after_burst() => {}
                () = stopping.cancelled() => {}
            }
        });
    }
    Ok(())
}

/// Counts requests since memory was last given back.
#[derive(Debug, Default)]
pub(crate) struct MemoryReclaimer {
    requests: AtomicU64,
    /// A task waits for the burst to be over.
    awaited: AtomicBool,
}

impl MemoryReclaimer {
    /// Notes a request. True for the one that makes a burst: its caller waits for the end.
    pub fn note(&self) -> bool {
        let count = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        count >= BURST && !self.awaited.swap(true, Ordering::AcqRel)
    }

    /// Waits for the end of a burst and returns its free memory to the system.
    pub async fn after_burst(&self) {
        let mut before = self.requests.load(Ordering::Relaxed);
        loop {
            tokio::time::sleep(QUIET).await;
            let now = self.requests.load(Ordering::Relaxed);
            if now - before < BURST / 10 {
                break;
            }
            before = now;
        }
        self.requests.store(0, Ordering::Relaxed);
        self.awaited.store(false, Ordering::Release);
        // It visits every free piece of memory, so it runs beside the workers.
        let _ = tokio::task::spawn_blocking(ferrite_memory::give_back).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_waited_for_by_one_and_may_come_again() {
        let memory = Arc::new(MemoryReclaimer::default());
        let burst = |count: u64| (0..count).filter(|_| memory.note()).count();
        assert_eq!((burst(BURST - 1), burst(BURST)), (0, 1));
        let over = tokio::spawn({
            let memory = Arc::clone(&memory);
            async move { memory.after_burst().await }
        });
        tokio::task::yield_now().await;
        // While requests go on nothing is over.
        for _ in 0..3 {
            assert_eq!(burst(BURST), 0);
            tokio::time::sleep(QUIET).await;
        }
        assert!(!over.is_finished());
        over.await.expect("it ends");
        assert_eq!((burst(BURST - 1), burst(1)), (0, 1));
    }
}
