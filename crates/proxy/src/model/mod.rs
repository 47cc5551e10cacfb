//! From API objects to service ports with the endpoints that traffic may go to. No I/O.

mod endpoints;
mod services;
mod topology;

use std::fmt;
use std::net::IpAddr;

pub use endpoints::{Endpoint, endpoints_of};
pub use ferrite_nft::{BadCidr, Cidr, IpFamily, Protocol, without_overlap};
pub use services::{Seniority, ServicePort, service_ports};
pub use topology::{ChosenEndpoints, NodeFacts, choose};

/// The name of one port of one Service. Ordered by namespace, then Service, so that the ports of a Service are
/// neighbours.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServicePortName {
    pub namespace: String,
    pub service: String,
    /// Empty for the only port of a Service.
    pub port: String,
    pub protocol: Protocol,
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.service)?;
        if !self.port.is_empty() {
            write!(f, ":{}", self.port)?;
        }
        write!(f, "/{}", self.protocol)
    }
}

/// The address that DNAT gives a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointAddress {
    pub ip: IpAddr,
    pub port: u16,
}

impl fmt::Display for EndpointAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::net::SocketAddr::new(self.ip, self.port).fmt(f)
    }
}
