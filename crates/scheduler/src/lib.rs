//! The scheduler: gives every pod without a node one.
//!
//! [`framework`] has the extension points of plugins, [`plugins`] holds one module and one table row per
//! plugin, [`profile`] lists the plugins of a scheduler's name, [`cycle`] is the pure decision over a
//! [`snapshot`] (whose labels are [`columns`]), [`preemption`] the choice of pods to remove, [`cache`] and [`queue`] feed the decision,
//! `devices` chooses devices for claims, `resource_metrics` is a page of the port, [`extender`] asks web services, [`configuration`] has the settings, and [`service`] connects all that to the API.

mod affinity_terms;
pub mod cache;
pub mod columns;
pub mod configuration;
pub mod cycle;
mod devices;
pub mod explain;
pub mod extender;
pub mod framework;
mod measures;
mod memory;
pub mod plugins;
mod pod_info;
pub mod preemption;
pub mod profile;
pub mod queue;
mod resource_metrics;
pub mod resources;
pub mod service;
pub mod siblings;
pub mod snapshot;

pub use configuration::Configuration;
pub use framework::{Framework, Registry};
pub use profile::Profile;
pub use resource_metrics::page as resource_metrics_page;
pub use service::{SchedulerContext, check, connect, start};
