//! The status of a StatefulSet.

use std::time::Duration;

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetStatus};

use super::decide::View;
use super::identity::revision;
use super::{is_rolling_update, min_ready_seconds, replicas};
use crate::pods::{is_ready, is_terminating, phase, ready_since};

/// Zero is written as absence, as Go does.
fn some(number: i32) -> Option<i32> {
    (number != 0).then_some(number)
}

impl View<'_> {
    /// The status. `replaced` says that a pod was deleted for the update since the view was taken.
    pub(super) fn status(&self, collisions: i32, replaced: bool) -> StatefulSetStatus {
        let (mut count, mut ready, mut available, mut current, mut updated) = (0, 0, 0, 0, 0);
        for pod in self.members() {
            let created = !phase(pod).is_empty();
            count += i32::from(created);
            if phase(pod) == "Running" && is_ready(pod) {
                ready += 1;
                available += i32::from(self.is_available(pod));
            }
            if created && !is_terminating(pod) {
                current += i32::from(revision(pod) == self.current.name);
                updated += i32::from(revision(pod) == self.update.name);
            }
        }
        let mut status = StatefulSetStatus {
            observed_generation: self.set.metadata.generation,
            replicas: count,
            ready_replicas: some(ready),
            available_replicas: Some(available),
            current_replicas: some((current - i32::from(replaced)).max(0)),
            updated_replicas: some(updated),
            current_revision: Some(self.current.name.clone()),
            update_revision: Some(self.update.name.clone()),
            collision_count: Some(collisions),
            conditions: self.set.status.as_ref().and_then(|status| status.conditions.clone()),
        };
        let wanted = replicas(self.set);
        if is_rolling_update(self.set) && updated == wanted && ready == wanted && count == wanted {
            status.current_replicas = status.updated_replicas;
            status.current_revision = status.update_revision.clone();
        }
        status
    }

    /// The time until the next ready pod has been so for `minReadySeconds`.
    pub(super) fn next_available(&self) -> Option<Duration> {
        let needed = i64::from(min_ready_seconds(self.set));
        if needed <= 0 {
            return None;
        }
        let waiting = self.members().filter(|pod| is_ready(pod) && !self.is_available(pod));
        let left = waiting.filter_map(|pod| {
            let held = self.now.duration_since(ready_since(pod)?).as_secs().max(0);
            u64::try_from(needed - held).ok()
        });
        left.min().map(|seconds| Duration::from_secs(seconds.max(1)))
    }
}

/// Returns true if `status` differs from the set's status. An absent number is zero.
pub(super) fn differs(set: &StatefulSet, status: &StatefulSetStatus) -> bool {
    let key = |status: &StatefulSetStatus| {
        let numbers = [
            Some(status.replicas),
            status.ready_replicas,
            status.available_replicas,
            status.current_replicas,
            status.updated_replicas,
            status.collision_count,
        ];
        (
            status.observed_generation,
            numbers.map(Option::unwrap_or_default),
            [status.current_revision.clone(), status.update_revision.clone()],
        )
    };
    key(&set.status.clone().unwrap_or_default()) != key(status)
}
