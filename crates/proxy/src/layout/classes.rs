//! Classes: service ports that are handled alike share chains, whatever their names, addresses and endpoints.

use super::base::{address_words, class_register, from_pods, load_node_port, load_service};
use super::{BaseChain, Expr, LayoutConfig, Rule, SetName};
use ferrite_nft::{from_this_node, goto, load_source, set_mark};

/// The map by which a packet found its service port; a chain must look the id up in the same map again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Via {
    Address,
    NodePort,
}

/// A traffic policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    Cluster,
    Local,
}

impl Policy {
    /// The index of the policy's first endpoint in the map `endpoints`.
    pub fn first_index(self) -> u32 {
        match self {
            Self::Cluster => 0,
            Self::Local => 1 << 31,
        }
    }

    /// The endpoints that a remembered client may keep.
    pub fn affinity_set(self) -> SetName {
        match self {
            Self::Cluster => SetName::AffinityCluster,
            Self::Local => SetName::AffinityLocal,
        }
    }
}

/// Takes one of `count` endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pick {
    pub via: Via,
    pub policy: Policy,
    /// At least one.
    pub count: u32,
    /// Seconds for which a client keeps its endpoint.
    pub affinity: Option<u32>,
}

/// The way packets of one address of a service port are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// To a ClusterIP.
    Internal(Pick),
    /// From outside, with policy Cluster: the endpoint may be on another node, which must answer through this one.
    ExternalCluster(Pick),
    /// From outside, with policy Local. This node's own pods and processes are not from outside: they take `cluster`.
    ExternalLocal { cluster: Option<Pick>, local: Option<Pick> },
}

impl Pick {
    fn chain(self) -> String {
        let via = match self.via {
            Via::Address => "",
            Via::NodePort => "-nodeport",
        };
        let policy = match self.policy {
            Policy::Cluster => "",
            Policy::Local => "-local",
        };
        let affinity = self.affinity.map(|seconds| format!("-affinity-{seconds}")).unwrap_or_default();
        format!("pick{via}{policy}-{}{affinity}", self.count)
    }
}

impl Class {
    /// The chain that `classes` has for it.
    pub fn chain(self) -> String {
        match self {
            Self::Internal(pick) => pick.chain(),
            Self::ExternalCluster(pick) => format!("external-{}", pick.chain()),
            Self::ExternalLocal { cluster, local } => {
                let name = |pick: Option<Pick>| pick.map_or_else(|| "none".to_owned(), Pick::chain);
                format!("external-local-{}-{}", name(cluster), name(local))
            }
        }
    }

    fn picks(self) -> impl Iterator<Item = Pick> {
        let (first, second) = match self {
            Self::Internal(pick) | Self::ExternalCluster(pick) => (Some(pick), None),
            Self::ExternalLocal { cluster, local } => (cluster, local),
        };
        first.into_iter().chain(second)
    }
}

/// The policies by which a class chooses endpoints; `None` where it has none to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// One policy for all packets.
    All(Policy),
    /// Packets of pods and of this node, and packets from outside.
    Split { inside: Option<Policy>, outside: Option<Policy> },
}

impl Choice {
    /// Reads the name that [`Class::chain`] gives.
    pub fn of_chain(chain: &str) -> Option<Self> {
        if let Some(picks) = chain.strip_prefix("external-local-") {
            let inside = (!picks.starts_with("none-")).then_some(Policy::Cluster);
            let outside = (!picks.ends_with("-none")).then_some(Policy::Local);
            return Some(Self::Split { inside, outside });
        }
        let pick = chain.strip_prefix("external-").unwrap_or(chain).strip_prefix("pick-")?;
        let pick = pick.strip_prefix("nodeport-").unwrap_or(pick);
        Some(Self::All(if pick.starts_with("local-") { Policy::Local } else { Policy::Cluster }))
    }
}

/// The chains of a class, called ones before their callers. Classes may share them.
pub fn class_chains(class: Class, config: &LayoutConfig) -> Vec<BaseChain> {
    let chain = |name: String, rules| BaseChain { name, hook: None, rules };
    let mut chains: Vec<BaseChain> =
        class.picks().map(|pick| chain(pick.chain(), pick_rules(pick, config))).collect();
    let mark = || set_mark(config.masquerade_mark);
    match class {
        Class::Internal(_) => {}
        Class::ExternalCluster(pick) => {
            chains.push(chain(class.chain(), vec![mark().to_vec(), vec![goto(&pick.chain())]]));
        }
        Class::ExternalLocal { cluster, local } => {
            let mut rules: Vec<Rule> = Vec::new();
            if let Some(cluster) = cluster.map(Pick::chain) {
                // As if the packet had gone out to the load balancer and come back.
                let short_cut = |guard: Rule| guard.into_iter().chain([goto(&cluster)]).collect();
                rules.extend(from_pods(config).into_iter().map(short_cut));
                // This node may have the address of the load balancer itself, and it would be the source.
                rules.push(from_this_node().into_iter().chain(mark()).collect());
                rules.push(from_this_node().into_iter().chain([goto(&cluster)]).collect());
            }
            rules.extend(local.map(|local| vec![goto(&local.chain())]));
            chains.push(chain(class.chain(), rules));
        }
    }
    chains
}

/// The rules that choose an endpoint.
///
/// Registers do not outlive a rule, so each rule loads the id again. A packet that meets a transaction half-way may
/// miss an index that is gone; the last rule takes the first endpoint, which every pick has.
fn pick_rules(pick: Pick, config: &LayoutConfig) -> Vec<Rule> {
    let family = config.family;
    let words = address_words(family);
    let class = class_register(family);
    let (id, endpoint) = (class + 1, class + 3);
    // The key of `affinity` is client and id: the client goes in front of the id.
    let client = id - words;
    let load_id = || -> Rule {
        match pick.via {
            Via::Address => load_service(family)
                .into_iter()
                .chain([Expr::Map { set: SetName::ServiceIps, key: 0, to: class }])
                .collect(),
            Via::NodePort => load_node_port()
                .into_iter()
                .chain([Expr::Map { set: SetName::ServiceNodePorts, key: 0, to: class }])
                .collect(),
        }
    };
    let first = pick.policy.first_index();
    let load_endpoint = || Expr::Map { set: SetName::Endpoints, key: id, to: endpoint };
    let random = || Expr::LoadRandom { to: endpoint, modulus: pick.count, offset: first };
    let index = |load: Expr| -> Rule { load_id().into_iter().chain([load, load_endpoint()]).collect() };
    let nat = || Expr::DestinationNat { address: endpoint, port: endpoint + words };
    let mut rules: Vec<Rule> = Vec::new();
    if let Some(seconds) = pick.affinity {
        let remember = || Expr::Remember { set: SetName::Affinity, key: client, data: endpoint, seconds };
        let load_client = || load_source(family, client);
        // A client keeps its endpoint while the policy may still use it.
        rules.push(
            load_id()
                .into_iter()
                .chain([
                    load_client(),
                    Expr::Map { set: SetName::Affinity, key: client, to: endpoint },
                    Expr::InSet { set: pick.policy.affinity_set(), key: id, inverted: false },
                    remember(),
                    nat(),
                ])
                .collect(),
        );
        // The kernel only makes a known element expire later; it does not give it a new value.
        rules.push(
            load_id()
                .into_iter()
                .chain([
                    load_client(),
                    Expr::Map { set: SetName::Affinity, key: client, to: endpoint },
                    Expr::Forget { set: SetName::Affinity, key: client, data: endpoint },
                ])
                .collect(),
        );
        rules.push(index(random()).into_iter().chain([load_client(), remember(), nat()]).collect());
    }
    if pick.count > 1 {
        rules.push(index(random()).into_iter().chain([nat()]).collect());
    }
    rules.push(index(Expr::LoadNumber { to: endpoint, number: first }).into_iter().chain([nat()]).collect());
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_chains_tell_the_choice() {
        use Policy::{Cluster, Local};
        for via in [Via::Address, Via::NodePort] {
            for affinity in [None, Some(60)] {
                let pick = |policy| Pick { via, policy, count: 3, affinity };
                let split = |cluster: bool, local: bool| Class::ExternalLocal {
                    cluster: cluster.then(|| pick(Cluster)),
                    local: local.then(|| pick(Local)),
                };
                let choice = |inside: bool, outside: bool| Choice::Split {
                    inside: inside.then_some(Cluster),
                    outside: outside.then_some(Local),
                };
                for (class, want) in [
                    (Class::Internal(pick(Cluster)), Choice::All(Cluster)),
                    (Class::Internal(pick(Local)), Choice::All(Local)),
                    (Class::ExternalCluster(pick(Cluster)), Choice::All(Cluster)),
                    (split(true, true), choice(true, true)),
                    (split(true, false), choice(true, false)),
                    (split(false, false), choice(false, false)),
                ] {
                    assert_eq!(Choice::of_chain(&class.chain()), Some(want), "{}", class.chain());
                }
            }
        }
        assert_eq!(Choice::of_chain("services"), None);
    }
}
