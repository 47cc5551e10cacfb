//! Device plugins v1beta1: programs that offer devices of this node as extended resources.
//!
//! `state.rs` decides (pure), `checkpoint.rs` is the file that survives a restart, `registration.rs` is the socket at
//! which plugins come, `options.rs` has the settings of containers. This module holds the state and calls
//! the plugins.
//!
//! Plugins are called without a lock held: a plugin that hangs holds up only pods that ask for its devices.

mod checkpoint;
mod options;
mod registration;
mod state;

pub(crate) use options::ContainerOptions;
pub(crate) use registration::{DevicePlugins, is_extended_resource};
pub(crate) use state::{ContainerDevices, Device, NO_NUMA};

use crate::clock::{self, Clock};
use crate::pod::model::{self, ContainerKind, PodContainer, PodId};
use crate::topology::{DeviceView, at_once};
use crate::{quantity, state_file};
use ferrite_client::Scope;
use ferrite_devices::deviceplugin::DevicePluginOptions;
use ferrite_devices::{CallError, DevicePlugin};
use k8s_openapi::api::core::v1::{Pod, ResourceStatus};
use state::{DeviceError, DeviceState, Ids, Preferences, Selection, Wish};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Resources beyond this are not registered.
const MOST_RESOURCES: usize = 256;
/// A plugin is asked which devices it prefers at most so often for one container: others may take devices meanwhile.
const MOST_QUESTIONS: usize = 8;

/// Why a container has no devices, or cannot start with them.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AllocateError {
    #[error(transparent)]
    Devices(#[from] DeviceError),
    #[error("unknown Device Plugin {0}")]
    NoPlugin(String),
    #[error("endpoint {0} has been stopped")]
    Stopped(String),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preferred(CallError),
    #[error("no containers return in allocation response of {0}")]
    EmptyAnswer(String),
    #[error("failed to write checkpoint file {file:?}: {0}", file = checkpoint::FILE)]
    Checkpoint(io::Error),
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(CallError),
    #[error(
        "no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}"
    )]
    NothingToStart { pod: String, container: String, resource: String },
}

impl AllocateError {
    /// Devices are there, and others have them.
    pub(crate) fn is_shortage(&self) -> bool {
        matches!(self, AllocateError::Devices(DeviceError::Unavailable { .. }))
    }
}

/// Devices of init containers that have ended by the time the next container starts, by resource.
pub(crate) type Reusable = BTreeMap<String, Ids>;

/// A plugin that registered.
struct Registered {
    plugin: DevicePlugin,
    options: DevicePluginOptions,
    /// Tells a plugin from its successor.
    generation: u64,
    scope: Scope,
}

#[derive(Default)]
struct Inner {
    state: DeviceState,
    plugins: BTreeMap<String, Registered>,
    generation: u64,
}

struct Shared {
    dir: PathBuf,
    inner: Mutex<Inner>,
    /// One writer of the checkpoint at a time, so that the newest state is the last one written.
    saving: tokio::sync::Mutex<()>,
    clock: Clock,
    scope: Scope,
    /// A plugin has gone: the time at which it is forgotten must be found anew.
    gone: Notify,
    /// Asks for a report of the node's status.
    refresh: Arc<Notify>,
    /// Wakes the worker of a pod.
    wake: Box<dyn Fn(&str) + Send + Sync>,
    /// Something was given that is not in the checkpoint yet.
    is_unsaved: AtomicBool,
    /// There was no checkpoint: this node is new, or was made anew.
    is_new: AtomicBool,
}

/// The device manager. Clones share it.
#[derive(Clone)]
pub(crate) struct Devices(Arc<Shared>);

impl Devices {
    /// Reads the checkpoint in the directory of plugins. `wake` is called with the UID of a pod whose status changed.
    pub(crate) fn open(
        dir: &Path,
        clock: Clock,
        refresh: Arc<Notify>,
        wake: impl Fn(&str) + Send + Sync + 'static,
        scope: &Scope,
    ) -> io::Result<Self> {
        ferrite_hostfs::private_dir(dir)?;
        let found = state_file::read(&dir.join(checkpoint::FILE))?;
        let is_new = found.is_none();
        let restored = found.map(|bytes| checkpoint::read(&bytes)).transpose().unwrap_or_else(|error| {
            // As upstream: pods that run go on, and the free devices are not known for certain.
            tracing::error!(path = %dir.display(), %error, "could not read the checkpoint of devices; starting without it");
            None
        });
        let restored = restored.unwrap_or_default();
        let state = DeviceState::restored(restored.pods, restored.registered, clock.now());
        Ok(Self(Arc::new(Shared {
            dir: dir.to_owned(),
            inner: Mutex::new(Inner { state, ..Inner::default() }),
            saving: tokio::sync::Mutex::default(),
            clock,
            scope: scope.clone(),
            gone: Notify::new(),
            refresh,
            wake: Box::new(wake),
            is_unsaved: AtomicBool::new(false),
            is_new: AtomicBool::new(is_new),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True once, if there was no checkpoint when the kubelet started.
    pub(crate) fn take_new(&self) -> bool {
        self.0.is_new.swap(false, Ordering::AcqRel)
    }

    /// Capacity and allocatable amount of each resource of a plugin.
    pub(crate) fn capacity(&self) -> BTreeMap<String, (usize, usize)> {
        self.lock().state.capacity()
    }

    /// The node's usable amount of each resource, for the admission of one pod: a pod keeps its devices
    /// even while the plugin is away.
    pub(crate) fn allocatable_for(&self, pod: &str) -> BTreeMap<String, usize> {
        let inner = self.lock();
        let mut amounts: BTreeMap<String, usize> =
            inner.state.capacity().into_iter().map(|(name, (_, usable))| (name, usable)).collect();
        if inner.state.pods().contains_key(pod) {
            for (name, used) in inner.state.in_use_counts() {
                let amount = amounts.entry(name).or_default();
                *amount = used.max(*amount);
            }
        }
        amounts
    }

    /// UIDs of the pods that have devices.
    pub(crate) fn pods(&self) -> Vec<String> {
        self.lock().state.pods().keys().cloned().collect()
    }

    /// The healthy devices of each resource.
    pub(crate) fn allocatable(&self) -> BTreeMap<String, BTreeMap<String, Device>> {
        self.lock().state.allocatable()
    }

    /// The devices of a container.
    pub(crate) fn given(&self, pod: &str, container: &str) -> ContainerDevices {
        self.lock().state.given(pod, container).cloned().unwrap_or_default()
    }

    /// The health of a container's devices.
    pub(crate) fn statuses(&self, pod: &str, container: &str) -> Vec<ResourceStatus> {
        options::resource_statuses(&self.lock().state, pod, container)
    }

    /// The resources of plugins that a container asks for.
    fn wanted(&self, pod: &Pod, container: &PodContainer) -> Vec<(String, usize)> {
        let inner = self.lock();
        wanted(pod, container, |resource| inner.state.is_device_resource(resource))
    }

    /// Gives every container of the pod its devices, wherever they are.
    async fn allocate(&self, pod: &Pod) -> Result<(), AllocateError> {
        let mut reusable = Reusable::new();
        for container in model::containers(pod).iter().filter(|c| c.kind != ContainerKind::Ephemeral) {
            self.allocate_container(pod, container, None, &mut reusable).await?;
        }
        self.save_allocations().await
    }

    /// Allocates devices to a container, near to the NUMA nodes of `affinity`. The allocation is not on
    /// disk before [`Self::save_allocations`].
    pub(crate) async fn allocate_container(
        &self,
        pod: &Pod,
        container: &PodContainer,
        affinity: Option<&BTreeSet<i64>>,
        reusable: &mut Reusable,
    ) -> Result<(), AllocateError> {
        let uid = PodId::of(pod).uid;
        for (resource, required) in self.wanted(pod, container) {
            let reuse = reusable.get(&resource).cloned().unwrap_or_default();
            let wish = Wish {
                pod: &uid,
                container: container.name(),
                resource: &resource,
                required,
                reusable: &reuse,
                affinity,
                has_preference: false,
            };
            if self.allocate_one(wish).await? {
                self.0.is_unsaved.store(true, Ordering::Release);
            }
        }
        // Devices of an init container are free for the containers after it, once each.
        let inner = self.lock();
        for (resource, given) in inner.state.given(&uid, container.name()).into_iter().flatten() {
            let free = reusable.entry(resource.clone()).or_default();
            match container.kind == ContainerKind::Init && !container.is_sidecar() {
                true => free.extend(given.ids()),
                false => free.retain(|id| !given.ids().contains(id)),
            }
        }
        Ok(())
    }

    pub(crate) async fn save_allocations(&self) -> Result<(), AllocateError> {
        match self.0.is_unsaved.swap(false, Ordering::AcqRel) {
            true => self.save().await.map_err(AllocateError::Checkpoint),
            false => Ok(()),
        }
    }

    /// The devices that the containers of a pod ask for, seen together.
    pub(crate) fn views(
        &self,
        pod: &Pod,
        containers: &[PodContainer],
        reusable: &Reusable,
    ) -> BTreeMap<String, DeviceView> {
        let uid = PodId::of(pod).uid;
        let names: BTreeSet<String> =
            containers.iter().flat_map(|c| self.wanted(pod, c)).map(|(name, _)| name).collect();
        let inner = self.lock();
        let view = |name: String| {
            let need = |c: &PodContainer| {
                let mut wanted = wanted(pod, c, |resource| resource == name).into_iter();
                wanted.next().map_or(0, |(_, amount)| amount)
            };
            let given = containers.iter().filter_map(|c| inner.state.given(&uid, c.name())?.get(&name));
            let (free, all) = inner.state.free(&name);
            let view = DeviceView {
                has: given.flat_map(|given| given.ids()).collect(),
                request: at_once(containers, need),
                reusable: reusable.get(&name).cloned().unwrap_or_default(),
                free,
                all,
            };
            (name, view)
        };
        names.into_iter().map(view).collect()
    }

    /// Returns true if something was allocated.
    async fn allocate_one(&self, mut wish: Wish<'_>) -> Result<bool, AllocateError> {
        let mut preferences = Preferences::new();
        let (devices, plugin) = loop {
            let query = {
                let mut inner = self.lock();
                let options = inner.plugins.get(wish.resource).map(|one| one.options);
                wish.has_preference = options.is_some_and(|o| o.get_preferred_allocation_available)
                    && preferences.len() < MOST_QUESTIONS;
                match inner.state.select(&wish, &preferences)? {
                    Selection::Nothing => return Ok(false),
                    Selection::Ask(query) => query,
                    Selection::Devices(devices) => {
                        inner.state.reserve(&wish, &devices);
                        break (devices, inner.plugins.get(wish.resource).map(|one| one.plugin.clone()));
                    }
                }
            };
            let Some(plugin) = self.plugin(wish.resource) else {
                return Err(AllocateError::Stopped(wish.resource.to_owned()));
            };
            let list = |ids: &Ids| ids.iter().cloned().collect();
            let answer =
                plugin.preferred(list(&query.available), list(&query.must_include), query.size).await;
            let answer = answer.map_err(AllocateError::Preferred)?;
            preferences.insert(query, answer.into_iter().collect());
        };
        let given = match plugin {
            None => Err(AllocateError::NoPlugin(wish.resource.to_owned())),
            Some(plugin) => match plugin.allocate(devices.iter().cloned().collect()).await {
                Err(e) => Err(e.into()),
                Ok(answer) => answer
                    .container_responses
                    .into_iter()
                    .next()
                    .ok_or_else(|| AllocateError::EmptyAnswer(wish.resource.to_owned())),
            },
        };
        let mut inner = self.lock();
        match given {
            Ok(response) => {
                inner.state.give(&wish, &devices, response);
                Ok(true)
            }
            Err(e) => {
                inner.state.unreserve(&wish);
                Err(e)
            }
        }
    }

    fn plugin(&self, resource: &str) -> Option<DevicePlugin> {
        self.lock().plugins.get(resource).map(|one| one.plugin.clone())
    }

    /// Prepares a container's devices for its start, and returns the settings for it.
    pub(crate) async fn prepare(
        &self,
        pod: &Pod,
        container: &PodContainer,
    ) -> Result<ContainerOptions, AllocateError> {
        let uid = PodId::of(pod).uid;
        let wanted = self.wanted(pod, container);
        let has_all = {
            let inner = self.lock();
            let given = inner.state.given(&uid, container.name());
            wanted.iter().all(|(resource, _)| given.is_some_and(|given| given.contains_key(resource)))
        };
        if !has_all {
            // A plugin that came after the pod was admitted.
            self.allocate(pod).await?;
        }
        for (resource, _) in &wanted {
            let plugin = {
                let inner = self.lock();
                let one = inner.plugins.get(resource).filter(|one| one.options.pre_start_required);
                one.map(|one| one.plugin.clone())
            };
            let Some(plugin) = plugin else { continue };
            let ids = self.given(&uid, container.name()).get(resource).map(|given| given.ids());
            let ids = ids.ok_or_else(|| AllocateError::NothingToStart {
                pod: uid.clone(),
                container: container.name().to_owned(),
                resource: resource.clone(),
            })?;
            plugin.pre_start(ids.into_iter().collect()).await.map_err(AllocateError::PreStart)?;
        }
        let inner = self.lock();
        Ok(inner.state.given(&uid, container.name()).map(options::container_options).unwrap_or_default())
    }

    /// The pod has ended: its devices are free.
    pub(crate) async fn release(&self, pod: &str) {
        if self.lock().state.release(pod) {
            self.save_or_warn().await;
        }
    }

    /// Frees the devices of pods that do not exist any longer.
    pub(crate) async fn retain(&self, live: &BTreeSet<String>) {
        if self.lock().state.retain(live) {
            self.save_or_warn().await;
        }
    }

    async fn save(&self) -> io::Result<()> {
        let _last = self.0.saving.lock().await;
        let (path, bytes) = {
            let inner = self.lock();
            let bytes = checkpoint::write(inner.state.pods(), &inner.state.registered());
            (self.0.dir.join(checkpoint::FILE), bytes)
        };
        let written = tokio::task::spawn_blocking(move || state_file::write(&path, &bytes)).await;
        written.unwrap_or_else(|e| Err(io::Error::other(e)))
    }

    async fn save_or_warn(&self) {
        if let Err(error) = self.save().await {
            tracing::warn!(%error, "could not write the checkpoint of devices; the next change tries again");
        }
    }

    /// Forgets plugins that are gone for too long, until the scope ends.
    pub(crate) async fn forget_plugins(self) {
        loop {
            let next = self.lock().state.next_expiry();
            let pause = next.map(|at| clock::since(self.0.clock.now(), at));
            tokio::select! {
                () = tokio::time::sleep(pause.unwrap_or_default()), if pause.is_some() => {}
                () = self.0.gone.notified() => {}
            }
            let expired = self.lock().state.expire(self.0.clock.now());
            if expired {
                self.save_or_warn().await;
                self.0.refresh.notify_one();
            }
        }
    }
}

/// The resources of plugins that a container asks for. As upstream, limits count: requests are equal to them.
fn wanted(pod: &Pod, container: &PodContainer, is_device: impl Fn(&str) -> bool) -> Vec<(String, usize)> {
    let claims = pod.status.as_ref().and_then(|s| s.extended_resource_claim_status.as_ref());
    let by_claim = |resource: &str| {
        let mut mappings = claims.into_iter().flat_map(|c| &c.request_mappings);
        mappings.any(|m| m.container_name == container.name() && m.resource_name == resource)
    };
    let limits = container.spec.resources.as_ref().and_then(|r| r.limits.as_ref());
    let amounts = limits.into_iter().flatten().filter_map(|(name, amount)| {
        let amount = usize::try_from(quantity::value(amount)?).ok().filter(|amount| *amount > 0)?;
        (is_device(name) && !by_claim(name)).then(|| (name.clone(), amount))
    });
    amounts.collect()
}

#[cfg(test)]
pub(crate) mod tests;
