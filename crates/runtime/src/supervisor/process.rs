//! From a set-up root to the program: identity, limits, capabilities, seccomp, exec.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::{Gid, Uid};
use oci_spec::runtime::{Capability, PosixRlimitType, Process};

use super::error::{Context, SetupError};
use super::interpreter::{HEAD, interpreter};
use crate::sys;

/// A compiled seccomp program.
pub type Filter = Vec<libc::sock_filter>;

/// Reads programs as they were written by [`filter_bytes`].
pub fn read_filters(paths: &[PathBuf]) -> Result<Vec<Filter>, SetupError> {
    paths
        .iter()
        .map(|path| {
            let bytes = std::fs::read(path).with(|| format!("read seccomp program {}", path.display()))?;
            Ok(bytes
                .chunks_exact(8)
                .map(|c| libc::sock_filter {
                    code: u16::from_le_bytes([c[0], c[1]]),
                    jt: c[2],
                    jf: c[3],
                    k: u32::from_le_bytes([c[4], c[5], c[6], c[7]]),
                })
                .collect())
        })
        .collect()
}

/// Becomes the process the description asks for. Only returns when that failed.
///
/// The calling process must be in its final root and namespaces, with its standard streams in place.
pub fn run(process: &Process, args: &[String], filters: &[Filter], ready: &dyn Fn()) -> SetupError {
    match prepare(process, args, filters) {
        Ok((program, argv, envp)) => {
            ready();
            sys::close_all_on_exec();
            let Err(error) = nix::unistd::execve(&program, &argv, &envp);
            exec_error(&args[0], &program, error)
        }
        Err(error) => error,
    }
}

type Command = (CString, Vec<CString>, Vec<CString>);

fn prepare(process: &Process, args: &[String], filters: &[Filter]) -> Result<Command, SetupError> {
    let first = args.first().ok_or_else(|| SetupError::plain("no command specified"))?;
    limits(process)?;
    // SAFETY: changes only this process' file mode mask.
    unsafe { libc::umask(process.user().umask().unwrap_or(0o022)) };
    if let Some(profile) = process.apparmor_profile() {
        std::fs::write("/proc/self/attr/apparmor/exec", format!("exec {profile}"))
            .or_else(|_| std::fs::write("/proc/self/attr/exec", format!("exec {profile}")))
            .with(|| format!("apply AppArmor profile {profile}"))?;
    }
    let confined = process.no_new_privileges().unwrap_or(false);
    if !confined {
        // Without no_new_privs this needs CAP_SYS_ADMIN, which is gone in a moment.
        install(filters)?;
    }
    identity(process)?;
    if confined {
        // SAFETY: plain integers.
        Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
            .context("set no_new_privs")?;
        install(filters)?;
    }
    enter_directory(process.cwd())?;
    let env: &[String] = process.env().as_deref().unwrap_or_default();
    let program = find(first, env)?;
    let to_c = |values: &[String]| values.iter().map(sys::cstring).collect::<io::Result<Vec<_>>>();
    let program = sys::cstring(program).context("command")?;
    Ok((program, to_c(args).context("arguments")?, to_c(env).context("environment")?))
}

fn enter_directory(cwd: &Path) -> Result<(), SetupError> {
    nix::unistd::chdir(cwd).with(|| format!("chdir to working directory {:?}", cwd.display().to_string()))?;
    // A directory outside the root (through a leaked descriptor) has no path the kernel can name.
    let real = nix::unistd::getcwd().context("working directory")?;
    if !real.is_absolute() {
        return Err(SetupError::plain("the working directory is outside the container"));
    }
    Ok(())
}

fn limits(process: &Process) -> Result<(), SetupError> {
    for limit in process.rlimits().iter().flatten() {
        let resource = match limit.typ() {
            PosixRlimitType::RlimitCpu => libc::RLIMIT_CPU,
            PosixRlimitType::RlimitFsize => libc::RLIMIT_FSIZE,
            PosixRlimitType::RlimitData => libc::RLIMIT_DATA,
            PosixRlimitType::RlimitStack => libc::RLIMIT_STACK,
            PosixRlimitType::RlimitCore => libc::RLIMIT_CORE,
            PosixRlimitType::RlimitRss => libc::RLIMIT_RSS,
            PosixRlimitType::RlimitNproc => libc::RLIMIT_NPROC,
            PosixRlimitType::RlimitNofile => libc::RLIMIT_NOFILE,
            PosixRlimitType::RlimitMemlock => libc::RLIMIT_MEMLOCK,
            PosixRlimitType::RlimitAs => libc::RLIMIT_AS,
            PosixRlimitType::RlimitLocks => libc::RLIMIT_LOCKS,
            PosixRlimitType::RlimitSigpending => libc::RLIMIT_SIGPENDING,
            PosixRlimitType::RlimitMsgqueue => libc::RLIMIT_MSGQUEUE,
            PosixRlimitType::RlimitNice => libc::RLIMIT_NICE,
            PosixRlimitType::RlimitRtprio => libc::RLIMIT_RTPRIO,
            PosixRlimitType::RlimitRttime => libc::RLIMIT_RTTIME,
            #[allow(unreachable_patterns, reason = "the list may grow")]
            other => return Err(SetupError::plain(format!("resource limit {other:?} is not supported"))),
        };
        let value = libc::rlimit { rlim_cur: limit.soft(), rlim_max: limit.hard() };
        // SAFETY: the structure lives for the call.
        Errno::result(unsafe { libc::setrlimit(resource, &raw const value) })
            .with(|| format!("set resource limit {:?}", limit.typ()))?;
    }
    Ok(())
}

/// Capability sets as bit masks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Sets {
    bounding: u64,
    effective: u64,
    permitted: u64,
    inheritable: u64,
    ambient: u64,
}

fn bits<'a>(set: impl IntoIterator<Item = &'a Capability>) -> u64 {
    set.into_iter().filter_map(crate::spec::capability_number).fold(0, |bits, number| bits | 1 << number)
}

fn identity(process: &Process) -> Result<(), SetupError> {
    let sets = process.capabilities().as_ref().map(|caps| {
        let set = |set: &Option<oci_spec::runtime::Capabilities>| set.as_ref().map_or(0, bits);
        Sets {
            bounding: set(caps.bounding()),
            effective: set(caps.effective()),
            permitted: set(caps.permitted()),
            inheritable: set(caps.inheritable()),
            ambient: set(caps.ambient()),
        }
    });
    let sets = sets.unwrap_or_default();
    for number in 0..64 {
        // SAFETY: plain integers throughout this loop.
        let held = unsafe { libc::prctl(libc::PR_CAPBSET_READ, number, 0, 0, 0) };
        if held < 0 {
            break;
        }
        if held == 1 && sets.bounding & 1 << number == 0 {
            // SAFETY: as above.
            Errno::result(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) })
                .context("drop from the capability bounding set")?;
        }
    }
    // SAFETY: plain integers.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) }).context("keep capabilities")?;
    let user = process.user();
    let groups: Vec<Gid> = user.additional_gids().iter().flatten().map(|gid| Gid::from_raw(*gid)).collect();
    nix::unistd::setgroups(&groups).context("set supplementary groups")?;
    let (uid, gid) = (Uid::from_raw(user.uid()), Gid::from_raw(user.gid()));
    nix::unistd::setresgid(gid, gid, gid).context("set group")?;
    nix::unistd::setresuid(uid, uid, uid).context("set user")?;
    // The kernel takes one number for "leave it as it is", and a container must never run as somebody else.
    let (users, groups) = (nix::unistd::getresuid(), nix::unistd::getresgid());
    let users = users.context("get user")?;
    let groups = groups.context("get group")?;
    if [users.real, users.effective, users.saved] != [uid; 3]
        || [groups.real, groups.effective, groups.saved] != [gid; 3]
    {
        return Err(SetupError::plain(format!("user {uid} and group {gid} could not be taken on")));
    }
    set_capabilities(sets)
}

fn set_capabilities(mut sets: Sets) -> Result<(), SetupError> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut held = [Data::default(); 2];
    // SAFETY: header and data have the layout version 3 asks for.
    Errno::result(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, held.as_mut_ptr()) })
        .context("read capabilities")?;
    // We cannot give a capability that we lack ourselves, for example on a nested machine.
    let held = u64::from(held[0].permitted) | u64::from(held[1].permitted) << 32;
    sets.permitted &= held;
    sets.effective &= sets.permitted;
    sets.inheritable &= held;
    sets.ambient &= sets.permitted & sets.inheritable;
    let data = [0, 32].map(|shift| Data {
        effective: (sets.effective >> shift) as u32,
        permitted: (sets.permitted >> shift) as u32,
        inheritable: (sets.inheritable >> shift) as u32,
    });
    // SAFETY: as above.
    Errno::result(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) })
        .context("set capabilities")?;
    // SAFETY: plain integers, here and in the loop.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    for number in (0..64).filter(|number| sets.ambient & 1 << number != 0) {
        // SAFETY: plain integers.
        Errno::result(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, number, 0, 0) })
            .context("raise ambient capability")?;
    }
    Ok(())
}

fn install(filters: &[Filter]) -> Result<(), SetupError> {
    const SECCOMP_SET_MODE_FILTER: u32 = 1;
    for filter in filters {
        let program = libc::sock_fprog {
            len: u16::try_from(filter.len()).map_err(|_| SetupError::plain("seccomp program is too long"))?,
            filter: filter.as_ptr().cast_mut(),
        };
        // SAFETY: the kernel copies the program during the call and does not write to it.
        Errno::result(unsafe {
            libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        })
        .context("install seccomp filter")?;
    }
    Ok(())
}

/// Looks the program up as a shell would, with words users know from other runtimes.
fn find(name: &str, env: &[String]) -> Result<PathBuf, SetupError> {
    let quoted = |problem: &str| SetupError::plain(format!("exec: {name:?}: {problem}"));
    if name.contains('/') {
        return match check(Path::new(name)) {
            Ok(()) => Ok(PathBuf::from(name)),
            Err(Errno::ENOENT) => {
                Err(SetupError::plain(format!("exec: {name:?}: stat {name}: no such file or directory")))
            }
            Err(Errno::EISDIR) => Err(quoted("is a directory")),
            Err(Errno::EACCES) => Err(quoted("permission denied")),
            Err(error) => Err(quoted(&error.to_string())),
        };
    }
    let path = env.iter().find_map(|entry| entry.strip_prefix("PATH=")).unwrap_or_default();
    let mut denied = false;
    for directory in path.split(':') {
        let candidate = Path::new(if directory.is_empty() { "." } else { directory }).join(name);
        match check(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(Errno::EACCES) => denied = true,
            Err(_) => {}
        }
    }
    Err(quoted(if denied { "permission denied" } else { "executable file not found in $PATH" }))
}

fn check(path: &Path) -> Result<(), Errno> {
    let stat = nix::sys::stat::stat(path)?;
    if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        return Err(Errno::EISDIR);
    }
    nix::unistd::access(path, nix::unistd::AccessFlags::X_OK)
}

/// The interpreter that the kernel needs to start the program.
fn wanted(program: &CString) -> Option<String> {
    // The container may exchange the file meanwhile; a FIFO must not keep us.
    let path = Path::new(OsStr::from_bytes(program.as_bytes()));
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut head = Vec::new();
    file.take(HEAD as u64).read_to_end(&mut head).ok()?;
    interpreter(&head)
}

fn exec_error(name: &str, program: &CString, error: Errno) -> SetupError {
    let problem = match error {
        // The file exists, because `find` saw it: its interpreter is missing.
        Errno::ENOENT => format!(
            "{} exists, but its interpreter or dynamic loader{} does not: no such file or directory",
            program.to_string_lossy(),
            wanted(program).map(|name| format!(" {name}")).unwrap_or_default()
        ),
        Errno::ENOEXEC => "exec format error (built for another architecture, or a script without #!)".into(),
        Errno::EACCES => "permission denied".into(),
        other => other.desc().to_owned(),
    };
    SetupError::plain(format!("exec: {name:?}: {problem}"))
}
