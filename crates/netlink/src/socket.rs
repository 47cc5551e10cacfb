//! A blocking netlink socket. The kernel does what it is asked for while the request is sent, so answers never take long.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvmsg, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;

use crate::message::flag;
use crate::{DONE, ERROR, Error, Message, Messages, Netns, messages, refusal};

/// The kernel answers at once; a lost answer must not hang the caller.
const ANSWER_SECONDS: i64 = 30;
/// The kernel puts at most 32 KiB of a list into one datagram, and no other answer is as large.
const BUFFER_BYTES: usize = 64 * 1024;
/// Attempts to list what others change at the same time.
const ATTEMPTS: usize = 16;

/// The part of the kernel that a socket speaks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes, queues.
    Route,
    /// Connection tracking and nftables.
    Netfilter,
    /// Devices and modules.
    Uevent,
}

impl Protocol {
    fn number(self) -> SockProtocol {
        match self {
            Self::Route => SockProtocol::NetlinkRoute,
            Self::Netfilter => SockProtocol::NetlinkNetFilter,
            Self::Uevent => SockProtocol::NetlinkKObjectUEvent,
        }
    }
}

/// Opens a socket that listens to the groups of a mask, in a namespace or where the caller is.
pub(crate) fn open(
    protocol: Protocol,
    netns: Option<&Netns>,
    flags: SockFlag,
    groups: u32,
) -> Result<OwnedFd, Error> {
    let open = || -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | flags;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol.number())?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(fd)
    };
    let opened = match netns {
        None => open(),
        Some(netns) => netns.run(open)?,
    };
    opened.map_err(Error::io("open a netlink socket"))
}

/// Receives one datagram of the kernel; `None` is one of somebody else. Fails if it does not fit the buffer.
pub(crate) fn receive_datagram<'a>(
    fd: BorrowedFd<'_>,
    buffer: &'a mut [u8],
    flags: MsgFlags,
) -> io::Result<Option<&'a [u8]>> {
    let (len, from_kernel) = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        match recvmsg::<NetlinkAddr>(fd.as_raw_fd(), &mut parts, None, flags | MsgFlags::MSG_TRUNC) {
            Ok(got) => break (got.bytes, got.address.is_none_or(|from| from.pid() == 0)),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    match buffer.get(..len) {
        None => Err(io::Error::other("a message of the kernel is larger than the buffer for it")),
        Some(bytes) => Ok(from_kernel.then_some(bytes)),
    }
}

/// A socket for requests.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
    send_buffer: usize,
    buffer: Vec<u8>,
    /// Answers of an exchange that failed may still arrive.
    unread: bool,
}

impl Socket {
    /// A socket in a network namespace, else in that of the calling thread.
    pub fn open(protocol: Protocol, netns: Option<&Netns>) -> Result<Self, Error> {
        let fd = open(protocol, netns, SockFlag::empty(), 0)?;
        setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::new(ANSWER_SECONDS, 0))
            .map_err(|error| Error::io("set up a netlink socket")(error.into()))?;
        // Errors come with a text and do not repeat the request. A kernel without that still says the number.
        for option in [libc::NETLINK_EXT_ACK, libc::NETLINK_CAP_ACK] {
            let _ = turn_on(&fd, option);
        }
        Ok(Self { fd, sequence: 1, send_buffer: 0, buffer: vec![0; BUFFER_BYTES], unread: false })
    }

    /// The number for the next message.
    pub fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Sends messages, whose numbers begin with [`sequence`](Self::sequence), in one call: the kernel takes a
    /// transaction only as a whole.
    pub fn send(&mut self, messages: &Messages) -> io::Result<()> {
        self.sequence = messages.next_sequence();
        self.send_bytes(messages.bytes())
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        if std::mem::replace(&mut self.unread, true) {
            while recvmsg_now(&self.fd, &mut self.buffer) {}
        }
        // The kernel refuses messages that do not fit the buffer, and doubles the number given. Its default is larger
        // than a page.
        if bytes.len() > self.send_buffer.max(4096) {
            setsockopt(&self.fd, sockopt::SndBufForce, &bytes.len())?;
            self.send_buffer = bytes.len();
        }
        loop {
            match send(self.fd.as_raw_fd(), bytes, MsgFlags::empty()) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads messages from the kernel until `each` says that it has the last one.
    pub fn receive(&mut self, mut each: impl FnMut(Message<'_>) -> io::Result<bool>) -> io::Result<()> {
        loop {
            let datagram = receive_datagram(self.fd.as_fd(), &mut self.buffer, MsgFlags::empty())?;
            let mut last = false;
            for message in datagram.into_iter().flat_map(messages) {
                last |= each(message)?;
            }
            if last {
                self.unread = false;
                return Ok(());
            }
        }
    }

    /// Makes one request and returns what `parse` makes of the answers. A list that changed while the kernel wrote it
    /// is asked for again.
    pub fn request<T>(
        &mut self,
        name: &'static str,
        mut request: Messages,
        mut parse: impl FnMut(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        for _ in 0..ATTEMPTS {
            let sequence = self.sequence;
            self.sequence = sequence.wrapping_add(1);
            self.send_bytes(request.numbered(sequence)).map_err(Error::io(format!("{name}: send")))?;
            let mut exchange = Exchange::default();
            let mut refused = None;
            self.receive(|message| {
                if message.sequence != sequence {
                    return Ok(false);
                }
                let last = exchange.take(&message, &mut parse);
                refused = last.then(|| refusal(&message)).flatten();
                Ok(last)
            })
            .map_err(Error::io(format!("{name}: receive")))?;
            if let Some((errno, explanation)) = refused {
                return Err(Error::Refused { request: name, errno, explanation });
            }
            if !exchange.interrupted {
                return Ok(exchange.found);
            }
        }
        Err(Error::Interrupted { request: name })
    }
}

/// The answers to one request.
struct Exchange<T> {
    found: Vec<T>,
    interrupted: bool,
}

impl<T> Default for Exchange<T> {
    fn default() -> Self {
        Self { found: Vec::new(), interrupted: false }
    }
}

impl<T> Exchange<T> {
    /// Returns true if the message is the last one.
    fn take(&mut self, message: &Message<'_>, parse: &mut impl FnMut(&Message<'_>) -> Option<T>) -> bool {
        if matches!(message.kind, ERROR) {
            // Its flags mean something else.
            return true;
        }
        self.interrupted |= message.flags & flag::DUMP_INTERRUPTED != 0;
        if message.kind == DONE {
            return true;
        }
        self.found.extend(parse(message));
        false
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn recvmsg_now(fd: &OwnedFd, buffer: &mut [u8]) -> bool {
    match receive_datagram(fd.as_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
        Ok(_) => true,
        // Lost messages are reported once.
        Err(error) => error.raw_os_error() == Some(libc::ENOBUFS),
    }
}

fn turn_on(fd: &OwnedFd, option: libc::c_int) -> io::Result<()> {
    let on: libc::c_int = 1;
    let len = libc::socklen_t::try_from(size_of_val(&on)).unwrap_or_default();
    // SAFETY: `fd` is an open socket, and the pointer is to an integer of the length given, which outlives the call.
    let result =
        unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_NETLINK, option, (&raw const on).cast(), len) };
    Errno::result(result).map(drop).map_err(io::Error::from)
}

/// Has the kernel drop what a program does not accept, before it wakes the listener.
pub(crate) fn attach_filter(fd: BorrowedFd<'_>, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let len = libc::c_ushort::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    let size = libc::socklen_t::try_from(size_of_val(&program)).unwrap_or_default();
    // SAFETY: `fd` is an open socket. The pointer is to a `sock_fprog` of the size given, which names as many
    // instructions as the slice has; both outlive the call, and the kernel copies them.
    let result = unsafe {
        let option = (&raw const program).cast();
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, option, size)
    };
    Errno::result(result).map(drop).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_exchange() {
        let message = |kind, flags| Message { kind, flags, sequence: 1, body: &[] };
        let mut exchange = Exchange::default();
        let mut parse = |message: &Message<'_>| (message.kind == 16).then_some(message.kind);
        for (kind, flags, last, interrupted) in [
            (16, 2, false, false),
            (17, 2, false, false),
            (16, 2 | flag::DUMP_INTERRUPTED, false, true),
            (DONE, 2, true, true),
        ] {
            assert_eq!(exchange.take(&message(kind, flags), &mut parse), last, "{kind}");
            assert_eq!(exchange.interrupted, interrupted, "{kind}");
        }
        assert_eq!(exchange.found, [16, 16]);
        let mut answered = Exchange::<u16>::default();
        assert!(answered.take(&message(ERROR, flag::DUMP_INTERRUPTED), &mut parse));
        assert!(!answered.interrupted, "an error has other flags");
        let mut ended = Exchange::<u16>::default();
        assert!(ended.take(&message(DONE, flag::DUMP_INTERRUPTED), &mut parse));
        assert!(ended.interrupted, "the end of a list may say it, too");
    }
}
