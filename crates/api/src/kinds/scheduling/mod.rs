//! Kinds of `scheduling.k8s.io`.

pub(super) mod priorityclass;
