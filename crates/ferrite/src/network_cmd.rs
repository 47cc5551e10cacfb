//! `ferrite network`: the data path of a pod, a Service or a name, read back from the kernel.

use crate::apiserver::BoxError;
use crate::cli::DataDir;
use crate::joining;
use crate::machines::Machines;
use crate::paths::Paths;
use crate::status::State;
use ferrite_client::Api;
use ferrite_network::IpFamily;
use ferrite_nft::Protocol;
use ferrite_policy::model::{Direction, PodFacts, Policy};
use ferrite_policy::view::PodView;
use ferrite_proxy::model::EndpointAddress;
use ferrite_proxy::view::{TableView, Way};
use hickory_proto::op::Message;
use hickory_proto::rr::RData;
use k8s_openapi::api::core::v1::{Pod, Service, ServicePort};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::ListParams;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Time limit of the cluster's name server.
const PATIENCE: Duration = Duration::from_secs(5);

/// Show the data path of a pod, a Service or a name, and the reasons.
#[derive(Debug, clap::Args)]
pub struct NetworkCommand {
    #[command(flatten)]
    data: DataDir,
    /// `pod/NAME`, `service/NAME`, or a name of the cluster's DNS.
    #[arg(value_name = "TARGET")]
    target: String,
    /// Namespace of the pod or Service.
    #[arg(short = 'n', long, default_value = "default", value_name = "NAMESPACE")]
    namespace: String,
    /// The node whose kernel is asked; the pod's own, or the first one of this machine.
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum ViewError {
    #[error("there is no {kind} {namespace}/{name}")]
    Missing { kind: &'static str, namespace: String, name: String },
    #[error("node {0} is not on this machine: run this there, or name a node of this machine with --node")]
    NotHere(String),
    #[error("the cluster has no Service kube-system/kube-dns to ask for names")]
    NoDns,
    #[error("{0:?} is no name")]
    BadName(String),
}

/// A node of this machine.
struct NodeView {
    name: String,
    /// That of this process when absent.
    netns: Option<PathBuf>,
    paths: Paths,
}

impl NodeView {
    fn find(paths: &Paths, wanted: Option<&str>) -> Result<Self, ViewError> {
        let own = State::load(paths).map(|state| state.node).unwrap_or_default();
        let wanted = wanted.unwrap_or(&own);
        let machine = Machines::list(paths).into_iter().find(|machine| machine.name == wanted);
        match machine.and_then(|machine| machine.holder) {
            Some(pid) => Ok(Self {
                name: wanted.to_owned(),
                netns: Some(format!("/proc/{pid}/ns/net").into()),
                paths: Machines::paths_of(paths, wanted),
            }),
            None if wanted == own => Ok(Self { name: own, netns: None, paths: paths.clone() }),
            None => Err(ViewError::NotHere(wanted.to_owned())),
        }
    }

    fn services(&self, family: IpFamily) -> Result<Option<TableView>, BoxError> {
        Ok(TableView::read(family, &self.paths.proxy_table(), self.netns.as_deref())?)
    }
}

/// Names of pods by their addresses.
type PodNames = BTreeMap<IpAddr, String>;

impl NetworkCommand {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let paths = self.data.paths();
        let client = joining::client_of(&paths).await?;
        let text = match self.target.split_once('/') {
            Some(("pod" | "pods" | "po", name)) => self.pod(&paths, &client, name).await?,
            Some(("service" | "services" | "svc", name)) => {
                self.service(&paths, &client, &self.namespace, name).await?
            }
            Some(_) => return Err(ViewError::BadName(self.target).into()),
            None => self.name(&paths, &client).await?,
        };
        print!("{text}");
        Ok(ExitCode::SUCCESS)
    }

    async fn pod(&self, paths: &Paths, client: &kube::Client, name: &str) -> Result<String, BoxError> {
        let pods = Api::<Pod>::namespaced(client.clone(), &self.namespace);
        let missing =
            || ViewError::Missing { kind: "pod", namespace: self.namespace.clone(), name: name.to_owned() };
        let pod = pods.get_opt(name).await?.ok_or_else(missing)?;
        let on = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let node = NodeView::find(paths, self.node.as_deref().or(on.as_deref()))?;
        let facts = PodFacts::of(&pod);
        let mut out = format!("pod {}\n", facts.name);
        if facts.addresses.is_empty() {
            let host = pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
            let why =
                if host { "it uses the network of its node" } else { "it has no address, or has it no more" };
            writeln!(out, "  address     none: {why}; no policy and no host port concerns it")?;
            return Ok(out);
        }
        let policies = Api::<NetworkPolicy>::namespaced(client.clone(), &self.namespace);
        let policies: Vec<Policy> =
            policies.list(&ListParams::default()).await?.items.iter().map(Policy::of).collect();
        let services = Api::<Service>::all(client.clone()).list(&ListParams::default()).await?.items;
        let table = ferrite_network::policy_table(&node.paths.bridge());
        for address in facts.addresses.iter().copied() {
            writeln!(out, "  address     {address} on node {}", on.as_deref().unwrap_or("(none)"))?;
            let seen = PodView::read(&table, node.netns.as_deref(), address)?;
            out.push_str(&policy_lines(&facts, &policies, seen.as_ref(), &table));
            for port in
                ferrite_network::published_ports(&node.paths.bridge(), node.netns.as_deref(), address)?
            {
                let ip = port.host_ip.map_or_else(|| "every address of the node".into(), |ip| ip.to_string());
                let protocol = format!("{:?}", port.protocol).to_lowercase();
                writeln!(
                    out,
                    "  host port   {}/{protocol} at {ip} leads to {}",
                    port.host_port, port.container_port
                )?;
            }
            if let Some(view) = node.services(IpFamily::of(address))? {
                for (ip, port) in view.leading_to(address) {
                    let name =
                        services.iter().find(|service| addresses_of(service).contains(&ip)).map(name_of);
                    writeln!(out, "  service     {} at {ip}:{port}", name.as_deref().unwrap_or("(unknown)"))?;
                }
            }
        }
        Ok(out)
    }

    async fn service(
        &self,
        paths: &Paths,
        client: &kube::Client,
        namespace: &str,
        name: &str,
    ) -> Result<String, BoxError> {
        let missing =
            || ViewError::Missing { kind: "service", namespace: namespace.to_owned(), name: name.to_owned() };
        let services = Api::<Service>::namespaced(client.clone(), namespace);
        let service = services.get_opt(name).await?.ok_or_else(missing)?;
        let node = NodeView::find(paths, self.node.as_deref())?;
        let pods = Api::<Pod>::all(client.clone()).list(&ListParams::default()).await?.items;
        let names: PodNames = pods
            .iter()
            .map(PodFacts::of)
            .flat_map(|pod| pod.addresses.clone().into_iter().map(move |ip| (ip, pod.name.to_string())))
            .collect();
        let mut views = Vec::new();
        for family in IpFamily::BOTH {
            views.extend(node.services(family)?.map(|view| (family, view)));
        }
        Ok(service_lines(&service, &node.name, &views, &names))
    }

    async fn name(&self, paths: &Paths, client: &kube::Client) -> Result<String, BoxError> {
        let dns = Api::<Service>::namespaced(client.clone(), "kube-system").get_opt("kube-dns").await?;
        let server = dns.as_ref().and_then(|service| addresses_of(service).first().copied());
        let server = server.ok_or(ViewError::NoDns)?;
        let mut out = format!("name {}\n", self.target);
        let mut addresses: Vec<IpAddr> = Vec::new();
        for family in IpFamily::BOTH {
            let query = dns_query(&self.target, family);
            let query = query.ok_or_else(|| ViewError::BadName(self.target.clone()))?;
            let asked = tokio::task::spawn_blocking(move || ask(SocketAddr::new(server, 53), &query));
            let answer = asked.await??;
            if family == IpFamily::V4 {
                writeln!(out, "  answer      {} by {server}", answer.metadata.response_code)?;
            }
            for record in &answer.answers {
                writeln!(out, "  record      {} {} {}", record.name, record.record_type(), record.data)?;
                match &record.data {
                    RData::A(address) => addresses.push(address.0.into()),
                    RData::AAAA(address) => addresses.push(address.0.into()),
                    _ => {}
                }
            }
        }
        let services = Api::<Service>::all(client.clone()).list(&ListParams::default()).await?.items;
        for service in
            services.iter().filter(|service| addresses_of(service).iter().any(|ip| addresses.contains(ip)))
        {
            let metadata = &service.metadata;
            let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
            out.push_str(
                &self.service(paths, client, namespace.unwrap_or_default(), name.unwrap_or_default()).await?,
            );
        }
        Ok(out)
    }
}

fn name_of(service: &Service) -> String {
    let metadata = &service.metadata;
    let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
    format!("{}/{}", namespace.unwrap_or_default(), name.unwrap_or_default())
}

/// Addresses of IPv4 that packets to the Service have.
fn addresses_of(service: &Service) -> Vec<IpAddr> {
    let Some(spec) = &service.spec else { return Vec::new() };
    let own = spec.cluster_ips.iter().flatten().chain(spec.external_ips.iter().flatten());
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|status| status.ingress.as_ref()).into_iter().flatten();
    let balancers = ingress.filter_map(|ingress| ingress.ip.as_ref());
    own.chain(balancers).filter_map(|text| text.parse().ok()).collect()
}

/// The policies of a pod, and a comparison with the kernel's table.
fn policy_lines(facts: &PodFacts, policies: &[Policy], seen: Option<&PodView>, table: &str) -> String {
    let mut out = String::new();
    for direction in Direction::BOTH {
        let selecting: Vec<&str> = policies
            .iter()
            .filter(|policy| policy.rules(direction).is_some() && policy.selects(facts))
            .map(|policy| policy.name.name.as_str())
            .collect();
        let (label, chain) = match direction {
            Direction::Ingress => ("ingress", seen.and_then(|seen| seen.ingress.as_ref())),
            Direction::Egress => ("egress", seen.and_then(|seen| seen.egress.as_ref())),
        };
        let text = match (seen, selecting.is_empty(), chain) {
            (None, true, _) => "everything is allowed: no policy selects the pod".to_owned(),
            (None, false, _) => format!("NOT FILTERED: the kernel has no table {table}"),
            (Some(_), true, None) => "everything is allowed: no policy selects the pod".to_owned(),
            (Some(_), false, Some(chain)) => {
                format!(
                    "what {} allow, by chain {chain} of table {table}; the rest is dropped",
                    selecting.join(", ")
                )
            }
            (Some(_), false, None) => {
                format!(
                    "NOT FILTERED YET: {} select the pod, the kernel has no rule for it",
                    selecting.join(", ")
                )
            }
            (Some(_), true, Some(chain)) => {
                format!(
                    "STILL FILTERED by chain {chain} of table {table}: no policy selects the pod any more"
                )
            }
        };
        out.push_str(&format!("  {label:<11} {text}\n"));
    }
    out
}

fn way_text(way: &Way, pods: &PodNames) -> String {
    let endpoint = |endpoint: &EndpointAddress| match pods.get(&endpoint.ip) {
        Some(name) => format!("{endpoint} (pod {name})"),
        None => endpoint.to_string(),
    };
    match way {
        Way::Endpoints { chain, endpoints } => {
            let all: Vec<String> = endpoints.iter().map(endpoint).collect();
            format!("goes to {} by chain {chain}", all.join(" or "))
        }
        Way::Split { chain, inside, outside } => {
            let to = |list: &[EndpointAddress]| {
                let all: Vec<String> = list.iter().map(endpoint).collect();
                match all.is_empty() {
                    true => "is dropped: no endpoint that it may use is ready".to_owned(),
                    false => format!("goes to {}", all.join(" or ")),
                }
            };
            format!(
                "from pods and this node {}; from elsewhere {}; by chain {chain}",
                to(inside),
                to(outside)
            )
        }
        Way::Rejected => "is refused: no endpoint is ready".into(),
        Way::Dropped => "is dropped: no endpoint that this node may use is ready".into(),
        Way::Unknown => "is NOT IN THE KERNEL".into(),
    }
}

fn service_lines(service: &Service, node: &str, views: &[(IpFamily, TableView)], pods: &PodNames) -> String {
    let mut out = format!("service {}, as node {node} has it\n", name_of(service));
    let spec = service.spec.clone().unwrap_or_default();
    if spec.type_.as_deref() == Some("ExternalName") {
        let name = spec.external_name.unwrap_or_default();
        out.push_str(&format!("  the name is an alias of {name}; no packet is translated\n"));
        return out;
    }
    let addresses = addresses_of(service);
    if addresses.is_empty() {
        out.push_str("  headless: its name has the addresses of its pods, and no packet is translated\n");
        return out;
    }
    let families: Vec<IpFamily> = addresses.iter().map(|ip| IpFamily::of(*ip)).collect();
    let of = |family: IpFamily| views.iter().find(|(known, _)| *known == family).map(|(_, view)| view);
    for family in families.iter().filter(|family| of(**family).is_none()) {
        let family = family.api_name();
        out.push_str(&format!("  NOT IN THE KERNEL: there is no table of Services of {family}\n"));
    }
    let number = |number: Option<i32>| number.and_then(|number| u16::try_from(number).ok());
    for port in spec.ports.iter().flatten() {
        let ServicePort { port: own, node_port, protocol, .. } = port;
        let (Some(protocol), Some(own)) = (Protocol::parse(protocol.as_deref()), number(Some(*own))) else {
            continue;
        };
        for ip in &addresses {
            let Some(view) = of(IpFamily::of(*ip)) else { continue };
            let way = way_text(&view.service(*ip, protocol, own), pods);
            out.push_str(&format!("  {ip}:{own}/{protocol} {way}\n"));
            if let Some(sources) = view.sources(*ip, protocol, own) {
                let sources: Vec<String> = sources.iter().map(ToString::to_string).collect();
                out.push_str(&format!(
                    "    only from {}; packets of others are dropped\n",
                    sources.join(", ")
                ));
            }
        }
        if let Some(port) = number(*node_port).filter(|port| *port > 0) {
            for view in families.iter().filter_map(|family| of(*family)) {
                let way = way_text(&view.node_port(protocol, port), pods);
                out.push_str(&format!("  node port {port}/{protocol} {way}\n"));
            }
        }
    }
    out
}

/// A question for the addresses of a name, of one family.
fn dns_query(name: &str, family: IpFamily) -> Option<Vec<u8>> {
    const QUESTION_A: [u8; 4] = [0, 1, 0, 1];
    const QUESTION_AAAA: [u8; 4] = [0, 28, 0, 1];
    // An id, recursion desired, one question.
    let mut bytes = vec![0x66, 0x65, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let name = name.trim_end_matches('.');
    if name.is_empty() || name.len() > 253 {
        return None;
    }
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).ok().filter(|len| (1..=63).contains(len))?);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend_from_slice(if family == IpFamily::V4 { &QUESTION_A } else { &QUESTION_AAAA });
    Some(bytes)
}

fn ask(server: SocketAddr, query: &[u8]) -> Result<Message, BoxError> {
    let anywhere: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((anywhere, 0))?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(query)?;
    let mut buffer = vec![0; 4096];
    let len = socket
        .recv(&mut buffer)
        .map_err(|error| format!("the name server {server} does not answer: {error}"))?;
    Ok(Message::from_vec(&buffer[..len])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn policies_and_the_kernel_are_compared() {
        let decode = |value: ferrite_json::Value| ferrite_json::from_value(value).unwrap();
        let pod = PodFacts::of(&decode(
            json!({"metadata": {"namespace": "ns", "name": "p", "labels": {"a": "b"}}}),
        ));
        let policy: NetworkPolicy =
            ferrite_json::from_value(json!({"metadata": {"namespace": "ns", "name": "deny"},
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}))
            .unwrap();
        let policies = [Policy::of(&policy)];
        let judged = PodView { ingress: Some("class-1".into()), egress: None };
        let open = PodView::default();
        for (policies, seen, want) in [
            (&policies[..], Some(&judged), "what deny allow, by chain class-1"),
            (&policies[..], Some(&open), "NOT FILTERED YET"),
            (&policies[..], None, "NOT FILTERED: "),
            (&[][..], Some(&judged), "STILL FILTERED"),
            (&[][..], Some(&open), "everything is allowed"),
        ] {
            let text = policy_lines(&pod, policies, seen, "t");
            assert!(text.lines().next().unwrap().contains(want), "{text}");
        }
    }

    #[test]
    fn names_become_questions() {
        assert_eq!(dns_query("a.bc", IpFamily::V4).unwrap()[12..], [1, b'a', 2, b'b', b'c', 0, 0, 1, 0, 1]);
        assert_eq!(dns_query("a.bc", IpFamily::V6).unwrap()[12..], [1, b'a', 2, b'b', b'c', 0, 0, 28, 0, 1]);
        for bad in ["", ".", "a..b", &"x".repeat(64)] {
            assert!(dns_query(bad, IpFamily::V4).is_none(), "{bad}");
        }
    }
}
