//! One container as the supervisor knows it: its output, its log and who is attached.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use crate::supervisor::log::{LineSplitter, LogFile, timestamp};
use crate::supervisor::protocol::{Exit, PidNamespace};
use crate::sys;

/// How much is read from a container at once.
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
}

impl Container {
    /// Reads up to `rounds` chunks of a stream into the log and to whoever is attached.
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

    /// Copies output to the attached. One that does not read misses some; the log has it all.
    pub(super) fn show(&mut self, stream: u8, bytes: &[u8]) {
        for attached in &mut self.attached {
            let target = if stream == 1 { &mut attached.stdout } else { &mut attached.stderr };
            if let Some(fd) = target {
                match nix::unistd::write(&*fd, bytes) {
                    Ok(_) | Err(nix::errno::Errno::EAGAIN) => {}
                    Err(_) => *target = None,
                }
            }
        }
    }

    pub(super) fn finish_output(&mut self) {
        // What is in the pipes when the last process is gone is bounded by their size.
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
