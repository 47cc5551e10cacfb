//! The settings of a scheduler.

pub mod v1;

use crate::extender::ExtenderSettings;
use crate::profile::Profile;
use crate::queue::{BackoffLimits, LONGEST_WAIT};
use std::time::Duration;

/// The settings of a scheduler, with the defaults in.
#[derive(Debug, Clone)]
pub struct Configuration {
    pub profiles: Vec<Profile>,
    /// Percentage of nodes to score; `None` is adaptive.
    pub percentage_of_nodes_to_score: Option<usize>,
    pub backoff: BackoffLimits,
    pub extenders: Vec<ExtenderSettings>,
    /// A pod that no change helped is tried again after so long.
    pub longest_wait: Duration,
}

impl Default for Configuration {
    fn default() -> Self {
        Self {
            profiles: vec![Profile::default()],
            percentage_of_nodes_to_score: None,
            backoff: BackoffLimits::default(),
            extenders: Vec::new(),
            longest_wait: LONGEST_WAIT,
        }
    }
}
