//! One container as the supervisor knows it: its output, its log and its attached clients.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use super::{Problem, set_nonblocking};
use crate::supervisor::log::{LineSplitter, LogFile, timestamp};
use crate::supervisor::protocol::{AttachedAtStart, Exit, Failure, PidNamespace};
use crate::sys;

/// Number of bytes to read from a container at once.
const CHUNK: usize = 16 * 1024;

/// One of a container's output pipes, or its terminal.
pub(super) struct Output {
    pub(super) pipe: OwnedFd,
    /// 1 stdout, 2 stderr; a terminal is all stdout.
    pub(super) stream: u8,
    pub(super) lines: LineSplitter,
}

/// Somebody attached to a container.
pub(super) struct Attached {
    pub(super) stdin: Option<OwnedFd>,
    /// Input the container has not taken yet.
    pub(super) pending: Vec<u8>,
    pub(super) stdout: Option<OwnedFd>,
    pub(super) stderr: Option<OwnedFd>,
    /// The container waits for this one.
    lossless: bool,
    /// Output of stdout and stderr this one has not taken yet; only without loss.
    unsent: [Vec<u8>; 2],
}

impl Attached {
    /// Takes one descriptor for each stream that is wanted.
    pub(super) fn new(wanted: AttachedAtStart, fds: Vec<OwnedFd>) -> Result<Self, Problem> {
        let streams = [wanted.stdin, wanted.stdout, wanted.stderr];
        if fds.len() != streams.iter().filter(|wanted| **wanted).count() {
            return Err((Failure::Internal, "attach: descriptors do not match the streams".to_owned()));
        }
        fds.iter().for_each(set_nonblocking);
        let mut fds = fds.into_iter();
        let [stdin, stdout, stderr] = streams.map(|wanted| if wanted { fds.next() } else { None });
        Ok(Self {
            stdin,
            pending: Vec::new(),
            stdout,
            stderr,
            lossless: wanted.lossless,
            unsent: Default::default(),
        })
    }

    /// The target of a stream and the data that waits for it.
    fn stream(&mut self, stream: u8) -> (&mut Option<OwnedFd>, &mut Vec<u8>) {
        let [out, err] = &mut self.unsent;
        if stream == 1 { (&mut self.stdout, out) } else { (&mut self.stderr, err) }
    }

    fn send(&mut self, stream: u8, bytes: &[u8]) {
        let lossless = self.lossless;
        let (target, unsent) = self.stream(stream);
        let Some(fd) = target else { return };
        if !unsent.is_empty() {
            unsent.extend_from_slice(bytes);
            return;
        }
        match nix::unistd::write(&*fd, bytes) {
            Ok(count) if lossless => unsent.extend_from_slice(&bytes[count..]),
            Err(nix::errno::Errno::EAGAIN) if lossless => unsent.extend_from_slice(bytes),
            Ok(_) | Err(nix::errno::Errno::EAGAIN) => {}
            Err(_) => *target = None,
        }
    }

    /// The descriptor a stream waits for, if any of its output was not taken yet.
    pub(super) fn behind(&self, stream: u8) -> Option<&OwnedFd> {
        let (target, unsent) =
            if stream == 1 { (&self.stdout, &self.unsent[0]) } else { (&self.stderr, &self.unsent[1]) };
        target.as_ref().filter(|_| !unsent.is_empty())
    }

    fn catch_up(&mut self, stream: u8, ended: bool) {
        let (target, unsent) = self.stream(stream);
        let Some(fd) = target else { return };
        match nix::unistd::write(&*fd, unsent) {
            Ok(count) => {
                unsent.drain(..count);
                if unsent.is_empty() {
                    *unsent = Vec::new();
                    if ended {
                        *target = None;
                    }
                }
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => {}
            Err(_) => {
                *target = None;
                *unsent = Vec::new();
            }
        }
    }

    /// No more output will come: closes the streams that have sent everything.
    fn finish(&mut self) {
        self.stdin = None;
        for stream in [1, 2] {
            let (target, unsent) = self.stream(stream);
            if unsent.is_empty() {
                *target = None;
            }
        }
    }
}

pub(super) struct Container {
    pub(super) id: String,
    pub(super) bundle: PathBuf,
    pub(super) cgroup: String,
    pub(super) pid: i32,
    pub(super) pid_namespace: PidNamespace,
    pub(super) started_at: i64,
    /// The program runs: the start was answered.
    pub(super) running: bool,
    /// It ended, with this code, before its start was seen.
    pub(super) early_end: Option<i32>,
    pub(super) exit: Option<Exit>,
    pub(super) log: LogFile,
    pub(super) outputs: Vec<Output>,
    pub(super) stdin: Option<OwnedFd>,
    pub(super) stdin_once: bool,
    pub(super) terminal: bool,
    pub(super) attached: Vec<Attached>,
    /// It has ended and the exit hook has not been run.
    pub(super) hook_due: bool,
}

impl Container {
    /// Reads up to `rounds` chunks of a stream into the log and to the attached clients.
    pub(super) fn read_output(&mut self, stream: u8, rounds: u32) {
        let mut buffer = [0; CHUNK];
        for _ in 0..rounds {
            let Some(position) = self.outputs.iter().position(|output| output.stream == stream) else {
                return;
            };
            let output = &mut self.outputs[position];
            let mut entries = Vec::new();
            match nix::unistd::read(&output.pipe, &mut buffer) {
                Ok(count) if count > 0 => {
                    output.lines.push(&buffer[..count], &timestamp(sys::now()), &mut entries);
                    self.log.write(&entries);
                    self.show(stream, &buffer[..count]);
                }
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return,
                // End of file, or a terminal nobody holds any more.
                _ => {
                    output.lines.finish(&timestamp(sys::now()), &mut entries);
                    self.outputs.remove(position);
                    self.log.write(&entries);
                    return;
                }
            }
        }
    }

    /// Copies output to the attached. One that does not read misses some, unless it asked not to; the log
    /// has it all.
    pub(super) fn show(&mut self, stream: u8, bytes: &[u8]) {
        for attached in &mut self.attached {
            attached.send(stream, bytes);
        }
    }

    /// Sends an attached client the data for which it had no room.
    pub(super) fn catch_up(&mut self, position: usize, stream: u8) {
        let ended = self.exit.is_some();
        if let Some(attached) = self.attached.get_mut(position) {
            attached.catch_up(stream, ended);
        }
    }

    /// Returns true if an attached client must take output of this stream before we read more.
    pub(super) fn held_back(&self, stream: u8) -> bool {
        self.attached.iter().any(|attached| attached.behind(stream).is_some())
    }

    /// Nothing more will come for the attached.
    pub(super) fn finish_attached(&mut self) {
        self.attached.iter_mut().for_each(Attached::finish);
    }

    pub(super) fn finish_output(&mut self) {
        // The size of the pipes limits the output left after the last process.
        for stream in [1, 2] {
            self.read_output(stream, 1024);
        }
        let mut entries = Vec::new();
        for output in &mut self.outputs {
            output.lines.finish(&timestamp(sys::now()), &mut entries);
        }
        self.log.write(&entries);
        self.outputs = Vec::new();
    }

    pub(super) fn forward_input(&mut self, position: usize) {
        let Some(attached) = self.attached.get_mut(position) else { return };
        let Some(source) = &attached.stdin else { return };
        if attached.pending.is_empty() {
            let mut buffer = [0; 4096];
            match nix::unistd::read(source, &mut buffer) {
                Ok(count) if count > 0 => attached.pending.extend_from_slice(&buffer[..count]),
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return,
                _ => {
                    attached.stdin = None;
                    if self.stdin_once && !self.terminal {
                        self.stdin = None;
                    }
                    return;
                }
            }
        }
        let Some(stdin) = &self.stdin else {
            attached.pending = Vec::new();
            return;
        };
        match nix::unistd::write(stdin, &attached.pending) {
            Ok(count) => {
                attached.pending.drain(..count);
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => {}
            Err(_) => {
                // The container closed its stdin; further input has nowhere to go.
                attached.pending = Vec::new();
                self.stdin = None;
            }
        }
    }

    pub(super) fn resize(&self, width: u16, height: u16) {
        if let Some(output) = self.outputs.first().filter(|_| self.terminal) {
            let size = libc::winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 };
            // SAFETY: the ioctl reads one winsize; failing on a closed terminal is harmless.
            unsafe { libc::ioctl(output.pipe.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        }
    }
}
