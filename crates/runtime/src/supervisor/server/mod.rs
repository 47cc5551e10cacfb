//! The loop: requests, output, exits.

mod container;
mod exits;
mod launch;
mod requests;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use super::hook::ExitHook;
use super::protocol::Failure;
use container::Container;
use ferrite_cgroup::Layout;
use launch::{ExecProcess, Launch};
use requests::Connection;

/// Connections beyond this wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;

pub struct Server {
    listener: UnixListener,
    signals: OwnedFd,
    cgroups: Layout,
    pod_pid: PodPid,
    hook: Option<ExitHook>,
    own_pid_namespace: OwnedFd,
    directory: PathBuf,
    containers: Vec<Container>,
    connections: BTreeMap<u64, Connection>,
    launches: BTreeMap<i32, Launch>,
    execs: BTreeMap<i32, ExecProcess>,
    next: u64,
    stopping: bool,
}

/// The PID namespace the pod's containers can share.
#[derive(Debug)]
pub enum PodPid {
    None,
    /// One whose first process is ours.
    Own(i32),
    /// Somebody else's.
    Other(OwnedFd),
}

impl PodPid {
    /// Our first process in it.
    fn own(&self) -> Option<i32> {
        match self {
            Self::Own(pid) => Some(*pid),
            _ => None,
        }
    }
}

/// The owner of a polled descriptor.
#[derive(Clone, Copy)]
enum Source {
    Listener,
    Signals,
    Connection(u64),
    Launch(i32),
    Output {
        container: usize,
        stream: u8,
    },
    Input {
        container: usize,
        attached: usize,
    },
    /// Somebody attached has room again.
    Room {
        container: usize,
        attached: usize,
        stream: u8,
    },
}

impl Server {
    pub fn new(
        listener: UnixListener,
        cgroups: Layout,
        pod_pid: PodPid,
        hook: Option<ExitHook>,
        directory: PathBuf,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        // SAFETY: blocks signals in this single-threaded process and makes a descriptor for them.
        let signals = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGCHLD, libc::SIGTERM] {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGPIPE] {
                libc::signal(signal, libc::SIG_IGN);
            }
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            nix::errno::Errno::result(fd)?;
            OwnedFd::from_raw_fd(fd)
        };
        let own_pid_namespace = std::fs::File::open("/proc/self/ns/pid")?.into();
        Ok(Self {
            listener,
            signals,
            cgroups,
            pod_pid,
            hook,
            own_pid_namespace,
            directory,
            containers: Vec::new(),
            connections: BTreeMap::new(),
            launches: BTreeMap::new(),
            execs: BTreeMap::new(),
            next: 0,
            stopping: false,
        })
    }

    /// Gives memory used only while starting back to the system.
    pub fn forget_start_up(&mut self) {
        ferrite_memory::give_back();
    }

    /// Serves until a shutdown request.
    pub fn run(&mut self) {
        while !self.stopping {
            let (mut polls, sources) = self.interests();
            // SAFETY: a valid array of pollfds of that length.
            let ready = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, -1) };
            if ready < 0 {
                continue;
            }
            // Output first, exits last: a container's output is in its log before its end is known.
            for (poll, source) in polls.iter().zip(&sources) {
                if poll.revents != 0
                    && matches!(source, Source::Output { .. } | Source::Input { .. } | Source::Room { .. })
                {
                    self.handle(*source);
                }
            }
            for (poll, source) in polls.iter().zip(&sources) {
                if poll.revents != 0
                    && !matches!(
                        source,
                        Source::Output { .. } | Source::Input { .. } | Source::Room { .. } | Source::Signals
                    )
                {
                    self.handle(*source);
                }
            }
            if polls[1].revents != 0 {
                self.handle(Source::Signals);
            }
            for container in &mut self.containers {
                container.attached.retain(|a| a.stdin.is_some() || a.stdout.is_some() || a.stderr.is_some());
                if container.hook_due && container.attached.is_empty() {
                    container.hook_due = false;
                    if let Some(hook) = &self.hook {
                        // A later reader sees the exit record; nobody is here to receive an error.
                        let _ = hook.run();
                    }
                }
            }
        }
    }

    fn interests(&self) -> (Vec<libc::pollfd>, Vec<Source>) {
        let mut polls = Vec::new();
        let mut sources = Vec::new();
        let mut add = |fd: RawFd, events: i16, source: Source| {
            polls.push(libc::pollfd { fd, events, revents: 0 });
            sources.push(source);
        };
        let room = self.connections.len() < MAX_CONNECTIONS;
        add(if room { self.listener.as_raw_fd() } else { -1 }, libc::POLLIN, Source::Listener);
        add(self.signals.as_raw_fd(), libc::POLLIN, Source::Signals);
        for (key, connection) in &self.connections {
            add(connection.socket.as_raw_fd(), libc::POLLIN, Source::Connection(*key));
        }
        for (pid, launch) in &self.launches {
            add(launch.status.as_raw_fd(), libc::POLLIN, Source::Launch(*pid));
        }
        for (index, container) in self.containers.iter().enumerate() {
            for output in container.outputs.iter().filter(|output| !container.held_back(output.stream)) {
                let source = Source::Output { container: index, stream: output.stream };
                add(output.pipe.as_raw_fd(), libc::POLLIN, source);
            }
            for (position, attached) in container.attached.iter().enumerate() {
                for stream in [1, 2] {
                    if let Some(fd) = attached.behind(stream) {
                        let source = Source::Room { container: index, attached: position, stream };
                        add(fd.as_raw_fd(), libc::POLLOUT, source);
                    }
                }
                let source = Source::Input { container: index, attached: position };
                match (&attached.stdin, &container.stdin) {
                    // A terminal appears only with the program: input waits for it.
                    _ if !container.running => {}
                    // Input that could not be delivered waits for the container, not for more input.
                    (Some(_), Some(stdin)) if !attached.pending.is_empty() => {
                        add(stdin.as_raw_fd(), libc::POLLOUT, source);
                    }
                    (Some(stdin), _) => add(stdin.as_raw_fd(), libc::POLLIN, source),
                    (None, _) => {}
                }
            }
        }
        (polls, sources)
    }

    fn handle(&mut self, source: Source) {
        match source {
            Source::Listener => self.accept(),
            Source::Signals => self.take_signals(),
            Source::Connection(key) => self.read_request(key),
            Source::Launch(pid) => self.read_status(pid),
            Source::Output { container, stream } => {
                if let Some(container) = self.containers.get_mut(container) {
                    container.read_output(stream, 1);
                }
            }
            Source::Room { container, attached, stream } => {
                if let Some(container) = self.containers.get_mut(container) {
                    container.catch_up(attached, stream);
                }
            }
            Source::Input { container, attached } => {
                if let Some(container) = self.containers.get_mut(container) {
                    container.forward_input(attached);
                }
            }
        }
    }
}

type Problem = (Failure, String);

fn internal(error: impl std::fmt::Display) -> Problem {
    (Failure::Internal, error.to_string())
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?)
}

/// A packet socket pair; our end does not block.
fn status_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    set_nonblocking(&ours);
    Ok((ours, theirs))
}

fn set_nonblocking(fd: &OwnedFd) {
    // SAFETY: changes a flag of a descriptor we own.
    unsafe {
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK);
    }
}

fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked and owned.
    unsafe {
        let fd = nix::errno::Errno::result(libc::syscall(libc::SYS_pidfd_open, pid, 0))?;
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
    }
}
