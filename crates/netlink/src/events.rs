//! Changes that the kernel reports.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::libc;
use nix::sys::socket::{MsgFlags, SockFlag, setsockopt, sockopt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::socket::{attach_filter, open, receive_datagram};
use crate::{
    AddressEntry, Error, Link, Message, Netns, Protocol, RouteEntry, address, link, messages, route, rule,
};

/// The kernel writes events into messages of at most 8 KiB.
const BUFFER_BYTES: usize = 16 * 1024;

/// A socket that listens. It belongs to the tokio runtime that it was opened on.
#[derive(Debug)]
pub struct EventSocket {
    fd: AsyncFd<OwnedFd>,
    buffer: Vec<u8>,
}

impl EventSocket {
    /// Listens to the groups of a mask in a network namespace, else in that of the calling thread. `room` is the number
    /// of bytes that the kernel keeps for a listener that is late.
    pub fn open(protocol: Protocol, netns: Option<&Netns>, groups: u32, room: usize) -> Result<Self, Error> {
        let fd = open(protocol, netns, SockFlag::SOCK_NONBLOCK, groups)?;
        setsockopt(&fd, sockopt::RcvBufForce, &room)
            .or_else(|_| setsockopt(&fd, sockopt::RcvBuf, &room))
            .map_err(|error| Error::io("make room for events")(error.into()))?;
        // SAFETY: an `OwnedFd` is open for as long as it exists and is the same descriptor all the time.
        let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        let fd = registered.map_err(|error| Error::io("wait for events")(error.into()))?;
        Ok(Self { fd, buffer: vec![0; BUFFER_BYTES] })
    }

    /// Waits for the next datagram. `None` says that events were lost: there was no room for them. May be dropped while
    /// it waits.
    pub async fn receive(&mut self) -> Result<Option<&[u8]>, Error> {
        let len = loop {
            let mut ready = self.fd.readable().await.map_err(Error::io("wait for events"))?;
            let read = ready.try_io(|fd| {
                let datagram = receive_datagram(fd.as_fd(), &mut self.buffer, MsgFlags::empty())?;
                Ok(datagram.map(<[u8]>::len))
            });
            match read {
                Err(_would_block) => {}
                Ok(Ok(None)) => {}
                Ok(Ok(Some(len))) => break len,
                Ok(Err(error)) if is_loss(&error) => return Ok(None),
                Ok(Err(error)) => return Err(Error::io("read events")(error)),
            }
        };
        Ok(self.buffer.get(..len))
    }
}

/// No room at the socket, or a message that is larger than the buffer.
fn is_loss(error: &io::Error) -> bool {
    error.raw_os_error().is_none_or(|errno| errno == libc::ENOBUFS)
}

/// A change of links, addresses, routes or rules.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NetworkEvent {
    /// A link was made, or has changed.
    NewLink(Link),
    DelLink(Link),
    NewAddress(AddressEntry),
    DelAddress(AddressEntry),
    NewRoute(RouteEntry),
    DelRoute(RouteEntry),
    /// A rule that chooses a routing table was added or deleted.
    Rule,
    /// Events were lost: anything may have changed.
    Lost,
}

impl NetworkEvent {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        match message.kind {
            link::NEW => Link::parse(message).map(Self::NewLink),
            link::DELETE => Link::parse(message).map(Self::DelLink),
            address::NEW => AddressEntry::parse(message).map(Self::NewAddress),
            address::DELETE => AddressEntry::parse(message).map(Self::DelAddress),
            route::NEW => RouteEntry::parse(message).map(Self::NewRoute),
            route::DELETE => RouteEntry::parse(message).map(Self::DelRoute),
            rule::NEW | rule::DELETE => Some(Self::Rule),
            _ => None,
        }
    }
}

/// Changes of the links, addresses, routes and rules of a network namespace.
#[derive(Debug)]
pub struct NetworkEvents {
    socket: EventSocket,
    /// Events of one datagram that nobody has taken yet.
    waiting: VecDeque<NetworkEvent>,
}

impl NetworkEvents {
    /// Events of IPv4, and of IPv6 if it is asked for.
    pub fn listen(netns: Option<&Netns>, ipv6: bool) -> Result<Self, Error> {
        const LINKS: u32 = 1;
        const ADDRESSES_ROUTES_RULES: u32 = 1 << 4 | 1 << 6 | 1 << 7;
        const ADDRESSES_ROUTES_RULES_OF_IPV6: u32 = 1 << 8 | 1 << 10 | 1 << 18;
        const ROOM: usize = 1024 * 1024;
        let groups = LINKS | ADDRESSES_ROUTES_RULES | if ipv6 { ADDRESSES_ROUTES_RULES_OF_IPV6 } else { 0 };
        let socket = EventSocket::open(Protocol::Route, netns, groups, ROOM)?;
        Ok(Self { socket, waiting: VecDeque::new() })
    }

    /// Waits for the next event. May be dropped while it waits.
    pub async fn next(&mut self) -> Result<NetworkEvent, Error> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Ok(event);
            }
            match self.socket.receive().await? {
                None => return Ok(NetworkEvent::Lost),
                Some(datagram) => {
                    let events = messages(datagram).filter_map(|message| NetworkEvent::parse(&message));
                    self.waiting.extend(events);
                }
            }
        }
    }
}

/// Modules of the kernel that come and go.
#[derive(Debug)]
pub struct ModuleEvents(EventSocket);

impl ModuleEvents {
    pub fn listen(netns: Option<&Netns>) -> Result<Self, Error> {
        const KERNEL: u32 = 1;
        const ROOM: usize = 256 * 1024;
        let socket = EventSocket::open(Protocol::Uevent, netns, KERNEL, ROOM)?;
        // Every link of a pod is a device, and would wake us.
        attach_filter(socket.fd.get_ref().as_fd(), &mut modules_only())
            .map_err(Error::io("filter events of the kernel"))?;
        Ok(Self(socket))
    }

    /// Waits until a module comes or goes, and returns its path, such as `/module/br_netfilter`. `None` says that events
    /// were lost. May be dropped while it waits.
    pub async fn next(&mut self) -> Result<Option<String>, Error> {
        loop {
            match self.0.receive().await? {
                None => return Ok(None),
                Some(datagram) => {
                    if let Some(path) = module_path(datagram) {
                        return Ok(Some(path.to_owned()));
                    }
                }
            }
        }
    }
}

/// Accepts events whose path begins with `/mod`: it stands behind `add@`, or behind `remove@` and `change@`, which have the
/// same length.
fn modules_only() -> [libc::sock_filter; 8] {
    const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const GO_ON: u32 = libc::BPF_JMP | libc::BPF_JA;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    [
        step(LOAD_WORD, 0, 0, 0),
        step(IF_EQUAL, 2, 0, u32::from_be_bytes(*b"add@")),
        step(LOAD_WORD, 0, 0, 7),
        step(GO_ON, 0, 0, 1),
        step(LOAD_WORD, 0, 0, 4),
        step(IF_EQUAL, 0, 1, u32::from_be_bytes(*b"/mod")),
        step(RETURN, 0, 0, u32::MAX),
        step(RETURN, 0, 0, 0),
    ]
}

/// The path of a module in an event such as `add@/module/br_netfilter`, which lines of variables follow.
pub(crate) fn module_path(datagram: &[u8]) -> Option<&str> {
    let line = datagram.split(|byte| *byte == 0).next()?;
    let (_, path) = std::str::from_utf8(line).ok()?.split_once('@')?;
    path.starts_with("/module/").then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_in_events() {
        for (event, path) in [
            (&b"add@/module/br_netfilter\0ACTION=add\0SUBSYSTEM=module\0"[..], Some("/module/br_netfilter")),
            (b"remove@/module/x", Some("/module/x")),
            (b"add@/devices/virtual/net/veth0\0SUBSYSTEM=net\0", None),
            (b"add@/modules", None),
            (b"add", None),
            (b"\xff@/module/x\0", None),
            (b"", None),
        ] {
            assert_eq!(module_path(event), path, "{}", String::from_utf8_lossy(event));
        }
    }

    /// Runs the filter as the kernel does; a load beyond the end rejects.
    fn accepts(program: &[libc::sock_filter], event: &[u8]) -> bool {
        let (mut at, mut word) = (0, 0);
        loop {
            let step = &program[at];
            at += 1;
            match u32::from(step.code) & 7 {
                libc::BPF_LD => match event.get(step.k as usize..step.k as usize + 4) {
                    Some(bytes) => word = u32::from_be_bytes(bytes.try_into().unwrap()),
                    None => return false,
                },
                libc::BPF_JMP if u32::from(step.code) & 0xf0 == libc::BPF_JA => at += step.k as usize,
                libc::BPF_JMP => at += usize::from(if word == step.k { step.jt } else { step.jf }),
                _ => return step.k != 0,
            }
        }
    }

    #[test]
    fn the_filter_passes_modules() {
        for (event, passes) in [
            ("add@/module/br_netfilter\0ACTION=add\0", true),
            ("remove@/module/br_netfilter\0", true),
            ("change@/module/x\0", true),
            ("add@/devices/virtual/net/veth0\0", false),
            ("remove@/devices/virtual/net/veth0\0", false),
            ("add@/mo", false),
            ("", false),
        ] {
            assert_eq!(accepts(&modules_only(), event.as_bytes()), passes, "{event}");
        }
    }

    #[test]
    fn lost_events() {
        assert!(is_loss(&io::Error::from_raw_os_error(libc::ENOBUFS)));
        assert!(is_loss(&io::Error::other("larger than the buffer")));
        assert!(!is_loss(&io::Error::from_raw_os_error(libc::EBADF)));
    }
}
