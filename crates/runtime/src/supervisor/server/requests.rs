//! Connections: requests read, answers and events written.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use super::container::{Attached, Container};
use super::{Problem, Server, internal};
use crate::supervisor::protocol::{self, AttachedAtStart, Decoder, Event, Failure, Reply, Request};
use crate::sys;

pub(super) enum Role {
    /// A request is being read or answered.
    Request,
    Subscriber,
    /// Kept open to report the end of the exec.
    Exec,
}

pub(super) struct Connection {
    pub(super) socket: UnixStream,
    pub(super) decoder: Decoder,
    pub(super) fds: Vec<OwnedFd>,
    pub(super) role: Role,
}

impl Server {
    pub(super) fn accept(&mut self) {
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

    pub(super) fn read_request(&mut self, key: u64) {
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

    pub(super) fn serve(&mut self, key: u64, request: Request, fds: Vec<OwnedFd>) {
        let result = match request {
            Request::Start(start) => self.start(key, start, fds).map(|()| None),
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
            Request::Attach { id, stdin, stdout, stderr, lossless } => {
                let wanted = AttachedAtStart { stdin, stdout, stderr, lossless };
                self.attach(&id, wanted, fds).map(|()| Some(Reply::Done))
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

    pub(super) fn find(&self, id: &str) -> Result<&Container, Problem> {
        self.containers
            .iter()
            .find(|container| container.id == id)
            .ok_or_else(|| (Failure::NotFound, format!("container {id} is not known to its supervisor")))
    }

    pub(super) fn find_mut(&mut self, id: &str) -> Result<&mut Container, Problem> {
        self.containers
            .iter_mut()
            .find(|container| container.id == id)
            .ok_or_else(|| (Failure::NotFound, format!("container {id} is not known to its supervisor")))
    }

    pub(super) fn running(&self, id: &str) -> Result<&Container, Problem> {
        let container = self.find(id)?;
        if container.running && container.exit.is_none() {
            Ok(container)
        } else {
            Err((Failure::NotRunning, format!("container {id} is not running")))
        }
    }

    pub(super) fn attach(
        &mut self,
        id: &str,
        wanted: AttachedAtStart,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Problem> {
        self.running(id)?;
        let attached = Attached::new(wanted, fds)?;
        self.find_mut(id)?.attached.push(attached);
        Ok(())
    }

    pub(super) fn subscribe(&mut self, key: u64) {
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
    pub(super) fn publish(&mut self, event: &Event) {
        let Ok(bytes) = protocol::encode(event) else { return };
        self.connections.retain(|_, connection| {
            !matches!(connection.role, Role::Subscriber) || connection.socket.write_all(&bytes).is_ok()
        });
    }

    pub(super) fn answer(&mut self, key: u64, reply: &Reply, fds: &[RawFd]) {
        let Some(connection) = self.connections.get(&key) else { return };
        if protocol::send(&connection.socket, reply, fds).is_err() {
            self.connections.remove(&key);
        }
    }

    pub(super) fn answer_failure(&mut self, key: u64, failure: Failure, message: String) {
        self.answer(key, &Reply::Failed { failure, message }, &[]);
    }
}
