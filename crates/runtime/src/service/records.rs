//! The runtime's files on disk. A directory without its `state.json` was never finished.
//!
//! ```text
//! <root>/sandboxes/<id>/            config.pb state.json resolv.conf hostname hosts
//! <root>/sandboxes/<id>/c/<id>/     config.pb state.json config.json bundle.json exit.json upper/ work/ rootfs/
//! <run>/sandboxes/<id>/             setup.json supervisor s.sock netns shm/
//! ```

use std::io;
use std::path::{Path, PathBuf};

use prost::Message;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::spec::Identity;
use crate::supervisor::protocol::PidNamespace;
use crate::sys;

pub const SANDBOXES: &str = "sandboxes";
pub const CONTAINERS: &str = "c";
const CONFIG: &str = "config.pb";
const STATE: &str = "state.json";

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct SandboxRecord {
    pub created_at: i64,
    pub ready: bool,
    pub ips: Vec<String>,
    pub runtime_handler: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ContainerRecord {
    pub created_at: i64,
    pub image_id: String,
    pub image_ref: String,
    pub identity: Identity,
    pub stop_signal: i32,
    pub cgroup: String,
    pub pid: PidNamespace,
    pub log_path: Option<PathBuf>,
    /// The container was to be started and could not be.
    pub start_failure: Option<StartFailure>,
    /// Images mounted in the container; they stay as long as it does.
    #[serde(default)]
    pub volume_images: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct StartFailure {
    pub at: i64,
    pub message: String,
}

pub fn write<C: Message, S: Serialize>(directory: &Path, config: &C, state: &S) -> io::Result<()> {
    sys::write_atomic(&directory.join(CONFIG), &config.encode_to_vec(), false)?;
    write_state(directory, state)
}

pub fn write_state<S: Serialize>(directory: &Path, state: &S) -> io::Result<()> {
    sys::write_atomic(&directory.join(STATE), &serde_json::to_vec(state)?, false)
}

/// `None` when the directory was never finished or cannot be understood.
pub fn read<C: Message + Default, S: DeserializeOwned>(directory: &Path) -> Option<(C, S)> {
    let state = serde_json::from_slice(&std::fs::read(directory.join(STATE)).ok()?).ok()?;
    let config = C::decode(std::fs::read(directory.join(CONFIG)).ok()?.as_slice()).ok()?;
    Some((config, state))
}
