//! Taints that follow from a node's conditions.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::conditions::{Readiness, condition, readiness};

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// Conditions that keep new pods away while they are True.
const PRESSURES: &[(&str, &str)] = &[
    ("MemoryPressure", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "node.kubernetes.io/pid-pressure"),
    ("NetworkUnavailable", "node.kubernetes.io/network-unavailable"),
];
pub(super) const NO_SCHEDULE: &str = "NoSchedule";
pub(super) const NO_EXECUTE: &str = "NoExecute";

/// Which key a node's readiness is tainted with, if any.
fn readiness_key(node: &Node) -> Option<&'static str> {
    match readiness(node) {
        Readiness::True | Readiness::Absent => None,
        Readiness::False => Some(NOT_READY),
        Readiness::Unknown => Some(UNREACHABLE),
    }
}

/// Returns true if the node does not answer, or says that it is not ready.
pub(super) fn is_lost(node: &Node) -> bool {
    readiness_key(node).is_some()
}

/// The state of evictions from a node that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Eviction {
    /// A NoExecute taint may come.
    May,
    /// None may come. Swapping one kind for the other needs no leave.
    Waits,
    /// None may stay: every node is lost, so the network to the nodes is probably what failed.
    Ends,
}

/// Returns true if the node should get a NoExecute taint that it lacks: only this taint is rate-limited.
pub(super) fn wants_eviction(node: &Node) -> bool {
    let held = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    readiness_key(node).is_some()
        && !held
            .iter()
            .any(|taint| taint.effect == NO_EXECUTE && (taint.key == NOT_READY || taint.key == UNREACHABLE))
}

/// All taints of the node as they should be, or nothing if they are. Those that people set are never touched.
pub(super) fn desired(node: &Node, eviction: Eviction, now: Timestamp) -> Option<Vec<Taint>> {
    let held = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let readiness_key = readiness_key(node);
    let mut wanted: Vec<(&str, &str)> = Vec::new();
    if let Some(key) = readiness_key {
        wanted.push((key, NO_SCHEDULE));
        let is_evicted = match eviction {
            Eviction::May => true,
            Eviction::Waits => !wants_eviction(node),
            Eviction::Ends => false,
        };
        if is_evicted {
            wanted.push((key, NO_EXECUTE));
        }
    }
    for (kind, key) in PRESSURES {
        if condition(node, kind).is_some_and(|condition| condition.status == "True") {
            wanted.push((key, NO_SCHEDULE));
        }
    }
    if node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false) {
        wanted.push((UNSCHEDULABLE, NO_SCHEDULE));
    }
    let ours = |taint: &Taint| {
        let readiness = taint.key == NOT_READY || taint.key == UNREACHABLE;
        match taint.effect.as_str() {
            NO_SCHEDULE => {
                readiness || taint.key == UNSCHEDULABLE || PRESSURES.iter().any(|(_, key)| *key == taint.key)
            }
            NO_EXECUTE => readiness,
            _ => false,
        }
    };
    let is_wanted = |taint: &Taint| wanted.contains(&(taint.key.as_str(), taint.effect.as_str()));
    let mut result: Vec<Taint> =
        held.iter().filter(|taint| !ours(taint) || is_wanted(taint)).cloned().collect();
    for (key, effect) in wanted {
        if !result.iter().any(|taint| taint.key == key && taint.effect == effect) {
            result.push(Taint {
                key: key.to_owned(),
                effect: effect.to_owned(),
                time_added: Some(Time(now)),
                value: None,
            });
        }
    }
    (result != held).then_some(result)
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn node(conditions: Value, taints: Value) -> Node {
        ferrite_json::from_value(json!({"spec": {"taints": taints}, "status": {"conditions": conditions}}))
            .unwrap()
    }

    #[test]
    fn taints_follow_conditions_and_leave_others_alone() {
        let ready = |status: &str| json!([{"type": "Ready", "status": status}]);
        let own = json!({"key": "team", "effect": "NoExecute"});
        let taint =
            |key: &str, effect: &str| json!({"key": format!("node.kubernetes.io/{key}"), "effect": effect});
        for (what, node, eviction, expected) in [
            ("ready", node(ready("True"), json!([own])), Eviction::May, None),
            (
                "not ready",
                node(ready("False"), json!([])),
                Eviction::May,
                Some(vec!["not-ready:NoSchedule", "not-ready:NoExecute"]),
            ),
            (
                "not ready, no leave to evict",
                node(ready("False"), json!([])),
                Eviction::Waits,
                Some(vec!["not-ready:NoSchedule"]),
            ),
            (
                "unreachable after not ready",
                node(
                    ready("Unknown"),
                    json!([own, taint("not-ready", "NoSchedule"), taint("not-ready", "NoExecute")]),
                ),
                Eviction::Waits,
                Some(vec!["team:NoExecute", "unreachable:NoSchedule", "unreachable:NoExecute"]),
            ),
            (
                "all nodes lost",
                node(
                    ready("Unknown"),
                    json!([own, taint("unreachable", "NoSchedule"), taint("unreachable", "NoExecute")]),
                ),
                Eviction::Ends,
                Some(vec!["team:NoExecute", "unreachable:NoSchedule"]),
            ),
            (
                "ready again",
                node(
                    ready("True"),
                    json!([taint("unreachable", "NoSchedule"), taint("unreachable", "NoExecute"), own]),
                ),
                Eviction::May,
                Some(vec!["team:NoExecute"]),
            ),
            (
                "pressure",
                node(json!([{"type": "DiskPressure", "status": "True"}]), json!([])),
                Eviction::May,
                Some(vec!["disk-pressure:NoSchedule"]),
            ),
        ] {
            let got = desired(&node, eviction, Timestamp::now()).map(|taints| {
                taints
                    .iter()
                    .map(|taint| {
                        format!("{}:{}", taint.key.trim_start_matches("node.kubernetes.io/"), taint.effect)
                    })
                    .collect::<Vec<_>>()
            });
            assert_eq!(got, expected.map(|taints| taints.into_iter().map(str::to_owned).collect()), "{what}");
        }
    }
}
