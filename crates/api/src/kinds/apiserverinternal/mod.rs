//! Kinds of `internal.apiserver.k8s.io`.

pub(super) mod storageversion;
