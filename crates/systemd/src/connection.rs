//! A connection to systemd: its own socket, or the system bus.

use crate::wire::{self, Call, Kind, Malformed, Message, PROLOGUE, Reader, Writer};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// systemd's own socket, for root; it works without a bus daemon.
const PRIVATE: &str = "/run/systemd/private";
const BUS: &str = "/run/dbus/system_bus_socket";
pub const BUS_NAME: &str = "org.freedesktop.DBus";
pub const BUS_PATH: &str = "/org/freedesktop/DBus";
/// Signals that are kept until somebody asks for them; a peer may send many.
const MAX_SIGNALS: usize = 64;
/// Descriptors of one message.
const MAX_DESCRIPTORS: usize = 4;
pub const SYSTEMD: &str = "org.freedesktop.systemd1";
pub const SYSTEMD_PATH: &str = "/org/freedesktop/systemd1";
pub const MANAGER: &str = "org.freedesktop.systemd1.Manager";
/// Time limit for a reply or a job of systemd, the same as runc's.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Longest line of the greeting.
const MAX_LINE: usize = 512;

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error(
        "could not reach systemd at {PRIVATE} or {BUS}; the systemd cgroup driver needs it as the machine's init"
    )]
    Connect(#[source] io::Error),
    #[error("could not reach the system bus at {BUS}")]
    Bus(#[source] io::Error),
    #[error("the connection to systemd broke")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// systemd refused.
    #[error("systemd: {message} ({name})")]
    Refused { name: String, message: String },
    /// A job it began did not succeed.
    #[error("systemd: the job for {unit} ended with {result:?}")]
    Job { unit: String, result: String },
}

impl CallError {
    /// Returns true if systemd said that a unit does not exist.
    pub fn is_no_such_unit(&self) -> bool {
        matches!(self, Self::Refused { name, .. } if name.ends_with(".NoSuchUnit"))
    }

    /// Returns true if systemd said that a unit exists already.
    pub fn is_unit_exists(&self) -> bool {
        matches!(self, Self::Refused { name, .. } if name.ends_with(".UnitExists"))
    }
}

impl From<CallError> for io::Error {
    fn from(error: CallError) -> Self {
        match std::error::Error::source(&error) {
            Some(source) => io::Error::other(format!("{error}: {source}")),
            None => io::Error::other(error.to_string()),
        }
    }
}

pub struct Connection {
    stream: UnixStream,
    serial: u32,
    /// Signals that came while an answer was waited for.
    signals: VecDeque<Message>,
    /// Descriptors that came with the message that was read last.
    descriptors: Vec<OwnedFd>,
}

impl Connection {
    pub fn open() -> Result<Self, CallError> {
        let on_bus = match UnixStream::connect(PRIVATE) {
            Ok(stream) => return Self::greet(stream),
            Err(_) => UnixStream::connect(BUS).map_err(CallError::Connect)?,
        };
        let mut connection = Self::greet(on_bus)?;
        connection.call(BUS_NAME, BUS_PATH, BUS_NAME, "Hello", "", &[])?;
        let mut rule = Writer::default();
        rule.text(&format!("type='signal',sender='{SYSTEMD}',interface='{MANAGER}',member='JobRemoved'"));
        connection.call(BUS_NAME, BUS_PATH, BUS_NAME, "AddMatch", "s", &rule.bytes)?;
        connection.manager("Subscribe", "", &[])?;
        Ok(connection)
    }

    /// Connects to the system bus, for calls whose answers have descriptors.
    pub fn open_bus() -> Result<Self, CallError> {
        Self::on_bus(UnixStream::connect(BUS).map_err(CallError::Bus)?)
    }

    /// The same, on a connection that was made.
    pub fn on_bus(stream: UnixStream) -> Result<Self, CallError> {
        let mut connection = Self::agree(stream, true)?;
        connection.call(BUS_NAME, BUS_PATH, BUS_NAME, "Hello", "", &[])?;
        Ok(connection)
    }

    /// Says who we are; the kernel vouches for it.
    pub fn greet(stream: UnixStream) -> Result<Self, CallError> {
        Self::agree(stream, false)
    }

    fn agree(mut stream: UnixStream, with_descriptors: bool) -> Result<Self, CallError> {
        stream.set_read_timeout(Some(TIME_LIMIT))?;
        stream.set_write_timeout(Some(TIME_LIMIT))?;
        let uid = nix::unistd::geteuid().to_string();
        let hex: String = uid.bytes().map(|byte| format!("{byte:02x}")).collect();
        // In one piece, as systemd's own client has it: a message that arrives together with BEGIN may lie unread.
        let descriptors = if with_descriptors { "NEGOTIATE_UNIX_FD\r\n" } else { "" };
        stream.write_all(format!("\0AUTH EXTERNAL {hex}\r\n{descriptors}BEGIN\r\n").as_bytes())?;
        let answer = read_line(&mut stream)?;
        if !answer.starts_with("OK ") {
            let message = format!("it does not let user {uid} in: {answer}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message).into());
        }
        if with_descriptors {
            let answer = read_line(&mut stream)?;
            if answer != "AGREE_UNIX_FD" {
                let message = format!("it passes no descriptors: {answer}");
                return Err(io::Error::new(io::ErrorKind::Unsupported, message).into());
            }
        }
        Ok(Self { stream, serial: 0, signals: VecDeque::new(), descriptors: Vec::new() })
    }

    /// A call to systemd's manager; answers the body.
    pub fn manager(&mut self, member: &str, signature: &str, body: &[u8]) -> Result<Vec<u8>, CallError> {
        self.call(SYSTEMD, SYSTEMD_PATH, MANAGER, member, signature, body)
    }

    pub fn call(
        &mut self,
        destination: &str,
        path: &str,
        interface: &str,
        member: &str,
        signature: &str,
        body: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        self.serial += 1;
        let serial = self.serial;
        let call = Call { serial, destination, path, interface, member, signature, body };
        self.stream.write_all(&wire::encode(&call))?;
        loop {
            let message = self.receive()?;
            match message.kind {
                Kind::Signal if self.signals.len() < MAX_SIGNALS => self.signals.push_back(message),
                Kind::Return if message.reply_serial == Some(serial) => return Ok(message.body),
                Kind::Error if message.reply_serial == Some(serial) => {
                    let text = Reader::new(&message.body).text().unwrap_or_default().to_owned();
                    return Err(CallError::Refused { name: message.error_name, message: text });
                }
                _ => {}
            }
        }
    }

    /// Waits until the job is over; returns its unit and its result.
    pub fn job(&mut self, path: &str) -> Result<(String, String), CallError> {
        loop {
            let kept = self.signals.pop_front();
            let message = match kept {
                Some(message) => message,
                None => self.receive()?,
            };
            if message.kind != Kind::Signal || message.member != "JobRemoved" {
                continue;
            }
            let mut body = Reader::new(&message.body);
            body.u32()?;
            let (job, unit, result) = (body.text()?, body.text()?, body.text()?);
            if job == path {
                self.signals.clear();
                return Ok((unit.to_owned(), result.to_owned()));
            }
        }
    }

    /// The next message that is no answer: one that came earlier, or the next of the stream.
    pub fn next_signal(&mut self) -> Result<Message, CallError> {
        match self.signals.pop_front() {
            Some(message) => Ok(message),
            None => self.receive(),
        }
    }

    /// True if a signal came while an answer was waited for.
    pub fn has_signal(&self) -> bool {
        !self.signals.is_empty()
    }

    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Takes the descriptor that came with the answer to the last call.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop()
    }

    fn receive(&mut self) -> Result<Message, CallError> {
        let mut prologue = [0; PROLOGUE];
        self.descriptors.clear();
        let mut read = 0;
        // Descriptors come with a message's first byte.
        while read < PROLOGUE {
            let count = self.receive_some(&mut prologue[read..])?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            read += count;
        }
        let mut bytes = vec![0; PROLOGUE + wire::remaining(&prologue)?];
        bytes[..PROLOGUE].copy_from_slice(&prologue);
        self.stream.read_exact(&mut bytes[PROLOGUE..])?;
        Ok(wire::decode(&bytes)?)
    }
}

impl Connection {
    fn receive_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut space = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
        let mut parts = [io::IoSliceMut::new(buffer)];
        let (fd, flags) = (self.stream.as_raw_fd(), MsgFlags::MSG_CMSG_CLOEXEC);
        let received = loop {
            match recvmsg::<()>(fd, &mut parts, Some(&mut space), flags) {
                Err(nix::errno::Errno::EINTR) => {}
                received => break received?,
            }
        };
        let count = received.bytes;
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = message {
                // SAFETY: the kernel made these descriptors for this call; nobody else has them.
                self.descriptors.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        Ok(count)
    }
}

fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n") {
        if line.len() >= MAX_LINE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        stream.read_exact(&mut byte)?;
        line.extend(byte);
    }
    Ok(String::from_utf8_lossy(&line).trim().to_owned())
}
