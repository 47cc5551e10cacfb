//! Controllers for the statuses that upstream's API server writes into its own configuration objects.

pub(crate) mod flow_schemas;
pub(crate) mod policies;

use std::future::Future;
use std::sync::Arc;

use ferrite_client::{Controller, Informer, Object, ObjectKey, WorkQueue};

use crate::SyncError;

/// Runs `kit` with `sync`, which is called with the object of each key that still exists.
fn run<K, F, Fut>(kit: Controller, objects: Informer<K>, sync: F)
where
    K: Object,
    F: Fn(Arc<K>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), SyncError>> + Send + 'static,
{
    kit.run(move |key| {
        let step = objects.get(&key).map(&sync);
        async move {
            match step {
                Some(step) => step.await.map(|()| None),
                None => Ok::<_, SyncError>(None),
            }
        }
    });
}

/// Puts every object of a cluster-wide kind into the queue.
fn add_all<K: Object>(objects: &Informer<K>, queue: &WorkQueue<ObjectKey>) {
    objects.keys().iter().for_each(|key| queue.add((**key).clone()));
}
