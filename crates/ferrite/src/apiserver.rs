//! The API server with its store, PKI and sockets: alone as `kube-apiserver`, or as part of a cluster.

use crate::addresses::{listening_names, machine_addresses};
use crate::auditing::AuditOptions;
use crate::authority;
use crate::certificate_files::CertificateFiles;
use crate::front_proxies::RequestHeaderOptions;
use crate::joining;
use crate::kubeconfig::{self, Access};
use crate::own_certificates::OwnCertificateSource;
use crate::paths::Paths;
use crate::serving::ServingOptions;
use crate::standalone::StandaloneOptions;
use crate::storage::{Storage, StorageOptions};
use crate::webhook_client::WebhookClients;
use ferrite_apiserver::{
    AdmissionPlugins, ApiServer, Component, Config, EndpointReconciler, InProcessClient, ServingTls, User,
    WriteGuard,
};
use ferrite_client::{Fence, Scope};
use ferrite_component::FeatureGates;
use ferrite_controllers::{Clients, Identity};
use ferrite_network::{Cidr, Cidrs};
use ferrite_pki::{ClusterPki, Purpose, Subject};
use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Options of the API server that the user may set.
#[derive(Debug, Clone, clap::Args)]
pub struct ServerOptions {
    /// Address to listen on; 0.0.0.0 is all. By default `up` listens where only this machine and its pods reach it, a
    /// server without a node on all addresses. `up` always listens for its pods and nodes, too.
    #[arg(long, value_name = "IP")]
    pub bind_address: Option<IpAddr>,
    /// Port of the API.
    #[arg(long, visible_alias = "port", default_value_t = 6443, value_name = "PORT")]
    pub secure_port: u16,
    /// Addresses of Services: one range, or one of IPv4 and one of IPv6, the primary family's first.
    #[arg(long, default_value = "10.96.0.0/12", value_name = "CIDR[,CIDR]", value_parser = parse_service_ranges)]
    pub service_cluster_ip_range: ServiceRanges,
    /// Ports that Services may open on every node.
    #[arg(long, default_value = "30000-32767", value_name = "A-B", value_parser = parse_ports)]
    pub service_node_port_range: PortRange,
    #[command(flatten)]
    pub storage: StorageOptions,
    #[command(flatten)]
    pub serving: ServingOptions,
    /// The issuer of service account tokens. Given several times, the first signs and all are accepted.
    #[arg(long, default_value = "https://kubernetes.default.svc", value_name = "URL")]
    pub service_account_issuer: Vec<String>,
    /// Let tokens that are mounted into pods live for a year instead of an hour, for clients that never read them again.
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub service_account_extend_token_expiration: bool,
    /// Versions and resources to turn on or off: `api/beta=true,apps/v1/daemonsets=false`.
    #[arg(long, value_delimiter = ',', value_name = "KEY=BOOL", value_parser = parse_runtime_config)]
    pub runtime_config: Vec<(String, bool)>,
    /// Features to turn on or off: `A=true,B=false`.
    #[arg(long, value_name = "GATES")]
    pub feature_gates: Option<FeatureGates>,
    /// Admission plugins to turn on beside those that are on by default.
    #[arg(long, value_delimiter = ',', value_name = "PLUGINS")]
    pub enable_admission_plugins: Vec<String>,
    /// Admission plugins to turn off.
    #[arg(long, value_delimiter = ',', value_name = "PLUGINS")]
    pub disable_admission_plugins: Vec<String>,
    /// File with the configuration of admission plugins: an AdmissionConfiguration.
    #[arg(long, value_name = "FILE")]
    pub admission_control_config_file: Option<std::path::PathBuf>,
    /// Let bearers of bootstrap tokens in: secrets of type `bootstrap.kubernetes.io/token` in `kube-system`.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub enable_bootstrap_token_auth: bool,
    /// The way to maintain the addresses of the Service `kubernetes`: those of every live server, or not at
    /// all.
    #[arg(long, value_enum, default_value_t, value_name = "TYPE")]
    pub endpoint_reconciler_type: EndpointReconcilerType,
    #[command(flatten)]
    pub request_header: RequestHeaderOptions,
    #[command(flatten)]
    pub audit: AuditOptions,
}

/// Upstream's `--endpoint-reconciler-type`, without the deprecated `master-count`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EndpointReconcilerType {
    /// Every server that lives, by its lease.
    #[default]
    Lease,
    /// Somebody else keeps them.
    None,
}

pub fn read_file(flag: &str, file: &std::path::Path) -> Result<String, BoxError> {
    std::fs::read_to_string(file).map_err(|e| format!("cannot read --{flag} {}: {e}", file.display()).into())
}

/// A key alone turns on, as upstream.
fn parse_runtime_config(text: &str) -> Result<(String, bool), String> {
    match text.split_once('=') {
        None => Ok((text.to_owned(), true)),
        Some((key, value)) => value
            .parse()
            .map(|on| (key.to_owned(), on))
            .map_err(|_| format!("{value:?} is neither true nor false")),
    }
}

/// Ranges of addresses for pods or nodes: one, or one of each family. Host bits are cut off.
pub fn parse_cidrs(text: &str) -> Result<Cidrs, String> {
    let read = |text: &str| {
        let bad = || format!("{text:?} is not a network like 10.244.0.0/16 or fd00:10:244::/56");
        let (address, prefix) = text.trim().split_once('/').ok_or_else(bad)?;
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let (widest, narrowest) = if address.is_ipv4() { (8, 30) } else { (8, 126) };
        let prefix: u8 = prefix.parse().ok().filter(|p| (widest..=narrowest).contains(p)).ok_or_else(bad)?;
        Cidr::containing(address, prefix).ok_or_else(bad)
    };
    let ranges = text.split(',').map(read).collect::<Result<Vec<_>, _>>()?;
    Cidrs::new(ranges).map_err(|error| error.to_string())
}

/// The ranges Services get their addresses from: one, or one of each family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceRanges(Vec<ferrite_api::Cidr>);

impl ServiceRanges {
    pub fn all(&self) -> &[ferrite_api::Cidr] {
        &self.0
    }

    /// The address of the API server's own Service: the first of the primary range.
    pub fn first_address(&self) -> IpAddr {
        let primary = self.0[0];
        primary.address_of(ferrite_api::address_number(primary.address).0 + 1)
    }

    /// The address of the cluster's DNS Service: the tenth of the primary range, as kubeadm chooses. None if the range
    /// is too small for it.
    pub fn dns_address(&self) -> Option<IpAddr> {
        let primary = self.0[0];
        let address = primary.address_of(ferrite_api::address_number(primary.address).0 + 10);
        primary.contains_host(address).then_some(address)
    }

    /// The ranges of the families of pods, in their order: Services of other families have no endpoints.
    pub fn for_pods(&self, pods: Cidrs) -> Option<Cidrs> {
        let ranges = self.0.iter().filter_map(|range| Cidr::containing(range.address, range.bits));
        let ranges: Vec<Cidr> = ranges.collect();
        let of = |family| ranges.iter().copied().find(|range| range.family() == family);
        Cidrs::new(pods.families().into_iter().filter_map(of)).ok()
    }
}

/// With upstream's limits: room for eight addresses, and no range of IPv6 wider than /64.
fn parse_service_ranges(text: &str) -> Result<ServiceRanges, String> {
    let read = |text: &str| {
        let range = ferrite_api::Cidr::parse(text.trim())
            .ok_or_else(|| format!("{text:?} is not a network like 10.96.0.0/12 or fd00::/108"))?
            .masked();
        let (widest, narrowest) = if range.address.is_ipv4() { (8, 29) } else { (64, 125) };
        match range.bits {
            bits if bits < widest => {
                Err(format!("{range} is too large: the mask must be at least /{widest}"))
            }
            bits if bits > narrowest => {
                Err(format!("{range} is too small: Services need at least 8 addresses"))
            }
            _ => Ok(range),
        }
    };
    let ranges = text.split(',').map(read).collect::<Result<Vec<_>, _>>()?;
    match ranges.as_slice() {
        [_] => Ok(ServiceRanges(ranges)),
        [first, second] if first.address.is_ipv4() != second.address.is_ipv4() => Ok(ServiceRanges(ranges)),
        [_, _] => Err("two ranges must be of different families, like 10.96.0.0/12,fd00::/108".into()),
        _ => Err("there may be one range of each family, not more than two".into()),
    }
}

/// Ports, both ends included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortRange(pub RangeInclusive<u16>);

fn parse_ports(text: &str) -> Result<PortRange, String> {
    let bad = || format!("{text:?} is not a range like 30000-32767");
    let (from, to) = text.split_once('-').ok_or_else(bad)?;
    let (from, to) = (from.parse().map_err(|_| bad())?, to.parse().map_err(|_| bad())?);
    if from == 0 || from > to {
        return Err(bad());
    }
    Ok(PortRange(from..=to))
}

/// The way to the API server for the components of its process. Clones are cheap.
#[derive(Clone)]
pub struct LocalApi {
    server: Arc<ApiServer>,
    /// Asked before each write of a component that works while it leads.
    guard: Option<WriteGuard>,
}

impl LocalApi {
    /// The same for the clients of a leader: nothing is written after the leadership.
    pub fn fenced(&self, fence: Fence) -> Self {
        Self { guard: Some(Arc::new(move || fence.is_open())), ..self.clone() }
    }

    /// A client for a component in this process.
    pub fn client(&self, user: &str, groups: &[&str]) -> kube::Client {
        let client = self.in_process(User::new(user, groups.iter().copied()));
        kube::Client::new(client, "default")
    }

    fn in_process(&self, user: User) -> InProcessClient {
        let client = self.server.in_process_client(user);
        match &self.guard {
            Some(guard) => client.guarded(Arc::clone(guard)),
            None => client,
        }
    }

    /// Clients for controllers, each with the rights of its own identity and no more.
    pub fn controller_clients(&self) -> Clients {
        let local = self.clone();
        Arc::new(move |identity| {
            let user = match identity {
                Identity::Manager => User::new(MANAGER, NO_GROUPS),
                Identity::ServiceAccount(name) => User::new(
                    format!("system:serviceaccount:kube-system:{name}"),
                    ["system:serviceaccounts", "system:serviceaccounts:kube-system"],
                ),
                Identity::Server => User::new("system:apiserver", ["system:masters"]),
            };
            let agent =
                if identity == Identity::Server { "kube-apiserver" } else { "kube-controller-manager" };
            kube::Client::new(local.in_process(user).with_agent(agent), "default")
        })
    }

    /// Reports a component of this process as well for as long as its scope lasts.
    pub fn hosts(&self, component: Component, scope: &Scope) {
        let stopping = scope.token().clone();
        self.server.hosts(component, move || match stopping.is_cancelled() {
            false => Ok(()),
            true => Err("it is stopping".to_owned()),
        });
    }
}

/// A running API server and the access to it for others.
pub struct ApiServerHandle {
    pub server: Arc<ApiServer>,
    pub pki: ClusterPki,
    /// Where clients on this machine reach it.
    pub url: String,
    serving: JoinSet<()>,
    storage: Storage,
}

/// The user of the controller manager.
const MANAGER: &str = "system:kube-controller-manager";
const NO_GROUPS: [&str; 0] = [];

/// Where a server stands.
#[derive(Debug)]
pub struct Place {
    /// Where other machines and pods reach it.
    pub address: IpAddr,
    /// Where it listens unless the options say it.
    pub listen: Vec<IpAddr>,
    /// Further names and addresses by which clients reach it.
    pub names: Vec<String>,
    /// A whole cluster has nobody else's components, so that writers of kinds on which nothing acts get a
    /// warning.
    pub whole: bool,
    /// The cluster's domain, in which the server has a name.
    pub domain: String,
    /// Certificates, keys and ways in that somebody else made.
    pub standalone: StandaloneOptions,
    /// Resources on which optional parts of the cluster act.
    pub acted_on: &'static [&'static str],
    /// Addresses of pods, where agents open tunnels to them.
    pub pod_ranges: Vec<ferrite_api::Cidr>,
}

/// The domain of clusters for which no other is chosen.
pub const CLUSTER_DOMAIN: &str = "cluster.local";

/// Listens on the same port of every address.
fn bind(addresses: &[IpAddr], mut port: u16, shared: bool) -> Result<Vec<TcpListener>, BoxError> {
    let mut listeners = Vec::with_capacity(addresses.len());
    for ip in addresses {
        let address = SocketAddr::new(*ip, port);
        let listener = listen(address, shared).map_err(|e| -> BoxError {
            match e.kind() {
                std::io::ErrorKind::AddrInUse => format!(
                    "port {port} is in use: stop what uses it (`ss -ltnp 'sport = :{port}'` shows it), or choose another with --port"
                )
                .into(),
                _ => format!("cannot listen on {address}: {e}").into(),
            }
        })?;
        // Zero is any port; all addresses share the one that was found.
        port = listener.local_addr()?.port();
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Opens a port, which other processes may open too if it is shared.
fn listen(address: SocketAddr, shared: bool) -> std::io::Result<TcpListener> {
    const BACKLOG: u32 = 1024;
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(shared)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// The server's identity towards kubelets.
const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";

/// The names every API server is known by, besides its addresses.
const NAMES: [&str; 4] = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"];

impl ApiServerHandle {
    /// Opens the store, makes certificates and serves.
    pub async fn start(paths: &Paths, options: &ServerOptions, place: &Place) -> Result<Self, BoxError> {
        let node_address = place.address;
        let addresses = options.bind_address.as_ref().map_or(&place.listen[..], std::slice::from_ref);
        let listeners = bind(addresses, options.secure_port, place.standalone.permit_port_sharing)?;
        let listening = listeners.first().ok_or("there is no address to listen on")?.local_addr()?;
        let storage = Storage::open(paths, &options.storage, node_address).await?;
        let store = Arc::clone(&storage.store);
        let pki = match place.whole {
            true => authority::open(&store, &paths.pki()).await?,
            false => ClusterPki::open(&paths.pki())?,
        };
        let service_ip = options.service_cluster_ip_range.first_address();
        let mut names: Vec<String> = NAMES.map(str::to_owned).to_vec();
        names.extend([
            format!("kubernetes.default.svc.{}", place.domain),
            IpAddr::from(Ipv4Addr::LOCALHOST).to_string(),
            service_ip.to_string(),
            node_address.to_string(),
        ]);
        names.extend(place.names.iter().cloned());
        names.extend(listening_names(addresses, &machine_addresses(addresses).await));
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        let subject = Subject { common_name: "kube-apiserver".into(), organization: None, names };
        let standalone = &place.standalone;
        // An identity that kubelets know and that has no rights here: authors of nodes choose where it is shown.
        let kubelet_subject = Subject::client(KUBELET_CLIENT, None);
        let source = OwnCertificateSource {
            dir: paths.pki(),
            serving: subject,
            kubelet_client: kubelet_subject,
            request_header: options.request_header.clone(),
        };
        let own = source.ensure()?;
        let files = CertificateFiles::new(standalone, &options.request_header, own);
        let loaded = files.load()?;
        let tls = ServingTls::from(files.tls(&loaded)?);
        let certificates = loaded.certificates();
        let (signing_key, other_token_keys) = standalone.token_keys()?;
        let signing_key = match signing_key {
            Some(key) => key,
            None => pki.service_account_key()?,
        };
        let (issuer, other_issuers) =
            options.service_account_issuer.split_first().ok_or("--service-account-issuer is empty")?;
        let usual = Config::new(SocketAddr::new(node_address, listening.port()));
        let authorization = standalone.authorization.read().await?;
        let authorization = authorization.unwrap_or_else(|| usual.authorization.clone());
        let by_name = [&options.enable_admission_plugins, &options.disable_admission_plugins];
        if !standalone.admission_control.is_empty() && by_name.iter().any(|names| !names.is_empty()) {
            return Err("admission-control and enable-admission-plugins/disable-admission-plugins flags are mutually exclusive".into());
        }
        let mut configurations = match &options.admission_control_config_file {
            Some(file) => ferrite_apiserver::read_admission_config(file)?,
            None => ferrite_apiserver::Configurations::new(),
        };
        if let Some(tolerations) = standalone.tolerations() {
            configurations.insert("DefaultTolerationSeconds".into(), tolerations);
        }
        let config = Config {
            service_ranges: options.service_cluster_ip_range.all().to_vec(),
            node_ports: options.service_node_port_range.0.clone(),
            pod_ranges: place.pod_ranges.clone(),
            kubelet_client: certificates.kubelet_client,
            kubelet_addresses: standalone.kubelet_addresses().unwrap_or(usual.kubelet_addresses.clone()),
            runtime_config: options.runtime_config.iter().cloned().collect(),
            feature_gates: options.feature_gates.clone().unwrap_or_default(),
            service_account_issuer: issuer.clone(),
            other_issuers: other_issuers.to_vec(),
            other_token_keys,
            api_audiences: standalone.api_audiences.clone(),
            max_token_seconds: standalone.max_token_seconds(),
            keys_url: standalone.service_account_jwks_uri.clone(),
            health_checks: storage.health_checks(),
            jwt: standalone.jwt(&options.service_account_issuer)?,
            static_tokens: standalone.static_tokens()?,
            token_webhook: standalone.token_webhook.read().await?,
            anonymous_auth: standalone.anonymous_auth(&authorization.modes),
            authorization,
            event_ttl_seconds: standalone
                .event_ttl
                .map_or(usual.event_ttl_seconds, |ttl| ttl.as_secs().max(1)),
            extend_token_expiration: options.service_account_extend_token_expiration,
            service_account_key: Some(signing_key),
            client_ca: certificates.client_ca,
            request_header: certificates.request_header,
            proxy_client: certificates.proxy_client,
            serving: options.serving.to_serving()?,
            warns_of_inert: place.whole,
            acted_on: place.acted_on,
            // As upstream, a server of its own has the metrics of a metrics-server that somebody installs.
            mounted: if place.whole {
                vec![Arc::new(ferrite_metrics::ResourceMetrics::default())]
            } else {
                Vec::new()
            },
            bootstrap_tokens: options.enable_bootstrap_token_auth,
            endpoint_reconciler: match options.endpoint_reconciler_type {
                EndpointReconcilerType::Lease => EndpointReconciler::Lease,
                EndpointReconcilerType::None => EndpointReconciler::None,
            },
            host_name: nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
            audit: options.audit.read().await?,
            external_host: standalone.external_hostname.clone(),
            kubernetes_service_node_port: standalone.kubernetes_service_node_port,
            rejects_redirects: standalone.aggregator_reject_forwarding_redirect,
            admission: AdmissionPlugins {
                enable: options.enable_admission_plugins.clone(),
                disable: options.disable_admission_plugins.clone(),
                configurations,
                only: (!standalone.admission_control.is_empty())
                    .then(|| standalone.admission_control.clone()),
                webhook_senders: Some(Arc::new(WebhookClients)),
            },
            ..usual
        };
        config.feature_gates.report();
        let server = ApiServer::start(store, config).await?;
        server.run_until_stopped(files.follow(source, Arc::clone(&server), tls.clone(), loaded));
        let mut serving = JoinSet::new();
        for listener in listeners {
            serving.spawn(Arc::clone(&server).serve(listener, tls.clone()));
        }
        let host = match listening.ip() {
            ip if ip.is_unspecified() => IpAddr::from(Ipv4Addr::LOCALHOST),
            ip => ip,
        };
        let url = format!("https://{}", SocketAddr::new(host, listening.port()));
        let running = Self { server, pki, url, serving, storage };
        running.let_into_kubelets().await?;
        Ok(running)
    }

    /// Kubelets ask this server for the rights of their callers; its own identity is one of them.
    async fn let_into_kubelets(&self) -> Result<(), BoxError> {
        let bindings = ferrite_client::Api::all(self.client("system:apiserver", &["system:masters"]));
        let subject = ferrite_json::json!({"kind": "User", "name": KUBELET_CLIENT});
        let binding = joining::binding("ferrite:kubelet-api-admin", "system:kubelet-api-admin", subject);
        Ok(joining::ensure::<k8s_openapi::api::rbac::v1::ClusterRoleBinding>(&bindings, binding).await?)
    }

    /// A client for a component in this process.
    pub fn client(&self, user: &str, groups: &[&str]) -> kube::Client {
        self.local().client(user, groups)
    }

    /// The way to the server within this process.
    pub fn local(&self) -> LocalApi {
        LocalApi { server: Arc::clone(&self.server), guard: None }
    }

    /// Returns true if other servers may use the same store.
    pub fn is_shared(&self) -> bool {
        self.storage.store.is_remote()
    }

    /// The controllers' settings that are not in the cluster's API.
    pub fn controllers_config(&self) -> Result<ferrite_controllers::Config, BoxError> {
        let issuer = &self.server.config().service_account_issuer;
        let tokens = ferrite_pki::TokenSigner::new(&self.pki.service_account_key()?, issuer)?;
        Ok(ferrite_controllers::Config {
            root_ca: Some(self.pki.ca().to_owned()),
            feature_gates: self.server.config().feature_gates.clone(),
            signers: ferrite_controllers::Signers::all(Arc::new(self.pki.authority()?)),
            tokens: Some(Arc::new(tokens)),
            ..Default::default()
        })
    }

    /// Writes the administrator's kubeconfig beside the configuration.
    pub fn write_admin_kubeconfig(&self, paths: &Paths) -> Result<(), BoxError> {
        self.with_admin(|access| {
            Ok(kubeconfig::write(&paths.admin_kubeconfig(), &kubeconfig::standalone(&paths.cluster, access))?)
        })
    }

    /// Gives `use_access` the administrator's way in.
    pub fn with_admin<T>(
        &self,
        use_access: impl FnOnce(&Access<'_>) -> Result<T, BoxError>,
    ) -> Result<T, BoxError> {
        with_admin(&self.pki, &self.url, use_access)
    }

    /// Ends watches and connections, then the store.
    pub async fn stop(mut self) {
        self.server.shutdown().await;
        self.serving.shutdown().await;
        self.storage.stop().await;
    }
}

/// Gives `use_access` the administrator's way to a server at `url`.
pub fn with_admin<T>(
    pki: &ClusterPki,
    url: &str,
    use_access: impl FnOnce(&Access<'_>) -> Result<T, BoxError>,
) -> Result<T, BoxError> {
    let subject = Subject::client("kubernetes-admin", Some("system:masters"));
    let admin = pki.ensure("admin", &subject, Purpose::Client)?;
    use_access(&Access { server: url, ca: pki.ca(), certificate: &admin.certificate, key: &admin.key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_one_range_of_each_family() {
        for (text, first) in [
            ("10.96.0.0/12", Some("10.96.0.1")),
            ("10.96.3.4/16", Some("10.96.0.1")),
            ("fd00::/108", Some("fd00::1")),
            ("10.0.0.0/24,fd00::/112", Some("10.0.0.1")),
            ("fd00::/112, 10.0.0.0/24", Some("fd00::1")),
            ("10.0.0.0/24,10.1.0.0/24", None),
            ("10.0.0.0/24,fd00::/112,fd01::/112", None),
            ("10.0.0.0/30", None),
            ("10.0.0.0/4", None),
            ("fd00::/48", None),
            ("fd00::/128", None),
            ("", None),
            ("10.0.0.0", None),
        ] {
            let ranges = parse_service_ranges(text);
            assert_eq!(ranges.map(|r| r.first_address().to_string()).ok().as_deref(), first, "{text}");
        }
    }

    #[test]
    fn the_dns_service_has_the_tenth_address_of_the_primary_range() {
        for (text, want) in [
            ("10.96.0.0/12", Some("10.96.0.10")),
            ("fd00::/108,10.0.0.0/24", Some("fd00::a")),
            ("10.0.0.16/28", Some("10.0.0.26")),
            ("10.0.0.0/29", None),
        ] {
            let ranges = parse_service_ranges(text).unwrap();
            assert_eq!(ranges.dns_address().map(|a| a.to_string()).as_deref(), want, "{text}");
        }
    }
}
