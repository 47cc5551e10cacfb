//! Ownership of tasks.

use std::future::Future;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A set of tasks that are ended and joined together.
///
/// Clones refer to the same set. A [child](Scope::child) ends with its parent, and the parent's
/// [`shutdown`](Scope::shutdown) waits for the child's tasks too.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    token: CancellationToken,
    tracker: TaskTracker,
    ancestors: Vec<TaskTracker>,
}

impl Scope {
    pub fn new() -> Self {
        Self::default()
    }

    /// A scope that can end earlier than this one, and never later.
    pub fn child(&self) -> Self {
        let mut ancestors = self.ancestors.clone();
        ancestors.push(self.tracker.clone());
        Self { token: self.token.child_token(), tracker: TaskTracker::new(), ancestors }
    }

    /// Cancelled when the scope ends.
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    pub fn is_ended(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Runs `task` until it completes or the scope ends, in which case it is dropped where it waits.
    pub fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let token = self.token.clone();
        let task: BoxFuture<'static, ()> = Box::pin(task);
        self.spawn_boxed(Box::pin(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = task => {}
            }
        }));
    }

    /// Runs `task` until it completes. It must itself watch [`token`](Scope::token) and end soon after it is
    /// cancelled: [`shutdown`](Scope::shutdown) waits for it.
    pub fn spawn_graceful<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn_boxed(Box::pin(task));
    }

    /// One kind of task for the executor: its machinery, some kilobytes of machine code, is made once and not for
    /// each future.
    fn spawn_boxed(&self, task: BoxFuture<'static, ()>) {
        let held: Vec<_> = self.ancestors.iter().map(TaskTracker::token).collect();
        self.tracker.spawn(async move {
            task.await;
            drop(held);
        });
    }

    /// Asks every task to end, without waiting.
    pub fn cancel(&self) {
        self.token.cancel();
    }

    /// Asks every task to end and waits until all have.
    pub async fn shutdown(&self) {
        self.token.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[tokio::test]
    async fn shutdown_ends_tasks_of_the_scope_and_of_its_children() {
        struct Flag(Arc<AtomicBool>);
        impl Drop for Flag {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let scope = Scope::new();
        let dropped = [Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false))];
        for (scope, flag) in [scope.clone(), scope.child()].iter().zip(&dropped) {
            let flag = Flag(flag.clone());
            scope.spawn(async move {
                let _flag = flag;
                std::future::pending::<()>().await;
            });
        }
        scope.shutdown().await;
        assert!(dropped.iter().all(|d| d.load(Ordering::SeqCst)));
    }

    #[tokio::test]
    async fn a_child_ends_alone() {
        let scope = Scope::new();
        let child = scope.child();
        child.spawn(std::future::pending());
        child.shutdown().await;
        assert!(!scope.is_ended());
    }
}
