//! The Node object: registration, status, lease.

mod lease;
mod machine;
mod manager;
mod status;

pub(crate) use machine::{Machine, meminfo_bytes};
pub(crate) use manager::{NodeManager, Readiness, reference};
pub(crate) use status::Allocatable;
