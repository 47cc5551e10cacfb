//! Containers without a cluster: the operations on a running one, for any process of its owner.
//!
//! A [`Runtime`](crate::Runtime) makes the container and takes it away; in between nobody has to be there,
//! and a [`Task`] is all that is needed to talk to the supervisor.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use ferrite_cri::{Error, Result};
use oci_spec::runtime::{Process, Spec};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;

use crate::service::client::ask;
use crate::service::exec::{exec_name, run_exec};
use crate::spec::{IdentityRequest, resolve_identity};
use crate::supervisor::bundle::CONFIG;
use crate::supervisor::protocol::{self, AttachedAtStart, Decoder, EXIT_RECORD, Event, Exec, Reply, Request};
use crate::supervisor::sandbox::{IDENTITY, NETNS, SHM, alive};
use crate::sys;
use ferrite_cgroup::Layout;

pub use crate::service::exec::Running;
pub use crate::spec::{capability_number, default_profile, signal_from_name};
pub use crate::supervisor::protocol::Exit;

/// A started container and how to reach its supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The sandbox's run directory.
    pub run_dir: PathBuf,
    /// The container's name for its supervisor.
    pub container: String,
    /// The container's files.
    pub bundle: PathBuf,
    /// Its control group.
    pub cgroup: String,
    /// Its first process; 0 when it ended before anybody looked.
    pub pid: i32,
    /// Its addresses, if it has a network of its own.
    pub ips: Vec<String>,
}

/// The ends of somebody's streams that the container reads from and writes to.
#[derive(Debug, Default)]
pub struct Streams {
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
}

impl Streams {
    /// Output is not lost: the container waits for its reader.
    pub(crate) fn into_request(self) -> (AttachedAtStart, Vec<OwnedFd>) {
        let wanted = AttachedAtStart {
            stdin: self.stdin.is_some(),
            stdout: self.stdout.is_some(),
            stderr: self.stderr.is_some(),
            lossless: true,
        };
        (wanted, [self.stdin, self.stdout, self.stderr].into_iter().flatten().collect())
    }
}

/// A command to run in a container, besides its arguments.
#[derive(Debug, Clone, Default)]
pub struct ExecOptions {
    pub args: Vec<String>,
    /// Added to the container's environment.
    pub env: Vec<String>,
    /// `user[:group]` by name or number; empty is the container's.
    pub user: String,
    /// Empty is the container's.
    pub working_dir: String,
    /// All capabilities.
    pub privileged: bool,
}

/// Resource usage of a container, and its limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub cpu_nanoseconds: u64,
    pub memory: u64,
    pub memory_limit: Option<u64>,
    pub processes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

fn sensible(reply: &Reply) -> Result<()> {
    match reply {
        Reply::Failed { message, .. } => Err(Error::internal(message.clone())),
        _ => Ok(()),
    }
}

impl Task {
    async fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Result<()> {
        let (reply, ..) = ask(&self.run_dir, request, fds)
            .await
            .map_err(|error| Error::internal(format!("the container's supervisor: {error}")))?;
        sensible(&reply)
    }

    /// The supervisor's process, if it still runs.
    pub fn supervisor(&self) -> Option<i32> {
        std::fs::read_to_string(self.run_dir.join(IDENTITY)).ok().and_then(|identity| alive(&identity))
    }

    /// The exit of the container; `None` while it runs, and if its supervisor died before it.
    pub fn exit(&self) -> Option<Exit> {
        serde_json::from_slice(&std::fs::read(self.bundle.join(EXIT_RECORD)).ok()?).ok()
    }

    /// Returns true if the container runs.
    pub fn runs(&self) -> bool {
        self.exit().is_none() && self.supervisor().is_some()
    }

    /// Where the container's network namespace is pinned.
    pub fn network_namespace(&self) -> PathBuf {
        self.run_dir.join(NETNS)
    }

    /// A namespace of the container's first process, to be joined while that runs: `pid`, `ipc`, ….
    pub fn namespace(&self, kind: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/{kind}", self.pid))
    }

    /// The container's IPC namespace, for others to join.
    pub fn ipc(&self) -> crate::JoinIpc {
        crate::JoinIpc { namespace: self.namespace("ipc"), shared_memory: self.run_dir.join(SHM) }
    }

    /// Waits for the container's end. `None` when its supervisor ended without a word.
    pub async fn wait(&self) -> Option<Exit> {
        self.ending().await.wait().await
    }

    /// Begins to watch for the container's end. From here on it is not missed, even if everything the container
    /// leaves behind is removed before anybody waits.
    pub async fn ending(&self) -> Ending {
        // Subscribe before reading the record: then no exit in between is missed.
        let events = self.subscribe().await.ok();
        Ending { task: self.clone(), exit: self.exit(), events }
    }

    async fn subscribe(&self) -> io::Result<(tokio::net::UnixStream, Decoder)> {
        let run_dir = self.run_dir.clone();
        let socket = crate::service::client::blocking(move || {
            let socket = protocol::connect(&run_dir)?;
            protocol::send(&socket, &Request::Subscribe, &[])?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })
        .await?;
        Ok((tokio::net::UnixStream::from_std(socket)?, Decoder::default()))
    }

    /// Sends a signal to the container's first process.
    pub async fn signal(&self, signal: i32) -> Result<()> {
        let all = signal == libc::SIGKILL;
        self.request(Request::Signal { id: self.container.clone(), signal, all }, Vec::new()).await
    }

    /// Sets the size of the container's terminal.
    pub async fn resize(&self, width: u16, height: u16) -> Result<()> {
        self.request(Request::Resize { id: self.container.clone(), width, height }, Vec::new()).await
    }

    /// Joins the container's streams.
    pub async fn attach(&self, streams: Streams) -> Result<()> {
        let (AttachedAtStart { stdin, stdout, stderr, lossless }, fds) = streams.into_request();
        let request = Request::Attach { id: self.container.clone(), stdin, stdout, stderr, lossless };
        self.request(request, fds).await
    }

    /// Runs a command in the container. Without `streams` it gets a terminal.
    pub async fn exec(&self, options: ExecOptions, streams: Option<[OwnedFd; 3]>) -> Result<Running> {
        if options.args.first().is_none_or(String::is_empty) {
            return Err(Error::invalid("no command specified"));
        }
        let process = self.exec_process(&options, streams.is_none())?;
        let exec = Exec {
            id: self.container.clone(),
            exec: exec_name(),
            terminal: streams.is_none(),
            args: options.args,
            bundle: self.bundle.clone(),
            process: Some(Box::new(process)),
        };
        run_exec(&self.run_dir, exec, streams).await
    }

    fn exec_process(&self, options: &ExecOptions, terminal: bool) -> Result<Process> {
        let read =
            std::fs::read(self.bundle.join(CONFIG)).map_err(|error| Error::internal(error.to_string()))?;
        let spec: Spec = serde_json::from_slice(&read).map_err(|error| Error::internal(error.to_string()))?;
        let mut process =
            spec.process().clone().ok_or_else(|| Error::internal("the container has no process"))?;
        let mut env = process.env().clone().unwrap_or_default();
        let mut set = |entry: &str| {
            let name = entry.split('=').next().unwrap_or_default();
            env.retain(|known| known.split('=').next() != Some(name));
            env.push(entry.to_owned());
        };
        if terminal {
            set("TERM=xterm");
        }
        if !options.user.is_empty() {
            let root = self.root()?;
            let text = |path: &str| read_text(&root, Path::new(path));
            let request = IdentityRequest { image_user: &options.user, ..Default::default() };
            let identity = resolve_identity(&request, &text("/etc/passwd"), &text("/etc/group"))?;
            set(&format!("HOME={}", identity.home));
            let mut user = process.user().clone();
            user.set_uid(identity.uid).set_gid(identity.gid).set_additional_gids(Some(identity.groups));
            process.set_user(user);
        }
        options.env.iter().for_each(|entry| set(entry));
        process.set_env(Some(env));
        if !options.working_dir.is_empty() {
            process.set_cwd(PathBuf::from(&options.working_dir));
        }
        if options.privileged {
            let all: std::collections::HashSet<_> = crate::spec::all_capabilities().collect();
            let mut capabilities = process.capabilities().clone().unwrap_or_default();
            capabilities
                .set_bounding(Some(all.clone()))
                .set_effective(Some(all.clone()))
                .set_permitted(Some(all));
            process.set_capabilities(Some(capabilities));
        }
        process.set_terminal(Some(terminal));
        Ok(process)
    }

    /// The container's file system as its processes see it, mounts included.
    pub fn root(&self) -> Result<OwnedFd> {
        open_directory(Path::new(&format!("/proc/{}/root", self.pid)))
            .map_err(|error| Error::internal(format!("the container's file system: {error}")))
    }

    /// The processes of the container and of its execs, as the host counts.
    pub fn processes(&self) -> Vec<i32> {
        let Ok(layout) = Layout::detect() else { return Vec::new() };
        let mut all = layout.processes(&self.cgroup);
        all.sort_unstable();
        all
    }

    /// Halts every process of the container, or lets them go on.
    pub fn freeze(&self, frozen: bool) -> io::Result<()> {
        Ok(Layout::detect()?.freeze(&self.cgroup, frozen)?)
    }

    /// Resource usage of the container; `None` if its cgroup is gone.
    pub fn usage(&self) -> Option<Usage> {
        let layout = Layout::detect().ok()?;
        let memory = layout.memory(&self.cgroup)?;
        let (read_bytes, written_bytes) = layout.transferred(&self.cgroup);
        Some(Usage {
            cpu_nanoseconds: layout.cpu(&self.cgroup)?.usage_nanoseconds,
            memory: memory.working_set,
            memory_limit: memory.limit,
            processes: layout.processes(&self.cgroup).len() as u64,
            read_bytes,
            written_bytes,
        })
    }
}

/// The end of a container, watched for.
#[derive(Debug)]
pub struct Ending {
    task: Task,
    exit: Option<Exit>,
    events: Option<(tokio::net::UnixStream, Decoder)>,
}

impl Ending {
    /// Waits for the container's exit. `None` if its supervisor ended without reporting one.
    pub async fn wait(self) -> Option<Exit> {
        if self.exit.is_some() {
            return self.exit;
        }
        let (mut socket, mut decoder) = self.events?;
        let mut buffer = [0; 1024];
        loop {
            match decoder.next::<Event>() {
                Ok(Some(Event::Exited { id, exit })) if id == self.task.container => return Some(exit),
                Ok(Some(_)) => {}
                Ok(None) => match socket.read(&mut buffer).await {
                    Ok(count) if count > 0 => decoder.push(&buffer[..count]),
                    _ => return self.task.exit(),
                },
                Err(_) => return self.task.exit(),
            }
        }
    }
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    use nix::fcntl::OFlag;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    Ok(nix::fcntl::open(path, flags, nix::sys::stat::Mode::empty())?)
}

/// Largest passwd or group file that is read.
const MAX_FILE: u64 = 4 << 20;

/// A text file below a root, followed like in it; empty when there is none. Only its beginning if it is large.
pub fn read_text(root: &OwnedFd, path: &Path) -> String {
    use std::io::Read;
    let mut bytes = Vec::new();
    if let Ok(file) = sys::open_regular_in_root(root.as_fd(), path) {
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A container's file system while it does not run: its layers put together, mounted nowhere.
pub fn open_layers(lowers: &[PathBuf], writable: &Path) -> io::Result<OwnedFd> {
    let (upper, work) = (writable.join("upper"), writable.join("work"));
    for path in [&upper, &work] {
        std::fs::create_dir_all(path)?;
    }
    let layers: Vec<OwnedFd> = lowers.iter().map(|lower| open_directory(lower)).collect::<io::Result<_>>()?;
    let paths: Vec<PathBuf> = layers.iter().map(|layer| PathBuf::from(sys::fd_path(layer))).collect();
    let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    sys::overlay(&paths, Some((&upper, &work)))
}

/// Runs `work` on a thread for which `root` is `/`: paths and symbolic links cannot lead out of it.
pub fn in_root<T: Send + 'static>(
    root: OwnedFd,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let thread = std::thread::spawn(move || {
        // Only this thread moves; the others keep their root and directory.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS)?;
        nix::unistd::fchdir(&root)?;
        nix::unistd::chroot(".")?;
        nix::unistd::chdir("/")?;
        work()
    });
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the work ended badly")))
}

/// Waits, without end, until a process that is not ours has ended.
pub async fn process_ended(pid: i32) {
    // SAFETY: no pointers; a descriptor or an error comes back.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, libc::PIDFD_NONBLOCK) } as i32;
    if fd < 0 {
        return;
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the descriptor is moved in, so it stays open as long as it is registered.
    let registered =
        unsafe { tokio::io::unix::AsyncFd::register_with_interest(owned, tokio::io::Interest::READABLE) };
    if let Ok(ready) = registered {
        let _ = ready.readable().await;
    }
}

/// A process and when it started, to know it again; `None` when there is none.
pub fn process_identity(pid: i32) -> Option<String> {
    crate::supervisor::sandbox::identity(pid)
}

/// The process an identity names, if it still runs.
pub fn process_alive(identity: &str) -> Option<i32> {
    alive(identity)
}

/// Leaves whatever control group this process is in for the machine's own: a process that outlives a
/// container must not keep the container's groups.
pub fn leave_groups() {
    if let Ok(layout) = Layout::detect() {
        let _ = layout.join("/");
    }
}

/// Removes a runtime's control groups where no process and no container is left in them.
pub fn remove_empty_groups(parent: &str) {
    if let Ok(layout) = Layout::detect() {
        layout.remove_if_empty(&format!("{parent}/{}", crate::service::SUPERVISORS));
        layout.remove_if_empty(parent);
    }
}
