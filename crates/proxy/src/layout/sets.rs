//! The sets and maps of the table.

use crate::model::IpFamily;

/// A part of a key or value. Each takes whole 32-bit words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    Address,
    Protocol,
    Port,
    /// A number of ours, in the byte order of the machine.
    Number,
}

impl Field {
    /// Length in bytes without padding.
    pub fn len(self, family: IpFamily) -> u32 {
        match (self, family) {
            (Self::Address, IpFamily::V4) | (Self::Number, _) => 4,
            (Self::Address, IpFamily::V6) => 16,
            (Self::Protocol, _) => 1,
            (Self::Port, _) => 2,
        }
    }

    /// The id of the type in listings of `nft`.
    pub fn type_id(self, family: IpFamily) -> u32 {
        match (self, family) {
            (Self::Address, IpFamily::V4) => 7,
            (Self::Address, IpFamily::V6) => 8,
            (Self::Protocol, _) => 12,
            (Self::Port, _) => 13,
            (Self::Number, _) => 19,
        }
    }
}

/// A set or map of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SetName {
    /// Address, protocol and port of a Service → class and id of the service port.
    ServiceIps,
    /// Protocol and node port → class and id of the service port.
    ServiceNodePorts,
    /// Class → the chain that handles it. The only verdict map, and a small one.
    Classes,
    /// Id of the service port and index → endpoint.
    Endpoints,
    /// Client and id of the service port → the endpoint the client had last.
    Affinity,
    /// Endpoints that policy Cluster may use, of service ports with affinity.
    AffinityCluster,
    /// The same for policy Local.
    AffinityLocal,
    ClusterIps,
    RejectServices,
    DropServices,
    RejectNodePorts,
    DropNodePorts,
    /// Addresses that only certain sources may use.
    FirewallIps,
    /// Those sources.
    FirewallSources,
    HairpinConnections,
    NodePortIps,
}

/// What a set is made of.
#[derive(Debug, Clone, Copy)]
pub struct SetShape {
    pub name: &'static str,
    pub key: &'static [Field],
    pub data: Data,
    /// The last field of the key is a range.
    pub ranges: bool,
    /// Rules add elements, which expire.
    pub dynamic: bool,
}

/// What a set maps its keys to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    Nothing,
    Verdict,
    Fields(&'static [Field]),
}

/// The id of a service port is a hash of its name in two words, the same after a restart.
const ID: [Field; 2] = [Field::Number, Field::Number];
const ENDPOINT: &[Field] = &[Field::Address, Field::Port];
const CLASS_AND_ID: &[Field] = &[Field::Number, ID[0], ID[1]];
const SERVICE: &[Field] = &[Field::Address, Field::Protocol, Field::Port];
const NODE_PORT: &[Field] = &[Field::Protocol, Field::Port];
const ID_AND_ENDPOINT: &[Field] = &[ID[0], ID[1], Field::Address, Field::Port];

const fn set(name: &'static str, key: &'static [Field]) -> SetShape {
    SetShape { name, key, data: Data::Nothing, ranges: false, dynamic: false }
}

const fn map(name: &'static str, key: &'static [Field], data: &'static [Field]) -> SetShape {
    SetShape { data: Data::Fields(data), ..set(name, key) }
}

impl SetName {
    pub const ALL: [Self; 16] = [
        Self::ServiceIps,
        Self::ServiceNodePorts,
        Self::Classes,
        Self::Endpoints,
        Self::Affinity,
        Self::AffinityCluster,
        Self::AffinityLocal,
        Self::ClusterIps,
        Self::RejectServices,
        Self::DropServices,
        Self::RejectNodePorts,
        Self::DropNodePorts,
        Self::FirewallIps,
        Self::FirewallSources,
        Self::HairpinConnections,
        Self::NodePortIps,
    ];

    pub fn shape(self) -> SetShape {
        use Field::{Address, Number, Port, Protocol};
        match self {
            Self::ServiceIps => map("service-ips", SERVICE, CLASS_AND_ID),
            Self::ServiceNodePorts => map("service-nodeports", NODE_PORT, CLASS_AND_ID),
            Self::Classes => SetShape { data: Data::Verdict, ..set("classes", &[Number]) },
            Self::Endpoints => map("endpoints", &[ID[0], ID[1], Number], ENDPOINT),
            Self::Affinity => {
                SetShape { dynamic: true, ..map("affinity", &[Address, ID[0], ID[1]], ENDPOINT) }
            }
            Self::AffinityCluster => set("affinity-cluster", ID_AND_ENDPOINT),
            Self::AffinityLocal => set("affinity-local", ID_AND_ENDPOINT),
            Self::ClusterIps => set("cluster-ips", &[Address]),
            Self::RejectServices => set("reject-services", SERVICE),
            Self::DropServices => set("drop-services", SERVICE),
            Self::RejectNodePorts => set("reject-nodeports", NODE_PORT),
            Self::DropNodePorts => set("drop-nodeports", NODE_PORT),
            Self::FirewallIps => set("firewall-ips", SERVICE),
            Self::FirewallSources => {
                SetShape { ranges: true, ..set("firewall-sources", &[Address, Protocol, Port, Address]) }
            }
            Self::HairpinConnections => set("hairpin-connections", &[Address, Address, Protocol, Port]),
            Self::NodePortIps => set("nodeport-ips", &[Address]),
        }
    }
}
