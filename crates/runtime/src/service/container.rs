//! Containers: created, started, stopped, removed.

use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use ferrite_cri::v1::{
    ContainerConfig, ContainerEventType, LinuxContainerResources, LinuxContainerSecurityContext,
};
use ferrite_cri::{Code, Error, Result};

use super::client::{ask, blocking};
use super::records::{self, StartFailure};
use super::sandbox::remove_tree;
use super::state::{Container, Ended, START_ERROR_EXIT, Sandbox, Status, new_id};
use super::{Inner, required};
use crate::rootfs::RootfsError;
use crate::spec::{self, SpecError};
use crate::supervisor::bundle::CONFIG;
use crate::supervisor::protocol::{AttachedAtStart, Failure, Handler, Reply, Request, Start};
use crate::{cgroup, sys};

/// Longest wait for the kernel to end a killed container.
const KILL_PATIENCE: Duration = Duration::from_secs(30);

impl From<SpecError> for Error {
    fn from(error: SpecError) -> Self {
        Error::invalid(error.to_string())
    }
}

pub(super) fn image_error(error: RootfsError) -> Error {
    match error {
        RootfsError::NotFound(_) => Error::not_found(error.to_string()),
        RootfsError::Broken { .. } => Error::internal(error.to_string()),
    }
}

pub(super) fn failed(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::internal(format!("{what}: {error}"))
}

pub(super) fn security_of(config: &ContainerConfig) -> LinuxContainerSecurityContext {
    config.linux.as_ref().and_then(|linux| linux.security_context.clone()).unwrap_or_default()
}

impl Inner {
    pub(super) async fn create_container(
        self: Arc<Self>,
        sandbox_id: &str,
        config: ContainerConfig,
    ) -> Result<String> {
        let sandbox = self.index.sandbox(sandbox_id)?;
        if !sandbox.record().ready {
            let message = format!("sandbox {} is not ready", sandbox.id);
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        let metadata = required(config.metadata.clone(), "config.metadata")?;
        super::refusals::check_container(&config)?;
        let _gate = sandbox.gate.lock().await;
        let taken = self
            .index
            .containers_of(&sandbox.id)
            .iter()
            .any(|c| c.config.metadata.as_ref() == Some(&metadata));
        if taken {
            let message =
                format!("container {} attempt {} exists in the pod", metadata.name, metadata.attempt);
            return Err(Error::new(Code::AlreadyExists, message));
        }
        let id = new_id();
        let bundle = sandbox.state_dir.join(records::CONTAINERS).join(&id);
        let (inner, of, directory, new) = (self.clone(), sandbox.clone(), bundle.clone(), id.clone());
        let made = tokio::task::spawn_blocking(move || {
            let result = inner.make_bundle(&of, &config, &new, &directory);
            if result.is_err() {
                let _ = remove_tree(&directory);
            }
            result.map(|record| (config, record))
        });
        let (config, record) = made.await.map_err(|error| Error::internal(error.to_string()))??;
        let container =
            Arc::new(Container::new(id.clone(), sandbox.id.clone(), config, bundle, record, Status::Created));
        self.index.write().containers.insert(id.clone(), container.clone());
        self.emit(&container, ContainerEventType::ContainerCreatedEvent);
        Ok(id)
    }

    /// Starts a created container, with attached clients connected from its first byte on.
    pub(super) async fn start_container(
        self: Arc<Self>,
        id: &str,
        attach: Option<(AttachedAtStart, Vec<OwnedFd>)>,
    ) -> Result<()> {
        let container = self.index.container(id)?;
        let sandbox = self.index.sandbox(&container.sandbox)?;
        let _gate = container.gate.lock().await;
        if container.status() != Status::Created {
            let message = format!("container {} was started before", container.id);
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        let record = container.record();
        let (attach, fds) = attach.map_or((None, Vec::new()), |(wanted, fds)| (Some(wanted), fds));
        let start = Start {
            id: container.id.clone(),
            bundle: container.bundle.clone(),
            log: record.log_path.clone(),
            terminal: container.config.tty,
            stdin: container.config.stdin,
            stdin_once: container.config.stdin_once,
            cgroup: record.cgroup.clone(),
            pid: record.pid.clone(),
            handler: self.handler_of(&sandbox)?,
            attach,
        };
        let (cgroups, bundle, group) =
            (self.cgroups.clone(), container.bundle.clone(), record.cgroup.clone());
        let prepared = blocking(move || {
            let spec: oci_spec::runtime::Spec = serde_json::from_slice(&std::fs::read(bundle.join(CONFIG))?)?;
            let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
            let mut limits = resources.map(cgroup::limits_of).unwrap_or_default();
            // Without a list a container may use no device.
            limits.devices = limits.devices.or_else(|| resources.map(|_| Vec::new()));
            let scope = cgroup::systemd::Scope::of(&group);
            let holder = scope.map(|scope| scope.start(&cgroups, &limits)).transpose()?;
            cgroups.create(&group)?;
            Ok((cgroups.apply(&group, &limits)?, holder))
        })
        .await;
        let outcome = match prepared {
            Ok((warnings, holder)) => {
                warnings.iter().for_each(|warning| self.warn_once(warning));
                let asked = ask(&sandbox.run_dir, Request::Start(start), fds).await;
                if holder.is_some()
                    && let Ok((Reply::Started { pid, .. }, ..)) = &asked
                {
                    self.cgroups.show_to_systemd(&record.cgroup, *pid);
                }
                // The container's own process is in the scope now.
                drop(holder);
                asked
            }
            Err(error) => Err(io::Error::other(format!("prepare control group: {error}"))),
        };
        let message = match outcome {
            Ok((Reply::Started { pid, at, warnings }, ..)) => {
                for warning in warnings {
                    self.warn_once(&warning);
                }
                self.note_started(&container, pid, at);
                return Ok(());
            }
            Ok((Reply::Failed { message, .. }, ..)) => message,
            Ok(_) => "the supervisor gave an answer that makes no sense".to_owned(),
            Err(error) => format!("the pod's supervisor: {error}"),
        };
        let message = format!("failed to start container: {message}");
        self.note_start_failure(&container, &message).await;
        Err(Error::internal(message))
    }

    /// The OCI runtime the sandbox's containers are made by; `None` for our own.
    pub(super) fn handler_of(&self, sandbox: &Sandbox) -> Result<Option<Handler>> {
        let name = sandbox.record().runtime_handler;
        if name.is_empty() {
            return Ok(None);
        }
        let binary = self
            .config
            .handlers
            .get(&name)
            .ok_or_else(|| Error::invalid(format!("no runtime for {name:?} is configured any more")))?;
        Ok(Some(Handler { binary: binary.clone(), root: self.config.run.join("oci").join(name) }))
    }

    /// Has the OCI runtime forget a container it made.
    async fn forget_by_handler(&self, container: &Container) {
        let sandbox = self.index.sandbox(&container.sandbox);
        let Ok(Some(handler)) = sandbox.and_then(|sandbox| self.handler_of(&sandbox)) else { return };
        if !handler.root.join(&container.id).exists() {
            return;
        }
        let mut command = tokio::process::Command::new(&handler.binary);
        command.arg("--root").arg(&handler.root).args(["delete", "--force", &container.id]);
        command.stdin(Stdio::null()).kill_on_drop(true);
        match tokio::time::timeout(KILL_PATIENCE, command.output()).await {
            Ok(Ok(output)) if output.status.success() => {}
            Ok(Ok(output)) => {
                let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                tracing::warn!(container = %container.id, message, "the OCI runtime keeps a container");
            }
            Ok(Err(error)) => {
                tracing::warn!(container = %container.id, %error, "the OCI runtime could not be run");
            }
            Err(_) => tracing::warn!(container = %container.id, "the OCI runtime does not answer"),
        }
    }

    /// A container that could not be started has ended, with containerd's reason and code.
    async fn note_start_failure(&self, container: &Arc<Container>, message: &str) {
        let at = sys::now();
        let failure = StartFailure { at, message: message.to_owned() };
        let record = container.update(|record| record.start_failure = Some(failure.clone()));
        let (bundle, cgroups, group) =
            (container.bundle.clone(), self.cgroups.clone(), record.cgroup.clone());
        let written = blocking(move || {
            cgroup::remove_if_empty(&cgroups, &group);
            records::write_state(&bundle, &record)
        })
        .await;
        if let Err(error) = written {
            tracing::warn!(container = %container.id, %error, "failed start not recorded");
        }
        self.forget_by_handler(container).await;
        self.note_ended(container, ended_by_failure(failure));
    }

    /// Asks the container to end, waits, then ends it.
    pub(super) async fn stop_container(&self, id: &str, timeout: i64) -> Result<()> {
        let container = match self.index.container(id) {
            Ok(container) => container,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        // A start under way is waited for; the wait for the container's end is not serialised, so that a
        // second, more impatient stop takes effect.
        drop(container.gate.lock().await);
        if !matches!(container.status(), Status::Running { .. }) {
            return Ok(());
        }
        if timeout > 0 {
            let signal = container.record().stop_signal;
            self.signal(&container, signal, false).await?;
            let grace = Duration::from_secs(timeout.unsigned_abs());
            if tokio::time::timeout(grace, container.ended()).await.is_ok() {
                return self.bury(&container).await;
            }
        }
        self.kill(&container).await
    }

    async fn signal(&self, container: &Container, signal: i32, all: bool) -> Result<()> {
        let sandbox = self.index.sandbox(&container.sandbox)?;
        let request = Request::Signal { id: container.id.clone(), signal, all };
        match ask(&sandbox.run_dir, request, Vec::new()).await {
            Ok((
                Reply::Done | Reply::Failed { failure: Failure::NotFound | Failure::NotRunning, .. },
                ..,
            )) => Ok(()),
            Ok((Reply::Failed { message, .. }, ..)) => Err(Error::internal(message)),
            Ok(_) => Ok(()),
            // A supervisor that is gone has no containers; the listener notices its end.
            Err(error) if gone(&error) => Ok(()),
            Err(error) => Err(Error::internal(format!("signal container {}: {error}", container.id))),
        }
    }

    /// Ends a running container at once and everything it left in its group.
    pub(super) async fn kill(&self, container: &Arc<Container>) -> Result<()> {
        if matches!(container.status(), Status::Running { .. }) {
            self.signal(container, libc::SIGKILL, true).await?;
            if tokio::time::timeout(KILL_PATIENCE, container.ended()).await.is_err() {
                let message = format!("container {} does not end after SIGKILL", container.id);
                return Err(Error::new(Code::DeadlineExceeded, message));
            }
        }
        self.bury(container).await
    }

    /// Removes the control group of a container that has ended.
    async fn bury(&self, container: &Container) -> Result<()> {
        self.forget_by_handler(container).await;
        let (cgroups, group) = (self.cgroups.clone(), container.record().cgroup);
        blocking(move || {
            cgroups.kill(&group);
            cgroup::remove(&cgroups, &group)
        })
        .await
        .map_err(failed("remove control group"))
    }

    pub(super) async fn remove_container(&self, id: &str) -> Result<()> {
        let container = match self.index.container(id) {
            Ok(container) => container,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let _gate = container.gate.lock().await;
        self.kill(&container).await?;
        if let Ok(sandbox) = self.index.sandbox(&container.sandbox)
            && sandbox.run_dir.exists()
        {
            // Only memory of the supervisor; it may be gone already.
            let _ = ask(&sandbox.run_dir, Request::Forget { id: container.id.clone() }, Vec::new()).await;
        }
        let bundle = container.bundle.clone();
        blocking(move || remove_tree(&bundle)).await.map_err(failed("remove container files"))?;
        self.index.write().containers.remove(&container.id);
        self.emit(&container, ContainerEventType::ContainerDeletedEvent);
        Ok(())
    }

    pub(super) async fn reopen_log(&self, id: &str) -> Result<()> {
        let container = self.index.container(id)?;
        if !matches!(container.status(), Status::Running { .. }) {
            let message = format!("container {} is not running", container.id);
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        let sandbox = self.index.sandbox(&container.sandbox)?;
        match ask(&sandbox.run_dir, Request::ReopenLog { id: container.id.clone() }, Vec::new()).await {
            Ok((Reply::Failed { message, .. }, ..)) => Err(Error::internal(message)),
            Ok(_) => Ok(()),
            Err(error) => Err(Error::internal(format!("reopen log: {error}"))),
        }
    }

    pub(super) async fn update_resources(&self, id: &str, resources: LinuxContainerResources) -> Result<()> {
        let container = self.index.container(id)?;
        let _gate = container.gate.lock().await;
        let privileged = security_of(&container.config).privileged;
        let (cgroups, group, bundle) =
            (self.cgroups.clone(), container.record().cgroup, container.bundle.clone());
        let running = matches!(container.status(), Status::Running { .. });
        blocking(move || {
            let path = bundle.join(CONFIG);
            let mut spec: oci_spec::runtime::Spec = serde_json::from_slice(&std::fs::read(&path)?)?;
            let mut changed = spec::resources_of(&resources, &[], privileged);
            changed.set_devices(None);
            if running {
                let limits = cgroup::limits_of(&changed);
                if let Some(scope) = cgroup::systemd::Scope::of(&group) {
                    scope.update(&cgroups, &limits)?;
                }
                cgroups.update(&group, &limits)?;
            }
            if let Some(old) = spec.linux_mut().as_mut().and_then(|linux| linux.resources_mut().as_mut()) {
                old.set_cpu(changed.cpu().clone())
                    .set_memory(*changed.memory())
                    .set_hugepage_limits(changed.hugepage_limits().clone())
                    .set_unified(changed.unified().clone());
            }
            sys::write_atomic(&path, &serde_json::to_vec(&spec)?, false)
        })
        .await
        .map_err(failed("update resources"))
    }
}

pub(super) fn ended_by_failure(failure: StartFailure) -> Ended {
    Ended {
        started_at: 0,
        finished_at: failure.at,
        code: START_ERROR_EXIT,
        reason: "StartError",
        message: failure.message,
    }
}

fn gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
    )
}
