//! End to end: the real binary, real kernel objects, an unmodified kubectl.
//!
//! Every test has a cluster of its own, in a network namespace of its own, in a directory of its own.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test that fails should stop at once")]

mod aggregation;
mod archive;
mod autoscaling;
mod bad_input;
mod churn;
mod claims;
mod clients;
mod components;
mod configuration;
mod containerd;
mod control_planes;
mod credentials;
mod csi;
mod custom;
mod devices;
mod dns;
mod docker;
mod docker_network;
mod docker_options;
mod encryption;
mod guide;
mod ingress;
mod ipv6;
mod kubectl;
mod kubelet;
mod lifecycle;
mod network;
mod newcomer;
mod nodes;
mod pod_certificates;
mod pods;
mod proxy;
mod registry;
mod resize;
mod reviews;
mod rollout;
mod scheduling;
mod server;
mod servers;
mod services;
mod standalone;
mod storage;
mod store;
mod streams;
mod tunnel;
mod volumes;
#[allow(dead_code, reason = "shared with the attacks")]
mod world;
