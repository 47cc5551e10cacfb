//! CRI over supervisors: records, decisions and the calls of the kubelet.

mod apparmor;
mod bundle;
pub(crate) mod client;
mod container;
mod events;
pub(crate) mod exec;
mod files;
mod images;
mod query;
mod records;
mod recover;
mod refusals;
mod sandbox;
mod spawner;
pub(crate) mod state;
mod stats;
mod teardown;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use ferrite_cri::v1::*;
use ferrite_cri::{ContainerEvents, Error, Result, RuntimeService};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::Config;
use crate::streaming::{self, Action, Tickets};
use events::Events;
use ferrite_cgroup::Layout;
use spawner::{SealedExecutable, Spawner};
use state::Index;
pub use teardown::destroy;

/// Name of the control group supervisors live in, below the runtime's own.
pub(crate) const SUPERVISORS: &str = "supervisors";

/// Most different warnings remembered; further ones are not logged.
const MAX_WARNINGS: usize = 64;

/// Why a runtime could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error("runtime directory {}", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("control groups")]
    Cgroups(#[source] io::Error),
    #[error("supervisor binary {}", path.display())]
    Supervisor {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("streaming server on {address}")]
    Streaming {
        address: std::net::SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("{} is in use by another runtime", .0.display())]
    Locked(PathBuf),
}

/// The runtime. Dropping it leaves every container running; [`Runtime::open`] on the same directories
/// takes them up again.
pub struct Runtime {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    config: Config,
    cgroups: Layout,
    spawner: Spawner,
    index: Index,
    events: Events,
    tickets: Tickets,
    /// Messages about this machine that were logged once and are not repeated.
    said: Mutex<BTreeSet<String>>,
    /// Every task of this runtime; they end with it.
    tasks: TaskTracker,
    closing: CancellationToken,
    /// Held so that two runtimes never work on the same directories.
    _lock: nix::fcntl::Flock<std::fs::File>,
}

impl Runtime {
    /// Opens the directories, adopts running sandboxes and cleans up after those that died meanwhile.
    ///
    /// Must be called within a tokio runtime.
    pub async fn open(config: Config) -> std::result::Result<Arc<Self>, OpenError> {
        let address = config.streaming_address;
        let (listener, address) =
            streaming::bind(address).map_err(|source| OpenError::Streaming { address, source })?;
        let prepared = client::blocking(move || Ok(Inner::prepare(config, Tickets::new(address)))).await;
        let inner = Arc::new(prepared.map_err(OpenError::Cgroups)??);
        inner.recover().await;
        let (weak, closing) = (Arc::downgrade(&inner), inner.closing.clone());
        inner.tasks.spawn(async move {
            tokio::select! {
                () = streaming::serve(weak, listener) => {}
                () = closing.cancelled() => {}
            }
        });
        Ok(Arc::new(Self { inner }))
    }

    /// Makes a sandbox with one container and starts it, with `attach` connected from the first byte on.
    /// Removes everything again when any step fails.
    pub async fn run_alone(
        &self,
        sandbox: PodSandboxConfig,
        container: ContainerConfig,
        attach: Option<crate::standalone::Streams>,
    ) -> Result<crate::standalone::Task> {
        let id = self.inner.clone().run_sandbox(sandbox, String::new()).await?;
        let started = self.start_alone(&id, container, attach).await;
        if started.is_err()
            && let Err(error) = self.inner.clone().remove_sandbox(&id).await
        {
            tracing::warn!(sandbox = %id, %error, "a failed sandbox left something behind");
        }
        started
    }

    async fn start_alone(
        &self,
        sandbox: &str,
        container: ContainerConfig,
        attach: Option<crate::standalone::Streams>,
    ) -> Result<crate::standalone::Task> {
        let id = self.inner.clone().create_container(sandbox, container).await?;
        let attach = attach.map(crate::standalone::Streams::into_request);
        self.inner.clone().start_container(&id, attach).await?;
        let (container, sandbox) = (self.inner.index.container(&id)?, self.inner.index.sandbox(sandbox)?);
        let pid = match container.status() {
            state::Status::Running { pid, .. } => pid,
            _ => 0,
        };
        Ok(crate::standalone::Task {
            run_dir: sandbox.run_dir.clone(),
            container: container.id.clone(),
            bundle: container.bundle.clone(),
            cgroup: container.record().cgroup,
            pid,
            ips: sandbox.record().ips,
        })
    }

    /// Stops listening to supervisors and waits for calls under way. Containers keep running.
    pub async fn close(&self) {
        self.inner.closing.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    /// Kills and removes every sandbox and container, with their networks, mounts, groups and files.
    pub async fn stop_everything(&self) -> Result<()> {
        let sandboxes: Vec<_> = self.inner.index.read().sandboxes.keys().cloned().collect();
        let mut result = Ok(());
        for id in sandboxes {
            if let Err(error) = self.inner.clone().remove_sandbox(&id).await {
                result = Err(error);
            }
        }
        result
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.inner.closing.cancel();
    }
}

impl Inner {
    fn prepare(config: Config, tickets: Tickets) -> std::result::Result<Self, OpenError> {
        // Writable layers are below: users of the node must not reach files that containers leave there.
        let (root, run) = (config.root.join(records::SANDBOXES), config.run.join(records::SANDBOXES));
        for path in [config.root.clone(), config.run.clone(), root, run] {
            ferrite_hostfs::private_dir(&path)
                .map_err(|source| OpenError::Directory { path: path.clone(), source })?;
        }
        let lock = teardown::lock(&config.root)?;
        let cgroups = Layout::detect().map_err(|error| OpenError::Cgroups(error.into()))?;
        cgroups.create(&format!("{}/{SUPERVISORS}", config.cgroup_parent)).map_err(OpenError::Cgroups)?;
        let executable = SealedExecutable::open(&config.supervisor, &config.run.join("empty"))
            .map_err(|source| OpenError::Supervisor { path: config.supervisor.clone(), source })?;
        Ok(Self {
            config,
            cgroups,
            spawner: Spawner::new(executable),
            index: Index::default(),
            events: Events::new(),
            tickets,
            said: Mutex::default(),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
            _lock: lock,
        })
    }

    pub(crate) fn tickets(&self) -> &Tickets {
        &self.tickets
    }

    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    pub(crate) fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Where the sandbox's network namespace is pinned; `None` when it is the node's.
    pub(crate) fn network_namespace(&self, id: &str) -> Result<Option<PathBuf>> {
        let sandbox = self.index.sandbox(id)?;
        if !sandbox.record().ready {
            let message = format!("sandbox {} is not ready", sandbox.id);
            return Err(Error::new(ferrite_cri::Code::FailedPrecondition, message));
        }
        let own = !sandbox::host_network(&sandbox.config);
        Ok(own.then(|| sandbox.run_dir.join(crate::supervisor::sandbox::NETNS)))
    }

    /// The namespace of the pod that a stream is about.
    pub(crate) fn namespace(&self, action: &Action) -> Result<String> {
        let sandbox = match action {
            Action::Exec(request) => self.index.container(&request.container_id)?.sandbox.clone(),
            Action::Attach(request) => self.index.container(&request.container_id)?.sandbox.clone(),
            Action::Forward { sandbox, .. } => sandbox.clone(),
        };
        let sandbox = self.index.sandbox(&sandbox)?;
        Ok(sandbox.config.metadata.as_ref().map(|m| m.namespace.clone()).unwrap_or_default())
    }

    /// Warnings about the machine, not about a pod: each is said once.
    fn warn_once(&self, warning: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() < MAX_WARNINGS && said.insert(warning.to_owned()) {
            tracing::warn!("{warning}; containers run without it");
        }
    }

    fn supervisors_cgroup(&self) -> String {
        format!("{}/{SUPERVISORS}", self.config.cgroup_parent)
    }
}

/// Runs a call to its end even if the caller gives up waiting: half a start is worse than a late one.
async fn finish<T: Send + 'static>(
    inner: &Inner,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    inner
        .tasks
        .spawn(work)
        .await
        .unwrap_or_else(|error| Err(Error::internal(format!("the call ended badly: {error}"))))
}

fn required<T>(value: Option<T>, field: &str) -> Result<T> {
    value.ok_or_else(|| Error::invalid(format!("{field} is required")))
}

#[async_trait]
impl RuntimeService for Runtime {
    async fn version(&self, _request: VersionRequest) -> Result<VersionResponse> {
        Ok(VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "ferrite".into(),
            runtime_version: env!("CARGO_PKG_VERSION").into(),
            runtime_api_version: "v1".into(),
        })
    }

    async fn status(&self, _request: StatusRequest) -> Result<StatusResponse> {
        Ok(self.inner.status())
    }

    async fn run_pod_sandbox(&self, request: RunPodSandboxRequest) -> Result<RunPodSandboxResponse> {
        let config = required(request.config, "config")?;
        let inner = self.inner.clone();
        let work = async move { inner.clone().run_sandbox(config, request.runtime_handler).await };
        Ok(RunPodSandboxResponse { pod_sandbox_id: finish(&self.inner, work).await? })
    }

    async fn stop_pod_sandbox(&self, request: StopPodSandboxRequest) -> Result<StopPodSandboxResponse> {
        let inner = self.inner.clone();
        finish(&self.inner, async move { inner.clone().stop_sandbox(&request.pod_sandbox_id).await }).await?;
        Ok(StopPodSandboxResponse {})
    }

    async fn remove_pod_sandbox(&self, request: RemovePodSandboxRequest) -> Result<RemovePodSandboxResponse> {
        let inner = self.inner.clone();
        finish(&self.inner, async move { inner.clone().remove_sandbox(&request.pod_sandbox_id).await })
            .await?;
        Ok(RemovePodSandboxResponse {})
    }

    async fn pod_sandbox_status(&self, request: PodSandboxStatusRequest) -> Result<PodSandboxStatusResponse> {
        self.inner.sandbox_status(&request)
    }

    async fn list_pod_sandbox(&self, request: ListPodSandboxRequest) -> Result<ListPodSandboxResponse> {
        Ok(self.inner.list_sandboxes(&request.filter.unwrap_or_default()))
    }

    async fn create_container(&self, request: CreateContainerRequest) -> Result<CreateContainerResponse> {
        let config = required(request.config, "config")?;
        let inner = self.inner.clone();
        let work = async move { inner.clone().create_container(&request.pod_sandbox_id, config).await };
        Ok(CreateContainerResponse { container_id: finish(&self.inner, work).await? })
    }

    async fn start_container(&self, request: StartContainerRequest) -> Result<StartContainerResponse> {
        let inner = self.inner.clone();
        finish(&self.inner, async move { inner.clone().start_container(&request.container_id, None).await })
            .await?;
        Ok(StartContainerResponse {})
    }

    async fn stop_container(&self, request: StopContainerRequest) -> Result<StopContainerResponse> {
        let inner = self.inner.clone();
        let work = async move { inner.stop_container(&request.container_id, request.timeout).await };
        finish(&self.inner, work).await?;
        Ok(StopContainerResponse {})
    }

    async fn remove_container(&self, request: RemoveContainerRequest) -> Result<RemoveContainerResponse> {
        let inner = self.inner.clone();
        finish(&self.inner, async move { inner.remove_container(&request.container_id).await }).await?;
        Ok(RemoveContainerResponse {})
    }

    async fn list_containers(&self, request: ListContainersRequest) -> Result<ListContainersResponse> {
        Ok(self.inner.list_containers(&request.filter.unwrap_or_default()))
    }

    async fn container_status(&self, request: ContainerStatusRequest) -> Result<ContainerStatusResponse> {
        self.inner.container_status(&request)
    }

    async fn update_container_resources(
        &self,
        request: UpdateContainerResourcesRequest,
    ) -> Result<UpdateContainerResourcesResponse> {
        let inner = self.inner.clone();
        let resources = request.linux.unwrap_or_default();
        let work = async move { inner.update_resources(&request.container_id, resources).await };
        finish(&self.inner, work).await?;
        Ok(UpdateContainerResourcesResponse {})
    }

    async fn reopen_container_log(
        &self,
        request: ReopenContainerLogRequest,
    ) -> Result<ReopenContainerLogResponse> {
        self.inner.reopen_log(&request.container_id).await?;
        Ok(ReopenContainerLogResponse {})
    }

    async fn exec_sync(&self, request: ExecSyncRequest) -> Result<ExecSyncResponse> {
        self.inner.exec_sync(request).await
    }

    async fn exec(&self, request: ExecRequest) -> Result<ExecResponse> {
        if request.cmd.is_empty() {
            return Err(Error::invalid("cmd is required"));
        }
        refusals::check_streams(request.stdin, request.stdout, request.stderr, request.tty)?;
        self.inner.running(&request.container_id)?;
        Ok(ExecResponse { url: self.inner.tickets.issue(Action::Exec(request)) })
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachResponse> {
        refusals::check_streams(request.stdin, request.stdout, request.stderr, request.tty)?;
        self.inner.running(&request.container_id)?;
        Ok(AttachResponse { url: self.inner.tickets.issue(Action::Attach(request)) })
    }

    async fn port_forward(&self, request: PortForwardRequest) -> Result<PortForwardResponse> {
        self.inner.network_namespace(&request.pod_sandbox_id)?;
        let ports = request.port.into_iter().map(u16::try_from).collect::<std::result::Result<_, _>>();
        let ports = ports.map_err(|_| Error::invalid("a port is between 1 and 65535"))?;
        let action = Action::Forward { sandbox: request.pod_sandbox_id, ports };
        Ok(PortForwardResponse { url: self.inner.tickets.issue(action) })
    }

    async fn container_stats(&self, request: ContainerStatsRequest) -> Result<ContainerStatsResponse> {
        let inner = self.inner.clone();
        finish(&self.inner, async move { inner.container_stats(&request.container_id).await }).await
    }

    async fn list_container_stats(
        &self,
        request: ListContainerStatsRequest,
    ) -> Result<ListContainerStatsResponse> {
        let inner = self.inner.clone();
        let filter = request.filter.unwrap_or_default();
        finish(&self.inner, async move { inner.list_container_stats(&filter).await }).await
    }

    async fn pod_sandbox_stats(&self, request: PodSandboxStatsRequest) -> Result<PodSandboxStatsResponse> {
        let inner = self.inner.clone();
        finish(&self.inner, async move { inner.sandbox_stats(&request.pod_sandbox_id).await }).await
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: ListPodSandboxStatsRequest,
    ) -> Result<ListPodSandboxStatsResponse> {
        let inner = self.inner.clone();
        let filter = request.filter.unwrap_or_default();
        finish(&self.inner, async move { inner.list_sandbox_stats(&filter).await }).await
    }

    async fn list_metric_descriptors(
        &self,
        _request: ListMetricDescriptorsRequest,
    ) -> Result<ListMetricDescriptorsResponse> {
        Ok(Inner::metric_descriptors())
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _request: ListPodSandboxMetricsRequest,
    ) -> Result<ListPodSandboxMetricsResponse> {
        let inner = self.inner.clone();
        finish(&self.inner, async move { inner.list_metrics().await }).await
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: UpdatePodSandboxResourcesRequest,
    ) -> Result<UpdatePodSandboxResourcesResponse> {
        // The pod's group belongs to the kubelet, which has set its limits; nothing of ours depends on them.
        self.inner.index.sandbox(&request.pod_sandbox_id)?;
        Ok(UpdatePodSandboxResourcesResponse {})
    }

    async fn update_runtime_config(
        &self,
        _request: UpdateRuntimeConfigRequest,
    ) -> Result<UpdateRuntimeConfigResponse> {
        // The pod CIDR is the network's business; it learns it elsewhere.
        Ok(UpdateRuntimeConfigResponse {})
    }

    async fn runtime_config(&self, _request: RuntimeConfigRequest) -> Result<RuntimeConfigResponse> {
        let linux = LinuxRuntimeConfiguration { cgroup_driver: self.inner.config.cgroup_driver.into() };
        Ok(RuntimeConfigResponse { linux: Some(linux) })
    }

    async fn get_container_events(&self, _request: GetEventsRequest) -> Result<ContainerEvents> {
        Ok(self.inner.events.subscribe(self.inner.closing.clone()))
    }
}
