//! Chains, elements and the changes that are made together.

use std::net::IpAddr;

use crate::expr::{Rule, octets};
use crate::{Bytes, Cidr, Protocol};

/// Where in the packet's way a base chain is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// Of a link, before anything else sees the packet.
    Ingress,
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainType {
    Filter,
    Nat,
}

/// A chain with its rules; called by a hook or only by other chains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain<S> {
    pub name: String,
    pub hook: Option<(ChainType, Hook, i32)>,
    pub rules: Vec<Rule<S>>,
}

/// A key as the kernel has it: every field padded to whole words. Of a range, the first and the last key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Of a range, both keys one after the other.
    bytes: Bytes,
    is_range: bool,
}

impl Key {
    pub fn new(fields: &[&[u8]]) -> Self {
        Self { bytes: Bytes::fields(fields), is_range: false }
    }

    /// All keys from the first to the last one, which have the same length.
    pub fn range(first: &Self, last: &Self) -> Self {
        debug_assert_eq!(first.first().len(), last.first().len(), "both ends have the same fields");
        Self { bytes: Bytes::fields(&[first.first(), last.first()]), is_range: true }
    }

    pub fn service(address: IpAddr, protocol: Protocol, port: u16) -> Self {
        Self::new(&[&octets(address), &[protocol.number()], &port.to_be_bytes()])
    }

    pub fn node_port(protocol: Protocol, port: u16) -> Self {
        Self::new(&[&[protocol.number()], &port.to_be_bytes()])
    }

    pub fn address(address: IpAddr) -> Self {
        Self::new(&[&octets(address)])
    }

    /// A source that may use an address.
    pub fn source(address: IpAddr, protocol: Protocol, port: u16, range: Cidr) -> Self {
        let with = |source: IpAddr| {
            Self::new(&[&octets(address), &[protocol.number()], &port.to_be_bytes(), &octets(source)])
        };
        Self::range(&with(range.network()), &with(range.last()))
    }

    /// The key; of a range, its first one.
    pub fn first(&self) -> &[u8] {
        let end = if self.is_range { self.bytes.len() / 2 } else { self.bytes.len() };
        self.bytes.get(..end).unwrap_or_default()
    }

    /// The last key of a range.
    pub fn last(&self) -> Option<&[u8]> {
        self.bytes.get(self.bytes.len() / 2..).filter(|_| self.is_range)
    }
}

/// The value of an element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Member,
    Bytes(Bytes),
    Goto(String),
}

/// An element to add or delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Element<S> {
    pub set: S,
    pub key: Key,
    pub value: Value,
    /// For people who list the table.
    pub comment: Option<String>,
}

/// Changes that the kernel makes together or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction<S> {
    /// Delete the table if it exists, and make it with all its sets.
    pub rebuild: bool,
    pub delete: Vec<Element<S>>,
    /// Chains to make, called ones before their callers.
    pub chains: Vec<Chain<S>>,
    pub add: Vec<Element<S>>,
}

impl<S> Transaction<S> {
    pub fn is_empty(&self) -> bool {
        !self.rebuild && self.delete.is_empty() && self.chains.is_empty() && self.add.is_empty()
    }
}

impl<S> Default for Transaction<S> {
    fn default() -> Self {
        Self { rebuild: false, delete: Vec::new(), chains: Vec::new(), add: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_ranges() {
        let key = Key::service([10, 0, 0, 1].into(), Protocol::Tcp, 0x1234);
        assert_eq!((key.first(), key.last()), ([10, 0, 0, 1, 6, 0, 0, 0, 0x12, 0x34, 0, 0].as_slice(), None));
        let range = Key::source([10, 0, 0, 1].into(), Protocol::Udp, 53, "192.0.2.0/24".parse().unwrap());
        let end = |last: u8| [10, 0, 0, 1, 17, 0, 0, 0, 0, 53, 0, 0, 192, 0, 2, last];
        assert_eq!((range.first(), range.last()), (end(0).as_slice(), Some(end(255).as_slice())));
        assert_ne!(range, Key::new(&[&end(0), &end(255)]), "a range is not a key of its ends");
    }
}
