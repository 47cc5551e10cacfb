//! Handling of nodes that fall silent, and of the pods on them.

mod conditions;
mod eviction;
mod labels;
mod lifecycle;
mod measures;
mod pod_gc;
mod taints;
mod zones;

pub(crate) use eviction::start as start_taint_eviction;
pub(crate) use lifecycle::start as start_lifecycle;
pub(crate) use pod_gc::start as start_pod_gc;
pub use zones::EvictionRates;
