//! A controller, declared: the kind that it reconciles, the events that wake it, and the function that does
//! the work.
//!
//! ```ignore
//! Controller::new("serviceaccount-controller", 5, &scope)
//!     .reconciles(&namespaces)
//!     .watches(&accounts, |change, queue| queue.add(namespace_of(change.object())))
//!     .run(move |key| sync(client.clone(), namespaces.get(&key)));
//! ```
//! The kit brings the queue, waits until every informer it reads has synced, runs the workers with a span for each
//! reconcile, retries failures after their rate limit and ends with its scope.

use std::fmt::Display;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use ferrite_component::steps::Timer;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kube::Resource;

use crate::ownership::controller_of;
use crate::{Change, Informer, Object, ObjectKey, RateLimits, Scope, Uid, WorkQueue, run_workers};

type Subject<T> = Arc<dyn Fn(&T) -> Option<Uid> + Send + Sync>;

/// A controller under construction. It does nothing before [`run`](Controller::run).
#[must_use = "a controller that is not run does nothing"]
pub struct Controller<T: Eq + Hash = ObjectKey> {
    name: &'static str,
    workers: usize,
    scope: Scope,
    queue: Arc<WorkQueue<T>>,
    /// Become ready when the controller's informers are complete.
    synced: Vec<BoxFuture<'static, ()>>,
    /// The UID of the object that a key stands for, where the controller reconciles objects.
    subject: Option<Subject<T>>,
}

impl<T: Eq + Hash> std::fmt::Debug for Controller<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<T> Controller<T>
where
    T: Clone + Eq + Hash + Display + Send + Sync + 'static,
{
    /// A controller that reconciles up to `workers` keys at a time; its tasks belong to `scope`.
    pub fn new(name: &'static str, workers: usize, scope: &Scope) -> Self {
        Self::with_limits(name, workers, scope, RateLimits::default())
    }

    /// [`new`](Controller::new), with other delays before a failed reconcile is tried again.
    pub fn with_limits(name: &'static str, workers: usize, scope: &Scope, limits: RateLimits) -> Self {
        Self::with_queue_name(name, name, workers, scope, limits)
    }

    /// [`with_limits`](Controller::with_limits), with another name of the queue in the metrics.
    pub fn with_queue_name(
        name: &'static str,
        queue: &str,
        workers: usize,
        scope: &Scope,
        limits: RateLimits,
    ) -> Self {
        let queue = Arc::new(WorkQueue::named(queue, limits));
        Self { name, workers, scope: scope.clone(), queue, synced: Vec::new(), subject: None }
    }

    /// The queue of keys to reconcile, for sources that are no informer.
    pub fn queue(&self) -> &Arc<WorkQueue<T>> {
        &self.queue
    }

    /// Reads `informer` without being woken by it: no reconcile runs before it has synced.
    pub fn reads<K: Object>(mut self, informer: &Informer<K>) -> Self {
        let informer = informer.clone();
        self.synced.push(async move { informer.synced().await }.boxed());
        self
    }

    /// Calls `wake` with every change of `informer`; it puts the keys that the change concerns into the queue.
    pub fn watches<K: Object>(
        self,
        informer: &Informer<K>,
        wake: impl Fn(&Change<K>, &WorkQueue<T>) + Send + Sync + 'static,
    ) -> Self {
        let queue = self.queue.clone();
        informer.subscribe(move |change| wake(change, &queue));
        self.reads(informer)
    }

    /// Starts the controller. `reconcile` brings the world in line with one key; `Some(delay)` asks for another
    /// look after that time.
    pub fn run<F, Fut, E>(self, reconcile: F)
    where
        F: Fn(T) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Option<Duration>, E>> + Send + 'static,
        E: Display + 'static,
    {
        let Self { name, workers, scope, queue, synced, subject } = self;
        let inner = scope.clone();
        scope.spawn(async move {
            futures_util::future::join_all(synced).await;
            run_workers(name, queue, workers, inner, move |key: T| {
                let uid = subject.as_ref().and_then(|subject| subject(&key));
                let timer = Timer::start();
                let reconciled = reconcile(key);
                async move {
                    let result = reconciled.await;
                    if let Some(uid) = uid {
                        let outcome = if result.is_ok() { "" } else { "failed, tried again later" };
                        timer.end(name, "reconcile", &uid.to_string(), format_args!("{outcome}"));
                    }
                    result
                }
            })
            .await;
        });
    }

    /// [`run`](Controller::run) with a state that all reconciles share.
    pub fn run_with<S, F, Fut, E>(self, state: Arc<S>, reconcile: F)
    where
        S: Send + Sync + 'static,
        F: Fn(Arc<S>, T) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Option<Duration>, E>> + Send + 'static,
        E: Display + 'static,
    {
        self.run(move |key| reconcile(state.clone(), key));
    }
}

impl Controller<ObjectKey> {
    /// Keys are those of the informer's objects: each reconcile is a step in the life of one.
    pub fn about<K: Object>(mut self, informer: &Informer<K>) -> Self {
        let objects = informer.clone();
        self.subject = Some(Arc::new(move |key| objects.uid(key)));
        self
    }

    /// Every change of an object wakes its own key.
    pub fn reconciles<K: Object>(self, informer: &Informer<K>) -> Self {
        self.about(informer).watches(informer, |change, queue| queue.add(ObjectKey::of(&**change.object())))
    }

    /// Every change of an object wakes the `O` that controls it, and the one that did before the change.
    pub fn owns<O, K>(self, informer: &Informer<K>) -> Self
    where
        O: Resource<DynamicType = ()>,
        K: Object,
    {
        self.watches(informer, |change, queue| {
            let owner = |object: &K| {
                let reference = controller_of(object.meta())?;
                let is_ours = reference.kind == O::kind(&()) && reference.api_version == O::api_version(&());
                is_ours.then(|| {
                    ObjectKey::new(
                        object.meta().namespace.clone().unwrap_or_default(),
                        reference.name.clone(),
                    )
                })
            };
            if let Change::Updated { old, .. } = change {
                owner(old).into_iter().for_each(|key| queue.add(key));
            }
            owner(change.object()).into_iter().for_each(|key| queue.add(key));
        })
    }
}
