//! Kinds of `apps` that are not in files of their own beside this directory.

pub(super) mod controllerrevision;
pub(super) mod daemonset;
pub(super) mod statefulset;
