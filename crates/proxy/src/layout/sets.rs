//! The sets and maps of the table.

use ferrite_nft::{Field, SetId, SetShape};

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

/// The id of a service port is a hash of its name in two words, the same after a restart.
const ID: [Field; 2] = [Field::Number, Field::Number];
const ENDPOINT: &[Field] = &[Field::Address, Field::Port];
const CLASS_AND_ID: &[Field] = &[Field::Number, ID[0], ID[1]];
const SERVICE: &[Field] = &[Field::Address, Field::Protocol, Field::Port];
const NODE_PORT: &[Field] = &[Field::Protocol, Field::Port];
const ID_AND_ENDPOINT: &[Field] = &[ID[0], ID[1], Field::Address, Field::Port];

impl SetId for SetName {
    const ALL: &'static [Self] = &[
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

    fn shape(self) -> SetShape {
        use Field::{Address, Number, Port, Protocol};
        match self {
            Self::ServiceIps => SetShape::map("service-ips", SERVICE, CLASS_AND_ID),
            Self::ServiceNodePorts => SetShape::map("service-nodeports", NODE_PORT, CLASS_AND_ID),
            Self::Classes => SetShape::verdicts("classes", &[Number]),
            Self::Endpoints => SetShape::map("endpoints", &[ID[0], ID[1], Number], ENDPOINT),
            Self::Affinity => {
                SetShape { dynamic: true, ..SetShape::map("affinity", &[Address, ID[0], ID[1]], ENDPOINT) }
            }
            Self::AffinityCluster => SetShape::set("affinity-cluster", ID_AND_ENDPOINT),
            Self::AffinityLocal => SetShape::set("affinity-local", ID_AND_ENDPOINT),
            Self::ClusterIps => SetShape::set("cluster-ips", &[Address]),
            Self::RejectServices => SetShape::set("reject-services", SERVICE),
            Self::DropServices => SetShape::set("drop-services", SERVICE),
            Self::RejectNodePorts => SetShape::set("reject-nodeports", NODE_PORT),
            Self::DropNodePorts => SetShape::set("drop-nodeports", NODE_PORT),
            Self::FirewallIps => SetShape::set("firewall-ips", SERVICE),
            Self::FirewallSources => SetShape {
                ranges: true,
                ..SetShape::set("firewall-sources", &[Address, Protocol, Port, Address])
            },
            Self::HairpinConnections => {
                SetShape::set("hairpin-connections", &[Address, Address, Protocol, Port])
            }
            Self::NodePortIps => SetShape::set("nodeport-ips", &[Address]),
        }
    }
}
