//! One call for all that ask the same at the same time.

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Call<V> = BoxFuture<'static, V>;

/// Calls that are under way. A call goes on while one of its callers waits for it.
pub(crate) struct Flights<K, V> {
    calls: Mutex<HashMap<K, WeakShared<Call<V>>>>,
}

impl<K, V> Default for Flights<K, V>
where
    V: Clone,
{
    fn default() -> Self {
        Self { calls: Mutex::default() }
    }
}

impl<K: Clone + Eq + Hash, V: Clone + Send + Sync + 'static> Flights<K, V> {
    fn lock(&self) -> MutexGuard<'_, HashMap<K, WeakShared<Call<V>>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result of the call for a key: of one that is under way, else of a new one.
    pub async fn join(&self, key: &K, call: impl FnOnce() -> Call<V>) -> V {
        let shared: Shared<Call<V>> = {
            let mut calls = self.lock();
            match calls.get(key).and_then(WeakShared::upgrade) {
                Some(shared) => shared,
                None => {
                    let shared = call().shared();
                    if let Some(weak) = shared.downgrade() {
                        calls.insert(key.clone(), weak);
                    }
                    shared
                }
            }
        };
        let _leaving = Leaving { flights: self, key };
        shared.await
    }
}

/// Removes calls that nobody waits for any more, also when a caller gives up.
struct Leaving<'a, K: Eq + Hash, V: Clone> {
    flights: &'a Flights<K, V>,
    key: &'a K,
}

impl<K: Eq + Hash, V: Clone> Drop for Leaving<'_, K, V> {
    fn drop(&mut self) {
        let mut calls = self.flights.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // A call that has ended serves nobody else: the next caller finds its result in the cache or asks again.
        let over = calls.get(self.key).is_some_and(|call| match call.upgrade() {
            None => true,
            Some(call) => call.peek().is_some(),
        });
        if over {
            calls.remove(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;

    #[tokio::test]
    async fn equal_questions_share_one_call_also_when_the_first_caller_leaves() {
        let flights = Arc::new(Flights::<u8, usize>::default());
        let (calls, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let ask = |key: u8| {
            let (flights, calls, go) = (Arc::clone(&flights), Arc::clone(&calls), Arc::clone(&go));
            async move {
                let call = || {
                    let number = calls.fetch_add(1, Ordering::Relaxed);
                    async move {
                        go.notified().await;
                        number
                    }
                    .boxed()
                };
                flights.join(&key, call).await
            }
        };
        let first = tokio::spawn(ask(1));
        let waiting = [tokio::spawn(ask(1)), tokio::spawn(ask(1))];
        while flights.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        go.notify_one();
        for task in waiting {
            assert_eq!(task.await.unwrap(), 0);
        }
        assert_eq!((calls.load(Ordering::Relaxed), flights.lock().len()), (1, 0));
        // A later caller asks anew.
        go.notify_one();
        assert_eq!(ask(1).await, 1);
        // A call that all callers have left is forgotten.
        let alone = tokio::spawn(ask(2));
        while flights.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        alone.abort();
        let _ = alone.await;
        assert!(flights.lock().is_empty());
    }
}
