//! Containers made by another OCI runtime, for RuntimeClass handlers.
//!
//! The forked process does not become the container: it lets the runtime create it with our pipes as
//! standard streams, names its first process to the supervisor and lets it start. The supervisor adopts
//! that process when the runtime has gone, since it is the nearest subreaper.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MsFlags, mount};

use super::bundle::Bundle;
use super::child::{self, Streams};
use super::error::{Context, SetupError};
use super::mounts;
use super::protocol::Handler;
use crate::sys;

const PID_FILE: &str = "oci.pid";
const LOG: &str = "oci.log";
const CONSOLE: &str = "console.sock";

/// Has the container made and started; ends this process.
pub fn container(
    handler: &Handler,
    id: &str,
    bundle: &Path,
    streams: Streams<'_>,
    status: BorrowedFd<'_>,
) -> ! {
    let terminal = streams.is_none();
    child::settle(streams, status);
    match make(handler, id, bundle, terminal) {
        // SAFETY: leaves without running anything of the supervisor's.
        Ok(()) => unsafe { libc::_exit(0) },
        Err(error) => child::fail(&error),
    }
}

fn make(handler: &Handler, id: &str, directory: &Path, terminal: bool) -> Result<(), SetupError> {
    let (bundle, _) = Bundle::read(directory).context("read the container's description")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
        .context("make mounts private")?;
    mounts::mount_root(&bundle, None)?;
    // A socket's path is limited to a hundred characters, which a bundle's alone may have.
    let place = std::fs::File::open(directory).context("open the bundle")?;
    let console = PathBuf::from(format!("/proc/{}/fd/{}/{CONSOLE}", std::process::id(), place.as_raw_fd()));
    let mut create = command(handler, directory);
    create.arg("create").arg("--bundle").arg(directory).arg("--pid-file").arg(directory.join(PID_FILE));
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
    // What it said on standard error went to the container's log; its own log has the reason.
    let log = std::fs::read_to_string(directory.join(LOG)).unwrap_or_default();
    let reason = log.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
    Err(SetupError::plain(format!("{name} {what}: {status}: {}", reason.trim())))
}

/// The runtime sends the master of the terminal it made; the supervisor gets it.
fn forward_terminal(listener: &UnixListener) -> io::Result<()> {
    use std::os::fd::AsFd;
    let (socket, _) = listener.accept()?;
    let (mut buffer, mut fds) = ([0; 4096], Vec::new());
    sys::receive_with_fds(socket.as_fd(), &mut buffer, &mut fds)?;
    let master = fds.pop().ok_or(io::ErrorKind::UnexpectedEof)?;
    child::send_terminal(&master)
}
