//! Resizes: other CPU and memory for containers that run.
//!
//! Three amounts belong to a container: the request of the pod's spec, the amount that the node has
//! *allocated* to it, and the amount that its running process *has*. A spec that asks for something else is
//! allocated when the node has room (otherwise the
//! pod's condition says why not), and then applied to the running container, or to its next instance if the
//! container's policy wants a restart. [`Allocation`] is kept in a file, so that a restart of the kubelet neither takes
//! back nor repeats a step.

use super::model;
use super::runtime_pod::{Instance, RuntimePod};
use crate::container::resources::PodResources;
use crate::quantity;
use k8s_openapi::api::core::v1::{Container, Pod, PodCondition, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The condition of a pod whose resize the node has not allocated.
pub(crate) const PENDING: &str = "PodResizePending";
/// The condition of a pod whose containers do not have their allocated resources yet.
pub(crate) const IN_PROGRESS: &str = "PodResizeInProgress";

const FILE: &str = "allocation.json";
/// An allocation names a few amounts for each container.
const MAX_FILE: u64 = 1 << 20;

/// The resources that the node gave to a pod after its containers were started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Allocation {
    /// By container.
    allocated: BTreeMap<String, ResourceRequirements>,
    /// By the runtime's name of the container's instance: the resources since its start.
    applied: BTreeMap<String, ResourceRequirements>,
}

impl Allocation {
    /// Reads the file in the pod's directory. None if there is none: then the containers have the resources
    /// of their start.
    pub(crate) fn load(pod_dir: &Path) -> Option<Self> {
        let bytes = ferrite_hostfs::read_head(&pod_dir.join(FILE), MAX_FILE).ok()?;
        ferrite_json::from_slice(&bytes).ok()
    }

    /// Writes the file, away from the threads that must not wait for a disk.
    pub(crate) async fn save(&self, pod_dir: &Path) -> io::Result<()> {
        let (allocation, dir) = (self.clone(), pod_dir.to_owned());
        tokio::task::spawn_blocking(move || allocation.write(&dir)).await.map_err(io::Error::other)?
    }

    fn write(&self, pod_dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(pod_dir)?;
        let new = pod_dir.join(format!("{FILE}.new"));
        let flags = nix::libc::O_NOFOLLOW;
        let mut options = std::fs::OpenOptions::new();
        let mut file =
            options.create(true).write(true).truncate(true).mode(0o600).custom_flags(flags).open(&new)?;
        file.write_all(&ferrite_json::to_vec(self).map_err(io::Error::other)?)?;
        file.sync_all()?;
        std::fs::rename(new, pod_dir.join(FILE))
    }

    /// Allocates all that the pod asks for.
    pub(crate) fn accept(&mut self, pod: &Pod) {
        let amounts = containers(pod).map(|c| (c.name.clone(), c.resources.clone().unwrap_or_default()));
        self.allocated = amounts.collect();
    }

    /// A container has its allocated resources. Instances that are gone are forgotten.
    pub(crate) fn applied(&mut self, id: &str, resources: ResourceRequirements, runtime: &RuntimePod) {
        self.applied.insert(id.to_owned(), resources);
        self.applied.retain(|known, _| runtime.instances.iter().any(|instance| instance.id == *known));
    }

    /// Records on each instance its resources since it started.
    pub(crate) fn note(&self, runtime: &mut RuntimePod) {
        for instance in &mut runtime.instances {
            if let Some(resources) = self.applied.get(&instance.id) {
                instance.resources = Some(resources.clone());
            }
        }
    }

    /// The pod as it is allocated: everything but a resize that is pending.
    pub(crate) fn of<'a>(&self, pod: &'a Pod, runtime: &RuntimePod) -> Cow<'a, Pod> {
        let given = |c: &Container| match self.allocated.get(&c.name) {
            Some(allocated) => Some(allocated.clone()),
            None => actual(c, runtime.latest(&c.name)).cloned(),
        };
        with_resources(pod, given)
    }
}

/// Containers that may have other resources while they run.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = model::spec(pod);
    spec.containers.iter().chain(spec.init_containers.iter().flatten())
}

/// The pod with other resources for its containers; the same pod if nothing differs.
fn with_resources<'a>(
    pod: &'a Pod,
    given: impl Fn(&Container) -> Option<ResourceRequirements>,
) -> Cow<'a, Pod> {
    if containers(pod).all(|c| same(c.resources.as_ref(), given(c).as_ref())) {
        return Cow::Borrowed(pod);
    }
    let mut pod = pod.clone();
    if let Some(spec) = &mut pod.spec {
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            let given = given(container);
            if !same(container.resources.as_ref(), given.as_ref()) {
                container.resources = given;
            }
        }
    }
    Cow::Owned(pod)
}

/// The resources a container runs with; those of its spec while it does not run, or was started by a kubelet that
/// did not note them.
pub(crate) fn actual<'a>(
    spec: &'a Container,
    instance: Option<&'a Instance>,
) -> Option<&'a ResourceRequirements> {
    let running = instance.filter(|instance| instance.is_running());
    running.and_then(|instance| instance.resources.as_ref()).or(spec.resources.as_ref())
}

/// The limits of the pod's cgroup while containers change from their actual to their allocated resources.
pub(crate) fn widest(pod: &Pod, runtime: &RuntimePod) -> PodResources {
    use crate::container::resources::pod_resources;
    let has = pod_resources(&with_resources(pod, |c| actual(c, runtime.latest(&c.name)).cloned()));
    let wants = pod_resources(pod);
    // No limit is wider than any.
    let limit = |a: Option<i64>, b: Option<i64>| a.zip(b).map(|(a, b)| a.max(b));
    PodResources {
        cpu_request: has.cpu_request.max(wants.cpu_request),
        memory_request: has.memory_request.max(wants.memory_request),
        cpu_limit: limit(has.cpu_limit, wants.cpu_limit),
        memory_limit: limit(has.memory_limit, wants.memory_limit),
        ephemeral_request: has.ephemeral_request.max(wants.ephemeral_request),
    }
}

/// The way in which a running container gets its allocated resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Nothing,
    InPlace,
    /// Its policy wants a restart for a resource that changes.
    Restart,
}

pub(crate) fn change(container: &Container, instance: &Instance) -> Change {
    let has = actual(container, Some(instance));
    let changed: Vec<&str> = RESOURCES
        .into_iter()
        .filter(|name| amounts(container.resources.as_ref(), name) != amounts(has, name))
        .collect();
    let mut policies = container.resize_policy.iter().flatten();
    if changed.is_empty() {
        Change::Nothing
    } else if policies
        .any(|p| p.restart_policy == "RestartContainer" && changed.contains(&p.resource_name.as_str()))
    {
        Change::Restart
    } else {
        Change::InPlace
    }
}

/// True if a running container has other resources than `pod`, as it is allocated, gives it.
pub(crate) fn is_in_progress(pod: &Pod, runtime: &RuntimePod) -> bool {
    containers(pod).any(|c| {
        let running = runtime.latest(&c.name).filter(|instance| instance.is_running());
        running.is_some_and(|instance| change(c, instance) != Change::Nothing)
    })
}

/// True if the pod asks for other resources than are allocated to it.
pub(crate) fn is_pending(pod: &Pod, allocated: &Pod) -> bool {
    let given: BTreeMap<&str, _> =
        containers(allocated).map(|c| (c.name.as_str(), c.resources.as_ref())).collect();
    containers(pod).any(|c| !same(c.resources.as_ref(), given.get(c.name.as_str()).copied().flatten()))
}

/// True if a container asks for another amount of a resource than is allocated to it.
pub(crate) fn requests_differ(pod: &Pod, allocated: &Pod, name: &str) -> bool {
    let request = |c: &Container| amounts(c.resources.as_ref(), name)[0];
    let given: BTreeMap<&str, _> = containers(allocated).map(|c| (c.name.as_str(), request(c))).collect();
    containers(pod).any(|c| given.get(c.name.as_str()).is_some_and(|given| *given != request(c)))
}

/// The pod with its allocated resources from its status: for counting what is left of the node.
pub(crate) fn allocated_by_status(pod: &Pod) -> Cow<'_, Pod> {
    let Some(status) = &pod.status else { return Cow::Borrowed(pod) };
    let all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let known: BTreeMap<&str, _> =
        all.filter_map(|c| Some((c.name.as_str(), c.allocated_resources.as_ref()?))).collect();
    with_resources(pod, |c| {
        let mut resources = c.resources.clone();
        if let (Some(resources), Some(requests)) = (&mut resources, known.get(c.name.as_str())) {
            resources.requests = Some((*requests).clone());
        }
        resources
    })
}

/// The progress of a resize.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The node has no room for the pod's request now.
    pub deferred: Option<String>,
    /// The node will never have the resources that the pod asks for.
    pub infeasible: Option<String>,
    /// Containers do not have their allocated resources yet.
    pub is_applying: bool,
    /// The last attempt to apply it failed.
    pub error: Option<String>,
}

/// The conditions of a resize that has not come to its end.
pub(crate) fn conditions(progress: &Progress) -> Vec<PodCondition> {
    let holds = |type_: &str, reason: Option<&str>, message: Option<&String>| PodCondition {
        type_: type_.into(),
        status: "True".into(),
        reason: reason.map(Into::into),
        message: message.cloned(),
        ..PodCondition::default()
    };
    let infeasible = progress.infeasible.as_ref().map(|why| ("Infeasible", why));
    let deferred = progress.deferred.as_ref().map(|why| ("Deferred", why));
    let pending = infeasible.or(deferred).map(|(reason, why)| holds(PENDING, Some(reason), Some(why)));
    let error = progress.error.as_ref();
    let in_progress = progress.is_applying.then(|| holds(IN_PROGRESS, error.map(|_| "Error"), error));
    pending.into_iter().chain(in_progress).collect()
}

/// The text of an event about a resize.
pub(crate) fn summary(what: &str, pod: &Pod, error: Option<&str>) -> String {
    let all = |list: &mut dyn Iterator<Item = &Container>| -> Vec<ferrite_json::Value> {
        list.map(|c| ferrite_json::json!({"name": c.name, "resources": c.resources})).collect()
    };
    let spec = model::spec(pod);
    let mut summary = ferrite_json::json!({});
    if let Some(init) = &spec.init_containers {
        summary["initContainers"] = all(&mut init.iter()).into();
    }
    summary["containers"] = all(&mut spec.containers.iter()).into();
    summary["generation"] = pod.metadata.generation.unwrap_or_default().into();
    if let Some(error) = error {
        summary["error"] = error.into();
    }
    format!("{what}: {summary}")
}

/// The resources that can change while a container runs.
const RESOURCES: [&str; 2] = ["cpu", "memory"];

/// Request and limit of one resource.
fn amounts(resources: Option<&ResourceRequirements>, name: &str) -> [Option<i64>; 2] {
    type List = BTreeMap<String, Quantity>;
    let amount = |list: Option<&List>| quantity::milli_of(list, name);
    [amount(resources.and_then(|r| r.requests.as_ref())), amount(resources.and_then(|r| r.limits.as_ref()))]
}

/// The limit of memory that an instance would get and has, if it becomes smaller.
pub(crate) fn smaller_memory_limit(container: &Container, instance: &Instance) -> Option<i64> {
    let limit = |resources: Option<&ResourceRequirements>| {
        quantity::value_of(resources.and_then(|r| r.limits.as_ref()), "memory")
    };
    let new = limit(container.resources.as_ref())?;
    limit(actual(container, Some(instance))).is_none_or(|has| new < has).then_some(new)
}

/// Returns true if both have the same amounts of CPU and memory, in whatever notation.
fn same(a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>) -> bool {
    RESOURCES.iter().all(|name| amounts(a, name) == amounts(b, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::resources::pod_resources;
    use crate::pod::labels;
    use crate::pod::runtime_pod::RunState;
    use ferrite_json::{Value, json};

    fn pod(resources: Value, policy: Value) -> Pod {
        let container = json!({"name": "c", "resources": resources, "resizePolicy": policy});
        ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": [container]}}))
            .unwrap()
    }

    fn started(with: Option<Value>, state: RunState) -> RuntimePod {
        let annotations = with.map(|r| (labels::RESOURCES.to_string(), r.to_string()));
        let status = ferrite_cri::v1::ContainerStatus {
            id: "id".into(),
            metadata: Some(ferrite_cri::v1::ContainerMetadata { name: "c".into(), attempt: 0 }),
            annotations: annotations.into_iter().collect(),
            ..Default::default()
        };
        RuntimePod::new(Vec::new(), vec![Instance { state, ..Instance::from_cri("s", status) }])
    }

    fn amount(cpu: &str, memory: &str) -> Value {
        json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
    }

    #[test]
    fn a_running_container_keeps_its_resources_until_others_are_allocated() {
        for (asked, has, state, pending, milli) in [
            ("1", Some("1"), RunState::Running, false, 1000),
            ("1", Some("1000m"), RunState::Running, false, 1000),
            ("2", Some("1"), RunState::Running, true, 1000),
            ("500m", Some("1"), RunState::Running, true, 1000),
            // It starts again with the requested resources.
            ("2", Some("1"), RunState::Exited, false, 2000),
            ("2", None, RunState::Running, false, 2000),
        ] {
            let pod = pod(amount(asked, "1Gi"), json!([]));
            let runtime = started(has.map(|cpu| amount(cpu, "1Gi")), state);
            let mut allocation = Allocation::default();
            let allocated = allocation.of(&pod, &runtime);
            assert_eq!(is_pending(&pod, &allocated), pending, "{asked} {has:?}");
            assert_eq!(pod_resources(&allocated).cpu_limit, Some(milli), "{asked} {has:?}");
            assert!(!is_in_progress(&allocated, &runtime), "nothing was allocated");
            allocation.accept(&pod);
            let allocated = allocation.of(&pod, &runtime);
            assert!(!is_pending(&pod, &allocated));
            assert_eq!(is_in_progress(&allocated, &runtime), pending, "{asked} {has:?}");
        }
    }

    #[test]
    fn an_applied_resize_is_over_and_survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let pod = pod(amount("2", "1Gi"), json!([]));
        let mut runtime = started(Some(amount("1", "1Gi")), RunState::Running);
        let mut allocation = Allocation::default();
        allocation.accept(&pod);
        let resources = pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap();
        allocation.applied("gone", resources.clone(), &runtime);
        allocation.applied("id", resources, &runtime);
        allocation.write(dir.path()).unwrap();
        let loaded = Allocation::load(dir.path()).unwrap();
        assert_eq!(loaded, allocation);
        assert_eq!(loaded.applied.len(), 1, "instances that are gone are forgotten");
        loaded.note(&mut runtime);
        assert!(!is_in_progress(&loaded.of(&pod, &runtime), &runtime));
    }

    #[test]
    fn the_policy_of_what_changes_decides() {
        let restart_for = |name: &str| {
            json!([{"resourceName": "cpu", "restartPolicy": if name == "cpu" { "RestartContainer" } else { "NotRequired" }},
                   {"resourceName": "memory", "restartPolicy": if name == "memory" { "RestartContainer" } else { "NotRequired" }}])
        };
        for (cpu, memory, policy, expected) in [
            ("1", "1Gi", "cpu", Change::Nothing),
            ("2", "1Gi", "", Change::InPlace),
            ("2", "1Gi", "cpu", Change::Restart),
            ("2", "1Gi", "memory", Change::InPlace),
            ("1", "2Gi", "memory", Change::Restart),
            ("2", "2Gi", "memory", Change::Restart),
        ] {
            let pod = pod(amount(cpu, memory), restart_for(policy));
            let runtime = started(Some(amount("1", "1Gi")), RunState::Running);
            let container = &pod.spec.as_ref().unwrap().containers[0];
            let instance = runtime.latest("c").unwrap();
            assert_eq!(change(container, instance), expected, "{cpu} {memory} {policy}");
        }
    }

    #[test]
    fn the_pods_limits_are_wide_enough_on_the_way() {
        let runtime = started(Some(amount("1", "4Gi")), RunState::Running);
        let wide = widest(&pod(amount("2", "1Gi"), json!([])), &runtime);
        assert_eq!((wide.cpu_limit, wide.memory_limit), (Some(2000), Some(4 << 30)));
        let unlimited = widest(&pod(json!({"requests": {"cpu": "2"}}), json!([])), &runtime);
        assert_eq!((unlimited.cpu_limit, unlimited.memory_limit), (None, None));
    }

    #[test]
    fn smaller_limits_of_memory_are_known() {
        let runtime = started(Some(amount("1", "2Gi")), RunState::Running);
        for (memory, expected) in [("1Gi", Some(1 << 30)), ("2Gi", None), ("3Gi", None)] {
            let pod = pod(amount("1", memory), json!([]));
            let container = &pod.spec.as_ref().unwrap().containers[0];
            assert_eq!(smaller_memory_limit(container, runtime.latest("c").unwrap()), expected, "{memory}");
        }
    }

    #[test]
    fn others_count_with_what_is_allocated_to_them() {
        let mut other = pod(amount("4", "1Gi"), json!([]));
        let status = json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "allocatedResources": {"cpu": "1", "memory": "1Gi"}}]});
        assert_eq!(pod_resources(&allocated_by_status(&other)).cpu_request, 4000);
        other.status = Some(ferrite_json::from_value(status).unwrap());
        assert_eq!(pod_resources(&allocated_by_status(&other)).cpu_request, 1000);
    }
}
