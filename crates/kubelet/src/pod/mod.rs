//! Pods: the desired state, the runtime's state, the decisions, and the workers.

pub(crate) mod admission;
mod admit;
mod apply;
pub(crate) mod backoff;
pub(crate) mod context;
mod decide;
mod ending;
#[cfg(test)]
mod ending_tests;
#[cfg(test)]
mod fields;
mod files;
mod kill;
pub(crate) mod labels;
pub(crate) mod manager;
pub(crate) mod model;
pub(crate) mod observe;
pub(crate) mod pending_resizes;
pub(crate) mod pod_level;
#[cfg(test)]
mod pod_level_tests;
mod predicates;
pub(crate) mod preemption;
mod prepare;
#[cfg(test)]
mod refusal_tests;
mod resize;
mod resizing;
mod restart_all;
pub(crate) mod runtime_pod;
mod start;
#[cfg(test)]
mod static_tests;
pub(crate) mod status;
pub(crate) mod table;
mod terminate;
mod worker;
mod writer;

pub(crate) use ending::Ordered;
pub(crate) use kill::grace_of;
pub(crate) use model::{PodContainer, PodId};
pub(crate) use writer::merge_difference as writer_difference;
pub(crate) use writer::write as write_status;
