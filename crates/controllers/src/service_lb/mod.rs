//! The load balancer of a cluster without a cloud: a Service of type LoadBalancer gets the addresses of the nodes, where
//! the service proxies accept its traffic.

mod controller;
mod decide;
mod ports;

pub use controller::start;
pub use decide::CLASS;
