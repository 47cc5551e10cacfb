//! logind, which lets a program delay a shutdown of the machine until it is done with something.

use crate::connection::{BUS_NAME, BUS_PATH, CallError, Connection, MANAGER, SYSTEMD, SYSTEMD_PATH};
use crate::wire::{Kind, Reader, Value, Writer};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

const LOGIND: &str = "org.freedesktop.login1";
const LOGIND_PATH: &str = "/org/freedesktop/login1";
const LOGIND_MANAGER: &str = "org.freedesktop.login1.Manager";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
const SIGNAL: &str = "PrepareForShutdown";
const SIGHUP: u32 = 1;

/// A connection to logind. Calls wait for answers, 30 seconds at most.
pub struct Logind {
    connection: Connection,
}

/// The machine goes on with its shutdown once this is dropped.
#[derive(Debug)]
pub struct InhibitLock {
    _descriptor: OwnedFd,
}

impl Logind {
    /// Connects, and asks to be told of shutdowns.
    pub fn connect() -> Result<Self, CallError> {
        Self::on(Connection::open_bus()?)
    }

    fn on(mut connection: Connection) -> Result<Self, CallError> {
        let mut rule = Writer::default();
        rule.text(&format!(
            "type='signal',sender='{LOGIND}',path='{LOGIND_PATH}',interface='{LOGIND_MANAGER}',member='{SIGNAL}'"
        ));
        connection.call(BUS_NAME, BUS_PATH, BUS_NAME, "AddMatch", "s", &rule.bytes)?;
        Ok(Self { connection })
    }

    fn property(&mut self, name: &str) -> Result<Value, CallError> {
        let mut body = Writer::default();
        body.text(LOGIND_MANAGER);
        body.text(name);
        let answer = self.connection.call(LOGIND, LOGIND_PATH, PROPERTIES, "Get", "ss", &body.bytes)?;
        Ok(Reader::new(&answer).variant()?)
    }

    /// The longest delay that logind allows.
    pub fn inhibit_delay_max(&mut self) -> Result<Duration, CallError> {
        match self.property("InhibitDelayMaxUSec")? {
            Value::U64(microseconds) => Ok(Duration::from_micros(microseconds)),
            _ => Err(crate::wire::Malformed.into()),
        }
    }

    /// True if the machine is about to shut down.
    pub fn is_preparing(&mut self) -> Result<bool, CallError> {
        Ok(self.property("PreparingForShutdown")? == Value::Bool(true))
    }

    /// Delays a shutdown for as long as the lock exists, and as logind allows.
    pub fn inhibit(&mut self, who: &str, why: &str) -> Result<InhibitLock, CallError> {
        let mut body = Writer::default();
        for text in ["shutdown", who, why, "delay"] {
            body.text(text);
        }
        self.connection.call(LOGIND, LOGIND_PATH, LOGIND_MANAGER, "Inhibit", "ssss", &body.bytes)?;
        let descriptor = self.connection.take_descriptor().ok_or(crate::wire::Malformed)?;
        Ok(InhibitLock { _descriptor: descriptor })
    }

    /// Lets logind read its configuration again. It answers before it has.
    pub fn reload(&mut self) -> Result<(), CallError> {
        let mut body = Writer::default();
        body.text("systemd-logind.service");
        body.text("all");
        body.u32(SIGHUP);
        self.connection.call(SYSTEMD, SYSTEMD_PATH, MANAGER, "KillUnit", "ssi", &body.bytes)?;
        Ok(())
    }

    /// Readable when there may be a signal.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.connection.stream().as_fd()
    }

    /// True if a signal came with an answer, so that the descriptor does not tell of it.
    pub fn has_signal(&self) -> bool {
        self.connection.has_signal()
    }

    /// Reads one message: whether the machine is about to shut down, or no longer is. None if it says neither.
    pub fn next_event(&mut self) -> Result<Option<bool>, CallError> {
        let message = self.connection.next_signal()?;
        if message.kind != Kind::Signal || message.member != SIGNAL {
            return Ok(None);
        }
        // Any user of the bus can send us a signal of this name.
        let mut name = Writer::default();
        name.text(LOGIND);
        let answer = self.connection.call(BUS_NAME, BUS_PATH, BUS_NAME, "GetNameOwner", "s", &name.bytes)?;
        if Reader::new(&answer).text()? != message.sender {
            return Ok(None);
        }
        Ok(Some(Reader::new(&message.body).u32()? != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{self, PROLOGUE};
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use std::io::{IoSlice, Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    const OWNER: &str = ":1.7";

    /// A bus with a logind on it, which answers calls until the peer is gone.
    struct Bus {
        stream: UnixStream,
        /// The other end of locks that were given away.
        locks: Vec<UnixStream>,
        calls: Vec<String>,
    }

    fn message(
        kind: u8,
        reply: Option<u32>,
        member: &str,
        sender: &str,
        signature: &str,
        body: &[u8],
    ) -> Vec<u8> {
        let mut writer = Writer::default();
        for byte in [b'l', kind, 0, 1] {
            writer.byte(byte);
        }
        writer.u32(body.len() as u32);
        writer.u32(99);
        writer.array(8, |w| {
            for (code, form, value) in [(3, "s", member), (7, "s", sender), (8, "g", signature)] {
                if !value.is_empty() {
                    w.align(8);
                    w.byte(code);
                    w.signature(form);
                    if form == "g" { w.signature(value) } else { w.text(value) }
                }
            }
            if let Some(serial) = reply {
                w.align(8);
                w.byte(5);
                w.signature("u");
                w.u32(serial);
            }
        });
        writer.align(8);
        writer.bytes.extend(body);
        writer.bytes
    }

    fn signal(sender: &str, value: u32) -> Vec<u8> {
        message(4, None, SIGNAL, sender, "b", &value.to_le_bytes())
    }

    impl Bus {
        fn greet(stream: UnixStream) -> Self {
            let mut bus = Self { stream, locks: Vec::new(), calls: Vec::new() };
            let mut heard = Vec::new();
            let mut byte = [0];
            while !heard.ends_with(b"BEGIN\r\n") {
                bus.stream.read_exact(&mut byte).unwrap();
                heard.extend(byte);
            }
            assert!(String::from_utf8_lossy(&heard).contains("NEGOTIATE_UNIX_FD"));
            bus.stream.write_all(b"OK 1234\r\nAGREE_UNIX_FD\r\n").unwrap();
            bus
        }

        /// Answers one call. False at the end.
        fn answer(&mut self) -> bool {
            let mut prologue = [0; PROLOGUE];
            if self.stream.read_exact(&mut prologue).is_err() {
                return false;
            }
            let mut bytes = prologue.to_vec();
            bytes.resize(PROLOGUE + wire::remaining(&prologue).unwrap(), 0);
            self.stream.read_exact(&mut bytes[PROLOGUE..]).unwrap();
            let call = wire::decode(&bytes).unwrap();
            let serial = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
            let mut body = Writer::default();
            let (mut signature, mut lock) = ("", None);
            match call.member.as_str() {
                "Get" => {
                    let mut reader = Reader::new(&call.body);
                    reader.text().unwrap();
                    signature = "v";
                    match reader.text().unwrap() {
                        "InhibitDelayMaxUSec" => body.variant(&Value::U64(5_000_000)),
                        _ => body.variant(&Value::Bool(true)),
                    }
                    // A signal that comes before the answer is not lost.
                    self.stream.write_all(&signal(OWNER, 0)).unwrap();
                }
                "Inhibit" => {
                    let (ours, theirs) = UnixStream::pair().unwrap();
                    self.locks.push(ours);
                    (signature, lock) = ("h", Some(theirs));
                    body.u32(0);
                }
                "GetNameOwner" => {
                    signature = "s";
                    body.text(OWNER);
                }
                _ => {}
            }
            self.calls.push(call.member);
            let reply = message(2, Some(serial), "", "", signature, &body.bytes);
            let fds: Vec<i32> = lock.iter().map(|lock| lock.as_raw_fd()).collect();
            let rights = [ControlMessage::ScmRights(&fds)];
            let control = if fds.is_empty() { &[][..] } else { &rights[..] };
            let parts = [IoSlice::new(&reply)];
            sendmsg::<()>(self.stream.as_raw_fd(), &parts, control, MsgFlags::empty(), None).unwrap();
            true
        }
    }

    #[test]
    fn shutdowns_are_delayed_and_only_logind_tells_of_them() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut injector = theirs.try_clone().unwrap();
        let bus = std::thread::spawn(move || {
            let mut bus = Bus::greet(theirs);
            while bus.answer() {}
            (bus.locks, bus.calls)
        });
        let mut logind = Logind::on(Connection::on_bus(ours).unwrap()).unwrap();
        assert_eq!(logind.inhibit_delay_max().unwrap(), Duration::from_secs(5));
        assert!(logind.has_signal());
        assert_eq!(logind.next_event().unwrap(), Some(false));
        let lock = logind.inhibit("kubelet", "a test").unwrap();
        injector.write_all(&signal(":1.66", 1)).unwrap();
        assert_eq!(logind.next_event().unwrap(), None, "any user of the bus can send this");
        injector.write_all(&signal(OWNER, 1)).unwrap();
        assert_eq!(logind.next_event().unwrap(), Some(true));
        injector.write_all(&message(4, None, "SessionNew", OWNER, "", &[])).unwrap();
        assert_eq!(logind.next_event().unwrap(), None);
        drop(logind);
        drop(injector);
        let (mut locks, calls) = bus.join().unwrap();
        assert_eq!(calls[..4], ["Hello", "AddMatch", "Get", "GetNameOwner"]);
        locks[0].set_nonblocking(true).unwrap();
        let mut byte = [0];
        assert_eq!(
            locks[0].read(&mut byte).unwrap_err().kind(),
            std::io::ErrorKind::WouldBlock,
            "it is held"
        );
        drop(lock);
        assert_eq!(locks[0].read(&mut byte).unwrap(), 0, "it is released");
    }

    #[test]
    fn a_descriptor_that_does_not_come_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let bus = std::thread::spawn(move || {
            let mut bus = Bus::greet(theirs);
            for _ in 0..2 {
                assert!(bus.answer());
            }
            let mut prologue = [0; PROLOGUE];
            bus.stream.read_exact(&mut prologue).unwrap();
            let serial = u32::from_le_bytes(prologue[8..12].try_into().unwrap());
            bus.stream.write_all(&message(2, Some(serial), "", "", "h", &[0; 4])).unwrap();
        });
        let mut logind = Logind::on(Connection::on_bus(ours).unwrap()).unwrap();
        assert!(matches!(logind.inhibit("a", "b"), Err(CallError::Malformed(_))));
        bus.join().unwrap();
    }
}
