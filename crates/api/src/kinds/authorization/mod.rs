//! Kinds of `authorization.k8s.io`.

pub(super) mod review;
