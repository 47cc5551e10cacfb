//! Pods that a Permit plugin delays before they are bound.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_client::ObjectKey;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::Rejection;
use crate::snapshot::PodInfo;

/// The end of a wait.
#[derive(Debug, Clone)]
pub enum PermitOutcome {
    Allowed,
    /// The named plugin rejected the pod, or its time ran out.
    Rejected {
        plugin: &'static str,
        rejection: Rejection,
    },
    /// A pod of higher priority needs the room. This says nothing about the pod: it is tried again after its back-off.
    Preempted(&'static str),
}

/// A pod between Permit and binding. Plugins find it through [`WaitingPods`].
#[derive(Debug)]
pub struct WaitingPod {
    pub pod: Arc<PodInfo>,
    pub node: String,
    /// The plugins that still delay it, with the time at which each gives up.
    pending: Mutex<BTreeMap<&'static str, (Instant, Duration)>>,
    outcome: watch::Sender<Option<PermitOutcome>>,
}

impl WaitingPod {
    fn pending(&self) -> MutexGuard<'_, BTreeMap<&'static str, (Instant, Duration)>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The plugins that still delay the pod.
    pub fn pending_plugins(&self) -> Vec<&'static str> {
        self.pending().keys().copied().collect()
    }

    fn decide(&self, outcome: PermitOutcome) -> bool {
        self.outcome.send_if_modified(|held| {
            let is_first = held.is_none();
            if is_first {
                *held = Some(outcome);
            }
            is_first
        })
    }

    /// `plugin` does not delay the pod any longer. The pod is bound when no plugin does.
    pub fn allow(&self, plugin: &'static str) {
        let mut pending = self.pending();
        pending.remove(plugin);
        if pending.is_empty() {
            self.decide(PermitOutcome::Allowed);
        }
    }

    /// The pod is not bound and goes back to the queue. False if its wait was over already.
    pub fn reject(&self, plugin: &'static str, reason: impl Into<super::Reason>) -> bool {
        self.decide(PermitOutcome::Rejected { plugin, rejection: Rejection::unschedulable(reason) })
    }

    /// As [`reject`](Self::reject), for a pod of higher priority.
    pub(crate) fn preempt(&self, reason: &'static str) -> bool {
        self.decide(PermitOutcome::Preempted(reason))
    }

    async fn wait(&self) -> PermitOutcome {
        let mut outcome = self.outcome.subscribe();
        let deadline = self.pending().iter().map(|(plugin, (at, limit))| (*at, *plugin, *limit)).min();
        let decided = async {
            // The sender lives as long as `self`.
            outcome.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone())
        };
        let Some((at, plugin, limit)) = deadline else {
            return decided.await.unwrap_or(PermitOutcome::Allowed);
        };
        tokio::select! {
            biased;
            outcome = decided => outcome.unwrap_or(PermitOutcome::Allowed),
            () = sleep_until(at) => {
                let reason = format!("rejected due to timeout after waiting {limit:?} at plugin {plugin}");
                self.reject(plugin, reason);
                self.outcome.borrow().clone().unwrap_or(PermitOutcome::Allowed)
            }
        }
    }
}

/// All pods that wait for permission, by key.
#[derive(Debug, Clone, Default)]
pub struct WaitingPods(Arc<Mutex<HashMap<ObjectKey, Arc<WaitingPod>>>>);

impl WaitingPods {
    fn pods(&self) -> MutexGuard<'_, HashMap<ObjectKey, Arc<WaitingPod>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Arc<WaitingPod>> {
        self.pods().get(key).cloned()
    }

    pub fn list(&self) -> Vec<Arc<WaitingPod>> {
        self.pods().values().cloned().collect()
    }

    /// The pod waits from now on; [`wait`](WaitingPods::wait) ends it.
    pub(crate) fn insert(
        &self,
        pod: Arc<PodInfo>,
        node: &str,
        plugins: impl IntoIterator<Item = (&'static str, Duration)>,
    ) {
        let now = Instant::now();
        let pending = plugins.into_iter().map(|(plugin, limit)| (plugin, (now + limit, limit))).collect();
        let key = pod.key.clone();
        let waiting = WaitingPod {
            pod,
            node: node.to_owned(),
            pending: Mutex::new(pending),
            outcome: watch::Sender::new(None),
        };
        self.pods().insert(key, Arc::new(waiting));
    }

    /// Waits until the pod is allowed or rejected. A pod that does not wait is allowed.
    pub(crate) async fn wait(&self, key: &ObjectKey) -> PermitOutcome {
        let Some(waiting) = self.get(key) else { return PermitOutcome::Allowed };
        let outcome = waiting.wait().await;
        self.pods().remove(key);
        outcome
    }
}
