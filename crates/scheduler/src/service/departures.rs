//! Waits until this scheduler itself has seen that victims of preemption leave.
//!
//! The response to a delete comes before the informer shows it. A preemptor that were tried in between would find its
//! node as full as before, and choose further victims.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrite_client::ObjectKey;
use tokio::sync::oneshot;

#[derive(Debug, Default)]
pub(super) struct Departures {
    /// Preemptors that wait for a pod. A pod may be the victim of several, one after the other.
    awaited: Mutex<HashMap<ObjectKey, Vec<oneshot::Sender<()>>>>,
}

/// Ends when a pod was seen to leave.
pub(super) type Departure = oneshot::Receiver<()>;

impl Departures {
    fn awaited(&self) -> MutexGuard<'_, HashMap<ObjectKey, Vec<oneshot::Sender<()>>>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Call it before the pod is deleted, and check then that it is not gone already.
    pub(super) fn expect(&self, pod: &ObjectKey) -> Departure {
        let (sender, receiver) = oneshot::channel();
        let mut awaited = self.awaited();
        let waiting = awaited.entry(pod.clone()).or_default();
        // Nobody waits any more for a pod that could not be deleted.
        waiting.retain(|other| !other.is_closed());
        waiting.push(sender);
        receiver
    }

    /// The pod is terminating, or gone.
    pub(super) fn seen(&self, pod: &ObjectKey) {
        let waiting = {
            let mut awaited = self.awaited();
            if awaited.is_empty() {
                return;
            }
            awaited.remove(pod)
        };
        // A preemptor that is gone itself has dropped its end.
        for sender in waiting.into_iter().flatten() {
            let _ = sender.send(());
        }
    }

    /// Forgets pods that nobody waits for any more.
    pub(super) fn forget(&self, pod: &ObjectKey) {
        let mut awaited = self.awaited();
        if let Some(waiting) = awaited.get_mut(pod) {
            waiting.retain(|other| !other.is_closed());
            if waiting.is_empty() {
                awaited.remove(pod);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_preemptor_of_a_pod_hears_of_its_departure() {
        let departures = Departures::default();
        let (a, b) = (ObjectKey::new("ns", "a"), ObjectKey::new("ns", "b"));
        let (first, second, mut other) =
            (departures.expect(&a), departures.expect(&a), departures.expect(&b));
        departures.seen(&a);
        assert!(first.await.is_ok() && second.await.is_ok());
        assert!(other.try_recv().is_err(), "another pod");
        drop(other);
        departures.forget(&b);
        assert!(departures.awaited().is_empty());
    }
}
