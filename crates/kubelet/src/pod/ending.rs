//! Orders to end a pod: from the API, and from the kubelet for the sake of others.

use super::kill::grace_of;
use super::status::Verdict;
use super::worker::Desired;
use std::time::Duration;
use tokio::sync::watch;

/// A pod that vanished from the API without us has waited long enough.
const FORCED_GRACE: Duration = Duration::from_secs(2);

/// The effect of an order on a pod's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ordered {
    /// The pod was not ordered to end before.
    First,
    /// The pod ends already, and now with less grace.
    Sooner,
    /// The pod ends already with as little grace, or has no worker.
    Unchanged,
}

/// Notes an order. The first one decides what the status says; a later one can only shorten the grace period.
pub(super) fn order(current: &mut Option<Verdict>, verdict: Verdict) -> Ordered {
    let Some(known) = current else {
        *current = Some(verdict);
        return Ordered::First;
    };
    let is_sooner = verdict.grace.is_some_and(|wanted| known.grace.is_none_or(|given| wanted < given));
    if !is_sooner {
        return Ordered::Unchanged;
    }
    known.grace = verdict.grace;
    Ordered::Sooner
}

/// The grace period of the pod's containers.
pub(super) fn limit(desired: &Desired, ordered: Option<&Verdict>, local: bool) -> Duration {
    let own = match desired {
        Desired::Present(pod) => grace_of(pod),
        // Its manifest is gone, and nobody has waited for its end yet.
        Desired::Gone(pod) if local => grace_of(pod),
        Desired::Gone(pod) => grace_of(pod).min(FORCED_GRACE),
    };
    match ordered.and_then(|verdict| verdict.grace) {
        Some(given) if desired.must_end() => given.min(own),
        Some(given) => given,
        None => own,
    }
}

/// Both orders, as they arrive.
#[derive(Clone)]
pub(super) struct EndSignal {
    pub desired: watch::Receiver<Desired>,
    pub ordered: watch::Receiver<Option<Verdict>>,
}

impl EndSignal {
    /// Waits until the pod must end, or nobody is left to say so.
    pub(super) async fn begun(&mut self) {
        tokio::select! {
            _ = self.desired.wait_for(Desired::must_end) => {}
            _ = self.ordered.wait_for(Option::is_some) => {}
        }
    }

    /// Waits until the grace period is shorter than `limit`. None when nobody is left to say so.
    pub(super) async fn sooner(&mut self, current: Duration, local: bool) -> Option<Desired> {
        loop {
            let desired = self.desired.borrow_and_update().clone();
            let ordered = self.ordered.borrow_and_update().clone();
            if limit(&desired, ordered.as_ref(), local) < current {
                return Some(desired);
            }
            let changed = tokio::select! {
                changed = self.desired.changed() => changed,
                changed = self.ordered.changed() => changed,
            };
            changed.ok()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use k8s_openapi::api::core::v1::Pod;
    use std::sync::Arc;

    fn verdict(reason: &str, grace: Option<u64>) -> Verdict {
        Verdict {
            reason: reason.into(),
            message: String::new(),
            disruption: None,
            grace: grace.map(Duration::from_secs),
        }
    }

    #[test]
    fn a_later_order_only_shortens_the_end() {
        use Ordered::*;
        for (first, second, effect, grace) in [
            (None, None, Unchanged, None),
            (None, Some(1), Sooner, Some(1)),
            (Some(30), Some(1), Sooner, Some(1)),
            (Some(1), Some(1), Unchanged, Some(1)),
            (Some(1), Some(30), Unchanged, Some(1)),
            (Some(1), None, Unchanged, Some(1)),
        ] {
            let mut current = None;
            assert_eq!(order(&mut current, verdict("Preempting", first)), First);
            assert_eq!(order(&mut current, verdict("Evicted", second)), effect, "{first:?} {second:?}");
            assert_eq!(current, Some(verdict("Preempting", grace)));
        }
    }

    #[test]
    fn the_shortest_grace_period_counts() {
        let pod = |deletion: Option<i64>| -> Arc<Pod> {
            let mut metadata = json!({"name": "p"});
            if let Some(seconds) = deletion {
                metadata["deletionTimestamp"] = json!("2023-11-14T22:13:20Z");
                metadata["deletionGracePeriodSeconds"] = json!(seconds);
            }
            let pod = json!({"metadata": metadata, "spec": {"terminationGracePeriodSeconds": 30, "containers": []}});
            Arc::new(ferrite_json::from_value(pod).unwrap())
        };
        use Desired::*;
        for (desired, local, ordered, seconds) in [
            (Present(pod(None)), false, None, 30),
            (Present(pod(None)), false, Some(5), 5),
            (Present(pod(None)), false, Some(60), 60),
            (Present(pod(Some(10))), false, None, 10),
            (Present(pod(Some(10))), false, Some(60), 10),
            (Present(pod(Some(10))), false, Some(1), 1),
            (Gone(pod(None)), false, None, 2),
            (Gone(pod(None)), false, Some(1), 1),
            (Gone(pod(None)), true, None, 30),
        ] {
            let ordered = verdict("Evicted", ordered);
            assert_eq!(limit(&desired, Some(&ordered), local).as_secs(), seconds, "{desired:?} {local}");
        }
    }
}
