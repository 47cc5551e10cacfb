//! The plugins that a profile can name, their arguments, and the inputs for making them.

use std::any::{Any, TypeId};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ferrite_api::field::{FieldError, Path};
use ferrite_client::{Change, EventType, Events, Informer, Informers, Object, ObjectKey, Scope};
use ferrite_json::Value;
use futures_util::future::BoxFuture;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use super::events::{Action, ObjectEvent};
use super::{ClusterEvent, Plugin, WaitingPods};
use crate::devices::Devices;
use crate::plugins::PLUGINS;
use crate::snapshot::PodInfo;

/// A plugin's arguments as the configuration has them.
#[derive(Debug, Clone)]
pub struct PluginArgs {
    value: Option<Value>,
    path: Path,
}

impl Default for PluginArgs {
    fn default() -> Self {
        Self { value: None, path: Path::new("args") }
    }
}

/// Arguments that a plugin refuses.
#[derive(Debug, thiserror::Error)]
pub enum PluginArgsError {
    #[error("decoding {path}: {problem}")]
    Decode { path: String, problem: String },
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Invalid(Vec<FieldError>),
}

impl PluginArgs {
    /// Arguments from a JSON object at `path` of the configuration; `apiVersion` and `kind` are left out.
    pub fn new(mut value: Value, path: Path) -> Self {
        if let Some(object) = value.as_object_mut() {
            object.remove("apiVersion");
            object.remove("kind");
        }
        Self { value: Some(value), path }
    }

    /// Appends texts to a list among the arguments.
    pub(crate) fn extend(&mut self, list: &str, texts: &[&str]) {
        let value = self.value.get_or_insert_with(|| ferrite_json::json!({}));
        match value[list].as_array_mut() {
            Some(items) => items.extend(texts.iter().map(|text| Value::from(*text))),
            None => value[list] = texts.iter().map(|text| Value::from(*text)).collect::<Vec<_>>().into(),
        }
    }

    /// The arguments as `T`, whose `Default` has the default of every field. `T` should deny unknown fields.
    pub fn decode<T: DeserializeOwned + Default>(&self) -> Result<T, PluginArgsError> {
        match &self.value {
            None => Ok(T::default()),
            Some(value) => ferrite_json::from_value(value.clone()).map_err(|error| PluginArgsError::Decode {
                path: self.path.as_str().to_owned(),
                problem: error.to_string(),
            }),
        }
    }

    /// As [`decode`](PluginArgs::decode), with the errors that `validate` finds. It is given the path of the arguments.
    pub fn decode_valid<T: DeserializeOwned + Default>(
        &self,
        validate: impl FnOnce(&T, &Path) -> Vec<FieldError>,
    ) -> Result<T, PluginArgsError> {
        let args = self.decode()?;
        let errors = validate(&args, &self.path);
        if errors.is_empty() { Ok(args) } else { Err(PluginArgsError::Invalid(errors)) }
    }
}

/// Objects of one kind that a plugin reads: an informer's, or a fixed set in tests.
#[derive(Clone)]
pub enum Store<K: Object> {
    Informer(Informer<K>),
    Fixed(Arc<HashMap<ObjectKey, Arc<K>>>),
}

impl<K: Object> std::fmt::Debug for Store<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

impl<K: Object> Store<K> {
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<K>> {
        match self {
            Self::Informer(informer) => informer.get(key),
            Self::Fixed(objects) => objects.get(key).cloned(),
        }
    }

    pub fn list(&self) -> Vec<Arc<K>> {
        match self {
            Self::Informer(informer) => informer.list(),
            Self::Fixed(objects) => objects.values().cloned().collect(),
        }
    }

    /// The objects of one namespace.
    pub fn list_in(&self, namespace: &str) -> Vec<Arc<K>> {
        match self {
            Self::Informer(informer) => informer.list_in(namespace),
            Self::Fixed(objects) => {
                let of_namespace = objects.iter().filter(|(key, _)| key.namespace.as_str() == namespace);
                of_namespace.map(|(_, object)| object.clone()).collect()
            }
        }
    }

    /// Calls `handler` with every object, as added, and then with every change.
    pub(crate) fn follow(&self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) {
        match self {
            Self::Informer(informer) => informer.subscribe(handler),
            Self::Fixed(objects) => {
                objects.values().for_each(|object| handler(&Change::Added(object.clone())));
            }
        }
    }

    /// Calls `wake` after each change. Fixed objects do not change.
    pub fn on_change(&self, wake: impl Fn() + Send + Sync + 'static) {
        if let Self::Informer(informer) = self {
            informer.subscribe(move |_| wake());
        }
    }
}

type Sink = Arc<OnceLock<Box<dyn Fn(ClusterEvent) + Send + Sync>>>;

/// The scheduler, as a plugin sees it when it is made.
#[derive(Clone, Default)]
pub struct Handle {
    client: Option<Client>,
    informers: Option<Informers>,
    fixed: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    /// Pods that a Permit plugin delays.
    pub waiting_pods: WaitingPods,
    used: Arc<Mutex<Used>>,
    sink: Sink,
    devices: Arc<OnceLock<Arc<Devices>>>,
    scope: Option<Scope>,
    events: Option<Events>,
}

/// The informers that plugins asked for.
#[derive(Default)]
struct Used {
    kinds: HashSet<TypeId>,
    synced: Vec<BoxFuture<'static, ()>>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

impl Handle {
    pub fn new(client: Client, informers: Informers) -> Self {
        Self { client: Some(client), informers: Some(informers), ..Self::default() }
    }

    /// Tasks of plugins belong to `scope`.
    pub(crate) fn with_scope(mut self, scope: Scope) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Plugins report through `events`.
    pub(crate) fn with_events(mut self, events: Events) -> Self {
        self.events = Some(events);
        self
    }

    /// True once the scheduler ends: long work stops.
    pub(crate) fn is_ended(&self) -> bool {
        self.scope.as_ref().is_some_and(Scope::is_ended)
    }

    /// Runs `task` in the background until the scheduler ends. A dry run starts nothing.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(scope) = &self.scope {
            scope.spawn(task);
        }
    }

    /// Records an event about a pod, as its profile; a dry run records none.
    pub(crate) fn record(&self, pod: &PodInfo, reason: &str, message: String) {
        if let Some(events) = &self.events {
            let recorder = events.series_recorder(pod.scheduler_name());
            recorder.event(&pod.reference(), None, EventType::Normal, reason, "Scheduling", message);
        }
    }

    /// Adds fixed objects in place of an informer's. A handle made by [`Default`] has no other objects.
    #[must_use]
    pub fn with_objects<K: Object>(mut self, objects: impl IntoIterator<Item = K>) -> Self {
        let objects: HashMap<ObjectKey, Arc<K>> =
            objects.into_iter().map(|object| (ObjectKey::of(&object), Arc::new(object))).collect();
        self.fixed.insert(TypeId::of::<K>(), Arc::new(objects));
        self
    }

    /// The client for writes; none in a dry run.
    pub fn client(&self) -> Option<&Client> {
        self.client.as_ref()
    }

    /// All objects of a kind. Scheduling starts when they are known, and their changes reach the queueing hints of all
    /// plugins as [`ClusterEvent::Object`].
    pub fn store<K>(&self) -> Store<K>
    where
        K: Object + Resource<DynamicType = ()>,
    {
        let Some(informers) = &self.informers else {
            let fixed = self.fixed.get(&TypeId::of::<K>()).cloned();
            return Store::Fixed(fixed.and_then(|objects| objects.downcast().ok()).unwrap_or_default());
        };
        let informer: Informer<K> = informers.get();
        let dynamic =
            [TypeId::of::<ResourceClaim>(), TypeId::of::<ResourceSlice>(), TypeId::of::<DeviceClass>()];
        if dynamic.contains(&TypeId::of::<K>()) {
            // They must have noted a change before it reaches the queue.
            self.devices();
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.kinds.insert(TypeId::of::<K>()) {
            let sink = self.sink.clone();
            informer.subscribe(move |change| {
                if let Some(sink) = sink.get() {
                    sink(ClusterEvent::Object(event_of(change)));
                }
            });
            let waiting = informer.clone();
            used.synced.push(Box::pin(async move { waiting.synced().await }));
        }
        Store::Informer(informer)
    }

    /// All objects of a kind, whose changes help no pod by themselves: no plugin's queueing hint sees them.
    pub fn lister<K>(&self) -> Store<K>
    where
        K: Object + Resource<DynamicType = ()>,
    {
        match &self.informers {
            Some(informers) => Store::Informer(informers.get()),
            None => self.store(),
        }
    }

    /// The devices of the cluster and the claims on them.
    pub(crate) fn devices(&self) -> Arc<Devices> {
        let mut is_new = false;
        let devices = self.devices.get_or_init(|| {
            is_new = true;
            let devices = Arc::new(Devices::new(self.lister()));
            let of = devices.clone();
            self.lister::<ResourceClaim>().follow(move |change| of.claim_changed(change));
            let of = devices.clone();
            self.lister::<ResourceSlice>().follow(move |change| of.slice_changed(change));
            let of = devices.clone();
            self.lister::<DeviceClass>().follow(move |change| of.class_changed(change));
            devices
        });
        let devices = devices.clone();
        if is_new {
            // After the handlers above: their changes reach the queueing hints.
            let _: Store<ResourceClaim> = self.store();
            let _: Store<ResourceSlice> = self.store();
            let _: Store<DeviceClass> = self.store();
        }
        devices
    }

    /// Sends events of the plugins' objects to `sink` from now on.
    pub(crate) fn send_events_to(&self, sink: impl Fn(ClusterEvent) + Send + Sync + 'static) {
        // A second sink would be a second scheduler with the same handle, which nobody builds.
        let _ = self.sink.set(Box::new(sink));
    }

    /// Waits until all objects that plugins asked for are known.
    pub(crate) async fn synced(&self) {
        let waits = std::mem::take(&mut self.used.lock().unwrap_or_else(PoisonError::into_inner).synced);
        futures_util::future::join_all(waits).await;
    }
}

fn event_of<K: Object>(change: &Change<K>) -> ObjectEvent {
    let (action, old) = match change {
        Change::Added(_) => (Action::Added, None),
        Change::Updated { old, .. } => {
            (Action::Updated, Some(old.get().clone() as Arc<dyn Any + Send + Sync>))
        }
        Change::Deleted(_) => (Action::Deleted, None),
    };
    ObjectEvent::new(action, change.object().clone(), old)
}

/// A plugin, or the reason why its arguments are refused.
pub type Made = Result<Arc<dyn Plugin>, PluginArgsError>;

/// Makes a plugin from its arguments.
pub type Factory = Arc<dyn Fn(&PluginArgs, &Handle) -> Made + Send + Sync>;

/// A row of the table of plugins that come with the scheduler.
pub struct PluginEntry {
    pub name: &'static str,
    /// Weight of its score in the default profile; zero if it does not score.
    pub weight: i64,
    pub new: fn(&PluginArgs, &Handle) -> Made,
}

/// The plugins that profiles can name.
#[derive(Clone)]
pub struct Registry(HashMap<&'static str, Factory>);

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// A plugin cannot be registered.
#[derive(Debug, thiserror::Error)]
#[error("a plugin named {0:?} already exists")]
pub struct RegistryError(pub String);

impl Default for Registry {
    /// The plugins that come with the scheduler.
    fn default() -> Self {
        Self(PLUGINS.iter().map(|entry| (entry.name, Arc::new(entry.new) as Factory)).collect())
    }
}

impl Registry {
    /// Adds a plugin. A profile must still enable it.
    pub fn register(
        &mut self,
        name: &'static str,
        new: impl Fn(&PluginArgs, &Handle) -> Made + Send + Sync + 'static,
    ) -> Result<(), RegistryError> {
        if self.0.contains_key(name) {
            return Err(RegistryError(name.to_owned()));
        }
        self.0.insert(name, Arc::new(new));
        Ok(())
    }

    pub fn get(&self, name: &str) -> Option<&Factory> {
        self.0.get(name)
    }
}
