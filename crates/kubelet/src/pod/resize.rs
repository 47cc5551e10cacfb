//! Resizes: other CPU and memory for containers that run, and for the pod as a whole.
//!
//! Three amounts belong to a container: the request of the pod's spec, the amount that the node has
//! *allocated* to it, and the amount that its running process *has*. A spec that asks for something else is
//! allocated when the node has room (otherwise the
//! pod's condition says why not), and then applied to the running container, or to its next instance if the
//! container's policy wants a restart. [`Allocation`] is kept in a file, so that a restart of the kubelet neither takes
//! back nor repeats a step. A pod with resources of its own has the same three amounts; the third one is in its control group.

use super::model;
use super::pod_level::{self, PodLevel};
use super::runtime_pod::{Instance, RuntimePod};
use crate::quantity;
use k8s_openapi::api::core::v1::{Container, Pod, PodCondition, ResourceRequirements};
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

/// The resources that the node gave to a pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Allocation {
    /// By container.
    allocated: BTreeMap<String, ResourceRequirements>,
    /// Of the pod as a whole; none as long as nothing is on record.
    #[serde(default)]
    pod: Option<PodLevel>,
    /// By the runtime's name of the container's instance: the resources since its start.
    applied: BTreeMap<String, ResourceRequirements>,
    /// The pod's own resources at the time when the container got these.
    #[serde(default)]
    applied_of_pod: BTreeMap<String, PodLevel>,
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
        self.pod = Some(PodLevel::of(pod));
    }

    /// Puts on record what a pod was admitted with. After a restart of the kubelet that is what its containers were started
    /// with: the spec may ask for other resources since.
    pub(crate) fn begin(&mut self, pod: &Pod, runtime: &RuntimePod) {
        if self.pod.is_none() {
            let allocated = self.of(pod, runtime).into_owned();
            self.accept(&allocated);
        }
    }

    /// A container of this pod has its allocated resources. Instances that are gone are forgotten.
    pub(crate) fn applied(
        &mut self,
        id: &str,
        resources: ResourceRequirements,
        pod: &Pod,
        runtime: &RuntimePod,
    ) {
        self.applied.insert(id.to_owned(), resources);
        self.applied_of_pod.insert(id.to_owned(), PodLevel::of(pod));
        let lives = |known: &String| runtime.instances.iter().any(|instance| instance.id == *known);
        self.applied.retain(|known, _| lives(known));
        self.applied_of_pod.retain(|known, _| lives(known));
    }

    /// Records on each instance its resources since it started.
    pub(crate) fn note(&self, runtime: &mut RuntimePod) {
        for instance in &mut runtime.instances {
            if let Some(resources) = self.applied.get(&instance.id) {
                instance.resources = Some(resources.clone());
            }
            if let Some(of_pod) = self.applied_of_pod.get(&instance.id) {
                instance.of_pod = Some(of_pod.clone());
            }
        }
    }

    /// The pod as it is allocated: everything but a resize that is pending.
    pub(crate) fn of<'a>(&self, pod: &'a Pod, runtime: &RuntimePod) -> Cow<'a, Pod> {
        let given = |c: &Container| match self.allocated.get(&c.name) {
            Some(allocated) => Some(allocated.clone()),
            None => {
                let started = runtime.latest(&c.name).and_then(|instance| instance.resources.clone());
                started.or_else(|| c.resources.clone())
            }
        };
        let recorded = || runtime.instances.iter().find_map(|instance| instance.of_pod.clone());
        let of_pod = self.pod.clone().or_else(recorded).unwrap_or_else(|| PodLevel::of(pod));
        with_resources(pod, given, of_pod.resources)
    }
}

/// Containers that may have other resources while they run.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = model::spec(pod);
    spec.containers.iter().chain(spec.init_containers.iter().flatten())
}

/// The pod with other resources for its containers and for itself; the same pod if nothing differs.
fn with_resources<'a>(
    pod: &'a Pod,
    given: impl Fn(&Container) -> Option<ResourceRequirements>,
    of_pod: Option<ResourceRequirements>,
) -> Cow<'a, Pod> {
    let same_of_pod = same(of_pod_itself(pod), of_pod.as_ref());
    if same_of_pod && containers(pod).all(|c| same(c.resources.as_ref(), given(c).as_ref())) {
        return Cow::Borrowed(pod);
    }
    let mut pod = pod.clone();
    if let Some(spec) = &mut pod.spec {
        if !same_of_pod {
            spec.resources = of_pod;
        }
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            let given = given(container);
            if !same(container.resources.as_ref(), given.as_ref()) {
                container.resources = given;
            }
        }
    }
    Cow::Owned(pod)
}

/// The resources of the pod as a whole.
fn of_pod_itself(pod: &Pod) -> Option<&ResourceRequirements> {
    model::spec(pod).resources.as_ref()
}

/// The resources a container runs with; those of its spec while it does not run, or was started by a kubelet that
/// did not note them.
fn actual<'a>(spec: &'a Container, instance: &'a Instance) -> Option<&'a ResourceRequirements> {
    let running = Some(instance).filter(|instance| instance.is_running());
    running.and_then(|instance| instance.resources.as_ref()).or(spec.resources.as_ref())
}

/// The pod's own resources at the time when the container got its limits; those of the pod where nothing is on record.
fn actual_of_pod<'a>(pod: &'a Pod, instance: &'a Instance) -> Option<&'a ResourceRequirements> {
    match &instance.of_pod {
        Some(of_pod) => of_pod.resources.as_ref(),
        None => of_pod_itself(pod),
    }
}

/// The resources of a running container, for its status.
pub(crate) fn shown(pod: &Pod, spec: &Container, instance: &Instance) -> Option<ResourceRequirements> {
    let resources = actual(spec, instance).filter(|_| instance.is_running())?;
    Some(pod_level::shown(spec, resources.clone(), actual_of_pod(pod, instance)))
}

/// The way in which a running container gets its allocated resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Nothing,
    InPlace,
    /// Its policy wants a restart for a resource that changes.
    Restart,
}

/// As upstream: a limit of the pod is a limit of its containers that have none, and their policies count for it.
pub(crate) fn change(pod: &Pod, container: &Container, instance: &Instance) -> Change {
    let wants = |name: &str| amounts(container.resources.as_ref(), of_pod_itself(pod), name);
    let has = |name: &str| amounts(actual(container, instance), actual_of_pod(pod, instance), name);
    let changed: Vec<&str> = RESOURCES.into_iter().filter(|name| wants(name) != has(name)).collect();
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
pub(crate) fn containers_change(pod: &Pod, runtime: &RuntimePod) -> bool {
    containers(pod).any(|c| {
        let running = runtime.latest(&c.name).filter(|instance| instance.is_running());
        running.is_some_and(|instance| change(pod, c, instance) != Change::Nothing)
    })
}

/// True if the pod asks for other resources than are allocated to it.
pub(crate) fn is_pending(pod: &Pod, allocated: &Pod) -> bool {
    let given: BTreeMap<&str, _> =
        containers(allocated).map(|c| (c.name.as_str(), c.resources.as_ref())).collect();
    !same(of_pod_itself(pod), of_pod_itself(allocated))
        || containers(pod).any(|c| !same(c.resources.as_ref(), given.get(c.name.as_str()).copied().flatten()))
}

/// True if a container asks for another amount of a resource than is allocated to it.
pub(crate) fn requests_differ(pod: &Pod, allocated: &Pod, name: &str) -> bool {
    let request = |c: &Container| amounts(c.resources.as_ref(), None, name)[0];
    let given: BTreeMap<&str, _> = containers(allocated).map(|c| (c.name.as_str(), request(c))).collect();
    containers(pod).any(|c| given.get(c.name.as_str()).is_some_and(|given| *given != request(c)))
}

/// True if the request of memory, and so the swap, of a running container would change. As upstream, one that is
/// restarted for it gets its swap anew.
pub(crate) fn changes_swap_in_place(
    pod: &Pod,
    allocated: &Pod,
    has_swap: impl Fn(&Pod, &Container) -> bool,
) -> bool {
    let request = |c: &Container| amounts(c.resources.as_ref(), None, "memory")[0];
    let is_restarted = |c: &Container| {
        let mut policies = c.resize_policy.iter().flatten();
        policies.any(|p| p.resource_name == "memory" && p.restart_policy == "RestartContainer")
    };
    containers(pod).any(|wanted| {
        let given = containers(allocated).find(|given| given.name == wanted.name);
        given.is_some_and(|given| {
            request(wanted) != request(given)
                && !is_restarted(given)
                && (has_swap(pod, wanted) || has_swap(allocated, given))
        })
    })
}

/// The pod with its allocated resources from its status: for counting what is left of the node.
pub(crate) fn allocated_by_status(pod: &Pod) -> Cow<'_, Pod> {
    let Some(status) = &pod.status else { return Cow::Borrowed(pod) };
    let all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let known: BTreeMap<&str, _> =
        all.filter_map(|c| Some((c.name.as_str(), c.allocated_resources.as_ref()?))).collect();
    let given = |c: &Container| {
        let mut resources = c.resources.clone();
        if let (Some(resources), Some(requests)) = (&mut resources, known.get(c.name.as_str())) {
            resources.requests = Some((*requests).clone());
        }
        resources
    };
    let mut of_pod = of_pod_itself(pod).cloned();
    if let (Some(of_pod), Some(requests)) = (&mut of_pod, pod_level::allocated_requests(pod)) {
        of_pod.requests = Some(requests);
    }
    with_resources(pod, given, of_pod)
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

/// Request and limit of one resource. A container without a limit has the pod's.
fn amounts(
    resources: Option<&ResourceRequirements>,
    of_pod: Option<&ResourceRequirements>,
    name: &str,
) -> [Option<i64>; 2] {
    let request = quantity::milli_of(resources.and_then(|r| r.requests.as_ref()), name);
    [request, pod_level::limit(resources, of_pod, name)]
}

/// The limit of memory that an instance would get, in bytes, if it becomes smaller.
pub(crate) fn smaller_memory_limit(pod: &Pod, container: &Container, instance: &Instance) -> Option<i64> {
    let new = pod_level::limit(container.resources.as_ref(), of_pod_itself(pod), "memory")?;
    let old = pod_level::limit(actual(container, instance), actual_of_pod(pod, instance), "memory");
    old.is_none_or(|old| new < old).then_some(new / 1000)
}

/// Returns true if both have the same amounts of CPU and memory, in whatever notation.
fn same(a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>) -> bool {
    RESOURCES.iter().all(|name| amounts(a, None, name) == amounts(b, None, name))
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
            // A restart is no way around the node's admission.
            ("2", Some("1"), RunState::Exited, true, 1000),
            ("2", None, RunState::Running, false, 2000),
        ] {
            let pod = pod(amount(asked, "1Gi"), json!([]));
            let runtime = started(has.map(|cpu| amount(cpu, "1Gi")), state);
            let mut allocation = Allocation::default();
            let allocated = allocation.of(&pod, &runtime);
            assert_eq!(is_pending(&pod, &allocated), pending, "{asked} {has:?}");
            assert_eq!(pod_resources(&allocated).cpu_limit, Some(milli), "{asked} {has:?}");
            assert!(!containers_change(&allocated, &runtime), "nothing was allocated");
            let mut begun = Allocation::default();
            begun.begin(&pod, &runtime);
            assert_eq!(begun.of(&pod, &RuntimePod::default()), allocated, "what was admitted is on record");
            allocation.accept(&pod);
            let allocated = allocation.of(&pod, &runtime);
            assert!(!is_pending(&pod, &allocated));
            let changes = pending && state == RunState::Running;
            assert_eq!(containers_change(&allocated, &runtime), changes, "{asked} {has:?}");
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
        allocation.applied("gone", resources.clone(), &pod, &runtime);
        allocation.applied("id", resources, &pod, &runtime);
        allocation.write(dir.path()).unwrap();
        let loaded = Allocation::load(dir.path()).unwrap();
        assert_eq!(loaded, allocation);
        assert_eq!(loaded.applied.len(), 1, "instances that are gone are forgotten");
        loaded.note(&mut runtime);
        assert!(!containers_change(&loaded.of(&pod, &runtime), &runtime));
        // Files of a version that knew nothing of resources of whole pods.
        let old = r#"{"allocated": {"c": {}}, "applied": {}}"#;
        assert!(ferrite_json::from_str::<Allocation>(old).is_ok_and(|old| old.pod.is_none()));
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
            assert_eq!(change(&pod, container, instance), expected, "{cpu} {memory} {policy}");
        }
    }

    /// A pod with resources of its own, and a container with these.
    fn whole(of_pod: Value, resources: Value, policy: &str) -> Pod {
        let policy = json!([{"resourceName": "memory", "restartPolicy": policy}]);
        let mut pod = pod(resources, policy);
        pod.spec.as_mut().unwrap().resources = ferrite_json::from_value(of_pod).unwrap();
        pod
    }

    /// A container that was started with these resources in a pod that had those.
    fn started_in(of_pod: &Value, resources: &Value) -> RuntimePod {
        let mut runtime = started(Some(resources.clone()), RunState::Running);
        runtime.instances[0].of_pod =
            Some(PodLevel { resources: ferrite_json::from_value(of_pod.clone()).unwrap() });
        runtime
    }

    #[test]
    fn a_limit_of_the_pod_is_one_of_its_containers_without() {
        let (none, small, large) = (json!(null), amount("1", "1Gi"), amount("1", "2Gi"));
        let own = amount("1", "64Mi");
        let other =
            json!({"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
        for (what, had, has, resources, policy, expected) in [
            ("nothing changed", &small, &small, json!({}), "NotRequired", Change::Nothing),
            ("the pod grows", &small, &large, json!({}), "NotRequired", Change::InPlace),
            ("the pod shrinks", &large, &small, json!({}), "NotRequired", Change::InPlace),
            (
                "and the policy wants a restart",
                &small,
                &large,
                json!({}),
                "RestartContainer",
                Change::Restart,
            ),
            ("the container has limits of its own", &small, &large, own, "RestartContainer", Change::Nothing),
            ("the pod gets resources", &none, &small, json!({}), "NotRequired", Change::InPlace),
            (
                "a request of the pod is no container's",
                &small,
                &other,
                json!({}),
                "NotRequired",
                Change::Nothing,
            ),
        ] {
            let pod = whole(has.clone(), resources.clone(), policy);
            let mut runtime = started_in(had, &resources);
            let container = &pod.spec.as_ref().unwrap().containers[0];
            assert_eq!(change(&pod, container, &runtime.instances[0]), expected, "{what}");
            assert_eq!(containers_change(&pod, &runtime), expected != Change::Nothing, "{what}");
            // Applied, it is over, also after a restart of the kubelet.
            let mut allocation = Allocation::default();
            allocation.applied("id", container.resources.clone().unwrap_or_default(), &pod, &runtime);
            let text = ferrite_json::to_string(&allocation).unwrap();
            ferrite_json::from_str::<Allocation>(&text).unwrap().note(&mut runtime);
            assert_eq!(change(&pod, container, &runtime.instances[0]), Change::Nothing, "{what}");
        }
    }

    #[test]
    fn resources_of_a_pod_are_pending_until_they_are_allocated() {
        let (small, large) = (amount("1", "1Gi"), amount("1", "2Gi"));
        for (what, had, asked, pending) in [
            ("as it was", &small, &small, false),
            ("another notation", &small, &amount("1000m", "1024Mi"), false),
            ("more", &small, &large, true),
            ("less", &large, &small, true),
            ("some where none were", &json!(null), &small, true),
        ] {
            let pod = whole(asked.clone(), json!({}), "NotRequired");
            let runtime = started_in(had, &json!({}));
            // After a restart of the kubelet nothing is on record but the annotations of containers.
            let mut allocation = Allocation::default();
            let allocated = allocation.of(&pod, &runtime).into_owned();
            assert_eq!(is_pending(&pod, &allocated), pending, "{what}");
            let had: Option<ResourceRequirements> = ferrite_json::from_value(had.clone()).unwrap();
            assert!(same(of_pod_itself(&allocated), had.as_ref()), "{what}");
            allocation.begin(&pod, &runtime);
            assert_eq!(allocation.of(&pod, &RuntimePod::default()).into_owned(), allocated, "{what}");
            allocation.accept(&pod);
            assert!(!is_pending(&pod, &allocation.of(&pod, &runtime)), "{what}");
        }
    }

    #[test]
    fn smaller_limits_of_memory_are_known() {
        let runtime = started(Some(amount("1", "2Gi")), RunState::Running);
        for (memory, expected) in [("1Gi", Some(1 << 30)), ("2Gi", None), ("3Gi", None)] {
            let pod = pod(amount("1", memory), json!([]));
            let container = &pod.spec.as_ref().unwrap().containers[0];
            let instance = runtime.latest("c").unwrap();
            assert_eq!(smaller_memory_limit(&pod, container, instance), expected, "{memory}");
        }
        let pod = whole(amount("1", "1Gi"), json!({}), "NotRequired");
        let container = &pod.spec.as_ref().unwrap().containers[0];
        for (had, expected) in [("1Gi", None), ("2Gi", Some(1 << 30))] {
            let runtime = started_in(&amount("1", had), &json!({}));
            assert_eq!(smaller_memory_limit(&pod, container, &runtime.instances[0]), expected, "{had}");
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
        let mut other = whole(amount("4", "1Gi"), json!({}), "NotRequired");
        assert_eq!(pod_resources(&allocated_by_status(&other)).cpu_request, 4000);
        other.status = Some(ferrite_json::from_value(json!({"allocatedResources": {"cpu": "1"}})).unwrap());
        assert_eq!(pod_resources(&allocated_by_status(&other)).cpu_request, 1000);
    }

    #[test]
    fn swap_stands_in_the_way_of_a_resize_without_a_restart() {
        let of = |memory: [&str; 2], policy: &str| -> Pod {
            let container = |name: &str, memory: &str| {
                json!({"name": name, "resources": {"requests": {"memory": memory}},
                "resizePolicy": [{"resourceName": "memory", "restartPolicy": policy}]})
            };
            let spec = json!({"containers": [container("a", memory[0]), container("b", memory[1])]});
            ferrite_json::from_value(json!({"spec": spec})).unwrap()
        };
        // Only the first container has swap.
        let has_swap = |_: &Pod, c: &Container| c.name == "a";
        for (before, after, policy, expected) in [
            (["1Mi", "1Mi"], ["1Mi", "1Mi"], "NotRequired", false),
            (["1Mi", "1Mi"], ["2Mi", "1Mi"], "NotRequired", true),
            (["1Mi", "1Mi"], ["1Mi", "2Mi"], "NotRequired", false),
            (["1Mi", "1Mi"], ["2Mi", "1Mi"], "RestartContainer", false),
        ] {
            let found = changes_swap_in_place(&of(after, policy), &of(before, policy), has_swap);
            assert_eq!(found, expected, "{before:?} {after:?} {policy}");
        }
    }
}
