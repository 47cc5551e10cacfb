//! Kinds of `apiextensions.k8s.io`.

mod authorities;
pub(super) mod customresourcedefinition;
