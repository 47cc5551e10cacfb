//! A blocking netlink socket of netfilter.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;
use nlink::netlink::namespace::Netns;

/// The kernel answers at once; a lost answer must not hang the proxy.
const ANSWER_SECONDS: i64 = 30;
const BUFFER_BYTES: usize = 64 * 1024;

pub struct Socket {
    fd: OwnedFd,
    send_buffer: usize,
    buffer: Vec<u8>,
}

/// A message from the kernel, without its header.
pub struct Reply<'a> {
    pub kind: u16,
    pub sequence: u32,
    pub body: &'a [u8],
}

impl Socket {
    /// A socket in the network namespace at `netns`, else in that of the calling thread.
    pub fn open(netns: Option<&Path>) -> io::Result<Self> {
        let fd = match netns {
            None => open_here()?,
            Some(path) => {
                Netns::from_path(path).and_then(|netns| netns.run(open_here)).map_err(io::Error::other)??
            }
        };
        setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::new(ANSWER_SECONDS, 0))?;
        Ok(Self { fd, send_buffer: 0, buffer: vec![0; BUFFER_BYTES] })
    }

    /// Sends messages in one call: the kernel takes a transaction only as a whole.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        // The kernel refuses messages that do not fit the buffer, and doubles the number given.
        if bytes.len() > self.send_buffer {
            setsockopt(&self.fd, sockopt::SndBufForce, &bytes.len())?;
            self.send_buffer = bytes.len();
        }
        send(self.fd.as_raw_fd(), bytes, MsgFlags::empty())?;
        Ok(())
    }

    /// Reads messages from the kernel until `each` says that it has the last one.
    pub fn receive(&mut self, mut each: impl FnMut(Reply<'_>) -> io::Result<bool>) -> io::Result<()> {
        loop {
            let len = recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC)?;
            if len > self.buffer.len() {
                return Err(io::Error::other("an answer of the kernel is larger than the buffer for it"));
            }
            let mut last = false;
            for reply in messages(&self.buffer[..len]) {
                last |= each(reply)?;
            }
            if last {
                return Ok(());
            }
        }
    }

    /// Forgets answers that nobody waits for any more.
    pub fn drain(&mut self) {
        while recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT).is_ok() {}
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn open_here() -> io::Result<OwnedFd> {
    let fd = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    Ok(fd)
}

/// Splits a datagram into its messages; a damaged rest is dropped.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Reply<'_>> {
    const HEADER: usize = 16;
    std::iter::from_fn(move || {
        let number = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let len = usize::try_from(number(0)?).ok().filter(|len| *len >= HEADER)?;
        let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
        let reply = Reply { kind, sequence: number(8)?, body: bytes.get(HEADER..len)? };
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(reply)
    })
}

/// The attributes of a message, each with its type and data.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const HEADER: usize = 4;
    const KIND: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let len = usize::from(u16::from_ne_bytes(bytes.get(0..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & KIND;
        let data = bytes.get(HEADER..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, data))
    })
}

/// The data of the first attribute of that type.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, data)| data)
}
