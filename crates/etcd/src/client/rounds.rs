//! One request for many callers that ask the same at the same time.

use ferrite_store::{Revision, StoreError};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Mutex;

/// Revision checks, shared. A caller is content with any round that began after it asked: that round has seen
/// everything acknowledged before. However many ask, one request is under way at a time.
#[derive(Debug)]
pub(super) struct Rounds {
    begun: AtomicU64,
    /// The last finished round and its result. The holder of the lock carries out the next.
    last: Mutex<(u64, Result<Revision, StoreError>)>,
}

impl Default for Rounds {
    fn default() -> Self {
        Self { begun: AtomicU64::new(0), last: Mutex::new((0, Ok(Revision(0)))) }
    }
}

impl Rounds {
    /// The answer of a round that begins after this call, made with `ask` unless somebody else does. A failure is
    /// shared as well: nobody waits in line for one time limit after another.
    pub async fn join<F>(&self, ask: impl FnOnce() -> F) -> Result<Revision, StoreError>
    where
        F: Future<Output = Result<Revision, StoreError>>,
    {
        let begun = self.begun.load(Ordering::SeqCst);
        let mut last = self.last.lock().await;
        if last.0 <= begun {
            let round = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
            *last = (round, ask().await);
        }
        last.1.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokio::sync::Semaphore;

    #[tokio::test]
    async fn who_asks_during_a_round_shares_the_next() {
        let rounds = Arc::new(Rounds::default());
        let (asked, gate) = (Arc::new(AtomicU64::new(0)), Arc::new(Semaphore::new(0)));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let (rounds, asked, gate) = (Arc::clone(&rounds), Arc::clone(&asked), Arc::clone(&gate));
            tasks.spawn(async move {
                let ask = async || {
                    let number = asked.fetch_add(1, Ordering::SeqCst) + 1;
                    gate.acquire().await.unwrap().forget();
                    Ok(Revision(number))
                };
                rounds.join(ask).await.unwrap().0
            });
        }
        while asked.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        // All are waiting by now: the runtime has one thread and they had their turn before the gate opens.
        tokio::task::yield_now().await;
        gate.add_permits(2);
        let mut answers = tasks.join_all().await;
        answers.sort_unstable();
        assert_eq!(answers, [vec![1], vec![2; 9]].concat());
        let failed = rounds.join(async || Err(StoreError::Closed)).await;
        assert_eq!(failed, Err(StoreError::Closed));
        assert_eq!(rounds.join(async || Ok(Revision(9))).await, Ok(Revision(9)), "a failure is not kept");
    }
}
