//! Controllers and scheduler against a real API server in this process, with a stand-in for the kubelet.

#![expect(clippy::unwrap_used, reason = "a test that cannot set itself up has failed")]

mod kubelet;
mod storage;
mod support;

mod autoscaling;
mod balancers;
mod collection;
mod daemons;
mod deployments;
mod devices;
mod faults;
mod hostile;
mod jobs;
mod leader;
mod lifecycle;
mod migrations;
mod mirror;
mod nodes;
mod policy;
mod preemption;
mod stateful;
mod volumes;
