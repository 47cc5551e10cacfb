//! `ferrite agent`: a node that joins a cluster.

pub mod bootstrap;
mod network;
mod servers;

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
use ferrite_network::{Bridge, BridgeConfig, Encapsulation, RouterConfig};
use k8s_openapi::api::core::v1::Node;
use network::LateNetwork;
use servers::{ServerAddress, Servers};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

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
    /// Address of the node; that of the default route's interface by default.
    #[arg(long, value_name = "IP")]
    node_ip: Option<Ipv4Addr>,
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
        let address = self.address().await?;
        let remembered = State::load(&paths).map(|state| state.url).filter(|url| !url.is_empty());
        let server = self.server.clone().or(remembered);
        let server =
            server.ok_or("the node has not joined yet: give --server, like https://192.0.2.1:6443")?;
        let mut state = State::new(&paths, &server, &name);
        state.insecure_registries = self.insecure_registry.clone();
        state.save(&paths)?;
        let scope = Scope::new();
        let started = tokio::select! {
            started = self.start(&paths, &server, &name, address, &scope) => Some(started?),
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

    async fn address(&self) -> Result<Ipv4Addr, BoxError> {
        if let Some(address) = self.node_ip {
            return Ok(address);
        }
        match ferrite_network::node_address().await? {
            Some(IpAddr::V4(address)) => Ok(address),
            _ => Err("this machine has no address of IPv4 that others reach: give --node-ip".into()),
        }
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
        address: Ipv4Addr,
        scope: &Scope,
    ) -> Result<Running, BoxError> {
        let progress = Progress::new(self.log_to_file);
        let token = self.token()?;
        let target = Target::parse(server)?;
        let given = ServerAddress { host: target.host, port: target.port };
        let servers = Servers::start(&paths.data.join("servers.json"), Some(given), scope).await?;
        let joining = Joining {
            server,
            url: &servers.url(),
            token: token.as_ref(),
            node: name,
            address: address.into(),
            pki: &paths.pki(),
        };
        let member = joining.join(scope).await?;
        scope.spawn(servers.clone().probe(member.kubelet.clone()));
        scope.spawn(servers.follow(member.proxy.clone(), scope.clone()));
        progress.done("joined", &format!("{server} as {name}"));
        let settings = settings(&member.kubelet).await;
        let late = Arc::new(LateNetwork::default());
        let (registries, driver) = (&self.insecure_registry, self.cgroup_driver);
        let plugins = self.cni.network(paths, scope);
        let network: Arc<dyn ferrite_network::PodNetwork> = match &plugins {
            Some(plugins) => plugins.clone(),
            None => late.clone(),
        };
        let embedded = node::start_runtime(paths, registries, driver, network, scope).await?;
        node::collect_garbage(&embedded.runtime, plugins.as_deref(), None).await;
        listen(paths, &embedded, scope)?;
        progress.done("runtime", &paths.runtime().display().to_string());

        let place = NodePlace {
            name,
            ip: address.into(),
            pods: settings.pods,
            api_service: settings.api_service,
            dns: settings.dns,
            domain: &settings.domain,
            resolv_conf: &self.resolv_conf,
        };
        let options = KubeletOptions {
            address: SocketAddr::from((address, self.kubelet_port)),
            tls: member.serving.clone(),
            cgroup_driver: driver,
            credential_providers: None,
        };
        let services = Services { runtime: embedded.runtime.clone(), images: embedded.runtime.clone() };
        let kubelet =
            node::start_kubelet(paths, &place, options, services, member.kubelet.clone(), scope).await?;
        progress.done("kubelet", &format!("node {name} at {address}"));

        let pod_cidr = pod_cidr(&member.kubelet, name, scope).await?;
        let bridge = self.open_bridge(paths, &settings, pod_cidr, address).await?;
        scope.spawn(Arc::clone(&bridge).heal());
        // Before the first pod can be attached.
        node::collect_garbage(&embedded.runtime, None, Some(&bridge)).await;
        let sources = ferrite_policy::Sources::start(&member.proxy, scope);
        if let Err(error) = node::start_policies(name, &bridge, plugins.as_deref(), sources, scope).await {
            // As on a kernel built without nftables.
            tracing::warn!(%error, "NetworkPolicies have no effect on this node");
        }
        late.set(Arc::clone(&bridge));
        progress.done("network", &format!("{} with pods in {pod_cidr}", paths.bridge()));
        self.start_network_services(paths, &place, &settings, &bridge, &member, scope).await?;
        progress.done("node", &format!("{name} is up"));
        Ok(Running { embedded, _kubelet: kubelet })
    }

    async fn open_bridge(
        &self,
        paths: &Paths,
        settings: &ClusterSettings,
        pod_cidr: ferrite_network::Cidr,
        address: Ipv4Addr,
    ) -> Result<Arc<Bridge>, BoxError> {
        let config = BridgeConfig {
            name: paths.bridge(),
            pod_cidr,
            cluster_cidr: settings.pods,
            service_cidr: settings.services,
            state: paths.network(),
            mtu: ferrite_network::pod_mtu(address, self.pod_routes.into()).await?,
            routed: true,
        };
        Ok(Bridge::open(config).await?)
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
        let IpAddr::V4(address) = place.ip else { return Err("nodes have addresses of IPv4".into()) };
        let routes = RouterConfig {
            bridge: paths.bridge(),
            address,
            pod_cidr: Some(bridge.pod_cidr()),
            cluster_cidr: settings.pods,
            service_cidr: settings.services,
            encapsulation: self.pod_routes.into(),
        };
        node_routes::start(place.name, routes, member.proxy.clone(), scope).await?;
        if settings.dns.is_some() {
            let dns = DnsPlace {
                domain: place.domain,
                resolv_conf: &self.resolv_conf,
                stub_domains: &[],
                service: settings.dns,
                pods: settings.pods,
                node_ip: place.ip,
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

/// Waits until the node has a range for its pods.
async fn pod_cidr(
    client: &kube::Client,
    name: &str,
    scope: &Scope,
) -> Result<ferrite_network::Cidr, BoxError> {
    let scope = scope.child();
    let selector = ListSelector::fields(format!("metadata.name={name}"));
    let informer = Informer::<Node>::start(Api::all(client.clone()), selector, &scope);
    let (found, mut seen) = tokio::sync::mpsc::channel(1);
    informer.subscribe(move |change: &Change<Node>| {
        if let Some(cidr) = node_routes::pod_cidr(change.object()) {
            // One is enough; later ones find the channel full or closed.
            let _ = found.try_send(cidr);
        }
    });
    let cidr = seen.recv().await;
    scope.cancel();
    cidr.ok_or_else(|| "the node was never given a range for its pods".into())
}

/// Opens the control socket for `ferrite image`.
fn listen(paths: &Paths, embedded: &Embedded, scope: &Scope) -> Result<(), BoxError> {
    let control = Control { images: Arc::clone(&embedded.images), runtime: Arc::clone(&embedded.runtime) };
    scope.spawn(control.listen(paths)?);
    Ok(())
}
