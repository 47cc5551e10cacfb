//! Ends: signals sent and received, processes reaped, exit records written.

use super::{PodPid, Problem, Server};
use crate::supervisor::protocol::{self, EXIT_RECORD, Event, Exit, PidNamespace, Reply};
use crate::sys;

impl Server {
    pub(super) fn take_signals(&mut self) {
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

    pub(super) fn reap(&mut self) {
        while self.reap_one(libc::WNOHANG) {}
    }

    /// Takes note of one child that has ended, waiting for it unless the flags say otherwise. False when there is none.
    fn reap_one(&mut self, flags: i32) -> bool {
        let mut status = 0;
        // SAFETY: status is a valid place for the answer.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, flags) };
        if pid <= 0 {
            return false;
        }
        let code =
            if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
        // A short program may have ended before its start was seen.
        self.read_status(pid);
        self.launched(pid);
        self.learn_processes();
        if let Some(exec) = self.execs.remove(&pid) {
            self.answer(exec.connection, &Reply::Exited { code }, &[]);
            self.connections.remove(&exec.connection);
            self.cgroups.remove_if_empty(&exec.group);
            let _ = exec.container;
        } else if Some(pid) == self.pod_pid.own() {
            self.pod_pid = PodPid::None;
        } else {
            self.container_ended(pid, code);
        }
        true
    }

    /// Reads reports of OCI runtimes in progress: only they may show whose end this is.
    fn learn_processes(&mut self) {
        let waiting: Vec<i32> = self.launches.keys().copied().collect();
        for pid in waiting {
            self.read_status(pid);
        }
    }

    pub(super) fn container_ended(&mut self, pid: i32, code: i32) {
        let cgroups = &self.cgroups;
        let Some(container) = self.containers.iter_mut().find(|c| c.pid == pid && c.exit.is_none()) else {
            return;
        };
        if !container.running {
            // Made by an OCI runtime that has not come back yet.
            container.early_end = Some(code);
            return;
        }
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
        container.finish_attached();
        container.hook_due = true;
        let event = Event::Exited { id: container.id.clone(), exit };
        self.publish(&event);
        self.forget_start_up();
    }

    pub(super) fn signal(&mut self, id: &str, signal: i32, all: bool) -> Result<(), Problem> {
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

    pub(super) fn kill_group(&self, group: &str) {
        for process in self.cgroups.processes(group) {
            // SAFETY: a signal to a process of a group we made.
            unsafe { libc::kill(process, libc::SIGKILL) };
        }
    }

    pub(super) fn shut_down(&mut self) {
        for index in 0..self.containers.len() {
            let container = &self.containers[index];
            if container.exit.is_none() {
                // SAFETY: our own child that has not been reaped.
                unsafe { libc::kill(container.pid, libc::SIGKILL) };
                let group = container.cgroup.clone();
                self.kill_group(&group);
            }
        }
        if let Some(pid) = self.pod_pid.own() {
            // SAFETY: our own child; with it goes its whole namespace.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        for pid in self.execs.keys() {
            // SAFETY: our own child that has not been reaped.
            unsafe { libc::kill(*pid, libc::SIGKILL) };
        }
        // Everything was killed from outside, so this ends; the records are written on the way. Any child may come first:
        // the first process of a namespace ends only after everybody else in it was reaped, by us where they are ours.
        while self.containers.iter().any(|c| c.exit.is_none() && c.running) {
            if !self.reap_one(0) {
                break;
            }
        }
        let _ = std::fs::remove_file(self.directory.join(protocol::SOCKET));
        self.stopping = true;
    }
}
