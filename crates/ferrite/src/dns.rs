//! The cluster's DNS server as a part of a cluster: its addresses, its clients, and its objects in the API.

use crate::apiserver::{ApiServerHandle, BoxError, CLUSTER_DOMAIN, LocalApi};
use crate::cluster::{host_of, range_of};
use ferrite_api::Cidr;
use ferrite_client::{Api, Informer, Object, Scope, is_already_exists, is_not_found, message_of};
use ferrite_component::{PlainLimits, serve_plain};
use ferrite_dns::{
    Config, DNS_NAMESPACE, DNS_SERVICE, Dns, Listen, Patience, StubDomain, bind_tcp, domain_name,
};
use ferrite_json::{Value, json};
use ferrite_network::{Addresses, Bridge, Cidrs, IpFamily};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use k8s_openapi::api::core::v1::{Node, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

const DNS_PORT: u16 = 53;
const METRICS_PORT: u16 = 9153;
/// The account of DNS in an upstream cluster; others may have granted it rights.
const ACCOUNT: &str = "coredns";
pub const ROLE: &str = "system:coredns";
const FIELD_MANAGER: &str = "ferrite-dns";
const SCRAPERS: PlainLimits =
    PlainLimits { connections: 16, head: Duration::from_secs(5), connection: Duration::from_secs(5) };
const AGAIN: Duration = Duration::from_secs(10);

/// Options of name resolution.
#[derive(Debug, Clone, clap::Args)]
pub struct DnsOptions {
    /// Serve no cluster DNS: pods resolve names as the node does.
    #[arg(long)]
    pub no_dns: bool,
    /// The domain of the cluster's names.
    #[arg(long, default_value = CLUSTER_DOMAIN, value_name = "DOMAIN", value_parser = parse_domain)]
    pub cluster_domain: String,
    /// The node's resolver configuration, for names outside the cluster.
    #[arg(long, default_value = "/etc/resolv.conf", value_name = "FILE")]
    pub resolv_conf: PathBuf,
    /// Resolvers of a domain other than the node's: `corp.example=192.0.2.53`. Several resolvers are separated by `+`;
    /// a port is given as in 192.0.2.53:5353.
    #[arg(long, value_delimiter = ',', value_name = "DOMAIN=IP", value_parser = parse_stub_domain)]
    pub dns_stub_domain: Vec<StubDomain>,
}

pub fn parse_domain(text: &str) -> Result<String, String> {
    let domain = text.trim_end_matches('.').to_ascii_lowercase();
    match domain_name(&domain) {
        Ok(name) if !name.is_root() => Ok(domain),
        Ok(_) => Err("the cluster's domain cannot be empty".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_stub_domain(text: &str) -> Result<StubDomain, String> {
    let (domain, servers) =
        text.split_once('=').ok_or_else(|| format!("{text:?} is not like corp.example=192.0.2.53"))?;
    let domain = domain_name(domain).map_err(|error| error.to_string())?;
    let server = |text: &str| {
        let ip = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, DNS_PORT));
        ip.or_else(|_| text.parse()).map_err(|_| format!("{text:?} is no address of a resolver"))
    };
    let servers = servers.split('+').map(server).collect::<Result<Vec<_>, _>>()?;
    Ok(StubDomain { domain, servers })
}

/// The text that [`parse_stub_domain`] reads.
fn stub_domain_text(stub: &StubDomain) -> String {
    let servers: Vec<String> = stub.servers.iter().map(ToString::to_string).collect();
    format!("{}={}", stub.domain.to_ascii(), servers.join("+"))
}

/// Stub domains as one text, for nodes that join.
pub fn stub_domains_text(stubs: &[StubDomain]) -> String {
    stubs.iter().map(stub_domain_text).collect::<Vec<_>>().join(",")
}

/// Reads the text of [`stub_domains_text`].
pub fn parse_stub_domains(text: &str) -> Result<Vec<StubDomain>, String> {
    text.split(',').filter(|text| !text.is_empty()).map(parse_stub_domain).collect()
}

/// The running DNS server of this node.
pub struct ClusterDns {
    /// The name server of pods.
    pub address: IpAddr,
    dns: Arc<Dns>,
    /// True if its metrics are served.
    metrics: bool,
}

/// The settings of a node's DNS server.
pub struct DnsPlace<'a> {
    /// The domain of the cluster's names.
    pub domain: &'a str,
    pub resolv_conf: &'a Path,
    pub stub_domains: &'a [StubDomain],
    /// The address of the Service.
    pub service: Option<IpAddr>,
    /// Addresses of all pods.
    pub pods: Cidrs,
    pub node_ips: Addresses,
    /// Pods of another runtime come from interfaces that we do not know.
    pub own_runtime: bool,
}

impl ClusterDns {
    /// Listens on the bridge's address and on the Service's. The sockets hear the bridge and this machine, and nothing
    /// from other interfaces: there is no recursion for strangers. Names are known once the server is fed.
    pub async fn start(place: &DnsPlace<'_>, bridge: &Bridge, scope: &Scope) -> Result<Self, BoxError> {
        let gateways = bridge.gateways();
        let mut own: Vec<IpAddr> = gateways.iter().copied().collect();
        // Pods reach addresses of their own families only.
        let service = place.service.filter(|address| gateways.of(IpFamily::of(*address)).is_some());
        if let Some(address) = service {
            // The address is the node's own, so that it works without a service proxy and no packet to it can leave.
            bridge.add_node_address(address).await?;
            own.push(address);
        }
        let device = place.own_runtime.then(|| bridge.name().to_owned());
        let pods = clients(place.pods, &own, place.node_ips);
        let at = |device: Option<&str>, port, clients: &[Cidr]| -> Vec<Listen> {
            let listen = |ip: &IpAddr| Listen {
                address: SocketAddr::new(*ip, port),
                device: device.map(str::to_owned),
                clients: clients.to_vec(),
            };
            own.iter().map(listen).collect()
        };
        let config = Config {
            domain: place.domain.to_owned(),
            listen: at(device.as_deref(), DNS_PORT, &pods),
            // Whatever its source is, a packet from there is this machine's.
            listen_if_free: if device.is_some() { at(Some("lo"), DNS_PORT, &[]) } else { Vec::new() },
            resolv_conf: place.resolv_conf.to_owned(),
            stub_domains: place.stub_domains.to_vec(),
            patience: Patience::default(),
        };
        let dns = Arc::new(Dns::start(config, scope).map_err(explain)?);
        let metrics = at(device.as_deref(), METRICS_PORT, &pods).into_iter().next();
        let metrics = metrics.and_then(|listen| serve_metrics(&listen, &dns, scope)).is_some();
        let address = service.unwrap_or(*gateways.primary());
        Ok(Self { address, dns, metrics })
    }

    /// Keeps the names as the API has them. The client has the rights of CoreDNS.
    pub fn feed(&self, client: kube::Client, scope: &Scope) {
        let (fed, tasks) = (Arc::clone(&self.dns), scope.clone());
        scope.spawn(async move { fed.feed(client, &tasks).await });
    }

    /// Feeds the server of the cluster's own node, and publishes the Service. With `nodes`, every node that has pods
    /// answers for itself; else this one answers for all.
    pub fn serve_cluster(
        &self,
        service: Option<IpAddr>,
        gateways: Addresses,
        nodes: Option<Informer<Node>>,
        api: &ApiServerHandle,
        scope: &Scope,
    ) {
        let endpoint = service.and_then(|service| gateways.of(IpFamily::of(service)).copied());
        let endpoint = endpoint.unwrap_or(*gateways.primary());
        let objects = Objects { service, endpoint, metrics: self.metrics, local: nodes.is_some() };
        let (admin, client) = (api.client("system:apiserver", &["system:masters"]), identity(api));
        let (fed, tasks, writer) = (Arc::clone(&self.dns), scope.clone(), admin.clone());
        scope.spawn(async move {
            // Without the account's rights the informers would be refused.
            until_written("rights", || ensure_rights(&writer)).await;
            fed.feed(client, &tasks).await;
        });
        // Names are answered without the Service: somebody may have taken its address.
        scope.spawn(async move {
            until_written("Service", || objects.ensure(&admin)).await;
            if let Some(nodes) = nodes {
                objects.follow(&nodes, &admin).await;
            }
        });
    }

    /// Waits until the server knows all names.
    pub async fn synced(&self) {
        self.dns.synced().await;
    }
}

/// Publishes the Service of a cluster in which each node answers for itself.
pub fn publish(service: IpAddr, nodes: Informer<Node>, api: &LocalApi, scope: &Scope) {
    // The bridges of nodes are the endpoints; only the family of this one counts.
    let objects = Objects { service: Some(service), endpoint: service, metrics: true, local: true };
    let admin = api.client("system:apiserver", &["system:masters"]);
    scope.spawn(async move {
        until_written("rights", || ensure_rights(&admin)).await;
        until_written("Service", || objects.ensure(&admin)).await;
        objects.follow(&nodes, &admin).await;
    });
}

/// The server's client has the rights of CoreDNS's account and no more.
fn identity(api: &ApiServerHandle) -> kube::Client {
    let user = format!("system:serviceaccount:{DNS_NAMESPACE}:{ACCOUNT}");
    let groups = ["system:serviceaccounts", "system:serviceaccounts:kube-system"];
    api.client(&user, &groups)
}

fn explain(error: ferrite_dns::StartError) -> BoxError {
    match &error {
        ferrite_dns::StartError::Listen { address, source } if source.kind() == std::io::ErrorKind::AddrInUse => {
            format!(
                "port {DNS_PORT} of {} is in use: stop what uses it (`ss -lnp 'sport = :{DNS_PORT}'` shows it), let it listen on its own addresses only, or start without cluster DNS with --no-dns",
                address.ip()
            )
            .into()
        }
        _ => error.into(),
    }
}

/// Pods, and this machine by whichever of its addresses it asks from.
fn clients(pods: Cidrs, own: &[IpAddr], node_ips: Addresses) -> Vec<Cidr> {
    let mut clients: Vec<Cidr> = pods.iter().map(|range| range_of(*range)).collect();
    clients.push(Cidr { address: Ipv4Addr::new(127, 0, 0, 0).into(), bits: 8 });
    clients.push(host_of(Ipv6Addr::LOCALHOST.into()));
    clients.extend(own.iter().chain(node_ips.iter()).map(|ip| host_of(*ip)));
    clients
}

/// Serves `/metrics`; None where the port is taken, which stops nothing else.
fn serve_metrics(listen: &Listen, dns: &Arc<Dns>, scope: &Scope) -> Option<()> {
    let listener = match bind_tcp(listen) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(address = %listen.address, %error, "DNS metrics are not served");
            return None;
        }
    };
    let dns = Arc::clone(dns);
    scope.spawn(serve_plain(listener, SCRAPERS, move |request: Request<Incoming>| {
        let response = metrics_page(&dns, request.uri().path());
        async move { response }
    }));
    Some(())
}

fn metrics_page(dns: &Dns, path: &str) -> Response<Full<Bytes>> {
    let known = path == "/metrics";
    let body = if known { dns.server().render_metrics() } else { "not found\n".to_owned() };
    let mut response = Response::new(Full::from(body));
    if !known {
        *response.status_mut() = hyper::StatusCode::NOT_FOUND;
    }
    let format = hyper::header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, format);
    response
}

/// The Service of the DNS server and where it leads.
struct Objects {
    /// The Service's address; the API server chooses one if there is none.
    service: Option<IpAddr>,
    /// Where this node answers; its family is that of all endpoints.
    endpoint: IpAddr,
    metrics: bool,
    /// Each node answers for itself, so that no packet of a pod's question leaves its node.
    local: bool,
}

/// Where a node answers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NodeEndpoint {
    node: String,
    address: IpAddr,
}

/// As many as upstream puts into a slice.
const ENDPOINTS_PER_SLICE: usize = 100;

/// The bridges of all nodes that have pods.
fn node_endpoints(nodes: &[Arc<Node>], family: IpFamily) -> Vec<NodeEndpoint> {
    let mut found: Vec<NodeEndpoint> = nodes
        .iter()
        .filter_map(|node| {
            let address = crate::node_routes::pod_cidr(node, family)?.nth(1)?;
            Some(NodeEndpoint { node: node.metadata.name.clone()?, address })
        })
        .collect();
    found.sort_by(|a, b| a.node.cmp(&b.node));
    found
}

/// Tries until the API server takes it.
async fn until_written<F>(what: &str, write: impl Fn() -> F)
where
    F: Future<Output = Result<(), kube::Error>>,
{
    while let Err(error) = write().await {
        tracing::error!(error = message_of(&error), "cannot write the {what} of the DNS server");
        tokio::time::sleep(AGAIN).await;
    }
}

/// Makes the account and its rights. Independent objects are written in parallel: each write waits for the
/// disk.
async fn ensure_rights(client: &kube::Client) -> Result<(), kube::Error> {
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), DNS_NAMESPACE);
    let roles = Api::<ClusterRole>::all(client.clone());
    let bindings = Api::<ClusterRoleBinding>::all(client.clone());
    tokio::try_join!(
        ensure(&accounts, json!({"metadata": {"name": ACCOUNT, "namespace": DNS_NAMESPACE}})),
        ensure(&roles, role()),
        ensure(&bindings, binding()),
    )?;
    Ok(())
}

impl Objects {
    async fn ensure(&self, client: &kube::Client) -> Result<(), kube::Error> {
        if self.local {
            return self.ensure_service(client).await;
        }
        tokio::try_join!(self.ensure_service(client), self.ensure_slice(client))?;
        Ok(())
    }

    /// Keeps an endpoint for each node that has pods.
    async fn follow(&self, nodes: &Informer<Node>, client: &kube::Client) {
        let wake = Arc::new(Notify::new());
        let woken = Arc::clone(&wake);
        nodes.subscribe(move |_| woken.notify_one());
        nodes.synced().await;
        let mut written = Vec::new();
        loop {
            let endpoints = node_endpoints(&nodes.list(), IpFamily::of(self.endpoint));
            if endpoints != written {
                until_written("endpoints", || self.write_slices(client, &endpoints, written.len())).await;
                written = endpoints;
            }
            wake.notified().await;
        }
    }

    /// Writes the slices, and empties those that were needed before.
    async fn write_slices(
        &self,
        client: &kube::Client,
        endpoints: &[NodeEndpoint],
        before: usize,
    ) -> Result<(), kube::Error> {
        let slices = Api::<EndpointSlice>::namespaced(client.clone(), DNS_NAMESPACE);
        let patch = PatchParams::apply(FIELD_MANAGER).force();
        let count = endpoints.len().max(before).div_ceil(ENDPOINTS_PER_SLICE).max(1);
        let mut chunks = endpoints.chunks(ENDPOINTS_PER_SLICE);
        for place in 0..count {
            let name = match place {
                0 => DNS_SERVICE.to_owned(),
                _ => format!("{DNS_SERVICE}-{place}"),
            };
            let chunk = chunks.next().unwrap_or_default();
            let slice = self.slice_object(&name, chunk.iter().map(NodeEndpoint::object).collect());
            slices.patch(&name, &patch, &Patch::Apply(slice)).await?;
        }
        Ok(())
    }

    async fn ensure_service(&self, client: &kube::Client) -> Result<(), kube::Error> {
        let services = Api::<Service>::namespaced(client.clone(), DNS_NAMESPACE);
        if let (Some(wanted), Some(there)) = (self.service, services.get_opt(DNS_SERVICE).await?) {
            let spec = there.spec.unwrap_or_default();
            let address = spec.cluster_ip.unwrap_or_default();
            if address.parse() == Ok(wanted) {
                let policy = self.policy();
                if spec.internal_traffic_policy.as_deref() != Some(policy) {
                    let patch = Patch::Merge(json!({"spec": {"internalTrafficPolicy": policy}}));
                    services.patch(DNS_SERVICE, &PatchParams::default(), &patch).await?;
                }
                return Ok(());
            }
            // The range of Services has changed since; the address of a Service cannot.
            match services.delete(DNS_SERVICE, &DeleteParams::default()).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => {}
                Err(error) => return Err(error),
            }
        }
        ensure(&services, self.service_object()).await
    }

    /// The slice says where the server is now; a cluster that starts again may have other ranges.
    async fn ensure_slice(&self, client: &kube::Client) -> Result<(), kube::Error> {
        let slices = Api::<EndpointSlice>::namespaced(client.clone(), DNS_NAMESPACE);
        let patch = PatchParams::apply(FIELD_MANAGER).force();
        let endpoint = endpoint_object(self.endpoint);
        let slice = self.slice_object(DNS_SERVICE, vec![endpoint]);
        slices.patch(DNS_SERVICE, &patch, &Patch::Apply(slice)).await.map(drop)
    }

    fn policy(&self) -> &'static str {
        if self.local { "Local" } else { "Cluster" }
    }

    fn service_object(&self) -> Value {
        let mut object = json!({
            "metadata": {
                "name": DNS_SERVICE, "namespace": DNS_NAMESPACE,
                "labels": {
                    "k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS",
                },
                "annotations": {"prometheus.io/port": METRICS_PORT.to_string(), "prometheus.io/scrape": "true"},
            },
            "spec": {"ports": self.ports("port", true), "internalTrafficPolicy": self.policy()},
        });
        if let Some(address) = self.service {
            object["spec"]["clusterIP"] = json!(address.to_string());
        }
        object
    }

    fn slice_object(&self, name: &str, endpoints: Vec<Value>) -> Value {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": name, "namespace": DNS_NAMESPACE,
                "labels": {
                    "k8s-app": "kube-dns", "kubernetes.io/service-name": DNS_SERVICE,
                    "endpointslice.kubernetes.io/managed-by": FIELD_MANAGER,
                },
            },
            "addressType": IpFamily::of(self.endpoint).api_name(),
            "endpoints": endpoints,
            "ports": self.ports("port", false),
        })
    }

    fn ports(&self, number: &str, service: bool) -> Value {
        let mut ports = vec![("dns", "UDP", DNS_PORT), ("dns-tcp", "TCP", DNS_PORT)];
        if self.metrics {
            ports.push(("metrics", "TCP", METRICS_PORT));
        }
        let port = |(name, protocol, value): (&str, &str, u16)| {
            let mut port = json!({"name": name, "protocol": protocol});
            port[number] = json!(value);
            if service {
                port["targetPort"] = json!(value);
            }
            port
        };
        ports.into_iter().map(port).collect()
    }
}

fn endpoint_object(address: IpAddr) -> Value {
    json!({
        "addresses": [address.to_string()],
        "conditions": {"ready": true, "serving": true, "terminating": false},
    })
}

impl NodeEndpoint {
    fn object(&self) -> Value {
        let mut object = endpoint_object(self.address);
        object["nodeName"] = json!(self.node);
        object
    }
}

/// The rights of CoreDNS as kubeadm grants them, without those for pods and nodes, which we do not read.
fn role() -> Value {
    json!({
        "metadata": {"name": ROLE},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    })
}

fn binding() -> Value {
    json!({
        "metadata": {"name": ROLE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": DNS_NAMESPACE}],
    })
}

/// Creates the object unless there is one of its name, which the user may have changed.
pub(crate) async fn ensure<K>(api: &Api<K>, object: Value) -> Result<(), kube::Error>
where
    K: Object,
{
    let object = K::decode(object.to_string().as_bytes())?;
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(error) if is_already_exists(&error) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options() {
        assert_eq!(parse_domain("Cluster.Local."), Ok("cluster.local".to_owned()));
        assert!(parse_domain(".").is_err() && parse_domain("a..b").is_err());
        let stub = parse_stub_domain("Corp.example=192.0.2.1+[2001:db8::1]:5353+2001:db8::2").unwrap();
        let servers: Vec<String> = stub.servers.iter().map(ToString::to_string).collect();
        assert_eq!(stub.domain.to_string(), "corp.example.");
        assert_eq!(servers, ["192.0.2.1:53", "[2001:db8::1]:5353", "[2001:db8::2]:53"]);
        for bad in ["corp.example", "corp.example=", "corp.example=x", "a..b=192.0.2.1"] {
            assert!(parse_stub_domain(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn objects_are_valid_and_name_each_other() {
        let objects = Objects {
            service: Some("10.96.0.10".parse().unwrap()),
            endpoint: "10.244.0.1".parse().unwrap(),
            metrics: true,
            local: false,
        };
        let service: Service = ferrite_json::from_value(objects.service_object()).unwrap();
        let slice: EndpointSlice = ferrite_json::from_value(
            objects.slice_object("kube-dns", vec![endpoint_object(objects.endpoint)]),
        )
        .unwrap();
        let spec = service.spec.unwrap();
        assert_eq!(spec.cluster_ip.as_deref(), Some("10.96.0.10"));
        let names = |names: Vec<Option<String>>| names.into_iter().flatten().collect::<Vec<_>>();
        let of_service = names(spec.ports.unwrap().into_iter().map(|p| p.name).collect());
        assert_eq!(of_service, ["dns", "dns-tcp", "metrics"]);
        assert_eq!(names(slice.ports.unwrap().into_iter().map(|p| p.name).collect()), of_service);
        assert_eq!(
            slice.metadata.labels.unwrap()["kubernetes.io/service-name"],
            service.metadata.name.unwrap()
        );
        let _: ClusterRole = ferrite_json::from_value(role()).unwrap();
        let _: ClusterRoleBinding = ferrite_json::from_value(binding()).unwrap();
    }
}
