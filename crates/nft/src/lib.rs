//! nftables tables as data, and their way into the kernel through netlink.
//!
//! A table's owner names its sets in an enum ([`SetId`]), writes its chains as [`Expr`]s and its changes as a
//! [`Transaction`]. [`Table`] sends them; [`Monitor`] notices when somebody else changes the table. Tables with a few rules,
//! and those of others, need no more than a [`Ruleset`].

mod address;
mod bytes;
mod expr;
mod kernel;
mod sets;
mod transaction;

pub use address::{BadCidr, Cidr, IpFamily, Protocol, TableFamily, without_overlap};
pub use bytes::Bytes;
pub use expr::{
    Expr, Register, Rule, Verdict, comes_by, compare, from_this_node, goto, in_range, jump, known_connection,
    leaves_by, load_destination, load_source, native, new_connection, octets, of_family, set_mark,
    to_this_node, was_destination_natted,
};
pub use kernel::{
    BaseChain, Batch, ChainEntry, Change, ExpiringElement, KernelError, Monitor, MoreElements,
    OwnGenerations, RawElement, RuleEntry, Ruleset, Table, TableEntry, TakeElement,
};
pub use sets::{Data, Field, NoSets, SetId, SetShape};
pub use transaction::{Chain, ChainType, Element, Hook, Key, Transaction, Value};
