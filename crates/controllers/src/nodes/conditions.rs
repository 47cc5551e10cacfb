//! The conditions that a node reports, and those that the controller sets when the node is silent.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(super) const READY: &str = "Ready";
/// Conditions that become Unknown when the kubelet falls silent.
const REPORTED: &[&str] = &[READY, "MemoryPressure", "DiskPressure", "PIDPressure"];

/// Status of the `Ready` condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readiness {
    True,
    False,
    Unknown,
    /// The node has not reported yet.
    Absent,
}

pub(super) fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a NodeCondition> {
    node.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

pub(super) fn readiness(node: &Node) -> Readiness {
    match condition(node, READY).map(|condition| condition.status.as_str()) {
        None => Readiness::Absent,
        Some("True") => Readiness::True,
        Some("False") => Readiness::False,
        Some(_) => Readiness::Unknown,
    }
}

/// The node with every reported condition Unknown, or nothing if it already says so.
pub(super) fn silenced(node: &Node, now: Timestamp) -> Option<Node> {
    let mut silent = node.clone();
    let created = node.metadata.creation_timestamp.clone();
    let conditions = silent.status.get_or_insert_default().conditions.get_or_insert_default();
    let mut changed = false;
    for kind in REPORTED {
        match conditions.iter_mut().find(|condition| condition.type_ == *kind) {
            Some(known) if known.status == "Unknown" => {}
            Some(known) => {
                known.status = "Unknown".to_owned();
                known.reason = Some("NodeStatusUnknown".to_owned());
                known.message = Some("Kubelet stopped posting node status.".to_owned());
                known.last_transition_time = Some(Time(now));
                changed = true;
            }
            None => {
                conditions.push(NodeCondition {
                    type_: (*kind).to_owned(),
                    status: "Unknown".to_owned(),
                    reason: Some("NodeStatusNeverUpdated".to_owned()),
                    message: Some("Kubelet never posted node status.".to_owned()),
                    last_heartbeat_time: created.clone(),
                    last_transition_time: Some(Time(now)),
                });
                changed = true;
            }
        }
    }
    changed.then_some(silent)
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn a_silent_node_becomes_unknown_once() {
        let node: Node =
            ferrite_json::from_value(json!({"metadata": {"name": "n"}, "status": {"conditions": [
            {"type": "Ready", "status": "True"}, {"type": "NetworkUnavailable", "status": "False"}]}}))
            .unwrap();
        let silent = silenced(&node, Timestamp::now()).unwrap();
        let told: Vec<_> = silent
            .status
            .as_ref()
            .unwrap()
            .conditions
            .as_ref()
            .unwrap()
            .iter()
            .map(|c| format!("{} {} {}", c.type_, c.status, c.reason.as_deref().unwrap_or("-")))
            .collect();
        assert_eq!(
            told,
            [
                "Ready Unknown NodeStatusUnknown",
                "NetworkUnavailable False -",
                "MemoryPressure Unknown NodeStatusNeverUpdated",
                "DiskPressure Unknown NodeStatusNeverUpdated",
                "PIDPressure Unknown NodeStatusNeverUpdated",
            ]
        );
        assert_eq!(readiness(&silent), Readiness::Unknown);
        assert!(silenced(&silent, Timestamp::now()).is_none());
    }
}
