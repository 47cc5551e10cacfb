//! The table as data: which sets and chains there are, which rules they have, and which elements a service port
//! needs. No I/O; the decision record on the proxy's layout has the reasons.

mod base;
mod claims;
mod classes;
mod sets;

use std::net::IpAddr;

pub use base::base_chains;
pub use claims::{Claim, ClaimValue, DesiredPort, Frontend, Origin, Rank, desired};
pub use classes::{Choice, Class, Pick, Policy, Via, class_chains};
pub use ferrite_nft::Key;
pub use sets::SetName;

use crate::model::{Cidr, IpFamily};

/// A chain of this table.
pub type BaseChain = ferrite_nft::Chain<SetName>;
/// A step of a rule of this table.
pub type Expr = ferrite_nft::Expr<SetName>;
pub type Rule = ferrite_nft::Rule<SetName>;

/// The way to recognise traffic of this node's pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LocalTraffic {
    /// Nothing is known about pods.
    #[default]
    Unknown,
    /// Pods have source addresses in these ranges.
    Cidrs(Vec<Cidr>),
    /// Pods are behind this interface.
    Interface(String),
    /// Pods are behind interfaces whose names begin like this.
    InterfacePrefix(String),
}

/// The addresses of this node at which node ports answer. Loopback is never one of them, as upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodePortAddresses {
    All,
    Only(Vec<IpAddr>),
}

/// The inputs of one family's rules besides Services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutConfig {
    pub family: IpFamily,
    /// The bit of the packet mark that asks for masquerading.
    pub masquerade_mark: u32,
    pub masquerade_all: bool,
    pub local_traffic: LocalTraffic,
    pub node_ip: Option<IpAddr>,
    pub node_port_addresses: NodePortAddresses,
    /// Pods in this range answer each other on a bridge that connection tracking does not see. Between them an answer
    /// would come from the endpoint's address instead of the Service's, so their traffic is masqueraded.
    pub untracked_bridge: Option<Cidr>,
    /// Ranges of ClusterIPs: packets to addresses in them that no Service has are dropped.
    pub service_cidrs: Vec<Cidr>,
}

impl LayoutConfig {
    /// Ranges of this table's family.
    fn own<'a>(&self, ranges: &'a [Cidr]) -> impl Iterator<Item = Cidr> + 'a {
        let family = self.family;
        ranges.iter().copied().filter(move |range| range.family() == family)
    }
}
