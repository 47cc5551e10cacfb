//! Kinds of `apps`.

pub(super) mod controllerrevision;
pub(super) mod daemonset;
pub(super) mod deployment;
pub(super) mod replicaset;
pub(super) mod statefulset;
