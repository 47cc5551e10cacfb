//! `ferrite kube-proxy`: the service proxy as a process, for any cluster.

pub mod accepted;
mod config;
mod sysctls;
mod written;

use crate::accepted::AcceptedFlags;
use crate::apiserver::BoxError;
use crate::cli::interrupted;
use accepted::KubeProxyFlags;
use config::{
    Conntrack, DetectLocal, DetectLocalMode, HEALTHZ_PORT, KubeProxyConfiguration, METRICS_PORT, Nftables,
    NodePortRanges, Origin, Settings,
};
use ferrite_client::{Change, Informer, ListSelector, ObjectKey, Scope};
use ferrite_component::{FeatureGates, GoDuration};
use ferrite_json::json;
use ferrite_proxy::layout::LocalTraffic;
use ferrite_proxy::model::{Cidr, IpFamily};
use ferrite_proxy::{Proxy, ProxyConfig};
use k8s_openapi::api::core::v1::Node;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for the node's object and its addresses.
const NODE_PATIENCE: Duration = Duration::from_secs(60);

/// Options of the proxy, with upstream's names. All but --config, --cleanup, --master and --hostname-override are
/// ignored when there is a configuration file.
#[derive(Debug, Clone, clap::Args)]
pub struct KubeProxy {
    /// KubeProxyConfiguration file, YAML or JSON.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Remove the rules of the proxy and exit.
    #[arg(long)]
    cleanup: bool,
    /// Kubeconfig file; without it the service account of the pod is used.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Address of the API server, instead of the kubeconfig's.
    #[arg(long, value_name = "URL")]
    master: Option<String>,
    /// Name of the node; the host name by default.
    #[arg(long, value_name = "NAME")]
    hostname_override: Option<String>,
    /// The node's primary address, instead of the one its object has.
    #[arg(long, value_name = "IP")]
    bind_address: Option<String>,
    /// Fail if an address cannot be listened at.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    bind_address_hard_fail: bool,
    /// Where to serve /healthz and /livez (port 10256 if none is given).
    #[arg(long, value_name = "IP[:PORT]")]
    healthz_bind_address: Option<String>,
    /// Where to serve /metrics and /proxyMode (port 10249 if none is given).
    #[arg(long, value_name = "IP[:PORT]")]
    metrics_bind_address: Option<String>,
    /// The mode; nftables is the only one.
    #[arg(long, value_name = "MODE")]
    proxy_mode: Option<String>,
    /// Give all traffic to ClusterIPs the node's address as its source.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    masquerade_all: bool,
    /// Addresses of all pods: one range, or one of each family, separated by a comma.
    #[arg(long, value_name = "CIDR")]
    cluster_cidr: Option<String>,
    /// Way to recognise traffic of pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix.
    #[arg(long, value_name = "MODE")]
    detect_local_mode: Option<String>,
    /// The bridge that pods are on.
    #[arg(long, value_name = "NAME")]
    pod_bridge_interface: Option<String>,
    /// Prefix of the names of pods' interfaces.
    #[arg(long, value_name = "PREFIX")]
    pod_interface_name_prefix: Option<String>,
    /// Addresses of the node at which node ports answer: CIDRs, or `primary`; all by default.
    #[arg(long, value_delimiter = ',', value_name = "CIDRS")]
    nodeport_addresses: Option<Vec<String>>,
    /// The oom-score-adj of this process, between -1000 and 1000.
    #[arg(long, allow_hyphen_values = true, value_name = "SCORE")]
    oom_score_adj: Option<i32>,
    /// Tracked connections for each processor; 0 leaves the limit as it is.
    #[arg(long, value_name = "N")]
    conntrack_max_per_core: Option<u32>,
    /// The least number of tracked connections.
    #[arg(long, value_name = "N")]
    conntrack_min: Option<u32>,
    /// Timeout of tracked TCP connections that are established; 0 leaves it as it is.
    #[arg(long, value_name = "DURATION")]
    conntrack_tcp_timeout_established: Option<GoDuration>,
    /// Timeout of tracked TCP connections in CLOSE_WAIT; 0 leaves it as it is.
    #[arg(long, value_name = "DURATION")]
    conntrack_tcp_timeout_close_wait: Option<GoDuration>,
    /// Track TCP packets outside the window, too.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    conntrack_tcp_be_liberal: bool,
    /// Timeout of tracked UDP packets without an answer; 0 leaves it as it is.
    #[arg(long, value_name = "DURATION")]
    conntrack_udp_timeout: Option<GoDuration>,
    /// Timeout of tracked UDP flows; 0 leaves it as it is.
    #[arg(long, value_name = "DURATION")]
    conntrack_udp_timeout_stream: Option<GoDuration>,
    /// The time after which a failed transaction is tried again.
    #[arg(long, value_name = "DURATION")]
    iptables_sync_period: Option<GoDuration>,
    /// The least time between two transactions.
    #[arg(long, value_name = "DURATION")]
    iptables_min_sync_period: Option<GoDuration>,
    /// Port of --healthz-bind-address, for an address without one; 0 serves no health.
    #[arg(long, value_name = "PORT", default_value_t = HEALTHZ_PORT, hide_short_help = true)]
    healthz_port: u16,
    /// Port of --metrics-bind-address, for an address without one; 0 serves no metrics.
    #[arg(long, value_name = "PORT", default_value_t = METRICS_PORT, hide_short_help = true)]
    metrics_port: u16,
    /// Feature gates: only values that change nothing here.
    #[arg(long, value_name = "GATES")]
    feature_gates: Option<FeatureGates>,
    /// Set the kernel's settings and exit. The proxy itself then needs CAP_NET_ADMIN only.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    init_only: bool,
    /// Write the configuration with its defaults to a file, and exit.
    #[arg(long, value_name = "FILE")]
    write_config_to: Option<PathBuf>,
    #[command(flatten)]
    accepted: AcceptedFlags<KubeProxyFlags>,
}

impl KubeProxy {
    /// Runs until interrupted. The rules stay, so that Services work while the proxy restarts; `--cleanup` removes them.
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let families = families();
        let usual = ProxyConfig::new("");
        if self.cleanup {
            ferrite_proxy::remove_tables(&usual.table, &families).await?;
            return Ok(ExitCode::SUCCESS);
        }
        let processors =
            std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
        let (configuration, origin) = self.configuration()?;
        let settings = configuration.settings(processors, origin)?;
        let written = written::written(&configuration, &settings);
        if let Some(file) = &self.write_config_to {
            let failed = |error: &dyn std::error::Error| format!("cannot write {}: {error}", file.display());
            let text = serde_saphyr::to_string(&written).map_err(|error| failed(&error))?;
            std::fs::write(file, text).map_err(|error| failed(&error))?;
            return Ok(ExitCode::SUCCESS);
        }
        let name = match self.hostname_override.or(settings.hostname_override.clone()) {
            Some(name) => name.trim().to_lowercase(),
            None => nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
        };
        if let Err(error) = std::fs::write("/proc/self/oom_score_adj", settings.oom_score_adj.to_string()) {
            tracing::warn!(%error, "cannot set oom_score_adj");
        }
        sysctls::set(&settings.sysctls);
        if self.init_only {
            return Ok(ExitCode::SUCCESS);
        }
        let client = client(settings.kubeconfig.as_deref(), self.master.as_deref()).await?;
        let scope = Scope::new();
        let node = tokio::select! {
            node = wait_for_node(&client, &name, &scope) => node,
            signal = interrupted() => {
                signal?;
                scope.shutdown().await;
                return Ok(ExitCode::SUCCESS);
            }
        };
        let mut config = proxy_config(&settings, &name, node.as_deref(), families)?;
        config.configz = Some(ferrite_json::to_string(&json!({"kubeproxy.config.k8s.io": written}))?);
        let _proxy = Proxy::start(config, client, &scope).await?;
        interrupted().await?;
        scope.shutdown().await;
        Ok(ExitCode::SUCCESS)
    }

    /// The verbosity of logs that the configuration file asks for. What is wrong with the file is reported later.
    pub fn verbosity(&self) -> u8 {
        let read = self.config.as_deref().and_then(|file| KubeProxyConfiguration::read(file).ok());
        read.and_then(|configuration| configuration.logging.verbosity).unwrap_or(0)
    }

    /// The configuration file, else the flags in its form.
    fn configuration(&self) -> Result<(KubeProxyConfiguration, Origin), BoxError> {
        if let Some(file) = &self.config {
            return Ok((KubeProxyConfiguration::read(file)?, Origin::File));
        }
        let gates = self.feature_gates.iter().flat_map(FeatureGates::given);
        let mut configuration = KubeProxyConfiguration {
            bind_address: self.bind_address.clone(),
            bind_address_hard_fail: Some(self.bind_address_hard_fail),
            cluster_cidr: self.cluster_cidr.clone(),
            conntrack: Conntrack {
                max_per_core: self.conntrack_max_per_core,
                min: self.conntrack_min,
                tcp_be_liberal: Some(self.conntrack_tcp_be_liberal),
                tcp_close_wait_timeout: self.conntrack_tcp_timeout_close_wait,
                tcp_established_timeout: self.conntrack_tcp_timeout_established,
                udp_stream_timeout: self.conntrack_udp_timeout_stream,
                udp_timeout: self.conntrack_udp_timeout,
            },
            detect_local: DetectLocal {
                bridge_interface: self.pod_bridge_interface.clone(),
                interface_name_prefix: self.pod_interface_name_prefix.clone(),
            },
            detect_local_mode: self.detect_local_mode.clone(),
            healthz_bind_address: self.healthz_bind_address.clone(),
            metrics_bind_address: self.metrics_bind_address.clone(),
            mode: self.proxy_mode.clone(),
            nftables: Nftables {
                masquerade_all: Some(self.masquerade_all),
                // As upstream, these flags are for the mode nftables, too.
                min_sync_period: self.iptables_min_sync_period,
                sync_period: self.iptables_sync_period,
                ..Nftables::default()
            },
            feature_gates: Some(gates.map(|(name, value)| ((*name).to_owned(), *value)).collect()),
            node_port_addresses: self.nodeport_addresses.clone(),
            oom_score_adj: self.oom_score_adj,
            ..KubeProxyConfiguration::default()
        };
        configuration.client_connection.kubeconfig = self.kubeconfig.clone();
        let origin = Origin::Flags { healthz_port: self.healthz_port, metrics_port: self.metrics_port };
        Ok((configuration, origin))
    }
}

/// The families that the kernel has.
fn families() -> Vec<IpFamily> {
    let six = Path::new("/proc/net/if_inet6").exists();
    IpFamily::BOTH.into_iter().filter(|family| *family == IpFamily::V4 || six).collect()
}

async fn client(kubeconfig: Option<&Path>, master: Option<&str>) -> Result<kube::Client, BoxError> {
    let master = master.filter(|master| !master.is_empty());
    let parse = |url: &str| url.parse::<http::Uri>().map_err(|e| format!("--master {url}: {e}"));
    let master = master.map(parse).transpose()?;
    let mut config = match kubeconfig {
        Some(path) => {
            let file = kube::config::Kubeconfig::read_from(path)?;
            kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default()).await?
        }
        // As upstream: an address alone is a server without credentials.
        None => match &master {
            Some(url) => kube::Config::new(url.clone()),
            None => kube::Config::incluster_env().map_err(|error| {
                format!("no --kubeconfig and no --master, and this is no pod with a service account: {error}")
            })?,
        },
    };
    if let Some(url) = master {
        config.cluster_url = url;
    }
    Ok(kube::Client::try_from(config)?)
}

/// Waits until the node has addresses. The proxy works without, but node ports and firewalls know less.
async fn wait_for_node(client: &kube::Client, name: &str, scope: &Scope) -> Option<Arc<Node>> {
    let scope = scope.child();
    let selector = ListSelector::fields(format!("metadata.name={name}"));
    let nodes: Informer<Node> = Informer::start(ferrite_client::Api::all(client.clone()), selector, &scope);
    let changed = Arc::new(tokio::sync::Notify::new());
    let notify = Arc::clone(&changed);
    nodes.subscribe(move |_: &Change<Node>| notify.notify_one());
    let key = ObjectKey::cluster(name);
    let found = async {
        loop {
            match nodes.get(&key).filter(|node| !addresses(node).is_empty()) {
                Some(node) => return node,
                None => changed.notified().await,
            }
        }
    };
    let node = tokio::time::timeout(NODE_PATIENCE, found).await.ok();
    if node.is_none() {
        tracing::error!(node = name, "the node has no addresses yet; going on without");
    }
    scope.shutdown().await;
    node
}

/// The node's addresses, internal ones first.
fn addresses(node: &Node) -> Vec<IpAddr> {
    let listed = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let of = |kind: &'static str| {
        listed
            .iter()
            .filter(move |address| address.type_ == kind)
            .filter_map(|address| address.address.parse().ok())
    };
    of("InternalIP").chain(of("ExternalIP")).collect()
}

fn proxy_config(
    settings: &Settings,
    name: &str,
    node: Option<&Node>,
    families: Vec<IpFamily>,
) -> Result<ProxyConfig, BoxError> {
    let mut node_ips: Vec<IpAddr> = settings.bind_address.into_iter().collect();
    for address in node.map(addresses).unwrap_or_default() {
        if !node_ips.iter().any(|known| known.is_ipv4() == address.is_ipv4()) {
            node_ips.push(address);
        }
    }
    let local_traffic = match &settings.detect_local {
        DetectLocalMode::None => LocalTraffic::Unknown,
        DetectLocalMode::ClusterCidr(ranges) => LocalTraffic::Cidrs(ranges.clone()),
        DetectLocalMode::BridgeInterface(link) => LocalTraffic::Interface(link.clone()),
        DetectLocalMode::InterfaceNamePrefix(prefix) => LocalTraffic::InterfacePrefix(prefix.clone()),
        DetectLocalMode::NodeCidr => {
            let ranges = node.and_then(|node| node.spec.as_ref()).and_then(|spec| spec.pod_cidrs.as_deref());
            let ranges = ranges
                .unwrap_or_default()
                .iter()
                .map(|text| text.parse())
                .collect::<Result<Vec<Cidr>, _>>()?;
            if ranges.is_empty() {
                return Err(format!("detectLocalMode NodeCIDR: node {name} has no podCIDRs").into());
            }
            LocalTraffic::Cidrs(ranges)
        }
    };
    Ok(ProxyConfig {
        node_port_addresses: match &settings.node_ports {
            NodePortRanges::Primary => node_ips.iter().map(|ip| Cidr::single(*ip)).collect(),
            NodePortRanges::Ranges(ranges) => ranges.clone(),
        },
        node_ips,
        families,
        masquerade_all: settings.masquerade_all,
        masquerade_bit: settings.masquerade_bit,
        local_traffic,
        min_sync_period: settings.min_sync_period,
        sync_period: settings.sync_period,
        bind_address_hard_fail: settings.bind_address_hard_fail,
        healthz_bind_address: settings.healthz,
        metrics_bind_address: settings.metrics,
        ..ProxyConfig::new(name)
    })
}
