//! The ingress controller: Ingresses (`networking.k8s.io/v1`) become routes of an HTTP proxy.
//!
//! The pure core goes from API objects to values: [`class`] says which Ingresses are ours, [`routes`] makes the routing
//! table and says which namespace a host belongs to, [`backends`] finds the endpoints of a Service, [`headers`] has the
//! headers of a forwarded request. Around it, `run` follows the objects, `serve` accepts connections, `forward`
//! carries one request to a pod, and `status` writes the address back.

pub mod backends;
mod body;
pub mod certificates;
pub mod class;
mod forward;
pub mod headers;
mod io;
mod limits;
mod metrics;
mod paths;
mod pool;
pub mod routes;
mod run;
mod serve;
mod shares;
mod status;
mod table;

pub use class::CONTROLLER;
pub use limits::Limits;
pub use run::{Config, IngressError, Sources, start};
pub use serve::{Entrance, Proxy};
pub use table::{Backend, Table, Tables};
