//! Processes on their way: containers and execs, from the request to the program.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;

use nix::sched::{CloneFlags, setns};

use super::container::{Attached, Container, Output};
use super::requests::Role;
use super::{PodPid, Problem, Server, internal, open_pidfd, pipe, set_nonblocking, status_pair};
use crate::supervisor::log::{LineSplitter, LogFile};
use crate::supervisor::protocol::{Event, Exec, Failure, PidNamespace, Reply, Start};
use crate::supervisor::{child, handler};
use crate::sys::{self, Forked};

/// A forked process that has not reached its program yet.
pub(super) struct Launch {
    pub(super) status: OwnedFd,
    pub(super) connection: u64,
    pub(super) error: Option<String>,
    /// The container's process where that is not the forked one.
    pub(super) process: Option<i32>,
    pub(super) warnings: Vec<String>,
    pub(super) master: Option<OwnedFd>,
}

pub(super) struct ExecProcess {
    pub(super) connection: u64,
    pub(super) container: String,
    pub(super) group: String,
}

fn pid_namespace_path(pid: i32) -> PathBuf {
    format!("/proc/{pid}/ns/pid").into()
}

fn pid_namespace(pid: i32) -> io::Result<OwnedFd> {
    Ok(std::fs::File::open(pid_namespace_path(pid))?.into())
}

impl Server {
    pub(super) fn start(&mut self, key: u64, start: Start, fds: Vec<OwnedFd>) -> Result<(), Problem> {
        if self.find(&start.id).is_ok() {
            return Err((Failure::Internal, format!("container {} was started before", start.id)));
        }
        let attached = match start.attach {
            None => Vec::new(),
            Some(wanted) => vec![Attached::new(wanted, fds)?],
        };
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
            // It joins by itself.
            PidNamespace::Pod | PidNamespace::Target(_) if start.handler.is_some() => None,
            // An OCI runtime makes the namespace itself.
            PidNamespace::Own if start.handler.is_some() => None,
            PidNamespace::Own => {
                flags |= libc::CLONE_NEWPID as u64;
                None
            }
            PidNamespace::Host => None,
            PidNamespace::Pod => Some(match &self.pod_pid {
                PodPid::Own(pid) => pid_namespace(*pid).map_err(internal)?,
                PodPid::Other(namespace) => namespace.try_clone().map_err(internal)?,
                PodPid::None => {
                    let message = "the pod's containers do not share a PID namespace";
                    return Err((Failure::Start, message.to_owned()));
                }
            }),
            PidNamespace::Target(target) => Some(pid_namespace(self.running(target)?.pid).map_err(internal)?),
        };
        let shared = match (&start.handler, &start.pid) {
            (Some(_), PidNamespace::Pod) => self.pod_pid.own().map(pid_namespace_path),
            (Some(_), PidNamespace::Target(target)) => Some(pid_namespace_path(self.running(target)?.pid)),
            _ => None,
        };
        let group = match &start.handler {
            None => self.cgroups.open_unified(&start.cgroup).map_err(internal)?,
            Some(_) => None,
        };
        let (parent_end, child_end) = status_pair().map_err(internal)?;
        let joined = joined.as_ref().map(AsFd::as_fd);
        let forked = self.fork_into(flags, joined, group.as_ref().map(AsFd::as_fd)).map_err(internal)?;
        let pid = match forked {
            Forked::Child => {
                let borrowed = streams.as_ref().map(|streams| {
                    let [stdin, stdout, stderr] = streams;
                    [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
                });
                if let Some(handler) = &start.handler {
                    let (id, bundle) = (&start.id, &start.bundle);
                    handler::container(handler, id, bundle, shared, borrowed, child_end.as_fd());
                }
                child::container(&start.bundle, &start.cgroup, &self.cgroups, borrowed, child_end.as_fd())
            }
            Forked::Parent { pid } => pid,
        };
        self.launches.insert(
            pid,
            Launch {
                status: parent_end,
                connection: key,
                error: None,
                process: None,
                warnings: Vec::new(),
                master: None,
            },
        );
        self.containers.push(Container {
            id: start.id,
            bundle: start.bundle,
            cgroup: start.cgroup,
            pid,
            pid_namespace: start.pid,
            started_at: 0,
            running: false,
            early_end: None,
            exit: None,
            log,
            outputs,
            stdin,
            stdin_once: start.stdin_once,
            terminal: start.terminal,
            attached,
            hook_due: false,
        });
        Ok(())
    }

    /// Forks into the PID namespace `joined`. Joining changes only where children are born, so
    /// the supervisor can go back at once.
    pub(super) fn fork_into(
        &self,
        flags: u64,
        joined: Option<BorrowedFd<'_>>,
        cgroup: Option<BorrowedFd<'_>>,
    ) -> io::Result<Forked> {
        if let Some(namespace) = joined {
            setns(namespace, CloneFlags::CLONE_NEWPID)?;
        }
        // SAFETY: the supervisor is single-threaded.
        let forked = unsafe { sys::fork_with(flags, cgroup) };
        if joined.is_some() && !matches!(forked, Ok(Forked::Child)) {
            setns(&self.own_pid_namespace, CloneFlags::CLONE_NEWPID)?;
        }
        forked
    }

    pub(super) fn exec(&mut self, key: u64, exec: Exec, fds: Vec<OwnedFd>) -> Result<(), Problem> {
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
        let forked = pid_namespace(pid).and_then(|namespace| {
            self.fork_into(0, Some(namespace.as_fd()), unified.as_ref().map(AsFd::as_fd))
        });
        let forked = forked.map_err(|error| {
            self.cgroups.remove_if_empty(&group);
            match error.raw_os_error() {
                // The namespace's first process has ended, but its exit has not reached us yet.
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
                    &exec,
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
            Launch {
                status: parent_end,
                connection: key,
                error: None,
                process: None,
                warnings: Vec::new(),
                master: None,
            },
        );
        self.execs.insert(pid, ExecProcess { connection: key, container: id, group });
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.role = Role::Exec;
        }
        Ok(())
    }

    /// Reads the report of a process on its way to its program; its end means it got there.
    pub(super) fn read_status(&mut self, pid: i32) {
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
                        child::PROCESS => {
                            launch.process = text().parse().ok();
                            let container = self.containers.iter_mut().find(|c| c.pid == pid && !c.running);
                            if let (Some(container), Some(process)) = (container, launch.process) {
                                container.pid = process;
                            }
                        }
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

    pub(super) fn launched(&mut self, pid: i32) {
        let Some(launch) = self.launches.remove(&pid) else { return };
        let at = sys::now();
        let pid = launch.process.unwrap_or(pid);
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
            let ended = container.early_end.take();
            self.answer(launch.connection, &started, &[]);
            self.publish(&event);
            if let Some(code) = ended {
                self.container_ended(pid, code);
            }
        } else {
            let fds: Vec<RawFd> = launch.master.iter().map(AsRawFd::as_raw_fd).collect();
            self.answer(launch.connection, &started, &fds);
        }
        self.forget_start_up();
    }
}
