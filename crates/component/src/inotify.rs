//! Waiting for a directory to change.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// Watches one directory: files written, made, moved or removed in it.
#[derive(Debug)]
pub struct Watcher {
    fd: AsyncFd<OwnedFd>,
}

impl Watcher {
    /// Every change, also of a file that is still being written.
    pub fn directory(path: &Path) -> io::Result<Self> {
        let mask =
            libc::IN_MODIFY | libc::IN_CREATE | libc::IN_MOVED_TO | libc::IN_MOVED_FROM | libc::IN_DELETE;
        Self::with(path, mask)
    }

    /// Files that were written to their end, moved or removed.
    pub fn closed_files(path: &Path) -> io::Result<Self> {
        let mask = libc::IN_CLOSE_WRITE
            | libc::IN_MOVED_TO
            | libc::IN_MOVED_FROM
            | libc::IN_DELETE
            | libc::IN_DELETE_SELF;
        Self::with(path, mask)
    }

    fn with(path: &Path, mask: u32) -> io::Result<Self> {
        let name = std::ffi::CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: no pointers are passed; the result is checked before it is used.
        let raw = unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` is an open descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: `name` is a valid C string that lives across the call, and `fd` is open.
        let watch = unsafe { libc::inotify_add_watch(fd.as_raw_fd(), name.as_ptr(), mask) };
        if watch < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is owned by the `AsyncFd` and stays the same until it is dropped.
        let fd = unsafe { AsyncFd::register(fd)? };
        Ok(Self { fd })
    }

    /// Waits until something changed since the last call.
    pub async fn changed(&mut self) -> io::Result<()> {
        loop {
            let mut guard = self.fd.readable().await?;
            let drained = guard.try_io(|fd| drain(fd.get_ref()));
            match drained {
                Ok(result) => return result,
                Err(_would_block) => continue,
            }
        }
    }
}

/// Takes all pending events; which they are does not matter.
fn drain(fd: &OwnedFd) -> io::Result<()> {
    let mut buffer = [0u8; 4096];
    let mut any = false;
    // Bounded: a busy writer must not keep the reader here.
    for _ in 0..64 {
        match nix::unistd::read(fd, &mut buffer) {
            Ok(0) => break,
            Ok(_) => any = true,
            Err(nix::errno::Errno::EAGAIN) if any => break,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
