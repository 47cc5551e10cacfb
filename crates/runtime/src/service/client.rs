//! Starting supervisors and talking to them.

use std::io::{self, BufRead, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::supervisor::protocol::{self, Decoder, Reply, Request};
use crate::supervisor::{self, READY};
use crate::sys;

/// How long a supervisor may take to answer. Setting up a container takes milliseconds; a hung network
/// file system may take much longer.
const PATIENCE: Duration = Duration::from_secs(120);

/// Our own binary as containers may see it: through `/proc/<pid>/exe` of a process that is about to become
/// theirs, a container could otherwise get hold of the file and overwrite it.
///
/// It is a read-only overlay over the binary's directory, mounted nowhere: it shares the page cache with
/// the real file and can never be written through. Where overlayfs does not accept the directory, a
/// sealed copy in memory takes its place.
pub struct SealedExecutable(OwnedFd);

impl SealedExecutable {
    pub fn open(path: &Path, empty: &Path) -> io::Result<Self> {
        let path = std::fs::canonicalize(path)?;
        view(&path, empty).or_else(|_| copy(&path)).map(Self)
    }
}

fn view(path: &Path, empty: &Path) -> io::Result<OwnedFd> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    std::fs::create_dir_all(empty)?;
    let (directory, empty) = (std::fs::File::open(directory)?, std::fs::File::open(empty)?);
    let (first, second) = (sys::fd_path(&directory), sys::fd_path(&empty));
    let mount = sys::read_only_overlay(&[Path::new(&first), Path::new(&second)])?;
    use std::os::fd::AsFd;
    sys::open_beneath(mount.as_fd(), Path::new(name), libc::O_RDONLY, sys::Beneath::NoSymlinks)
}

fn copy(path: &Path) -> io::Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let memory = memfd_create(c"ferrite-supervisor", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let mut target = std::fs::File::from(memory);
    io::copy(&mut std::fs::File::open(path)?, &mut target)?;
    let seals =
        SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE;
    fcntl(&target, FcntlArg::F_ADD_SEALS(seals))?;
    // A descriptor open for writing forbids running the file.
    Ok(std::fs::File::open(sys::fd_path(&target))?.into())
}

/// Starts a supervisor for the sandbox whose run directory this is; returns when it listens.
pub fn spawn(executable: &SealedExecutable, run_dir: &Path) -> io::Result<()> {
    let mut child = Command::new(sys::fd_path(&executable.0))
        .arg0(supervisor::NAME)
        .arg(run_dir)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut answer = String::new();
    if let Some(stdout) = child.stdout.take() {
        io::BufReader::with_capacity(512, stdout.take(4096)).read_line(&mut answer)?;
    }
    child.wait()?;
    if answer == READY {
        Ok(())
    } else {
        Err(io::Error::other(if answer.is_empty() {
            "the supervisor ended without a word".into()
        } else {
            answer
        }))
    }
}

/// A request and its reply, with the descriptors that came along. Blocks.
pub fn call(
    run_dir: &Path,
    request: &Request,
    fds: &[RawFd],
) -> io::Result<(Reply, Vec<OwnedFd>, Conversation)> {
    let socket = protocol::connect(run_dir)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    protocol::send(&socket, request, fds)?;
    let (mut decoder, mut received) = (Decoder::default(), Vec::new());
    let reply = protocol::receive(&socket, &mut decoder, &mut received)?;
    Ok((reply, received, Conversation { socket, decoder }))
}

/// An open connection on which more may follow.
pub struct Conversation {
    pub socket: std::os::unix::net::UnixStream,
    pub decoder: Decoder,
}

/// As [`call`], away from the threads that must not block.
pub async fn ask(
    run_dir: &Path,
    request: Request,
    fds: Vec<OwnedFd>,
) -> io::Result<(Reply, Vec<OwnedFd>, Conversation)> {
    let run_dir: PathBuf = run_dir.to_owned();
    blocking(move || {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        call(&run_dir, &request, &raw)
    })
    .await
}

/// Runs blocking work; a panic in it becomes an error.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
