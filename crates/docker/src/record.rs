//! The record of a container, as files in its directory.
//!
//! `container.json` describes the container and changes only with its name; `state.json` holds its state.
//! Both are replaced as a whole. A process that changes a container holds its lock.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use ferrite_runtime::standalone::Task;
use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ports::{PortBinding, Protocol, PublishedPort};
use crate::restart::RestartPolicy;

/// The description of a container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Container {
    pub id: String,
    pub name: String,
    /// Nanoseconds since 1970.
    pub created: i64,
    pub image_id: String,
    /// The image's layers, topmost first.
    pub lowers: Vec<PathBuf>,
    pub config: Config,
    pub host: HostConfig,
    pub mounts: Vec<MountPoint>,
    /// The networks it is on while it runs, the one it was made for first.
    pub networks: Vec<Joined>,
}

/// A network a container is on, and how.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Joined {
    /// The network's id; in a request also its name.
    pub network: String,
    /// Further names by which other members find the container.
    pub aliases: Vec<String>,
    /// The address it must have; any when not given.
    pub ip: Option<std::net::Ipv4Addr>,
}

/// The process of a container: the image's configuration with the user's changes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The image as the user named it.
    pub image: String,
    pub hostname: String,
    pub user: String,
    pub tty: bool,
    pub open_stdin: bool,
    /// Standard input ends with the first client that attached to it.
    pub stdin_once: bool,
    pub env: Vec<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub working_dir: String,
    pub labels: std::collections::BTreeMap<String, String>,
    pub exposed: Vec<(u16, Protocol)>,
    pub volumes: Vec<String>,
    /// Empty is SIGTERM.
    pub stop_signal: String,
    pub stop_timeout: Option<u64>,
}

impl Config {
    /// Program and arguments.
    pub fn command(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }
}

/// The host's resources that a container uses.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HostConfig {
    /// `host`, `none`, `container:<id>`, or the network the container was made for.
    pub network: String,
    pub ports: Vec<PortBinding>,
    pub publish_all: bool,
    pub auto_remove: bool,
    pub restart: RestartPolicy,
    pub init: bool,
    pub privileged: bool,
    pub read_only: bool,
    /// `host` for the host's processes, `container:<id>` for another's; empty for its own.
    pub pid: String,
    /// `host`, `none` (no shared memory), `shareable`, `container:<id>`; `private` or empty for its own.
    pub ipc: String,
    /// `host` for the host's names; empty for its own.
    pub uts: String,
    pub memory: i64,
    /// Memory and swap together; -1 is without limit, 0 is twice the memory.
    pub memory_swap: i64,
    pub nano_cpus: i64,
    pub cpu_shares: i64,
    pub cpuset_cpus: String,
    pub cpuset_mems: String,
    pub pids_limit: i64,
    pub oom_score_adj: i64,
    pub shm_size: i64,
    pub ulimits: Vec<Ulimit>,
    pub cap_add: Vec<String>,
    pub cap_drop: Vec<String>,
    pub security_opt: Vec<String>,
    pub devices: Vec<Device>,
    pub group_add: Vec<String>,
    pub extra_hosts: Vec<String>,
    pub dns: Vec<String>,
    pub dns_search: Vec<String>,
    pub dns_options: Vec<String>,
    pub sysctls: std::collections::BTreeMap<String, String>,
    /// Mount points and their options.
    pub tmpfs: std::collections::BTreeMap<String, String>,
    /// `-v` as given, for `inspect`.
    pub binds: Vec<String>,
}

impl HostConfig {
    /// Returns true if the container has a network namespace of its own with networks in it.
    pub fn is_on_networks(&self) -> bool {
        !matches!(self.network.as_str(), "host" | "none") && !self.network.starts_with("container:")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ulimit {
    pub name: String,
    pub soft: i64,
    pub hard: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub host: String,
    pub container: String,
    pub permissions: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountKind {
    Bind,
    Volume,
}

/// A directory or file of the host that the container sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountPoint {
    pub kind: MountKind,
    /// The volume's name; empty for a bind.
    pub name: String,
    pub source: PathBuf,
    pub destination: String,
    pub read_only: bool,
    /// `rprivate`, `rslave` or `rshared`.
    pub propagation: String,
    /// The volume was made for this container and goes with it.
    pub anonymous: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    #[default]
    Created,
    Running,
    Paused,
    Restarting,
    Exited,
    Dead,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Restarting => "restarting",
            Self::Exited => "exited",
            Self::Dead => "dead",
        }
    }

    /// Returns true if the container has processes.
    pub fn runs(self) -> bool {
        matches!(self, Self::Running | Self::Paused)
    }
}

/// The state of a container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    pub status: Status,
    /// The running container's supervisor and processes; kept until its traces are cleared away.
    pub task: Option<Task>,
    pub exit_code: i32,
    pub oom_killed: bool,
    pub error: String,
    pub started_at: i64,
    pub finished_at: i64,
    pub restart_count: u32,
    /// Somebody asked it to end: its restart policy is silent until the next start.
    pub by_hand: bool,
    /// When the next start is due while restarting.
    pub restart_at: i64,
    pub restart_delay_ms: u64,
    /// The process that sleeps until then.
    pub waiter: Option<String>,
    pub ports: Vec<PublishedPort>,
    /// The process that serves the published ports.
    pub proxy: Option<String>,
}

const CONTAINER: &str = "container.json";
const STATE: &str = "state.json";
const LOCK: &str = "lock";
/// Largest record that is read.
const MAX_RECORD: u64 = 16 << 20;

/// Replaces a file so that a crash leaves the old or the new content.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    fs::write(&temporary, bytes)?;
    File::open(&temporary)?.sync_data()?;
    fs::rename(&temporary, path)
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    use io::Read;
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_RECORD).read_to_end(&mut bytes)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display())))
}

impl Container {
    pub fn read(directory: &Path) -> io::Result<Self> {
        read(&directory.join(CONTAINER))
    }

    pub fn write(&self, directory: &Path) -> io::Result<()> {
        write(&directory.join(CONTAINER), &serde_json::to_vec(self)?)
    }
}

impl State {
    pub fn read(directory: &Path) -> io::Result<Self> {
        read(&directory.join(STATE))
    }

    pub fn write(&self, directory: &Path) -> io::Result<()> {
        write(&directory.join(STATE), &serde_json::to_vec(self)?)
    }

    /// The state as it is now: a container may have ended with nobody having noted it yet.
    pub fn effective(mut self) -> Self {
        if self.status.runs()
            && let Some(task) = &self.task
            && !task.runs()
        {
            self.status = Status::Exited;
            match task.exit() {
                Some(exit) => self.note_exit(exit.code, exit.finished_at, exit.oom_killed),
                None => self.note_exit(LOST, self.started_at, false),
            }
        }
        self
    }

    pub fn note_exit(&mut self, code: i32, at: i64, oom_killed: bool) {
        self.exit_code = code;
        self.finished_at = at;
        self.oom_killed = oom_killed;
    }
}

/// The code of a container whose end nobody saw, as docker has it.
pub const LOST: i32 = 255;

/// Held while changing the container; others wait.
pub struct Lock(#[expect(dead_code, reason = "held, not looked at")] Flock<File>);

/// Takes a lock file, waiting for its holder. Blocks.
pub fn lock(path: &Path) -> io::Result<Lock> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    Flock::lock(file, FlockArg::LockExclusive).map(Lock).map_err(|(_, errno)| errno.into())
}

/// Takes a container's lock. Fails with `NotFound` when the container is gone. Blocks.
pub fn lock_container(directory: &Path) -> io::Result<Lock> {
    if !directory.join(CONTAINER).exists() {
        return Err(io::ErrorKind::NotFound.into());
    }
    lock(&directory.join(LOCK))
}
