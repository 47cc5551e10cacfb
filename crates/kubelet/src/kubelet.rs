//! Puts the parts together.

use crate::cgroup::{Cgroups, enforcement};
use crate::claims::{Claims, DraPlugins};
use crate::clock::Clock;
use crate::config::Config;
use crate::container::dns::{self, ClusterDns};
use crate::container::env::ApiAddress;
use crate::container::resources::{NodeRules, NodeSwap};
use crate::container::{apparmor, huge_pages, sysctl};
use crate::devices::{DevicePlugins, Devices};
use crate::eviction::{self, EvictionManager, Pressures, ThresholdError};
use crate::images::{
    ApiAccounts, ConfigError, ImageGc, ImageGcPolicy, Images, Plugins, Providers, PulledImages, SeenImages,
};
use crate::logs;
use crate::logs::LogLinks;
use crate::node::{self, Allocatable, Machine, NodeManager, Readiness};
use crate::objects::Objects;
use crate::oom::OomWatcher;
use crate::plugin_sockets::{self, PluginHandler};
use crate::pod::admission::Abilities;
use crate::pod::backoff::BackOff;
use crate::pod::context::Context;
use crate::pod::manager::{self, Workers};
use crate::pod::pending_resizes::PendingResizes;
use crate::pod::table::PodTable;
use crate::pod_resources;
use crate::probe::{Checker, ProbeContext};
use crate::server;
use crate::shutdown::{LogindSource, ShutdownManager};
use crate::sources::{DirectorySource, LocalPods, Source, UrlError, UrlSource};
use crate::topology::{CpuTopology, NodeReserve, ResourceManager, ResourceStartError, read_memory_nodes};
use crate::userns::UserNamespaces;
use crate::volumes::csi::CsiPlugins;
use crate::volumes::{Volumes, VolumesConfig, local_path};
use crate::watchdog::{self, WatchdogError};
use ferrite_cgroup::{CgroupError, Layout};
use ferrite_client::{Api, EventType, Events, Informer, ListSelector, Scope};
use ferrite_cri::v1::{
    CgroupDriver, NetworkConfig, RuntimeConfig as CriRuntimeConfig, RuntimeConfigRequest,
    UpdateRuntimeConfigRequest, VersionRequest,
};
use ferrite_cri::{ImageService, RuntimeService};
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use kube::Client;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{Notify, watch};

/// Why a kubelet could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("could not prepare {path}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("the container runtime does not answer")]
    Runtime(#[source] ferrite_cri::Error),
    #[error("could not listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    /// A pod's range of users could be given away twice.
    #[error("could not read the user namespaces of pods: {0}; remove the file once no pod of that UID runs")]
    UserNamespaces(String),
    #[error("the watchdog of systemd")]
    Watchdog(#[from] WatchdogError),
    #[error("eviction")]
    Eviction(#[source] ThresholdError),
    #[error("the managers of processors and devices cannot start")]
    Resources(#[source] ResourceStartError),
    #[error("no control groups")]
    Cgroups(#[source] CgroupError),
    #[error("node allocatable")]
    Enforcement(#[source] enforcement::EnforcementError),
    #[error("cannot read static pods")]
    StaticPodUrl(#[source] UrlError),
    #[error("could not register credential provider plugins")]
    CredentialProviders(#[source] ConfigError),
}

/// A running kubelet. Its tasks belong to the scope it was started in and end with it; containers go on.
pub struct Kubelet {
    context: Arc<Context>,
    workers: Arc<Workers>,
    server_address: Option<SocketAddr>,
}

impl Kubelet {
    /// Starts the node agent: registers the node, adopts the runtime's pods, cleans up after pods that are
    /// gone, and begins to run the pods bound to this node.
    ///
    /// Returns once the kubelet API listens (when it is configured); the rest goes on in `scope`, as soon as
    /// the API server answers.
    pub fn start<'a>(
        config: Config,
        runtime: Arc<dyn RuntimeService>,
        images: Arc<dyn ImageService>,
        client: Client,
        scope: &'a Scope,
    ) -> BoxFuture<'a, Result<Kubelet, StartError>> {
        Box::pin(Self::start_parts(config, runtime, images, client, scope))
    }

    async fn start_parts(
        config: Config,
        runtime: Arc<dyn RuntimeService>,
        images: Arc<dyn ImageService>,
        client: Client,
        scope: &Scope,
    ) -> Result<Kubelet, StartError> {
        let scope = scope.child();
        for path in [&config.root_dir, &config.log_dir] {
            // Tokens and Secrets are below; users of the node must not reach them.
            ferrite_hostfs::private_dir(path)
                .map_err(|source| StartError::Directory { path: path.clone(), source })?;
        }
        let clock = Clock::System;
        let plugins = config
            .image_credential_providers
            .as_ref()
            .map(|(config, programs)| Plugins::load(config, programs))
            .transpose()
            .map_err(StartError::CredentialProviders)?;
        let version = runtime.version(VersionRequest::default()).await.map_err(StartError::Runtime)?;
        let driver = cgroup_driver(&*runtime, config.cgroup_driver).await;
        let machine = Machine::read(&config.root_dir);
        let limits = Allocatable::of(&machine, &config).limits();
        let recorder = Events::start_limited(client.clone(), config.event_limit, &scope)
            .recorder("kubelet", Some(&config.node_name));
        let workers: Arc<Workers> = Arc::default();
        let refresh: Arc<Notify> = Arc::default();
        let told = workers.clone();
        let objects =
            Arc::new(Objects::new(client.clone(), &scope, Arc::new(move |uid| told.objects_changed(uid))));
        let thresholds = eviction::thresholds(&config.eviction).map_err(StartError::Eviction)?;
        let (pressures, pressures_seen) = watch::channel(Pressures::default());
        let (shutting_down, shutdown_seen) = watch::channel(false);
        let (readiness, readiness_seen) = watch::channel(Readiness::default());
        let selector = ListSelector::fields(format!("spec.nodeName={}", config.node_name));
        let config = Arc::new(config);
        let node_selector = ListSelector::fields(format!("metadata.name={}", config.node_name));
        let node = Informer::<Node>::start(Api::all(client.clone()), node_selector, &scope);
        let places = VolumesConfig {
            root: config.root_dir.clone(),
            local_volumes: config.local_volumes.clone(),
            limits,
            node_name: config.node_name.clone(),
            recorder: recorder.clone(),
            stats_period: config.volume_stats_period,
            feature_gates: config.feature_gates.clone(),
        };
        let volumes = Volumes::new(places, client.clone(), objects.clone(), node.clone(), &scope);
        let accounts = Arc::new(ApiAccounts::new(client.clone(), volumes.tokens()));
        let providers = plugins.map(|plugins| Arc::new(Providers::new(plugins, accounts, clock)));
        let userns = UserNamespaces::open(config.root_dir.join("pods"), config.ids_per_pod)
            .map_err(|e| StartError::UserNamespaces(e.to_string()))?;
        let plugins_dir = config.root_dir.join("device-plugins");
        let waking = workers.clone();
        let devices =
            Devices::open(&plugins_dir, clock, refresh.clone(), move |uid| waking.wake(uid), &scope)
                .map_err(|source| StartError::Directory { path: plugins_dir.clone(), source })?;
        let waking = workers.clone();
        let claims = Claims::open(
            &config.root_dir,
            client.clone(),
            &config.node_name,
            move |uid| waking.wake(uid),
            &scope,
        )
        .map_err(|source| StartError::Directory { path: config.root_dir.clone(), source })?;
        let topology =
            CpuTopology::read(Path::new("/sys/devices/system"), u32::try_from(machine.cpus).unwrap_or(1));
        let resources = ResourceManager::start(
            config.resources.clone(),
            topology,
            &NodeReserve {
                cpu_milli: config.reserved_cpu_milli,
                memory_reserved: config.reserved_memory.saturating_add(config.eviction_memory),
                memory: read_memory_nodes(Path::new("/sys/devices/system"), machine.memory),
            },
            &config.root_dir,
            devices.clone(),
        );
        let resources = Arc::new(resources.map_err(StartError::Resources)?);
        let cgroups = Cgroups::new(Layout::detect().map_err(StartError::Cgroups)?, &config.cgroup_root)
            .with_driver(driver)
            .with_pids_limit(config.pod_pids_limit)
            .with_quota(config.cpu_quota);
        let swap = cgroups.layout().limits_swap().then_some(NodeSwap {
            behavior: config.swap_behavior,
            memory: machine.memory,
            swap: machine.swap,
        });
        enforcement::enforce_reserved(&cgroups, &config.enforcement).map_err(StartError::Enforcement)?;
        let policy = config.image_verification.clone();
        let pulled = PulledImages::open(&config.root_dir, policy, clock).map_err(|source| {
            StartError::Directory { path: config.root_dir.join("image_manager"), source }
        })?;
        pulled.recover(&*images).await;
        let context = Arc::new(Context {
            node_name: config.node_name.clone(),
            node_hostname: machine.hostname.clone(),
            host_ips: config.node_ips.iter().map(ToString::to_string).collect(),
            log_dir: config.log_dir.clone(),
            log_links: LogLinks::beside(&config.log_dir),
            seccomp_root: config.root_dir.join("seccomp"),
            cluster_dns: ClusterDns {
                addresses: config.cluster_dns.clone(),
                domain: config.cluster_domain.clone(),
            },
            resolv_conf: config.resolv_conf.clone(),
            api_address: config.api_server.map(|(ip, port)| ApiAddress { host: ip.to_string(), port }),
            limits,
            max_pods: config.max_pods,
            rules: NodeRules {
                memory: machine.memory,
                quota: config.cpu_quota,
                swap,
                huge_pages: huge_pages::sizes(),
            },
            sync_frequency: config.sync_frequency,
            seccomp_default: config.seccomp_default,
            oom_group: cgroups.layout().is_v2() && !config.single_process_oom_kill,
            restart_backoff: BackOff::of_restarts(config.max_restart_backoff),
            own_labels: node::labels(&config, &machine),
            runtime_name: version.runtime_name,
            runtime: runtime.clone(),
            images: Images::new(images.clone(), recorder.clone(), clock, refresh.clone(), pulled.clone())
                .with_providers(providers)
                .with_limits(config.pull_limits),
            volumes,
            userns,
            devices: devices.clone(),
            claims: claims.clone(),
            resources: resources.clone(),
            abilities: Abilities {
                apparmor: apparmor::is_enabled(),
                kernel: sysctl::kernel_version(&machine.kernel_version),
                unsafe_sysctls: config.unsafe_sysctls.clone(),
            },
            objects,
            cgroups,
            services: Informer::<Service>::start(
                Api::all(client.clone()),
                ListSelector::everything(),
                &scope,
            ),
            workers: workers.clone(),
            resizes: PendingResizes::default(),
            pods: PodTable::new(
                Informer::<Pod>::start(Api::all(client.clone()), selector, &scope),
                start_sources(&config, clock, &scope)?,
            ),
            node,
            readiness: readiness_seen,
            shutting_down: shutdown_seen.clone(),
            pressures: pressures_seen.clone(),
            client: client.clone(),
            recorder: recorder.clone(),
            probes: ProbeContext {
                checker: Checker::new(runtime.clone()),
                recorder: recorder.clone(),
                clock,
                counts: Default::default(),
            },
            clock,
        });
        let server_address = match &config.tls {
            Some(tls) => {
                let served = server::start(context.clone(), config.clone(), tls.clone(), &scope);
                let address = config.server_address;
                Some(served.await.map_err(|source| StartError::Listen { address, source })?)
            }
            None => None,
        };
        if let Some(address) = config.healthz_address {
            server::start_health(context.clone(), address, &scope)
                .await
                .map_err(|source| StartError::Listen { address, source })?;
        }
        if let Some(address) = config.read_only_address {
            server::start_read_only(context.clone(), address, &scope)
                .await
                .map_err(|source| StartError::Listen { address, source })?;
        }
        let port = server_address.map_or(config.server_address.port(), |a| a.port());
        let gc = Arc::new(ImageGc {
            images: images.clone(),
            runtime: runtime.clone(),
            recorder: recorder.clone(),
            node: node::reference(&config.node_name),
            clock,
            policy: ImageGcPolicy {
                high: config.image_gc_high_threshold,
                low: config.image_gc_low_threshold,
                min_age: config.image_minimum_gc_age,
                max_age: config.image_maximum_gc_age,
            },
            began: clock.now(),
            changed: refresh.clone(),
            seen: SeenImages::default(),
            pulled,
        });
        scope.spawn(gc.clone().run());
        let eviction = EvictionManager {
            context: context.clone(),
            images: images.clone(),
            gc,
            node: node::reference(&config.node_name),
            thresholds,
            settings: config.eviction.clone(),
            pods_memory: machine.memory.saturating_sub(config.reserved_memory),
            disk_limits: config.local_storage_isolation,
            pressures,
            changed: refresh.clone(),
        };
        scope.spawn(eviction.run());
        if let Some((interval, socket)) = watchdog::settings()? {
            scope.spawn(watchdog::run(context.clone(), interval, socket));
        }
        scope.spawn(enforcement::run(context.clone(), config.clone(), machine.clone()));
        if config.standalone && !config.pod_cidr.is_empty() {
            let network_config = Some(NetworkConfig { pod_cidr: config.pod_cidr.clone() });
            let request =
                UpdateRuntimeConfigRequest { runtime_config: Some(CriRuntimeConfig { network_config }) };
            runtime.update_runtime_config(request).await.map_err(StartError::Runtime)?;
        }
        let node_dns = dns::read_resolv_conf(&context.resolv_conf);
        if let Some(problem) = dns::limits_exceeded(&context.resolv_conf, &context.cluster_dns, &node_dns) {
            let about = node::reference(&config.node_name);
            recorder.event(&about, EventType::Warning, "CheckLimitsForResolvConf", problem);
        }
        let node = NodeManager {
            config: config.clone(),
            machine,
            port,
            client,
            runtime,
            images,
            recorder,
            clock,
            readiness,
            pressures: pressures_seen,
            shutting_down: shutdown_seen,
            refresh: refresh.clone(),
            devices: devices.clone(),
        };
        if !config.shutdown_periods.is_empty() {
            let manager = ShutdownManager {
                context: context.clone(),
                periods: config.shutdown_periods.clone(),
                node: node::reference(&config.node_name),
                state: config.root_dir.join("graceful_node_shutdown_state"),
                shutting_down,
                refresh,
            };
            scope.spawn(manager.run(LogindSource::default()));
        }
        scope.spawn(logs::rotate(context.runtime.clone(), config.logs));
        match OomWatcher::open(
            Path::new("/dev/kmsg"),
            context.recorder.clone(),
            node::reference(&config.node_name),
        ) {
            Ok(watcher) => scope.spawn(watcher.run()),
            Err(error) => tracing::warn!(%error, "no SystemOOM events: the kernel's log cannot be read"),
        }
        if let Some(root) = config.local_volumes.clone() {
            scope.spawn(local_path::run(context.clone(), root));
        }
        scope.spawn(resources.follow(context.runtime.clone()));
        let csi = context.volumes.csi().clone();
        scope.spawn(csi.clone().report());
        scope.spawn(csi.clone().follow_limits());
        let resources_dir = config.root_dir.join("pod-resources");
        pod_resources::serve(&resources_dir, context.clone(), &scope)
            .map_err(|source| StartError::Directory { path: resources_dir, source })?;
        devices.serve().map_err(|source| StartError::Directory { path: plugins_dir, source })?;
        let handlers: Arc<[Arc<dyn PluginHandler>]> = Arc::new([
            Arc::new(CsiPlugins(csi)) as _,
            Arc::new(DevicePlugins(devices)) as _,
            Arc::new(DraPlugins(claims.clone())) as _,
        ]);
        let registry = config.root_dir.join("plugins_registry");
        scope.spawn(plugin_sockets::run(registry, handlers, scope.clone()));
        if !config.standalone {
            scope.spawn(async move { claims.remove_slices(None).await });
        }
        let (started, owned, all) = (context.clone(), scope.clone(), workers.clone());
        // Static pods run while the API server is away: it may be one of them.
        node.look().await;
        manager::start_local(&started, &all, &owned);
        let standalone = config.standalone;
        scope.spawn(async move {
            match standalone {
                true => owned.spawn(node.watch_runtime()),
                false => node.start(&started.node, &owned).await,
            }
            follow_pods(started, all, owned).await;
        });
        Ok(Kubelet { context, workers, server_address })
    }

    /// Where the kubelet API listens, when it is served.
    pub fn server_address(&self) -> Option<SocketAddr> {
        self.server_address
    }

    /// Number of pods that have a worker.
    pub fn pod_count(&self) -> usize {
        *self.workers.count().borrow()
    }

    /// The name of the Node object.
    pub fn node_name(&self) -> &str {
        &self.context.node_name
    }
}

/// Begins to read the manifests of static pods.
fn start_sources(config: &Config, clock: Clock, scope: &Scope) -> Result<Arc<LocalPods>, StartError> {
    let directory = config.static_pod_path.as_ref().map(|path| {
        DirectorySource::new(path.clone(), &config.node_name, config.file_check_frequency, clock)
    });
    let period = config.http_check_frequency;
    let url = config.static_pod_url.as_ref();
    let url = url.map(|(url, headers)| UrlSource::new(url, headers, &config.node_name, period, clock));
    let url = url.transpose().map_err(StartError::StaticPodUrl)?;
    let sources = [directory.as_ref().map(|_| Source::File), url.as_ref().map(|_| Source::Url)];
    let pods = Arc::new(LocalPods::new(sources.into_iter().flatten()));
    if let Some(directory) = directory {
        scope.spawn(directory.run(pods.clone()));
    }
    if let Some(url) = url {
        scope.spawn(url.run(pods.clone()));
    }
    Ok(pods)
}

/// The cgroup driver that the runtime reports, as upstream; else the configured one.
async fn cgroup_driver(runtime: &dyn RuntimeService, configured: CgroupDriver) -> CgroupDriver {
    match runtime.runtime_config(RuntimeConfigRequest {}).await {
        Ok(answer) => answer.linux.map_or(configured, |linux| linux.cgroup_driver()),
        Err(error) => {
            tracing::debug!(%error, driver = ?configured, "the runtime does not tell its cgroup driver");
            configured
        }
    }
}

/// Starts the workers; a runtime that does not answer yet is asked again.
async fn follow_pods(context: Arc<Context>, workers: Arc<Workers>, scope: Scope) {
    let second = std::time::Duration::from_secs(1);
    let mut backoff = ferrite_client::Backoff::new(second / 5, second * 10, 0.1);
    loop {
        match manager::start(context.clone(), workers.clone(), &scope).await {
            Ok(()) => return,
            Err(e) => {
                tracing::warn!(error = %e, "could not read what the runtime has; will try again");
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }
}

#[cfg(test)]
#[path = "kubelet_tests.rs"]
mod tests;
