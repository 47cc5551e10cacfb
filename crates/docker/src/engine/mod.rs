//! The operations on containers and images, without printing.

mod create;
mod describe;
mod ending;
mod events;
pub(crate) mod files;
mod hosts;
mod images;
mod inspect;
mod lifecycle;
mod logs;
mod network;
mod networks;
mod start;
mod volumes;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ferrite_cri::with_causes;
use serde::Serialize;

use crate::paths::Paths;
use crate::record::{self, Container, Lock, State};

pub use create::{CreateRequest, VolumeRequest};
pub use events::{Event, Follow};
pub use files::{Change, ChangeKind};
pub use hosts::Endpoint;
pub use images::{ImageSummary, Pulled, Removed, familiar};
pub use logs::LogLine;
pub use networks::{Network, NetworkRequest};
pub use start::start_failure_code;
pub use volumes::Volume;

/// Why an operation failed, in the words docker's clients know.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    #[error("No such container: {0}")]
    NoSuchContainer(String),
    #[error("No such image: {0}")]
    NoSuchImage(String),
    #[error("get {0}: no such volume")]
    NoSuchVolume(String),
    #[error("network {0} not found")]
    NoSuchNetwork(String),
    /// The object is not in a state for that, or the name is taken.
    #[error("{0}")]
    Conflict(String),
    /// The request makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The program could not be run.
    #[error("{0}")]
    Start(String),
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("{0}")]
    Internal(String),
}

pub(crate) type Result<T> = std::result::Result<T, EngineError>;

impl EngineError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl From<ferrite_runtime::image::ImageError> for EngineError {
    fn from(error: ferrite_runtime::image::ImageError) -> Self {
        Self::Internal(with_causes(&error))
    }
}

impl From<ferrite_cri::Error> for EngineError {
    fn from(error: ferrite_cri::Error) -> Self {
        Self::Internal(error.to_string())
    }
}

/// Runs work that blocks away from the threads that must not.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(EngineError::Internal(format!("the work ended badly: {error}"))))
}

/// Containers, images, volumes and a network under one data directory. Any number of processes may work on
/// the same one at the same time; none has to stay.
#[derive(Debug, Clone)]
pub struct Engine {
    paths: Arc<Paths>,
}

/// A container with its state at one moment.
#[derive(Debug, Clone, Serialize)]
pub struct View {
    pub container: Container,
    pub state: State,
}

impl Engine {
    /// Makes the directories that are missing, for root alone.
    pub fn open(paths: Paths) -> Result<Self> {
        // Writable layers and volumes may hold set-user-id programs: users of the node must not reach them.
        for path in [paths.root().to_owned(), paths.containers(), paths.volumes()] {
            ferrite_hostfs::private_dir(&path)
                .map_err(EngineError::io(format!("create {}", path.display())))?;
        }
        Ok(Self { paths: Arc::new(paths) })
    }

    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    fn directory(&self, id: &str) -> PathBuf {
        self.paths.container(id)
    }

    /// Every container, the newest first.
    pub fn list(&self) -> Result<Vec<View>> {
        let directory = self.paths.containers();
        let entries = fs::read_dir(&directory).map_err(EngineError::io("list containers"))?;
        let mut all: Vec<View> = entries
            .flatten()
            .filter(|entry| entry.file_name().len() == 64)
            .filter_map(|entry| {
                let container = Container::read(&entry.path()).ok()?;
                let state = State::read(&entry.path()).unwrap_or_default().effective();
                Some(View { container, state })
            })
            .collect();
        all.sort_by_key(|view| std::cmp::Reverse(view.container.created));
        Ok(all)
    }

    /// The container a name, an id or the beginning of one means.
    pub fn find(&self, name: &str) -> Result<View> {
        let missing = || EngineError::NoSuchContainer(name.to_owned());
        let all = self.list()?;
        let wanted = name.strip_prefix('/').unwrap_or(name);
        let exact = |view: &&View| view.container.id == wanted || view.container.name == wanted;
        if let Some(view) = all.iter().find(exact) {
            return Ok(view.clone());
        }
        if wanted.is_empty() {
            return Err(missing());
        }
        let mut matching = all.iter().filter(|view| view.container.id.starts_with(wanted));
        match (matching.next(), matching.next()) {
            (Some(view), None) => Ok(view.clone()),
            (Some(_), Some(_)) => {
                Err(EngineError::Invalid(format!("Multiple IDs found with provided prefix: {wanted}")))
            }
            _ => Err(missing()),
        }
    }

    fn view(&self, id: &str) -> Result<View> {
        let directory = self.directory(id);
        let missing = |_| EngineError::NoSuchContainer(id.to_owned());
        let container = Container::read(&directory).map_err(missing)?;
        let state = State::read(&directory).unwrap_or_default();
        Ok(View { container, state })
    }

    /// Takes a container's lock and reads it as recorded.
    async fn locked(&self, id: &str) -> Result<(Lock, View)> {
        let (engine, id) = (self.clone(), id.to_owned());
        blocking(move || {
            let lock = record::lock_container(&engine.directory(&id))
                .map_err(|_| EngineError::NoSuchContainer(id.clone()))?;
            // It may have gone while we waited.
            let view = engine.view(&id)?;
            Ok((lock, view))
        })
        .await
    }

    /// Held while names are given and images are removed.
    async fn registry_lock(&self) -> Result<Lock> {
        let path = self.paths.root().join("lock");
        blocking(move || record::lock(&path).map_err(EngineError::io("lock the engine"))).await
    }

    fn save(&self, id: &str, state: &State) -> Result<()> {
        state.write(&self.directory(id)).map_err(EngineError::io(format!("record container {id}")))
    }
}
