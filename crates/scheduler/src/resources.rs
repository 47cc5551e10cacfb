//! Amounts a pod asks for and a node has.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Amounts that count for a container without a request when nodes are scored, so that such pods still spread. A request
/// for nothing is a request.
#[derive(Debug, Clone, Copy, Default)]
struct Assumed {
    milli_cpu: i64,
    memory: i64,
}

impl Assumed {
    const DEFAULT: Self = Self { milli_cpu: 100, memory: 200 * 1024 * 1024 };
}

/// Amounts of the resources the scheduler counts; CPU in thousandths, the rest in whole units.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources {
    pub milli_cpu: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    /// Number of pods; only a node's allocatable has it.
    pub pods: i64,
    /// Extended resources, huge pages and the like.
    pub scalar: BTreeMap<String, i64>,
}

type List = BTreeMap<String, Quantity>;

impl Resources {
    pub fn from_list(list: Option<&List>) -> Self {
        let mut resources = Self::default();
        for (name, quantity) in list.into_iter().flatten() {
            match name.as_str() {
                "cpu" => resources.milli_cpu = milli(quantity),
                "memory" => resources.memory = whole(quantity),
                "ephemeral-storage" => resources.ephemeral_storage = whole(quantity),
                "pods" => resources.pods = whole(quantity),
                _ => {
                    resources.scalar.insert(name.clone(), whole(quantity));
                }
            }
        }
        resources
    }

    pub fn add(&mut self, other: &Self) {
        self.milli_cpu = self.milli_cpu.saturating_add(other.milli_cpu);
        self.memory = self.memory.saturating_add(other.memory);
        self.ephemeral_storage = self.ephemeral_storage.saturating_add(other.ephemeral_storage);
        for (name, amount) in &other.scalar {
            let sum = self.scalar.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }

    pub fn subtract(&mut self, other: &Self) {
        self.milli_cpu = self.milli_cpu.saturating_sub(other.milli_cpu);
        self.memory = self.memory.saturating_sub(other.memory);
        self.ephemeral_storage = self.ephemeral_storage.saturating_sub(other.ephemeral_storage);
        for (name, amount) in &other.scalar {
            if let Some(sum) = self.scalar.get_mut(name) {
                *sum = sum.saturating_sub(*amount);
            }
        }
    }

    /// The larger of both, resource by resource.
    fn raise_to(&mut self, other: &Self) {
        self.milli_cpu = self.milli_cpu.max(other.milli_cpu);
        self.memory = self.memory.max(other.memory);
        self.ephemeral_storage = self.ephemeral_storage.max(other.ephemeral_storage);
        for (name, amount) in &other.scalar {
            let held = self.scalar.entry(name.clone()).or_default();
            *held = (*held).max(*amount);
        }
    }

    /// True if some amount is smaller than in `other`.
    pub fn has_less_than(&self, other: &Self) -> bool {
        let scalar = |name: &String| self.scalar.get(name).copied().unwrap_or(0);
        self.milli_cpu < other.milli_cpu
            || self.memory < other.memory
            || self.ephemeral_storage < other.ephemeral_storage
            || other.scalar.iter().any(|(name, amount)| scalar(name) < *amount)
    }
}

/// Nothing for text that is no quantity: the API refuses such.
fn parse(quantity: &Quantity) -> ferrite_api::quantity::Quantity {
    ferrite_api::quantity::Quantity::parse(&quantity.0).unwrap_or(ferrite_api::quantity::Quantity::ZERO)
}

fn milli(quantity: &Quantity) -> i64 {
    parse(quantity).milli_value()
}

fn whole(quantity: &Quantity) -> i64 {
    parse(quantity).value()
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// True if the kubelet has found that the pod's new resources will never fit its node.
fn is_resize_infeasible(status: &PodStatus) -> bool {
    status.conditions.iter().flatten().any(|condition| {
        condition.type_ == "PodResizePending"
            && condition.status == "True"
            && condition.reason.as_deref() == Some("Infeasible")
    })
}

/// The resources that the container holds on its node; none before the kubelet has said so.
fn held(status: &ContainerStatus) -> Option<Resources> {
    let requests = status.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    if requests.is_none() && status.allocated_resources.is_none() {
        return None;
    }
    let mut held = Resources::from_list(requests);
    held.raise_to(&Resources::from_list(status.allocated_resources.as_ref()));
    Some(held)
}

/// The status of the container in that of its pod.
fn status_of<'a>(container: &Container, status: Option<&'a PodStatus>) -> Option<&'a ContainerStatus> {
    let status = status?;
    let mut all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    all.find(|status| status.name == container.name)
}

/// True if the container asks for the resource, or holds some of it.
fn names(container: &Container, status: Option<&PodStatus>, resource: &str) -> bool {
    let has = |list: Option<&List>| list.is_some_and(|list| list.contains_key(resource));
    has(container.resources.as_ref().and_then(|r| r.requests.as_ref()))
        || status_of(container, status).is_some_and(|status| {
            has(status.resources.as_ref().and_then(|resources| resources.requests.as_ref()))
                || has(status.allocated_resources.as_ref())
        })
}

/// A container's requests. While a resize is in progress the larger of the requested and the present amount
/// counts; one that will never happen does not count.
fn container_requests(container: &Container, status: Option<&PodStatus>) -> Resources {
    let asked = Resources::from_list(container.resources.as_ref().and_then(|r| r.requests.as_ref()));
    let Some(status) = status else { return asked };
    let held = status_of(container, Some(status)).and_then(held);
    match held {
        None => asked,
        Some(held) if is_resize_infeasible(status) => held,
        Some(mut held) => {
            held.raise_to(&asked);
            held
        }
    }
}

/// The requests of the pod as a whole, by the same rule as a container's. The status counts overhead, too.
fn pod_level_requests(
    spec: &PodSpec,
    asked: &BTreeMap<String, Quantity>,
    status: Option<&PodStatus>,
) -> Resources {
    let wanted = Resources::from_list(Some(asked));
    let Some((status, present)) = status.and_then(|status| Some((status, status.resources.as_ref()?))) else {
        return wanted;
    };
    // As upstream: only the resources that the pod asks for as a whole count here.
    let known = |list: Option<&BTreeMap<String, Quantity>>| {
        let all = list.into_iter().flatten().filter(|(name, _)| asked.contains_key(*name));
        Resources::from_list(Some(&all.map(|(name, amount)| (name.clone(), amount.clone())).collect()))
    };
    let mut held = known(present.requests.as_ref());
    held.raise_to(&known(status.allocated_resources.as_ref()));
    held.subtract(&known(spec.overhead.as_ref()));
    if !is_resize_infeasible(status) {
        held.raise_to(&wanted);
    }
    held
}

/// The resources that a pod needs at its most demanding moment. Init containers run one after another
/// beside the sidecars started before them; then the containers run beside all sidecars. Overhead comes on
/// top, and a request for the pod as a whole replaces the sum.
pub fn pod_requests(spec: &PodSpec, status: Option<&PodStatus>) -> Resources {
    sum(spec, status, Assumed::default())
}

/// CPU (thousandths) and memory as [`pod_requests`], with a modest amount for each container without a request.
pub fn non_zero_requests(spec: &PodSpec, status: Option<&PodStatus>, requests: &Resources) -> (i64, i64) {
    let whole = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let containers = || spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let has_whole = whole.is_some_and(|whole| whole.keys().any(|name| is_pod_level(name)));
    let assumed = |resource: &str, amount: i64| {
        let has = |list: Option<&List>| list.is_some_and(|list| list.contains_key(resource));
        let names = |container: &Container| names(container, status, resource);
        // As upstream: with requests for the pod as a whole, only a resource that nobody asks for is assumed.
        let is_asked_for =
            has_whole && (has(whole) || has(spec.overhead.as_ref()) || containers().any(names));
        if is_asked_for || containers().all(names) { 0 } else { amount }
    };
    let assumed = Assumed {
        milli_cpu: assumed("cpu", Assumed::DEFAULT.milli_cpu),
        memory: assumed("memory", Assumed::DEFAULT.memory),
    };
    if assumed.milli_cpu == 0 && assumed.memory == 0 {
        return (requests.milli_cpu, requests.memory);
    }
    let requests = sum(spec, status, assumed);
    (requests.milli_cpu, requests.memory)
}

/// True if a pod can ask for the resource as a whole.
fn is_pod_level(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

/// The sum of the containers' amounts at the pod's most demanding moment.
fn most_demanding(spec: &PodSpec, amounts: impl Fn(&Container) -> Resources) -> Resources {
    let mut total = Resources::default();
    spec.containers.iter().for_each(|container| total.add(&amounts(container)));
    let mut sidecars = Resources::default();
    let mut initial = Resources::default();
    for container in spec.init_containers.iter().flatten() {
        let mut moment = sidecars.clone();
        moment.add(&amounts(container));
        if is_sidecar(container) {
            sidecars = moment.clone();
        }
        initial.raise_to(&moment);
    }
    total.add(&sidecars);
    total.raise_to(&initial);
    total
}

/// The limits of a pod, by the same rules as its [requests](pod_requests). Overhead counts where there is a limit.
pub fn pod_limits(spec: &PodSpec) -> Resources {
    let limits = |container: &Container| {
        Resources::from_list(container.resources.as_ref().and_then(|resources| resources.limits.as_ref()))
    };
    let mut total = most_demanding(spec, limits);
    let of_pod = spec.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    for (name, amount) in of_pod.into_iter().flatten().filter(|(name, _)| is_pod_level(name)) {
        match name.as_str() {
            "cpu" => total.milli_cpu = milli(amount),
            "memory" => total.memory = whole(amount),
            _ => drop(total.scalar.insert(name.clone(), whole(amount))),
        }
    }
    let overhead = Resources::from_list(spec.overhead.as_ref());
    let add = |limit: &mut i64, overhead: i64| {
        if *limit != 0 {
            *limit = limit.saturating_add(overhead);
        }
    };
    add(&mut total.milli_cpu, overhead.milli_cpu);
    add(&mut total.memory, overhead.memory);
    add(&mut total.ephemeral_storage, overhead.ephemeral_storage);
    for (name, limit) in &mut total.scalar {
        add(limit, overhead.scalar.get(name).copied().unwrap_or(0));
    }
    total
}

fn sum(spec: &PodSpec, status: Option<&PodStatus>, assumed: Assumed) -> Resources {
    let requests = |container: &Container| {
        // As upstream: a container that only initializes is not resized.
        let is_initial = spec.init_containers.iter().flatten().any(|other| std::ptr::eq(other, container));
        let status = status.filter(|_| !is_initial || is_sidecar(container));
        let mut requests = container_requests(container, status);
        if assumed.milli_cpu > 0 && !names(container, status, "cpu") {
            requests.milli_cpu = requests.milli_cpu.saturating_add(assumed.milli_cpu);
        }
        if assumed.memory > 0 && !names(container, status, "memory") {
            requests.memory = requests.memory.saturating_add(assumed.memory);
        }
        requests
    };
    let mut total = most_demanding(spec, requests);
    if let Some(whole) = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref()) {
        let pod_level = pod_level_requests(spec, whole, status);
        if whole.contains_key("cpu") {
            total.milli_cpu = pod_level.milli_cpu;
        }
        if whole.contains_key("memory") {
            total.memory = pod_level.memory;
        }
        for (name, amount) in pod_level.scalar {
            total.scalar.insert(name, amount);
        }
    }
    total.add(&Resources::from_list(spec.overhead.as_ref()));
    total
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn requests_are_the_most_demanding_moment() {
        let container = |cpu: &str, sidecar: bool| {
            json!({"name": "c", "restartPolicy": sidecar.then_some("Always"),
                   "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}})
        };
        for (what, spec, milli_cpu) in [
            (
                "sum of containers",
                json!({"containers": [container("500m", false), container("1", false)]}),
                1500,
            ),
            (
                "a large init container",
                json!({"containers": [container("500m", false)], "initContainers": [container("2", false)]}),
                2000,
            ),
            (
                "sidecars stay beside containers",
                json!({"containers": [container("1", false)], "initContainers": [container("100m", true)]}),
                1100,
            ),
            (
                "an init container beside an earlier sidecar",
                json!({"containers": [container("100m", false)],
                       "initContainers": [container("300m", true), container("1", false)]}),
                1300,
            ),
            ("overhead", json!({"containers": [container("1", false)], "overhead": {"cpu": "250m"}}), 1250),
            (
                "request of the pod as a whole",
                json!({"containers": [container("1", false)], "resources": {"requests": {"cpu": "3"}}}),
                3000,
            ),
        ] {
            let spec: PodSpec = ferrite_json::from_value(spec).unwrap();
            assert_eq!(pod_requests(&spec, None).milli_cpu, milli_cpu, "{what}");
        }
    }

    #[test]
    fn scores_assume_a_modest_amount_for_each_container_without_a_request() {
        const MI: i64 = 1 << 20;
        let asks = |requests: ferrite_json::Value| json!({"name": "c", "resources": {"requests": requests}});
        let bare = || json!({"name": "c"});
        for (what, spec, expected) in [
            ("one container", json!({"containers": [bare()]}), (100, 200 * MI)),
            ("two containers", json!({"containers": [bare(), bare()]}), (200, 400 * MI)),
            (
                "one of two asks",
                json!({"containers": [bare(), asks(json!({"cpu": "1", "memory": "1Mi"}))]}),
                (1100, 201 * MI),
            ),
            (
                "a request for nothing is a request",
                json!({"containers": [asks(json!({"cpu": "0", "memory": "0"}))]}),
                (0, 0),
            ),
            (
                "a sidecar counts, and an init container if it is larger",
                json!({"containers": [bare()], "initContainers": [
                    {"name": "s", "restartPolicy": "Always"}, asks(json!({"cpu": "50m"}))]}),
                (200, 400 * MI),
            ),
            (
                "the pod as a whole asks for one resource",
                json!({"containers": [bare()], "resources": {"requests": {"cpu": "2"}}}),
                (2000, 200 * MI),
            ),
            (
                "with requests of the pod as a whole, a resource that some container asks for is not assumed",
                json!({"containers": [bare(), asks(json!({"memory": "1Mi"}))],
                    "resources": {"requests": {"cpu": "2"}}}),
                (2000, MI),
            ),
            (
                "overhead comes on top",
                json!({"containers": [bare()], "overhead": {"cpu": "50m"}}),
                (150, 200 * MI),
            ),
        ] {
            let spec: PodSpec = ferrite_json::from_value(spec).unwrap();
            let requests = pod_requests(&spec, None);
            assert_eq!(non_zero_requests(&spec, None, &requests), expected, "{what}");
        }
    }

    #[test]
    fn a_resize_counts_the_larger_amount_until_it_is_done() {
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]});
        let spec: PodSpec = ferrite_json::from_value(spec).unwrap();
        let holds = |cpu: &str, conditions: ferrite_json::Value| {
            json!({"conditions": conditions, "containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": true,
                "restartCount": 0, "resources": {"requests": {"cpu": cpu}}, "allocatedResources": {"cpu": cpu}}]})
        };
        let infeasible = json!([{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]);
        for (what, status, expected) in [
            ("nothing is held yet", json!({}), 2000),
            ("growing", holds("1", json!([])), 2000),
            ("shrinking", holds("3", json!([])), 3000),
            ("it will never grow", holds("1", infeasible), 1000),
        ] {
            let status: PodStatus = ferrite_json::from_value(status).unwrap();
            assert_eq!(pod_requests(&spec, Some(&status)).milli_cpu, expected, "{what}");
        }
    }

    #[test]
    fn a_resize_of_the_whole_pod_counts_the_larger_amount_until_it_is_done() {
        let spec = json!({"resources": {"requests": {"cpu": "2"}}, "overhead": {"cpu": "250m"},
            "containers": [{"name": "c", "resources": {"requests": {"memory": "1Gi"}}}]});
        let spec: PodSpec = ferrite_json::from_value(spec).unwrap();
        let holds = |present: &str, allocated: &str, conditions: ferrite_json::Value| {
            json!({"conditions": conditions, "resources": {"requests": {"cpu": present, "memory": "8Gi"}},
                "allocatedResources": {"cpu": allocated, "memory": "8Gi"}})
        };
        let infeasible = json!([{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]);
        for (what, status, expected) in [
            ("nothing is held yet", json!({}), 2250),
            ("growing", holds("1250m", "1250m", json!([])), 2250),
            ("shrinking", holds("3250m", "2250m", json!([])), 3250),
            ("allocated and not applied", holds("1250m", "3250m", json!([])), 3250),
            ("it will never grow", holds("1250m", "1250m", infeasible), 1250),
        ] {
            let status: PodStatus = ferrite_json::from_value(status).unwrap();
            let requests = pod_requests(&spec, Some(&status));
            assert_eq!(requests.milli_cpu, expected, "{what}");
            assert_eq!(requests.memory, 1 << 30, "{what}: memory is the containers'");
        }
    }

    #[test]
    fn quantities() {
        for (text, milli_units, units) in [
            ("100m", 100, 1),
            ("1", 1000, 1),
            ("0.1", 100, 1),
            ("2Gi", 2_147_483_648_000, 2_147_483_648),
            ("1e3", 1_000_000, 1000),
            ("x", 0, 0),
        ] {
            let quantity = Quantity(text.to_owned());
            assert_eq!((milli(&quantity), whole(&quantity)), (milli_units, units), "{text}");
        }
    }
}
