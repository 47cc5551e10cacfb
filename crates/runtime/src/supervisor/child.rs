//! The code between fork and exec, for containers and for execs.
//!
//! The supervisor is single-threaded, so its forked child may allocate and read files. Parsing happens
//! here, on memory that goes away with the exec, so that the supervisor itself stays small.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use super::bundle::Bundle;
use super::error::{Context, SetupError};
use super::protocol::Exec;
use super::userns::{self, UserNamespace};
use super::{mounts, process};
use crate::sys::{self, Beneath, Forked};
use ferrite_cgroup::Layout;

/// First byte of a message on the status socket.
pub const FAILED: u8 = b'E';
pub const WARNING: u8 = b'W';
pub const TERMINAL: u8 = b'T';
/// The process that is the container is another one, made by an OCI runtime.
pub const PROCESS: u8 = b'P';

/// Where the status socket is found in the child.
const STATUS: RawFd = 3;

/// The child's standard streams. Without them the process gets a terminal.
pub type Streams<'a> = Option<[BorrowedFd<'a>; 3]>;

/// Runs the container of a bundle in this freshly forked process (new mount namespace, right PID
/// namespace). Does not return.
pub fn container(
    bundle: &Path,
    cgroup: &str,
    cgroups: &Layout,
    streams: Streams<'_>,
    status: BorrowedFd<'_>,
) -> ! {
    settle(streams, status);
    let ready = guard_null().and_then(|()| set_up_container(bundle, cgroup, cgroups, streams.is_none()));
    let error = match ready {
        Err(error) => error,
        Ok((spec, filters)) => match spec.process() {
            Some(description) => {
                let args = description.args().clone().unwrap_or_default();
                process::run(description, &args, &filters, &|| {})
            }
            None => SetupError::plain("the description has no process"),
        },
    };
    fail(&error)
}

/// Runs a command in a running container. Does not return.
pub fn exec(
    request: &Exec,
    groups: (&str, &str),
    cgroups: &Layout,
    target: BorrowedFd<'_>,
    streams: Streams<'_>,
    status: BorrowedFd<'_>,
) -> ! {
    // The process to join is needed after everything else is closed: keep it next to the status socket.
    let target = match nix::unistd::dup(target) {
        Ok(fd) => fd,
        Err(error) => fail(&SetupError::plain(error.to_string())),
    };
    let target = settle_keeping(streams, status, target);
    let ready = guard_null().and_then(|()| set_up_exec(request, groups, cgroups, &target, streams.is_none()));
    let error = match ready {
        Err(error) => error,
        Ok((spec, filters)) => match spec.process() {
            Some(description) => process::run(description, &request.args, &filters, &|| {}),
            None => SetupError::plain("the description has no process"),
        },
    };
    fail(&error)
}

type Ready = (oci_spec::runtime::Spec, Vec<process::Filter>);

fn set_up_container(
    directory: &Path,
    cgroup: &str,
    cgroups: &Layout,
    terminal: bool,
) -> Result<Ready, SetupError> {
    let (bundle, spec) = Bundle::read(directory).context("read the container's description")?;
    if !cgroups.is_v2() {
        // On version 2 the fork has put us there already.
        cgroups.join(cgroup).context("join control groups")?;
    }
    if has_own_cgroup_namespace(&spec) {
        unshare(CloneFlags::CLONE_NEWCGROUP).context("make cgroup namespace")?;
    }
    score(&spec);
    let filters = process::read_filters(&bundle.seccomp)?;
    nix::unistd::setsid().context("make session")?;
    let user = UserNamespace::of(&spec)?;
    let (owner, group) =
        spec.process().as_ref().map_or((0, 0), |process| (process.user().uid(), process.user().gid()));
    let (owner, group) = user.as_ref().map_or((owner, group), |user| user.host(owner, group));
    if !terminal {
        give_streams(owner, group);
    }
    let mut console = |root: BorrowedFd<'_>| -> Result<(), SetupError> {
        if !terminal {
            return Ok(());
        }
        let slave = open_terminal(root, owner).context("open terminal")?;
        mounts::mount_console(root, slave.as_fd()).context("mount /dev/console")?;
        take_terminal(&slave).context("take terminal")
    };
    mounts::enter_root(&bundle, &spec, cgroups, user.as_ref(), &mut console)?;
    if let Some(user) = user {
        user.enter()?;
    }
    own_null();
    join_keyring(directory, true)?;
    Ok((spec, filters))
}

fn set_up_exec(
    request: &Exec,
    (cgroup, exec): (&str, &str),
    cgroups: &Layout,
    target: &OwnedFd,
    terminal: bool,
) -> Result<Ready, SetupError> {
    let (bundle, mut spec) = Bundle::read(&request.bundle).context("read the container's description")?;
    if let Some(process) = &request.process {
        spec.set_process(Some((**process).clone()));
    }
    cgroups.join_exec(cgroup, exec).context("join control groups")?;
    score(&spec);
    let filters = process::read_filters(&bundle.seccomp)?;
    let mut namespaces = CloneFlags::CLONE_NEWNS;
    if has_own_cgroup_namespace(&spec) {
        namespaces |= CloneFlags::CLONE_NEWCGROUP;
    }
    let user = UserNamespace::of(&spec)?;
    if user.is_some() {
        namespaces |= CloneFlags::CLONE_NEWUSER;
    }
    if !terminal && let Some(process) = spec.process() {
        let (uid, gid) = (process.user().uid(), process.user().gid());
        let (uid, gid) = user.as_ref().map_or((uid, gid), |user| user.host(uid, gid));
        give_streams(uid, gid);
    }
    setns(target, namespaces).context("join the container's namespaces")?;
    if user.is_some() {
        userns::become_root()?;
    }
    own_null();
    join_keyring(&request.bundle, false)?;
    nix::unistd::setsid().context("make session")?;
    if terminal {
        let root = std::fs::File::open("/").context("open root")?;
        let owner = spec.process().as_ref().map_or(0, |process| process.user().uid());
        let slave = open_terminal(root.as_fd(), owner).context("open terminal")?;
        take_terminal(&slave).context("take terminal")?;
    }
    Ok((spec, filters))
}

/// Gives the pipes we made to the container's user: opening `/dev/stdout` asks for permission anew.
pub fn give_streams(uid: u32, gid: u32) {
    for number in 0..3 {
        // SAFETY: the standard streams are open.
        let stream = unsafe { BorrowedFd::borrow_raw(number) };
        let pipe =
            nix::sys::stat::fstat(stream).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
        if pipe {
            let _ = nix::unistd::fchown(stream, Some(uid.into()), Some(gid.into()));
        }
    }
}

/// The standard streams that are the null device.
fn null_streams() -> impl Iterator<Item = RawFd> {
    (0..3).filter(|number| {
        // SAFETY: the number is only inspected; a closed one is an error.
        let stream = unsafe { BorrowedFd::borrow_raw(*number) };
        sys::is_null(stream).unwrap_or(false)
    })
}

/// Exchanges the node's /dev/null among the standard streams for a read-only view of it: the root of a container
/// could change the mode and the owner of the node's file through the descriptor. Must be called before the process
/// leaves the node's mounts.
pub fn guard_null() -> Result<(), SetupError> {
    const WHAT: &str = "guard the node's /dev/null";
    let streams: Vec<RawFd> = null_streams().collect();
    if streams.is_empty() {
        return Ok(());
    }
    let view = mounts::null_view().context(WHAT)?;
    let null = std::fs::File::options().read(true).write(true).open(sys::fd_path(&view)).context(WHAT)?;
    put_null(&null, &streams).context(WHAT)
}

/// Exchanges the null device among the standard streams for the container's own, as runc does, if it has one.
fn own_null() {
    use std::os::unix::fs::OpenOptionsExt;
    let streams: Vec<RawFd> = null_streams().collect();
    // The container may have put anything there: a link is not followed and a FIFO does not block.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let opened = std::fs::File::options().read(true).write(true).custom_flags(flags).open("/dev/null");
    if let Ok(null) = opened
        && sys::is_null(null.as_fd()).unwrap_or(false)
    {
        // SAFETY: changes flags of our own descriptor.
        unsafe { libc::fcntl(null.as_raw_fd(), libc::F_SETFL, libc::O_RDWR) };
        let _ = put_null(&null, &streams);
    }
}

fn put_null(null: &std::fs::File, streams: &[RawFd]) -> io::Result<()> {
    for number in streams {
        // SAFETY: 0..=2 are ours to replace.
        nix::errno::Errno::result(unsafe { libc::dup2(null.as_raw_fd(), *number) })?;
    }
    Ok(())
}

/// Gives the process the session keyring of its container, as runc does. The one of the process that started the
/// node may hold keys of its user, and every container would share it.
fn join_keyring(bundle: &Path, make: bool) -> Result<(), SetupError> {
    const JOIN_SESSION: libc::c_long = 1;
    const SET_PERMISSIONS: libc::c_long = 5;
    /// The possessor has all rights. The owner may view, read, search and link: without the right to search,
    /// an exec would not find the keyring.
    const PERMISSIONS: libc::c_ulong = 0x3f1b_0000;
    let id = bundle.file_name().unwrap_or_default();
    let mut name = std::ffi::OsString::from("_ses.");
    name.push(id);
    let name = sys::cstring(name).context("name the session keyring")?;
    // SAFETY: the name lives for the call, which only reads it.
    let joined = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION, name.as_ptr()) };
    let keyring = match nix::errno::Errno::result(joined) {
        Ok(keyring) => keyring,
        // A kernel without keys has nothing to share. A filter that refuses the call refuses it to the container, too.
        Err(nix::errno::Errno::ENOSYS | nix::errno::Errno::EPERM) => return Ok(()),
        Err(error) => return Err(error).context("join a session keyring"),
    };
    if make {
        // SAFETY: plain integers.
        nix::errno::Errno::result(unsafe {
            libc::syscall(libc::SYS_keyctl, SET_PERMISSIONS, keyring, PERMISSIONS)
        })
        .context("set the rights of the session keyring")?;
    }
    Ok(())
}

fn has_own_cgroup_namespace(spec: &oci_spec::runtime::Spec) -> bool {
    use oci_spec::runtime::LinuxNamespaceType;
    let namespaces = spec.linux().as_ref().and_then(|linux| linux.namespaces().as_ref());
    namespaces.into_iter().flatten().any(|ns| ns.typ() == LinuxNamespaceType::Cgroup && ns.path().is_none())
}

fn score(spec: &oci_spec::runtime::Spec) {
    let wanted = spec.process().as_ref().and_then(|process| process.oom_score_adj()).unwrap_or(0);
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", wanted.to_string()) {
        // Lowering the score needs CAP_SYS_RESOURCE, which a nested machine may lack. The pod is better
        // off running with a worse score than not at all.
        warn(&format!("set oom_score_adj to {wanted}: {error}"));
    }
}

/// Puts streams and status socket in their places, closes everything else, resets signals.
pub fn settle(streams: Streams<'_>, status: BorrowedFd<'_>) {
    // SAFETY: duplicating onto fixed numbers in a process that has only just been forked; nothing here
    // owns those numbers. The sources are all above them because the supervisor keeps 0..=2 on /dev/null
    // and its own listener at 3 or above was moved out of the way.
    unsafe {
        if let Some(streams) = streams {
            for (number, stream) in streams.iter().enumerate() {
                libc::dup2(stream.as_raw_fd(), number as RawFd);
            }
        }
        if status.as_raw_fd() != STATUS {
            libc::dup2(status.as_raw_fd(), STATUS);
        }
        libc::fcntl(STATUS, libc::F_SETFD, libc::FD_CLOEXEC);
        libc::syscall(libc::SYS_close_range, STATUS as u32 + 1, u32::MAX, 0u32);
    }
    reset_signals();
}

/// As [`settle`], with one more descriptor that stays.
fn settle_keeping(streams: Streams<'_>, status: BorrowedFd<'_>, keep: OwnedFd) -> OwnedFd {
    const KEPT: RawFd = STATUS + 1;
    let keep = std::os::fd::IntoRawFd::into_raw_fd(keep);
    // SAFETY: as in `settle`; the order matters: status first, it may sit at KEPT.
    unsafe {
        if let Some(streams) = streams {
            for (number, stream) in streams.iter().enumerate() {
                libc::dup2(stream.as_raw_fd(), number as RawFd);
            }
        }
        if status.as_raw_fd() != STATUS {
            libc::dup2(status.as_raw_fd(), STATUS);
        }
        libc::fcntl(STATUS, libc::F_SETFD, libc::FD_CLOEXEC);
        if keep != KEPT {
            libc::dup2(keep, KEPT);
        }
        libc::fcntl(KEPT, libc::F_SETFD, libc::FD_CLOEXEC);
        libc::syscall(libc::SYS_close_range, KEPT as u32 + 1, u32::MAX, 0u32);
    }
    reset_signals();
    // SAFETY: KEPT was just made and belongs to nobody else.
    unsafe { OwnedFd::from_raw_fd(KEPT) }
}

/// Programs expect default dispositions; Rust ignores SIGPIPE and the supervisor blocks SIGCHLD.
pub fn reset_signals() {
    // SAFETY: sets default dispositions and an empty mask for this process only.
    unsafe {
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Opens a terminal of the container's own devpts and hands its master to the supervisor.
fn open_terminal(root: BorrowedFd<'_>, owner: u32) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY;
    let master = sys::open_beneath(root, Path::new("/dev/pts/ptmx"), flags, Beneath::InRoot)?;
    let unlock: libc::c_int = 0;
    // SAFETY: the ioctl reads one integer.
    nix::errno::Errno::result(unsafe {
        libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock)
    })?;
    // SAFETY: the ioctl takes flags and returns a new descriptor.
    let slave = nix::errno::Errno::result(unsafe {
        libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC)
    })?;
    // SAFETY: just returned by the kernel.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    let _ = nix::unistd::fchown(&slave, Some(owner.into()), None);
    send_terminal(&master)?;
    Ok(slave)
}

/// Hands a terminal's master to the supervisor.
pub fn send_terminal(master: &OwnedFd) -> io::Result<()> {
    let fds = [master.as_raw_fd()];
    sendmsg::<()>(
        STATUS,
        &[IoSlice::new(&[TERMINAL])],
        &[ControlMessage::ScmRights(&fds)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

fn take_terminal(slave: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is a terminal we own; 0..=2 are ours to replace.
    unsafe {
        nix::errno::Errno::result(libc::ioctl(slave.as_raw_fd(), libc::TIOCSCTTY, 0))?;
        for number in 0..3 {
            nix::errno::Errno::result(libc::dup2(slave.as_raw_fd(), number))?;
        }
    }
    Ok(())
}

pub fn report(kind: u8, text: &str) {
    // SAFETY: the status socket stays open until exec or exit.
    let socket = unsafe { BorrowedFd::borrow_raw(STATUS) };
    let mut message = vec![kind];
    // One message, one packet: text that does not fit is cut off.
    message.extend(text.bytes().take(3000));
    let _ = sys::send_with_fds(socket, &message, &[]);
}

fn warn(text: &str) {
    report(WARNING, text);
}

pub fn fail(error: &SetupError) -> ! {
    report(FAILED, &error.to_string());
    // SAFETY: leaves without running anything of the supervisor's.
    unsafe { libc::_exit(128) }
}

/// The first process of a pod whose containers share a PID namespace: reaps orphans of others.
///
/// It holds nothing a container could use: no root file system but an empty one, no capabilities, no
/// descriptors.
pub fn pod_init(empty: &Path) -> ! {
    if isolate(empty).is_err() {
        // SAFETY: nothing has been started; the supervisor sees the namespace end.
        unsafe { libc::_exit(1) };
    }
    reap_forever()
}

/// As [`pod_init`], for a pod with a user namespace, to which the PID namespace is to belong: it is made by a
/// process that has joined it, and its first process is the supervisor's child all the same. Its number goes
/// to `tell`.
pub fn pod_init_in(empty: &Path, user: &OwnedFd, tell: BorrowedFd<'_>) -> ! {
    let isolated = isolate(empty).and_then(|()| {
        setns(user, CloneFlags::CLONE_NEWUSER).context("join the pod's user namespace")?;
        userns::become_root()
    });
    if isolated.is_ok()
        // SAFETY: freshly forked from a single-threaded process.
        && let Ok(forked) = unsafe { sys::fork_with((libc::CLONE_NEWPID | libc::CLONE_PARENT) as u64, None) }
    {
        match forked {
            Forked::Child => reap_forever(),
            Forked::Parent { pid } => {
                let _ = nix::unistd::write(tell, &pid.to_ne_bytes());
            }
        }
    }
    // SAFETY: leaves without running anything of the supervisor's; the reader sees the end.
    unsafe { libc::_exit(1) }
}

/// Leaves the host's file systems for an empty one.
fn isolate(empty: &Path) -> Result<(), SetupError> {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    unshare(CloneFlags::CLONE_NEWNS).context("mount namespace")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("private mounts")?;
    mount(Some("tmpfs"), empty, Some("tmpfs"), MsFlags::MS_RDONLY, Some("size=4k")).context("empty root")?;
    nix::unistd::chdir(empty).context("enter")?;
    nix::unistd::pivot_root(".", ".").context("pivot_root")?;
    umount2(".", MntFlags::MNT_DETACH).context("leave the host's root")
}

fn reap_forever() -> ! {
    reset_signals();
    sys::close_all_but_stdio();
    let _ = caps::clear(None, caps::CapSet::Effective);
    let _ = caps::clear(None, caps::CapSet::Permitted);
    // SAFETY: signals are blocked so that sigwait receives them; statuses are discarded on purpose.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        loop {
            let mut signal = 0;
            libc::sigwait(&raw const set, &raw mut signal);
            while libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) > 0 {}
        }
    }
}
