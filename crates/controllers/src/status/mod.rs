//! What upstream's API server writes into the status of its own configuration objects.

pub(crate) mod api_services;
pub(crate) mod definitions;
pub(crate) mod flow_schemas;
pub(crate) mod policies;

use std::future::Future;
use std::sync::Arc;

use ferrite_client::{Informer, Object, ObjectKey, WorkQueue, run_workers};

use crate::{Context, SyncError};

/// Calls `sync` with every object of a cluster-wide kind when it changes or its key is put into `queue`. The
/// objects of `also` are read by it: nothing happens before they are known.
fn start<K, L, F, Fut>(
    context: &Context,
    name: &'static str,
    queue: Arc<WorkQueue<ObjectKey>>,
    objects: Informer<K>,
    also: Informer<L>,
    sync: F,
) where
    K: Object,
    L: Object,
    F: Fn(Arc<K>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), SyncError>> + Send,
{
    let (scope, workers) = (context.scope.clone(), context.config.workers);
    let watching = queue.clone();
    let of_kind = |object: &K| ObjectKey::cluster(object.meta().name.clone().unwrap_or_default());
    objects.subscribe(move |change| watching.add(of_kind(change.object())));
    context.scope.spawn(async move {
        objects.synced().await;
        also.synced().await;
        run_workers(name, queue, workers, scope, |key: ObjectKey| {
            let step = objects.get(&key).map(&sync);
            async move {
                match step {
                    Some(step) => step.await.map(|()| None),
                    None => Ok::<_, SyncError>(None),
                }
            }
        })
        .await;
    });
}

/// Puts every object of a cluster-wide kind into the queue.
fn add_all<K: Object>(objects: &Informer<K>, queue: &WorkQueue<ObjectKey>) {
    for object in objects.list() {
        queue.add(ObjectKey::cluster(object.meta().name.clone().unwrap_or_default()));
    }
}
