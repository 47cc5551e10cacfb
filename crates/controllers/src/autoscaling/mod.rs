//! The horizontal pod autoscaler: scales targets by the figures of metrics.
//!
//! A sync of an autoscaler reads the target's scale ([`scale`]), fetches the figures of each metric
//! ([`metrics`]) and
//! turns them into proposals ([`proposal`], with the arithmetic in [`replicas`] and [`pods`]). The highest proposal is
//! stabilised and limited ([`limits`]), and the scale is written.

mod conditions;
mod controller;
mod limits;
mod measures;
mod metrics;
mod pods;
mod proposal;
mod replicas;
mod scale;
#[cfg(test)]
mod tests;

pub(crate) use controller::start;

use std::time::Duration;

/// Settings of the horizontal pod autoscaler; the default is upstream's.
#[derive(Debug, Clone, Copy)]
pub struct AutoscalingConfig {
    /// The time between two syncs of an autoscaler.
    pub sync_period: Duration,
    /// The highest recommendation of this time decides before anything is scaled down.
    pub downscale_stabilization: Duration,
    /// Usage that is off its target by no more than this share is left alone.
    pub tolerance: f64,
    /// The time after a pod's start in which its CPU usage counts only if it was ready for a whole window.
    pub cpu_initialization_period: Duration,
    /// Changes of readiness so soon after the start are part of the start.
    pub initial_readiness_delay: Duration,
    /// Number of autoscalers synced in parallel.
    pub workers: usize,
}

impl Default for AutoscalingConfig {
    fn default() -> Self {
        Self {
            sync_period: Duration::from_secs(15),
            downscale_stabilization: Duration::from_secs(300),
            tolerance: 0.1,
            cpu_initialization_period: Duration::from_secs(300),
            initial_readiness_delay: Duration::from_secs(30),
            workers: 5,
        }
    }
}
