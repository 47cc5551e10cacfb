//! Resizes: the difference between the resources a pod asks for and those its running containers have.
//!
//! This kubelet gives a container its resources when it starts it, and never later.

use super::model;
use super::runtime_pod::{Instance, RuntimePod};
use crate::quantity;
use k8s_openapi::api::core::v1::{Container, Pod, PodCondition, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The condition of a pod whose resize the node has not done.
pub(crate) const CONDITION: &str = "PodResizePending";

/// The resources a container runs with; those of its spec while it does not run, or was started by a kubelet that
/// did not note them.
pub(crate) fn actual<'a>(
    spec: &'a Container,
    instance: Option<&'a Instance>,
) -> Option<&'a ResourceRequirements> {
    let running = instance.filter(|instance| instance.is_running());
    running.and_then(|instance| instance.resources.as_ref()).or(spec.resources.as_ref())
}

/// The pod with the resources its running containers have.
pub(crate) fn allocated<'a>(pod: &'a Pod, runtime: &RuntimePod) -> Cow<'a, Pod> {
    if pending(pod, runtime).is_empty() {
        return Cow::Borrowed(pod);
    }
    let mut pod = pod.clone();
    if let Some(spec) = &mut pod.spec {
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            container.resources = actual(container, runtime.latest(&container.name)).cloned();
        }
    }
    Cow::Owned(pod)
}

/// The running containers that have other resources than the pod asks for.
fn pending<'a>(pod: &'a Pod, runtime: &RuntimePod) -> Vec<&'a str> {
    let spec = model::spec(pod);
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .filter(|c| !same(c.resources.as_ref(), actual(c, runtime.latest(&c.name))))
        .map(|c| c.name.as_str())
        .collect()
}

/// As upstream for a resize the node will not do: reason Infeasible. None when nothing is pending.
pub(crate) fn condition(pod: &Pod, runtime: &RuntimePod) -> Option<PodCondition> {
    let pending = pending(pod, runtime);
    (!pending.is_empty()).then(|| PodCondition {
        type_: CONDITION.into(),
        status: "True".into(),
        reason: Some("Infeasible".into()),
        message: Some(format!(
            "This node does not resize running containers: [{}] keep their resources until they start again",
            pending.join(" ")
        )),
        ..PodCondition::default()
    })
}

/// Whether two lists ask for the same amounts of CPU and memory, however they are written.
fn same(a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>) -> bool {
    type List = BTreeMap<String, Quantity>;
    let amounts = |list: Option<&List>| ["cpu", "memory"].map(|name| quantity::milli_of(list, name));
    let all = |r: Option<&ResourceRequirements>| {
        [r.and_then(|r| r.requests.as_ref()), r.and_then(|r| r.limits.as_ref())].map(amounts)
    };
    all(a) == all(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::resources::pod_resources;
    use crate::pod::labels;
    use crate::pod::runtime_pod::RunState;
    use ferrite_json::{Value, json};

    fn pod(resources: Value) -> Pod {
        let container = json!({"name": "c", "resources": resources});
        ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": [container]}}))
            .unwrap()
    }

    fn started(with: Option<Value>, state: RunState) -> RuntimePod {
        let annotations = with.map(|r| (labels::RESOURCES.to_string(), r.to_string()));
        let status = ferrite_cri::v1::ContainerStatus {
            metadata: Some(ferrite_cri::v1::ContainerMetadata { name: "c".into(), attempt: 0 }),
            annotations: annotations.into_iter().collect(),
            ..Default::default()
        };
        RuntimePod::new(Vec::new(), vec![Instance { state, ..Instance::from_cri("s", status) }])
    }

    #[test]
    fn a_running_container_keeps_its_resources() {
        let cpu = |amount: &str| json!({"requests": {"cpu": amount}, "limits": {"cpu": amount}});
        for (asked, has, state, pending, milli) in [
            ("1", Some("1"), RunState::Running, false, 1000),
            ("1", Some("1000m"), RunState::Running, false, 1000),
            ("2", Some("1"), RunState::Running, true, 1000),
            ("500m", Some("1"), RunState::Running, true, 1000),
            // It starts again with what is asked for.
            ("2", Some("1"), RunState::Exited, false, 2000),
            ("2", None, RunState::Running, false, 2000),
        ] {
            let (pod, runtime) = (pod(cpu(asked)), started(has.map(cpu), state));
            let condition = condition(&pod, &runtime);
            assert_eq!(condition.is_some(), pending, "{asked} {has:?}");
            let reason = condition.and_then(|c| c.reason);
            assert_eq!(reason.as_deref(), pending.then_some("Infeasible"));
            assert_eq!(pod_resources(&allocated(&pod, &runtime)).cpu_limit, Some(milli), "{asked} {has:?}");
        }
    }

    #[test]
    fn resources_given_where_there_were_none() {
        let none = started(Some(json!({})), RunState::Running);
        assert!(condition(&pod(json!({"requests": {"memory": "1Gi"}})), &none).is_some());
        assert!(condition(&pod(json!({})), &none).is_none());
    }
}
