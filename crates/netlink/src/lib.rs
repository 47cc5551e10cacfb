//! The kernel's network through netlink.
//!
//! [`Connection`] lists and changes links, addresses, routes, rules, neighbours and queues of one network namespace.
//! [`Conntrack`] removes tracked connections. [`NetworkEvents`] and [`ModuleEvents`] report changes. [`Netns`] is a
//! network namespace, with its settings.
//!
//! [`Messages`] writes messages, [`messages`] and [`Attributes`] read them, [`Socket`] carries them: that is all that
//! `ferrite-nft` needs for rules of the packet filter.

mod address;
mod connection;
mod conntrack;
mod error;
mod events;
mod link;
mod message;
mod namespace;
mod neighbour;
mod parse;
mod queue;
mod route;
mod rule;
mod socket;
#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests;

pub use address::{Address, AddressEntry, Scope};
pub use connection::Connection;
pub use conntrack::{Conntrack, Flow, Tuple};
pub use error::Error;
pub use events::{EventSocket, ModuleEvents, NetworkEvent, NetworkEvents};
pub use link::{BridgeLink, Link, LinkConfig, PortFlags, VethLink, VxlanLink};
pub use message::{Messages, NESTED, Open, flag};
pub use namespace::{Netns, Sysctl};
pub use neighbour::{ForwardingEntry, Neighbour, NeighbourEntry};
pub use parse::{Attributes, DONE, ERROR, Message, messages, refusal};
pub use queue::{Queue, TokenBucket};
pub use route::{Route, RouteEntry, RouteType, protocol, table};
pub use rule::Rule;
pub use socket::{Protocol, Socket};
