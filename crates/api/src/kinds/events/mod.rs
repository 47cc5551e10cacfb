//! Kinds of `events.k8s.io`.

pub(super) mod event;
