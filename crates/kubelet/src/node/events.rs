//! Events about the node, as its status changes.

use ferrite_client::EventType;
use k8s_openapi::api::core::v1::NodeStatus;

/// An event: kind, reason and message.
pub(super) type NodeEvent = (EventType, &'static str, String);

/// The conditions with events, and the reasons of those when they become true and false.
const CONDITIONS: [(&str, &str, &str); 3] = [
    ("MemoryPressure", "NodeHasInsufficientMemory", "NodeHasSufficientMemory"),
    ("DiskPressure", "NodeHasDiskPressure", "NodeHasNoDiskPressure"),
    ("PIDPressure", "NodeHasInsufficientPID", "NodeHasSufficientPID"),
];

pub(super) fn status_is_now(node: &str, reason: &'static str) -> NodeEvent {
    (EventType::Normal, reason, format!("Node {node} status is now: {reason}"))
}

/// The events about a status that follows another one.
pub(super) fn of_status(node: &str, before: &NodeStatus, after: &NodeStatus) -> Vec<NodeEvent> {
    let boot =
        |status: &NodeStatus| status.node_info.as_ref().map(|info| info.boot_id.clone()).unwrap_or_default();
    let (last, now) = (boot(before), boot(after));
    let rebooted = (!last.is_empty() && last != now)
        .then(|| (EventType::Warning, "Rebooted", format!("Node {node} has been rebooted, boot id: {now}")));
    let condition = |status: &NodeStatus, name: &str| {
        let found = status.conditions.iter().flatten().find(|condition| condition.type_ == name);
        found.map(|condition| condition.status.clone())
    };
    let changed = CONDITIONS.into_iter().filter_map(|(name, yes, no)| {
        let is = condition(after, name)?;
        (condition(before, name).as_ref() != Some(&is))
            .then(|| status_is_now(node, if is == "True" { yes } else { no }))
    });
    rebooted.into_iter().chain(changed).collect()
}

/// The event about a change of the administrator's.
pub(super) fn of_scheduling(node: &str, before: bool, unschedulable: bool) -> Option<NodeEvent> {
    let reason = if unschedulable { "NodeNotSchedulable" } else { "NodeSchedulable" };
    (before != unschedulable).then(|| status_is_now(node, reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn changes_of_the_node_are_told() {
        let status = |boot: &str, memory: Option<&str>| -> NodeStatus {
            let conditions: Vec<Value> =
                memory.iter().map(|status| json!({"type": "MemoryPressure", "status": status})).collect();
            let info = json!({"bootID": boot, "architecture": "", "containerRuntimeVersion": "", "kernelVersion": "",
                "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "", "osImage": "",
                "systemUUID": ""});
            ferrite_json::from_value(json!({"nodeInfo": info, "conditions": conditions})).unwrap()
        };
        for (before, after, expected) in [
            (NodeStatus::default(), status("a", Some("False")), vec!["NodeHasSufficientMemory"]),
            (status("a", Some("False")), status("a", Some("False")), vec![]),
            (status("a", Some("False")), status("a", Some("True")), vec!["NodeHasInsufficientMemory"]),
            (status("a", Some("Unknown")), status("a", Some("False")), vec!["NodeHasSufficientMemory"]),
            (status("a", None), status("b", None), vec!["Rebooted"]),
        ] {
            let events = of_status("n", &before, &after);
            assert_eq!(events.iter().map(|(_, reason, _)| *reason).collect::<Vec<_>>(), expected);
        }
        let (_, _, message) = &of_status("n", &status("a", None), &status("b", None))[0];
        assert_eq!(message, "Node n has been rebooted, boot id: b");
        let (_, reason, message) = of_scheduling("n", false, true).unwrap();
        assert_eq!(
            (reason, message.as_str()),
            ("NodeNotSchedulable", "Node n status is now: NodeNotSchedulable")
        );
        assert_eq!(of_scheduling("n", true, false).unwrap().1, "NodeSchedulable");
        assert!(of_scheduling("n", true, true).is_none());
    }
}
