//! Leaving no trace.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, umount2};

use super::sandbox::{end_supervisor, remove_tree};
use super::{OpenError, records};
use crate::Config;
use crate::cgroup;
use ferrite_systemd::Slice;

/// Longest wait for a supervisor to end after a request or a kill.
const PATIENCE_MS: i32 = 30_000;

/// Takes the directory for this runtime alone.
pub(super) fn lock(root: &Path) -> Result<Flock<std::fs::File>, OpenError> {
    let path = root.join("lock");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|source| OpenError::Directory { path: path.clone(), source })?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| OpenError::Locked(root.to_owned()))
}

pub(super) fn unmount(path: &Path) -> io::Result<()> {
    // Something may have been mounted twice; bounded, because a mount we cannot see through is not ours.
    for _ in 0..8 {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point, or not there.
            Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(io::Error::other(format!("unmount {}: {error}", path.display()))),
        }
    }
    Ok(())
}

/// Waits until a process that is not our child has ended.
pub(super) fn wait_for_process(pid: i32) {
    // SAFETY: no pointers; a descriptor or an error comes back.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32;
    if fd < 0 {
        return;
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let _owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&raw mut poll, 1, PATIENCE_MS) };
}

/// Removes everything a runtime with this configuration ever made: processes, mounts, control groups, run
/// directory and state. Needs no running runtime, so it also works after a crash; may be repeated. The
/// directories' parents stay, and so does the pod network, which is its owner's to remove.
pub async fn destroy(config: Config) -> io::Result<()> {
    super::client::blocking(move || {
        for sandboxes in [config.run.join(records::SANDBOXES)] {
            for entry in std::fs::read_dir(&sandboxes).into_iter().flatten().flatten() {
                end_supervisor(&entry.path())?;
            }
        }
        if let Ok(cgroups) = ferrite_cgroup::Layout::detect() {
            // Whatever escaped its supervisor is still in our groups.
            cgroups.kill(&config.cgroup_parent);
            cgroup::remove(&cgroups, &config.cgroup_parent)?;
            let slice = Slice::of(config.cgroup_parent.split('/'));
            if cgroups.exists(&slice.path()) {
                cgroups.kill(&slice.path());
                if let Err(error) = cgroup::systemd::stop_slice(&cgroups, &slice) {
                    tracing::warn!(%slice, %error, "systemd did not end a slice");
                }
                cgroup::remove(&cgroups, &slice.path())?;
            }
        }
        for directory in [&config.run, &config.root] {
            ferrite_hostfs::mounts::unmount_below(directory)?;
            remove_tree(directory)?;
        }
        Ok(())
    })
    .await
}
