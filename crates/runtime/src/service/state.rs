//! The runtime's state in memory: sandboxes and containers, found by id.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferrite_cri::Error;
use ferrite_cri::v1::{ContainerConfig, PodSandboxConfig};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::records::{ContainerRecord, SandboxRecord};
use crate::cgroup::systemd::parent_path;
use crate::supervisor::protocol::Exit;

/// Exit code of a container nobody saw end.
pub const UNKNOWN_EXIT: i32 = 255;
/// Exit code of a container that could not be started, as containerd has it.
pub const START_ERROR_EXIT: i32 = 128;

pub struct Sandbox {
    pub id: String,
    pub config: PodSandboxConfig,
    /// Persistent files of this sandbox.
    pub state_dir: PathBuf,
    /// Socket and pinned namespaces.
    pub run_dir: PathBuf,
    record: Mutex<SandboxRecord>,
    /// Held while changing the sandbox: changes happen one after another.
    pub gate: tokio::sync::Mutex<()>,
    /// Ends the task that listens to the supervisor.
    pub listening: CancellationToken,
}

impl Sandbox {
    pub fn new(
        id: String,
        config: PodSandboxConfig,
        state_dir: PathBuf,
        run_dir: PathBuf,
        record: SandboxRecord,
    ) -> Self {
        Self {
            id,
            config,
            state_dir,
            run_dir,
            record: Mutex::new(record),
            gate: tokio::sync::Mutex::new(()),
            listening: CancellationToken::new(),
        }
    }

    pub fn record(&self) -> SandboxRecord {
        lock(&self.record).clone()
    }

    pub fn update(&self, change: impl FnOnce(&mut SandboxRecord)) -> SandboxRecord {
        let mut record = lock(&self.record);
        change(&mut record);
        record.clone()
    }

    /// The group its containers' groups are made in.
    pub fn cgroup_parent(&self, default: &str) -> String {
        let given = self.config.linux.as_ref().map(|linux| linux.cgroup_parent.as_str()).unwrap_or_default();
        if given.is_empty() { format!("{default}/{}", self.id) } else { parent_path(given) }
    }
}

/// Where a container stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    Created,
    Running { pid: i32, started_at: i64 },
    Exited(Ended),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    pub started_at: i64,
    pub finished_at: i64,
    pub code: i32,
    pub reason: &'static str,
    pub message: String,
}

impl From<Exit> for Ended {
    fn from(exit: Exit) -> Self {
        let reason = match (exit.oom_killed, exit.code) {
            (true, _) => "OOMKilled",
            (false, 0) => "Completed",
            (false, _) => "Error",
        };
        Self {
            started_at: exit.started_at,
            finished_at: exit.finished_at,
            code: exit.code,
            reason,
            message: String::new(),
        }
    }
}

/// Disk usage of a container's writable layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerUsage {
    /// When it was counted.
    pub at: std::time::Instant,
    pub bytes: u64,
    pub inodes: u64,
}

pub struct Container {
    pub id: String,
    pub sandbox: String,
    pub config: ContainerConfig,
    pub bundle: PathBuf,
    record: Mutex<ContainerRecord>,
    layer_usage: Mutex<Option<LayerUsage>>,
    /// The files of the layer are being counted.
    pub counting: AtomicBool,
    pub status: watch::Sender<Status>,
    /// Held while changing the container.
    pub gate: tokio::sync::Mutex<()>,
}

impl Container {
    pub fn new(
        id: String,
        sandbox: String,
        config: ContainerConfig,
        bundle: PathBuf,
        record: ContainerRecord,
        status: Status,
    ) -> Self {
        Self {
            id,
            sandbox,
            config,
            bundle,
            record: Mutex::new(record),
            layer_usage: Mutex::new(None),
            counting: AtomicBool::new(false),
            status: watch::Sender::new(status),
            gate: tokio::sync::Mutex::new(()),
        }
    }

    pub fn record(&self) -> ContainerRecord {
        lock(&self.record).clone()
    }

    pub fn update(&self, change: impl FnOnce(&mut ContainerRecord)) -> ContainerRecord {
        let mut record = lock(&self.record);
        change(&mut record);
        record.clone()
    }

    pub fn layer_usage(&self) -> Option<LayerUsage> {
        *lock(&self.layer_usage)
    }

    pub fn note_layer_usage(&self, usage: LayerUsage) {
        *lock(&self.layer_usage) = Some(usage);
    }

    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Waits until the container has ended.
    pub async fn ended(&self) {
        // The sender lives in this very container, so the wait cannot fail.
        let _ = self.status.subscribe().wait_for(|status| matches!(status, Status::Exited(_))).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data are plain values, replaced as a whole: a panic elsewhere leaves them sound.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
pub struct Tables {
    pub sandboxes: BTreeMap<String, Arc<Sandbox>>,
    pub containers: BTreeMap<String, Arc<Container>>,
}

/// The tables behind a lock that is never held across a wait.
#[derive(Default)]
pub struct Index(RwLock<Tables>);

impl Index {
    pub fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// By id, or by a beginning of it that fits only one.
    pub fn sandbox(&self, id: &str) -> Result<Arc<Sandbox>, Error> {
        find(&self.read().sandboxes, id).ok_or_else(|| Error::not_found(format!("sandbox {id:?} not found")))
    }

    /// By id, or by a beginning of it that fits only one.
    pub fn container(&self, id: &str) -> Result<Arc<Container>, Error> {
        find(&self.read().containers, id)
            .ok_or_else(|| Error::not_found(format!("container {id:?} not found")))
    }

    pub fn containers_of(&self, sandbox: &str) -> Vec<Arc<Container>> {
        self.read().containers.values().filter(|c| c.sandbox == sandbox).cloned().collect()
    }
}

fn find<T>(table: &BTreeMap<String, Arc<T>>, id: &str) -> Option<Arc<T>> {
    if id.is_empty() {
        return None;
    }
    let mut candidates = table.range(id.to_owned()..).take_while(|(key, _)| key.starts_with(id));
    let (key, first) = candidates.next()?;
    (key == id || candidates.next().is_none()).then(|| first.clone())
}

/// A random identifier of the form other runtimes use.
pub fn new_id() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().fold(String::with_capacity(64), |mut id, byte| {
        use std::fmt::Write;
        let _ = write!(id, "{byte:02x}");
        id
    })
}
