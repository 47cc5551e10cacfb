//! The contract, for the stores of this crate.
#![allow(clippy::unwrap_used)]

#[path = "contract/suite.rs"]
mod suite;

use ferrite_store::{HistoryLimits, LogOptions, Store};
use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Small enough to make a checkpoint every few transactions.
fn options() -> LogOptions {
    LogOptions { min_log: 700, max_ratio: 1, relaxed_window: Duration::from_millis(5), ahead: 500 }
}

fn open(dir: &Path) -> Store {
    Store::open(dir, options(), HistoryLimits::default()).unwrap()
}

fn block_on<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(task)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn memory_agrees_with_the_model(steps in suite::steps()) {
        block_on(suite::agrees_with_the_model(Store::memory(), &steps, |store| store));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn embedded_agrees_with_the_model(steps in suite::steps()) {
        let dir = tempfile::tempdir().unwrap();
        let reopen = |store| {
            drop(store);
            open(dir.path())
        };
        block_on(suite::agrees_with_the_model(open(dir.path()), &steps, reopen));
    }
}

/// Runs a part of the suite on each kind of store.
async fn on_each<F: Future<Output = ()>>(run: impl Fn(Arc<Store>) -> F) {
    run(Arc::new(Store::memory())).await;
    let dir = tempfile::tempdir().unwrap();
    run(Arc::new(open(dir.path()))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_swaps_are_linearizable() {
    on_each(|store| suite::concurrent_swaps_are_linearizable(store, 16, 60)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_watch_sees_everything_in_order() {
    on_each(|store| suite::a_watch_sees_everything_in_order(store, 8, 100)).await;
}

#[tokio::test]
async fn a_lease_takes_its_keys_along() {
    on_each(suite::a_lease_takes_its_keys_along).await;
}
