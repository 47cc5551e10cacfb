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
use crate::pod::PodId;
use crate::pod::context::Context;
use crate::pod::model;
use crate::pod::preemption::Resident;
use crate::pod::status::Verdict;
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

/// Nothing reports that memory or disk become scarce; upstream looks as often.
const PERIOD: Duration = Duration::from_secs(10);

/// Files are counted less often: a pod may have very many.
const COUNT_PERIOD: Duration = Duration::from_secs(30);

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
        let mut state = EvictionState::default();
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.pass(&mut state).await;
        }
    }

    async fn follow_disk_limits(&self) {
        if !self.disk_limits {
            return;
        }
        let mut ticks = tokio::time::interval(COUNT_PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            // One pod at a time, as below.
            if !self.is_ending() {
                self.enforce_disk_limits().await;
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

    async fn pass(&self, state: &mut EvictionState) {
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
        if self.is_ending() {
            return;
        }
        let Some(threshold) = due.first() else { return };
        let resource = threshold.signal.resource();
        let message = format!("Attempting to reclaim {resource}");
        self.context.recorder.event(&self.node, EventType::Warning, "EvictionThresholdMet", message);
        if threshold.signal.pressure() == Pressure::Disk && self.free_images(&due).await {
            return;
        }
        self.evict(threshold, &observed).await;
    }

    /// Pods that could be ended: active ones that are neither critical nor static.
    fn pods(&self) -> Vec<Arc<Pod>> {
        let remote = self.context.pods.remote();
        let active = |pod: &Arc<Pod>| {
            let critical = Resident { pod, local: false }.is_critical();
            !critical && !model::is_finished(pod) && !model::is_deleting(pod)
        };
        remote.into_iter().filter(active).collect()
    }

    fn is_ending(&self) -> bool {
        let ordered = self.context.workers.ordered_ends();
        let pods = self.context.pods.remote();
        pods.iter().any(|pod| !model::is_finished(pod) && ordered.contains(&PodId::of(pod).uid))
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
    async fn enforce_disk_limits(&self) {
        let mut limited = self.pods();
        limited.retain(|pod| rank::has_disk_limit(pod));
        if limited.is_empty() {
            return;
        }
        let usage = self.usage(&limited, true).await;
        for pod in &limited {
            let Some(used) = usage.get(&PodId::of(pod).uid) else { continue };
            if let Some(message) = rank::disk_excess(pod, used) {
                self.end(pod, message, Duration::from_secs(1));
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

    async fn evict(&self, threshold: &Threshold, observed: &decide::Observations) {
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
            if self.end(candidate.pod, message, grace) {
                return;
            }
        }
        tracing::warn!(
            resource = threshold.signal.resource(),
            "no pod can be ended to free what the node lacks"
        );
    }

    fn end(&self, pod: &Pod, message: String, grace: Duration) -> bool {
        let uid = PodId::of(pod).uid;
        let verdict = Verdict {
            reason: "Evicted".into(),
            message: message.clone(),
            disruption: Some(message.clone()),
            grace: Some(grace),
        };
        let ended = self.context.workers.end(&uid, verdict);
        if ended {
            tracing::info!(pod = %PodId::of(pod), message, "evicting a pod");
            self.context.event(pod, EventType::Warning, "Evicted", message);
        }
        ended
    }
}
