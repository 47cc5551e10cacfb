//! The service proxy: Services and EndpointSlices become nftables maps.
//!
//! The pure core goes from API objects to a transaction: [`model`] (service ports with their endpoints), [`layout`]
//! (the table as data) and [`diff`] (the changes). `ferrite-nft` sends it through netlink, and [`sync`]
//! keeps one table
//! up to date. [`Proxy`] puts them behind informers, with [`conntrack`] and [`health`] beside.

mod config;
pub mod conntrack;
pub mod diff;
pub mod health;
pub mod layout;
mod lent;
mod listen;
mod metrics;
pub mod model;
mod run;
pub mod sync;
pub mod view;

pub use config::{ProxyConfig, ProxyError};
pub use run::{Proxy, remove_tables};
