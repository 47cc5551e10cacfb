//! CRI over gRPC on a unix socket: any implementation of the traits can be offered to `crictl` or another
//! kubelet ([`Server`]), and any runtime behind a socket can be used through the traits ([`Client`]).

mod calls;
mod client;
mod server;
mod status;

pub use client::{Client, EndpointError};
pub use server::Server;

/// The largest message either side takes: as the kubelet's own limit, enough for a list of a full node.
const MAX_MESSAGE: usize = 16 << 20;
