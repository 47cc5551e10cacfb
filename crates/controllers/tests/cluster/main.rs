//! Controllers and scheduler against a real API server in this process, with a stand-in for the kubelet.

mod kubelet;
mod support;

mod collection;
mod deployments;
mod lifecycle;
mod nodes;
