//! `resource.k8s.io`: devices, classes of them, and claims to them.

mod admin;
mod allocation;
pub(super) mod beta;
mod claim;
pub(super) mod deviceclass;
pub(super) mod devicetaintrule;
pub(super) mod resourceclaim;
pub(super) mod resourcepoolstatusrequest;
pub(super) mod resourceslice;
mod selector;
