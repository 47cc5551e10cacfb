//! The protocol between the runtime and a supervisor.
//!
//! A message is a 32-bit little-endian length and that many bytes of JSON. Descriptors travel with the
//! first byte. A connection carries one request and its reply; an exec's also its exit, a subscription's
//! also events.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::sys;

/// Longest message either side accepts: an exec's arguments and environment fit, a flood does not.
pub const MAX_MESSAGE: usize = 4 << 20;

/// The socket's name in the sandbox's run directory.
pub const SOCKET: &str = "s.sock";

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Runs the container of a bundle. Answered when its program runs or could not be run.
    Start(Start),
    /// Runs another process in a container. Descriptors: stdin, stdout, stderr (none with a terminal).
    Exec(Exec),
    /// Ends every process an exec has left.
    KillExec { id: String, exec: String },
    /// Sends a signal to the container's first process, or to all with `all`.
    Signal { id: String, signal: i32, all: bool },
    /// Sets the size of the container's terminal.
    Resize { id: String, width: u16, height: u16 },
    /// Copies output to, and input from, the descriptors that come along: one for each true field.
    Attach {
        id: String,
        stdin: bool,
        stdout: bool,
        stderr: bool,
        /// As in [`AttachedAtStart`].
        #[serde(default)]
        lossless: bool,
    },
    /// Opens the log file anew, after it was moved away.
    ReopenLog { id: String },
    /// The container was removed; its state may be dropped.
    Forget { id: String },
    /// Sends the state of every container, then changes as they happen.
    Subscribe,
    /// Kills every container and ends.
    Shutdown,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Start {
    pub id: String,
    /// Directory with `config.json` (OCI) and `bundle.json`.
    pub bundle: PathBuf,
    /// The CRI log file; none when the output is not kept.
    pub log: Option<PathBuf>,
    pub terminal: bool,
    pub stdin: bool,
    /// The container's stdin closes when the first attached client closes its own.
    pub stdin_once: bool,
    pub cgroup: String,
    pub pid: PidNamespace,
    /// The OCI runtime that makes the container; none: we do.
    #[serde(default)]
    pub handler: Option<Handler>,
    /// The streams attached before the first byte; one descriptor for each true field.
    #[serde(default)]
    pub attach: Option<AttachedAtStart>,
}

/// Streams given along with a start.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct AttachedAtStart {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    /// The container waits for a slow reader, instead of the reader missing output.
    pub lossless: bool,
}

/// An OCI runtime and where it keeps its state.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Handler {
    pub binary: PathBuf,
    pub root: PathBuf,
}

/// Whose processes the container sees.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum PidNamespace {
    Own,
    /// Shared by the containers of the pod.
    Pod,
    Host,
    /// That of another container of the pod.
    Target(String),
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Exec {
    pub id: String,
    /// Name of this exec, unique within the container; also the name of its control group.
    pub exec: String,
    pub terminal: bool,
    /// Arguments; the rest (user, environment, capabilities) is the container's own.
    pub args: Vec<String>,
    pub bundle: PathBuf,
    /// The process to run instead of one like the container's own.
    #[serde(default)]
    pub process: Option<Box<oci_spec::runtime::Process>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Done,
    /// The program runs. An exec's terminal comes along as a descriptor.
    Started {
        pid: i32,
        at: i64,
        #[serde(default)]
        warnings: Vec<String>,
    },
    /// An exec has ended.
    Exited {
        code: i32,
    },
    Failed {
        failure: Failure,
        message: String,
    },
}

/// Why a request failed, as far as the caller treats it differently.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    NotFound,
    NotRunning,
    /// The container or process could not be set up or its program not run.
    Start,
    Internal,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    Started {
        id: String,
        pid: i32,
        at: i64,
    },
    Exited {
        id: String,
        exit: Exit,
    },
    /// Everything that was already so has been sent.
    Synced,
}

/// The exit of a container; also the content of its `exit.json`.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Exit {
    pub started_at: i64,
    pub finished_at: i64,
    pub code: i32,
    pub oom_killed: bool,
}

/// Name of the exit record in a bundle.
pub const EXIT_RECORD: &str = "exit.json";

/// A message as it goes over the wire.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let length = bytes.len() - 4;
    if length > MAX_MESSAGE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("message of {length} bytes is too long"),
        ));
    }
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes)
}

/// Collects a message that arrives in pieces.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message, if it has arrived.
    pub fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some((head, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*head) as usize;
        if length > MAX_MESSAGE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("message of {length} bytes is too long"),
            ));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = serde_json::from_slice(body)?;
        self.bytes.drain(..4 + length);
        Ok(Some(message))
    }
}

/// Sends one message over a blocking socket.
pub fn send(socket: &UnixStream, message: &impl Serialize, fds: &[RawFd]) -> io::Result<()> {
    let bytes = encode(message)?;
    let mut sent = sys::send_with_fds(socket.as_fd(), &bytes, fds)?;
    while sent < bytes.len() {
        sent += sys::send_with_fds(socket.as_fd(), &bytes[sent..], &[])?;
    }
    Ok(())
}

/// Receives one message over a blocking socket.
pub fn receive<T: DeserializeOwned>(
    socket: &UnixStream,
    decoder: &mut Decoder,
    fds: &mut Vec<OwnedFd>,
) -> io::Result<T> {
    let mut buffer = [0; 4096];
    loop {
        if let Some(message) = decoder.next()? {
            return Ok(message);
        }
        let count = sys::receive_with_fds(socket.as_fd(), &mut buffer, fds)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        decoder.push(&buffer[..count]);
    }
}

/// Binds the control socket in `directory`, however long its path is, for this user only.
pub fn listen(directory: &std::path::Path) -> io::Result<std::os::unix::net::UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let path = directory.join(SOCKET);
    let _ = std::fs::remove_file(&path);
    let handle = std::fs::File::open(directory)?;
    let listener = std::os::unix::net::UnixListener::bind(short_path(&handle))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connects to the supervisor of the sandbox whose run directory this is.
pub fn connect(directory: &std::path::Path) -> io::Result<UnixStream> {
    let handle = std::fs::File::open(directory)?;
    UnixStream::connect(short_path(&handle))
}

/// Socket addresses hold 108 bytes and run directories may be deep: go by the directory's descriptor.
fn short_path(directory: &std::fs::File) -> String {
    format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_pieces() {
        let mut bytes = encode(&Request::Subscribe).unwrap();
        bytes.extend(encode(&Request::ReopenLog { id: "a".into() }).unwrap());
        let mut decoder = Decoder::default();
        let mut seen = Vec::new();
        for byte in bytes {
            decoder.push(&[byte]);
            while let Some(message) = decoder.next::<Request>().unwrap() {
                seen.push(message);
            }
        }
        assert!(matches!(&seen[..], [Request::Subscribe, Request::ReopenLog { id }] if id == "a"));
    }

    #[test]
    fn a_huge_length_is_refused_before_it_is_believed() {
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(decoder.next::<Request>().is_err());
    }
}
