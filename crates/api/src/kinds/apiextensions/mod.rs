//! Kinds of `apiextensions.k8s.io`.

pub(super) mod customresourcedefinition;
