//! Dynamic resource allocation: claims of pods, and pods whose devices are tainted.

pub(crate) mod claims;
mod reference;
pub(crate) mod taints;
