//! Containers made by another OCI runtime, for RuntimeClass handlers.
//!
//! The forked process does not become the container: it lets the runtime create it with our pipes as
//! standard streams, names its first process to the supervisor and lets it start. The supervisor adopts
//! that process when the runtime has gone, since it is the nearest subreaper.

mod stage;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ferrite_cgroup::Layout;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use oci_spec::runtime::{LinuxNamespace, LinuxNamespaceType, Spec};

use super::bundle::{Bundle, CONFIG};
use super::child::{self, Streams};
use super::error::{Context, SetupError};
use super::mounts;
use super::protocol::Handler;
use super::userns::UserNamespace;
use crate::sys;
use stage::Stage;

/// The bundle the runtime sees, below ours.
const OWN: &str = "oci";
const PID_FILE: &str = "oci.pid";
const LOG: &str = "oci.log";
const CONSOLE: &str = "console.sock";

/// Has the container made and started; ends this process. `pid` is where the PID namespace is that it is
/// to be in, unless it has one of its own or the host's.
pub fn container(
    handler: &Handler,
    id: &str,
    bundle: &Path,
    pid: Option<PathBuf>,
    streams: Streams<'_>,
    status: BorrowedFd<'_>,
) -> ! {
    let terminal = streams.is_none();
    child::settle(streams, status);
    match child::guard_null().and_then(|()| make(handler, id, bundle, pid, terminal)) {
        // SAFETY: leaves without running anything of the supervisor's.
        Ok(()) => unsafe { libc::_exit(0) },
        Err(error) => child::fail(&error),
    }
}

fn make(
    handler: &Handler,
    id: &str,
    directory: &Path,
    pid: Option<PathBuf>,
    terminal: bool,
) -> Result<(), SetupError> {
    let (mut bundle, mut spec) = Bundle::read(directory).context("read the container's description")?;
    let user = UserNamespace::of(&spec)?;
    let mut sources = stage::copy_binds(&spec, user.as_ref())?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
        .context("make mounts private")?;
    hide_controllers_beside()?;
    if let Some(pid) = pid {
        join_pid(&mut spec, pid);
    }
    let place = directory.join(OWN);
    std::fs::create_dir_all(&place).context("make the runtime's bundle")?;
    stage::mount_images(&bundle, &mut spec, &mut sources, user.as_ref())?;
    let stage = match &user {
        None => Stage { directory: place.clone() },
        Some(_) => Stage::cover(&[directory, &handler.root, &handler.binary])?,
    };
    stage.show_all(sources, &mut spec)?;
    if let Some(user) = &user {
        bundle.rootfs = stage.rootfs()?;
        if let Some(root) = spec.root_mut() {
            root.set_path(bundle.rootfs.clone());
        }
        if !terminal && let Some(process) = spec.process() {
            let (uid, gid) = user.host(process.user().uid(), process.user().gid());
            child::give_streams(uid, gid);
        }
    }
    let text = serde_json::to_vec(&spec).map_err(io::Error::from).context("describe the container")?;
    sys::write_atomic(&place.join(CONFIG), &text, false).context("describe the container")?;
    mounts::mount_root(&bundle, user.as_ref())?;
    // A socket's path is limited to a hundred characters, which a bundle's alone may have.
    let place = std::fs::File::open(directory).context("open the bundle")?;
    let console = PathBuf::from(format!("/proc/{}/fd/{}/{CONSOLE}", std::process::id(), place.as_raw_fd()));
    let mut create = command(handler, directory);
    create
        .arg("create")
        .arg("--bundle")
        .arg(directory.join(OWN))
        .arg("--pid-file")
        .arg(directory.join(PID_FILE));
    let listener = if terminal {
        let listener = UnixListener::bind(&console).context("listen for the terminal")?;
        create.arg("--console-socket").arg(&console);
        Some(listener)
    } else {
        None
    };
    let created = run(create.arg(id), directory, handler, "create");
    if let (Ok(()), Some(listener)) = (&created, listener) {
        forward_terminal(&listener).context("take the terminal")?;
    }
    let _ = std::fs::remove_file(&console);
    created?;
    let pid: i32 = std::fs::read_to_string(directory.join(PID_FILE))
        .map_err(|error| error.to_string())
        .and_then(|text| text.trim().parse().map_err(|_| format!("{text:?} is no process number")))
        .context("learn the container's process")?;
    child::report(child::PROCESS, &pid.to_string());
    let mut start = command(handler, directory);
    start.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    run(start.arg("start").arg(id), directory, handler, "start")
}

/// In hybrid layouts the containers' controllers are on version 1. Some runtimes refuse to work at all when
/// the unified hierarchy beside them has a controller left; in this mount namespace it has not.
fn hide_controllers_beside() -> Result<(), SetupError> {
    match Layout::detect().ok().as_ref().and_then(Layout::controllers_beside) {
        Some(mount) => umount2(mount, MntFlags::MNT_DETACH).context("hide the unified hierarchy"),
        None => Ok(()),
    }
}

fn join_pid(spec: &mut Spec, path: PathBuf) {
    let mut namespace = LinuxNamespace::default();
    namespace.set_typ(LinuxNamespaceType::Pid).set_path(Some(path));
    if let Some(linux) = spec.linux_mut() {
        let mut namespaces = linux.namespaces().clone().unwrap_or_default();
        namespaces.retain(|known| known.typ() != LinuxNamespaceType::Pid);
        namespaces.push(namespace);
        linux.set_namespaces(Some(namespaces));
    }
}

fn command(handler: &Handler, directory: &Path) -> Command {
    let mut command = Command::new(&handler.binary);
    command.arg("--root").arg(&handler.root).arg("--log").arg(directory.join(LOG));
    command.env_clear().env("PATH", crate::spec::PATH);
    command
}

fn run(command: &mut Command, directory: &Path, handler: &Handler, what: &str) -> Result<(), SetupError> {
    let name = handler.binary.display();
    let status = command.status().with(|| format!("run {name}"))?;
    if status.success() {
        return Ok(());
    }
    // The handler's standard error went to the container's log; the handler's own log has the reason.
    let log = std::fs::read_to_string(directory.join(LOG)).unwrap_or_default();
    let reason = log.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
    Err(SetupError::plain(format!("{name} {what}: {status}: {}", reason.trim())))
}

/// The runtime sends the master of the terminal it made; the supervisor gets it.
fn forward_terminal(listener: &UnixListener) -> io::Result<()> {
    let (socket, _) = listener.accept()?;
    let (mut buffer, mut fds) = ([0; 4096], Vec::new());
    sys::receive_with_fds(socket.as_fd(), &mut buffer, &mut fds)?;
    let master = fds.pop().ok_or(io::ErrorKind::UnexpectedEof)?;
    child::send_terminal(&master)
}
