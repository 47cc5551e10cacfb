//! Resources of a whole pod (`spec.resources`): their part in a container's limits, in the pod's control group and in the
//! pod's status.

use super::model;
use crate::container::resources::PodResources;
use crate::container::totals::{self, Side};
use crate::quantity;
use ferrite_api::quantity::{Format, Quantity as Parsed};
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Resources that were on record for a pod as a whole at some time; it may have had none.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PodLevel {
    pub resources: Option<ResourceRequirements>,
}

impl PodLevel {
    pub(crate) fn of(pod: &Pod) -> Self {
        Self { resources: model::spec(pod).resources.clone() }
    }
}

/// The limit of a container, in thousandths. One without a limit of its own has the pod's.
pub(crate) fn limit(
    resources: Option<&ResourceRequirements>,
    of_pod: Option<&ResourceRequirements>,
    name: &str,
) -> Option<i64> {
    let limit = |resources: Option<&ResourceRequirements>| {
        quantity::milli_of(resources.and_then(|r| r.limits.as_ref()), name).filter(|limit| *limit > 0)
    };
    limit(resources).or_else(|| limit(of_pod))
}

/// The resources of a running container as its status shows them. As upstream: a container without limits shows none,
/// also where the pod's apply to it.
pub(crate) fn shown(
    spec: &Container,
    mut resources: ResourceRequirements,
    of_pod: Option<&ResourceRequirements>,
) -> ResourceRequirements {
    let has_limits =
        spec.resources.as_ref().and_then(|r| r.limits.as_ref()).is_some_and(|limits| !limits.is_empty());
    if !has_limits {
        resources.limits = None;
        return resources;
    }
    let of_pod = of_pod.and_then(|r| r.limits.as_ref());
    for name in ["cpu", "memory"] {
        let limits = resources.limits.get_or_insert_default();
        if let Some(limit) = of_pod.and_then(|limits| limits.get(name)).filter(|_| !limits.contains_key(name))
        {
            limits.insert(name.to_owned(), limit.clone());
        }
    }
    resources
}

/// The wider of two: a control group with it is wide enough for both.
pub(crate) fn wider(a: &PodResources, b: &PodResources) -> PodResources {
    // No limit is wider than any.
    let limit = |a: Option<i64>, b: Option<i64>| a.zip(b).map(|(a, b)| a.max(b));
    PodResources {
        cpu_request: a.cpu_request.max(b.cpu_request),
        memory_request: a.memory_request.max(b.memory_request),
        cpu_limit: limit(a.cpu_limit, b.cpu_limit),
        memory_limit: limit(a.memory_limit, b.memory_limit),
        ephemeral_request: a.ephemeral_request.max(b.ephemeral_request),
    }
}

/// A control group that was found after a restart of the kubelet. The kernel knows no request of memory: it is the one that
/// the pod's status shows.
pub(crate) fn recalled(group: PodResources, pod: &Pod) -> PodResources {
    let resources = pod.status.as_ref().filter(|_| model::phase(pod) == "Running");
    let requests = resources.and_then(|status| status.resources.as_ref()?.requests.as_ref());
    let memory_request = quantity::value_of(requests, "memory").unwrap_or(group.memory_request);
    PodResources { memory_request, ..group }
}

/// The limit of memory that a control group would get, if it becomes smaller.
pub(crate) fn smaller_memory_limit(has: &PodResources, wants: &PodResources) -> Option<i64> {
    wants.memory_limit.filter(|new| has.memory_limit.is_none_or(|old| *new < old))
}

/// As upstream: requests and limits of CPU that the kernel rounds up to its least are shown as they are allocated.
const LEAST_CPU_REQUEST: i64 = 2;
const LEAST_CPU_LIMIT: i64 = 10;

/// `status.resources` of a pod as it is allocated. `group` is what the pod's control group has, if the pod runs.
pub(crate) fn status(pod: &Pod, group: Option<&PodResources>) -> ResourceRequirements {
    let spec = model::spec(pod).resources.clone();
    let claims = spec.as_ref().and_then(|resources| resources.claims.clone());
    let Some(group) = group else {
        let [requests, limits] = [Side::Requests, Side::Limits].map(|side| some(totals::total(pod, side)));
        return ResourceRequirements { claims, limits, requests };
    };
    let spec = spec.unwrap_or_default();
    let (mut requests, mut limits) = (spec.requests.unwrap_or_default(), spec.limits.unwrap_or_default());
    let asks = |list: &BTreeMap<String, Quantity>| quantity::milli_of(Some(list), "cpu").unwrap_or(0);
    if group.cpu_request > LEAST_CPU_REQUEST || asks(&requests) > LEAST_CPU_REQUEST {
        requests.insert("cpu".into(), milli(group.cpu_request));
    }
    // The kernel knows no request of memory: it has what was applied last.
    if group.memory_request > 0 || requests.contains_key("memory") {
        requests.insert("memory".into(), bytes(group.memory_request));
    }
    if let Some(limit) = group.cpu_limit
        && (limit > LEAST_CPU_LIMIT || asks(&limits) > LEAST_CPU_LIMIT)
    {
        limits.insert("cpu".into(), milli(limit));
    }
    if let Some(limit) = group.memory_limit {
        limits.insert("memory".into(), bytes(limit));
    }
    ResourceRequirements { claims, limits: some(limits), requests: some(requests) }
}

/// `status.allocatedResources` of a pod as it is allocated.
pub(crate) fn allocated(pod: &Pod) -> Option<BTreeMap<String, Quantity>> {
    some(totals::total(pod, Side::Requests))
}

/// The requests of a whole pod that its status shows as allocated, if it has requests as a whole.
pub(crate) fn allocated_requests(pod: &Pod) -> Option<BTreeMap<String, Quantity>> {
    let spec = model::spec(pod);
    let allocated = pod.status.as_ref()?.allocated_resources.as_ref()?;
    let mut requests = spec.resources.as_ref()?.requests.clone()?;
    for (name, request) in &mut requests {
        let parse = |amount: &Quantity| Parsed::parse(&amount.0).ok();
        let Some(amount) = allocated.get(name).and_then(parse) else { continue };
        // The status counts the sandbox's overhead, too.
        let overhead = spec.overhead.as_ref().and_then(|overhead| overhead.get(name)).and_then(parse);
        *request = Quantity((amount - overhead.unwrap_or(Parsed::ZERO)).to_string());
    }
    Some(requests)
}

fn milli(amount: i64) -> Quantity {
    Quantity(Parsed::from_milli(amount, Format::DecimalSi).to_string())
}

fn bytes(amount: i64) -> Quantity {
    Quantity(Parsed::from_value(amount, Format::BinarySi).to_string())
}

fn some<T>(list: BTreeMap<String, T>) -> Option<BTreeMap<String, T>> {
    (!list.is_empty()).then_some(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::resources::pod_resources;
    use ferrite_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    fn resources(value: Value) -> ResourceRequirements {
        ferrite_json::from_value(value).unwrap()
    }

    #[test]
    fn a_container_without_a_limit_has_the_pods() {
        let of_pod = resources(json!({"limits": {"cpu": "2", "memory": "1Gi"}}));
        for (own, name, with, without) in [
            (json!({}), "cpu", Some(2000), None),
            (json!({"limits": {"memory": "64Mi"}}), "cpu", Some(2000), None),
            (json!({"limits": {"cpu": "1"}}), "cpu", Some(1000), Some(1000)),
            (json!({"limits": {"cpu": "0"}}), "cpu", Some(2000), None),
            (json!({"limits": {"memory": "1Ki"}}), "memory", Some(1_024_000), Some(1_024_000)),
        ] {
            let own = resources(own);
            assert_eq!(limit(Some(&own), Some(&of_pod), name), with, "{own:?} {name}");
            assert_eq!(limit(Some(&own), None, name), without, "{own:?} {name}");
        }
    }

    #[test]
    fn a_containers_status_shows_the_pods_limits_beside_its_own() {
        let of_pod = resources(json!({"limits": {"cpu": "2", "memory": "1Gi"}}));
        for (own, expected) in [
            (json!({"requests": {"cpu": "1"}}), json!({"requests": {"cpu": "1"}})),
            (json!({"limits": {"cpu": "1"}}), json!({"limits": {"cpu": "1", "memory": "1Gi"}})),
        ] {
            let container: Container =
                ferrite_json::from_value(json!({"name": "c", "resources": own})).unwrap();
            let shown = shown(&container, resources(own), Some(&of_pod));
            assert_eq!(ferrite_json::to_value(shown).unwrap(), expected);
        }
    }

    #[test]
    fn the_wider_of_two() {
        let group = |cpu: i64, memory: Option<i64>| PodResources {
            cpu_request: cpu,
            memory_request: 0,
            cpu_limit: Some(cpu),
            memory_limit: memory,
            ephemeral_request: 0,
        };
        let wide = wider(&group(1, Some(5)), &group(2, Some(4)));
        assert_eq!((wide.cpu_request, wide.cpu_limit, wide.memory_limit), (2, Some(2), Some(5)));
        assert_eq!(wider(&group(1, None), &group(1, Some(4))).memory_limit, None);
        for (has, wants, smaller) in [
            (Some(5), Some(4), Some(4)),
            (None, Some(4), Some(4)),
            (Some(4), Some(4), None),
            (Some(4), None, None),
        ] {
            assert_eq!(smaller_memory_limit(&group(1, has), &group(1, wants)), smaller, "{has:?} {wants:?}");
        }
    }

    #[test]
    fn the_status_shows_the_control_group_of_a_pod_that_runs() {
        let whole = json!({"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}},
            "containers": [{"name": "c", "resources": {"limits": {"memory": "2Gi"}}}]});
        let parts = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}],
            "overhead": {"cpu": "10m"}});
        let tiny = json!({"resources": {"requests": {"cpu": "1m"}, "limits": {"cpu": "5m"}}, "containers": [{"name": "c"}]});
        let none = json!({"containers": [{"name": "c"}]});
        for (what, spec, group, expected) in [
            (
                "one that does not run yet shows all that is allocated",
                &whole,
                None,
                json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}),
            ),
            (
                "as allocated",
                &whole,
                Some(pod_resources(&pod(whole.clone()))),
                json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}),
            ),
            (
                "while it changes, the group's amounts",
                &whole,
                Some(PodResources {
                    cpu_request: 1500,
                    memory_request: 3 << 30,
                    cpu_limit: Some(2500),
                    memory_limit: Some(4 << 30),
                    ephemeral_request: 0,
                }),
                json!({"requests": {"cpu": "1500m", "memory": "3Gi"}, "limits": {"cpu": "2500m", "memory": "4Gi"}}),
            ),
            (
                "a pod without resources of its own shows its containers'",
                &parts,
                Some(pod_resources(&pod(parts.clone()))),
                json!({"requests": {"cpu": "110m", "memory": "64Mi"}}),
            ),
            (
                "amounts below the kernel's least",
                &tiny,
                Some(pod_resources(&pod(tiny.clone()))),
                json!({"requests": {"cpu": "1m"}, "limits": {"cpu": "5m"}}),
            ),
            ("nothing", &none, Some(pod_resources(&pod(none.clone()))), json!({})),
        ] {
            let shown = status(&pod(spec.clone()), group.as_ref());
            assert_eq!(ferrite_json::to_value(shown).unwrap(), expected, "{what}");
        }
    }

    #[test]
    fn a_request_of_memory_is_recalled_from_the_status() {
        let mut pod =
            pod(json!({"resources": {"requests": {"memory": "1Gi"}}, "containers": [{"name": "c"}]}));
        let group = pod_resources(&pod);
        assert_eq!(recalled(group, &pod), group);
        let status = |phase: &str| {
            ferrite_json::from_value(json!({"phase": phase, "resources": {"requests": {"memory": "2Gi"}}}))
                .ok()
        };
        pod.status = status("Pending");
        assert_eq!(recalled(group, &pod), group, "it did not run yet");
        pod.status = status("Running");
        assert_eq!(recalled(group, &pod), PodResources { memory_request: 2 << 30, ..group });
    }

    #[test]
    fn the_class_of_a_pod_is_that_of_its_own_resources() {
        use crate::pod::model::{QosClass, qos_class};
        let both = json!({"cpu": "1", "memory": "1Gi"});
        for (resources, expected) in [
            (json!({"requests": both, "limits": both}), QosClass::Guaranteed),
            (json!({"limits": both}), QosClass::Guaranteed),
            (json!({"requests": {"cpu": "1"}}), QosClass::Burstable),
            (json!({}), QosClass::BestEffort),
        ] {
            let pod = pod(json!({"resources": resources, "containers": [{"name": "c"}]}));
            assert_eq!(qos_class(&pod), expected, "{resources}");
        }
    }

    #[test]
    fn allocated_requests_of_a_pod_are_without_its_overhead() {
        let mut pod = pod(json!({"resources": {"requests": {"cpu": "4"}}, "overhead": {"cpu": "250m"},
            "containers": [{"name": "c"}]}));
        assert_eq!(allocated_requests(&pod), None, "its status says nothing");
        pod.status = Some(ferrite_json::from_value(json!({"allocatedResources": {"cpu": "1250m"}})).unwrap());
        let requests = allocated_requests(&pod).unwrap();
        assert_eq!(requests["cpu"].0, "1");
    }
}
