//! The parts of a node, wherever it is: in the cluster's own process, or in an agent.

use crate::apiserver::BoxError;
use crate::paths::Paths;
use ferrite_client::{Backoff, Scope};
use ferrite_component::FeatureGates;
use ferrite_cri::{ImageService, RuntimeService};
use ferrite_kubelet::Kubelet;
use ferrite_network::cni::{CniConfig, CniNetwork};
use ferrite_network::{Addresses, Bridge, Cidrs, PodNetwork};
use ferrite_pki::ServerTls;
use ferrite_policy::{PolicyConfig, PolicyError, PolicyGuard, Sources};
use ferrite_proxy::layout::LocalTraffic;
use ferrite_proxy::{Proxy, ProxyConfig};
use ferrite_runtime::Runtime;
use ferrite_runtime::image::cri::Images;
use ferrite_runtime::image::{Builtin, ImageStore, RegistryConfig};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The maker of cgroups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CgroupDriver {
    #[default]
    Cgroupfs,
    Systemd,
}

impl From<CgroupDriver> for ferrite_cri::v1::CgroupDriver {
    fn from(driver: CgroupDriver) -> Self {
        match driver {
            CgroupDriver::Cgroupfs => Self::Cgroupfs,
            CgroupDriver::Systemd => Self::Systemd,
        }
    }
}

/// Options for pod networks by plugins.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CniOptions {
    /// Give pods a network by CNI plugins instead of the built-in one: directory of their configurations, such as
    /// /etc/cni/net.d. The first file by name counts.
    #[arg(long, value_name = "DIR")]
    pub cni_conf_dir: Option<PathBuf>,
    /// Directories of the CNI plugins' programs.
    #[arg(long, value_name = "DIRS", value_delimiter = ':', default_value = "/opt/cni/bin")]
    pub cni_bin_dir: Vec<PathBuf>,
}

impl CniOptions {
    /// The network of plugins, if pods are to have one. Its plugins are asked for their status until the scope ends.
    pub fn network(&self, paths: &Paths, scope: &Scope) -> Option<Arc<CniNetwork>> {
        /// Interval between checks: the specification has no event for a change.
        const STATUS_PERIOD: Duration = Duration::from_secs(10);
        let config = CniConfig {
            configurations: self.cni_conf_dir.clone()?,
            programs: self.cni_bin_dir.clone(),
            cache: paths.cni_results(),
            patience: CniConfig::PATIENCE,
        };
        let network = Arc::new(CniNetwork::new(config));
        // The kubelet may start pods before the network policies are there.
        network.require_guard();
        let asked = Arc::clone(&network);
        scope.spawn(async move {
            loop {
                if let Err(error) = asked.ask_status().await {
                    tracing::debug!(%error, "there is no network to ask for its status");
                }
                tokio::time::sleep(STATUS_PERIOD).await;
            }
        });
        Some(network)
    }
}

/// Releases network resources of pods that are gone: a process that is killed between the pod's end and the
/// network's leaves them behind. Before the first pod comes.
pub async fn collect_garbage(runtime: &Runtime, plugins: Option<&CniNetwork>, bridge: Option<&Bridge>) {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        tracing::warn!(error = crate::chain(error), "pods that are gone may still have addresses");
    };
    let request = ferrite_cri::v1::ListPodSandboxRequest { filter: None };
    let live: Vec<String> = match runtime.list_pod_sandbox(request).await {
        Ok(listed) => listed.items.into_iter().map(|sandbox| sandbox.id).collect(),
        Err(error) => return failed(&error),
    };
    // A failure of one does not keep the other from its turn.
    if let Some(plugins) = plugins
        && let Err(error) = plugins.collect_garbage(&live).await
    {
        failed(&error);
    }
    if let Some(bridge) = bridge
        && let Err(error) = bridge.reconcile(&live).await
    {
        failed(&error);
    }
}

/// The parts of a node that also exist without one running: `down` removes them.
pub struct NodeParts;

impl NodeParts {
    pub fn runtime_config(
        paths: &Paths,
        network: Arc<dyn PodNetwork>,
        images: Arc<Images>,
        driver: CgroupDriver,
    ) -> ferrite_runtime::Config {
        ferrite_runtime::Config {
            root: paths.runtime(),
            run: paths.run.join("runtime"),
            cgroup_parent: paths.cgroup(),
            cgroup_driver: driver.into(),
            supervisor: PathBuf::from("/proc/self/exe"),
            network,
            images,
            handlers: ferrite_runtime::installed_handlers(),
            extras: ferrite_runtime::Extras::default(),
            streaming_address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        }
    }

    pub fn images(paths: &Paths, insecure: &[String]) -> Result<Arc<Images>, BoxError> {
        let store = ImageStore::open(paths.images())?;
        let mut registry = RegistryConfig { plain_http: insecure.to_vec(), ..RegistryConfig::default() };
        registry.load(&paths.registries(), Path::new("/etc/containerd/certs.d"))?;
        Ok(Arc::new(Images::new(store, registry)))
    }
}

/// Our own runtime and its images.
pub struct Embedded {
    pub images: Arc<Images>,
    pub runtime: Arc<Runtime>,
}

/// Opens our own runtime and serves it on a socket too.
pub async fn start_runtime(
    paths: &Paths,
    images: OpeningImages,
    driver: CgroupDriver,
    network: Arc<dyn PodNetwork>,
    scope: &Scope,
) -> Result<Embedded, BoxError> {
    let images = images.opened().await?;
    let config = NodeParts::runtime_config(paths, network, Arc::clone(&images), driver);
    let runtime = Runtime::open(config).await?;
    let cri = ferrite_cri::grpc::Server::bind(&paths.cri_socket(), runtime.clone(), runtime.clone())?;
    scope.spawn_graceful(cri.serve(scope.token().clone()));
    Ok(Embedded { images, runtime })
}

/// The images of the node, opened while its other parts start: the first time, the built-in image is made of the running
/// binary, which takes longer than any other step.
pub struct OpeningImages(tokio::task::JoinHandle<Result<Arc<Images>, BoxError>>);

impl OpeningImages {
    pub fn begin(paths: &Paths, insecure_registries: &[String]) -> Self {
        let (paths, insecure) = (paths.clone(), insecure_registries.to_vec());
        Self(tokio::task::spawn_blocking(move || {
            let images = NodeParts::images(&paths, &insecure)?;
            images.store().add_builtin(&Builtin::tools()?)?;
            Ok(images)
        }))
    }

    async fn opened(self) -> Result<Arc<Images>, BoxError> {
        self.0.await?
    }
}

/// The facts about a node and its cluster for the node's parts.
pub struct NodePlace<'a> {
    pub name: &'a str,
    pub ips: Addresses,
    /// Addresses of all pods.
    pub pods: Cidrs,
    /// The API server's Service.
    pub api_service: IpAddr,
    /// The name server of pods.
    pub dns: Option<IpAddr>,
    pub domain: &'a str,
    pub resolv_conf: &'a Path,
}

/// Starts the service proxy of the node.
pub async fn start_proxy(
    paths: &Paths,
    node: &NodePlace<'_>,
    bridge: &Bridge,
    client: kube::Client,
    scope: &Scope,
) -> Result<Proxy, BoxError> {
    /// Upstream's port for load balancers that ask about the node.
    const HEALTHZ_PORT: u16 = 10256;
    /// Changes that come together go into one transaction; alone they do not wait for long.
    const MIN_SYNC_PERIOD: Duration = Duration::from_millis(20);
    bridge.route_services().await?;
    let config = ProxyConfig {
        node_ips: node.ips.iter().copied().collect(),
        table: paths.proxy_table(),
        families: node.pods.families(),
        local_traffic: LocalTraffic::Cidrs(node.pods.iter().map(|range| (*range).into()).collect()),
        // Node ports answer where the node does, and nowhere else.
        node_port_addresses: node.ips.iter().map(|ip| ferrite_proxy::model::Cidr::single(*ip)).collect(),
        // Packets between pods of one node pass its routing, and are tracked there.
        pod_bridge: None,
        min_sync_period: MIN_SYNC_PERIOD,
        healthz_bind_address: Some(SocketAddr::new(*node.ips.primary(), HEALTHZ_PORT)),
        ..ProxyConfig::new(node.name)
    };
    Ok(Proxy::start(config, client, scope).await?)
}

/// Starts filtering by NetworkPolicies. Pods that are attached from then on are covered before they have a link.
///
/// Returns true if it has started. Else it is tried again, and until then the network takes no pods and the node is not
/// Ready: pods that ran without their policies would be open to everybody.
pub async fn start_policies(
    node: &str,
    bridge: &Arc<Bridge>,
    plugins: Option<&Arc<CniNetwork>>,
    sources: Sources,
    scope: &Scope,
) -> bool {
    let failed = |error: &PolicyError| {
        tracing::error!(
            error = crate::chain(error),
            "NetworkPolicies are not enforced, so the node takes no pods; trying again"
        );
    };
    match set_guard(node, bridge, plugins.map(AsRef::as_ref), sources.clone(), scope).await {
        Ok(()) => return true,
        Err(error) => failed(&error),
    }
    let (node, bridge, plugins, inner) =
        (node.to_owned(), Arc::clone(bridge), plugins.cloned(), scope.clone());
    scope.spawn(async move {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60), 0.2);
        loop {
            tokio::time::sleep(backoff.next_delay()).await;
            match set_guard(&node, &bridge, plugins.as_deref(), sources.clone(), &inner).await {
                Ok(()) => return tracing::info!("NetworkPolicies are enforced"),
                Err(error) => failed(&error),
            }
        }
    });
    false
}

async fn set_guard(
    node: &str,
    bridge: &Bridge,
    plugins: Option<&CniNetwork>,
    sources: Sources,
    scope: &Scope,
) -> Result<(), PolicyError> {
    let config = PolicyConfig {
        table: ferrite_network::policy_table(bridge.name()),
        families: bridge.pod_cidrs().families(),
        pods: bridge.pod_cidrs().iter().map(|range| (*range).into()).collect(),
        node: Some(node.to_owned()),
        netns: None,
    };
    let guard = PolicyGuard::start(config, sources, scope).await?;
    if let Some(plugins) = plugins {
        plugins.set_guard(guard.clone());
    }
    bridge.set_guard(guard);
    Ok(())
}

/// The services with which the kubelet runs pods.
pub struct Services {
    pub runtime: Arc<dyn RuntimeService>,
    pub images: Arc<dyn ImageService>,
}

/// Settings of the node's kubelet.
pub struct KubeletOptions {
    /// Where its own port is.
    pub address: SocketAddr,
    /// The settings of that port, now and as they change.
    pub tls: tokio::sync::watch::Receiver<Option<ServerTls>>,
    pub cgroup_driver: CgroupDriver,
    /// The configuration of credential provider plugins, and their programs.
    pub credential_providers: Option<(PathBuf, PathBuf)>,
    pub feature_gates: FeatureGates,
}

pub async fn start_kubelet(
    paths: &Paths,
    node: &NodePlace<'_>,
    options: KubeletOptions,
    services: Services,
    client: kube::Client,
    scope: &Scope,
) -> Result<Kubelet, BoxError> {
    let config = ferrite_kubelet::Config {
        root_dir: paths.kubelet(),
        // Kept without the provisioner, too: volumes that exist go on working and can be removed.
        local_volumes: Some(paths.volumes()),
        log_dir: paths.pod_logs(),
        cgroup_root: paths.cgroup(),
        cgroup_driver: options.cgroup_driver.into(),
        server_address: options.address,
        tls: Some(options.tls),
        api_server: Some((node.api_service, 443)),
        cluster_dns: node.dns.into_iter().collect(),
        cluster_domain: node.domain.to_owned(),
        resolv_conf: node.resolv_conf.to_owned(),
        image_credential_providers: options.credential_providers,
        feature_gates: options.feature_gates,
        node_ips: node.ips.iter().copied().collect(),
        ..ferrite_kubelet::Config::new(node.name, *node.ips.primary())
    };
    Ok(Kubelet::start(config, services.runtime, services.images, client, scope).await?)
}
