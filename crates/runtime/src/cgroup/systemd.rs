//! Containers as systemd's scopes: `ferrite-<id>.scope` in the slice of their pod.
//!
//! Which groups are scopes is said by their paths. systemd makes such a group and knows its limits, so that
//! it does not take them back; we manage the groups inside, as everywhere else.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use ferrite_cgroup::{Layout, Limits};
use ferrite_systemd::{Manager, ScopeRequest, Slice};

use crate::sys::{self, Forked};

const PREFIX: &str = "ferrite-";
const SUFFIX: &str = ".scope";

/// The path of the group a sandbox names as its parent, be it a path or a slice.
pub fn parent_path(parent: &str) -> String {
    match Slice::parse(parent) {
        Ok(slice) if Slice::is_slice(parent) => slice.path(),
        _ => parent.to_owned(),
    }
}

/// The group of a container below its parent.
pub fn container_path(parent: &str, id: &str) -> String {
    if Slice::is_slice(parent) { format!("{parent}/{PREFIX}{id}{SUFFIX}") } else { format!("{parent}/{id}") }
}

/// A scope of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    unit: String,
    slice: Slice,
}

impl Scope {
    /// The scope a group is; `None` for a group systemd knows nothing of.
    pub fn of(group: &str) -> Option<Self> {
        let (parent, unit) = group.rsplit_once('/')?;
        let ours = unit.starts_with(PREFIX) && unit.ends_with(SUFFIX);
        let slice = Slice::parse(parent).ok().filter(|_| ours)?;
        Some(Self { unit: unit.to_owned(), slice })
    }

    /// Has it made. A scope cannot be without a process: until the container's first is in it, the answer holds
    /// the place.
    pub fn start(&self, layout: &Layout, limits: &Limits) -> io::Result<Holder> {
        let holder = Holder::start()?;
        let request = ScopeRequest {
            unit: &self.unit,
            slice: &self.slice,
            description: "ferrite container",
            pid: holder.pid as u32,
            limits,
        };
        let mut manager = connect(layout)?;
        match manager.start_scope(&request) {
            // Left by a start that was never finished.
            Err(error) if error.is_unit_exists() => {
                manager.stop(&self.unit)?;
                manager.start_scope(&request)?;
            }
            other => other?,
        }
        Ok(holder)
    }

    /// Tells systemd of new limits.
    pub fn update(&self, layout: &Layout, limits: &Limits) -> io::Result<()> {
        Ok(connect(layout)?.update(&self.unit, limits)?)
    }

    /// Has it ended and forgotten.
    pub fn stop(&self, layout: &Layout) -> io::Result<()> {
        Ok(connect(layout)?.stop(&self.unit)?)
    }
}

/// Ends a slice with everything in it.
pub fn stop_slice(layout: &Layout, slice: &Slice) -> io::Result<()> {
    Ok(connect(layout)?.stop(&slice.to_string())?)
}

fn connect(layout: &Layout) -> io::Result<Manager> {
    Ok(Manager::connect(layout.version())?)
}

/// A process that only waits, until the value is dropped or this process ends.
pub struct Holder {
    pid: i32,
    /// The other end of the pipe that it waits on.
    _alive: OwnedFd,
}

impl Holder {
    fn start() -> io::Result<Self> {
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let number = read.as_raw_fd();
        // SAFETY: other threads may hold locks, so the child makes system calls only: it takes nothing, frees
        // nothing and leaves by `_exit`.
        match unsafe { sys::fork_with(0, None) }? {
            // SAFETY: as above. Everything but the pipe's end is closed; one byte is there to be read into.
            Forked::Child => unsafe {
                if number > 0 {
                    libc::syscall(libc::SYS_close_range, 0u32, number as u32 - 1, 0u32);
                }
                libc::syscall(libc::SYS_close_range, number as u32 + 1, u32::MAX, 0u32);
                let mut byte = 0u8;
                libc::read(number, (&raw mut byte).cast(), 1);
                libc::_exit(0)
            },
            Forked::Parent { pid } => Ok(Self { pid, _alive: write }),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // SAFETY: our own child, not waited for before; it may have been ended by systemd already.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_scopes() {
        for (parent, group, unit) in [
            ("/ferrite/kubepods/podx", "/ferrite/kubepods/podx/1", None),
            (
                "kubepods-podx.slice",
                "/kubepods.slice/kubepods-podx.slice/ferrite-1.scope",
                Some("ferrite-1.scope"),
            ),
            ("/a.slice/a-b.slice", "/a.slice/a-b.slice/ferrite-1.scope", Some("ferrite-1.scope")),
        ] {
            let path = container_path(&parent_path(parent), "1");
            assert_eq!(path, group);
            assert_eq!(Scope::of(&path).map(|scope| scope.unit).as_deref(), unit);
        }
        assert_eq!(Scope::of("/a.slice/ferrite-1.scope/exec"), None, "a group below a scope is ours alone");
        assert_eq!(Scope::of("/a.slice/other.scope"), None);
    }

    #[test]
    fn a_holder_ends_with_its_value() {
        let holder = Holder::start().unwrap();
        let path = format!("/proc/{}", holder.pid);
        assert!(std::path::Path::new(&path).exists());
        drop(holder);
        assert!(!std::path::Path::new(&path).exists());
    }
}
