//! Room for critical pods: which pods of lower standing must end.

use super::admission::Insufficient;
use super::model::{self, QosClass};
use crate::container::resources::{pod_resources, requests};
use k8s_openapi::api::core::v1::Pod;

/// Priority of the system's own classes, as upstream.
const SYSTEM_CRITICAL: i32 = 2_000_000_000;

/// A pod on the node, and whether it is a static one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resident<'a> {
    pub pod: &'a Pod,
    pub local: bool,
}

impl Resident<'_> {
    fn priority(&self) -> Option<i32> {
        model::spec(self.pod).priority
    }

    /// Static pods are, and those of the system's priority classes.
    pub(crate) fn is_critical(&self) -> bool {
        self.local || self.priority().is_some_and(|priority| priority >= SYSTEM_CRITICAL)
    }

    fn may_preempt(&self, other: &Resident<'_>) -> bool {
        if self.is_critical() && !other.is_critical() {
            return true;
        }
        matches!((self.priority(), other.priority()), (Some(own), Some(theirs)) if own > theirs)
    }

    fn request(&self, resource: &str) -> i64 {
        let sums = pod_resources(self.pod);
        match resource {
            "cpu" => sums.cpu_request,
            "memory" => sums.memory_request,
            "ephemeral-storage" => sums.ephemeral_request,
            "pods" => 1,
            other => requests(self.pod).get(other).copied().unwrap_or(0),
        }
    }
}

/// No set of pods would make enough room.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: {0}"
)]
pub(crate) struct NoRoom(String);

/// The resources still missing.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Missing(Vec<(String, i64)>);

impl Missing {
    fn without(&self, pods: &[Resident<'_>]) -> Self {
        let left = |(resource, amount): &(String, i64)| {
            let freed = pods.iter().map(|pod| pod.request(resource)).fold(0i64, i64::saturating_add);
            (amount - freed > 0).then(|| (resource.clone(), amount - freed))
        };
        Self(self.0.iter().filter_map(left).collect())
    }

    /// The share that a pod leaves missing: smaller is better.
    fn distance(&self, pod: &Resident<'_>) -> f64 {
        let share = |(resource, amount): &(String, i64)| {
            let left = (amount - pod.request(resource)).max(0) as f64;
            (left / *amount as f64).powi(2)
        };
        self.0.iter().map(share).sum()
    }

    fn to_error(&self) -> NoRoom {
        let all: String =
            self.0.iter().map(|(name, amount)| format!("(res: {name}, q: {amount}), ")).collect();
        NoRoom(format!("[{all}]"))
    }
}

/// The pods that must end so that `pod` fits: as few as possible, and of the lower classes of service first.
pub(crate) fn victims<'a>(
    pod: &Resident<'_>,
    residents: &[Resident<'a>],
    insufficient: &[Insufficient],
) -> Result<Vec<&'a Pod>, NoRoom> {
    let missing = Missing(insufficient.iter().map(|i| (i.resource.clone(), i.missing())).collect());
    let of = |class: QosClass| -> Vec<Resident<'a>> {
        let lower = residents.iter().filter(|other| pod.may_preempt(other));
        lower.filter(|other| model::qos_class(other.pod) == class).copied().collect()
    };
    let (best_effort, burstable, guaranteed) =
        (of(QosClass::BestEffort), of(QosClass::Burstable), of(QosClass::Guaranteed));
    let all = [best_effort.clone(), burstable.clone(), guaranteed.clone()].concat();
    let left = missing.without(&all);
    if !left.0.is_empty() {
        return Err(left.to_error());
    }
    // Of each class only the pods that the classes below cannot spare.
    let lower = [best_effort.clone(), burstable.clone()].concat();
    let guaranteed = nearest(guaranteed, missing.without(&lower))?;
    let burstable = nearest(burstable, missing.without(&[best_effort.clone(), guaranteed.clone()].concat()))?;
    let best_effort =
        nearest(best_effort, missing.without(&[burstable.clone(), guaranteed.clone()].concat()))?;
    Ok([best_effort, burstable, guaranteed].concat().iter().map(|resident| resident.pod).collect())
}

fn nearest<'a>(mut pods: Vec<Resident<'a>>, mut missing: Missing) -> Result<Vec<Resident<'a>>, NoRoom> {
    let mut chosen = Vec::new();
    while !missing.0.is_empty() {
        let rank = |pod: &Resident<'_>| {
            (
                missing.distance(pod),
                pod.request("memory"),
                pod.request("cpu"),
                pod.request("ephemeral-storage"),
            )
        };
        let best = pods.iter().enumerate().min_by(|(_, a), (_, b)| {
            let (a, b) = (rank(a), rank(b));
            a.0.total_cmp(&b.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3)))
        });
        let Some((index, _)) = best else { return Err(missing.to_error()) };
        let pod = pods.swap_remove(index);
        missing = missing.without(&[pod]);
        chosen.push(pod);
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    /// A pod with requests of CPU and memory, of a priority; `guaranteed` limits both as well.
    fn pod(name: &str, cpu: &str, memory: &str, priority: i32, guaranteed: bool) -> Pod {
        let amounts = json!({"cpu": cpu, "memory": memory});
        let resources = match (guaranteed, cpu) {
            (true, _) => json!({"requests": amounts, "limits": amounts}),
            (false, "0") => json!({}),
            (false, _) => json!({"requests": amounts}),
        };
        ferrite_json::from_value(json!({"metadata": {"name": name},
            "spec": {"priority": priority, "containers": [{"name": "c", "resources": resources}]}}))
        .unwrap()
    }

    #[test]
    fn as_few_and_as_unimportant_as_possible() {
        let critical = pod("critical", "1", "1Gi", SYSTEM_CRITICAL, false);
        let plain = pod("plain", "1", "1Gi", 5, false);
        let small = pod("small", "200m", "100Mi", 0, false);
        let large = pod("large", "1", "1Gi", 0, false);
        let huge = pod("huge", "2", "2Gi", 0, false);
        let best = pod("best", "0", "0", 0, false);
        let guaranteed = pod("guaranteed", "1", "1Gi", 0, true);
        let other_critical = pod("other", "1", "1Gi", SYSTEM_CRITICAL, false);
        let needs = |cpu: i64, memory: i64, pods: i64| {
            let row = |resource: &str, missing: i64| Insufficient {
                resource: resource.into(),
                requested: missing,
                used: 0,
                capacity: 0,
            };
            [row("cpu", cpu), row("memory", memory), row("pods", pods)]
                .into_iter()
                .filter(|i| i.requested > 0)
                .collect::<Vec<_>>()
        };
        for (what, preemptor, residents, insufficient, expected) in [
            (
                "the smallest that is enough",
                &critical,
                vec![&small, &large, &huge],
                needs(500, 0, 0),
                Ok("large"),
            ),
            ("a small one is enough", &critical, vec![&large, &small], needs(100, 0, 0), Ok("small")),
            ("two small ones", &critical, vec![&small, &large], needs(1100, 0, 0), Ok("large small")),
            ("a place", &critical, vec![&large, &best, &guaranteed], needs(0, 0, 1), Ok("best")),
            (
                "burstable before guaranteed",
                &critical,
                vec![&guaranteed, &large],
                needs(1000, 0, 0),
                Ok("large"),
            ),
            (
                "guaranteed when nothing else is",
                &critical,
                vec![&guaranteed, &small],
                needs(1000, 0, 0),
                Ok("guaranteed"),
            ),
            (
                "critical pods are left alone",
                &critical,
                vec![&other_critical],
                needs(100, 0, 0),
                Err("[(res: cpu, q: 100), ]"),
            ),
            ("too much", &critical, vec![&large], needs(5000, 0, 0), Err("[(res: cpu, q: 4000), ]")),
            ("priority alone counts, too", &plain, vec![&small], needs(100, 0, 0), Ok("small")),
        ] {
            let residents: Vec<Resident<'_>> =
                residents.into_iter().map(|pod| Resident { pod, local: false }).collect();
            let got = victims(&Resident { pod: preemptor, local: false }, &residents, &insufficient);
            let names = got.map(|pods| {
                let mut names: Vec<_> = pods.iter().filter_map(|p| p.metadata.name.clone()).collect();
                names.sort();
                names.join(" ")
            });
            match expected {
                Ok(expected) => assert_eq!(names.as_deref(), Ok(expected), "{what}"),
                Err(part) => assert!(names.unwrap_err().to_string().ends_with(part), "{what}"),
            }
        }
        let local = Resident { pod: &small, local: true };
        assert!(local.is_critical() && local.may_preempt(&Resident { pod: &large, local: false }));
        assert!(!Resident { pod: &large, local: false }.may_preempt(&local));
    }
}
