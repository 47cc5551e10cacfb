//! One list and watch of a kind, shared by everybody in the process who wants it.

mod reflector;
mod store;

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use self::store::Store;
use crate::{Object, ObjectKey, Scope};

/// What happened to an object, in the order in which the server said so.
///
/// An object that was deleted and made again under its name (another UID) is `Deleted`, then `Added`, even when
/// the informer was not connected in between.
#[derive(Debug, Clone)]
pub enum Change<K> {
    Added(Arc<K>),
    Updated {
        old: Arc<K>,
        new: Arc<K>,
    },
    /// The last state known: the final one if the watch told us, else the one before the gap.
    Deleted(Arc<K>),
}

impl<K> Change<K> {
    /// The object after the change, or the last state of a deleted one.
    pub fn object(&self) -> &Arc<K> {
        match self {
            Change::Added(object) | Change::Updated { new: object, .. } | Change::Deleted(object) => object,
        }
    }
}

/// Narrows what an informer lists and watches; the default is everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct ListSelector {
    pub labels: Option<String>,
    pub fields: Option<String>,
}

impl ListSelector {
    pub fn everything() -> Self {
        Self::default()
    }

    pub fn fields(selector: impl Into<String>) -> Self {
        Self { fields: Some(selector.into()), labels: None }
    }

    pub fn labels(selector: impl Into<String>) -> Self {
        Self { labels: Some(selector.into()), fields: None }
    }
}

type Handler<K> = Box<dyn Fn(&Change<K>) + Send + Sync>;

struct Shared<K> {
    store: Store<K>,
    /// Held while a change is applied and told, so that every handler sees every change once, in order, and a
    /// handler that joins late misses none.
    handlers: Mutex<Vec<Handler<K>>>,
    synced: watch::Sender<bool>,
}

/// A local copy of the objects a selector matches, kept current by one list and one watch. Cloning is cheap and
/// shares the copy. `metadata.managedFields` is not kept.
pub struct Informer<K> {
    shared: Arc<Shared<K>>,
}

impl<K> Clone for Informer<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<K> std::fmt::Debug for Informer<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informer").field("kind", &std::any::type_name::<K>()).finish_non_exhaustive()
    }
}

impl<K: Object> Informer<K> {
    /// Starts listing and watching; the task belongs to `scope`. Until the first list is in, reads see nothing:
    /// see [`synced`](Informer::synced).
    pub fn start(api: kube::Api<K>, selector: ListSelector, scope: &Scope) -> Self {
        Self::start_slim(api, selector, scope, |object| object.meta_mut().managed_fields = None)
    }

    /// [`start`](Informer::start), but `slim` decides what of each object is not kept. It must leave name, namespace,
    /// UID and resource version.
    pub fn start_slim(api: kube::Api<K>, selector: ListSelector, scope: &Scope, slim: fn(&mut K)) -> Self {
        let informer = Self {
            shared: Arc::new(Shared {
                store: Store::new(slim),
                handlers: Mutex::new(Vec::new()),
                synced: watch::Sender::new(false),
            }),
        };
        scope.spawn(reflector::run(api, selector, informer.clone()));
        informer
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Arc<K>> {
        self.shared.store.get(key)
    }

    /// Every object, ordered by namespace and name.
    pub fn list(&self) -> Vec<Arc<K>> {
        self.shared.store.list()
    }

    /// The objects of one namespace, ordered by name.
    pub fn list_in(&self, namespace: &str) -> Vec<Arc<K>> {
        self.shared.store.list_in(namespace)
    }

    /// How many objects are held.
    pub fn len(&self) -> usize {
        self.shared.store.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets objects be found by the values `f` gives for them. Adding a name again changes nothing: several users
    /// of a shared informer may ask for the same index.
    pub fn add_index(&self, name: &'static str, f: fn(&K) -> Vec<String>) {
        self.shared.store.add_index(name, f);
    }

    /// The objects for which the index gives `value`; none if no such index was added.
    pub fn by_index(&self, name: &str, value: &str) -> Vec<Arc<K>> {
        self.shared.store.by_index(name, value)
    }

    /// Waits until the first list is in and all handlers have been told of it.
    pub async fn synced(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.shared.synced.subscribe().wait_for(|synced| *synced).await;
    }

    pub fn has_synced(&self) -> bool {
        *self.shared.synced.borrow()
    }

    /// Calls `handler` with every object held now, as `Added`, and then with every change.
    ///
    /// It runs on the informer's task, one change at a time: it should only take note (put a key into a queue) and
    /// must not call `subscribe` of the same informer. Reads through the informer see the state after the change.
    pub fn subscribe(&self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) {
        let mut handlers = self.shared.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        for object in self.shared.store.list() {
            handler(&Change::Added(object));
        }
        handlers.push(Box::new(handler));
    }

    /// Records that `object` exists as it is.
    fn apply(&self, object: K) {
        let handlers = self.shared.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        for change in self.shared.store.apply(object) {
            handlers.iter().for_each(|handler| handler(&change));
        }
    }

    /// Records that `object` is gone.
    fn remove(&self, object: K) {
        let handlers = self.shared.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(change) = self.shared.store.remove(object) {
            handlers.iter().for_each(|handler| handler(&change));
        }
    }

    /// Records that exactly `objects` exist.
    fn replace(&self, objects: Vec<K>) {
        let handlers = self.shared.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = self.shared.store.keys_except(objects.iter().map(ObjectKey::of));
        for key in gone {
            if let Some(change) = self.shared.store.remove_key(&key) {
                handlers.iter().for_each(|handler| handler(&change));
            }
        }
        for object in objects {
            for change in self.shared.store.apply(object) {
                handlers.iter().for_each(|handler| handler(&change));
            }
        }
        drop(handlers);
        self.shared.synced.send_replace(true);
    }
}

#[cfg(test)]
mod tests;
