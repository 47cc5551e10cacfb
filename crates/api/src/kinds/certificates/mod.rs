//! Kinds of `certificates.k8s.io`.

pub(super) mod certificatesigningrequest;
pub(super) mod clustertrustbundle;
mod key;
pub(super) mod podcertificaterequest;
