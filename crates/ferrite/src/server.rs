//! `ferrite server` and `ferrite kube-apiserver`: a control plane without a node of its own.

use crate::addresses::{advertised, parse_subject_name};
use crate::apiserver::{ApiServerHandle, BoxError, CLUSTER_DOMAIN, Place, ServerOptions, parse_cidrs};
use crate::cli::{DataDir, interrupted};
use crate::cluster::{Part, host_of, range_of, ranges_with_masks, with_node_restriction};
use crate::control_plane::{self, ManagerWork};
use crate::data_dir::DataDirectory;
use crate::dns::parse_domain;
use crate::extras::ExtraOptions;
use crate::joining::servers::JoinCluster;
use crate::joining::{self, ClusterSettings, DNS_USER, PROXY_USER};
use crate::node_routes;
use crate::paths::Paths;
use crate::standalone::StandaloneOptions;
use crate::up::quoted;
use clap::Args;
use ferrite_client::{Informers, Scope};
use ferrite_component::GoDuration;
use ferrite_controllers::{Config, Identity, NodeCertificates, NodeCidrs};
use ferrite_network::{Addresses, Cidrs, Encapsulation, IpFamily, Router, RouterConfig};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::ExitCode;

/// A server without a node: where it keeps its files and how it is reached.
#[derive(Debug, Args)]
pub struct ServerPlace {
    #[command(flatten)]
    data: DataDir,
    #[command(flatten)]
    server: Box<ServerOptions>,
    /// Address other machines reach this server at.
    #[arg(long, value_name = "IP")]
    advertise_address: Option<IpAddr>,
}

/// The settings for agents that join a server.
#[derive(Debug, Clone, Args)]
pub struct AgentSettings {
    /// Addresses of all pods: a range, or one of each family, the primary one first. Each node gets a /24 of IPv4 and a
    /// /64 of IPv6.
    #[arg(long, alias = "pod-cidr", default_value = "10.244.0.0/16", value_name = "CIDRS", value_parser = parse_cidrs)]
    cluster_cidr: Cidrs,
    /// The domain of the cluster's names.
    #[arg(long, default_value = CLUSTER_DOMAIN, value_name = "DOMAIN", value_parser = parse_domain)]
    cluster_domain: String,
    /// Further names and addresses by which clients reach this server, for its certificate: those of a load balancer, for
    /// example.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_subject_name)]
    tls_san: Vec<String>,
    /// Serve no cluster DNS: pods resolve names as their node does.
    #[arg(long)]
    no_dns: bool,
    /// A node that is silent for longer is taken for lost.
    #[arg(long, default_value = "50s", value_name = "DURATION")]
    node_monitor_grace_period: GoDuration,
    /// Parts to do without.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS")]
    disable: Vec<Part>,
    #[command(flatten)]
    extras: ExtraOptions,
    /// Longest lifetime of certificates that the cluster signs, those of nodes included.
    #[arg(long, default_value = "8760h0m0s", value_name = "DURATION")]
    cluster_signing_duration: GoDuration,
    #[command(flatten)]
    join: JoinCluster,
}

impl ServerPlace {
    /// Serves until a signal to stop. A whole control plane has a scheduler, and agents may join it.
    pub async fn serve(
        self,
        controllers: &[String],
        agents: Option<&AgentSettings>,
        standalone: StandaloneOptions,
    ) -> Result<ExitCode, BoxError> {
        let knows_administrator = standalone.knows_own_clients();
        let paths = self.data.paths();
        let _claimed = DataDirectory::claim(&paths)?;
        let advertise = match self.advertise_address.or_else(|| advertised(self.server.bind_address)) {
            Some(address) => address,
            None => ferrite_network::node_address().await?.unwrap_or(Ipv4Addr::LOCALHOST.into()),
        };
        let place = Place {
            address: advertise,
            listen: vec![everywhere(advertise)],
            names: agents.map_or_else(Vec::new, |agents| agents.tls_san.clone()),
            whole: agents.is_some(),
            domain: agents.map_or_else(|| CLUSTER_DOMAIN.into(), |agents| agents.cluster_domain.clone()),
            standalone,
            acted_on: agents.map_or(&[], |agents| agents.extras.acted_on()),
            pod_ranges: agents.map_or_else(Vec::new, |agents| {
                agents.cluster_cidr.iter().map(|range| range_of(*range)).collect()
            }),
        };
        let mut options = (*self.server).clone();
        if agents.is_some() {
            options = with_node_restriction(&options);
            options.enable_bootstrap_token_auth = true;
        }
        if let Some(agents) = agents {
            let has_etcd = !options.storage.etcd_servers.is_empty();
            agents.join.obtain_keys(&paths, has_etcd).await?;
        }
        let running = ApiServerHandle::start(&paths, &options, &place).await?;
        if knows_administrator {
            running.write_admin_kubeconfig(&paths)?;
        }
        let scope = Scope::new();
        let mut config = running.controllers_config()?;
        if let Some(agents) = agents {
            agents.allow(&options, advertise, &mut config)?;
        }
        let work = ManagerWork {
            controllers: controllers.to_vec(),
            config,
            local_storage: agents.is_some_and(|agents| !agents.disable.contains(&Part::LocalStorage)),
            service_lb: agents.is_some_and(|agents| !agents.disable.contains(&Part::ServiceLb)),
            dns: agents.and_then(|agents| agents.dns_service(&options)),
        };
        control_plane::start_elected(&running, &paths, work, agents.is_some(), &scope)?;
        let mut routes = None;
        if let Some(agents) = agents {
            let everywhere = [everywhere(advertise)];
            let clients = running.local().controller_clients();
            let informers = Informers::new(clients(Identity::Manager), scope.clone());
            agents.extras.start(&everywhere, advertise, &running, &informers, &scope).await?;
            routes = Box::pin(agents.start(&paths, &options, &running, advertise, &scope)).await?;
        }
        println!("serving {}", running.url);
        if knows_administrator {
            println!("export KUBECONFIG={}", quoted(&paths.admin_kubeconfig()));
        }
        interrupted().await?;
        scope.shutdown().await;
        if let Some(routes) = routes {
            Router::open(routes).await?.apply(&[]).await?;
        }
        running.stop().await;
        Ok(ExitCode::SUCCESS)
    }
}

/// All addresses of this machine: those of IPv4, and of IPv6 too where the server is known by one. `::` takes both.
fn everywhere(advertise: IpAddr) -> IpAddr {
    match advertise {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

impl AgentSettings {
    /// Lets the controllers give nodes their ranges and certificates.
    fn allow(&self, options: &ServerOptions, advertise: IpAddr, config: &mut Config) -> Result<(), BoxError> {
        let services = options.service_cluster_ip_range.all().to_vec();
        let pods = self.cluster_cidr.iter().map(|range| range_of(*range));
        let cidrs = NodeCidrs::new(ranges_with_masks(self.cluster_cidr))?;
        config.signing_duration = self.cluster_signing_duration.0;
        config.node_monitor_grace = self.node_monitor_grace_period.0;
        config.node_cidrs = Some(cidrs.without(services.clone()));
        config.node_certificates = Some(NodeCertificates {
            users: vec![PROXY_USER.into(), DNS_USER.into()],
            protected: services.into_iter().chain(pods).chain([host_of(advertise)]).collect(),
            servers: joining::server_list(),
        });
        Ok(())
    }

    /// The address that others know, and the machine's own of the other family of pods.
    async fn own_addresses(&self, advertise: IpAddr) -> Result<Addresses, BoxError> {
        let known = IpFamily::of(advertise);
        let others: Vec<IpFamily> =
            self.cluster_cidr.families().into_iter().filter(|family| *family != known).take(1).collect();
        let found = ferrite_network::node_addresses(&others).await?;
        Ok(Addresses::new(std::iter::once(advertise).chain(found))?)
    }

    /// The address of the DNS Service, if there is one.
    fn dns_service(&self, options: &ServerOptions) -> Option<IpAddr> {
        let address = options.service_cluster_ip_range.dns_address();
        let reached = |address: &IpAddr| self.cluster_cidr.of(IpFamily::of(*address)).is_some();
        address.filter(reached).filter(|_| !self.no_dns)
    }

    /// Publishes the settings for agents, and follows them. Returns the routes to remove at the end.
    async fn start(
        &self,
        paths: &Paths,
        options: &ServerOptions,
        api: &ApiServerHandle,
        advertise: IpAddr,
        scope: &Scope,
    ) -> Result<Option<RouterConfig>, BoxError> {
        let ranges = &options.service_cluster_ip_range;
        let pods = self.cluster_cidr;
        let services = ranges.for_pods(pods);
        let settings = ClusterSettings {
            pods,
            services,
            api_service: ranges.first_address(),
            dns: self.dns_service(options),
            domain: self.cluster_domain.clone(),
            stub_domains: Vec::new(),
        };
        let admin = api.client("system:apiserver", &["system:masters"]);
        Box::pin(joining::publish(&admin, api.pki.ca(), &settings, advertise)).await?;
        // The server asks pods: webhooks, aggregated APIs, proxies. It reaches those of nodes on its own segment.
        let config = RouterConfig {
            bridge: paths.bridge(),
            node_ips: self.own_addresses(advertise).await?,
            pod_cidrs: None,
            cluster_cidrs: pods,
            service_cidrs: services,
            encapsulation: Encapsulation::Never,
        };
        let client = api.client(PROXY_USER, &[]);
        match node_routes::start("", config.clone(), client, scope).await {
            Ok(()) => Ok(Some(config)),
            Err(error) => {
                tracing::warn!(%error, "the API server cannot reach pods; run it as root");
                Ok(None)
            }
        }
    }
}
