//! Policies and pods, as far as filtering needs them. No I/O.

mod ranges;
mod selector;

use std::collections::BTreeMap;
use std::net::IpAddr;

use ferrite_nft::{Cidr, Protocol};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

pub use ranges::{AddressRange, PortRange, address_ranges, port_ranges};
pub use selector::Selector;

pub type Labels = BTreeMap<String, String>;

/// Namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    pub namespace: String,
    pub name: String,
}

impl Name {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The side of a pod that a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    pub const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];
}

/// Pods by their labels and those of their namespace.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodGroup {
    pub namespaces: Namespaces,
    pub pods: Selector,
}

/// Namespaces that a peer is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Namespaces {
    /// The policy's own.
    Named(String),
    Matching(Selector),
}

impl PodGroup {
    pub fn contains(&self, pod: &PodFacts, namespace: Option<&Labels>) -> bool {
        let in_namespace = match &self.namespaces {
            Namespaces::Named(name) => pod.name.namespace == *name,
            Namespaces::Matching(selector) => namespace.is_some_and(|labels| selector.matches(labels)),
        };
        in_namespace && self.pods.matches(&pod.labels)
    }
}

/// The other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Peer {
    Pods(PodGroup),
    Range { block: Cidr, except: Vec<Cidr> },
}

/// Ports at the connection's destination.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ports {
    Numbers {
        protocol: Protocol,
        first: u16,
        last: u16,
    },
    /// The port that the destination's pod calls so.
    Named {
        protocol: Protocol,
        name: String,
    },
}

/// The peers and ports that one entry of `ingress` or `egress` allows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyRule {
    /// `None` is everybody.
    pub peers: Option<Vec<Peer>>,
    /// `None` is every port of every protocol.
    pub ports: Option<Vec<Ports>>,
}

/// A policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    pub name: Name,
    pub pods: Selector,
    /// `None` leaves the direction alone.
    pub ingress: Option<Vec<PolicyRule>>,
    pub egress: Option<Vec<PolicyRule>>,
}

impl Policy {
    pub fn rules(&self, direction: Direction) -> Option<&[PolicyRule]> {
        match direction {
            Direction::Ingress => self.ingress.as_deref(),
            Direction::Egress => self.egress.as_deref(),
        }
    }

    pub fn selects(&self, pod: &PodFacts) -> bool {
        self.name.namespace == pod.name.namespace && self.pods.matches(&pod.labels)
    }

    pub fn of(object: &NetworkPolicy) -> Self {
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let empty = NetworkPolicySpec::default();
        let spec = object.spec.as_ref().unwrap_or(&empty);
        let types = spec.policy_types.as_deref().unwrap_or_default();
        let has = |name: &str| types.iter().any(|known| known == name);
        let ingress = types.is_empty() || has("Ingress");
        let some_egress = spec.egress.as_ref().is_some_and(|rules| !rules.is_empty());
        let egress = has("Egress") || (types.is_empty() && some_egress);
        let rule = |peers: Option<&[NetworkPolicyPeer]>, ports: Option<&[NetworkPolicyPort]>| PolicyRule {
            // An empty list restricts nothing, as an absent one.
            peers: peers
                .filter(|peers| !peers.is_empty())
                .map(|peers| peers.iter().filter_map(|peer| self::peer(peer, &namespace)).collect()),
            ports: ports
                .filter(|ports| !ports.is_empty())
                .map(|ports| ports.iter().filter_map(self::ports).collect()),
        };
        let rules_in = || {
            let entries = spec.ingress.iter().flatten();
            entries.map(|entry| rule(entry.from.as_deref(), entry.ports.as_deref())).collect()
        };
        let rules_out = || {
            let entries = spec.egress.iter().flatten();
            entries.map(|entry| rule(entry.to.as_deref(), entry.ports.as_deref())).collect()
        };
        Self {
            pods: spec.pod_selector.as_ref().map(Selector::of).unwrap_or_default(),
            ingress: ingress.then(rules_in),
            egress: egress.then(rules_out),
            name: Name::new(namespace, object.metadata.name.clone().unwrap_or_default()),
        }
    }
}

/// A peer that cannot be understood matches nobody.
fn peer(peer: &NetworkPolicyPeer, namespace: &str) -> Option<Peer> {
    if let Some(block) = &peer.ip_block {
        let except = block.except.iter().flatten().filter_map(|text| text.parse().ok()).collect();
        return Some(Peer::Range { block: block.cidr.parse().ok()?, except });
    }
    if peer.pod_selector.is_none() && peer.namespace_selector.is_none() {
        return None;
    }
    Some(Peer::Pods(PodGroup {
        namespaces: match &peer.namespace_selector {
            None => Namespaces::Named(namespace.to_owned()),
            Some(selector) => Namespaces::Matching(Selector::of(selector)),
        },
        pods: peer.pod_selector.as_ref().map(Selector::of).unwrap_or_default(),
    }))
}

fn ports(port: &NetworkPolicyPort) -> Option<Ports> {
    let protocol = Protocol::parse(port.protocol.as_deref())?;
    let number = |number: i32| u16::try_from(number).ok();
    Some(match &port.port {
        None => Ports::Numbers { protocol, first: 0, last: u16::MAX },
        Some(IntOrString::Int(first)) => {
            let last = port.end_port.unwrap_or(*first);
            Ports::Numbers { protocol, first: number(*first)?, last: number(last)? }
        }
        Some(IntOrString::String(name)) => Ports::Named { protocol, name: name.clone() },
    })
}

/// The facts about a pod that policies use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    pub name: Name,
    pub labels: Labels,
    /// Empty when the pod has none of its own: not yet, not any more, or because it uses its node's.
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<NamedPort>,
    /// The node that it runs on.
    pub node: Option<String>,
}

/// A port that a container has a name for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPort {
    pub name: String,
    pub protocol: Protocol,
    pub number: u16,
}

impl PodFacts {
    pub fn of(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let host_network = spec.is_some_and(|spec| spec.host_network == Some(true));
        let phase = status.and_then(|status| status.phase.as_deref());
        let ended = matches!(phase, Some("Succeeded" | "Failed"));
        let addresses = match host_network || ended {
            true => Vec::new(),
            false => {
                let all = status.and_then(|status| status.pod_ips.as_deref()).unwrap_or_default();
                all.iter().filter_map(|ip| ip.ip.parse().ok()).collect()
            }
        };
        let sidecars = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
        let sidecars = sidecars.iter().filter(|c| c.restart_policy.as_deref() == Some("Always"));
        let containers = spec.map(|spec| spec.containers.iter()).into_iter().flatten().chain(sidecars);
        let ports = containers.flat_map(|container| container.ports.iter().flatten()).filter_map(|port| {
            Some(NamedPort {
                name: port.name.clone().filter(|name| !name.is_empty())?,
                protocol: Protocol::parse(port.protocol.as_deref())?,
                number: u16::try_from(port.container_port).ok()?,
            })
        });
        Self {
            name: Name::new(
                pod.metadata.namespace.clone().unwrap_or_default(),
                pod.metadata.name.clone().unwrap_or_default(),
            ),
            node: spec.and_then(|spec| spec.node_name.clone()),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            addresses,
            ports: ports.collect(),
        }
    }
}
