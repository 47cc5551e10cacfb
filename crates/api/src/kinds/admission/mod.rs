//! `admissionregistration.k8s.io`. Expressions are checked where they are compiled, not here.

pub(super) mod binding;
pub(super) mod client_config;
mod matching;
pub(super) mod policy;
pub(super) mod webhook;
