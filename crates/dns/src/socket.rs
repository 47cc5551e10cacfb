//! Sockets that only hear one interface.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, SockaddrIn6};
use nix::sys::socket::{bind as bind_to, listen, setsockopt, socket, sockopt};

use crate::server::Listen;

/// A socket that is bound to the address and the interface; streams listen.
pub fn bind(at: &Listen, kind: SockType) -> io::Result<OwnedFd> {
    let family = match at.address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let fd = socket(family, kind, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, None)?;
    if let Some(device) = &at.device {
        setsockopt(&fd, sockopt::BindToDevice, &OsString::from(device))?;
    }
    if kind == SockType::Stream {
        // Connections of an earlier process may still be closing. For datagrams it would let two servers share a port.
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    }
    match at.address {
        SocketAddr::V4(address) => bind_to(fd.as_raw_fd(), &SockaddrIn::from(address))?,
        SocketAddr::V6(address) => bind_to(fd.as_raw_fd(), &SockaddrIn6::from(address))?,
    }
    if kind == SockType::Stream {
        listen(&fd, Backlog::new(128)?)?;
    }
    Ok(fd)
}
