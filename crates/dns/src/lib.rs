//! Cluster DNS: the Kubernetes DNS specification, served from informers; other names are forwarded.
//!
//! `records` is the index from objects to names, `answer` turns a query into a response, `wire` reads and writes messages:
//! these do no I/O. `forward` asks other resolvers (`resolvers` knows which) and remembers their replies (`cache`).
//! `server` has the sockets, and [`Dns`] ties all of it to a cluster.

mod answer;
mod cache;
mod forward;
#[doc(hidden)]
pub mod fuzzing;
mod limit;
mod metrics;
mod records;
mod resolvers;
mod run;
mod server;
mod socket;
mod wire;

pub use answer::{BadDomain, DNS_NAMESPACE, DNS_SERVICE, Zone, domain_name};
pub use forward::{Forwarder, Patience};
pub use records::Index;
pub use resolvers::{Resolvers, StubDomain};
pub use run::{Config, Dns, StartError};
pub use server::{Listen, Server, Sockets, bind_tcp};
