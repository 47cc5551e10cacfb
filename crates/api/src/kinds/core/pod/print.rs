//! The table cells of a pod: `kubectl get pods`.

use crate::kinds::common::access::{flag, int, list, present, text};
use crate::table::{NONE, age, duration};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::collections::HashSet;

/// The condition by which a client hides pods that have ended.
pub fn row_conditions(pod: &Value) -> Option<Value> {
    let (phase, message) = match pod["status"]["phase"].as_str()? {
        phase @ "Succeeded" => (phase, "The pod has completed successfully."),
        phase @ "Failed" => (phase, "The pod failed."),
        _ => return None,
    };
    Some(json!([{"type": "Completed", "status": "True", "reason": phase, "message": message}]))
}

/// One cell per column of the pod table.
pub fn cells(pod: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let summary = summarise(pod);
    let restarts = match summary.last_restart {
        Some(then) if summary.restarts != 0 => {
            format!("{} ({} ago)", summary.restarts, duration(now.as_second() - then.as_second()))
        }
        _ => summary.restarts.to_string(),
    };
    let or_none = |s: &str| Value::from(if s.is_empty() { NONE } else { s });
    vec![
        crate::meta::name(pod).into(),
        format!("{}/{}", summary.ready, summary.total).into(),
        summary.reason.into(),
        restarts.into(),
        age(pod, now).into(),
        or_none(list(status, "podIPs").first().map_or("", |ip| text(ip, "ip"))),
        or_none(text(spec, "nodeName")),
        or_none(text(status, "nominatedNodeName")),
        readiness_gates(spec, status).into(),
    ]
}

struct Summary {
    ready: usize,
    total: usize,
    reason: String,
    restarts: i64,
    last_restart: Option<Timestamp>,
}

/// Restarts of some containers, and when the last one was.
#[derive(Clone, Copy, Default)]
struct Restarts {
    count: i64,
    last: Option<Timestamp>,
}

impl Restarts {
    fn add(&mut self, container: &Value) {
        self.count += int(container, "restartCount");
        let finished = container
            .pointer("/lastState/terminated/finishedAt")
            .and_then(Value::as_str)
            .and_then(|t| t.parse::<Timestamp>().ok());
        self.last = self.last.max(finished);
    }
}

/// The one word for a pod's state. A container's waiting or exit reason says more than the phase.
fn summarise(pod: &Value) -> Summary {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let phase = text(status, "phase");
    let mut reason = match text(status, "reason") {
        "" => phase.to_owned(),
        reason => reason.to_owned(),
    };
    if list(status, "conditions")
        .iter()
        .any(|c| text(c, "type") == "PodScheduled" && text(c, "reason") == "SchedulingGated")
    {
        reason = "SchedulingGated".to_owned();
    }

    let sidecars: HashSet<&str> = list(spec, "initContainers")
        .iter()
        .filter(|c| text(c, "restartPolicy") == "Always")
        .map(|c| text(c, "name"))
        .collect();
    let total = list(spec, "containers").len() + sidecars.len();
    let mut ready = 0;
    let mut all_restarts = Restarts::default();
    let mut sidecar_restarts = Restarts::default();
    let mut initialising = false;
    for (index, container) in list(status, "initContainerStatuses").iter().enumerate() {
        let sidecar = sidecars.contains(text(container, "name"));
        all_restarts.add(container);
        if sidecar {
            sidecar_restarts.add(container);
        }
        let state = &container["state"];
        let terminated = state.get("terminated").filter(|t| t.is_object());
        if terminated.is_some_and(|t| int(t, "exitCode") == 0) {
            continue;
        }
        if sidecar && flag(container, "started") {
            ready += usize::from(flag(container, "ready"));
            continue;
        }
        let waiting = state.get("waiting").map_or("", |w| text(w, "reason"));
        reason = match terminated {
            Some(ended) => format!("Init:{}", ending(ended)),
            None if !waiting.is_empty() && waiting != "PodInitializing" => format!("Init:{waiting}"),
            None => format!("Init:{index}/{}", list(spec, "initContainers").len()),
        };
        initialising = true;
        break;
    }

    let mut restarts = all_restarts;
    if !initialising || condition_is_true(status, "Initialized") {
        restarts = sidecar_restarts;
        let mut running = false;
        for container in list(status, "containerStatuses").iter().rev() {
            restarts.add(container);
            let state = &container["state"];
            let waiting = state.get("waiting").map_or("", |w| text(w, "reason"));
            if !waiting.is_empty() {
                reason = waiting.to_owned();
            } else if let Some(ended) = state.get("terminated").filter(|t| t.is_object()) {
                reason = ending(ended);
            } else if flag(container, "ready") && present(state, "running") {
                running = true;
                ready += 1;
            }
        }
        // A pod is not completed while one of its containers still runs.
        if reason == "Completed" && running {
            reason = if condition_is_true(status, "Ready") { "Running" } else { "NotReady" }.to_owned();
        }
    }

    if crate::meta::is_deleting(pod) {
        if text(status, "reason") == "NodeLost" {
            reason = "Unknown".to_owned();
        } else if !matches!(phase, "Succeeded" | "Failed") {
            reason = "Terminating".to_owned();
        }
    }
    Summary { ready, total, reason, restarts: restarts.count, last_restart: restarts.last }
}

fn ending(terminated: &Value) -> String {
    match (text(terminated, "reason"), int(terminated, "signal")) {
        ("", 0) => format!("ExitCode:{}", int(terminated, "exitCode")),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

fn condition_is_true(status: &Value, kind: &str) -> bool {
    list(status, "conditions").iter().any(|c| text(c, "type") == kind && text(c, "status") == "True")
}

fn readiness_gates(spec: &Value, status: &Value) -> String {
    let gates = list(spec, "readinessGates");
    if gates.is_empty() {
        return NONE.to_owned();
    }
    let open = gates.iter().filter(|gate| condition_is_true(status, text(gate, "conditionType"))).count();
    format!("{open}/{}", gates.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn pod(init: &[Value], count: usize, status: Value) -> Value {
        let containers: Vec<Value> = (0..count).map(|i| json!({"name": format!("c{i}")})).collect();
        json!({"metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"initContainers": init, "containers": containers}, "status": status})
    }

    #[test]
    fn the_word_for_a_state() {
        let running = json!({"ready": true, "state": {"running": {}}});
        let plain = [json!({"name": "i0"}), json!({"name": "i1"})];
        let sidecar = [json!({"name": "s", "restartPolicy": "Always"})];
        let rows = [
            (pod(&[], 1, json!({"phase": "Pending"})), "0/1", "Pending", "0"),
            (pod(&[], 1, json!({"phase": "Failed", "reason": "Evicted"})), "0/1", "Evicted", "0"),
            (pod(&[], 1, json!({"phase": "Running", "containerStatuses": [running]})), "1/1", "Running", "0"),
            (
                pod(
                    &[],
                    1,
                    json!({"phase": "Pending", "containerStatuses": [
                    {"state": {"waiting": {"reason": "ContainerCreating"}}}]}),
                ),
                "0/1",
                "ContainerCreating",
                "0",
            ),
            (
                pod(
                    &[],
                    1,
                    json!({"phase": "Running", "containerStatuses": [
                    {"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                     "lastState": {"terminated": {"finishedAt": "2026-01-01T00:05:00Z"}}}]}),
                ),
                "0/1",
                "CrashLoopBackOff",
                "3 (5m ago)",
            ),
            (
                pod(
                    &[],
                    1,
                    json!({"phase": "Succeeded", "containerStatuses": [
                    {"state": {"terminated": {"reason": "Completed"}}}]}),
                ),
                "0/1",
                "Completed",
                "0",
            ),
            (
                pod(
                    &[],
                    2,
                    json!({"phase": "Running", "containerStatuses": [
                    {"state": {"terminated": {"reason": "Completed"}}}, running]}),
                ),
                "1/2",
                "NotReady",
                "0",
            ),
            (
                pod(
                    &[],
                    1,
                    json!({"phase": "Failed", "containerStatuses": [
                    {"state": {"terminated": {"exitCode": 7}}}]}),
                ),
                "0/1",
                "ExitCode:7",
                "0",
            ),
            (
                pod(
                    &[],
                    1,
                    json!({"phase": "Failed", "containerStatuses": [
                    {"state": {"terminated": {"exitCode": 137, "signal": 9}}}]}),
                ),
                "0/1",
                "Signal:9",
                "0",
            ),
            (
                pod(
                    &plain,
                    1,
                    json!({"phase": "Pending", "initContainerStatuses": [
                    {"name": "i0", "state": {"terminated": {"exitCode": 0}}},
                    {"name": "i1", "state": {"running": {}}}]}),
                ),
                "0/1",
                "Init:1/2",
                "0",
            ),
            (
                pod(
                    &plain,
                    1,
                    json!({"phase": "Pending", "initContainerStatuses": [
                    {"name": "i0", "restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}),
                ),
                "0/1",
                "Init:CrashLoopBackOff",
                "2",
            ),
            (
                pod(
                    &plain,
                    1,
                    json!({"phase": "Pending", "initContainerStatuses": [
                    {"name": "i0", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}]}),
                ),
                "0/1",
                "Init:Error",
                "0",
            ),
            (
                pod(
                    &sidecar,
                    1,
                    json!({"phase": "Running", "initContainerStatuses": [
                    {"name": "s", "started": true, "ready": true, "restartCount": 1, "state": {"running": {}}}],
                    "containerStatuses": [running]}),
                ),
                "2/2",
                "Running",
                "1",
            ),
            (
                pod(
                    &[],
                    1,
                    json!({"phase": "Pending", "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}),
                ),
                "0/1",
                "SchedulingGated",
                "0",
            ),
        ];
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        for (pod, ready, reason, restarts) in rows {
            let cells = cells(&pod, now);
            assert_eq!(cells[1..4], [json!(ready), json!(reason), json!(restarts)], "{}", pod["status"]);
        }
    }

    #[test]
    fn a_pod_on_its_way_out_is_terminating() {
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        for (phase, status_reason, word) in [
            ("Running", "", "Terminating"),
            ("Succeeded", "", "Succeeded"),
            ("Running", "NodeLost", "Unknown"),
        ] {
            let mut pod = pod(&[], 1, json!({"phase": phase, "reason": status_reason}));
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:09:00Z".into();
            assert_eq!(cells(&pod, now)[2], word);
        }
    }

    #[test]
    fn wide_cells_say_none_when_there_is_nothing() {
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        let cells = cells(&pod(&[], 1, json!({})), now);
        assert_eq!(cells[4..], [json!("10m"), json!(NONE), json!(NONE), json!(NONE), json!(NONE)]);
    }
}
