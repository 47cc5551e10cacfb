//! Starting.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use ferrite_cri::{v1, with_causes};
use ferrite_hostfs::Dir;
use ferrite_runtime::standalone::{Ending, Streams, Task, open_layers, read_text};
use ferrite_runtime::{Extras, ImageConfigView, JoinIpc, Rootfs, RootfsError, Runtime};

use super::describe::{adjust, groups, namespaces, resolver, resources, security};
use super::hosts::HOSTS;
use super::network::ContainerNetwork;
use super::{Engine, EngineError, Result, View};
use crate::proxy::{self, Listener};
use crate::record::{Container, Lock, Status};
use crate::units;

/// Where the writable layer is, below a container's directory.
pub(super) const LAYER: &str = "layer";

/// The image a container was made from, as its record has it: the image's name may mean another by now.
struct RecordedImage(Container);

impl Rootfs for RecordedImage {
    fn image(&self, _: &str) -> std::result::Result<ImageConfigView, RootfsError> {
        Ok(ImageConfigView {
            id: self.0.image_id.clone(),
            reference: self.0.image_id.clone(),
            user: self.0.config.user.clone(),
            working_dir: self.0.config.working_dir.clone(),
            ..Default::default()
        })
    }

    fn lower_dirs(&self, _: &str) -> std::result::Result<Vec<PathBuf>, RootfsError> {
        Ok(self.0.lowers.clone())
    }
}

#[async_trait]
impl ferrite_cri::ImageService for RecordedImage {
    async fn list_images(&self, _: v1::ListImagesRequest) -> ferrite_cri::Result<v1::ListImagesResponse> {
        Ok(v1::ListImagesResponse::default())
    }

    async fn image_status(&self, _: v1::ImageStatusRequest) -> ferrite_cri::Result<v1::ImageStatusResponse> {
        Ok(v1::ImageStatusResponse::default())
    }

    async fn pull_image(&self, _: v1::PullImageRequest) -> ferrite_cri::Result<v1::PullImageResponse> {
        Err(ferrite_cri::Error::invalid("a container's image is never pulled again"))
    }

    async fn remove_image(&self, _: v1::RemoveImageRequest) -> ferrite_cri::Result<v1::RemoveImageResponse> {
        Err(ferrite_cri::Error::invalid("a container's image cannot be removed"))
    }

    async fn image_fs_info(&self, _: v1::ImageFsInfoRequest) -> ferrite_cri::Result<v1::ImageFsInfoResponse> {
        Ok(v1::ImageFsInfoResponse::default())
    }
}

/// Namespaces of others that a container joins.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) network: Option<PathBuf>,
    pub(super) pid: Option<PathBuf>,
    pub(super) ipc: Option<JoinIpc>,
}

/// The exit code docker gives a start that failed.
pub fn start_failure_code(message: &str) -> i32 {
    let has = |text: &str| message.contains(text);
    if has("executable file not found") || has("no such file or directory") {
        127
    } else if has("permission denied") || has("is a directory") || has("exec format error") {
        126
    } else {
        128
    }
}

impl Engine {
    fn runtime_config(&self, container: &Container, shared: Shared) -> ferrite_runtime::Config {
        let directory = self.directory(&container.id);
        let host = container.host.clone();
        let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
        let on_exit = vec![
            program.display().to_string(),
            "docker".into(),
            "--data-dir".into(),
            self.paths.data_dir().display().to_string(),
            crate::cli::ENDED.into(),
            container.id.clone(),
        ];
        ferrite_runtime::Config {
            root: directory.join("runtime"),
            run: self.paths.container_run(&container.id),
            cgroup_parent: self.paths.cgroup(),
            cgroup_driver: ferrite_cri::v1::CgroupDriver::Cgroupfs,
            supervisor: PathBuf::from("/proc/self/exe"),
            network: Arc::new(ContainerNetwork { engine: self.clone(), container: container.clone() }),
            images: Arc::new(RecordedImage(container.clone())),
            handlers: Default::default(),
            streaming_address: ([127, 0, 0, 1], 0).into(),
            extras: Extras {
                writable: Some(directory.join(LAYER)),
                join_network: shared.network,
                join_pid: shared.pid,
                join_ipc: shared.ipc,
                host_uts: host.uts == "host",
                on_exit,
                shm_size: u64::try_from(host.shm_size).ok().filter(|size| *size > 0),
                adjust: Some(Arc::new(move |spec| adjust(spec, &host))),
            },
        }
    }

    /// The container's runtime, whose records hold at most one sandbox.
    pub(super) async fn runtime(&self, container: &Container, shared: Shared) -> Result<Arc<Runtime>> {
        Runtime::open(self.runtime_config(container, shared))
            .await
            .map_err(|error| EngineError::Internal(with_causes(&error)))
    }

    fn sandbox_config(&self, container: &Container) -> v1::PodSandboxConfig {
        let host = &container.host;
        let (servers, searches, options) = if host.dns.is_empty()
            && host.dns_search.is_empty()
            && host.dns_options.is_empty()
        {
            resolver(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default(), host.network == "host")
        } else {
            (host.dns.clone(), host.dns_search.clone(), host.dns_options.clone())
        };
        v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: container.name.clone(),
                uid: container.id.clone(),
                namespace: "docker".into(),
                attempt: 0,
            }),
            hostname: container.config.hostname.clone(),
            log_directory: self.directory(&container.id).display().to_string(),
            dns_config: Some(v1::DnsConfig { servers, searches, options }),
            linux: Some(v1::LinuxPodSandboxConfig {
                cgroup_parent: format!("{}/{}", self.paths.cgroup(), container.id),
                security_context: Some(v1::LinuxSandboxSecurityContext {
                    namespace_options: Some(namespaces(host)),
                    privileged: host.privileged,
                    ..Default::default()
                }),
                sysctls: host.sysctls.clone().into_iter().collect(),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn container_config(&self, container: &Container) -> Result<v1::ContainerConfig> {
        use v1::MountPropagation::*;
        let config = &container.config;
        let mut mounts: Vec<v1::Mount> = container
            .mounts
            .iter()
            .map(|mount| v1::Mount {
                container_path: mount.destination.clone(),
                host_path: mount.source.display().to_string(),
                readonly: mount.read_only,
                propagation: match mount.propagation.as_str() {
                    "rshared" | "shared" => PropagationBidirectional,
                    "rslave" | "slave" => PropagationHostToContainer,
                    _ => PropagationPrivate,
                }
                .into(),
                ..Default::default()
            })
            .collect();
        if !mounts.iter().any(|mount| mount.container_path == "/etc/hosts") {
            mounts.push(v1::Mount {
                container_path: "/etc/hosts".into(),
                host_path: self.hosts_path(container).display().to_string(),
                ..Default::default()
            });
        }
        let envs = config.env.iter().map(|entry| {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            v1::KeyValue { key: key.to_owned(), value: value.as_bytes().to_vec() }
        });
        let devices = container.host.devices.iter().map(|device| v1::Device {
            container_path: device.container.clone(),
            host_path: device.host.clone(),
            permissions: device.permissions.clone(),
        });
        Ok(v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: container.name.clone(), attempt: 0 }),
            image: Some(v1::ImageSpec { image: container.image_id.clone(), ..Default::default() }),
            command: config.command(),
            working_dir: config.working_dir.clone(),
            envs: envs.collect(),
            mounts,
            devices: devices.collect(),
            log_path: super::logs::LOG.into(),
            stdin: config.open_stdin,
            stdin_once: config.stdin_once,
            tty: config.tty,
            linux: Some(v1::LinuxContainerConfig {
                resources: Some(resources(&container.host)),
                security_context: Some(security(&container.host, self.groups(container)?)?),
            }),
            ..Default::default()
        })
    }

    /// Starts a container that does not run, with `attach` connected from its first byte on. A running one
    /// is left alone. Returns this run and its end, which may have come already.
    pub async fn start(&self, name: &str, attach: Option<Streams>) -> Result<(Task, Ending)> {
        let id = self.find(name)?.container.id;
        self.settle(&id).await?;
        let (lock, view) = self.locked(&id).await?;
        match (view.state.status, &view.state.task) {
            (Status::Running, Some(task)) => return Ok((task.clone(), task.ending().await)),
            (Status::Paused, _) => {
                return Err(EngineError::Conflict(
                    "cannot start a paused container, try unpause instead".into(),
                ));
            }
            _ => {}
        }
        let container = view.container.clone();
        match self.start_locked(&lock, view, attach, 0).await {
            // Watched for while it is locked: nobody has cleared away how it ended yet.
            Ok(task) => Ok((task.clone(), task.ending().await)),
            Err(error) => {
                if container.host.auto_remove {
                    self.remove_locked(lock, &container, true)?;
                }
                Err(error)
            }
        }
    }

    pub(super) async fn start_locked(
        &self,
        lock: &Lock,
        mut view: View,
        attach: Option<Streams>,
        restarts: u32,
    ) -> Result<Task> {
        let id = view.container.id.clone();
        let outcome = Box::pin(self.launch(lock, &view.container, attach)).await;
        let state = &mut view.state;
        state.by_hand = false;
        state.restart_count = restarts;
        match outcome {
            Ok((task, listeners)) => {
                state.status = Status::Running;
                state.error.clear();
                state.oom_killed = false;
                state.exit_code = 0;
                state.started_at = units::now();
                state.waiter = None;
                state.ports = listeners.iter().map(|listener| listener.port.clone()).collect();
                state.task = Some(task.clone());
                self.save(&id, state)?;
                self.note(&view.container, "start", &[]);
                if let (false, Some(ip)) = (listeners.is_empty(), task.ips.first()) {
                    match proxy::spawn(listeners, ip, task.supervisor().unwrap_or(0)) {
                        Ok(identity) => state.proxy = Some(identity),
                        Err(error) => tracing::warn!(%error, "published ports are not served"),
                    }
                    self.save(&id, state)?;
                }
                Ok(task)
            }
            Err(error) => {
                let text = error.to_string();
                state.status = if state.started_at == 0 { Status::Created } else { Status::Exited };
                state.error = text.clone();
                state.exit_code = start_failure_code(&text);
                state.finished_at = units::now();
                self.save(&id, state)?;
                Err(error)
            }
        }
    }

    async fn launch(
        &self,
        _lock: &Lock,
        container: &Container,
        attach: Option<Streams>,
    ) -> Result<(Task, Vec<Listener>)> {
        let host = &container.host;
        let listeners = if host.is_on_networks() { self.listen(container)? } else { Vec::new() };
        let directory = self.directory(&container.id);
        let mut container = container.clone();
        let shared = self.share(&mut container)?;
        if host.network == "host" {
            std::fs::copy("/etc/hosts", directory.join(HOSTS))
                .map_err(EngineError::io("write /etc/hosts"))?;
        }
        prepare_root(&directory.join(LAYER)).map_err(EngineError::io("prepare the container's layer"))?;
        let runtime = self.runtime(&container, shared).await?;
        // Left by a process that was killed in the middle.
        runtime.stop_everything().await?;
        let started = runtime
            .run_alone(self.sandbox_config(&container), self.container_config(&container)?, attach)
            .await;
        runtime.close().await;
        let task = started.map_err(|error| {
            let text = error.to_string();
            let text = text.strip_prefix("failed to start container: ").unwrap_or(&text);
            EngineError::Start(format!("failed to create task for container: failed to start: {text}"))
        })?;
        Ok((task, listeners))
    }

    /// The namespaces that the container shares with others, which must be running. Namespaces that they
    /// share with the host are shared with the container, too.
    fn share(&self, container: &mut Container) -> Result<Shared> {
        let running = |what: &str, target: &str| -> Result<(Container, Task)> {
            let target = self.find(target)?;
            match target.state.task.filter(|_| target.state.status.runs()) {
                Some(task) => Ok((target.container, task)),
                None => Err(EngineError::Conflict(format!(
                    "cannot join {what} of a non running container: {}",
                    target.container.id
                ))),
            }
        };
        let mut shared = Shared::default();
        if let Some(target) = container.host.network.clone().strip_prefix("container:") {
            let (target, task) = running("network", target)?;
            container.config.hostname = target.config.hostname.clone();
            match target.host.network.as_str() {
                "host" => container.host.network = "host".into(),
                _ => shared.network = Some(task.network_namespace()),
            }
            if container.host.network == "host" {
                std::fs::copy(self.hosts_path(&target), self.directory(&container.id).join(HOSTS))
                    .map_err(EngineError::io("write /etc/hosts"))?;
            }
        }
        if let Some(target) = container.host.pid.clone().strip_prefix("container:") {
            let (target, task) = running("PID", target)?;
            match target.host.pid.as_str() {
                "host" => container.host.pid = "host".into(),
                _ => shared.pid = Some(task.namespace("pid")),
            }
        }
        if let Some(target) = container.host.ipc.clone().strip_prefix("container:") {
            let (target, task) = running("IPC", target)?;
            match target.host.ipc.as_str() {
                "host" => container.host.ipc = "host".into(),
                "shareable" => shared.ipc = Some(task.ipc()),
                _ => {
                    return Err(EngineError::Conflict(format!(
                        "can't join IPC of container {}: non-shareable IPC (hint: use IpcMode:shareable for the donor \
                         container)",
                        target.id
                    )));
                }
            }
        }
        Ok(shared)
    }

    /// The numbers of the groups the container's user is in besides its own.
    fn groups(&self, container: &Container) -> Result<Vec<i64>> {
        let wanted = &container.host.group_add;
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let layer = self.directory(&container.id).join(LAYER);
        let root =
            open_layers(&container.lowers, &layer).map_err(EngineError::io("open the container's layers"))?;
        groups(wanted, &read_text(&root, Path::new("/etc/group")))
    }

    /// Takes the ports of the host before anything runs: a taken one is an error of the start.
    fn listen(&self, container: &Container) -> Result<Vec<Listener>> {
        let mut wanted = container.host.ports.clone();
        if container.host.publish_all {
            for (port, protocol) in &container.config.exposed {
                if !wanted.iter().any(|known| known.container == *port && known.protocol == *protocol) {
                    wanted.push(crate::ports::PortBinding {
                        container: *port,
                        protocol: *protocol,
                        host_ip: None,
                        host_port: None,
                    });
                }
            }
        }
        let each = wanted.iter().map(|binding| {
            Listener::bind(binding).map_err(|error| {
                let (address, port) = (binding.address(), binding.host_port.unwrap_or(0));
                let reason = match error.kind() {
                    std::io::ErrorKind::AddrInUse => "port is already allocated".to_owned(),
                    _ => error.to_string(),
                };
                EngineError::Internal(format!(
                    "driver failed programming external connectivity on endpoint {} ({}): Bind for {address}:{port} \
                     failed: {reason}",
                    container.name, container.id
                ))
            })
        });
        each.collect()
    }
}

/// Files docker puts into every container. The container may have put anything in their place when it ran before.
fn prepare_root(layer: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(layer.join("upper"))?;
    match Dir::open(&layer.join("upper"))?.create_file(".dockerenv") {
        Ok(file) => file.set_permissions(std::fs::Permissions::from_mode(0o755)),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_a_container_left_is_not_written_through() {
        let layer = tempfile::tempdir().unwrap();
        let victim = layer.path().join("victim");
        prepare_root(layer.path()).unwrap();
        let marker = layer.path().join("upper/.dockerenv");
        assert!(marker.is_file());
        std::fs::remove_file(&marker).unwrap();
        std::os::unix::fs::symlink(&victim, &marker).unwrap();
        prepare_root(layer.path()).unwrap();
        assert!(!victim.exists());
    }

    #[test]
    fn failures() {
        for (message, code) in [
            ("exec: \"x\": executable file not found in $PATH", 127),
            ("exec: \"/x\": stat /x: no such file or directory", 127),
            ("exec: \"/x\": permission denied", 126),
            ("exec: \"/\": is a directory", 126),
            ("mount /x: invalid argument", 128),
        ] {
            assert_eq!(start_failure_code(message), code, "{message}");
        }
    }
}
