//! Orders the active queue: highest priority first, then longest waiting.

use tokio::time::Instant;

use crate::framework::{Plugin, QueueSort, SortKey};
use crate::snapshot::PodInfo;

pub(super) struct PrioritySort;

impl Plugin for PrioritySort {
    fn name(&self) -> &'static str {
        "PrioritySort"
    }

    fn queue_sort(&self) -> Option<&dyn QueueSort> {
        Some(self)
    }
}

impl QueueSort for PrioritySort {
    fn sort_key(&self, pod: &PodInfo, queued: Instant) -> SortKey {
        SortKey { rank: -i64::from(pod.priority), then: queued }
    }
}
