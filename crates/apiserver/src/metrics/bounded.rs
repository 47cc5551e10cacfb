//! Labels whose values users choose.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Most series of one metric. Only users who may configure the server make new ones, but they may do so for ever.
const SERIES: usize = 2048;

/// The series of a metric: no more than a limit.
#[derive(Default)]
pub(crate) struct BoundedSeries(Mutex<HashSet<Vec<String>>>);

impl BoundedSeries {
    /// Returns true if the metric has, or may have, a series of these labels.
    pub fn admits(&self, labels: &[&str]) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let labels: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
        if known.contains(&labels) {
            return true;
        }
        known.len() < SERIES && known.insert(labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_limited() {
        let series = BoundedSeries::default();
        assert!((0..SERIES).all(|name| series.admits(&[&name.to_string()])));
        assert!(series.admits(&["0"]) && !series.admits(&["another"]));
    }
}
