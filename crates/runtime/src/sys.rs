//! The system calls neither std nor nix wraps, and descriptor passing over unix sockets.
//!
//! Everything here is usable between fork and exec in a single-threaded process.

use std::ffi::{CString, OsStr};
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Most descriptors one message carries: the three standard streams.
pub const MAX_FDS: usize = 3;

pub fn cstring(value: impl AsRef<OsStr>) -> io::Result<CString> {
    CString::new(value.as_ref().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a path or argument contains a NUL byte"))
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = check(result)? as RawFd;
    // SAFETY: the kernel has just returned this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The rule for resolving a path below a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beneath {
    /// As if the directory were `/`: absolute symlinks and `..` stay inside.
    InRoot,
    /// Symlinks are refused.
    NoSymlinks,
}

/// Opens `path` below `dir` so that no symlink in it can lead out.
pub fn open_beneath(dir: BorrowedFd<'_>, path: &Path, flags: i32, how: Beneath) -> io::Result<OwnedFd> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let name = if relative.as_os_str().is_empty() { cstring(".")? } else { cstring(relative)? };
    // SAFETY: open_how is plain data for which all zeroes are valid.
    let mut open: libc::open_how = unsafe { zeroed() };
    open.flags = (flags | libc::O_CLOEXEC) as u64;
    if flags & libc::O_CREAT != 0 {
        open.mode = 0o644;
    }
    open.resolve = match how {
        Beneath::InRoot => libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS,
        Beneath::NoSymlinks => libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_SYMLINKS,
    };
    // SAFETY: pointers are valid for the call and the size matches the structure.
    owned(unsafe {
        libc::syscall(
            libc::SYS_openat2,
            dir.as_raw_fd(),
            name.as_ptr(),
            &raw const open,
            size_of::<libc::open_how>(),
        )
    })
}

/// Opens the regular file at `path` below `dir`, which is the root of an image or a container. Anything else there
/// is an error: opening a FIFO waits, and opening a device acts on it.
pub fn open_regular_in_root(dir: BorrowedFd<'_>, path: &Path) -> io::Result<std::fs::File> {
    let found = open_beneath(dir, path, libc::O_PATH, Beneath::InRoot)?;
    let stat = nix::sys::stat::fstat(&found)?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is not a regular file", path.display()),
        ));
    }
    std::fs::File::open(fd_path(&found))
}

/// True if the descriptor is the null device.
pub fn is_null(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let stat = nix::sys::stat::fstat(fd)?;
    Ok(stat.st_mode & libc::S_IFMT == libc::S_IFCHR && stat.st_rdev == libc::makedev(1, 3))
}

/// A path by which the kernel finds an open descriptor again, whatever the path it was opened by is now.
pub fn fd_path(fd: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// A detached copy of the mount at `path`, with the mounts below it when `recursive`.
pub fn clone_mount(path: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let path = cstring(path)?;
    let mut flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= libc::AT_RECURSIVE as u32;
    }
    // SAFETY: the path is a valid C string for the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) })
}

/// Attaches a detached mount at the directory or file `target` refers to.
pub fn attach_mount(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let empty = c"";
    // SAFETY: both strings are static, both descriptors are borrowed for the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            empty.as_ptr(),
            target.as_raw_fd(),
            empty.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH,
        )
    })?;
    Ok(())
}

/// Attributes of a mount to set or clear; the propagation is one of `MS_PRIVATE`, `MS_SLAVE`, `MS_SHARED` or 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MountAttributes {
    pub set: u64,
    pub clear: u64,
    pub propagation: u64,
}

pub fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    recursive: bool,
    attributes: MountAttributes,
) -> io::Result<()> {
    let attr = libc::mount_attr {
        attr_set: attributes.set,
        attr_clr: attributes.clear,
        propagation: attributes.propagation,
        userns_fd: 0,
    };
    let empty = c"";
    let mut flags = libc::AT_EMPTY_PATH;
    if recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the structure and its size match; the descriptor is borrowed for the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            empty.as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })?;
    Ok(())
}

/// Makes a detached mount show its files with the identities of a user namespace.
pub fn map_mount(mount: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    let attr = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: user_namespace.as_raw_fd() as u64,
    };
    // SAFETY: the structure and its size match; both descriptors are borrowed for the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })?;
    Ok(())
}

/// A detached, read-only overlay of `lowers`: a view through which nothing below can ever be written.
pub fn read_only_overlay(lowers: &[&Path]) -> io::Result<OwnedFd> {
    overlay(lowers, None)
}

/// A detached overlay of `lowers`; read-only unless it has a directory to write to and one to work in.
pub fn overlay(lowers: &[&Path], writable: Option<(&Path, &Path)>) -> io::Result<OwnedFd> {
    const FSCONFIG_SET_STRING: u32 = 1;
    const FSCONFIG_CMD_CREATE: u32 = 6;
    // SAFETY: static C string.
    let context = owned(unsafe { libc::syscall(libc::SYS_fsopen, c"overlay".as_ptr(), 1u32) })?;
    let set = |key: &std::ffi::CStr, value: &OsStr| -> io::Result<()> {
        let value = cstring(value)?;
        // SAFETY: C strings live for the call.
        check(unsafe {
            libc::syscall(
                libc::SYS_fsconfig,
                context.as_raw_fd(),
                FSCONFIG_SET_STRING,
                key.as_ptr(),
                value.as_ptr(),
                0,
            )
        })
        .map(drop)
    };
    let joined = lowers.iter().map(|lower| lower.as_os_str().as_bytes()).collect::<Vec<_>>().join(&b':');
    set(c"lowerdir", OsStr::from_bytes(&joined))?;
    if let Some((upper, work)) = writable {
        set(c"upperdir", upper.as_os_str())?;
        set(c"workdir", work.as_os_str())?;
    }
    // SAFETY: creating the superblock takes no pointer arguments.
    check(unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            context.as_raw_fd(),
            FSCONFIG_CMD_CREATE,
            std::ptr::null::<u8>(),
            std::ptr::null::<u8>(),
            0,
        )
    })?;
    let read_only = if writable.is_none() { libc::MOUNT_ATTR_RDONLY } else { 0 };
    let attributes = read_only | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    // SAFETY: no pointers.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1u32, attributes as u32) })
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Which side of a fork we are on.
pub enum Forked {
    Child,
    Parent { pid: i32 },
}

/// Forks with `flags` (namespaces), optionally straight into a version 2 cgroup.
///
/// # Safety
/// The caller must be single-threaded: the child continues with a copy of the whole process.
pub unsafe fn fork_with(flags: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
    // SAFETY: clone_args is plain data for which all zeroes are valid.
    let mut args: libc::clone_args = unsafe { zeroed() };
    args.flags = flags;
    if flags & libc::CLONE_PARENT as u64 == 0 {
        // A sibling has its parent's.
        args.exit_signal = libc::SIGCHLD as u64;
    }
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: no CLONE_VM and no new stack, so this is a plain fork; the caller is single-threaded.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) })?;
    Ok(if pid == 0 { Forked::Child } else { Forked::Parent { pid: pid as i32 } })
}

/// Sends bytes, with descriptors attached to the first of them. Returns how many bytes went out.
pub fn send_with_fds(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[RawFd]) -> io::Result<usize> {
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    let iov = [io::IoSlice::new(bytes)];
    let control = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &control };
    Ok(sendmsg::<()>(socket.as_raw_fd(), &iov, control, MsgFlags::MSG_NOSIGNAL, None)?)
}

/// Receives bytes and any descriptors that came with them (close-on-exec).
pub fn receive_with_fds(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
    let mut iov = [io::IoSliceMut::new(buffer)];
    let mut space = nix::cmsg_space!([RawFd; MAX_FDS]);
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = control {
            for fd in received {
                // SAFETY: the kernel installed this descriptor for us with this message.
                fds.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
    }
    Ok(message.bytes)
}

/// Closes every descriptor from 3 upwards.
pub fn close_all_but_stdio() {
    // SAFETY: only called right before exec or in a child that uses no descriptor afterwards.
    unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) };
}

/// Marks every descriptor from 3 upwards close-on-exec: whatever we forgot never reaches a container.
pub fn close_all_on_exec() {
    // SAFETY: changes flags of our own descriptors only.
    unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// Nanoseconds since the epoch.
pub fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// Replaces a file as a whole: a reader sees the old content or the new one. With `durable` it has reached
/// the disk before the name changes.
pub fn write_atomic(path: &Path, bytes: &[u8], durable: bool) -> io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let temporary = Path::new(&name);
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(temporary)?;
    file.write_all(bytes)?;
    if durable {
        file.sync_data()?;
    }
    std::fs::rename(temporary, path)
}
