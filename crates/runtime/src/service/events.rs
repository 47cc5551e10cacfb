//! Container events: from supervisors to listeners.

use std::sync::Arc;

use ferrite_cri::ContainerEvents;
use ferrite_cri::v1::{ContainerEventResponse, ContainerEventType};
use futures_util::StreamExt;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use super::Inner;
use super::client;
use super::records;
use super::state::{Container, Ended, Sandbox, Status, UNKNOWN_EXIT};
use crate::cgroup;
use crate::supervisor::protocol::{self, Decoder, Event, Request};
use crate::supervisor::sandbox::{IDENTITY, alive};
use crate::sys;

/// Events that a listener may lag behind before its stream ends.
const BACKLOG: usize = 1024;

pub struct Events(broadcast::Sender<Arc<ContainerEventResponse>>);

impl Events {
    pub fn new() -> Self {
        Self(broadcast::Sender::new(BACKLOG))
    }

    pub fn subscribe(&self, closing: CancellationToken) -> ContainerEvents {
        let receiver = self.0.subscribe();
        let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
            // A gap ends the stream: the reader lists and subscribes anew.
            receiver.recv().await.ok().map(|event| ((*event).clone(), receiver))
        });
        stream.take_until(closing.cancelled_owned()).boxed()
    }
}

impl Inner {
    pub(super) fn emit(&self, container: &Container, kind: ContainerEventType) {
        if self.events.0.receiver_count() == 0 {
            return;
        }
        let (sandbox, statuses) = match self.index.sandbox(&container.sandbox) {
            Ok(sandbox) => {
                let statuses = self.index.containers_of(&sandbox.id);
                (Some(self.describe_sandbox(&sandbox)), statuses)
            }
            Err(_) => (None, Vec::new()),
        };
        let event = ContainerEventResponse {
            container_id: container.id.clone(),
            container_event_type: kind.into(),
            created_at: sys::now(),
            pod_sandbox_status: sandbox,
            containers_statuses: statuses.iter().map(|c| self.describe_container(c)).collect(),
        };
        // Nobody listening is fine.
        let _ = self.events.0.send(Arc::new(event));
    }

    pub(super) fn note_started(&self, container: &Container, pid: i32, started_at: i64) {
        let changed = container.status.send_if_modified(|status| {
            let new = *status == Status::Created;
            if new {
                *status = Status::Running { pid, started_at };
            }
            new
        });
        if changed {
            self.emit(container, ContainerEventType::ContainerStartedEvent);
        }
    }

    pub(super) fn note_ended(&self, container: &Container, ended: Ended) {
        let changed = container.status.send_if_modified(|status| {
            let new = !matches!(status, Status::Exited(_));
            if new {
                *status = Status::Exited(ended);
            }
            new
        });
        if changed {
            self.emit(container, ContainerEventType::ContainerStoppedEvent);
        }
    }

    fn apply(&self, event: Event) {
        match event {
            Event::Started { id, pid, at } => {
                if let Ok(container) = self.index.container(&id) {
                    self.note_started(&container, pid, at);
                }
            }
            Event::Exited { id, exit } => {
                if let Ok(container) = self.index.container(&id) {
                    self.note_ended(&container, exit.into());
                    // Its statistics are over; the group would only linger until the removal.
                    let (cgroups, group) = (self.cgroups.clone(), container.record().cgroup);
                    self.tasks.spawn(client::blocking(move || {
                        cgroups.kill(&group);
                        cgroup::remove(&cgroups, &group)
                    }));
                }
            }
            Event::Synced => {}
        }
    }

    /// Listens to a sandbox's supervisor until the sandbox is stopped, the runtime closes, or the
    /// supervisor dies. The returned receiver fires once the present state has been taken over.
    pub(super) fn listen(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> tokio::sync::oneshot::Receiver<()> {
        let (told, synced) = tokio::sync::oneshot::channel();
        let (inner, sandbox) = (self.clone(), sandbox.clone());
        let stop = sandbox.listening.clone();
        let closing = self.closing.clone();
        self.tasks.spawn(async move {
            let listen = async {
                let mut told = Some(told);
                // Being cut off for slowness is cured by coming back; a dead supervisor is not.
                while inner.follow(&sandbox, &mut told).await.is_ok() {
                    let identity =
                        std::fs::read_to_string(sandbox.run_dir.join(IDENTITY)).unwrap_or_default();
                    if alive(&identity).is_none() {
                        break;
                    }
                }
                inner.lost(&sandbox).await;
            };
            tokio::select! {
                () = listen => {}
                () = stop.cancelled() => {}
                () = closing.cancelled() => {}
            }
        });
        synced
    }

    async fn follow(
        &self,
        sandbox: &Sandbox,
        told: &mut Option<tokio::sync::oneshot::Sender<()>>,
    ) -> std::io::Result<()> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let run_dir = sandbox.run_dir.clone();
        let socket = client::blocking(move || protocol::connect(&run_dir)).await?;
        socket.set_nonblocking(true)?;
        let mut socket = tokio::net::UnixStream::from_std(socket)?;
        socket.write_all(&protocol::encode(&Request::Subscribe)?).await?;
        let mut decoder = Decoder::default();
        let mut buffer = [0; 2048];
        loop {
            while let Some(event) = decoder.next::<Event>()? {
                if matches!(event, Event::Synced)
                    && let Some(told) = told.take()
                {
                    let _ = told.send(());
                }
                self.apply(event);
            }
            let count = socket.read(&mut buffer).await?;
            if count == 0 {
                return Ok(());
            }
            decoder.push(&buffer[..count]);
        }
    }

    /// The supervisor is gone although nobody stopped it: its containers are gone too.
    pub(super) async fn lost(&self, sandbox: &Arc<Sandbox>) {
        let containers = self.index.containers_of(&sandbox.id);
        let (cgroups, groups) =
            (self.cgroups.clone(), containers.iter().map(|c| c.record().cgroup).collect::<Vec<_>>());
        let _ = client::blocking(move || {
            for group in groups {
                cgroups.kill(&group);
            }
            Ok(())
        })
        .await;
        let record = sandbox.update(|record| record.ready = false);
        if let Err(error) = records::write_state(&sandbox.state_dir, &record) {
            tracing::warn!(sandbox = %sandbox.id, %error, "sandbox record not written");
        }
        for container in containers {
            if let Status::Running { started_at, .. } = container.status() {
                let ended = match super::recover::read_exit(&container.bundle) {
                    Some(exit) => exit.into(),
                    None => Ended {
                        started_at,
                        finished_at: sys::now(),
                        code: UNKNOWN_EXIT,
                        reason: "Unknown",
                        message: "the container's supervisor ended".into(),
                    },
                };
                self.note_ended(&container, ended);
            }
        }
    }
}
