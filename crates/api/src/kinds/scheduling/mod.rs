//! Kinds of `scheduling.k8s.io`.

mod pod_group_parts;
pub(super) mod podgroup;
pub(super) mod priorityclass;
pub(super) mod workload;
