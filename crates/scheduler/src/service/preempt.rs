//! Removes the pods that preemption chose.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, EventType, is_conflict, is_not_found, message_of};
use ferrite_json::json;
use futures_util::{FutureExt, StreamExt, stream};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use tokio::time::Instant;
use tracing::{info, warn};

use super::Scheduler;
use crate::framework::Nomination;
use crate::snapshot::{PREEMPTION_BY_SCHEDULER, PodInfo};

/// Victims of one preemptor that are deleted at once.
const PARALLEL: usize = 16;
/// The longest that a preemptor waits for the informer to show that a victim leaves.
const LONGEST_DEPARTURE: Duration = Duration::from_secs(5);

impl Scheduler {
    /// Removes the victims from `node`. The preemptor is held in the queue and released at the end: with victims still
    /// present it would choose more of them.
    pub(super) async fn preempt(&self, preemptor: &PodInfo, node: &str, victims: &[Arc<PodInfo>]) {
        // Pods of lower priority that wait for room on the node will not get it: they look for another place.
        let lower: Vec<Arc<PodInfo>> = {
            let cache = self.cache();
            let nominated = cache.nominated_to(node).iter();
            nominated.filter(|other| other.priority < preemptor.priority).cloned().collect()
        };
        for pod in lower {
            self.cache().remove_nomination(&pod.key);
            let mut turn = self.turns.take(&pod.key);
            turn.come().await;
            self.write_nomination(&pod, &Nomination::Clear).await;
        }
        let removals: Vec<_> =
            victims.iter().map(|victim| self.remove_and_see(preemptor, node, victim).boxed()).collect();
        let results: Vec<bool> = stream::iter(removals).buffer_unordered(PARALLEL).collect().await;
        let has_failed = results.contains(&false);
        self.queue().release(&preemptor.key, has_failed, Instant::now());
        self.wake.notify_one();
    }

    /// Removes a victim and waits until the cache knows. False if the victim could not be removed.
    async fn remove_and_see(&self, preemptor: &PodInfo, node: &str, victim: &PodInfo) -> bool {
        let departure = self.departures.expect(&victim.key);
        let is_removed = self.remove(preemptor, node, victim).await;
        if is_removed && self.is_here(victim) {
            // The informer brings it sooner or later. The limit is for a server that cannot be reached.
            let _ = tokio::time::timeout(LONGEST_DEPARTURE, departure).await;
        } else {
            drop(departure);
        }
        self.departures.forget(&victim.key);
        is_removed
    }

    /// True if the cache counts the pod, and does not know that it is about to go.
    fn is_here(&self, pod: &PodInfo) -> bool {
        let cache = self.cache();
        cache.confirmed(&pod.key).is_some_and(|known| known.uid == pod.uid && !known.is_terminating())
    }

    /// False if the victim could not be removed.
    async fn remove(&self, preemptor: &PodInfo, node: &str, victim: &PodInfo) -> bool {
        let uid = preemptor.uid.as_deref().unwrap_or_default();
        let mut message = format!("Preempted by pod {uid} on node {node}");
        let waiting = self.handle.waiting_pods.get(&victim.key);
        let waiting = waiting.filter(|waiting| waiting.pod.uid == victim.uid);
        // A victim that is not bound yet only goes back to the queue.
        let is_stopped = waiting.is_some_and(|waiting| waiting.preempt("preempted"))
            || self.pre_binds.cancel(victim, "preempted by DefaultPreemption");
        if is_stopped {
            message.push_str(" (in kube-scheduler memory).");
        } else if let Err(error) = self.delete(preemptor, victim).await {
            if is_not_found(&error) || is_conflict(&error) {
                return true;
            }
            warn!(victim = %victim.key, preemptor = %preemptor.key, error = message_of(&error), "cannot preempt");
            return false;
        }
        info!(victim = %victim.key, preemptor = %preemptor.key, node, "preempted");
        if let Some((_, recorder)) = self.profile_of(preemptor) {
            let (about, because) = (victim.reference(), Some(preemptor.reference()));
            recorder.event(&about, because, EventType::Normal, "Preempted", "Preempting", message);
        }
        true
    }

    async fn delete(&self, preemptor: &PodInfo, victim: &PodInfo) -> Result<(), kube::Error> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &victim.key.namespace);
        // The cache has the newest state of the pod that was seen; the victim may be older.
        let generation =
            self.cache().confirmed(&victim.key).map_or_else(|| victim.generation(), |pod| pod.generation());
        let condition = PodCondition {
            type_: "DisruptionTarget".to_owned(),
            status: "True".to_owned(),
            reason: Some(PREEMPTION_BY_SCHEDULER.to_owned()),
            message: Some(format!(
                "{}: preempting to accommodate a higher priority pod",
                preemptor.scheduler_name()
            )),
            last_transition_time: Some(Time(jiff::Timestamp::now())),
            observed_generation: generation,
            ..PodCondition::default()
        };
        let patch = json!({"metadata": {"uid": victim.uid}, "status": {"conditions": [condition]}});
        api.patch_status_unread(&victim.key.name, &PatchParams::default(), &Patch::Strategic(patch)).await?;
        // A pod made anew with the same name is another pod.
        let uid = victim.uid.as_ref().map(ToString::to_string);
        let params = DeleteParams::default().preconditions(Preconditions { uid, ..Preconditions::default() });
        api.delete(&victim.key.name, &params).await
    }
}
