//! Containers for a person at a shell: docker's commands over the embedded runtime, without a cluster.
//!
//! [`Engine`] has the operations: typed, without printing, and without a daemon. Records and locks are
//! files, running containers belong to their supervisors, and a process that the supervisor starts
//! ([`Engine::ended`]) does the work after an end. [`cli`] is a thin view of the engine; an HTTP API can
//! stand beside it.

pub mod cli;
mod engine;
mod names;
mod paths;
mod ports;
mod proxy;
mod record;
mod restart;
mod template;
mod units;

pub use engine::{
    Change, ChangeKind, CreateRequest, Endpoint, Engine, EngineError, Event, Follow, ImageSummary, LogLine,
    Network, NetworkRequest, Pulled, Removed, View, Volume, VolumeRequest,
};
use engine::{familiar as engine_familiar, files, start_failure_code as engine_start_code};
pub use paths::{DEFAULT_DATA, Paths};
pub use ports::{PortBinding, Protocol, PublishedPort};
pub use record::{
    Config, Container, Device, HostConfig, Joined, MountKind, MountPoint, State, Status, Ulimit,
};
pub use restart::RestartPolicy;
