//! Self-protection: before the node runs out of memory, disk, inodes or processes, pods are ended.
//!
//! `signals` has the watched resources, `decide` the decisions, `rank` the order of eviction: pure
//! functions with tables. This file observes, reports and ends pods.

mod decide;
mod observe;
mod rank;
mod signals;

pub(crate) use rank::PodUsage;
pub use signals::{EvictionSettings, ThresholdError};
pub(crate) use signals::{Pressure, Threshold, thresholds};

use crate::images::ImageGc;
use crate::pod::context::Context;
use crate::pod::manager::Workers;
use crate::pod::model;
use crate::pod::preemption::Resident;
use crate::pod::status::Verdict;
use crate::pod::{Ordered, PodId};
use crate::server::stats;
use decide::{EvictionState, Findings, is_crossed};
use ferrite_client::EventType;
use ferrite_cri::ImageService;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use observe::Observer;
use rank::Evictable;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// Nothing reports that memory or disk become scarce; upstream looks as often.
const PERIOD: Duration = Duration::from_secs(10);

/// Files are counted less often: a pod may have very many.
const COUNT_PERIOD: Duration = Duration::from_secs(30);

/// Time for the runtime to stop an evicted pod, whose grace period may be shorter.
const MIN_STOP: Duration = Duration::from_secs(10);

/// Time to remove what an evicted pod leaves.
const CLEAN_UP: Duration = Duration::from_secs(30);

/// Conditions of the node that admission and the Node's status read.
pub(crate) type Pressures = BTreeSet<Pressure>;

pub(crate) struct EvictionManager {
    pub context: Arc<Context>,
    pub images: Arc<dyn ImageService>,
    pub gc: Arc<ImageGc>,
    pub node: ObjectReference,
    pub thresholds: Vec<Threshold>,
    pub settings: EvictionSettings,
    /// Memory that all pods together may use.
    pub pods_memory: i64,
    /// Pods that have more on disk than they may are ended.
    pub disk_limits: bool,
    pub pressures: watch::Sender<Pressures>,
    /// Told when the conditions change.
    pub changed: Arc<Notify>,
}

impl EvictionManager {
    pub(crate) async fn run(self) {
        // Apart from each other: pods with very many files must not hold up an eviction for want of memory.
        tokio::join!(self.follow_pressures(), self.follow_disk_limits());
    }

    async fn follow_pressures(&self) {
        let (mut state, mut ending) = (EvictionState::default(), EndingPods::default());
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.pass(&mut state, &mut ending).await;
        }
    }

    async fn follow_disk_limits(&self) {
        if !self.disk_limits {
            return;
        }
        let mut ending = EndingPods::default();
        let mut ticks = tokio::time::interval(COUNT_PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            // As below: the pods of one round end before the next.
            if !ending.pending(&self.context.workers) {
                self.enforce_disk_limits(&mut ending).await;
            }
        }
    }

    fn observer(&self) -> Observer<'_> {
        Observer {
            context: &self.context,
            images: &*self.images,
            pods_memory: self.pods_memory,
            thresholds: &self.thresholds,
        }
    }

    async fn pass(&self, state: &mut EvictionState, ending: &mut EndingPods) {
        let observed = self.observer().observe().await;
        let now = self.context.clock.now();
        let Findings { pressures, due } =
            state.look(&self.thresholds, &observed, self.settings.transition, now);
        let changed = self.pressures.send_if_modified(|current| {
            let differs = *current != pressures;
            current.clone_from(&pressures);
            differs
        });
        if changed {
            let names: Vec<&str> = pressures.iter().map(|p| p.name()).collect();
            tracing::info!(conditions = ?names, "the node's conditions changed");
            self.changed.notify_one();
        }
        // One pod at a time: its end may be enough.
        if ending.pending(&self.context.workers) {
            return;
        }
        let Some(threshold) = due.first() else { return };
        let resource = threshold.signal.resource();
        let message = format!("Attempting to reclaim {resource}");
        self.context.recorder.event(&self.node, EventType::Warning, "EvictionThresholdMet", message);
        if threshold.signal.pressure() == Pressure::Disk && self.free_images(&due).await {
            return;
        }
        self.evict(threshold, &observed, ending).await;
    }

    /// Pods that could be ended: those that hold something and are neither critical nor static. One that ends already
    /// may do so with too much grace.
    fn pods(&self) -> Vec<Arc<Pod>> {
        let remote = self.context.pods.remote();
        let active = |pod: &Arc<Pod>| {
            let critical = Resident { pod, local: false }.is_critical();
            !critical && !model::is_finished(pod) && !self.context.workers.is_released(&PodId::of(pod).uid)
        };
        remote.into_iter().filter(active).collect()
    }

    async fn usage(&self, pods: &[Arc<Pod>], with_disk: bool) -> BTreeMap<String, PodUsage> {
        match stats::usage(&self.context, pods, with_disk).await {
            Ok(usage) => usage,
            Err(error) => {
                tracing::warn!(%error, "cannot read what pods use");
                BTreeMap::new()
            }
        }
    }

    /// Ends pods that have more on disk than they may.
    async fn enforce_disk_limits(&self, ending: &mut EndingPods) {
        let mut limited = self.pods();
        limited.retain(|pod| rank::has_disk_limit(pod));
        if limited.is_empty() {
            return;
        }
        let usage = self.usage(&limited, true).await;
        for pod in &limited {
            let Some(used) = usage.get(&PodId::of(pod).uid) else { continue };
            if let Some(message) = rank::disk_excess(pod, used) {
                self.end(pod, message, Duration::from_secs(1), ending);
            }
        }
    }

    /// Removes images that nobody uses. True when that is enough.
    async fn free_images(&self, due: &[Threshold]) -> bool {
        if let Err(error) = self.gc.remove_unused().await {
            tracing::warn!(%error, "cannot remove unused images");
            return false;
        }
        let observed = self.observer().observe().await;
        !due.iter().any(|threshold| is_crossed(threshold, &observed, true))
    }

    async fn evict(&self, threshold: &Threshold, observed: &decide::Observations, ending: &mut EndingPods) {
        let pods = self.pods();
        let mut usage = self.usage(&pods, threshold.signal.pressure() == Pressure::Disk).await;
        let mut candidates: Vec<Evictable<'_>> = pods
            .iter()
            .map(|pod| Evictable { pod, usage: usage.remove(&PodId::of(pod).uid).unwrap_or_default() })
            .collect();
        rank::rank(&mut candidates, threshold.signal);
        let seen = observed.get(&threshold.signal);
        let (wanted, available) = seen.map_or((0, 0), |o| (threshold.amount.of(o.capacity), o.available));
        for candidate in &candidates {
            let grace = match threshold.grace {
                // As upstream: a hard threshold leaves a second.
                None => Duration::from_secs(1),
                Some(_) => self.settings.max_pod_grace.min(crate::pod::grace_of(candidate.pod)),
            };
            let message = rank::message(candidate, threshold.signal, wanted, available);
            if self.end(candidate.pod, message, grace, ending) {
                return;
            }
        }
        tracing::warn!(
            resource = threshold.signal.resource(),
            "no pod can be ended to free what the node lacks"
        );
    }

    /// Orders the pod's end. False if it ends as soon already.
    fn end(&self, pod: &Pod, message: String, grace: Duration, ending: &mut EndingPods) -> bool {
        let uid = PodId::of(pod).uid;
        let verdict = Verdict {
            reason: "Evicted".into(),
            message: message.clone(),
            disruption: Some(message.clone()),
            grace: Some(grace),
        };
        match self.context.workers.end(&uid, verdict) {
            Ordered::Unchanged => return false,
            Ordered::Sooner => tracing::info!(pod = %PodId::of(pod), message, "a pod ends sooner"),
            Ordered::First => {
                tracing::info!(pod = %PodId::of(pod), message, "evicting a pod");
                self.context.event(pod, EventType::Warning, "Evicted", message);
            }
        }
        ending.add(uid, grace);
        true
    }
}

/// Pods that were ordered to end, and until when the next ones wait for them.
#[derive(Default)]
struct EndingPods(Vec<(String, Instant)>);

impl EndingPods {
    /// As upstream: a pod that does not end in time must not keep the node from helping itself.
    fn add(&mut self, uid: String, grace: Duration) {
        let stop = (grace + grace / 2).max(MIN_STOP);
        self.0.push((uid, Instant::now() + stop + CLEAN_UP));
    }

    /// True while one of them holds something of the node and has time left.
    fn pending(&mut self, workers: &Workers) -> bool {
        let now = Instant::now();
        self.0.retain(|(uid, until)| now < *until && !workers.is_released(uid));
        !self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;
    use ferrite_json::json;

    #[tokio::test(start_paused = true)]
    async fn the_next_eviction_waits_for_the_last_one_but_not_for_ever() {
        let h = Harness::start().await;
        h.runtime.ignore_term();
        let spec = json!({"terminationGracePeriodSeconds": 86_400, "containers": [{"name": "c", "image": "busybox:1"}]});
        h.create("p", spec);
        h.until_phase("p", "Running").await;
        let mut ending = EndingPods::default();
        assert!(!ending.pending(&h.workers));
        ending.add("uid-p".into(), Duration::from_secs(20));
        assert!(ending.pending(&h.workers));
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(ending.pending(&h.workers));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(!ending.pending(&h.workers), "another pod may have its turn");
        ending.add("uid-gone".into(), Duration::from_secs(20));
        assert!(!ending.pending(&h.workers), "nothing is left of it");
    }
}
