//! One list and watch of a kind, shared by all its readers in the process.
//!
//! An informer keeps the text of each object and decodes it when a reader asks. Recently used objects stay decoded,
//! up to a fixed number, until the watch has been quiet for a while. One object that cannot be decoded is reported
//! and left out; the others are served.

mod raw;
mod reflector;
mod store;

use std::collections::HashSet;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use self::raw::RawObject;
use self::store::{DECODED, Held, IndexValues, Store};
use crate::{Api, Object, ObjectKey, Scope, Uid};

/// A change of an object, in the order in which the server reported it.
///
/// An object that was deleted and made again under its name (another UID) is `Deleted`, then `Added`, even when
/// the informer was not connected in between.
#[derive(Debug, Clone)]
pub enum Change<K> {
    Added(Arc<K>),
    Updated {
        old: Old<K>,
        new: Arc<K>,
    },
    /// The last state known: the final one if the watch reported it, else the one before the gap.
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

/// The state before an update, decoded when a handler first reads it.
#[derive(Debug, Clone)]
pub struct Old<K> {
    json: Arc<[u8]>,
    decoded: Arc<OnceLock<Arc<K>>>,
}

impl<K: Object> Old<K> {
    pub fn get(&self) -> &Arc<K> {
        self.decoded.get_or_init(|| {
            Arc::new(K::decode(&self.json).expect("this text was decoded when the informer received it"))
        })
    }
}

impl<K> Old<K> {
    /// False if no member of the object had this name. Nothing is decoded for the answer.
    pub fn may_have(&self, member: &str) -> bool {
        self.decoded.get().is_some() || memchr::memmem::find(&self.json, member.as_bytes()).is_some()
    }
}

impl<K: Object> Deref for Old<K> {
    type Target = K;

    fn deref(&self) -> &K {
        self.get()
    }
}

impl<K> From<Arc<K>> for Old<K> {
    fn from(object: Arc<K>) -> Self {
        Self { json: Arc::default(), decoded: Arc::new(OnceLock::from(object)) }
    }
}

/// Limits the objects that an informer lists and watches; the default is everything.
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

type Call<K> = Box<dyn Fn(&Change<K>) + Send + Sync>;

struct Handler<K> {
    call: Call<K>,
    /// Ends the handler; without it the handler stays as long as the informer.
    session: Option<CancellationToken>,
}

impl<K> Handler<K> {
    fn has_ended(&self) -> bool {
        self.session.as_ref().is_some_and(CancellationToken::is_cancelled)
    }
}

type Index<K> = (&'static str, fn(&K) -> Vec<String>);

struct Handlers<K> {
    handlers: Vec<Handler<K>>,
    indices: Vec<Index<K>>,
}

struct Shared<K> {
    store: Store,
    /// Removes members that nobody here reads, before an object is kept; nothing without it.
    slim: Option<fn(&mut K)>,
    /// Held while a change is applied and reported, so that every handler sees every change once, in order, and a
    /// handler that joins late misses none.
    handlers: Mutex<Handlers<K>>,
    synced: watch::Sender<bool>,
}

/// A local copy of the objects a selector matches, kept current by one list and one watch. Cloning is cheap and
/// shares the copy. `metadata.managedFields` is not kept.
pub struct Informer<K> {
    shared: Arc<Shared<K>>,
    /// Ends the handlers that subscribe through this value.
    session: Option<CancellationToken>,
}

impl<K> Clone for Informer<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), session: self.session.clone() }
    }
}

impl<K> std::fmt::Debug for Informer<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informer").field("kind", &kind_of::<K>()).finish_non_exhaustive()
    }
}

fn kind_of<K>() -> &'static str {
    std::any::type_name::<K>().rsplit("::").next().unwrap_or_default()
}

impl<K: Object> Informer<K> {
    /// Starts listing and watching; the task belongs to `scope`. Until the first list is in, reads see nothing:
    /// see [`synced`](Informer::synced).
    pub fn start(api: Api<K>, selector: ListSelector, scope: &Scope) -> Self {
        Self::start_with(api, selector, scope, None)
    }

    /// [`start`](Informer::start), but `slim` removes members of each object before it is kept. It must leave name,
    /// namespace, UID and resource version. Handlers see an added or updated object whole, its earlier state and
    /// every read as it is kept.
    pub fn start_slim(api: Api<K>, selector: ListSelector, scope: &Scope, slim: fn(&mut K)) -> Self {
        Self::start_with(api, selector, scope, Some(slim))
    }

    fn start_with(api: Api<K>, selector: ListSelector, scope: &Scope, slim: Option<fn(&mut K)>) -> Self {
        let informer = Self {
            shared: Arc::new(Shared {
                store: Store::default(),
                slim,
                handlers: Mutex::new(Handlers { handlers: Vec::new(), indices: Vec::new() }),
                synced: watch::Sender::new(false),
            }),
            session: None,
        };
        let source = reflector::Source {
            client: api.client().clone(),
            request: api.request().clone(),
            selector,
            kind: kind_of::<K>(),
            metadata_only: K::METADATA_ONLY,
        };
        scope.spawn(reflector::run(source, informer.shared.clone()));
        informer
    }

    /// The same copy for a user whose handlers are dropped when the session ends.
    pub(crate) fn in_session(&self, session: Option<CancellationToken>) -> Self {
        Self { shared: self.shared.clone(), session }
    }

    /// The object, decoded if it is not yet.
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<K>> {
        self.shared.decode(vec![self.shared.store.get(key)?]).pop()
    }

    /// The UID of the object, without decoding it.
    pub fn uid(&self, key: &ObjectKey) -> Option<Uid> {
        self.shared.store.uid(key)
    }

    /// Every object, ordered by namespace and name. This decodes all of them: prefer an index.
    pub fn list(&self) -> Vec<Arc<K>> {
        self.shared.decode(self.shared.store.list())
    }

    /// The objects of one namespace, ordered by name.
    pub fn list_in(&self, namespace: &str) -> Vec<Arc<K>> {
        self.shared.decode(self.shared.store.list_in(namespace))
    }

    /// The keys of all objects, in order, without decoding any.
    pub fn keys(&self) -> Vec<Arc<ObjectKey>> {
        self.shared.store.keys()
    }

    /// The number of objects held.
    pub fn len(&self) -> usize {
        self.shared.store.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets objects be found by the values `f` gives for them. Adding a name again changes nothing: several users
    /// of a shared informer may ask for the same index.
    pub fn add_index(&self, name: &'static str, f: fn(&K) -> Vec<String>) {
        let mut handlers = self.shared.lock();
        if self.shared.store.has_index(name) {
            return;
        }
        handlers.indices.push((name, f));
        let objects = self.shared.decode(self.shared.store.list());
        let values = objects.iter().map(|object| (Arc::new(ObjectKey::of(&**object)), f(object))).collect();
        self.shared.store.add_index(name, values);
    }

    /// The objects for which the index gives `value`; none if no such index was added.
    pub fn by_index(&self, name: &str, value: &str) -> Vec<Arc<K>> {
        self.shared.decode(self.shared.store.by_index(name, value))
    }

    /// The number of objects for which the index gives `value`, without decoding any.
    pub fn count_by_index(&self, name: &str, value: &str) -> usize {
        self.shared.store.count_by_index(name, value)
    }

    /// Waits until the first list is in and all handlers have seen it.
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
    /// A panic of one handler is reported and does not keep the others from the change.
    pub fn subscribe(&self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) {
        let mut handlers = self.shared.lock();
        for object in self.shared.decode(self.shared.store.list()) {
            handler(&Change::Added(object));
        }
        // Otherwise sessions that are over would keep the values of their handlers alive.
        handlers.handlers.retain(|handler| !handler.has_ended());
        handlers.handlers.push(Handler { call: Box::new(handler), session: self.session.clone() });
    }
}

impl<K: Object> Shared<K> {
    fn lock(&self) -> MutexGuard<'_, Handlers<K>> {
        self.handlers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn decode(&self, held: Vec<Held>) -> Vec<Arc<K>> {
        let mut fresh = Vec::new();
        let keep = held.len() <= DECODED;
        let mut objects = Vec::with_capacity(held.len());
        for held in held {
            match held {
                Held::Decoded(object) => objects.extend(object.downcast().ok()),
                Held::Text { key, version, json } => {
                    // The text was decoded once, when it arrived.
                    let Ok(object) = K::decode(&json) else { continue };
                    let object = Arc::new(object);
                    if keep {
                        fresh.push((key, version, object.clone() as store::Decoded));
                    }
                    objects.push(object);
                }
            }
        }
        if !fresh.is_empty() {
            self.store.keep_decoded(fresh);
        }
        objects
    }

    fn old(held: Held) -> Option<Old<K>> {
        match held {
            Held::Decoded(object) => object.downcast::<K>().ok().map(Old::from),
            Held::Text { json, .. } => Some(Old { json, decoded: Arc::default() }),
        }
    }

    fn report(handlers: &Handlers<K>, change: &Change<K>) {
        for handler in handlers.handlers.iter().filter(|handler| !handler.has_ended()) {
            if std::panic::catch_unwind(AssertUnwindSafe(|| (handler.call)(change))).is_err() {
                error!(kind = kind_of::<K>(), "a handler of an informer panicked");
            }
        }
    }

    /// Decodes `object`. Reports one that does not have the form of its kind.
    fn take(&self, object: &RawObject) -> Option<Arc<K>> {
        K::decode(&object.json)
            .inspect_err(|error| {
                warn!(kind = kind_of::<K>(), object = %object.key, %error, "left out an object that cannot be decoded");
            })
            .ok()
            .map(Arc::new)
    }

    fn apply_locked(&self, handlers: &Handlers<K>, mut object: RawObject) {
        if self.store.is_current(&object) {
            return;
        }
        let Some(new) = self.take(&object) else { return };
        let values: IndexValues = handlers.indices.iter().map(|(name, f)| (*name, f(&new))).collect();
        let decoded = match self.slim {
            None => Some(new.clone() as store::Decoded),
            Some(slim) => {
                let mut kept = (*new).clone();
                slim(&mut kept);
                if let Ok(json) = kept.encode() {
                    object.json = json.into();
                }
                None
            }
        };
        match self.store.apply(object, decoded, values) {
            None => Self::report(handlers, &Change::Added(new)),
            Some(previous) => {
                let Some(old) = Self::old(previous.held) else { return };
                if previous.same {
                    Self::report(handlers, &Change::Updated { old, new });
                } else {
                    Self::report(handlers, &Change::Deleted(old.get().clone()));
                    Self::report(handlers, &Change::Added(new));
                }
            }
        }
    }

    /// `last` is the object's final state, if the server reported it.
    fn remove_locked(&self, handlers: &Handlers<K>, key: &ObjectKey, last: Option<&RawObject>) {
        let Some(removed) = self.store.remove(key) else { return };
        let last = match (last, &removed.held) {
            // Most objects change no more when they go: then the state before need not be decoded again.
            (Some(last), Held::Decoded(_)) if removed.differs_by_version(last) => Self::old(removed.held)
                .map(|before| {
                    let mut object = before.get().clone();
                    drop(before);
                    let version = Some(last.version.to_string());
                    Arc::make_mut(&mut object).meta_mut().resource_version = version;
                    object
                }),
            (last, _) => last
                .and_then(|last| self.take(last))
                .or_else(|| Self::old(removed.held).map(|old| old.get().clone())),
        };
        if let Some(last) = last {
            Self::report(handlers, &Change::Deleted(last));
        }
    }
}

impl<K: Object> reflector::Sink for Shared<K> {
    fn apply(&self, object: RawObject) {
        self.apply_locked(&self.lock(), object);
    }

    fn remove(&self, object: RawObject) {
        self.remove_locked(&self.lock(), &object.key, Some(&object));
    }

    fn replace(&self, objects: Vec<RawObject>) {
        let handlers = self.lock();
        let keep: HashSet<_> = objects.iter().map(|object| object.key.clone()).collect();
        for key in self.store.keys_except(&keep) {
            self.remove_locked(&handlers, &key, None);
        }
        for object in objects {
            self.apply_locked(&handlers, object);
        }
        drop(handlers);
        self.synced.send_replace(true);
    }

    fn idle(&self) {
        self.store.drop_decoded();
    }
}

#[cfg(test)]
mod tests;
