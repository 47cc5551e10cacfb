//! Unix sockets for root alone.

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use std::fs::Permissions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// Listens on a socket that only the owner may connect to, without blocking. A socket left at `path` is replaced.
///
/// The mode is set before the socket listens: until then every connection is refused, so that nobody slips in
/// between.
pub fn listen_private(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listen(&fd, Backlog::new(128)?)?;
    Ok(UnixListener::from(fd))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn only_the_owner_may_connect() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(listen_private(&path).unwrap());
        let listener = listen_private(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
    }
}
