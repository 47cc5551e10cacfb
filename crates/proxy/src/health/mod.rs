//! HTTP answers about health: of the proxy, and of Services that load balancers ask about on every node.

mod proxy;
mod serve;
mod services;

pub use proxy::{NodeEligibility, ProxyHealth};
pub use serve::{Answer, Handler, bind, serve};
pub use services::{ServiceHealth, Wanted as WantedHealthPort};
