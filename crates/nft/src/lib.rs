//! nftables tables as data, and their way into the kernel through netlink.
//!
//! A table's owner names its sets in an enum ([`SetId`]), writes its chains as [`Expr`]s and its changes as a
//! [`Transaction`]. [`Table`] sends them; [`Monitor`] notices when somebody else changes the table.

mod address;
mod bytes;
mod expr;
mod kernel;
mod sets;
mod transaction;

pub use address::{BadCidr, Cidr, IpFamily, Protocol, without_overlap};
pub use bytes::Bytes;
pub use expr::{
    Expr, Register, Rule, Verdict, from_this_node, goto, in_range, jump, load_destination, load_source,
    native, new_connection, octets, set_mark, to_this_node, was_destination_natted,
};
pub use kernel::{
    Change, ExpiringElement, KernelError, Monitor, MoreElements, OwnGenerations, RawElement, Table,
    TakeElement,
};
pub use sets::{Data, Field, SetId, SetShape};
pub use transaction::{Chain, ChainType, Element, Hook, Key, Transaction, Value};
