//! Kinds of `node.k8s.io`.

pub(super) mod runtimeclass;
