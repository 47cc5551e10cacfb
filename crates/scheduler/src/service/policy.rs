//! The plugins' part in the queue.

use std::sync::Arc;

use tokio::time::Instant;

use super::Profiles;
use crate::framework::{ClusterEvent, SortKey};
use crate::profile::ExtensionPoint;
use crate::queue::QueuePolicy;
use crate::snapshot::PodInfo;

pub(super) struct Policy {
    pub(super) profiles: Arc<Profiles>,
}

impl QueuePolicy for Policy {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), &'static str> {
        let Some((framework, _)) = self.profiles.get(pod.scheduler_name()) else { return Ok(()) };
        framework.pre_enqueue(pod).map_err(|by| by.plugin)
    }

    fn sort_key(&self, pod: &PodInfo, queued: Instant) -> SortKey {
        let profile = self.profiles.get(pod.scheduler_name());
        let plugin = profile.and_then(|(framework, _)| framework.at(ExtensionPoint::QueueSort).first());
        match plugin.and_then(|plugin| plugin.queue_sort()) {
            Some(point) => point.sort_key(pod, queued),
            None => SortKey { rank: 0, then: queued },
        }
    }

    fn queueing_hint(&self, pod: &PodInfo, rejected_by: &[&'static str], event: &ClusterEvent) -> bool {
        let profile = self.profiles.get(pod.scheduler_name());
        profile.is_some_and(|(framework, _)| framework.queueing_hint(pod, rejected_by, event))
    }
}
