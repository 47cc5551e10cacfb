//! The index from Services, EndpointSlices and Namespaces to the names of the cluster's zone.
//!
//! A change of one object costs as much as that object is large: nothing is built anew.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use kube::ResourceExt;

/// The label of an EndpointSlice that names its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The most items of a name with ports: more records than a reply has room for. The authors of Services and pods decide how
/// many ports and endpoints there are.
const PORT_ITEMS: usize = 4096;

/// The records that a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Each address once, whatever ports it has.
    Addresses,
    /// Each port of each address.
    Ports,
}

/// The meaning of a name in the zone, without the zone's suffix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// The zone itself, `svc` or `pod`: names that exist without a record of their own.
    Apex,
    /// `<namespace>.svc` and `<namespace>.pod`, which exist as long as the namespace does.
    Namespace(&'a str),
    /// `<address>.<namespace>.pod`
    Pod { namespace: &'a str, address: &'a str },
    /// `[<endpoint>.|_<port>._<protocol>.]<service>.<namespace>.svc`
    Service { namespace: &'a str, service: &'a str, part: Part<'a> },
    /// The name cannot exist.
    Invalid,
}

/// The labels in front of a Service's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    Whole,
    Endpoint(&'a str),
    /// An empty label matches every port, as in CoreDNS.
    Port {
        port: &'a str,
        protocol: &'a str,
    },
}

impl<'a> Request<'a> {
    /// Reads lower-case labels, the leftmost first, without those of the zone.
    pub fn parse(labels: &[&'a str]) -> Self {
        let plain = |label: &'a str| label.strip_prefix('_').unwrap_or(label);
        match *labels {
            [] | ["svc" | "pod"] => Self::Apex,
            [namespace, "svc" | "pod"] => Self::Namespace(namespace),
            [address, namespace, "pod"] => Self::Pod { namespace, address },
            [service, namespace, "svc"] => Self::Service { namespace, service, part: Part::Whole },
            [endpoint, service, namespace, "svc"] => {
                Self::Service { namespace, service, part: Part::Endpoint(endpoint) }
            }
            [port, protocol, service, namespace, "svc"] => {
                let part = Part::Port { port: plain(port), protocol: plain(protocol) };
                Self::Service { namespace, service, part }
            }
            _ => Self::Invalid,
        }
    }
}

/// The index's entry for an existing name. Both may be empty: the name has no records of any type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Items(Vec<Item>),
    /// An ExternalName Service: an alias of this name.
    Alias(Box<str>),
}

/// One address of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub ip: IpAddr,
    /// None where the Service or the slice declares no port.
    pub port: Option<u16>,
    /// The label of the endpoint, for records that name it.
    pub endpoint: Option<Box<str>>,
}

/// A Service's or an endpoint's name, as PTR and NS records show it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    pub namespace: Box<str>,
    pub service: Box<str>,
    pub endpoint: Option<Box<str>>,
}

/// The name does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the name does not exist")]
pub struct NameError;

#[derive(Debug, Default)]
struct Namespace {
    /// Services may be seen before their namespace is.
    exists: bool,
    services: HashMap<Box<str>, Service>,
}

#[derive(Debug, Default)]
struct Service {
    /// None while only slices of the Service were seen.
    spec: Option<Spec>,
    slices: BTreeMap<Box<str>, Slice>,
}

#[derive(Debug, PartialEq, Eq)]
enum Spec {
    ClusterIp {
        ips: Vec<IpAddr>,
        ports: Vec<Port>,
    },
    Headless,
    /// None where the field holds an address: such an alias cannot exist.
    External(Option<Box<str>>),
}

#[derive(Debug, PartialEq, Eq)]
struct Port {
    name: Box<str>,
    protocol: Box<str>,
    number: Option<u16>,
}

impl Port {
    fn matches(&self, part: Part<'_>) -> bool {
        let Part::Port { port, protocol } = part else { return true };
        let same = |asked: &str, own: &str| asked.is_empty() || asked.eq_ignore_ascii_case(own);
        same(port, &self.name) && same(protocol, &self.protocol)
    }
}

#[derive(Debug)]
struct Slice {
    ports: Vec<Port>,
    endpoints: Vec<Endpoint>,
}

#[derive(Debug)]
struct Endpoint {
    ip: IpAddr,
    /// The hostname, else the address with dashes.
    label: Box<str>,
    /// Only endpoints that were given a hostname have a PTR record.
    named: bool,
}

/// Everything the zone is answered from.
#[derive(Debug, Default)]
pub struct Index {
    namespaces: HashMap<Box<str>, Namespace>,
    cluster_ips: HashMap<IpAddr, BTreeSet<Owner>>,
    endpoint_ips: HashMap<IpAddr, BTreeMap<Owner, u32>>,
}

impl Index {
    pub fn apply_namespace(&mut self, name: &str) {
        self.namespaces.entry(name.into()).or_default().exists = true;
    }

    pub fn remove_namespace(&mut self, name: &str) {
        if let Some(namespace) = self.namespaces.get_mut(name) {
            namespace.exists = false;
        }
        self.tidy(name, "");
    }

    pub fn apply_service(&mut self, object: &core::Service) {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        self.forget_cluster_ips(&namespace, &name);
        let spec = spec_of(object);
        if let Spec::ClusterIp { ips, .. } = &spec {
            for ip in ips {
                self.cluster_ips.entry(*ip).or_default().insert(owner(&namespace, &name, None));
            }
        }
        self.service_mut(&namespace, &name).spec = Some(spec);
    }

    pub fn remove_service(&mut self, object: &core::Service) {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        self.forget_cluster_ips(&namespace, &name);
        self.service_mut(&namespace, &name).spec = None;
        self.tidy(&namespace, &name);
    }

    pub fn apply_slice(&mut self, object: &discovery::EndpointSlice) {
        self.remove_slice(object);
        let Some(service) = service_of(object) else { return };
        let namespace = object.namespace().unwrap_or_default();
        let slice = slice_of(object);
        for endpoint in slice.endpoints.iter().filter(|e| e.named) {
            let owner = owner(&namespace, service, Some(&endpoint.label));
            *self.endpoint_ips.entry(endpoint.ip).or_default().entry(owner).or_default() += 1;
        }
        let name = object.name_any().into_boxed_str();
        self.service_mut(&namespace, service).slices.insert(name, slice);
    }

    /// Takes the slice out of the Service that `object` names; for a slice whose Service has changed this must be
    /// the older state.
    pub fn remove_slice(&mut self, object: &discovery::EndpointSlice) {
        let Some(service) = service_of(object) else { return };
        let namespace = object.namespace().unwrap_or_default();
        let old = self
            .namespaces
            .get_mut(namespace.as_str())
            .and_then(|n| n.services.get_mut(service))
            .and_then(|s| s.slices.remove(object.name_any().as_str()));
        for endpoint in old.iter().flat_map(|slice| &slice.endpoints).filter(|e| e.named) {
            let owner = owner(&namespace, service, Some(&endpoint.label));
            let Some(owners) = self.endpoint_ips.get_mut(&endpoint.ip) else { continue };
            if let Some(count) = owners.get_mut(&owner) {
                *count -= 1;
                if *count == 0 {
                    owners.remove(&owner);
                }
            }
            if owners.is_empty() {
                self.endpoint_ips.remove(&endpoint.ip);
            }
        }
        self.tidy(&namespace, service);
    }

    /// Looks up a name of the zone.
    pub fn find(&self, request: Request<'_>, wanted: Wanted) -> Result<Found, NameError> {
        match request {
            Request::Apex => Ok(Found::Items(Vec::new())),
            Request::Invalid => Err(NameError),
            Request::Namespace(name) => self.namespace(name).map(|_| Found::Items(Vec::new())),
            // As CoreDNS's `pods insecure`: any address in an existing namespace, without a check of the
            // pods.
            Request::Pod { namespace, address } => {
                self.namespace(namespace)?;
                let ip = pod_address(address).ok_or(NameError)?;
                Ok(Found::Items(vec![Item { ip, port: None, endpoint: None }]))
            }
            Request::Service { namespace, service, part } => {
                let service = self.namespace(namespace)?.services.get(service).ok_or(NameError)?;
                match (service.spec.as_ref().ok_or(NameError)?, part) {
                    (Spec::External(Some(name)), Part::Whole) => Ok(Found::Alias(name.clone())),
                    (Spec::External(_), _) => Err(NameError),
                    (Spec::Headless, part) | (_, part @ Part::Endpoint(_)) => service.endpoints(part, wanted),
                    (Spec::ClusterIp { ips, ports }, part) => cluster_ips(ips, ports, part, wanted),
                }
            }
        }
    }

    /// The names of an address, for PTR records: the Service whose ClusterIP it is, else endpoints with a hostname.
    pub fn names_of(&self, ip: IpAddr) -> Vec<Owner> {
        if let Some(owner) = self.cluster_ips.get(&ip).and_then(BTreeSet::first) {
            return vec![owner.clone()];
        }
        self.endpoint_ips.get(&ip).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// The ClusterIPs of a Service; none for one that has no such address.
    pub fn cluster_ips(&self, namespace: &str, service: &str) -> &[IpAddr] {
        let service = self.namespaces.get(namespace).and_then(|n| n.services.get(service));
        match service.and_then(|s| s.spec.as_ref()) {
            Some(Spec::ClusterIp { ips, .. }) => ips,
            _ => &[],
        }
    }

    fn namespace(&self, name: &str) -> Result<&Namespace, NameError> {
        self.namespaces.get(name).filter(|n| n.exists).ok_or(NameError)
    }

    fn service_mut(&mut self, namespace: &str, name: &str) -> &mut Service {
        let namespace = self.namespaces.entry(namespace.into()).or_default();
        namespace.services.entry(name.into()).or_default()
    }

    fn forget_cluster_ips(&mut self, namespace: &str, name: &str) {
        let ips = self.cluster_ips(namespace, name).to_vec();
        let owner = owner(namespace, name, None);
        for ip in ips {
            let Some(owners) = self.cluster_ips.get_mut(&ip) else { continue };
            owners.remove(&owner);
            if owners.is_empty() {
                self.cluster_ips.remove(&ip);
            }
        }
    }

    /// Drops entries that nothing fills any more.
    fn tidy(&mut self, namespace: &str, service: &str) {
        let Some(entry) = self.namespaces.get_mut(namespace) else { return };
        if entry.services.get(service).is_some_and(|s| s.spec.is_none() && s.slices.is_empty()) {
            entry.services.remove(service);
        }
        if !entry.exists && entry.services.is_empty() {
            self.namespaces.remove(namespace);
        }
    }
}

impl Service {
    fn endpoints(&self, part: Part<'_>, wanted: Wanted) -> Result<Found, NameError> {
        let mut items = Vec::new();
        for slice in self.slices.values() {
            let ports = matching(&slice.ports, part, wanted);
            for endpoint in &slice.endpoints {
                if matches!(part, Part::Endpoint(label) if !label.eq_ignore_ascii_case(&endpoint.label)) {
                    continue;
                }
                items.extend(ports.iter().map(|port| Item {
                    ip: endpoint.ip,
                    port: port.number,
                    endpoint: Some(endpoint.label.clone()),
                }));
                if wanted == Wanted::Ports && items.len() >= PORT_ITEMS {
                    items.truncate(PORT_ITEMS);
                    return Ok(Found::Items(items));
                }
            }
        }
        if items.is_empty() { Err(NameError) } else { Ok(Found::Items(items)) }
    }
}

/// The ports that a name means; one of them where only addresses are wanted.
fn matching<'a>(ports: &'a [Port], part: Part<'_>, wanted: Wanted) -> Vec<&'a Port> {
    let most = match wanted {
        Wanted::Addresses => 1,
        Wanted::Ports => PORT_ITEMS,
    };
    ports.iter().filter(|port| port.matches(part)).take(most).collect()
}

fn cluster_ips(ips: &[IpAddr], ports: &[Port], part: Part<'_>, wanted: Wanted) -> Result<Found, NameError> {
    let matching = matching(ports, part, wanted);
    if matching.is_empty() {
        return Err(NameError);
    }
    let item = |port: &Port, ip: &IpAddr| Item { ip: *ip, port: port.number, endpoint: None };
    Ok(Found::Items(matching.iter().flat_map(|port| ips.iter().map(|ip| item(port, ip))).collect()))
}

fn owner(namespace: &str, service: &str, endpoint: Option<&str>) -> Owner {
    Owner { namespace: namespace.into(), service: service.into(), endpoint: endpoint.map(Into::into) }
}

fn service_of(object: &discovery::EndpointSlice) -> Option<&str> {
    object.metadata.labels.as_ref()?.get(SERVICE_NAME).map(String::as_str)
}

fn spec_of(object: &core::Service) -> Spec {
    let Some(spec) = &object.spec else { return Spec::ClusterIp { ips: Vec::new(), ports: Vec::new() } };
    if spec.type_.as_deref() == Some("ExternalName") {
        let name = spec.external_name.as_deref().unwrap_or_default();
        let usable = !name.is_empty() && name.parse::<IpAddr>().is_err();
        return Spec::External(usable.then(|| name.to_ascii_lowercase().into()));
    }
    let all = spec.cluster_ips.iter().flatten().chain(spec.cluster_ip.iter());
    if all.clone().any(|ip| ip == "None") {
        return Spec::Headless;
    }
    let mut ips: Vec<IpAddr> = Vec::new();
    for ip in all.filter_map(|ip| ip.parse().ok()) {
        if !ips.contains(&ip) {
            ips.push(ip);
        }
    }
    let ports = spec.ports.iter().flatten().map(|port| Port {
        name: port.name.as_deref().unwrap_or_default().into(),
        protocol: port.protocol.as_deref().unwrap_or("TCP").into(),
        number: u16::try_from(port.port).ok(),
    });
    Spec::ClusterIp { ips, ports: or_none(ports.collect()) }
}

fn slice_of(object: &discovery::EndpointSlice) -> Slice {
    let ports = object.ports.iter().flatten().map(|port| Port {
        name: port.name.as_deref().unwrap_or_default().into(),
        protocol: port.protocol.as_deref().unwrap_or("TCP").into(),
        number: port.port.and_then(|number| u16::try_from(number).ok()),
    });
    let mut endpoints = Vec::new();
    for endpoint in object.endpoints.iter().flatten() {
        // Unknown means ready. With publishNotReadyAddresses the slice says ready for all of them.
        if endpoint.conditions.as_ref().and_then(|c| c.ready) == Some(false) {
            continue;
        }
        let hostname = endpoint.hostname.as_deref().filter(|name| !name.is_empty());
        for ip in endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()) {
            let label = hostname.map_or_else(|| dashed(ip), str::to_ascii_lowercase).into_boxed_str();
            endpoints.push(Endpoint { ip, label, named: hostname.is_some() });
        }
    }
    Slice { ports: or_none(ports.collect()), endpoints }
}

/// A Service or slice without ports still has addresses.
fn or_none(ports: Vec<Port>) -> Vec<Port> {
    if ports.is_empty() { vec![Port { name: "".into(), protocol: "".into(), number: None }] } else { ports }
}

/// The label of an endpoint without a hostname.
fn dashed(ip: IpAddr) -> String {
    let text = ip.to_string();
    match ip {
        IpAddr::V4(_) => text.replace('.', "-"),
        IpAddr::V6(_) => {
            let mut text = text.replace(':', "-");
            // A label neither begins nor ends with a dash.
            if text.starts_with('-') {
                text.insert(0, '0');
            }
            if text.ends_with('-') {
                text.push('0');
            }
            text
        }
    }
}

/// The address in the name of a pod record: `10-244-0-7`, `2001-db8--1`.
fn pod_address(label: &str) -> Option<IpAddr> {
    let separator = if label.matches('-').count() == 3 && !label.contains("--") { "." } else { ":" };
    label.replace('-', separator).parse().ok()
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
