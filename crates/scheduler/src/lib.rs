//! The scheduler: gives every pod without a node one.
//!
//! [`framework`] says what a plugin can do at each extension point, [`plugins`] holds one module and one table row
//! per plugin, [`cycle`] is the pure decision over a [`snapshot`], [`cache`] and [`queue`] are what the decision is
//! fed from, and [`service`] connects all that to the API.

pub mod cache;
pub mod cycle;
pub mod framework;
pub mod plugins;
pub mod queue;
pub mod resources;
pub mod service;
pub mod snapshot;

pub use framework::{Framework, Profile};
pub use service::{SchedulerContext, start};
