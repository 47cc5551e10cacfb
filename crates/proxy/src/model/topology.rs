//! Which endpoints this node sends traffic to.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Endpoint, EndpointAddress, ServicePort};

/// The facts about this node that choices depend on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: String,
    /// The label `topology.kubernetes.io/zone`; empty if the node has none.
    pub zone: String,
}

/// The endpoints of a service port by traffic policy, each list ordered by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChosenEndpoints {
    /// For traffic with policy Cluster; empty if there is no such traffic.
    pub cluster: Arc<[EndpointAddress]>,
    /// For traffic with policy Local; empty if there is no such traffic.
    pub local: Arc<[EndpointAddress]>,
    /// The chosen ones that are on this node: a pod may meet itself behind the Service.
    pub on_this_node: BTreeSet<EndpointAddress>,
    /// True if any node has a usable endpoint, even if this node reaches none.
    pub any: bool,
}

/// The restriction that hints put on the endpoints of policy Cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TopologyMode {
    Everywhere,
    SameZone,
    SameNode,
}

impl TopologyMode {
    /// Hints count only if every ready endpoint has them and one of them is for this node or zone.
    fn from_hints(endpoints: &[Endpoint], node: &NodeFacts) -> Self {
        let ready = || endpoints.iter().filter(|endpoint| endpoint.ready);
        if ready().next().is_none() {
            return Self::Everywhere;
        }
        if ready().all(|e| !e.node_hints.is_empty()) && ready().any(|e| e.node_hints.contains(&node.name)) {
            return Self::SameNode;
        }
        if ready().all(|e| !e.zone_hints.is_empty()) && ready().any(|e| e.zone_hints.contains(&node.zone)) {
            return Self::SameZone;
        }
        Self::Everywhere
    }

    fn allows(self, endpoint: &Endpoint, node: &NodeFacts) -> bool {
        match self {
            Self::Everywhere => true,
            Self::SameNode => endpoint.node_hints.contains(&node.name),
            Self::SameZone => endpoint.zone_hints.contains(&node.zone),
        }
    }
}

/// Chooses as upstream does: ready endpoints, narrowed by hints for policy Cluster; where there is no ready one,
/// those that terminate but still serve. The fallback is decided for each policy on its own.
pub fn choose(port: &ServicePort, endpoints: &[Endpoint], node: &NodeFacts) -> ChosenEndpoints {
    let mut chosen = ChosenEndpoints::default();
    let draining = |endpoint: &&Endpoint| endpoint.serving && endpoint.terminating;
    if port.uses_cluster_endpoints() {
        let mode = TopologyMode::from_hints(endpoints, node);
        let ready = endpoints.iter().filter(|e| e.ready && mode.allows(e, node));
        let mut usable: Vec<&Endpoint> = ready.collect();
        if usable.is_empty() {
            usable = endpoints.iter().filter(draining).collect();
        }
        chosen.cluster = usable.iter().map(|endpoint| endpoint.address).collect();
        chosen.on_this_node.extend(usable.iter().filter(|endpoint| endpoint.local).map(|e| e.address));
        chosen.any = !chosen.cluster.is_empty();
    }
    if port.uses_local_endpoints() {
        let local = || endpoints.iter().filter(|endpoint| endpoint.local);
        chosen.local = local().filter(|endpoint| endpoint.ready).map(|endpoint| endpoint.address).collect();
        if chosen.local.is_empty() {
            chosen.local = local().filter(draining).map(|endpoint| endpoint.address).collect();
        }
        chosen.on_this_node.extend(chosen.local.iter());
        chosen.any |= endpoints.iter().any(|endpoint| endpoint.ready || draining(&endpoint));
    }
    chosen
}

#[cfg(test)]
mod tests;
