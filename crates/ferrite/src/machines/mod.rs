//! Nodes on this machine that have networks, mounts, host names, control groups and directories of their own.
//!
//! Each is a machine ([`holder`]) on which an ordinary `ferrite agent` runs, or a machine of the control plane
//! ([`control_plane`]) with a server and an etcd member. A file beside the machine's
//! directory describes it. The process that holds the lock may change it: the cluster's process at its
//! start, or a `ferrite node` command.

pub mod command;
pub mod control_plane;
pub mod holder;

use crate::apiserver::BoxError;
use crate::down::{self, NoNetwork};
use crate::joining::token::JoinToken;
use crate::node::{CgroupDriver, NodeParts};
use crate::paths::Paths;
use crate::status::{self, State};
use ferrite_network::{Addresses, Cidr, Cidrs, Segment};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Options common to all nodes of this machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineOptions {
    pub server: String,
    pub insecure_registries: Vec<String>,
    pub systemd_cgroups: bool,
    pub resolv_conf: PathBuf,
    /// Feature gates of the kubelets: `A=true,B=false`.
    #[serde(default)]
    pub feature_gates: String,
}

/// The programs that a machine is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// An agent.
    #[default]
    Node,
    /// A server and an etcd member.
    ControlPlane,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Node => "node",
            Self::ControlPlane => "control-plane",
        })
    }
}

/// The record of one machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    pub name: String,
    /// Its place on the segment: the last part of its addresses and of its link's name.
    pub index: u8,
    #[serde(rename = "address")]
    pub addresses: Addresses,
    /// The process that holds its namespaces; none when it is switched off.
    pub holder: Option<i32>,
    /// When that process started: a recycled number is not mistaken for it.
    #[serde(default)]
    pub started: u64,
    /// Switched off by the user, until they switch it on again.
    #[serde(default)]
    pub off: bool,
    /// Cut off from all others by the user, until they connect it again.
    #[serde(default)]
    pub cut: bool,
    #[serde(default)]
    pub role: Role,
}

impl Machine {
    /// The process that holds the namespaces, if it still does.
    fn holder(&self) -> Option<i32> {
        self.holder.filter(|pid| status::start_time(*pid) == Some(self.started))
    }
}

/// The state of a node, as `ferrite node list` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Running,
    Paused,
    /// The machine is on, the agent is not.
    NoAgent,
    /// The same of a machine of the control plane.
    NoServer,
    /// Everything on it runs, and nothing reaches it.
    CutOff,
    Off,
}

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::NoAgent => "agent stopped",
            Self::NoServer => "server stopped",
            Self::CutOff => "cut off",
            Self::Off => "off",
        })
    }
}

/// The files are a few lines: more is not read.
const MOST: u64 = 1 << 20;
/// The first address is the host's own.
const FIRST: u8 = 2;
const LAST: u8 = 250;

#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    #[error("{0:?} is not a name for a node: letters, digits, '-' and '.' in lower case, at most 63")]
    Name(String),
    #[error("there is no node {0} on this machine: `ferrite node list` shows them")]
    Unknown(String),
    #[error("node {0} exists already")]
    Exists(String),
    #[error("the cluster has a node {0}, which is not one of this machine's nodes: choose another name")]
    Foreign(String),
    #[error("there is no room for another node on the segment")]
    Full,
    #[error("nodes cannot be added to this cluster: start it with `ferrite up --nodes 1`")]
    NoSegment,
    #[error(
        "{0} is a machine of the control plane and a member of its etcd: stop it with `ferrite node stop {0}`, or remove the whole cluster with `ferrite down`"
    )]
    ControlPlane(String),
}

/// All nodes of a cluster on this machine but the one of its own process.
pub struct Machines {
    paths: Paths,
    _lock: Flock<File>,
}

impl Machines {
    /// Waits until nobody else changes them.
    pub async fn open(paths: &Paths) -> Result<Self, BoxError> {
        let paths = paths.clone();
        tokio::task::spawn_blocking(move || Self::lock(&paths)).await?
    }

    fn lock(paths: &Paths) -> Result<Self, BoxError> {
        let dir = paths.nodes();
        let fail = |e: std::io::Error| format!("cannot use {}: {e}", dir.display());
        ferrite_hostfs::private_dir(&dir).map_err(fail)?;
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(dir.join("lock"))
            .map_err(fail)?;
        let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| fail(e.into()))?;
        Ok(Self { paths: paths.clone(), _lock: lock })
    }

    /// The directories of a node: those of a machine for itself.
    pub fn paths_of(paths: &Paths, name: &str) -> Paths {
        Paths::new(&paths.nodes().join(name))
    }

    fn record(&self, name: &str) -> PathBuf {
        self.paths.nodes().join(format!("{name}.json"))
    }

    /// All nodes, by name. Needs no lock: files are replaced as a whole.
    pub fn list(paths: &Paths) -> Vec<Machine> {
        let entries = std::fs::read_dir(paths.nodes()).into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path());
        let mut machines: Vec<Machine> = files
            .filter(|path| {
                path.extension().is_some_and(|e| e == "json") && path.file_stem() != Some("options".as_ref())
            })
            .filter_map(|path| read(&path))
            .collect();
        machines.sort_by_key(|machine| machine.index);
        machines
    }

    pub fn find(&self, name: &str) -> Result<Machine, MachineError> {
        check_name(name)?;
        read(&self.record(name)).ok_or_else(|| MachineError::Unknown(name.to_owned()))
    }

    fn save(&self, machine: &Machine) -> Result<(), BoxError> {
        write(&self.record(&machine.name), machine)
    }

    /// Saves the start options of nodes that are added later.
    pub fn remember(&self, options: &MachineOptions) -> Result<(), BoxError> {
        write(&self.paths.nodes().join("options.json"), options)
    }

    pub fn options(&self) -> Result<MachineOptions, MachineError> {
        read(&self.paths.nodes().join("options.json")).ok_or(MachineError::NoSegment)
    }

    /// The machines of the control plane; none where the cluster's own process is the control plane.
    pub fn control_planes(paths: &Paths) -> Vec<Machine> {
        let mut machines = Self::list(paths);
        machines.retain(|machine| machine.role == Role::ControlPlane);
        machines
    }

    /// The nodes.
    fn agents(paths: &Paths) -> Vec<Machine> {
        let mut machines = Self::list(paths);
        machines.retain(|machine| machine.role == Role::Node);
        machines
    }

    /// Refuses names that no machine can have, or that one has.
    pub fn check_new(&self, name: &str) -> Result<(), MachineError> {
        check_name(name)?;
        match Self::list(&self.paths).iter().any(|machine| machine.name == name) {
            true => Err(MachineError::Exists(name.to_owned())),
            false => Ok(()),
        }
    }

    /// A place on the segment for a new machine.
    pub fn add(&self, name: &str, role: Role, ranges: Cidrs) -> Result<Machine, BoxError> {
        self.check_new(name)?;
        let known = Self::list(&self.paths);
        let taken: Vec<u8> = known.iter().map(|machine| machine.index).collect();
        let index = (FIRST..=LAST).find(|index| !taken.contains(index)).ok_or(MachineError::Full)?;
        let place = |range: &Cidr| range.nth(u128::from(index)).filter(|address| *address != range.last());
        let addresses = ranges.try_map(place).ok_or(MachineError::Full)?;
        let machine = Machine {
            name: name.to_owned(),
            index,
            addresses,
            holder: None,
            started: 0,
            off: false,
            cut: false,
            role,
        };
        self.save(&machine)?;
        Ok(machine)
    }

    /// Starts the existing nodes, and new ones up to `wanted`. They have the names of `numbers`: `first` for 1, `first-2` for
    /// 2. Returns those that will be Ready.
    pub async fn start_all<F>(
        &self,
        first: &str,
        numbers: std::ops::RangeFrom<usize>,
        wanted: usize,
        segment: &Segment,
        token: impl Fn() -> F,
    ) -> Result<Vec<String>, BoxError>
    where
        F: Future<Output = Result<JoinToken, BoxError>>,
    {
        let mut machines = Self::agents(&self.paths);
        for number in numbers {
            if machines.len() >= wanted {
                break;
            }
            let name = if number == 1 { first.to_owned() } else { format!("{first}-{number}") };
            if machines.iter().all(|machine| machine.name != name) {
                machines.push(self.add(&name, Role::Node, segment.ranges())?);
            }
        }
        machines.retain(|machine| !machine.off);
        let mut names = Vec::new();
        for machine in machines {
            // A node that has joined needs no token.
            let joined = Self::paths_of(&self.paths, &machine.name).pki().join("kubelet-client.crt").exists();
            let token = if joined { None } else { Some(token().await?) };
            let (name, cut) = (machine.name.clone(), machine.cut);
            self.start(machine, segment, token.as_ref()).await?;
            match cut {
                true => {
                    tracing::warn!("node {name} is cut off: `ferrite node start {name}` connects it again")
                }
                false => names.push(name),
            }
        }
        Ok(names)
    }

    /// Switches a node on, and starts its agent. A running node or agent goes on. A node that the user cut off stays so.
    pub async fn start(
        &self,
        mut machine: Machine,
        segment: &Segment,
        token: Option<&JoinToken>,
    ) -> Result<(), BoxError> {
        let paths = Self::paths_of(&self.paths, &machine.name);
        ferrite_hostfs::private_dir(&paths.data)?;
        let holder = match machine.holder() {
            Some(holder) => holder,
            None => {
                // Containers of a machine that was cut off have no network any more: they are gone, as after a reboot.
                self.end_containers(&paths).await?;
                let mut child = holder::start(&machine.name)?;
                let pid =
                    child.id().and_then(|id| i32::try_from(id).ok()).ok_or("the node's machine ended")?;
                // Waits for the end of the process, so that nothing of it is left; it may outlive this one.
                tokio::spawn(async move { child.wait().await });
                machine.holder = Some(pid);
                machine.started = status::start_time(pid).unwrap_or(0);
                pid
            }
        };
        machine.off = false;
        self.save(&machine)?;
        let port = self.paths.node_port(machine.index);
        let netns = PathBuf::from(format!("/proc/{holder}/ns/net"));
        segment.attach(&port, &netns, machine.addresses).await?;
        if machine.cut {
            ferrite_network::set_port(&port, false).await?;
        }
        match (State::load(&paths).and_then(|state| state.running()), machine.role) {
            (Some(supervisor), Role::ControlPlane) => {
                control_plane::signal_group(supervisor, Signal::SIGCONT);
                Ok(())
            }
            (Some(agent), Role::Node) => Ok(kill(Pid::from_raw(agent), Signal::SIGCONT)?),
            (None, Role::ControlPlane) => start_supervisor(holder, &paths),
            (None, Role::Node) => self.start_agent(&machine, holder, &paths, token),
        }
    }

    fn start_agent(
        &self,
        machine: &Machine,
        holder: i32,
        paths: &Paths,
        token: Option<&JoinToken>,
    ) -> Result<(), BoxError> {
        let options = self.options()?;
        ferrite_hostfs::private_dir(&paths.config)?;
        let token_file = paths.config.join("token");
        if let Some(token) = token {
            write_private(&token_file, token.reveal().as_bytes())?;
        }
        // Mirrors and settings of registries are the cluster's.
        match std::fs::read(self.paths.registries()) {
            Ok(text) => write_private(&paths.registries(), &text)?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(format!("cannot read {}: {e}", self.paths.registries().display()).into()),
        }
        // It claims its directory as ours, before the log is made in it.
        drop(crate::data_dir::DataDirectory::claim(paths)?);
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(paths.log())?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["agent", "-v", "2", "--log-to-file", "--pod-routes", "direct", "--data-dir"])
            .arg(&paths.data);
        command.args(["--server", &options.server, "--node-name", &machine.name]);
        command.args(["--node-ip", &machine.addresses.to_string(), "--token-file"]).arg(&token_file);
        command.arg("--resolv-conf").arg(&options.resolv_conf);
        for registry in &options.insecure_registries {
            command.args(["--insecure-registry", registry]);
        }
        if options.systemd_cgroups {
            command.args(["--cgroup-driver", "systemd"]);
        }
        if !options.feature_gates.is_empty() {
            command.args(["--feature-gates", &options.feature_gates]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        holder::enter(&mut command, holder)?;
        // It may outlive this process; if it does not, the runtime reaps it.
        drop(tokio::process::Command::from(command).spawn()?);
        Ok(())
    }

    /// Ends the agents of all nodes, then the servers and etcd members; machines and containers go on.
    pub async fn stop_agents(paths: &Paths) -> Result<(), BoxError> {
        for machine in Self::agents(paths) {
            stop_agent(&Self::paths_of(paths, &machine.name)).await?;
        }
        // All at once: the last member alone could not even take its leave.
        let machines = Self::control_planes(paths);
        let stops = machines.iter().map(|machine| stop_control_plane(paths, machine));
        futures_util::future::try_join_all(stops).await.map(drop)
    }

    /// Switches a machine off: its programs, its containers and the machine itself end. A machine of the control plane
    /// gets no chance to take its leave.
    pub async fn stop(&self, mut machine: Machine) -> Result<Machine, BoxError> {
        let paths = Self::paths_of(&self.paths, &machine.name);
        match machine.role {
            Role::Node => stop_agent(&paths).await?,
            Role::ControlPlane => {
                if let Some(supervisor) = self.agent(&machine) {
                    control_plane::end_at_once(supervisor);
                    down::wait_until_gone(supervisor).await?;
                }
            }
        }
        self.end_containers(&paths).await?;
        if let Some(holder) = machine.holder() {
            let _ = kill(Pid::from_raw(holder), Signal::SIGKILL);
            down::wait_until_gone(holder).await?;
        }
        ferrite_network::remove_port(&self.paths.node_port(machine.index)).await?;
        machine.holder = None;
        machine.off = true;
        self.save(&machine)?;
        Ok(machine)
    }

    /// The node starts again with the cluster.
    pub fn switch_on_at_start(&self, mut machine: Machine) -> Result<(), BoxError> {
        machine.off = false;
        self.save(&machine)
    }

    /// Switches a node off and removes everything of it.
    pub async fn remove(&self, machine: Machine) -> Result<(), BoxError> {
        let machine = self.stop(machine).await?;
        let paths = Self::paths_of(&self.paths, &machine.name);
        if let Some(found) = crate::data_dir::Found::find(&paths)? {
            found.lock()?.remove(&paths)?;
        }
        ferrite_hostfs::remove_tree(&paths.data).or_else(missing_is_fine)?;
        std::fs::remove_file(self.record(&machine.name)).or_else(missing_is_fine)?;
        Ok(())
    }

    async fn end_containers(&self, paths: &Paths) -> Result<(), BoxError> {
        if !paths.runtime().exists() {
            return Ok(());
        }
        let images = NodeParts::images(paths, &[])?;
        // Whichever driver it ran with: slices are found by their name.
        let config = NodeParts::runtime_config(paths, Arc::new(NoNetwork), images, CgroupDriver::default());
        ferrite_runtime::destroy(config).await?;
        Ok(())
    }

    /// The node's current state.
    pub fn condition(paths: &Paths, machine: &Machine) -> Condition {
        if machine.holder().is_none() {
            return Condition::Off;
        }
        match State::load(&Self::paths_of(paths, &machine.name)).and_then(|state| state.running()) {
            None if machine.role == Role::ControlPlane => Condition::NoServer,
            None => Condition::NoAgent,
            Some(agent) if status::is_stopped(agent) => Condition::Paused,
            Some(_) if machine.cut => Condition::CutOff,
            Some(_) => Condition::Running,
        }
    }

    /// Returns true if the programs of a machine run.
    pub fn is_running(&self, machine: &Machine) -> bool {
        machine.holder().is_some() && self.agent(machine).is_some()
    }

    /// Stops the programs of a machine where they are. Returns false if there are none.
    pub fn pause(&self, machine: &Machine) -> Result<bool, BoxError> {
        let Some(process) = self.agent(machine) else { return Ok(false) };
        match machine.role {
            Role::Node => kill(Pid::from_raw(process), Signal::SIGSTOP)?,
            Role::ControlPlane => control_plane::signal_group(process, Signal::SIGSTOP),
        }
        Ok(true)
    }

    /// The process of the agent or the supervisor, if it runs.
    fn agent(&self, machine: &Machine) -> Option<i32> {
        State::load(&Self::paths_of(&self.paths, &machine.name)).and_then(|state| state.running())
    }

    /// Cuts a machine off from all others, also over a restart of the cluster.
    pub async fn cut_off(&self, mut machine: Machine) -> Result<(), BoxError> {
        ferrite_network::set_port(&self.paths.node_port(machine.index), false).await?;
        machine.cut = true;
        self.save(&machine)
    }
}

fn start_supervisor(holder: i32, paths: &Paths) -> Result<(), BoxError> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(paths.log())?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0(control_plane::NAME).arg(&paths.data);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    holder::enter(&mut command, holder)?;
    // It may outlive this process; if it does not, the runtime reaps it.
    drop(tokio::process::Command::from(command).spawn()?);
    Ok(())
}

async fn stop_control_plane(paths: &Paths, machine: &Machine) -> Result<(), BoxError> {
    let paths = Machines::paths_of(paths, &machine.name);
    let Some(supervisor) = State::load(&paths).and_then(|state| state.running()) else { return Ok(()) };
    control_plane::signal_group(supervisor, Signal::SIGCONT);
    down::stop(supervisor).await
}

async fn stop_agent(paths: &Paths) -> Result<(), BoxError> {
    let Some(agent) = State::load(paths).and_then(|state| state.running()) else { return Ok(()) };
    // A paused process does not hear that it should end.
    let _ = kill(Pid::from_raw(agent), Signal::SIGCONT);
    down::stop(agent).await
}

/// Names of nodes are names of files and hosts, too.
fn check_name(name: &str) -> Result<(), MachineError> {
    let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    let edge = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    let bytes = name.as_bytes();
    let valid =
        (1..=63).contains(&name.len()) && name.bytes().all(good) && edge(bytes.first()) && edge(bytes.last());
    if valid && name != "options" && !name.contains("..") {
        Ok(())
    } else {
        Err(MachineError::Name(name.to_owned()))
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    ferrite_json::from_slice(&ferrite_hostfs::read_head(path, MOST).ok()?).ok()
}

fn write(path: &Path, value: &impl Serialize) -> Result<(), BoxError> {
    let temporary = path.with_extension("tmp");
    write_private(&temporary, &ferrite_json::to_vec_pretty(value)?)?;
    Ok(std::fs::rename(&temporary, path)?)
}

fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

fn missing_is_fine(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests;
