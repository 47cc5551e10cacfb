//! A connection to systemd: its own socket, or the system bus.

use crate::wire::{self, Call, Kind, Malformed, Message, PROLOGUE, Reader, Writer};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// systemd's own socket, for root; it works without a bus daemon.
const PRIVATE: &str = "/run/systemd/private";
const BUS: &str = "/run/dbus/system_bus_socket";
const BUS_NAME: &str = "org.freedesktop.DBus";
const BUS_PATH: &str = "/org/freedesktop/DBus";
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
    signals: Vec<Message>,
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

    /// Authenticates us to systemd; the kernel vouches for our user.
    pub fn greet(mut stream: UnixStream) -> Result<Self, CallError> {
        stream.set_read_timeout(Some(TIME_LIMIT))?;
        stream.set_write_timeout(Some(TIME_LIMIT))?;
        let uid = nix::unistd::geteuid().to_string();
        let hex: String = uid.bytes().map(|byte| format!("{byte:02x}")).collect();
        // In one piece, as systemd's own client has it: a message that arrives together with BEGIN may lie unread.
        stream.write_all(format!("\0AUTH EXTERNAL {hex}\r\nBEGIN\r\n").as_bytes())?;
        let answer = read_line(&mut stream)?;
        if !answer.starts_with("OK ") {
            let message = format!("it does not let user {uid} in: {answer}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message).into());
        }
        Ok(Self { stream, serial: 0, signals: Vec::new() })
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
                Kind::Signal if message.member == "JobRemoved" => self.signals.push(message),
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
            let kept = self.signals.pop();
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

    fn receive(&mut self) -> Result<Message, CallError> {
        let mut prologue = [0; PROLOGUE];
        self.stream.read_exact(&mut prologue)?;
        let mut bytes = vec![0; PROLOGUE + wire::remaining(&prologue)?];
        bytes[..PROLOGUE].copy_from_slice(&prologue);
        self.stream.read_exact(&mut bytes[PROLOGUE..])?;
        Ok(wire::decode(&bytes)?)
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
