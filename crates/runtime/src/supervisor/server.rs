//! The loop: requests, output, exits.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use nix::sched::{CloneFlags, setns};

use super::child;
use super::log::{LineSplitter, LogFile, timestamp};
use super::protocol::{
    self, Decoder, EXIT_RECORD, Event, Exec, Exit, Failure, PidNamespace, Reply, Request, Start,
};
use crate::cgroup::Layout;
use crate::sys::{self, Forked};

/// Connections beyond this wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;
/// How much is read from a container at once.
const CHUNK: usize = 16 * 1024;

/// One of a container's output pipes, or its terminal.
struct Output {
    pipe: OwnedFd,
    /// 1 stdout, 2 stderr; a terminal is all stdout.
    stream: u8,
    lines: LineSplitter,
}

/// Somebody attached to a container.
struct Attached {
    stdin: Option<OwnedFd>,
    /// Input the container has not taken yet.
    pending: Vec<u8>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

struct Container {
    id: String,
    bundle: PathBuf,
    cgroup: String,
    pid: i32,
    pid_namespace: PidNamespace,
    started_at: i64,
    /// The program runs: the start was answered.
    running: bool,
    exit: Option<Exit>,
    log: LogFile,
    outputs: Vec<Output>,
    stdin: Option<OwnedFd>,
    stdin_once: bool,
    terminal: bool,
    attached: Vec<Attached>,
}

/// A forked process that has not reached its program yet.
struct Launch {
    status: OwnedFd,
    connection: u64,
    error: Option<String>,
    warnings: Vec<String>,
    master: Option<OwnedFd>,
}

enum Role {
    /// A request is being read or answered.
    Request,
    Subscriber,
    /// Kept open to tell when the exec has ended.
    Exec,
}

struct Connection {
    socket: UnixStream,
    decoder: Decoder,
    fds: Vec<OwnedFd>,
    role: Role,
}

struct ExecProcess {
    connection: u64,
    container: String,
    group: String,
}

pub struct Server {
    listener: UnixListener,
    signals: OwnedFd,
    cgroups: Layout,
    /// First process of the PID namespace the containers share.
    pod_pid: Option<i32>,
    own_pid_namespace: OwnedFd,
    directory: PathBuf,
    containers: Vec<Container>,
    connections: BTreeMap<u64, Connection>,
    launches: BTreeMap<i32, Launch>,
    execs: BTreeMap<i32, ExecProcess>,
    next: u64,
    stopping: bool,
}

/// What a polled descriptor stands for.
#[derive(Clone, Copy)]
enum Source {
    Listener,
    Signals,
    Connection(u64),
    Launch(i32),
    Output { container: usize, stream: u8 },
    Input { container: usize, attached: usize },
}

impl Server {
    pub fn new(
        listener: UnixListener,
        cgroups: Layout,
        pod_pid: Option<i32>,
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
        // SAFETY: releases free heap pages; nothing refers to them.
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0);
        }
    }

    /// Serves until told to shut down.
    pub fn run(&mut self) {
        while !self.stopping {
            let (mut polls, sources) = self.interests();
            // SAFETY: a valid array of pollfds of that length.
            let ready = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, -1) };
            if ready < 0 {
                continue;
            }
            // Output first, exits last: what a container wrote is in its log before its end is known.
            for (poll, source) in polls.iter().zip(&sources) {
                if poll.revents != 0 && matches!(source, Source::Output { .. } | Source::Input { .. }) {
                    self.handle(*source);
                }
            }
            for (poll, source) in polls.iter().zip(&sources) {
                if poll.revents != 0
                    && !matches!(source, Source::Output { .. } | Source::Input { .. } | Source::Signals)
                {
                    self.handle(*source);
                }
            }
            if polls[1].revents != 0 {
                self.handle(Source::Signals);
            }
            for container in &mut self.containers {
                container.attached.retain(|a| a.stdin.is_some() || a.stdout.is_some() || a.stderr.is_some());
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
            for output in &container.outputs {
                let source = Source::Output { container: index, stream: output.stream };
                add(output.pipe.as_raw_fd(), libc::POLLIN, source);
            }
            for (position, attached) in container.attached.iter().enumerate() {
                let source = Source::Input { container: index, attached: position };
                match (&attached.stdin, &container.stdin) {
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
            Source::Input { container, attached } => {
                if let Some(container) = self.containers.get_mut(container) {
                    container.forward_input(attached);
                }
            }
        }
    }

    fn accept(&mut self) {
        if let Ok((socket, _)) = self.listener.accept()
            && socket.set_nonblocking(true).is_ok()
        {
            let key = self.next;
            self.next += 1;
            let connection =
                Connection { socket, decoder: Decoder::default(), fds: Vec::new(), role: Role::Request };
            self.connections.insert(key, connection);
        }
    }

    fn read_request(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let mut buffer = [0; 4096];
        let received = sys::receive_with_fds(connection.socket.as_fd(), &mut buffer, &mut connection.fds);
        let request = match received {
            Ok(count) if count > 0 && matches!(connection.role, Role::Request) => {
                connection.decoder.push(&buffer[..count]);
                connection.decoder.next::<Request>()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            // Closed, or talking out of turn.
            _ => {
                self.connections.remove(&key);
                return;
            }
        };
        match request {
            Ok(None) => {}
            Ok(Some(request)) => {
                let fds = std::mem::take(&mut connection.fds);
                connection.decoder = Decoder::default();
                self.serve(key, request, fds);
            }
            Err(error) => self.answer_failure(key, Failure::Internal, error.to_string()),
        }
    }

    fn serve(&mut self, key: u64, request: Request, fds: Vec<OwnedFd>) {
        let result = match request {
            Request::Start(start) => self.start(key, start).map(|()| None),
            Request::Exec(exec) => self.exec(key, exec, fds).map(|()| None),
            Request::KillExec { id, exec } => self.find(&id).map(|container| {
                let group = format!("{}/{exec}", container.cgroup);
                self.kill_group(&group);
                Some(Reply::Done)
            }),
            Request::Signal { id, signal, all } => self.signal(&id, signal, all).map(|()| Some(Reply::Done)),
            Request::Resize { id, width, height } => {
                self.find(&id).map(|container| container.resize(width, height)).map(|()| Some(Reply::Done))
            }
            Request::Attach { id, stdin, stdout, stderr } => {
                self.attach(&id, [stdin, stdout, stderr], fds).map(|()| Some(Reply::Done))
            }
            Request::ReopenLog { id } => self
                .find_mut(&id)
                .and_then(|container| container.log.reopen().map_err(internal).map(|()| Some(Reply::Done))),
            Request::Forget { id } => {
                self.containers.retain(|container| container.id != id || container.exit.is_none());
                self.forget_start_up();
                Ok(Some(Reply::Done))
            }
            Request::Subscribe => {
                self.subscribe(key);
                Ok(None)
            }
            Request::Shutdown => {
                self.shut_down();
                Ok(Some(Reply::Done))
            }
        };
        match result {
            Ok(Some(reply)) => self.answer(key, &reply, &[]),
            Ok(None) => {}
            Err((failure, message)) => self.answer_failure(key, failure, message),
        }
    }

    fn find(&self, id: &str) -> Result<&Container, Problem> {
        self.containers
            .iter()
            .find(|container| container.id == id)
            .ok_or_else(|| (Failure::NotFound, format!("container {id} is not known to its supervisor")))
    }

    fn find_mut(&mut self, id: &str) -> Result<&mut Container, Problem> {
        self.containers
            .iter_mut()
            .find(|container| container.id == id)
            .ok_or_else(|| (Failure::NotFound, format!("container {id} is not known to its supervisor")))
    }

    fn running(&self, id: &str) -> Result<&Container, Problem> {
        let container = self.find(id)?;
        if container.running && container.exit.is_none() {
            Ok(container)
        } else {
            Err((Failure::NotRunning, format!("container {id} is not running")))
        }
    }

    fn start(&mut self, key: u64, start: Start) -> Result<(), Problem> {
        if self.find(&start.id).is_ok() {
            return Err((Failure::Internal, format!("container {} was started before", start.id)));
        }
        let log = LogFile::open(start.log).map_err(|error| (Failure::Start, format!("open log: {error}")))?;
        let (mut outputs, mut stdin) = (Vec::new(), None);
        let mut streams = None;
        if !start.terminal {
            let (out_read, out_write) = pipe().map_err(internal)?;
            let (err_read, err_write) = pipe().map_err(internal)?;
            let input = if start.stdin {
                let (read, write) = pipe().map_err(internal)?;
                set_nonblocking(&write);
                stdin = Some(write);
                read
            } else {
                std::fs::File::open("/dev/null").map_err(internal)?.into()
            };
            for (pipe, stream, name) in [(out_read, 1, "stdout"), (err_read, 2, "stderr")] {
                set_nonblocking(&pipe);
                outputs.push(Output { pipe, stream, lines: LineSplitter::new(name) });
            }
            streams = Some([input, out_write, err_write]);
        }
        let mut flags = libc::CLONE_NEWNS as u64;
        let joined = match &start.pid {
            PidNamespace::Own => {
                flags |= libc::CLONE_NEWPID as u64;
                None
            }
            PidNamespace::Host => None,
            PidNamespace::Pod => Some(self.pod_pid.ok_or_else(|| {
                (Failure::Start, "the pod's containers do not share a PID namespace".to_owned())
            })?),
            PidNamespace::Target(target) => Some(self.running(target)?.pid),
        };
        let group = self.cgroups.open_unified(&start.cgroup).map_err(internal)?;
        let (parent_end, child_end) = status_pair().map_err(internal)?;
        let forked = self.fork_into(flags, joined, group.as_ref().map(AsFd::as_fd)).map_err(internal)?;
        let pid = match forked {
            Forked::Child => {
                let borrowed = streams.as_ref().map(|streams| {
                    let [stdin, stdout, stderr] = streams;
                    [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
                });
                child::container(&start.bundle, &start.cgroup, &self.cgroups, borrowed, child_end.as_fd())
            }
            Forked::Parent { pid } => pid,
        };
        self.launches.insert(
            pid,
            Launch { status: parent_end, connection: key, error: None, warnings: Vec::new(), master: None },
        );
        self.containers.push(Container {
            id: start.id,
            bundle: start.bundle,
            cgroup: start.cgroup,
            pid,
            pid_namespace: start.pid,
            started_at: 0,
            running: false,
            exit: None,
            log,
            outputs,
            stdin,
            stdin_once: start.stdin_once,
            terminal: start.terminal,
            attached: Vec::new(),
        });
        Ok(())
    }

    /// Forks into the PID namespace of process `joined`. Joining changes only where children are born, so
    /// the supervisor can go back at once.
    fn fork_into(
        &self,
        flags: u64,
        joined: Option<i32>,
        cgroup: Option<BorrowedFd<'_>>,
    ) -> io::Result<Forked> {
        if let Some(target) = joined {
            let namespace = std::fs::File::open(format!("/proc/{target}/ns/pid"))?;
            setns(namespace, CloneFlags::CLONE_NEWPID)?;
        }
        // SAFETY: the supervisor is single-threaded.
        let forked = unsafe { sys::fork_with(flags, cgroup) };
        if joined.is_some() && !matches!(forked, Ok(Forked::Child)) {
            setns(&self.own_pid_namespace, CloneFlags::CLONE_NEWPID)?;
        }
        forked
    }

    fn exec(&mut self, key: u64, exec: Exec, fds: Vec<OwnedFd>) -> Result<(), Problem> {
        let container = self.running(&exec.id)?;
        let target = open_pidfd(container.pid).map_err(internal)?;
        let (pid, cgroup, id) = (container.pid, container.cgroup.clone(), container.id.clone());
        let streams = if exec.terminal {
            None
        } else {
            let streams: [OwnedFd; 3] = fds.try_into().map_err(|_| {
                (Failure::Internal, "an exec without a terminal needs three streams".to_owned())
            })?;
            Some(streams)
        };
        let group = self.cgroups.create_exec(&cgroup, &exec.exec).map_err(internal)?;
        let (parent_end, child_end) = status_pair().map_err(internal)?;
        let unified = self.cgroups.open_unified(&group).map_err(internal)?;
        let forked = self.fork_into(0, Some(pid), unified.as_ref().map(AsFd::as_fd)).map_err(|error| {
            self.cgroups.remove_if_empty(&group);
            match error.raw_os_error() {
                // The namespace's first process has ended; we have not been told yet.
                Some(libc::ENOMEM | libc::ENOENT | libc::ESRCH) => {
                    (Failure::NotRunning, format!("container {id} is not running"))
                }
                _ => internal(error),
            }
        })?;
        let pid = match forked {
            Forked::Child => {
                let borrowed = streams.as_ref().map(|streams| {
                    let [stdin, stdout, stderr] = streams;
                    [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
                });
                child::exec(
                    &exec.bundle,
                    &exec.args,
                    (&cgroup, &group),
                    &self.cgroups,
                    target.as_fd(),
                    borrowed,
                    child_end.as_fd(),
                )
            }
            Forked::Parent { pid } => pid,
        };
        self.launches.insert(
            pid,
            Launch { status: parent_end, connection: key, error: None, warnings: Vec::new(), master: None },
        );
        self.execs.insert(pid, ExecProcess { connection: key, container: id, group });
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.role = Role::Exec;
        }
        Ok(())
    }

    /// Reads what a process on its way to its program has to say; its end means it got there.
    fn read_status(&mut self, pid: i32) {
        let Some(launch) = self.launches.get_mut(&pid) else { return };
        let mut buffer = [0; 4096];
        loop {
            let mut fds = Vec::new();
            match sys::receive_with_fds(launch.status.as_fd(), &mut buffer, &mut fds) {
                Ok(0) => break,
                Ok(count) => {
                    let text = || String::from_utf8_lossy(&buffer[1..count]).into_owned();
                    match buffer[0] {
                        child::FAILED => launch.error = Some(text()),
                        child::WARNING => launch.warnings.push(text()),
                        child::TERMINAL => launch.master = fds.pop(),
                        _ => {}
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.launched(pid);
    }

    fn launched(&mut self, pid: i32) {
        let Some(launch) = self.launches.remove(&pid) else { return };
        let at = sys::now();
        if let Some(message) = launch.error {
            self.containers.retain(|container| container.pid != pid || container.exit.is_some());
            if let Some(exec) = self.execs.remove(&pid) {
                self.cgroups.remove_if_empty(&exec.group);
            }
            self.answer_failure(launch.connection, Failure::Start, message);
            return;
        }
        let started = Reply::Started { pid, at, warnings: launch.warnings };
        if let Some(container) = self.containers.iter_mut().find(|c| c.pid == pid && c.exit.is_none()) {
            container.running = true;
            container.started_at = at;
            if let Some(master) = launch.master {
                set_nonblocking(&master);
                container.stdin = master.try_clone().ok();
                let lines = LineSplitter::new("stdout");
                container.outputs.push(Output { pipe: master, stream: 1, lines });
            }
            let event = Event::Started { id: container.id.clone(), pid, at };
            self.answer(launch.connection, &started, &[]);
            self.publish(&event);
        } else {
            let fds: Vec<RawFd> = launch.master.iter().map(AsRawFd::as_raw_fd).collect();
            self.answer(launch.connection, &started, &fds);
        }
        self.forget_start_up();
    }

    fn take_signals(&mut self) {
        let mut buffer = [0u8; size_of::<libc::signalfd_siginfo>()];
        loop {
            match nix::unistd::read(&self.signals, &mut buffer) {
                Ok(count) if count == buffer.len() => {
                    let number = u32::from_ne_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
                    if number == libc::SIGTERM as u32 {
                        self.shut_down();
                    }
                }
                _ => break,
            }
        }
        self.reap();
    }

    fn reap(&mut self) {
        loop {
            let mut status = 0;
            // SAFETY: status is a valid place for the answer.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            let code = if libc::WIFEXITED(status) {
                libc::WEXITSTATUS(status)
            } else {
                128 + libc::WTERMSIG(status)
            };
            // A short program may have ended before its start was seen.
            self.read_status(pid);
            self.launched(pid);
            if let Some(exec) = self.execs.remove(&pid) {
                self.answer(exec.connection, &Reply::Exited { code }, &[]);
                self.connections.remove(&exec.connection);
                self.cgroups.remove_if_empty(&exec.group);
                let _ = exec.container;
            } else if Some(pid) == self.pod_pid {
                self.pod_pid = None;
            } else {
                self.container_ended(pid, code);
            }
        }
    }

    fn container_ended(&mut self, pid: i32, code: i32) {
        let cgroups = &self.cgroups;
        let Some(container) =
            self.containers.iter_mut().find(|c| c.pid == pid && c.running && c.exit.is_none())
        else {
            return;
        };
        if container.pid_namespace != PidNamespace::Own {
            // In a namespace of its own the kernel has ended the rest already.
            for process in cgroups.processes(&container.cgroup) {
                // SAFETY: a signal to a process of this container's group.
                unsafe { libc::kill(process, libc::SIGKILL) };
            }
        }
        container.finish_output();
        let exit = Exit {
            started_at: container.started_at,
            finished_at: sys::now(),
            code,
            oom_killed: code != 0 && cgroups.oom_kills(&container.cgroup) > 0,
        };
        if let Ok(bytes) = serde_json::to_vec(&exit) {
            let _ = sys::write_atomic(&container.bundle.join(EXIT_RECORD), &bytes, true);
        }
        container.exit = Some(exit.clone());
        container.stdin = None;
        container.attached = Vec::new();
        let event = Event::Exited { id: container.id.clone(), exit };
        self.publish(&event);
        self.forget_start_up();
    }

    fn signal(&mut self, id: &str, signal: i32, all: bool) -> Result<(), Problem> {
        let container = self.find(id)?;
        if container.exit.is_some() {
            return Ok(());
        }
        if all && container.pid_namespace != PidNamespace::Own {
            let group = container.cgroup.clone();
            self.kill_group(&group);
        }
        let pid = self.find(id)?.pid;
        // SAFETY: our own child, not reaped yet, so the number is still its own.
        unsafe { libc::kill(pid, signal) };
        Ok(())
    }

    fn kill_group(&self, group: &str) {
        for process in self.cgroups.processes(group) {
            // SAFETY: a signal to a process of a group we made.
            unsafe { libc::kill(process, libc::SIGKILL) };
        }
    }

    fn attach(&mut self, id: &str, wanted: [bool; 3], fds: Vec<OwnedFd>) -> Result<(), Problem> {
        self.running(id)?;
        let container = self.find_mut(id)?;
        if fds.len() != wanted.iter().filter(|w| **w).count() {
            return Err((Failure::Internal, "attach: descriptors do not match the streams".to_owned()));
        }
        let mut fds = fds.into_iter();
        let mut take = |wanted: bool| if wanted { fds.next() } else { None };
        let [stdin, stdout, stderr] = wanted.map(&mut take);
        for fd in [&stdin, &stdout, &stderr].into_iter().flatten() {
            set_nonblocking(fd);
        }
        container.attached.push(Attached { stdin, pending: Vec::new(), stdout, stderr });
        Ok(())
    }

    fn subscribe(&mut self, key: u64) {
        let mut bytes = Vec::new();
        let mut add = |event: &Event| {
            if let Ok(encoded) = protocol::encode(event) {
                bytes.extend(encoded);
            }
        };
        for container in &self.containers {
            match &container.exit {
                Some(exit) => add(&Event::Exited { id: container.id.clone(), exit: exit.clone() }),
                None if container.running => add(&Event::Started {
                    id: container.id.clone(),
                    pid: container.pid,
                    at: container.started_at,
                }),
                None => {}
            }
        }
        add(&Event::Synced);
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.role = Role::Subscriber;
            if connection.socket.write_all(&bytes).is_err() {
                self.connections.remove(&key);
            }
        }
    }

    /// Tells every subscriber. One that does not keep up is cut off; it comes back and gets the whole state.
    fn publish(&mut self, event: &Event) {
        let Ok(bytes) = protocol::encode(event) else { return };
        self.connections.retain(|_, connection| {
            !matches!(connection.role, Role::Subscriber) || connection.socket.write_all(&bytes).is_ok()
        });
    }

    fn answer(&mut self, key: u64, reply: &Reply, fds: &[RawFd]) {
        let Some(connection) = self.connections.get(&key) else { return };
        if protocol::send(&connection.socket, reply, fds).is_err() {
            self.connections.remove(&key);
        }
    }

    fn answer_failure(&mut self, key: u64, failure: Failure, message: String) {
        self.answer(key, &Reply::Failed { failure, message }, &[]);
    }

    fn shut_down(&mut self) {
        for index in 0..self.containers.len() {
            let container = &self.containers[index];
            if container.exit.is_none() {
                // SAFETY: our own child that has not been reaped.
                unsafe { libc::kill(container.pid, libc::SIGKILL) };
                let group = container.cgroup.clone();
                self.kill_group(&group);
            }
        }
        if let Some(pid) = self.pod_pid {
            // SAFETY: our own child; with it goes its whole namespace.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        // Everything was killed from outside, so this ends; the records are written on the way.
        let pids: Vec<i32> =
            self.containers.iter().filter(|c| c.exit.is_none() && c.running).map(|c| c.pid).collect();
        for pid in pids {
            let mut status = 0;
            // SAFETY: status is a valid place for the answer.
            if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
                let code = if libc::WIFEXITED(status) {
                    libc::WEXITSTATUS(status)
                } else {
                    128 + libc::WTERMSIG(status)
                };
                self.container_ended(pid, code);
            }
        }
        let _ = std::fs::remove_file(self.directory.join(protocol::SOCKET));
        self.stopping = true;
    }
}

impl Container {
    /// Reads up to `rounds` chunks of a stream into the log and to whoever is attached.
    fn read_output(&mut self, stream: u8, rounds: u32) {
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
    fn show(&mut self, stream: u8, bytes: &[u8]) {
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

    fn finish_output(&mut self) {
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

    fn forward_input(&mut self, position: usize) {
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

    fn resize(&self, width: u16, height: u16) {
        if let Some(output) = self.outputs.first().filter(|_| self.terminal) {
            let size = libc::winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 };
            // SAFETY: the ioctl reads one winsize; failing on a closed terminal is harmless.
            unsafe { libc::ioctl(output.pipe.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
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
