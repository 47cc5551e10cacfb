//! Containers: created, started, stopped, removed.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferrite_cri::v1::{
    ContainerConfig, ContainerEventType, LinuxContainerResources, LinuxContainerSecurityContext,
    NamespaceMode, SupplementalGroupsPolicy, security_profile::ProfileType,
};
use ferrite_cri::{Code, Error, Result};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType};

use super::client::{ask, blocking};
use super::records::{self, ContainerRecord, StartFailure};
use super::sandbox::{host_ipc, host_network, remove_tree};
use super::state::{Container, Ended, START_ERROR_EXIT, Sandbox, Status, new_id};
use super::{Inner, required};
use crate::rootfs::{ImageConfigView, RootfsError};
use crate::spec::{self, Identity, IdentityRequest, SpecError};
use crate::supervisor::bundle::{BUNDLE, Bundle, CONFIG};
use crate::supervisor::protocol::{Failure, PidNamespace, Reply, Request, Start};
use crate::supervisor::sandbox::{NETNS, SHM};
use crate::{cgroup, sys};

/// How long the kernel may take to end a killed container before the call gives up.
const KILL_PATIENCE: Duration = Duration::from_secs(30);

impl From<SpecError> for Error {
    fn from(error: SpecError) -> Self {
        Error::invalid(error.to_string())
    }
}

fn image_error(error: RootfsError) -> Error {
    match error {
        RootfsError::NotFound(_) => Error::not_found(error.to_string()),
        RootfsError::Broken { .. } => Error::internal(error.to_string()),
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::internal(format!("{what}: {error}"))
}

fn security_of(config: &ContainerConfig) -> LinuxContainerSecurityContext {
    config.linux.as_ref().and_then(|linux| linux.security_context.clone()).unwrap_or_default()
}

/// What we cannot do is refused: a container that silently lacks what it asked for is worse than none.
fn refuse_unsupported(config: &ContainerConfig, security: &LinuxContainerSecurityContext) -> Result<()> {
    let unsupported =
        |what: &str| Err(Error::new(Code::Unimplemented, format!("{what} are not supported yet")));
    if config.mounts.iter().any(|mount| mount.image.as_ref().is_some_and(|image| !image.image.is_empty())) {
        return unsupported("image volumes");
    }
    if config.mounts.iter().any(|mount| !mount.uid_mappings.is_empty() || !mount.gid_mappings.is_empty()) {
        return unsupported("ID-mapped mounts");
    }
    if !config.cdi_devices.is_empty() {
        return unsupported("CDI devices");
    }
    let user = security.namespace_options.as_ref().and_then(|options| options.userns_options.as_ref());
    if user.is_some_and(|user| user.mode() == NamespaceMode::Pod && !user.uids.is_empty()) {
        return unsupported("user namespaces");
    }
    Ok(())
}

fn pid_namespace(security: &LinuxContainerSecurityContext) -> PidNamespace {
    let options = security.namespace_options.clone().unwrap_or_default();
    match options.pid() {
        NamespaceMode::Pod => PidNamespace::Pod,
        NamespaceMode::Container => PidNamespace::Own,
        NamespaceMode::Node => PidNamespace::Host,
        NamespaceMode::Target => PidNamespace::Target(options.target_id),
    }
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

    /// Writes everything the supervisor needs; the record comes last and makes the container exist.
    fn make_bundle(
        &self,
        sandbox: &Sandbox,
        config: &ContainerConfig,
        id: &str,
        directory: &Path,
    ) -> Result<ContainerRecord> {
        let image_spec = config.image.clone().unwrap_or_default();
        let images = &self.config.images;
        let image = images.image(&image_spec.image).map_err(image_error)?;
        let lowers = images.lower_dirs(&image.id).map_err(image_error)?;
        let security = security_of(config);
        refuse_unsupported(config, &security)?;
        let pid = match pid_namespace(&security) {
            PidNamespace::Target(target) => PidNamespace::Target(self.index.container(&target)?.id.clone()),
            other => other,
        };
        let identity = identify(&security, &image, &lowers)?;
        let cgroup = format!("{}/{id}", sandbox.cgroup_parent(&self.config.cgroup_parent));
        for mount in &config.mounts {
            // As other runtimes do: a missing host path becomes a directory.
            let path = Path::new(&mount.host_path);
            if !path.exists() {
                std::fs::create_dir_all(path).map_err(|error| {
                    Error::internal(format!("make mount source {}: {error}", path.display()))
                })?;
            }
        }
        let own = |name: &str| Some(sandbox.state_dir.join(name)).filter(|path| path.exists());
        let input = spec::Input {
            config,
            image: &image,
            identity: &identity,
            hostname: &self.hostname(&sandbox.config),
            cgroup: cgroup.clone(),
            rootfs: directory.join("rootfs"),
            shm: if host_ipc(&sandbox.config) { "/dev/shm".into() } else { sandbox.run_dir.join(SHM) },
            resolv_conf: own("resolv.conf"),
            hostname_file: own("hostname"),
            network_namespace: (!host_network(&sandbox.config)).then(|| sandbox.run_dir.join(NETNS)),
            own_pid: pid == PidNamespace::Own,
            cgroup_v2: self.cgroups.is_v2(),
            devices: devices(config, security.privileged).map_err(failed("look at devices"))?,
        };
        let mut description = spec::build(&input)?;
        let profile = seccomp_profile(&security)?;
        if let Some(linux) = description.linux_mut() {
            linux.set_seccomp(profile.clone());
        }
        let bundle = Bundle {
            lowers,
            upper: directory.join("upper"),
            work: directory.join("work"),
            rootfs: directory.join("rootfs"),
            seccomp: profile
                .as_ref()
                .map(|profile| self.seccomp_programs(profile))
                .transpose()?
                .unwrap_or_default(),
        };
        let record = ContainerRecord {
            created_at: sys::now(),
            image_id: image.id.clone(),
            image_ref: if image.reference.is_empty() { image.id } else { image.reference },
            identity,
            stop_signal: stop_signal(config, &image.stop_signal),
            cgroup,
            pid,
            log_path: log_path(&sandbox.config.log_directory, &config.log_path),
            start_failure: None,
        };
        let write = || -> io::Result<()> {
            for name in ["upper", "work", "rootfs"] {
                std::fs::create_dir_all(directory.join(name))?;
            }
            sys::write_atomic(&directory.join(CONFIG), &serde_json::to_vec(&description)?, false)?;
            sys::write_atomic(&directory.join(BUNDLE), &serde_json::to_vec(&bundle)?, false)?;
            records::write(directory, config, &record)
        };
        write().map_err(failed("write container"))?;
        Ok(record)
    }

    /// Programs are shared by every container with the same profile and named by what they contain.
    fn seccomp_programs(&self, profile: &oci_spec::runtime::LinuxSeccomp) -> Result<Vec<PathBuf>> {
        let text = serde_json::to_vec(profile).map_err(|error| Error::internal(error.to_string()))?;
        let digest = ring::digest::digest(&ring::digest::SHA256, &text);
        let name: String = digest.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let directory = self.config.root.join("seccomp").join(name);
        let done = directory.join("done");
        let write = |programs: &[Vec<u8>]| -> io::Result<()> {
            std::fs::create_dir_all(&directory)?;
            for (index, program) in programs.iter().enumerate() {
                sys::write_atomic(&directory.join(index.to_string()), program, false)?;
            }
            sys::write_atomic(&done, programs.len().to_string().as_bytes(), false)
        };
        let count = match std::fs::read_to_string(&done).ok().and_then(|text| text.parse::<usize>().ok()) {
            Some(count) => count,
            None => {
                let programs = spec::compile(profile)?;
                write(&programs).map_err(failed("write seccomp programs"))?;
                programs.len()
            }
        };
        Ok((0..count).map(|index| directory.join(index.to_string())).collect())
    }

    pub(super) async fn start_container(self: Arc<Self>, id: &str) -> Result<()> {
        let container = self.index.container(id)?;
        let sandbox = self.index.sandbox(&container.sandbox)?;
        let _gate = container.gate.lock().await;
        if container.status() != Status::Created {
            let message = format!("container {} was started before", container.id);
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        let record = container.record();
        let start = Start {
            id: container.id.clone(),
            bundle: container.bundle.clone(),
            log: record.log_path.clone(),
            terminal: container.config.tty,
            stdin: container.config.stdin,
            stdin_once: container.config.stdin_once,
            cgroup: record.cgroup.clone(),
            pid: record.pid.clone(),
        };
        let (cgroups, bundle, group) =
            (self.cgroups.clone(), container.bundle.clone(), record.cgroup.clone());
        let prepared = blocking(move || {
            let spec: oci_spec::runtime::Spec = serde_json::from_slice(&std::fs::read(bundle.join(CONFIG))?)?;
            cgroups.create(&group)?;
            if let Some(resources) = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref()) {
                cgroups.apply(&group, &cgroup::settings(&cgroups, resources))?;
                cgroups.restrict_devices(&group, resources.devices().as_deref().unwrap_or_default())?;
            }
            Ok(())
        })
        .await;
        let outcome = match prepared {
            Ok(()) => ask(&sandbox.run_dir, Request::Start(start), Vec::new()).await,
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

    /// A container that could not be started has ended, with containerd's reason and code.
    async fn note_start_failure(&self, container: &Arc<Container>, message: &str) {
        let at = sys::now();
        let failure = StartFailure { at, message: message.to_owned() };
        let record = container.update(|record| record.start_failure = Some(failure.clone()));
        let (bundle, cgroups, group) =
            (container.bundle.clone(), self.cgroups.clone(), record.cgroup.clone());
        let written = blocking(move || {
            cgroups.remove_if_empty(&group);
            records::write_state(&bundle, &record)
        })
        .await;
        if let Err(error) = written {
            tracing::warn!(container = %container.id, %error, "failed start not recorded");
        }
        self.note_ended(container, ended_by_failure(failure));
    }

    /// Warnings of the machine, not of a pod: said once.
    fn warn_once(&self, warning: &str) {
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| tracing::warn!("{warning}; containers run without it"));
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
            // A supervisor that is gone has no containers; its end is noticed by the one who listens.
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
        let (cgroups, group) = (self.cgroups.clone(), container.record().cgroup);
        blocking(move || {
            cgroups.kill(&group);
            cgroups.remove(&group)
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
                let mut settings = cgroup::settings(&cgroups, &changed);
                let applied = cgroups.apply(&group, &settings);
                if applied.is_err() {
                    // Version 1 wants memory <= memory+swap at every moment: when growing, swap goes first.
                    settings.reverse();
                    cgroups.apply(&group, &settings)?;
                }
            }
            if let Some(old) = spec.linux_mut().as_mut().and_then(|linux| linux.resources_mut().as_mut()) {
                old.set_cpu(changed.cpu().clone()).set_memory(*changed.memory());
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

fn log_path(directory: &str, path: &str) -> Option<PathBuf> {
    (!directory.is_empty() && !path.is_empty()).then(|| Path::new(directory).join(path))
}

/// The pod's signal, the image's, SIGTERM.
fn stop_signal(config: &ContainerConfig, image: &str) -> i32 {
    spec::signal_from_cri(config.stop_signal())
        .or_else(|| spec::signal_from_name(image))
        .unwrap_or(libc::SIGTERM)
}

/// Looks users and groups up in the topmost layer that has the file.
fn identify(
    security: &LinuxContainerSecurityContext,
    image: &ImageConfigView,
    lowers: &[PathBuf],
) -> Result<Identity> {
    let policy = security.supplemental_groups_policy();
    let request = IdentityRequest {
        image_user: &image.user,
        run_as_user: security.run_as_user.as_ref().map(|user| user.value),
        run_as_username: &security.run_as_username,
        run_as_group: security.run_as_group.as_ref().map(|group| group.value),
        supplemental_groups: &security.supplemental_groups,
        strict_groups: policy == SupplementalGroupsPolicy::Strict,
    };
    let passwd = read_from_layers(lowers, Path::new("/etc/passwd"));
    let group = read_from_layers(lowers, Path::new("/etc/group"));
    Ok(spec::resolve_identity(&request, &passwd, &group)?)
}

/// Largest passwd or group file we read from an image.
const MAX_FILE: u64 = 4 << 20;

fn read_from_layers(lowers: &[PathBuf], path: &Path) -> String {
    use std::io::Read;
    for lower in lowers {
        let Ok(root) = std::fs::File::open(lower) else { continue };
        let opened =
            sys::open_beneath(root.as_fd(), path, libc::O_RDONLY | libc::O_NONBLOCK, sys::Beneath::InRoot);
        let Ok(file) = opened.map(std::fs::File::from) else { continue };
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            continue;
        }
        let mut bytes = Vec::new();
        if file.take(MAX_FILE).read_to_end(&mut bytes).is_ok() {
            return String::from_utf8_lossy(&bytes).into_owned();
        }
    }
    String::new()
}

fn seccomp_profile(
    security: &LinuxContainerSecurityContext,
) -> Result<Option<oci_spec::runtime::LinuxSeccomp>> {
    if security.privileged {
        return Ok(None);
    }
    // Without a word about it a container runs unconfined, as upstream.
    let Some(profile) = &security.seccomp else { return Ok(None) };
    match profile.profile_type() {
        ProfileType::Unconfined => Ok(None),
        ProfileType::RuntimeDefault => {
            Ok(Some(spec::default_profile(&spec::capabilities(security)?.bounding)))
        }
        ProfileType::Localhost => {
            let path = Path::new(&profile.localhost_ref);
            let bytes = std::fs::read(path)
                .map_err(|error| Error::invalid(format!("seccomp profile {}: {error}", path.display())))?;
            Ok(Some(spec::parse_profile(&bytes)?))
        }
    }
}

/// The devices a container asked for, or every device of the node for a privileged one.
fn devices(config: &ContainerConfig, privileged: bool) -> io::Result<Vec<LinuxDevice>> {
    let mut found = Vec::new();
    if privileged {
        collect_devices(Path::new("/dev"), Path::new("/dev"), 0, &mut found)?;
    }
    for device in &config.devices {
        let (host, inside) = (Path::new(&device.host_path), Path::new(&device.container_path));
        if let Some(device) = look_at_device(host, inside)? {
            found.push(device);
        } else if host.is_dir() {
            collect_devices(host, inside, 0, &mut found)?;
        }
    }
    Ok(found)
}

fn look_at_device(host: &Path, inside: &Path) -> io::Result<Option<LinuxDevice>> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let metadata = std::fs::metadata(host)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", host.display())))?;
    let typ = match metadata.file_type() {
        kind if kind.is_char_device() => LinuxDeviceType::C,
        kind if kind.is_block_device() => LinuxDeviceType::B,
        _ => return Ok(None),
    };
    let mut device = LinuxDevice::default();
    device
        .set_path(inside.to_owned())
        .set_typ(typ)
        .set_major(i64::from(libc::major(metadata.rdev())))
        .set_minor(i64::from(libc::minor(metadata.rdev())))
        .set_file_mode(Some(metadata.mode() & 0o7777))
        .set_uid(Some(metadata.uid()))
        .set_gid(Some(metadata.gid()));
    Ok(Some(device))
}

fn collect_devices(host: &Path, inside: &Path, depth: u32, found: &mut Vec<LinuxDevice>) -> io::Result<()> {
    // These are the container's own, or mounts.
    const SKIPPED: &[&str] =
        &["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev", "console", "ptmx"];
    for entry in std::fs::read_dir(host)?.flatten() {
        let name = entry.file_name();
        if SKIPPED.iter().any(|skipped| name == *skipped) {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if depth < 8 {
                collect_devices(&entry.path(), &inside.join(&name), depth + 1, found)?;
            }
        } else if !kind.is_symlink()
            && let Some(device) = look_at_device(&entry.path(), &inside.join(&name))?
        {
            found.push(device);
        }
    }
    Ok(())
}
