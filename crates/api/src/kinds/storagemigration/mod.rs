//! Kinds of `storagemigration.k8s.io`.

pub(super) mod storageversionmigration;
