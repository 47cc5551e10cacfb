//! The service proxy: Services and EndpointSlices become nftables maps.
//!
//! The pure core goes from API objects to a transaction: [`model`] (service ports with their endpoints), [`layout`]
//! (the table as data) and [`diff`] (what to change). [`kernel`] sends it through netlink. [`Proxy`] puts them
//! together behind informers.

pub mod diff;
pub mod kernel;
pub mod layout;
pub mod model;
pub mod sync;
