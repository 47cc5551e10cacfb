//! Chains, elements and the changes that are made together.

use std::net::IpAddr;

use crate::expr::{Rule, octets};
use crate::{Cidr, Protocol};

/// Where in the packet's way a base chain is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
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
    pub first: Vec<u8>,
    pub last: Option<Vec<u8>>,
}

impl Key {
    pub fn new(fields: &[&[u8]]) -> Self {
        let mut first = Vec::with_capacity(fields.len() * 4);
        for field in fields {
            first.extend_from_slice(field);
            first.resize(first.len().next_multiple_of(4), 0);
        }
        Self { first, last: None }
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
            Self::new(&[&octets(address), &[protocol.number()], &port.to_be_bytes(), &octets(source)]).first
        };
        Self { first: with(range.network()), last: Some(with(range.last())) }
    }
}

/// The value of an element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Member,
    Bytes(Vec<u8>),
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
