//! Starting sandboxes and containers.

use super::context::Context;
use super::decide::Start;
use super::ending::EndSignal;
use super::files;
use super::kill::{Hooks, Victim};
use super::model::{self, PodContainer, PodId};
use super::runtime_pod::{RuntimePod, Sandbox};
use super::status::WaitingReason;
use crate::container::config::{self, ConfigInputs};
use crate::container::env::{self, EnvInputs, EnvSources};
use crate::container::fields::Addresses;
use crate::container::sandbox::{self, SandboxInputs};
use crate::container::{dns, env_file, hosts, read_only, seccomp, security};
use crate::images::{Keyring, PullState};
use crate::objects::{self, ObjectError};
use crate::runtime_class::{self, RuntimeClassError};
use crate::userns::{self, UsernsError};
use crate::volumes::PodVolumes;
use crate::volumes::image::{self as volume_image, PresentImages};
use ferrite_client::EventType;
use ferrite_component::steps::Timer;
use ferrite_cri::v1::{
    CdiDevice, ContainerConfig, CreateContainerRequest, Mount, PodSandboxConfig, PodSandboxStatusRequest,
    RemoveContainerRequest, RunPodSandboxRequest, StartContainerRequest, UserNamespace,
};
use k8s_openapi::api::core::v1::Pod;
use std::io;
use std::path::PathBuf;

/// Where containers find the message file when the spec names none.
const DEFAULT_MESSAGE_PATH: &str = "/dev/termination-log";

/// Why a container was not started.
#[derive(Debug)]
pub(super) enum StartError {
    /// The container waits for this reason.
    Waiting(WaitingReason),
    /// The pod must end: nothing more is started.
    Interrupted,
}

/// Why a pod has no sandbox.
#[derive(Debug, thiserror::Error)]
pub(super) enum SandboxError {
    #[error(transparent)]
    Runtime(#[from] ferrite_cri::Error),
    #[error(transparent)]
    Class(#[from] RuntimeClassError),
    #[error(transparent)]
    Users(#[from] UsernsError),
    #[error(transparent)]
    Hostname(#[from] hosts::HostnameError),
    #[error("log directory {}: {source}", path.display())]
    LogDirectory { path: PathBuf, source: io::Error },
}

impl From<WaitingReason> for StartError {
    fn from(reason: WaitingReason) -> Self {
        StartError::Waiting(reason)
    }
}

/// Inputs for starting the containers of one pod.
pub(super) struct StartInputs<'a> {
    pub pod: &'a Pod,
    pub sandbox: &'a Sandbox,
    pub sandbox_config: &'a PodSandboxConfig,
    pub runtime: &'a RuntimePod,
    pub volumes: &'a PodVolumes,
    pub keyring: &'a Keyring,
    pub users: &'a UserNamespace,
}

impl Context {
    pub(super) fn sandbox_config(
        &self,
        pod: &Pod,
        attempt: u32,
        users: &UserNamespace,
    ) -> Result<PodSandboxConfig, SandboxError> {
        let cgroup_parent = self.cgroups.pod_path(model::qos_class(pod), &PodId::of(pod).uid);
        let node_dns = dns::read_resolv_conf(&self.resolv_conf);
        let inputs = SandboxInputs {
            cluster_dns: &self.cluster_dns,
            node_dns: &node_dns,
            node_hostname: &self.node_hostname,
            log_root: &self.log_dir,
            cgroup_parent: &cgroup_parent,
            quota: self.rules.quota,
            users,
        };
        Ok(sandbox::sandbox_config(pod, attempt, &inputs)?)
    }

    /// Whose identities the pod's users are: the node's, or a range of its own.
    pub(super) fn users(&self, pod: &Pod) -> Result<UserNamespace, UsernsError> {
        if model::has_own_users(pod) {
            self.userns.mappings(&PodId::of(pod).uid)
        } else {
            Ok(userns::of_node())
        }
    }

    /// Refuses a pod with its own users under a runtime that cannot give it any.
    fn check_users(&self, pod: &Pod, handler: &str) -> Result<(), UsernsError> {
        let supported = self.readiness.borrow().features.of(handler).is_some_and(|f| f.user_namespaces);
        match handler {
            _ if supported || !model::has_own_users(pod) => Ok(()),
            "" => Err(UsernsError::Runtime),
            handler => Err(UsernsError::Handler(handler.to_string())),
        }
    }

    pub(super) async fn create_sandbox(&self, pod: &Pod, attempt: u32) -> Result<Sandbox, SandboxError> {
        let timer = Timer::start();
        let id = self.run_sandbox(pod, attempt).await.inspect_err(|e| {
            let message = format!("Failed to create pod sandbox: {e}");
            self.event(pod, EventType::Warning, "FailedCreatePodSandBox", message);
        })?;
        timer.end("kubelet", "sandbox", &PodId::of(pod).uid, format_args!("with its network"));
        let request = PodSandboxStatusRequest { pod_sandbox_id: id, verbose: false };
        let status = self.runtime.pod_sandbox_status(request).await.inspect_err(|e| {
            let message = format!("Unable to get pod sandbox status: {e}");
            self.event(pod, EventType::Warning, "FailedStatusPodSandBox", message);
        })?;
        let status =
            status.status.ok_or_else(|| ferrite_cri::Error::internal("the sandbox has no status"))?;
        Ok(Sandbox::from_cri(status))
    }

    async fn run_sandbox(&self, pod: &Pod, attempt: u32) -> Result<String, SandboxError> {
        let handler = runtime_class::handler(&self.client, pod).await?;
        self.check_users(pod, &handler)?;
        let config = self.sandbox_config(pod, attempt, &self.users(pod)?)?;
        for omitted in dns::omissions(pod, &self.cluster_dns, &dns::read_resolv_conf(&self.resolv_conf)) {
            self.event(pod, EventType::Warning, "DNSConfigForming", omitted);
        }
        let made = tokio::fs::create_dir_all(&config.log_directory).await;
        made.map_err(|source| SandboxError::LogDirectory { path: (&config.log_directory).into(), source })?;
        let request = RunPodSandboxRequest { config: Some(config), runtime_handler: handler };
        Ok(self.runtime.run_pod_sandbox(request).await?.pod_sandbox_id)
    }

    /// Pulls, creates and starts one container, then runs its postStart hook. Pulls and hooks can take long, so
    /// they are given up when the pod must end; the steps in between are always completed.
    pub(super) async fn start_container(
        &self,
        inputs: &StartInputs<'_>,
        container: &PodContainer,
        start: &Start,
        pulls: &mut PullState,
        mut ending: EndSignal,
    ) -> Result<(), StartError> {
        let pod = inputs.pod;
        let about = model::reference(pod, Some(container.field_path()));
        let warn = |message: String| self.recorder.event(&about, EventType::Warning, "Failed", message);
        let (uid, timer) = (&PodId::of(pod).uid, Timer::start());
        let image = tokio::select! {
            image = self.images.ensure(pod, container, inputs.keyring, inputs.sandbox_config, pulls) => image,
            () = ending.begun() => return Err(StartError::Interrupted),
        };
        let image = image.inspect_err(|reason| warn(format!("Error: {}", reason.reason)))?;
        timer.end("kubelet", "image", uid, format_args!("{} for {}", image.reference, container.name()));
        let mut images = PresentImages::new();
        for volume in volume_image::mounted(pod, container) {
            let puller = volume_image::puller(container, volume);
            let pulled = tokio::select! {
                pulled = self.images.ensure(pod, &puller, inputs.keyring, inputs.sandbox_config, pulls) => pulled,
                () = ending.begun() => return Err(StartError::Interrupted),
            };
            let pulled = pulled.inspect_err(|reason| warn(format!("Error: {}", reason.reason)))?;
            images.insert(volume.name.clone(), pulled.reference);
        }
        let config_error = |message: String| {
            warn(format!("Error: {message}"));
            WaitingReason::new("CreateContainerConfigError", message)
        };
        security::check_non_root(pod, container, &image.user).map_err(|e| config_error(e.to_string()))?;
        let given = tokio::select! {
            given = self.devices.prepare(pod, container) => given,
            () = ending.begun() => return Err(StartError::Interrupted),
        };
        let mut given = given.map_err(|e| config_error(e.to_string()))?;
        let claimed = self.claims.cdi_devices(pod, container).map_err(|e| config_error(e.to_string()))?;
        given.cdi_devices.extend(claimed.into_iter().map(|name| CdiDevice { name }));
        // As upstream: the pod's own variables, mounts and devices come after those of plugins.
        let mut env = given.env;
        env.extend(self.environment(inputs, container).await.map_err(&config_error)?);
        let devices = self.volumes.devices(container, inputs.volumes);
        let devices = devices.map_err(|e| config_error(e.to_string()))?;
        let devices = given.devices.into_iter().chain(devices).collect();
        let mounts = self.mounts(inputs, container, start.attempt, &images, &env);
        let mounts = mounts.await.map_err(&config_error)?;
        let mounts = self.read_only_mounts(pod, container, mounts).await.map_err(&config_error)?;
        let mounts = given.mounts.into_iter().chain(mounts).collect();
        let target_id = match container.target.as_deref() {
            None => None,
            Some(name) => {
                let running = inputs.runtime.latest(name).filter(|i| i.is_running());
                let missing = || config_error(format!("unable to find target container {name}"));
                Some(running.ok_or_else(missing)?.id.clone())
            }
        };
        let config = config::container_config(ConfigInputs {
            pod,
            container,
            attempt: start.attempt,
            env,
            mounts,
            devices,
            cpus: self.resources.cpus(&PodId::of(pod).uid, container.name()),
            cdi_devices: given.cdi_devices,
            annotations: given.annotations,
            image_ref: image.reference,
            image_user: &image.user,
            target_id,
            rules: &self.rules,
            oom_group: self.oom_group,
            seccomp_root: &self.seccomp_root,
            seccomp_default: self.seccomp_default,
            users: inputs.users,
        })
        .map_err(|e| config_error(e.to_string()))?;
        self.check_seccomp(&config).await.map_err(|e| create_error(&warn, &e))?;
        if let Some(old) = &start.replaces {
            let request = RemoveContainerRequest { container_id: old.clone() };
            self.runtime.remove_container(request).await.map_err(|e| create_error(&warn, &e))?;
        }
        let log_dir = self.log_dir.join(PodId::of(pod).log_directory()).join(container.name());
        tokio::fs::create_dir_all(&log_dir)
            .await
            .map_err(|e| config_error(format!("{}: {e}", log_dir.display())))?;
        let log = self.log_dir.join(PodId::of(pod).log_directory()).join(&config.log_path);
        let request = CreateContainerRequest {
            pod_sandbox_id: inputs.sandbox.id.clone(),
            config: Some(config),
            sandbox_config: Some(inputs.sandbox_config.clone()),
        };
        let timer = Timer::start();
        let created = self.runtime.create_container(request).await.map_err(|e| create_error(&warn, &e))?;
        let id = created.container_id;
        timer.end("kubelet", "create container", uid, format_args!("{}", container.name()));
        self.recorder.event(&about, EventType::Normal, "Created", "Container created".to_string());
        let timer = Timer::start();
        self.runtime.start_container(StartContainerRequest { container_id: id.clone() }).await.map_err(
            |e| {
                warn(format!("Error: {e}"));
                WaitingReason::new("RunContainerError", e.to_string())
            },
        )?;
        timer.end("kubelet", "start container", uid, format_args!("{}", container.name()));
        self.resources.started();
        self.log_links.add(&PodId::of(pod), container.name(), &id, log).await;
        self.recorder.event(&about, EventType::Normal, "Started", "Container started".to_string());
        tokio::select! {
            done = self.post_start(inputs, container, &id) => Ok(done?),
            () = ending.begun() => Err(StartError::Interrupted),
        }
    }

    /// The files of variables that the container's environment refers to.
    async fn variable_files(
        &self,
        inputs: &StartInputs<'_>,
        container: &PodContainer,
    ) -> Result<env::EnvFiles, String> {
        let mut files = env::EnvFiles::new();
        for (volume, path) in env::file_references(&container.spec) {
            let missing = || format!("cannot find the volume {volume:?} referenced by FileKeyRef");
            let dir = inputs.volumes.directory(&volume).ok_or_else(missing)?.to_owned();
            let file = path.clone();
            // A container wrote it: links are not followed, and a FIFO is not opened.
            let read =
                blocking(move || ferrite_hostfs::Dir::open(&dir)?.read(file, env_file::LIMIT + 1)).await;
            let text =
                read.map_err(|e| format!("couldn't parse env file {path:?} of volume {volume:?}: {e}"))?;
            files.insert((volume, path), text);
        }
        Ok(files)
    }

    async fn post_start(
        &self,
        inputs: &StartInputs<'_>,
        container: &PodContainer,
        id: &str,
    ) -> Result<(), WaitingReason> {
        let Some(hook) = container.spec.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else {
            return Ok(());
        };
        let pod_ip = inputs
            .sandbox
            .ips
            .first()
            .cloned()
            .unwrap_or_else(|| self.host_ips.first().cloned().unwrap_or_default());
        let target =
            crate::probe::Target { container_id: id.to_string(), pod_ip, container: container.spec.clone() };
        let Err(error) = self.run_hook(inputs.pod, hook, &target).await else { return Ok(()) };
        tracing::warn!(pod = %PodId::of(inputs.pod), container = container.name(), %error, "PostStart hook failed");
        let about = model::reference(inputs.pod, Some(container.field_path()));
        // As upstream: the error may repeat what the hook sent or read.
        let message = "PostStartHook failed".to_owned();
        self.recorder.event(&about, EventType::Warning, "FailedPostStartHook", message);
        let runtime = super::observe::observe(&*self.runtime, &PodId::of(inputs.pod).uid).await;
        if let Ok(runtime) = runtime
            && let Some(instance) = runtime.instances.iter().find(|i| i.id == id && i.is_running())
        {
            let grace = super::kill::grace_of(inputs.pod);
            let victim = Victim {
                container: Some(container),
                instance,
                message: Some("FailedPostStartHook".to_owned()),
                grace,
                pod_ip: &target.pod_ip,
                hooks: Hooks::Run,
            };
            let _ = self.kill_container(inputs.pod, victim).await;
        }
        Err(WaitingReason::new("PostStartHookError", error.to_string()))
    }

    /// Credentials from the pod's image pull secrets. A secret that is missing is left out.
    pub(super) async fn keyring(&self, pod: &Pod) -> Result<Keyring, ObjectError> {
        let id = PodId::of(pod);
        let mut keyring = Keyring::default();
        for reference in model::spec(pod).image_pull_secrets.iter().flatten() {
            match self.objects.secret(&id.uid, &id.namespace, &reference.name).await? {
                Some(secret) => keyring.add(&secret),
                None => {
                    let name = &reference.name;
                    let message = format!(
                        "Unable to retrieve some image pull secrets ({name}); attempting to pull the image may not succeed."
                    );
                    self.event(pod, EventType::Warning, "FailedToRetrieveImagePullSecret", message);
                }
            }
        }
        Ok(keyring)
    }

    async fn environment(
        &self,
        inputs: &StartInputs<'_>,
        container: &PodContainer,
    ) -> Result<Vec<(String, String)>, String> {
        let pod = inputs.pod;
        let id = PodId::of(pod);
        let (maps, secrets) = env::references(&container.spec);
        let mut sources =
            EnvSources { files: self.variable_files(inputs, container).await?, ..EnvSources::default() };
        for name in maps {
            let found =
                self.objects.config_map(&id.uid, &id.namespace, &name).await.map_err(|e| e.to_string())?;
            if let Some(map) = found {
                sources.config_maps.insert(name, objects::config_map_data(&map));
            }
        }
        for name in secrets {
            let found =
                self.objects.secret(&id.uid, &id.namespace, &name).await.map_err(|e| e.to_string())?;
            if let Some(secret) = found {
                sources.secrets.insert(name, objects::secret_data(&secret));
            }
        }
        let links = model::spec(pod).enable_service_links.unwrap_or(true);
        let services =
            env::service_variables(&self.services.list(), &id.namespace, links, self.api_address.as_ref());
        let pod_ips =
            if model::is_host_network(pod) { self.host_ips.clone() } else { inputs.sandbox.ips.clone() };
        env::environment(&EnvInputs {
            pod,
            container: &container.spec,
            services: &services,
            sources: &sources,
            addresses: &Addresses { pod_ips, host_ips: self.host_ips.clone() },
            node: &self.limits,
        })
        .map_err(|e| e.to_string())
    }

    async fn mounts(
        &self,
        inputs: &StartInputs<'_>,
        container: &PodContainer,
        attempt: u32,
        images: &PresentImages,
        env: &[(String, String)],
    ) -> Result<Vec<Mount>, String> {
        let mounts = self.volumes.mounts(inputs.pod, container, inputs.volumes, images, env);
        let mut mounts = mounts.await.map_err(|e| e.to_string())?;
        let taken = |path: &str| mounts.iter().any(|m| m.container_path.trim_end_matches('/') == path);
        let mut own = Vec::new();
        let dir = self.volumes.pod_dir(&PodId::of(inputs.pod).uid);
        if !taken("/etc/hosts") {
            let (dir, text) = (dir.clone(), self.hosts_text(inputs));
            let file = blocking(move || files::hosts_file(&dir, &text)).await;
            own.push(("/etc/hosts".to_string(), file.map_err(|e| format!("hosts file: {e}"))?));
        }
        let message_path = container.spec.termination_message_path.as_deref().unwrap_or(DEFAULT_MESSAGE_PATH);
        if !message_path.is_empty() && !taken(message_path) {
            let name = container.name().to_string();
            let file = blocking(move || files::message_file(&dir, &name, attempt)).await;
            own.push((message_path.to_string(), file.map_err(|e| format!("termination message file: {e}"))?));
        }
        mounts.extend(own.into_iter().map(|(container_path, host_path)| Mount {
            container_path,
            host_path: host_path.to_string_lossy().into_owned(),
            ..Mount::default()
        }));
        Ok(mounts)
    }

    /// Decides which of the container's mounts are read-only with everything mounted below them.
    async fn read_only_mounts(
        &self,
        pod: &Pod,
        container: &PodContainer,
        mounts: Vec<Mount>,
    ) -> Result<Vec<Mount>, String> {
        if !read_only::is_wanted(container) {
            return Ok(mounts);
        }
        let handler = runtime_class::handler(&self.client, pod).await.map_err(|e| e.to_string())?;
        let supported = self.readiness.borrow().features.of(&handler).is_some_and(|f| f.recursive_read_only);
        read_only::resolve(container, mounts, supported).map_err(|e| e.to_string())
    }

    fn hosts_text(&self, inputs: &StartInputs<'_>) -> String {
        let pod = inputs.pod;
        if model::is_host_network(pod) {
            let node = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
            return hosts::node_hosts_file(pod, &node);
        }
        let (name, domain) = hosts::hostname(pod, &self.cluster_dns.domain, &self.node_hostname);
        hosts::hosts_file(pod, &inputs.sandbox.ips, &name, domain.as_deref())
    }

    /// A Localhost profile must be there before the runtime is asked for the container.
    async fn check_seccomp(&self, config: &ContainerConfig) -> ferrite_cri::Result<()> {
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let Some(profile) = security.and_then(|security| security.seccomp.clone()) else { return Ok(()) };
        let root = self.seccomp_root.clone();
        let checked =
            tokio::task::spawn_blocking(move || seccomp::check(&profile, &root).map_err(|e| e.to_string()));
        checked.await.unwrap_or_else(|e| Err(e.to_string())).map_err(ferrite_cri::Error::internal)
    }
}

/// Runs work on files away from the threads that must not block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)))
}

fn create_error(warn: &impl Fn(String), e: &ferrite_cri::Error) -> WaitingReason {
    warn(format!("Error: {e}"));
    WaitingReason::new("CreateContainerError", e.to_string())
}
