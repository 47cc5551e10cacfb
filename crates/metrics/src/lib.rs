//! The resource metrics API, `metrics.k8s.io/v1beta1`, as a group that the API server mounts.
//!
//! [`sample`] parses a kubelet's `/metrics/resource`, [`usage`] makes rates of two such samples, and
//! [`collector`] asks the kubelets while clients ask for metrics. [`ResourceMetrics`] answers with the
//! figures of the pods
//! and nodes that the API server knows.

mod collector;
mod objects;
mod resource_metrics;
mod sample;
mod usage;

pub use resource_metrics::ResourceMetrics;
