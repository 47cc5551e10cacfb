//! The Node object: registration, status, lease.

mod events;
mod features;
mod lease;
mod machine;
mod manager;
mod status;

#[cfg(test)]
pub(crate) use features::RuntimeFeatures;
pub(crate) use machine::{Machine, hugepages, meminfo_bytes};
pub(crate) use manager::{NodeManager, Readiness, labels, reference};
pub(crate) use status::Allocatable;
