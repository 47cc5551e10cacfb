//! The facts of a Service that the proxy acts on.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;

use super::{Cidr, IpFamily, Protocol, ServicePortName};

/// A Service with this label belongs to another proxy.
const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// The most combinations of ports, external addresses and their sources of one Service. The author of a Service decides how
/// many there are of each, and each combination takes memory of every node's kernel.
const EXTERNAL_MAX: usize = 65_536;

/// The age of a Service, with the older ones first; the UID decides between equal ages.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seniority {
    /// Seconds of the epoch at which the Service was created; `i64::MAX` if nobody says.
    pub created: i64,
    pub uid: String,
}

impl Seniority {
    fn of(service: &Service) -> Self {
        let created = service.metadata.creation_timestamp.as_ref();
        Self {
            created: created.map_or(i64::MAX, |time| time.0.as_second()),
            uid: service.metadata.uid.clone().unwrap_or_default(),
        }
    }
}

impl Default for Seniority {
    fn default() -> Self {
        Self { created: i64::MAX, uid: String::new() }
    }
}

/// One port of a Service in one IP family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    pub seniority: Arc<Seniority>,
    pub cluster_ip: IpAddr,
    pub port: u16,
    pub protocol: Protocol,
    pub node_port: Option<u16>,
    pub external_ips: Vec<IpAddr>,
    /// Ingress addresses of the load balancer whose `ipMode` is VIP.
    pub load_balancer_vips: Vec<IpAddr>,
    /// Sources that may use the VIPs. Empty means everybody. None of them overlap.
    pub source_ranges: Vec<Cidr>,
    /// Seconds for which a client keeps its endpoint (`sessionAffinity: ClientIP`).
    pub affinity_timeout: Option<u32>,
    pub internal_policy_local: bool,
    pub external_policy_local: bool,
    pub health_check_node_port: Option<u16>,
}

impl ServicePort {
    /// Returns true if traffic can come by other addresses than the ClusterIP.
    pub fn externally_accessible(&self) -> bool {
        self.node_port.is_some() || !self.load_balancer_vips.is_empty() || !self.external_ips.is_empty()
    }

    /// Returns true if any traffic goes to endpoints on all nodes. External traffic with policy Local
    /// counts, because traffic from this node's own pods and processes is not subject to that policy.
    pub fn uses_cluster_endpoints(&self) -> bool {
        !self.internal_policy_local || self.externally_accessible()
    }

    pub fn uses_local_endpoints(&self) -> bool {
        self.internal_policy_local || (self.external_policy_local && self.externally_accessible())
    }
}

/// The ports of `service` in one IP family. Empty if the proxy has nothing to do for it: headless, ExternalName,
/// another proxy's, or without an address of that family.
pub fn service_ports(service: &Service, family: IpFamily) -> Vec<(ServicePortName, ServicePort)> {
    let (Some(spec), Some(cluster_ip)) = (&service.spec, cluster_ip(service, family)) else {
        return Vec::new();
    };
    if service.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(SERVICE_PROXY_NAME)) {
        return Vec::new();
    }
    let mut external_ips = in_family(spec.external_ips.iter().flatten(), family);
    let mut load_balancer_vips = load_balancer_vips(service, family);
    let source_ranges = source_ranges(spec.load_balancer_source_ranges.iter().flatten(), family);
    let restricted = load_balancer_vips.len().saturating_mul(source_ranges.len().saturating_add(1));
    let of_port = external_ips.len().saturating_add(restricted);
    let combinations = of_port.saturating_mul(spec.ports.as_ref().map_or(0, Vec::len));
    if combinations > EXTERNAL_MAX {
        tracing::warn!(
            namespace = service.metadata.namespace,
            service = service.metadata.name,
            combinations,
            "the Service has too many combinations of ports and external addresses; only its cluster IP is served"
        );
        (external_ips, load_balancer_vips) = (Vec::new(), Vec::new());
    }
    let external_policy_local = matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"))
        || spec.external_ips.as_ref().is_some_and(|ips| !ips.is_empty());
    let external_policy_local =
        external_policy_local && spec.external_traffic_policy.as_deref() == Some("Local");
    let needs_health_check = external_policy_local && spec.type_.as_deref() == Some("LoadBalancer");
    let affinity_timeout = (spec.session_affinity.as_deref() == Some("ClientIP")).then(|| {
        let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
        let seconds = config.and_then(|client_ip| client_ip.timeout_seconds);
        seconds.and_then(|seconds| u32::try_from(seconds).ok()).unwrap_or(10_800)
    });
    let seniority = Arc::new(Seniority::of(service));
    let ports = spec.ports.iter().flatten().filter_map(|port| {
        let protocol = Protocol::parse(port.protocol.as_deref())?;
        let name = ServicePortName {
            namespace: service.metadata.namespace.clone().unwrap_or_default(),
            service: service.metadata.name.clone().unwrap_or_default(),
            port: port.name.clone().unwrap_or_default(),
            protocol,
        };
        let facts = ServicePort {
            seniority: Arc::clone(&seniority),
            cluster_ip,
            port: port_number(Some(port.port))?,
            protocol,
            node_port: port_number(port.node_port),
            external_ips: external_ips.clone(),
            load_balancer_vips: load_balancer_vips.clone(),
            // Without VIPs nobody is restricted.
            source_ranges: if load_balancer_vips.is_empty() { Vec::new() } else { source_ranges.clone() },
            affinity_timeout,
            internal_policy_local: spec.internal_traffic_policy.as_deref() == Some("Local"),
            external_policy_local,
            health_check_node_port: port_number(spec.health_check_node_port).filter(|_| needs_health_check),
        };
        Some((name, facts))
    });
    ports.collect()
}

/// Zero means absent, as everywhere in a Service.
fn port_number(port: Option<i32>) -> Option<u16> {
    port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0)
}

/// The ClusterIP of the family; none for headless Services and ExternalName.
fn cluster_ip(service: &Service, family: IpFamily) -> Option<IpAddr> {
    let spec = service.spec.as_ref()?;
    if spec.type_.as_deref() == Some("ExternalName") {
        return None;
    }
    let all = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
    all.filter_map(|ip| ip.parse().ok()).find(|ip| IpFamily::of(*ip) == family)
}

fn in_family<'a>(texts: impl Iterator<Item = &'a String>, family: IpFamily) -> Vec<IpAddr> {
    texts.filter_map(|text| text.trim().parse().ok()).filter(|ip| IpFamily::of(*ip) == family).collect()
}

fn load_balancer_vips(service: &Service, family: IpFamily) -> Vec<IpAddr> {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    let vips = ingress.filter(|ingress| ingress.ip_mode.as_deref().unwrap_or("VIP") == "VIP");
    in_family(vips.filter_map(|ingress| ingress.ip.as_ref()), family)
}

/// A range of all addresses is the same as no ranges.
fn source_ranges<'a>(texts: impl Iterator<Item = &'a String>, family: IpFamily) -> Vec<Cidr> {
    let ranges: Vec<Cidr> =
        texts.filter_map(|text| text.parse().ok()).filter(|range: &Cidr| range.family() == family).collect();
    if ranges.iter().any(|range| range.prefix() == 0) {
        return Vec::new();
    }
    super::without_overlap(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(labels: Value, spec: Value, status: Value) -> Service {
        let metadata = json!({"namespace": "ns", "name": "svc", "labels": labels});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
    }

    #[test]
    fn services_that_are_not_proxied() {
        let port = json!([{"port": 80, "protocol": "TCP"}]);
        let rows = [
            ("headless", json!({}), json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": port})),
            (
                "ExternalName",
                json!({}),
                json!({"type": "ExternalName", "clusterIP": "10.96.0.9", "externalName": "x", "ports": port}),
            ),
            (
                "of another proxy",
                json!({"service.kubernetes.io/service-proxy-name": "mine"}),
                json!({"clusterIP": "10.96.0.9", "ports": port}),
            ),
            ("of the other family", json!({}), json!({"clusterIPs": ["fd00::9"], "ports": port})),
            ("without an address", json!({}), json!({"clusterIP": "", "ports": port})),
        ];
        for (name, labels, spec) in rows {
            assert_eq!(service_ports(&service(labels, spec, json!({})), IpFamily::V4), [], "{name}");
        }
    }

    #[test]
    fn facts_of_each_family() {
        let spec = json!({
            "type": "LoadBalancer", "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd00::9"],
            "ports": [{"name": "dns", "port": 53, "nodePort": 30053, "protocol": "UDP"}],
            "externalIPs": ["192.0.2.7", "2001:db8::7"],
            "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local", "healthCheckNodePort": 32000,
            "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            "loadBalancerSourceRanges": [" 10.0.0.0/8 ", "10.1.0.0/16", "2001:db8::/32"],
        });
        let status = json!({"loadBalancer": {"ingress": [
            {"ip": "198.51.100.1"}, {"ip": "198.51.100.2", "ipMode": "Proxy"}, {"ip": "2001:db8::5", "ipMode": "VIP"},
            {"hostname": "balancer"},
        ]}});
        let service = service(json!({}), spec, status);
        let (name, four) = service_ports(&service, IpFamily::V4).remove(0);
        assert_eq!(name.to_string(), "ns/svc:dns/udp");
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        assert_eq!(
            four,
            ServicePort {
                seniority: Arc::default(),
                cluster_ip: "10.96.0.9".parse().unwrap(),
                port: 53,
                protocol: Protocol::Udp,
                node_port: Some(30053),
                external_ips: ips(&["192.0.2.7"]),
                load_balancer_vips: ips(&["198.51.100.1"]),
                source_ranges: vec!["10.0.0.0/8".parse().unwrap()],
                affinity_timeout: Some(60),
                internal_policy_local: true,
                external_policy_local: true,
                health_check_node_port: Some(32000),
            }
        );
        let (_, six) = service_ports(&service, IpFamily::V6).remove(0);
        assert_eq!(six.external_ips, ips(&["2001:db8::7"]));
        assert_eq!(six.load_balancer_vips, ips(&["2001:db8::5"]));
        assert_eq!(six.source_ranges, ["2001:db8::/32".parse().unwrap()]);
    }

    #[test]
    fn ports_and_external_addresses_do_not_multiply_without_bound() {
        let of = |ports: u32, addresses: u32| {
            let ports: Vec<Value> =
                (1..=ports).map(|port| json!({"name": format!("p{port}"), "port": port})).collect();
            let addresses: Vec<String> =
                (0..addresses).map(|n| std::net::Ipv4Addr::from(0xc633_0000 + n).to_string()).collect();
            let spec = json!({"clusterIP": "10.96.0.9", "ports": ports, "externalIPs": addresses});
            let ports = service_ports(&service(json!({}), spec, json!({})), IpFamily::V4);
            (ports.len(), ports.iter().map(|(_, port)| port.external_ips.len()).sum::<usize>())
        };
        assert_eq!(of(2, 3), (2, 6));
        assert_eq!(of(256, 256), (256, 65_536));
        assert_eq!(of(20_000, 20_000), (20_000, 0), "the cluster IP is served all the same");
    }

    #[test]
    fn a_range_of_everything_is_no_restriction() {
        let spec = json!({"clusterIP": "10.96.0.9", "ports": [{"port": 80}],
            "loadBalancerSourceRanges": ["10.0.0.0/8", "0.0.0.0/0"]});
        let status = json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}});
        let (_, port) = service_ports(&service(json!({}), spec, status), IpFamily::V4).remove(0);
        assert_eq!(port.source_ranges, []);
    }
}
