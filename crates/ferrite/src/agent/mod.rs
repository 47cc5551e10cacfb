//! `ferrite agent`: a node that joins a cluster.

pub mod bootstrap;
mod network;
pub mod servers;
mod tunnel;

use crate::apiserver::BoxError;
use crate::cli::{DataDir, interrupted};
use crate::control::Control;
use crate::data_dir::DataDirectory;
use crate::dns::{ClusterDns, DnsPlace};
use crate::joining::ClusterSettings;
use crate::joining::token::JoinToken;
use crate::node::{self, CgroupDriver, Embedded, KubeletOptions, NodePlace, Services};
use crate::node_routes;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::status::State;
use crate::up::{check_machine, create_private};
use bootstrap::{Joining, Member, Target};
use ferrite_client::{Api, Backoff, Change, Informer, ListSelector, Scope, message_of};
use ferrite_component::FeatureGates;
use ferrite_network::{Addresses, Bridge, BridgeConfig, Cidrs, Encapsulation, IpFamily, RouterConfig};
use k8s_openapi::api::core::v1::Node;
use network::LateNetwork;
use servers::{ServerAddress, Servers};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tunnel::{OwnKubelet, OwnPods, Tunnels};

/// The transport of packets to pods of other nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PodRoutes {
    /// Directly on the same segment, in VXLAN beyond a router.
    #[default]
    Auto,
    /// Directly; nodes beyond a router are out of reach. Pods have the full MTU.
    Direct,
    /// In VXLAN always.
    Vxlan,
}

impl From<PodRoutes> for Encapsulation {
    fn from(routes: PodRoutes) -> Self {
        match routes {
            PodRoutes::Auto => Self::Auto,
            PodRoutes::Direct => Self::Never,
            PodRoutes::Vxlan => Self::Always,
        }
    }
}

/// Options of a node that has a machine for itself.
#[derive(Debug, Clone, clap::Args)]
pub struct Agent {
    #[command(flatten)]
    data: DataDir,
    /// The API server of the cluster, like https://192.0.2.1:6443. It is remembered for the next start.
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// Token of `ferrite token create`; only needed to join.
    #[arg(long, env = "FERRITE_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    token: Option<JoinToken>,
    /// File with the token, so that it is not seen in the list of processes.
    #[arg(long, conflicts_with = "token", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Name of the node; the host name by default.
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Addresses of the node, one or one of each family; those of the default route's interface by default.
    #[arg(long, value_name = "IPS")]
    node_ip: Option<Addresses>,
    /// Port of the kubelet.
    #[arg(long, default_value_t = 10250, value_name = "PORT")]
    kubelet_port: u16,
    /// The transport of packets to pods of other nodes.
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pod_routes: PodRoutes,
    /// The node's resolver configuration, for names outside the cluster.
    #[arg(long, default_value = "/etc/resolv.conf", value_name = "FILE")]
    resolv_conf: PathBuf,
    /// Registries (host or host:port) to talk to without TLS; loopback addresses always are.
    #[arg(long, value_name = "REGISTRY")]
    insecure_registry: Vec<String>,
    #[command(flatten)]
    cni: node::CniOptions,
    /// The maker of cgroups: the kubelet and the runtime themselves, or systemd on their behalf.
    #[arg(long, value_enum, default_value_t, value_name = "DRIVER")]
    cgroup_driver: CgroupDriver,
    /// Features of the kubelet to turn on or off: `A=true,B=false`.
    #[arg(long, value_name = "GATES")]
    feature_gates: Option<FeatureGates>,
    /// Write messages to the log in the data directory, which is rotated.
    #[arg(long)]
    log_to_file: bool,
}

impl Agent {
    /// Runs the node until interrupted. Containers go on; `ferrite down` removes them and everything else.
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let paths = self.data.paths();
        check_machine()?;
        State::refuse_if_running(&paths)?;
        let _claimed = DataDirectory::claim(&paths)?;
        if self.log_to_file {
            crate::logging::log_to(&paths.log())?;
        }
        create_private(&paths)?;
        let name = match &self.node_name {
            Some(name) => name.clone(),
            None => nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
        };
        let addresses = self.addresses().await?;
        let remembered = State::load(&paths).map(|state| state.url).filter(|url| !url.is_empty());
        let server = self.server.clone().or(remembered);
        let server =
            server.ok_or("the node has not joined yet: give --server, like https://192.0.2.1:6443")?;
        let mut state = State::new(&paths, &server, &name);
        state.insecure_registries = self.insecure_registry.clone();
        state.save(&paths)?;
        let scope = Scope::new();
        let started = tokio::select! {
            started = self.start(&paths, &server, &name, addresses, &scope) => Some(started?),
            signal = interrupted() => {
                signal?;
                None
            }
        };
        if started.is_some() {
            interrupted().await?;
            tracing::info!("stopping; containers go on");
        }
        scope.shutdown().await;
        if let Some(running) = started {
            running.embedded.runtime.close().await;
        }
        State::stopped(&paths)?;
        Ok(ExitCode::SUCCESS)
    }

    /// The addresses of this machine, which may be of more families than the cluster has.
    async fn addresses(&self) -> Result<Addresses, BoxError> {
        if let Some(addresses) = self.node_ip {
            return Ok(addresses);
        }
        let found = ferrite_network::node_addresses(&IpFamily::BOTH).await?;
        Addresses::new(found)
            .map_err(|_| "this machine has no address that others reach: give --node-ip".into())
    }

    fn token(&self) -> Result<Option<JoinToken>, BoxError> {
        let Some(file) = &self.token_file else { return Ok(self.token.clone()) };
        match std::fs::read_to_string(file) {
            Ok(text) => Ok(Some(text.parse()?)),
            // A node that has joined starts without it.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("cannot read the token in {}: {e}", file.display()).into()),
        }
    }

    async fn start(
        &self,
        paths: &Paths,
        server: &str,
        name: &str,
        addresses: Addresses,
        scope: &Scope,
    ) -> Result<Running, BoxError> {
        let progress = Progress::new(self.log_to_file);
        let images = node::OpeningImages::begin(paths, &self.insecure_registry);
        let token = self.token()?;
        let target = Target::parse(server)?;
        let given = ServerAddress { host: target.host, port: target.port };
        let list = paths.data.join("servers.json");
        let servers = Servers::start(&list, Some(given), scope).await?;
        let joining = Joining {
            server,
            url: &servers.url(),
            token: token.as_ref(),
            node: name,
            addresses,
            pki: &paths.pki(),
        };
        let member = joining.join(scope).await?;
        scope.spawn(servers.clone().probe(member.kubelet.clone()));
        let known = servers.known();
        scope.spawn(servers.follow(list, member.proxy.clone(), scope.clone()));
        progress.done("joined", &format!("{server} as {name}"));
        let settings = settings(&member.kubelet).await;
        let node_ips = node_ips(addresses, settings.pods)?;
        let late = Arc::new(LateNetwork::default());
        let driver = self.cgroup_driver;
        let plugins = self.cni.network(paths, scope);
        let network: Arc<dyn ferrite_network::PodNetwork> = match &plugins {
            Some(plugins) => plugins.clone(),
            None => late.clone(),
        };
        let embedded = node::start_runtime(paths, images, driver, network, scope).await?;
        node::collect_garbage(&embedded.runtime, plugins.as_deref(), None).await;
        listen(paths, &embedded, scope)?;
        progress.done("runtime", &paths.runtime().display().to_string());

        let place = NodePlace {
            name,
            ips: node_ips,
            pods: settings.pods,
            api_service: settings.api_service,
            dns: settings.dns,
            domain: &settings.domain,
            resolv_conf: &self.resolv_conf,
        };
        let kubelet_address = SocketAddr::new(*node_ips.primary(), self.kubelet_port);
        let options = KubeletOptions {
            address: kubelet_address,
            tls: member.serving.clone(),
            cgroup_driver: driver,
            credential_providers: None,
            feature_gates: self.feature_gates.clone().unwrap_or_default(),
        };
        let services = Services { runtime: embedded.runtime.clone(), images: embedded.runtime.clone() };
        let kubelet =
            node::start_kubelet(paths, &place, options, services, member.kubelet.clone(), scope).await?;
        let (know_pods, pods) = tokio::sync::watch::channel(None);
        let tunnels = Tunnels {
            tls: member.node_tls.clone(),
            kubelet: OwnKubelet { listens: kubelet_address, addresses },
            pods,
        };
        scope.spawn(tunnels.keep(known, scope.clone()));
        progress.done("kubelet", &format!("node {name} at {node_ips}"));

        let pod_cidrs = pod_cidrs(&member.kubelet, name, settings.pods, scope).await?;
        let bridge = self.open_bridge(paths, &settings, pod_cidrs, node_ips).await?;
        scope.spawn(Arc::clone(&bridge).heal());
        // Before the first pod can be attached.
        node::collect_garbage(&embedded.runtime, None, Some(&bridge)).await;
        let sources = ferrite_policy::Sources::start(&member.proxy, scope);
        node::start_policies(name, &bridge, plugins.as_ref(), sources, scope).await;
        late.set(Arc::clone(&bridge));
        know_pods.send_replace(Some(OwnPods { ranges: pod_cidrs, gateways: bridge.gateways() }));
        progress.done("network", &format!("{} with pods in {pod_cidrs}", paths.bridge()));
        self.start_network_services(paths, &place, &settings, &bridge, &member, scope).await?;
        progress.done("node", &format!("{name} is up"));
        Ok(Running { embedded, _kubelet: kubelet })
    }

    async fn open_bridge(
        &self,
        paths: &Paths,
        settings: &ClusterSettings,
        pod_cidrs: Cidrs,
        node_ips: Addresses,
    ) -> Result<Arc<Bridge>, BoxError> {
        let config = BridgeConfig {
            name: paths.bridge(),
            pod_cidrs,
            cluster_cidrs: settings.pods,
            service_cidrs: settings.services,
            state: paths.network(),
            mtu: ferrite_network::pod_mtu(*node_ips.primary(), self.pod_routes.into()).await?,
            routed: true,
        };
        let bridge = Bridge::open(config).await?;
        bridge.require_guard();
        Ok(bridge)
    }

    /// Names, Services and the pods of other nodes.
    async fn start_network_services(
        &self,
        paths: &Paths,
        place: &NodePlace<'_>,
        settings: &ClusterSettings,
        bridge: &Arc<Bridge>,
        member: &Member,
        scope: &Scope,
    ) -> Result<(), BoxError> {
        let routes = RouterConfig {
            bridge: paths.bridge(),
            node_ips: place.ips,
            pod_cidrs: Some(bridge.pod_cidrs()),
            cluster_cidrs: settings.pods,
            service_cidrs: settings.services,
            encapsulation: self.pod_routes.into(),
        };
        node_routes::start(place.name, routes, member.proxy.clone(), scope).await?;
        if settings.dns.is_some() {
            let dns = DnsPlace {
                domain: place.domain,
                resolv_conf: &self.resolv_conf,
                stub_domains: &settings.stub_domains,
                service: settings.dns,
                pods: settings.pods,
                node_ips: place.ips,
                own_runtime: true,
            };
            ClusterDns::start(&dns, bridge, scope).await?.feed(member.dns.clone(), scope);
        }
        if let Err(error) = node::start_proxy(paths, place, bridge, member.proxy.clone(), scope).await {
            // Pods and the API work; only Services lead nowhere, as on a kernel built without nftables.
            tracing::warn!(%error, "Services cannot be reached by their addresses");
        }
        Ok(())
    }
}

/// A node that was started.
struct Running {
    embedded: Embedded,
    _kubelet: ferrite_kubelet::Kubelet,
}

/// Asks until the server answers.
async fn settings(client: &kube::Client) -> ClusterSettings {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(10), 0.2);
    loop {
        match ClusterSettings::read(client).await {
            Ok(settings) => return settings,
            Err(error) => {
                let text = match error.downcast_ref::<kube::Error>() {
                    Some(error) => message_of(error),
                    None => error.to_string(),
                };
                tracing::warn!(error = text, "cannot read the cluster's settings; will try again");
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }
}

/// The node's addresses of the families of pods, in their order. A node without one of them has what it has: pods of other
/// nodes are reached through tunnels then.
fn node_ips(own: Addresses, pods: Cidrs) -> Result<Addresses, BoxError> {
    let of_pods = pods.families().into_iter().filter_map(|family| own.of(family).copied());
    Addresses::new(of_pods).map_err(|_| {
        format!("pods have addresses in {pods}, and this machine ({own}) has none of these families: give --node-ip")
            .into()
    })
}

/// Waits until the node has ranges for its pods.
async fn pod_cidrs(
    client: &kube::Client,
    name: &str,
    cluster: Cidrs,
    scope: &Scope,
) -> Result<Cidrs, BoxError> {
    let scope = scope.child();
    let selector = ListSelector::fields(format!("metadata.name={name}"));
    let informer = Informer::<Node>::start(Api::all(client.clone()), selector, &scope);
    let (found, mut seen) = tokio::sync::mpsc::channel(1);
    informer.subscribe(move |change: &Change<Node>| {
        if let Some(cidrs) = node_routes::pod_cidrs_of(change.object(), cluster) {
            // One is enough; later ones find the channel full or closed.
            let _ = found.try_send(cidrs);
        }
    });
    let cidrs = seen.recv().await;
    scope.cancel();
    cidrs.ok_or_else(|| "the node was never given a range for its pods".into())
}

/// Opens the control socket for `ferrite image`.
fn listen(paths: &Paths, embedded: &Embedded, scope: &Scope) -> Result<(), BoxError> {
    let control = Control { images: Arc::clone(&embedded.images), runtime: Arc::clone(&embedded.runtime) };
    scope.spawn(control.listen(paths)?);
    Ok(())
}
