//! Making the sandbox: namespaces, hostname, sysctls, shared memory, control socket.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde::{Deserialize, Serialize};

use super::error::{Context, SetupError};
use super::hook::ExitHook;
use super::server::{PodPid, Server};
use super::{child, protocol};
use crate::sys::{self, Forked};
use ferrite_cgroup::Layout;

/// Written by the runtime into the sandbox's run directory before the supervisor starts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    /// Namespaces of the pod's own; the others are the host's.
    pub own_network: bool,
    pub own_ipc: bool,
    pub own_uts: bool,
    /// Containers share one PID namespace with a first process that reaps.
    pub shared_pid: bool,
    pub hostname: String,
    pub sysctls: BTreeMap<String, String>,
    /// The content of `uid_map` and `gid_map` when the pod has a user namespace of its own.
    #[serde(default)]
    pub user: Option<UserSetup>,
    /// Control group of the supervisor itself, outside the pod's limits.
    pub cgroup: String,
    /// The network namespace to join instead of making one.
    #[serde(default)]
    pub join_network: Option<PathBuf>,
    /// The PID namespace containers share instead of one with a first process of ours.
    #[serde(default)]
    pub join_pid: Option<PathBuf>,
    /// The IPC namespace to join instead of making one.
    #[serde(default)]
    pub join_ipc: Option<PathBuf>,
    /// The command to run when a container has ended.
    #[serde(default)]
    pub on_exit: Vec<String>,
    /// Size of the shared memory in bytes.
    #[serde(default)]
    pub shm_size: Option<u64>,
}

/// A user namespace to be made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UserSetup {
    pub uid_map: String,
    pub gid_map: String,
    /// The host's numbers for its root.
    pub root: (u32, u32),
}

/// Name of the file that holds [`Setup`].
pub const SETUP: &str = "setup.json";
/// Where the pod's network namespace is pinned, below the run directory.
pub const NETNS: &str = "netns";
/// Where the pod's user namespace is pinned, below the run directory.
pub const USERNS: &str = "userns";
/// Where the pod's shared memory is mounted, below the run directory.
pub const SHM: &str = "shm";
/// File with the supervisor's process number and start time.
pub const IDENTITY: &str = "supervisor";
/// An empty directory to stand on.
const EMPTY: &str = "empty";

/// Size of /dev/shm, as other runtimes have it.
const SHM_SIZE: u64 = 64 << 20;

/// A run directory for one process alone: the supervisor that starts in it, or the runtime that takes it away.
///
/// A runtime may be killed while its spawner still starts a supervisor. The next one must neither take the
/// directory from under it nor overlook it, because until it has recorded its identity nobody can see it.
pub struct Claim(#[expect(dead_code, reason = "held, not looked at")] Flock<File>);

impl Claim {
    /// Waits until nobody else has the directory; none if it is gone by then.
    pub fn take(directory: &Path) -> io::Result<Option<Self>> {
        let mut file = match File::open(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let lock = loop {
            match Flock::lock(file, FlockArg::LockExclusive) {
                Ok(lock) => break lock,
                Err((back, Errno::EINTR)) => file = back,
                Err((_, error)) => return Err(error.into()),
            }
        };
        let removed = lock.metadata()?.nlink() == 0;
        Ok((!removed).then_some(Self(lock)))
    }
}

pub fn establish(directory: &Path) -> Result<Server, SetupError> {
    let claim = Claim::take(directory)
        .and_then(|claim| claim.ok_or_else(|| io::ErrorKind::NotFound.into()))
        .with(|| format!("claim {}", directory.display()))?;
    let setup: Setup = std::fs::read(directory.join(SETUP))
        .map_err(|error| error.to_string())
        .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()))
        .with(|| format!("read {}", directory.join(SETUP).display()))?;
    nix::unistd::chdir("/").context("chdir")?;
    let cgroups = Layout::detect().context("find control groups")?;
    cgroups.join(&setup.cgroup).context("join the supervisors' control group")?;
    // SAFETY: plain integers. A pod's processes must not inspect this one, and orphans of containers in the
    // host's PID namespace must come back here.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, c"ferrite-superv".as_ptr());
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    }
    // The last process to be killed for memory; where this is not allowed we take our chances.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-998");

    let hook = if setup.on_exit.is_empty() { None } else { Some(ExitHook::new(setup.on_exit.clone())?) };
    let mut flags = CloneFlags::empty();
    flags.set(CloneFlags::CLONE_NEWNET, setup.own_network && setup.join_network.is_none());
    flags.set(CloneFlags::CLONE_NEWIPC, setup.own_ipc);
    flags.set(CloneFlags::CLONE_NEWUTS, setup.own_uts);
    match &setup.user {
        None => unshare(flags).context("make the pod's namespaces")?,
        Some(user) => make_in_user_namespace(flags, user, directory)?,
    }
    if setup.own_uts && !setup.hostname.is_empty() {
        nix::unistd::sethostname(&setup.hostname).with(|| format!("set hostname {:?}", setup.hostname))?;
    }
    let join = |kind: &str, path: &Path, flag| {
        let what = || format!("join {kind} namespace {}", path.display());
        let namespace = std::fs::File::open(path).with(what)?;
        nix::sched::setns(namespace, flag).with(what)
    };
    if let Some(path) = &setup.join_ipc {
        join("IPC", path, CloneFlags::CLONE_NEWIPC)?;
    }
    if let Some(path) = &setup.join_network {
        join("network", path, CloneFlags::CLONE_NEWNET)?;
    } else if setup.own_network {
        raise_loopback().context("raise the loopback interface")?;
    }
    if setup.own_network {
        pin(directory, "net", NETNS)?;
    }
    for (name, value) in &setup.sysctls {
        write_sysctl(name, value)?;
    }
    if setup.own_ipc {
        let shm = directory.join(SHM);
        std::fs::create_dir_all(&shm).context("make shared memory directory")?;
        let options = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let mut data = format!("mode=1777,size={}", setup.shm_size.unwrap_or(SHM_SIZE));
        if let Some(UserSetup { root: (uid, gid), .. }) = &setup.user {
            data.push_str(&format!(",uid={uid},gid={gid}"));
        }
        mount(Some("shm"), &shm, Some("tmpfs"), options, Some(data.as_str()))
            .context("mount shared memory")?;
    }
    let pod_pid = match &setup.join_pid {
        Some(path) => {
            let what = || format!("open PID namespace {}", path.display());
            PodPid::Other(std::fs::File::open(path).with(what)?.into())
        }
        None if setup.shared_pid => PodPid::Own(start_pod_init(directory, setup.user.is_some())?),
        None => PodPid::None,
    };
    let listener = protocol::listen(directory).context("listen")?;
    let identity = identity(std::process::id() as i32).unwrap_or_default();
    sys::write_atomic(&directory.join(IDENTITY), identity.as_bytes(), false).context("record identity")?;
    drop(claim);
    Server::new(listener, cgroups, pod_pid, hook, directory.to_owned()).context("prepare to wait")
}

/// Makes the pod's namespaces belong to a user namespace of its own, and joins all of them but that one:
/// the supervisor stays the host's, or it could not do its work.
fn make_in_user_namespace(flags: CloneFlags, user: &UserSetup, directory: &Path) -> Result<(), SetupError> {
    let all = (flags | CloneFlags::CLONE_NEWUSER).bits() as u64;
    // SAFETY: the supervisor is single-threaded. The child only waits to be killed.
    let pid = match unsafe { sys::fork_with(all, None) }.context("make the pod's user namespace")? {
        Forked::Child => {
            // SAFETY: a plain integer. Nobody else would end this process.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            sys::close_all_but_stdio();
            loop {
                nix::unistd::pause();
            }
        }
        Forked::Parent { pid } => pid,
    };
    let joined = join_namespaces(pid, flags, user, directory);
    // SAFETY: our own child, not reaped before the wait; it holds nothing that is needed any more.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    joined
}

fn join_namespaces(
    pid: i32,
    flags: CloneFlags,
    user: &UserSetup,
    directory: &Path,
) -> Result<(), SetupError> {
    for (file, content) in [("uid_map", &user.uid_map), ("gid_map", &user.gid_map)] {
        std::fs::write(format!("/proc/{pid}/{file}"), content)
            .with(|| format!("write {file} {content:?} of the pod's user namespace"))?;
    }
    for (flag, name) in [
        (CloneFlags::CLONE_NEWNET, "net"),
        (CloneFlags::CLONE_NEWIPC, "ipc"),
        (CloneFlags::CLONE_NEWUTS, "uts"),
    ] {
        if flags.contains(flag) {
            let namespace = std::fs::File::open(format!("/proc/{pid}/ns/{name}"))
                .with(|| format!("open the pod's {name} namespace"))?;
            nix::sched::setns(namespace, flag).with(|| format!("join the pod's {name} namespace"))?;
        }
    }
    pin_of(&format!("/proc/{pid}/ns/user"), &directory.join(USERNS))
}

fn pin(directory: &Path, kind: &str, name: &str) -> Result<(), SetupError> {
    pin_of(&format!("/proc/self/ns/{kind}"), &directory.join(name))
}

fn pin_of(source: &str, target: &PathBuf) -> Result<(), SetupError> {
    std::fs::write(target, "").with(|| format!("make {}", target.display()))?;
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).with(|| format!("pin {source}"))
}

/// The name is `a.b.c` or `a/b/c`; a name with dots inside a part (interfaces) uses slashes.
fn write_sysctl(name: &str, value: &str) -> Result<(), SetupError> {
    let path = if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    if path.split('/').any(|part| part.is_empty() || part == "..") {
        return Err(SetupError::plain(format!("sysctl {name:?} is not a valid name")));
    }
    std::fs::write(Path::new("/proc/sys").join(path), value).with(|| format!("set sysctl {name}={value}"))
}

fn raise_loopback() -> std::io::Result<()> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: ifreq is plain data; the name fits and is NUL-terminated by the zeroes.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        nix::errno::Errno::result(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request))?;
    }
    Ok(())
}

fn start_pod_init(directory: &Path, in_user_namespace: bool) -> Result<i32, SetupError> {
    let empty = directory.join(EMPTY);
    std::fs::create_dir_all(&empty).context("make empty directory")?;
    const WHAT: &str = "start the pod's first process";
    if in_user_namespace {
        return start_pod_init_in(&directory.join(USERNS), &empty).context(WHAT);
    }
    // SAFETY: the supervisor is single-threaded.
    match unsafe { sys::fork_with(libc::CLONE_NEWPID as u64, None) }.context(WHAT)? {
        Forked::Child => {
            leave_standard_streams();
            child::pod_init(&empty)
        }
        Forked::Parent { pid } => Ok(pid),
    }
}

fn start_pod_init_in(user: &Path, empty: &Path) -> std::io::Result<i32> {
    use std::io::Read;
    let user = OwnedFd::from(std::fs::File::open(user)?);
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    // SAFETY: the supervisor is single-threaded.
    let between = match unsafe { sys::fork_with(0, None) }? {
        Forked::Child => {
            leave_standard_streams();
            child::pod_init_in(empty, &user, write.as_fd())
        }
        Forked::Parent { pid } => pid,
    };
    drop(write);
    let mut number = [0; 4];
    let read = std::fs::File::from(read).read_exact(&mut number);
    // SAFETY: our own child, which ends by itself and was not waited for before.
    unsafe { libc::waitpid(between, std::ptr::null_mut(), 0) };
    read?;
    Ok(i32::from_ne_bytes(number))
}

/// After the answer has been given nobody listens: standard streams become /dev/null.
pub fn leave_standard_streams() {
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        let null = OwnedFd::from(null);
        for number in 0..3 {
            // SAFETY: replaces our own standard streams.
            unsafe { libc::dup2(null.as_raw_fd(), number) };
        }
    }
}

/// A process' number and start time (the number alone may be reused), unless it has ended.
pub fn identity(pid: i32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may contain anything; fields are counted from the last bracket.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let start = fields.nth(18)?;
    Some(format!("{pid} {start}"))
}

/// The process an identity names, if it is still that one.
pub fn alive(identity_text: &str) -> Option<i32> {
    let pid = identity_text.split(' ').next()?.parse().ok()?;
    (identity(pid).as_deref() == Some(identity_text.trim())).then_some(pid)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_directory_is_claimed_by_one_at_a_time_and_not_once_it_is_gone() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("sandbox");
        assert!(Claim::take(&directory).unwrap().is_none());
        for removed in [false, true] {
            std::fs::create_dir_all(&directory).unwrap();
            let first = Claim::take(&directory).unwrap().unwrap();
            let released = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let second = scope.spawn(|| {
                    let claim = Claim::take(&directory).unwrap();
                    assert!(released.load(Ordering::SeqCst));
                    claim.is_some()
                });
                std::thread::yield_now();
                released.store(true, Ordering::SeqCst);
                if removed {
                    std::fs::remove_dir(&directory).unwrap();
                }
                drop(first);
                assert_eq!(second.join().unwrap(), !removed);
            });
        }
    }
}
