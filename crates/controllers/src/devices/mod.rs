//! Dynamic resource allocation: claims of pods, and pods whose devices are tainted.

pub(crate) mod claims;
pub(crate) mod taints;
