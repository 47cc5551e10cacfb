//! `admissionregistration.k8s.io`.

pub(super) mod binding;
pub(super) mod client_config;
mod matching;
pub(super) mod policy;
#[cfg(test)]
mod tests;
pub(super) mod webhook;
