//! Volumes of CSI drivers.
//!
//! A driver registers itself (`registration.rs`) and is called over its socket. `wanted.rs` reads the pod's
//! request, `policy.rs` the driver's object; `mount.rs` stages and publishes, `unmount.rs` takes back.
//! `ledger.rs` knows
//! which pods use which volumes, and learns it from disk at the start.
//!
//! Drivers hang, lie and restart. Each call has a time limit, one volume has one operation at a time, and no volume
//! waits for another's.

mod allocatable;
mod attach;
mod data;
mod drivers;
mod expand;
mod figures;
mod ledger;
mod mount;
mod node_info;
mod paths;
mod policy;
mod registration;
mod republish;
mod secrets;
#[cfg(test)]
mod tests;
mod unmount;
mod wanted;

pub(crate) use registration::CsiPlugins;

use super::plugins::{PersistentPlugin, PersistentSetUp, SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError, Tokens};
use drivers::Drivers;
use ferrite_client::{EventRecorder, Informer, Scope};
use ferrite_csi::CallError;
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::Node;
use ledger::{Ledger, VolumeId};
use paths::Paths;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedMutexGuard, watch};
use wanted::Wanted;

/// Why a CSI volume is not ready, in upstream's words where it has some.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CsiError {
    #[error("kubernetes.io/csi: driver name {0} not found in the list of registered CSI drivers")]
    NotRegistered(String),
    #[error("kubernetes.io/csi: {0:?} cannot be part of a path")]
    Name(String),
    #[error("volume mode {mode:?} not supported by driver {driver} ({offered})")]
    NoLifecycle { mode: &'static str, driver: String, offered: String },
    #[error("kubernetes.io/csi: could not read {what}: {problem}")]
    Api { what: String, problem: String },
    #[error("timed out waiting for external-attacher of {driver} CSI driver to attach volume {handle}")]
    AttachTimeout { driver: String, handle: String },
    #[error("volume {handle} is not attached for volume attachment {attachment}: {problem}")]
    NotAttached { handle: String, attachment: String, problem: String },
    #[error("fetching the secret {0}/{1} failed: {2}")]
    Secret(String, String, String),
    #[error("kubernetes.io/csi: {step} failed: {source}")]
    Call { step: &'static str, source: CallError },
    #[error("applyFSGroup failed for vol {handle}: {source}")]
    Group { handle: String, source: io::Error },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("the driver {driver} published volume {handle}, but nothing is mounted at {path}")]
    NothingMounted { driver: String, handle: String, path: PathBuf },
    #[error("{0}")]
    Republish(String),
    #[error("the pod ends")]
    Interrupted,
}

/// The CSI volumes of this node.
#[derive(Clone)]
pub(crate) struct Csi {
    shared: Arc<Shared>,
}

struct Shared {
    node_name: String,
    client: kube::Client,
    tokens: Arc<Tokens>,
    recorder: EventRecorder,
    node: Informer<Node>,
    /// Changes with every change of the Node.
    node_seen: watch::Receiver<u64>,
    paths: Paths,
    drivers: Drivers,
    ledger: Mutex<Ledger>,
    in_use: watch::Sender<BTreeSet<String>>,
    operations: Mutex<HashMap<VolumeId, Arc<tokio::sync::Mutex<()>>>>,
    republished: republish::Republished,
    scope: Scope,
}

impl Csi {
    /// Reads the files of an earlier kubelet below `root`.
    pub(crate) fn new(
        root: &Path,
        node_name: &str,
        client: kube::Client,
        tokens: Arc<Tokens>,
        recorder: EventRecorder,
        node: Informer<Node>,
        scope: &Scope,
    ) -> Self {
        let paths = Paths::new(root);
        let ledger = Ledger::read(&paths);
        let (in_use, _) = watch::channel(ledger.in_use());
        let (seen, node_seen) = watch::channel(0);
        node.subscribe(move |_| seen.send_modify(|count| *count += 1));
        Self {
            shared: Arc::new(Shared {
                node_name: node_name.to_owned(),
                client,
                tokens,
                recorder,
                node,
                node_seen,
                paths,
                drivers: Drivers::default(),
                ledger: Mutex::new(ledger),
                in_use,
                operations: Mutex::default(),
                republished: republish::Republished::default(),
                scope: scope.child(),
            }),
        }
    }

    fn with_ledger<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = self.shared.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = change(&mut ledger);
        let now = ledger.in_use();
        self.shared.in_use.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
        answer
    }

    /// Waits until no other operation on the volume is under way.
    async fn exclusive(&self, id: &VolumeId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut operations = self.shared.operations.lock().unwrap_or_else(PoisonError::into_inner);
            operations.retain(|_, lock| Arc::strong_count(lock) > 1);
            operations.entry(id.clone()).or_default().clone()
        };
        lock.lock_owned().await
    }
}

pub(super) const PERSISTENT: PersistentPlugin = PersistentPlugin {
    matches: |spec| spec.csi.is_some(),
    set_up: |request: PersistentSetUp<'_>| {
        async move {
            let source = request.spec.csi.as_ref().ok_or(SourceError::Unsupported)?;
            let (name, claim) = (request.name, request.claim);
            let wanted = Wanted::persistent(name, request.spec, source, claim, request.read_only)?;
            set_up(request.pod, wanted, Some(request)).await
        }
        .boxed()
    },
};

pub(super) const INLINE: VolumePlugin = VolumePlugin {
    matches: |volume| volume.csi.is_some(),
    set_up: |request: SetUp<'_>| {
        async move {
            let source = request.volume.csi.as_ref().ok_or(SourceError::Unsupported)?;
            let wanted =
                Wanted::inline(&request.id.uid, &request.id.namespace, &request.volume.name, source)?;
            set_up(request, wanted, None).await
        }
        .boxed()
    },
};

async fn set_up(
    request: SetUp<'_>,
    wanted: Wanted,
    persistent: Option<PersistentSetUp<'_>>,
) -> Result<ReadyVolume, SourceError> {
    let csi = &request.volumes.csi;
    let ready = tokio::select! {
        ready = csi.set_up(request, &wanted, persistent) => ready,
        () = request.ending.cancelled() => Err(CsiError::Interrupted),
    };
    Ok(ready?)
}

/// Runs work on files away from the threads that must not block.
async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, CsiError> {
    let done = tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)));
    done.map_err(|source| CsiError::Io { path: path.to_owned(), source })
}
