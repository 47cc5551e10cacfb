//! The policies read as their documentation reads, one packet at a time.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ferrite_nft::Cidr;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use ferrite_policy::model::{Labels, Name};

/// Peers and ports of a rule.
type Parts<'a> = (Option<&'a Vec<NetworkPolicyPeer>>, Option<&'a Vec<NetworkPolicyPort>>);

#[derive(Debug, Clone)]
pub(crate) struct Packet {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) port: u16,
}

#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) policies: BTreeMap<Name, NetworkPolicy>,
    pub(crate) pods: BTreeMap<Name, Pod>,
    pub(crate) namespaces: BTreeMap<String, Labels>,
}

impl World {
    /// Returns true if the node that has the pods with local addresses lets the packet pass.
    pub(crate) fn allows(&self, packet: &Packet, local: impl Fn(IpAddr) -> bool) -> bool {
        if packet.source == packet.destination {
            return true;
        }
        let out = !local(packet.source) || self.allows_side(packet, false);
        let into = !local(packet.destination) || self.allows_side(packet, true);
        out && into
    }

    fn pod_at(&self, address: IpAddr) -> Option<&Pod> {
        self.pods.values().find(|pod| {
            let status = pod.status.as_ref().unwrap();
            status.phase.as_deref() == Some("Running")
                && status.pod_ips.iter().flatten().any(|ip| ip.ip == address.to_string())
        })
    }

    fn allows_side(&self, packet: &Packet, ingress: bool) -> bool {
        let own = if ingress { packet.destination } else { packet.source };
        let peer = if ingress { packet.source } else { packet.destination };
        let Some(pod) = self.pod_at(own) else { return true };
        let mut selected = false;
        for policy in self.policies.values() {
            let spec = policy.spec.as_ref().unwrap();
            let kind = if ingress { "Ingress" } else { "Egress" };
            let concerns = spec.policy_types.iter().flatten().any(|known| known == kind)
                && policy.metadata.namespace == pod.metadata.namespace
                && matches(spec.pod_selector.as_ref(), pod.metadata.labels.as_ref());
            if !concerns {
                continue;
            }
            selected = true;
            let namespace = policy.metadata.namespace.as_deref().unwrap();
            let rules: Vec<Parts<'_>> = if ingress {
                spec.ingress.iter().flatten().map(|rule| (rule.from.as_ref(), rule.ports.as_ref())).collect()
            } else {
                spec.egress.iter().flatten().map(|rule| (rule.to.as_ref(), rule.ports.as_ref())).collect()
            };
            for (peers, ports) in rules {
                let by_peer =
                    peers.is_none_or(|peers| peers.iter().any(|known| self.is_peer(known, peer, namespace)));
                let by_port = ports.is_none_or(|ports| ports.iter().any(|known| self.is_port(known, packet)));
                if by_peer && by_port {
                    return true;
                }
            }
        }
        !selected
    }

    fn is_peer(&self, peer: &NetworkPolicyPeer, address: IpAddr, namespace: &str) -> bool {
        if let Some(block) = &peer.ip_block {
            let within = |text: &String| text.parse::<Cidr>().unwrap().contains(address);
            return within(&block.cidr) && !block.except.iter().flatten().any(within);
        }
        let Some(pod) = self.pod_at(address) else { return false };
        let pod_namespace = pod.metadata.namespace.as_deref().unwrap();
        let in_namespace = match &peer.namespace_selector {
            None => pod_namespace == namespace,
            Some(selector) => {
                self.namespaces.get(pod_namespace).is_some_and(|labels| matches(Some(selector), Some(labels)))
            }
        };
        in_namespace && matches(peer.pod_selector.as_ref(), pod.metadata.labels.as_ref())
    }

    fn is_port(&self, port: &NetworkPolicyPort, packet: &Packet) -> bool {
        let number = |name: &str| match name {
            "TCP" => 6,
            "UDP" => 17,
            _ => 132,
        };
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        if number(protocol) != packet.protocol {
            return false;
        }
        match &port.port {
            None => true,
            Some(IntOrString::Int(first)) => {
                (*first..=port.end_port.unwrap_or(*first)).contains(&i32::from(packet.port))
            }
            Some(IntOrString::String(name)) => self.pod_at(packet.destination).is_some_and(|pod| {
                pod.spec.as_ref().unwrap().containers.iter().flat_map(|c| c.ports.iter().flatten()).any(
                    |known| {
                        known.name.as_ref() == Some(name)
                            && known.protocol.as_deref().unwrap_or("TCP") == protocol
                            && known.container_port == i32::from(packet.port)
                    },
                )
            }),
        }
    }
}

fn matches(selector: Option<&LabelSelector>, labels: Option<&Labels>) -> bool {
    let none = Labels::new();
    let (Some(selector), labels) = (selector, labels.unwrap_or(&none)) else { return true };
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let expressions = selector.match_expressions.iter().flatten().all(|expression| {
        let found = labels.get(&expression.key);
        let listed =
            found.is_some_and(|value| expression.values.iter().flatten().any(|known| known == value));
        match expression.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => found.is_some(),
            "DoesNotExist" => found.is_none(),
            other => panic!("{other}"),
        }
    });
    equal && expressions
}
