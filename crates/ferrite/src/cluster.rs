//! A whole cluster in one process: store, API server, controllers, scheduler, and a node.
//!
//! Parts start in the order in which they need each other and stop in reverse. Containers belong to their
//! supervisors and outlive all of it.

use crate::addresses::{listen_addresses, opened_to};
use crate::apiserver::{ApiServerHandle, BoxError, Place, ServerOptions, parse_cidrs};
use crate::control::Control;
use crate::control_plane::{self, ManagerWork};
use crate::dns::{ClusterDns, DnsOptions, DnsPlace};
use crate::extras::ExtraOptions;
use crate::joining::token::JoinToken;
use crate::joining::{self, ClusterSettings, DNS_USER, PROXY_USER};
use crate::machines::{MachineOptions, Machines};
use crate::node::{
    CgroupDriver, CniOptions, Embedded, KubeletOptions, NodePlace, OpeningImages, Services, collect_garbage,
    start_kubelet, start_policies, start_proxy, start_runtime,
};
use crate::node_routes;
use crate::own_certificates;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::readiness::wait_for_nodes;
use crate::standalone::StandaloneOptions;
use ferrite_client::{Informers, Scope};
use ferrite_component::GoDuration;
use ferrite_controllers::{NodeCertificates, NodeCidrs};
use ferrite_kubelet::Kubelet;
use ferrite_network::{
    Addresses, Bridge, BridgeConfig, Cidr, Cidrs, Encapsulation, IpFamily, PodNetwork, RouterConfig, Segment,
};
use ferrite_pki::Subject;
use ferrite_policy::Sources;
use ferrite_proxy::Proxy;
use k8s_openapi::api::core::v1::Node;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A part that a cluster has unless the user does without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The default StorageClass `local-path` and its provisioner.
    LocalStorage,
    /// The load balancer that gives Services of type LoadBalancer the nodes' addresses.
    ServiceLb,
}

/// Options of a cluster on this machine.
#[derive(Debug, Clone, clap::Args)]
pub struct ClusterOptions {
    #[command(flatten)]
    pub server: ServerOptions,
    /// Name of the node; the host name by default.
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Addresses of all pods: a range, or one of each family, the primary one first, like
    /// 10.244.0.0/16,fd00:10:244::/56. The node takes the first /24 of IPv4 and the first /64 of IPv6.
    #[arg(long, alias = "pod-cidr", default_value = "10.244.0.0/16", value_name = "CIDRS", value_parser = parse_cidrs)]
    pub cluster_cidr: Cidrs,
    /// Real nodes on this machine. This process is the first; the others are agents with networks, mounts and
    /// directories of their own, on a virtual segment without a way out. Without it there is one node, and none can
    /// join.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=200))]
    pub nodes: Option<u16>,
    /// Machines of a control plane that survives the loss of some of them: 1, 3 or 5. Each has a server and a member of a
    /// real etcd (the program `etcd` on the PATH), on the virtual segment of nodes. Nodes are agents then, one without
    /// --nodes. This process only forwards clients to a server that answers. For trying: all of it is on this machine.
    #[arg(long, value_name = "N", value_parser = parse_control_planes)]
    pub control_planes: Option<u8>,
    /// Addresses of nodes on the virtual segment, of the families of pods; 10.243.0.0/24 and fd00:10:243::/112 by
    /// default.
    #[arg(long, value_name = "CIDRS", value_parser = parse_cidrs)]
    pub node_cidr: Option<Cidrs>,
    /// A node that is silent for longer is taken for lost.
    #[arg(long, default_value = "50s", value_name = "DURATION")]
    pub node_monitor_grace_period: GoDuration,
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
    #[command(flatten)]
    pub cni: CniOptions,
    /// The maker of cgroups: the kubelet and the runtime themselves, or systemd on their behalf. If another
    /// runtime reports its own choice, that counts.
    #[arg(long, value_enum, default_value_t, value_name = "DRIVER")]
    pub cgroup_driver: CgroupDriver,
    /// Parts to do without.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS")]
    pub disable: Vec<Part>,
    #[command(flatten)]
    pub extras: ExtraOptions,
    /// CredentialProviderConfig that names the kubelet's credential provider plugins: a JSON or YAML file, or a
    /// directory of them.
    #[arg(long, value_name = "PATH", requires = "image_credential_provider_bin_dir")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// Directory of the credential provider plugins' programs.
    #[arg(long, value_name = "DIR", requires = "image_credential_provider_config")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
}

/// Members of an etcd decide by majority.
fn parse_control_planes(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(count @ (1 | 3 | 5)) => Ok(count),
        _ => Err("there may be 1, 3 or 5: etcd decides by majority, and an even number survives no more failures than one less".into()),
    }
}

/// A running cluster.
pub struct Cluster {
    pub api: ApiServerHandle,
    pub node_name: String,
    /// The agents on this machine.
    pub others: Vec<String>,
    /// None when another runtime runs the pods.
    embedded: Option<Embedded>,
    /// None when pods resolve names as the node does.
    dns: Option<ClusterDns>,
    scope: Scope,
    /// None when the kernel cannot do it.
    proxy: Option<Proxy>,
    _kubelet: Kubelet,
}

/// The runtime of the node's pods.
enum ChosenRuntime<'a> {
    Own(OpeningImages),
    /// The endpoint of another one.
    Other(&'a str),
}

impl Cluster {
    pub async fn start(
        paths: &Paths,
        options: &ClusterOptions,
        progress: &Progress,
    ) -> Result<Self, BoxError> {
        let runtime = match &options.container_runtime_endpoint {
            None => ChosenRuntime::Own(OpeningImages::begin(paths, &options.insecure_registry)),
            Some(endpoint) => ChosenRuntime::Other(endpoint),
        };
        let node_name = match &options.node_name {
            Some(name) => name.clone(),
            None => nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
        };
        let services = options.server.service_cluster_ip_range.for_pods(options.cluster_cidr);
        let bridge = start_network(paths, options.cluster_cidr, options.cluster_cidr, services).await?;
        bridge.require_guard();
        let segment = match options.nodes {
            Some(_) => Some(open_segment(paths, options, services).await?),
            None => None,
        };
        // Nobody outside this machine has a reason to reach it unless the user says so: the bridge's address will do.
        let gateways = bridge.gateways();
        let node_ips = match (&segment, opened_to(options.server.bind_address)) {
            (Some(segment), _) => segment.addresses(),
            (None, None) => gateways,
            (None, Some(_)) => machine_addresses(gateways).await?,
        };
        let node_ip = *node_ips.primary();
        progress.done("network", &format!("{}, node address {node_ips}", paths.bridge()));

        let mut own: Vec<IpAddr> = vec![Ipv4Addr::LOCALHOST.into()];
        own.extend(gateways.iter());
        if segment.is_some() {
            own.extend(node_ips.iter());
        }
        let listen = listen_addresses(own, options.server.bind_address);
        let domain = options.dns.cluster_domain.clone();
        let standalone = StandaloneOptions::default();
        let doors = listen.clone();
        let acted_on = options.extras.acted_on();
        let pod_ranges = options.cluster_cidr.iter().map(|range| range_of(*range)).collect();
        let names = Vec::new();
        let place =
            Place { address: node_ip, listen, names, whole: true, domain, standalone, acted_on, pod_ranges };
        let mut server = with_node_restriction(&options.server);
        server.enable_bootstrap_token_auth |= segment.is_some();
        server.bind_address = None;
        let api = ApiServerHandle::start(paths, &server, &place).await?;
        api.write_admin_kubeconfig(paths)?;
        progress.done("API server", &api.url);

        let scope = Scope::new();
        scope.spawn(Arc::clone(&bridge).heal());
        let mut config = api.controllers_config()?;
        config.node_cidrs = Some(node_cidrs(options, &node_name)?);
        config.node_monitor_grace = options.node_monitor_grace_period.0;
        if segment.is_some() {
            config.node_certificates = Some(node_certificates(options, node_ips));
        }
        let on_request = ferrite_controllers::FOR_JOINING.iter().copied();
        let names: Vec<String> = std::iter::once("*").chain(on_request).map(str::to_owned).collect();
        let local_storage = !options.disable.contains(&Part::LocalStorage);
        let service_lb = !options.disable.contains(&Part::ServiceLb);
        let work = ManagerWork { controllers: names, config, local_storage, service_lb, dns: None };
        let informers = match api.is_shared() {
            false => control_plane::start_alone(&api, work, &scope).await?,
            true => {
                control_plane::start_elected(&api, paths, work, true, &scope)?;
                Informers::new(api.client("system:kube-controller-manager", &[]), scope.clone())
            }
        };
        progress.done("control plane", "controllers, scheduler");
        if local_storage {
            progress.done("storage", &format!("class {}", ferrite_client::local_path::CLASS));
        }

        if let Some(at) = options.extras.start(&doors, node_ip, &api, &informers, &scope).await? {
            progress.done("ingress", &at);
        }

        let others = match &segment {
            Some(segment) => {
                Box::pin(start_others(paths, options, &api, node_ips, segment, &node_name)).await?
            }
            None => Vec::new(),
        };
        let dns = match options.dns.no_dns {
            true => None,
            false => {
                let place = dns_place(options, node_ips);
                let dns = ClusterDns::start(&place, &bridge, &scope).await?;
                let nodes = segment.as_ref().map(|_| informers.get::<Node>());
                dns.serve_cluster(place.service, gateways, nodes, &api, &scope);
                progress.done("DNS", &format!("{} at {}", options.dns.cluster_domain, dns.address));
                Some(dns)
            }
        };

        let plugins = options.cni.network(paths, &scope);
        let (embedded, services) = match runtime {
            ChosenRuntime::Own(images) => {
                let driver = options.cgroup_driver;
                let network: Arc<dyn PodNetwork> = match &plugins {
                    Some(plugins) => plugins.clone(),
                    None => bridge.clone(),
                };
                let embedded = start_runtime(paths, images, driver, network, &scope).await?;
                collect_garbage(&embedded.runtime, plugins.as_deref(), Some(&bridge)).await;
                let services =
                    Services { runtime: embedded.runtime.clone(), images: embedded.runtime.clone() };
                progress.done("runtime", &paths.runtime().display().to_string());
                (Some(embedded), services)
            }
            ChosenRuntime::Other(endpoint) => {
                let client = Arc::new(ferrite_cri::grpc::Client::new(endpoint)?);
                progress.done("runtime", endpoint);
                (None, Services { runtime: client.clone(), images: client })
            }
        };

        let node = NodePlace {
            name: &node_name,
            ips: node_ips,
            pods: options.cluster_cidr,
            api_service: options.server.service_cluster_ip_range.first_address(),
            dns: dns.as_ref().map(|dns| dns.address),
            domain: &options.dns.cluster_domain,
            resolv_conf: &options.dns.resolv_conf,
        };
        let proxy_client = api.client(PROXY_USER, &[]);
        if segment.is_some() {
            start_routes(paths, options, &node, &bridge, proxy_client.clone(), &scope).await?;
        }
        let proxy = match start_proxy(paths, &node, &bridge, proxy_client, &scope).await {
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

        let sources = Sources::shared(&informers);
        if start_policies(&node_name, &bridge, plugins.as_ref(), sources, &scope).await {
            progress.done("policies", &ferrite_network::policy_table(&paths.bridge()));
        }

        let kubelet = start_own_kubelet(paths, options, &api, services, &node, &scope).await?;
        progress.done("kubelet", &format!("node {node_name}"));
        Ok(Self { api, node_name, others, embedded, dns, scope, proxy, _kubelet: kubelet })
    }

    /// Waits until all nodes say that they are ready and a pod could be created.
    pub async fn ready(&self, paths: &Paths, progress: &Progress) -> Result<(), BoxError> {
        let client = self.api.client("system:kube-controller-manager", &[]);
        let nodes = std::iter::once(&self.node_name).chain(&self.others);
        wait_for_nodes(&client, nodes, paths, progress, &self.scope).await?;
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

    /// Opens the control socket for other `ferrite` commands. They serve our own images only.
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

/// The length of the prefix of a node's range, as upstream's defaults are.
pub fn node_mask(pods: Cidr) -> u8 {
    match pods.family() {
        IpFamily::V4 => pods.prefix().max(24),
        IpFamily::V6 => pods.prefix().max(64),
    }
}

/// The machine's own address of each family; the gateway's where it has none.
async fn machine_addresses(gateways: Addresses) -> Result<Addresses, BoxError> {
    let found = ferrite_network::node_addresses(&gateways.families()).await?;
    let own = |gateway: &IpAddr| {
        let same = |address: &&IpAddr| address.is_ipv4() == gateway.is_ipv4();
        Some(found.iter().find(same).copied().unwrap_or(*gateway))
    };
    Ok(gateways.try_map(own).unwrap_or(gateways))
}

/// The network of the node's pods, which get their addresses from the first part of `pods`.
pub async fn start_network(
    paths: &Paths,
    pods: Cidrs,
    cluster: Cidrs,
    services: Option<Cidrs>,
) -> Result<Arc<Bridge>, BoxError> {
    let first = |range: &Cidr| Cidr::containing(range.network(), node_mask(*range));
    let config = BridgeConfig {
        name: paths.bridge(),
        pod_cidrs: pods.try_map(first).unwrap_or(pods),
        cluster_cidrs: cluster,
        service_cidrs: services,
        state: paths.network(),
        mtu: 1500,
        routed: true,
    };
    Ok(Bridge::open(config).await?)
}

/// Lets a kubelet change only its own node and pods. Upstream leaves that to the administrator.
pub fn with_node_restriction(server: &ServerOptions) -> ServerOptions {
    const PLUGIN: &str = "NodeRestriction";
    let mut server = server.clone();
    if !server.disable_admission_plugins.iter().any(|name| name == PLUGIN) {
        server.enable_admission_plugins.push(PLUGIN.into());
    }
    server
}

/// The segment of nodes, whose addresses are nobody else's.
pub async fn open_segment(
    paths: &Paths,
    options: &ClusterOptions,
    services: Option<Cidrs>,
) -> Result<Segment, BoxError> {
    let pods = options.cluster_cidr;
    let ranges = segment_ranges(options.node_cidr, pods)?;
    for range in ranges.iter() {
        let mut others = services.iter().flat_map(Cidrs::iter).chain(pods.iter());
        if let Some(other) = others.find(|other| other.overlaps(*range)) {
            return Err(format!("--node-cidr {range} overlaps with {other}: choose another range").into());
        }
    }
    if options.container_runtime_endpoint.is_some() {
        return Err(
            "--nodes works with the built-in runtime only: its pods have networks that other nodes reach"
                .into(),
        );
    }
    if options.cni.cni_conf_dir.is_some() {
        return Err("--nodes works with the built-in network only: leave --cni-conf-dir out".into());
    }
    Ok(Segment::open(&paths.segment(), ranges, &paths.bridge()).await?)
}

/// The addresses of nodes: a range of each family of pods.
fn segment_ranges(given: Option<Cidrs>, pods: Cidrs) -> Result<Cidrs, BoxError> {
    let usual = |pods: &Cidr| match pods.family() {
        IpFamily::V4 => "10.243.0.0/24".parse().ok(),
        IpFamily::V6 => "fd00:10:243::/112".parse().ok(),
    };
    let ranges = given.or_else(|| pods.try_map(usual)).ok_or("there are no addresses for nodes")?;
    match ranges.families() == pods.families() {
        true => Ok(ranges),
        false => Err(format!(
            "--node-cidr {ranges} has other families than --cluster-cidr {pods}: give a range of each, in the same order"
        )
        .into()),
    }
}

/// Pod CIDRs are parts of each family's range; this node has the first, which its network is made with.
fn node_cidrs(options: &ClusterOptions, node: &str) -> Result<NodeCidrs, BoxError> {
    let reserved = options.server.service_cluster_ip_range.all().to_vec();
    Ok(NodeCidrs::new(ranges_with_masks(options.cluster_cidr))?.without(reserved).first_for(node))
}

/// The ranges of all pods, each with the length of the prefix of a node's part.
pub fn ranges_with_masks(pods: Cidrs) -> Vec<(ferrite_api::Cidr, u8)> {
    pods.iter().map(|range| (range_of(*range), node_mask(*range))).collect()
}

pub fn range_of(cidr: Cidr) -> ferrite_api::Cidr {
    ferrite_api::Cidr { address: cidr.network(), bits: cidr.prefix() }
}

/// The range with one address.
pub fn host_of(address: IpAddr) -> ferrite_api::Cidr {
    ferrite_api::Cidr { address, bits: if address.is_ipv4() { 32 } else { 128 } }
}

fn node_certificates(options: &ClusterOptions, node_ips: Addresses) -> NodeCertificates {
    let mut protected = options.server.service_cluster_ip_range.all().to_vec();
    protected.extend(options.cluster_cidr.iter().map(|range| range_of(*range)));
    protected.extend(node_ips.iter().map(|ip| host_of(*ip)));
    NodeCertificates {
        users: vec![PROXY_USER.into(), DNS_USER.into()],
        protected,
        servers: joining::server_list(),
    }
}

fn dns_place(options: &ClusterOptions, node_ips: Addresses) -> DnsPlace<'_> {
    DnsPlace {
        domain: &options.dns.cluster_domain,
        resolv_conf: &options.dns.resolv_conf,
        stub_domains: &options.dns.dns_stub_domain,
        service: options.server.service_cluster_ip_range.dns_address(),
        pods: options.cluster_cidr,
        node_ips,
        own_runtime: options.container_runtime_endpoint.is_none(),
    }
}

/// Lets nodes join, and starts those of this machine. They join while this node starts.
async fn start_others(
    paths: &Paths,
    options: &ClusterOptions,
    api: &ApiServerHandle,
    node_ips: Addresses,
    segment: &Segment,
    node_name: &str,
) -> Result<Vec<String>, BoxError> {
    let ranges = &options.server.service_cluster_ip_range;
    let pods = options.cluster_cidr;
    let node_ip = *node_ips.primary();
    let reached = |address: &IpAddr| pods.of(IpFamily::of(*address)).is_some();
    let dns = ranges.dns_address().filter(reached).filter(|_| !options.dns.no_dns);
    let settings = ClusterSettings {
        pods,
        services: ranges.for_pods(pods),
        api_service: ranges.first_address(),
        dns,
        domain: options.dns.cluster_domain.clone(),
        stub_domains: options.dns.dns_stub_domain.clone(),
    };
    let admin = api.client("system:apiserver", &["system:masters"]);
    Box::pin(joining::publish(&admin, api.pki.ca(), &settings, node_ip)).await?;
    let port = api.url.rsplit(':').next().unwrap_or_default();
    let machines = Machines::open(paths).await?;
    let server = match node_ip {
        IpAddr::V4(v4) => format!("https://{v4}:{port}"),
        IpAddr::V6(v6) => format!("https://[{v6}]:{port}"),
    };
    let common = MachineOptions {
        server,
        insecure_registries: options.insecure_registry.clone(),
        systemd_cgroups: options.cgroup_driver == CgroupDriver::Systemd,
        resolv_conf: options.dns.resolv_conf.clone(),
        feature_gates: options.server.feature_gates.as_ref().map(ToString::to_string).unwrap_or_default(),
    };
    machines.remember(&common)?;
    let wanted = usize::from(options.nodes.unwrap_or(1)).saturating_sub(1);
    machines
        .start_all(node_name, 2.., wanted, segment, || async {
            JoinToken::create(&admin, api.pki.ca(), Some(TOKEN_LIFETIME), "node of this machine").await
        })
        .await
}

/// The tokens of nodes on this machine are used at once.
pub const TOKEN_LIFETIME: Duration = Duration::from_secs(3600);

/// Routes to the pods of other nodes, which are on the same segment.
async fn start_routes(
    paths: &Paths,
    options: &ClusterOptions,
    node: &NodePlace<'_>,
    bridge: &Bridge,
    client: kube::Client,
    scope: &Scope,
) -> Result<(), BoxError> {
    let config = RouterConfig {
        bridge: paths.bridge(),
        node_ips: node.ips,
        pod_cidrs: Some(bridge.pod_cidrs()),
        cluster_cidrs: node.pods,
        service_cidrs: options.server.service_cluster_ip_range.for_pods(node.pods),
        encapsulation: Encapsulation::Auto,
    };
    node_routes::start(node.name, config, client, scope).await
}

/// The kubelet of this process's node. Its certificates are issued here, where the authority is.
async fn start_own_kubelet(
    paths: &Paths,
    options: &ClusterOptions,
    api: &ApiServerHandle,
    services: Services,
    node: &NodePlace<'_>,
    scope: &Scope,
) -> Result<Kubelet, BoxError> {
    let user = format!("system:node:{}", node.name);
    let mut names = vec![node.name.to_owned(), Ipv4Addr::LOCALHOST.to_string()];
    names.extend(node.ips.iter().map(ToString::to_string));
    let subject = Subject { common_name: user.clone(), organization: Some("system:nodes".into()), names };
    let kubelet = KubeletOptions {
        address: match opened_to(options.server.bind_address) {
            None => SocketAddr::new(*node.ips.primary(), options.kubelet_port),
            Some(_) if node.ips.of(IpFamily::V6).is_some() => {
                SocketAddr::from((Ipv6Addr::UNSPECIFIED, options.kubelet_port))
            }
            Some(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, options.kubelet_port)),
        },
        tls: own_certificates::serving(paths.pki(), "kubelet", subject, scope)?,
        cgroup_driver: options.cgroup_driver,
        credential_providers: options
            .image_credential_provider_config
            .clone()
            .zip(options.image_credential_provider_bin_dir.clone()),
        feature_gates: options.server.feature_gates.clone().unwrap_or_default(),
    };
    let client = api.client(&user, &["system:nodes"]);
    start_kubelet(paths, node, kubelet, services, client, scope).await
}
