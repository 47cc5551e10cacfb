//! Starting supervisors.

use std::io::{self, BufRead, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::descriptors;
use crate::supervisor::{self, READY, ROOM, SPAWN};
use crate::sys;

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

/// The process supervisors are forked from.
struct Process {
    child: Child,
    /// Its end is the process' end.
    socket: Option<OwnedFd>,
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.socket.take());
        let _ = self.child.wait();
    }
}

/// Starts supervisors by having them forked from one process of the same binary.
///
/// The loader writes addresses into some megabytes of a large binary's data. A process started anew pays
/// for them; forked ones share them, and are there sooner.
pub struct Spawner {
    executable: SealedExecutable,
    process: Mutex<Option<Process>>,
}

impl Spawner {
    pub fn new(executable: SealedExecutable) -> Self {
        Self { executable, process: Mutex::new(None) }
    }

    /// Starts a supervisor for the sandbox whose run directory this is; returns when it listens.
    pub fn spawn(&self, run_dir: &Path) -> io::Result<()> {
        let (answer, theirs) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        self.request(run_dir, &theirs)?;
        drop(theirs);
        let mut text = String::new();
        io::BufReader::with_capacity(512, std::fs::File::from(answer).take(4096)).read_line(&mut text)?;
        match text.as_str() {
            READY => Ok(()),
            "" => Err(io::Error::other("the supervisor ended without a word")),
            _ => Err(io::Error::other(text)),
        }
    }

    fn request(&self, run_dir: &Path, answer: &OwnedFd) -> io::Result<()> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let send = |process: &Process| {
            let socket = process.socket.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
            let path = run_dir.as_os_str().as_bytes();
            sys::send_with_fds(socket.as_fd(), path, &[answer.as_raw_fd()]).map(|_| ())
        };
        if let Some(running) = process.as_ref()
            && send(running).is_ok()
        {
            return Ok(());
        }
        // None yet, or somebody killed it.
        *process = None;
        let started = self.start()?;
        send(&started)?;
        *process = Some(started);
        Ok(())
    }

    fn start(&self) -> io::Result<Process> {
        use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let child = descriptors::restore_in(&mut Command::new(sys::fd_path(&self.executable.0)))
            .arg0(supervisor::NAME)
            .arg(SPAWN)
            // Room for each supervisor to write its directory over, for readers of the process list.
            .arg(" ".repeat(ROOM))
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Process { child, socket: Some(ours) })
    }
}
