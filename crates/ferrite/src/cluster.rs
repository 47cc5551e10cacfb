//! A whole cluster in one process: store, API server, controllers, scheduler, and a node.
//!
//! Parts start in the order in which they need each other and stop in reverse. Containers belong to their
//! supervisors and outlive all of it.

use crate::apiserver::{BoxError, Cidr, Place, Running, ServerOptions};
use crate::control::Control;
use crate::dns::{ClusterDns, DnsOptions};
use crate::paths::Paths;
use crate::progress::Progress;
use ferrite_client::{Events, Informers, Scope};
use ferrite_cri::{ImageService, RuntimeService};
use ferrite_kubelet::Kubelet;
use ferrite_network::{Bridge, BridgeConfig};
use ferrite_pki::{Purpose, Subject};
use ferrite_proxy::layout::LocalTraffic;
use ferrite_proxy::model::IpFamily;
use ferrite_proxy::{Proxy, ProxyConfig};
use ferrite_runtime::Runtime;
use ferrite_runtime::image::cri::Images;
use ferrite_runtime::image::{Builtin, ImageStore, RegistryConfig};
use ferrite_scheduler::{Configuration, Registry, SchedulerContext};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Who makes control groups.
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

/// A part that a cluster has unless the user does without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The default StorageClass `local-path` and its provisioner.
    LocalStorage,
}

/// Options of a cluster on this machine.
#[derive(Debug, Clone, clap::Args)]
pub struct ClusterOptions {
    #[command(flatten)]
    pub server: ServerOptions,
    /// Name of the node; the host name by default.
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Addresses of all pods; the node takes the first /24.
    #[arg(long, default_value = "10.244.0.0/16", value_name = "CIDR", value_parser = crate::apiserver::parse_cidr)]
    pub pod_cidr: Cidr,
    #[command(flatten)]
    pub dns: DnsOptions,
    /// Port of the kubelet.
    #[arg(long, default_value_t = 10250, value_name = "PORT")]
    pub kubelet_port: u16,
    /// Registries (host or host:port) to talk to without TLS; loopback addresses always are.
    #[arg(long, value_name = "REGISTRY")]
    pub insecure_registry: Vec<String>,
    /// Socket of another container runtime (containerd, CRI-O), e.g. unix:///run/containerd/containerd.sock; pods
    /// then run there and have the network that runtime is configured for. It is remembered for the next start.
    #[arg(long, value_name = "ENDPOINT")]
    pub container_runtime_endpoint: Option<String>,
    /// Who makes control groups: the kubelet and the runtime themselves, or systemd when they ask it to. Another
    /// runtime's own choice counts, if it tells.
    #[arg(long, value_enum, default_value_t, value_name = "DRIVER")]
    pub cgroup_driver: CgroupDriver,
    /// Parts to do without.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS")]
    pub disable: Vec<Part>,
    /// CredentialProviderConfig that names the kubelet's credential provider plugins: a JSON or YAML file, or a
    /// directory of them.
    #[arg(long, value_name = "PATH", requires = "image_credential_provider_bin_dir")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// Directory of the credential provider plugins' programs.
    #[arg(long, value_name = "DIR", requires = "image_credential_provider_config")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
}

/// The parts of a node that also exist without one running: what `down` removes.
pub struct NodeParts;

impl NodeParts {
    pub fn runtime_config(
        paths: &Paths,
        network: Arc<dyn ferrite_network::PodNetwork>,
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

/// A running cluster.
pub struct Cluster {
    pub api: Running,
    pub node_name: String,
    /// None when another runtime runs the pods.
    embedded: Option<Embedded>,
    /// None when pods resolve names as the node does.
    dns: Option<ClusterDns>,
    scope: Scope,
    /// None when the kernel cannot do it.
    proxy: Option<Proxy>,
    _kubelet: Kubelet,
}

/// Our own runtime and its images.
pub struct Embedded {
    pub images: Arc<Images>,
    pub runtime: Arc<Runtime>,
}

/// What the kubelet runs pods with.
struct Services {
    runtime: Arc<dyn RuntimeService>,
    images: Arc<dyn ImageService>,
}

impl Cluster {
    pub async fn start(
        paths: &Paths,
        options: &ClusterOptions,
        progress: &Progress,
    ) -> Result<Self, BoxError> {
        let node_name = match &options.node_name {
            Some(name) => name.clone(),
            None => nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
        };
        let services = options.server.service_cluster_ip_range.v4();
        let bridge = start_network(paths, &options.pod_cidr, services.as_deref()).await?;
        // Nobody outside this machine has a reason to reach it unless the user says so: the bridge's address will do.
        let gateway = IpAddr::V4(bridge.gateway());
        let node_ip = match options.server.bind_address {
            None => gateway,
            Some(_) => ferrite_network::node_address().await?.unwrap_or(gateway),
        };
        progress.done("network", &format!("{}, node address {node_ip}", paths.bridge()));

        let place = Place {
            address: node_ip,
            listen: vec![Ipv4Addr::LOCALHOST.into(), gateway],
            whole: true,
            domain: options.dns.cluster_domain.clone(),
        };
        let api = Running::start(paths, &with_node_restriction(&options.server), &place).await?;
        api.write_admin_kubeconfig(paths)?;
        progress.done("API server", &api.url);

        let scope = Scope::new();
        let controllers = api.start_controllers(&["*".to_owned()], &scope)?;
        start_scheduler(&api, controllers.informers.clone(), &scope)?;
        progress.done("control plane", "controllers, scheduler");
        if !options.disable.contains(&Part::LocalStorage) {
            crate::local_storage::start(&api, &controllers).await?;
            progress.done("storage", &format!("class {}", ferrite_client::local_path::CLASS));
        }

        let dns = ClusterDns::start(options, &bridge, node_ip, &api, &scope).await?;
        if let Some(dns) = &dns {
            progress.done("DNS", &format!("{} at {}", options.dns.cluster_domain, dns.address));
        }

        let (embedded, services) = match &options.container_runtime_endpoint {
            None => {
                let embedded =
                    start_runtime(paths, &options.insecure_registry, options.cgroup_driver, &bridge, &scope)
                        .await?;
                let services =
                    Services { runtime: embedded.runtime.clone(), images: embedded.runtime.clone() };
                progress.done("runtime", &paths.runtime().display().to_string());
                (Some(embedded), services)
            }
            Some(endpoint) => {
                let client = Arc::new(ferrite_cri::grpc::Client::new(endpoint)?);
                progress.done("runtime", endpoint);
                (None, Services { runtime: client.clone(), images: client })
            }
        };

        let proxy = match start_proxy(paths, options, &api, &bridge, &node_name, node_ip, &scope).await {
            Ok(proxy) => {
                progress.done("proxy", &paths.proxy_table());
                Some(proxy)
            }
            // Pods and the API work; only Services lead nowhere, as on a kernel built without nftables.
            Err(error) => {
                tracing::warn!(%error, "Services cannot be reached by their addresses");
                None
            }
        };

        let node = NodePlace { name: &node_name, ip: node_ip, dns: dns.as_ref().map(|dns| dns.address) };
        let kubelet = start_kubelet(paths, options, &api, services, &node, &scope).await?;
        progress.done("kubelet", &format!("node {node_name}"));
        Ok(Self { api, node_name, embedded, dns, scope, proxy, _kubelet: kubelet })
    }

    /// Waits until the node says that it is ready and a pod could be created.
    pub async fn ready(&self) -> Result<(), BoxError> {
        use k8s_openapi::api::core::v1::{Node, ServiceAccount};
        let client = self.api.client("system:kube-controller-manager", &[]);
        let nodes = ferrite_client::Api::<Node>::all(client.clone());
        self.until(nodes, &self.node_name, |node| {
            let conditions = node.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
            conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
        })
        .await?;
        // Pods run as a service account; its controller makes one in every namespace.
        let accounts = ferrite_client::Api::<ServiceAccount>::namespaced(client, "default");
        self.until(accounts, "default", |_| true).await?;
        if let Some(dns) = &self.dns {
            dns.synced().await;
        }
        // A pod may ask the API server by its Service as the first thing it does.
        if let Some(proxy) = &self.proxy
            && !proxy.first_sync().await
        {
            tracing::warn!("Services cannot be reached by their addresses yet");
        }
        Ok(())
    }

    /// Waits until the object of that name is as `accept` wants it.
    async fn until<K>(
        &self,
        api: ferrite_client::Api<K>,
        name: &str,
        accept: impl Fn(&K) -> bool + Send + Sync + 'static,
    ) -> Result<(), BoxError>
    where
        K: ferrite_client::Object,
    {
        use ferrite_client::{Change, Informer, ListSelector};
        let scope = self.scope.child();
        let selector = ListSelector::fields(format!("metadata.name={name}"));
        let informer = Informer::<K>::start(api, selector, &scope);
        let (found, mut seen) = tokio::sync::mpsc::channel(1);
        informer.subscribe(move |change| {
            let (Change::Added(object) | Change::Updated { new: object, .. }) = change else { return };
            if accept(object) {
                // One message is enough; later ones find the channel full or closed.
                let _ = found.try_send(());
            }
        });
        let told = seen.recv().await;
        scope.shutdown().await;
        told.ok_or_else(|| format!("{name} never came to be").into())
    }

    /// Opens the door for other `ferrite` commands. They are about our own images: another runtime has its own tools.
    pub fn listen(&self, paths: &Paths) -> Result<(), BoxError> {
        let Some(embedded) = &self.embedded else { return Ok(()) };
        let control =
            Control { images: Arc::clone(&embedded.images), runtime: Arc::clone(&embedded.runtime) };
        let serving = control.listen(paths)?;
        let stopping = self.scope.token().clone();
        self.scope.spawn(async move {
            tokio::select! {
                () = serving => {}
                () = stopping.cancelled() => {}
            }
        });
        Ok(())
    }

    /// Stops everything but the containers.
    pub async fn stop(self) {
        self.scope.shutdown().await;
        if let Some(embedded) = self.embedded {
            embedded.runtime.close().await;
        }
        self.api.stop().await;
    }
}

/// The network of the node's pods, which get their addresses from the first /24 of `pods`.
pub async fn start_network(
    paths: &Paths,
    pods: &Cidr,
    services: Option<&str>,
) -> Result<Arc<Bridge>, BoxError> {
    let prefix = pods.prefix.max(24);
    let config = BridgeConfig {
        name: paths.bridge(),
        pod_cidr: format!("{}/{prefix}", pods.network).parse()?,
        cluster_cidr: pods.to_string().parse()?,
        service_cidr: services.map(str::parse).transpose()?,
        state: paths.network(),
        mtu: 1500,
    };
    Ok(Bridge::open(config).await?)
}

/// A kubelet may change its own node and pods only. Upstream leaves that to whoever sets a cluster up.
fn with_node_restriction(server: &ServerOptions) -> ServerOptions {
    const PLUGIN: &str = "NodeRestriction";
    let mut server = server.clone();
    if !server.disable_admission_plugins.iter().any(|name| name == PLUGIN) {
        server.enable_admission_plugins.push(PLUGIN.into());
    }
    server
}

/// Starts the scheduler beside an API server. It reads through `informers`, so that the process has one copy of each
/// kind, and writes as itself.
pub fn start_scheduler(api: &Running, informers: Informers, scope: &Scope) -> Result<(), BoxError> {
    let client = api.client("system:kube-scheduler", &[]);
    ferrite_scheduler::start(&SchedulerContext {
        informers,
        events: Events::start(client.clone(), scope),
        client,
        scope: scope.clone(),
        configuration: Configuration::default(),
        registry: Registry::default(),
    })?;
    Ok(())
}

/// Opens our own runtime and serves it on a socket too.
pub async fn start_runtime(
    paths: &Paths,
    insecure_registries: &[String],
    driver: CgroupDriver,
    bridge: &Arc<Bridge>,
    scope: &Scope,
) -> Result<Embedded, BoxError> {
    let images = NodeParts::images(paths, insecure_registries)?;
    add_tools_image(&images).await?;
    let config = NodeParts::runtime_config(paths, bridge.clone(), Arc::clone(&images), driver);
    let runtime = Runtime::open(config).await?;
    let cri = ferrite_cri::grpc::Server::bind(&paths.cri_socket(), runtime.clone(), runtime.clone())?;
    scope.spawn_graceful(cri.serve(scope.token().clone()));
    Ok(Embedded { images, runtime })
}

/// Makes the built-in image from the running binary.
async fn add_tools_image(images: &Images) -> Result<(), BoxError> {
    let builtin = Builtin::tools()?;
    let store = Arc::clone(images.store());
    tokio::task::spawn_blocking(move || store.add_builtin(&builtin)).await??;
    Ok(())
}

/// What the kubelet is told of its node.
struct NodePlace<'a> {
    name: &'a str,
    ip: IpAddr,
    /// The name server of pods.
    dns: Option<IpAddr>,
}

/// Starts the service proxy of the node.
async fn start_proxy(
    paths: &Paths,
    options: &ClusterOptions,
    api: &Running,
    bridge: &Bridge,
    node_name: &str,
    node_ip: IpAddr,
    scope: &Scope,
) -> Result<Proxy, BoxError> {
    /// Upstream's port for load balancers that ask about the node.
    const HEALTHZ_PORT: u16 = 10256;
    /// Changes that come together go into one transaction; alone they do not wait for long.
    const MIN_SYNC_PERIOD: Duration = Duration::from_millis(20);
    bridge.route_services().await?;
    let config = ProxyConfig {
        node_ips: vec![node_ip],
        table: paths.proxy_table(),
        // Pods have IPv4 addresses.
        families: vec![IpFamily::V4],
        local_traffic: LocalTraffic::Cidrs(vec![options.pod_cidr.to_string().parse()?]),
        // Node ports answer where the node does, and nowhere else.
        node_port_addresses: vec![ferrite_proxy::model::Cidr::single(node_ip)],
        pod_bridge: Some(bridge.pod_cidr().to_string().parse()?),
        min_sync_period: MIN_SYNC_PERIOD,
        healthz_bind_address: Some(SocketAddr::new(node_ip, HEALTHZ_PORT)),
        ..ProxyConfig::new(node_name)
    };
    Ok(Proxy::start(config, api.client("system:kube-proxy", &[]), scope).await?)
}

async fn start_kubelet(
    paths: &Paths,
    options: &ClusterOptions,
    api: &Running,
    services: Services,
    node: &NodePlace<'_>,
    scope: &Scope,
) -> Result<Kubelet, BoxError> {
    let (node_name, node_ip) = (node.name, node.ip);
    let names = vec![node_name.to_owned(), node_ip.to_string(), Ipv4Addr::LOCALHOST.to_string()];
    let serving = api.pki.ensure(
        "kubelet",
        &Subject {
            common_name: format!("system:node:{node_name}"),
            organization: Some("system:nodes".into()),
            names,
        },
        Purpose::Server,
    )?;
    let tls = ferrite_pki::server_config(&serving, api.pki.ca(), &["http/1.1"])?;
    let service_ip = options.server.service_cluster_ip_range.first_address();
    let config = ferrite_kubelet::Config {
        root_dir: paths.kubelet(),
        // Kept without the provisioner, too: volumes that exist go on working and can be removed.
        local_volumes: Some(paths.volumes()),
        log_dir: paths.pod_logs(),
        cgroup_root: paths.cgroup(),
        cgroup_driver: options.cgroup_driver.into(),
        server_address: match options.server.bind_address {
            None => SocketAddr::new(node_ip, options.kubelet_port),
            Some(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, options.kubelet_port)),
        },
        tls: Some(tls),
        api_server: Some((service_ip, 443)),
        cluster_dns: node.dns,
        cluster_domain: options.dns.cluster_domain.clone(),
        resolv_conf: options.dns.resolv_conf.clone(),
        image_credential_providers: options
            .image_credential_provider_config
            .clone()
            .zip(options.image_credential_provider_bin_dir.clone()),
        ..ferrite_kubelet::Config::new(node_name, node_ip)
    };
    let client = api.client(&format!("system:node:{node_name}"), &["system:nodes"]);
    Ok(Kubelet::start(config, services.runtime, services.images, client, scope).await?)
}
