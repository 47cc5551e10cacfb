//! The elements that one service port needs.

use std::collections::HashSet;
use std::sync::Arc;

use ferrite_nft::{Key, octets};

use super::{Class, LayoutConfig, Pick, Policy, SetName, Via};
use crate::model::{ChosenEndpoints, Cidr, EndpointAddress, Seniority, ServicePort, without_overlap};

/// The reason for which a service port has a frontend. The order is that of precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Origin {
    /// The API server gives ClusterIPs and node ports to one Service each.
    Allocated,
    /// The author of a Service names external addresses freely.
    External,
}

/// Decides between service ports with the same frontend: the least one has it. Arrival does not count, so a restart
/// of the proxy changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank {
    pub origin: Origin,
    pub seniority: Arc<Seniority>,
}

/// An address, protocol and port, or a protocol and node port, at which clients reach a service port. It belongs to
/// one service port, and the claims of others on it have no effect.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Frontend {
    pub key: Key,
    pub rank: Rank,
}

/// The value of a claimed element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimValue {
    /// A member of a set.
    Member,
    /// The class, with the id of the service port that claims it.
    Class(Class),
}

/// An element that a service port needs. Several may claim the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub set: SetName,
    pub key: Key,
    pub value: ClaimValue,
}

impl SetName {
    /// The frontend of an element; `None` in sets whose elements any number of service ports share.
    pub(crate) fn frontend(self, key: &Key) -> Option<Key> {
        match self {
            Self::ServiceIps
            | Self::RejectServices
            | Self::DropServices
            | Self::FirewallIps
            | Self::ServiceNodePorts
            | Self::RejectNodePorts
            | Self::DropNodePorts => Some(key.clone()),
            // Address, protocol and port of the Service, then the address of the source.
            Self::FirewallSources => {
                let bytes = key.first();
                let address = if bytes.len() > 16 { 16 } else { 4 };
                bytes.get(..bytes.len().saturating_sub(address)).map(|frontend| Key::new(&[frontend]))
            }
            _ => None,
        }
    }
}

/// All that the table must have for one service port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DesiredPort {
    pub claims: Vec<Claim>,
    pub frontends: Vec<Frontend>,
    /// Endpoints by policy, in any order.
    pub cluster: Arc<[EndpointAddress]>,
    pub local: Arc<[EndpointAddress]>,
    pub affinity: bool,
}

impl DesiredPort {
    fn frontend(&mut self, key: &Key, origin: Origin, seniority: &Arc<Seniority>) {
        let rank = Rank { origin, seniority: Arc::clone(seniority) };
        self.frontends.push(Frontend { key: key.clone(), rank });
    }

    fn member(&mut self, set: SetName, key: Key) {
        self.claims.push(Claim { set, key, value: ClaimValue::Member });
    }

    fn class(&mut self, set: SetName, key: Key, class: Class) {
        self.claims.push(Claim { set, key, value: ClaimValue::Class(class) });
    }
}

/// Decides the elements of a service port as upstream's nftables mode decides its rules.
pub fn desired(port: &ServicePort, chosen: &ChosenEndpoints, config: &LayoutConfig) -> DesiredPort {
    let mut out = DesiredPort { affinity: port.affinity_timeout.is_some(), ..DesiredPort::default() };
    if port.uses_cluster_endpoints() {
        out.cluster = Arc::clone(&chosen.cluster);
    }
    if port.uses_local_endpoints() {
        out.local = Arc::clone(&chosen.local);
    }
    let pick = |via, policy| {
        let endpoints = if policy == Policy::Cluster { &out.cluster } else { &out.local };
        let count = u32::try_from(endpoints.len()).unwrap_or(u32::MAX);
        (count > 0).then_some(Pick { via, policy, count, affinity: port.affinity_timeout })
    };
    let internal =
        pick(Via::Address, if port.internal_policy_local { Policy::Local } else { Policy::Cluster });
    let external = |via| match port.external_policy_local {
        false => pick(via, Policy::Cluster).map(Class::ExternalCluster),
        true => chosen.any.then(|| Class::ExternalLocal {
            cluster: pick(via, Policy::Cluster),
            local: pick(via, Policy::Local),
        }),
    };
    let by_address = external(Via::Address);
    let by_node_port = external(Via::NodePort);
    // Without any endpoint the client gets a rejection; without one on this node the packet should not have
    // come here.
    let refused = |reject, drop| if chosen.any { drop } else { reject };
    let outside_unserved = !chosen.any || (port.external_policy_local && out.local.is_empty());

    out.member(SetName::ClusterIps, Key::address(port.cluster_ip));
    let cluster_ip = Key::service(port.cluster_ip, port.protocol, port.port);
    out.frontend(&cluster_ip, Origin::Allocated, &port.seniority);
    let mut seen = HashSet::from([port.cluster_ip]);
    match internal {
        Some(pick) => out.class(SetName::ServiceIps, cluster_ip, Class::Internal(pick)),
        None => out.member(refused(SetName::RejectServices, SetName::DropServices), cluster_ip),
    }
    // An address that the Service names twice, or that is its ClusterIP, is one frontend.
    for address in port.external_ips.iter().chain(&port.load_balancer_vips).filter(|ip| seen.insert(**ip)) {
        let key = Key::service(*address, port.protocol, port.port);
        out.frontend(&key, Origin::External, &port.seniority);
        if let Some(class) = by_address {
            out.class(SetName::ServiceIps, key.clone(), class);
        }
        if outside_unserved {
            out.member(refused(SetName::RejectServices, SetName::DropServices), key);
        }
    }
    if let Some(node_port) = port.node_port {
        let key = Key::node_port(port.protocol, node_port);
        out.frontend(&key, Origin::Allocated, &port.seniority);
        if let Some(class) = by_node_port {
            out.class(SetName::ServiceNodePorts, key.clone(), class);
        }
        if outside_unserved {
            out.member(refused(SetName::RejectNodePorts, SetName::DropNodePorts), key);
        }
    }
    firewall(port, config, &mut out);
    for endpoint in &chosen.on_this_node {
        let ip = octets(endpoint.ip);
        let key = Key::new(&[&ip, &ip, &[port.protocol.number()], &endpoint.port.to_be_bytes()]);
        out.member(SetName::HairpinConnections, key);
    }
    out
}

fn firewall(port: &ServicePort, config: &LayoutConfig, out: &mut DesiredPort) {
    if port.source_ranges.is_empty() {
        return;
    }
    let mut sources = port.source_ranges.clone();
    // This node may have the VIP as an address of its own, and then it is the source of its own requests.
    if config.node_ip.is_some_and(|ip| sources.iter().any(|range| range.contains(ip))) {
        sources.extend(port.load_balancer_vips.iter().map(|vip| Cidr::single(*vip)));
    }
    let sources = without_overlap(sources);
    for vip in &port.load_balancer_vips {
        out.member(SetName::FirewallIps, Key::service(*vip, port.protocol, port.port));
        for range in &sources {
            out.member(SetName::FirewallSources, Key::source(*vip, port.protocol, port.port, *range));
        }
    }
}

#[cfg(test)]
mod tests;
