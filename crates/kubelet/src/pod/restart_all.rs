//! The action RestartAllContainers of a restart rule: when a container ends with one of the rule's exit codes, every
//! container of the pod is removed, and the pod begins anew in its sandbox.
//!
//! The container that ended is removed last. A kubelet that was killed in between finds it and goes on.

use super::model::{self, ContainerKind, PodContainer};
use super::runtime_pod::{Instance, RunState, RuntimePod};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use std::collections::BTreeMap;

/// The reason of a container that was removed.
pub(crate) const REASON: &str = "RestartingAllContainers";
pub(crate) const MESSAGE: &str = "The container is removed because RestartAllContainers in place";
/// The condition of a pod whose containers are removed.
pub(crate) const CONDITION: &str = "AllContainersRestarting";

/// A container to remove; one that runs is killed first, without grace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reset {
    pub id: String,
    pub name: String,
    pub kill: bool,
}

/// True if a container of the pod has such a rule.
pub(crate) fn is_possible(pod: &Pod) -> bool {
    let containers = model::containers(pod);
    let mut rules = containers.iter().flat_map(|c| c.spec.restart_policy_rules.iter().flatten());
    rules.any(|rule| rule.action == "RestartAllContainers")
}

fn is_trigger(container: &PodContainer, instance: &Instance) -> bool {
    instance.state == RunState::Exited
        && model::matching_rule(container, instance.exit_code) == Some("RestartAllContainers")
}

/// True if a container has ended with an exit code of such a rule.
pub(crate) fn is_due(containers: &[PodContainer], runtime: &RuntimePod) -> bool {
    let latest = |c: &PodContainer| runtime.latest(c.name()).is_some_and(|instance| is_trigger(c, instance));
    containers.iter().filter(|c| c.kind != ContainerKind::Ephemeral).any(latest)
}

/// The containers to remove, in order: regular ones, init containers, then those that ended with such a code.
pub(crate) fn resets(containers: &[PodContainer], runtime: &RuntimePod) -> Vec<Reset> {
    let mut targets = Vec::new();
    let mut triggers = Vec::new();
    for kind in [ContainerKind::Regular, ContainerKind::Init] {
        for container in containers.iter().filter(|c| c.kind == kind) {
            // The newest of a container is removed last, so that its end is the one that is shown.
            for instance in runtime.instances.iter().rev().filter(|i| i.name == container.name()) {
                let kill = instance.state != RunState::Exited;
                let reset = Reset { id: instance.id.clone(), name: instance.name.clone(), kill };
                match is_trigger(container, instance) {
                    true => triggers.push(reset),
                    false => targets.push(reset),
                }
            }
        }
    }
    targets.extend(triggers);
    targets
}

/// The restart counts of containers that begin anew: one more than the removed ones had. The API's status has them for
/// containers that an earlier kubelet removed.
pub(crate) fn attempts(pod: &Pod, removed: &BTreeMap<String, u32>) -> BTreeMap<String, u32> {
    let mut attempts = removed.clone();
    let Some(status) = pod.status.as_ref().filter(|_| is_possible(pod)) else { return attempts };
    for known in statuses(status) {
        let was_removed = known.container_id.is_none() && is_removed(known);
        let next = known.restart_count + i32::from(!was_removed);
        if known.container_id.is_some() || was_removed {
            let next = u32::try_from(next).unwrap_or(0);
            let attempt = attempts.entry(known.name.clone()).or_default();
            *attempt = (*attempt).max(next);
        }
    }
    attempts
}

fn statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.container_statuses.iter().chain(&status.init_container_statuses).flatten()
}

/// True if the status is that of a container that was removed to begin anew.
pub(crate) fn is_removed(status: &ContainerStatus) -> bool {
    let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
    waiting.is_some_and(|waiting| waiting.reason.as_deref() == Some(REASON))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(status: Value) -> Pod {
        let rule =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        ferrite_json::from_value(json!({"metadata": {"uid": "u"}, "status": status, "spec": {
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a", "restartPolicyRules": rule}, {"name": "b"}]}}))
        .unwrap()
    }

    fn instance(name: &str, state: RunState, exit_code: i32) -> Instance {
        let made = ferrite_cri::v1::ContainerStatus::default();
        Instance {
            id: format!("{name}-0"),
            name: name.into(),
            state,
            exit_code,
            ..Instance::from_cri("s", made)
        }
    }

    #[test]
    fn all_containers_go_and_the_cause_goes_last() {
        let containers = model::containers(&pod(json!({})));
        let runtime = |a: Instance| {
            let others = [instance("b", RunState::Running, 0), instance("i", RunState::Exited, 0)];
            RuntimePod::new(Vec::new(), [a].into_iter().chain(others).collect())
        };
        for (state, code, due) in [
            (RunState::Running, 0, false),
            (RunState::Exited, 0, false),
            (RunState::Exited, 1, false),
            (RunState::Exited, 42, true),
        ] {
            assert_eq!(is_due(&containers, &runtime(instance("a", state, code))), due, "{state:?} {code}");
        }
        let order = resets(&containers, &runtime(instance("a", RunState::Exited, 42)));
        let order: Vec<(&str, bool)> = order.iter().map(|r| (r.name.as_str(), r.kill)).collect();
        assert_eq!(order, [("b", true), ("i", false), ("a", false)]);
    }

    #[test]
    fn restart_counts_go_on() {
        let status = |name: &str, count: i32, id: Option<&str>, reason: Option<&str>| {
            let mut status =
                json!({"name": name, "restartCount": count, "ready": false, "image": "", "imageID": ""});
            if let Some(id) = id {
                status["containerID"] = json!(id);
            }
            if let Some(reason) = reason {
                status["state"] = json!({"waiting": {"reason": reason}});
            }
            status
        };
        let pod = pod(json!({"containerStatuses": [
            status("a", 2, Some("x://a"), None), status("b", 3, None, Some(REASON))],
            "initContainerStatuses": [status("i", 0, None, Some("PodInitializing"))]}));
        let removed = BTreeMap::from([("a".to_owned(), 5)]);
        let attempts = attempts(&pod, &removed);
        assert_eq!(attempts, BTreeMap::from([("a".to_owned(), 5), ("b".to_owned(), 3)]));
    }
}
