//! NetworkPolicies (`networking.k8s.io/v1`) become an nftables table on each node.
//!
//! The pure core goes from API objects to a transaction: [`model`] (policies and pods as facts), [`layout`] (the table as
//! data) and [`engine`] (which changes follow from a change of facts). [`PolicyGuard`] puts it behind informers, and
//! covers a pod before the pod has a link.

pub mod engine;
pub mod layout;
pub mod model;
mod run;
pub mod view;

pub use run::{PolicyConfig, PolicyError, PolicyGuard, Sources};
