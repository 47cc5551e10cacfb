//! The loop around a reconcile function.

use std::fmt::Display;
use std::future::Future;
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use tracing::{Instrument, debug, debug_span, error, info};

use crate::{Scope, WorkQueue};

/// Failures in a row of one key that are not worth reading about.
const QUIET_FAILURES: u32 = 5;

/// Reconciles keys from `queue` with `workers` at a time until `scope` ends.
///
/// An error (or a panic) puts the key back after its rate limit; success forgets past failures, and with
/// `Some(delay)` the key comes back after that time. When the scope ends, reconciles are dropped where they wait:
/// they must be safe to cut short, as they must be anyway for a crash.
pub async fn run_workers<T, F, Fut, E>(
    name: &'static str,
    queue: Arc<WorkQueue<T>>,
    workers: usize,
    scope: Scope,
    reconcile: F,
) where
    T: Clone + Eq + Hash + Display + Send + Sync + 'static,
    F: Fn(T) -> Fut + Send + Sync,
    Fut: Future<Output = Result<Option<Duration>, E>> + Send + 'static,
    E: Display + 'static,
{
    // Boxed, so that the loop is compiled once for each type of key and not for each controller.
    let reconcile = move |key| -> BoxFuture<'static, Outcome> {
        let reconciled = reconcile(key);
        async move { reconciled.await.map_err(|problem| problem.to_string()) }.boxed()
    };
    let all = join_all((0..workers.max(1)).map(|_| work(name, &queue, &reconcile)));
    tokio::select! {
        biased;
        () = scope.token().cancelled() => queue.shut_down(),
        _ = all => {}
    }
}

/// When to reconcile again, or the message of the error.
type Outcome = Result<Option<Duration>, String>;

async fn work<T>(
    name: &'static str,
    queue: &WorkQueue<T>,
    reconcile: &(dyn Fn(T) -> BoxFuture<'static, Outcome> + Send + Sync),
) where
    T: Clone + Eq + Hash + Display + Send + Sync + 'static,
{
    while let Some(key) = queue.get().await {
        let span = debug_span!("reconcile", controller = name, %key);
        let result = AssertUnwindSafe(reconcile(key.clone())).catch_unwind().instrument(span).await;
        match result {
            Ok(Ok(requeue)) => {
                queue.forget(&key);
                if let Some(delay) = requeue {
                    queue.add_after(key.clone(), delay);
                }
            }
            Ok(Err(problem)) => {
                // A conflict with one's own last write, not yet seen, is daily business: only trouble that lasts
                // is worth reading.
                if queue.failures(&key) < QUIET_FAILURES {
                    debug!(controller = name, %key, error = %problem, "reconcile failed, will retry");
                } else {
                    info!(controller = name, %key, error = %problem, "reconcile keeps failing, will retry");
                }
                queue.add_rate_limited(key.clone());
            }
            Err(_) => {
                error!(controller = name, %key, "reconcile panicked, will retry");
                queue.add_rate_limited(key.clone());
            }
        }
        queue.done(&key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn errors_and_panics_are_retried_and_requeues_come_back() {
        let queue = Arc::new(WorkQueue::new());
        let scope = Scope::new();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (sender, mut done) = tokio::sync::mpsc::channel(1);
        let record = seen.clone();
        scope.spawn_graceful(run_workers("test", queue.clone(), 2, scope.clone(), move |key: String| {
            let attempt = {
                let mut seen = record.lock().unwrap();
                seen.push(key);
                seen.len()
            };
            let sender = sender.clone();
            async move {
                match attempt {
                    1 => Err("first"),
                    2 => panic!("second"),
                    3 => Ok(Some(Duration::from_secs(5))),
                    _ => {
                        let _ = sender.send(()).await;
                        Ok(None)
                    }
                }
            }
        }));
        queue.add("a/b".to_owned());
        done.recv().await.unwrap();
        assert_eq!(seen.lock().unwrap().len(), 4);
        scope.shutdown().await;
    }
}
