//! The settings of a scheduler.

pub mod v1;

use crate::extender::ExtenderSettings;
use crate::profile::Profile;
use crate::queue::BackoffLimits;

/// The settings of a scheduler, with the defaults in.
#[derive(Debug, Clone)]
pub struct Configuration {
    pub profiles: Vec<Profile>,
    /// Percentage of nodes to score; `None` is adaptive.
    pub percentage_of_nodes_to_score: Option<usize>,
    pub backoff: BackoffLimits,
    pub extenders: Vec<ExtenderSettings>,
}

impl Default for Configuration {
    fn default() -> Self {
        Self {
            profiles: vec![Profile::default()],
            percentage_of_nodes_to_score: None,
            backoff: BackoffLimits::default(),
            extenders: Vec::new(),
        }
    }
}
