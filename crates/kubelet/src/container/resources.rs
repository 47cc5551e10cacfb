//! Requests and limits as the kernel's numbers.

use super::{huge_pages, oom_score};
use crate::pod::labels;
use crate::pod::model::{self, ContainerKind, QosClass};
use crate::quantity;
use crate::topology::ContainerCpus;
use ferrite_cri::v1::LinuxContainerResources;
use k8s_openapi::api::core::v1::{Container, Pod};
use std::collections::BTreeMap;

const SHARES_PER_CPU: i64 = 1024;
const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
const MIN_QUOTA: i64 = 1000;

/// Enforcement of CPU limits by the kernel's CFS quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuQuota {
    /// Without it containers may use more processors than their limits say.
    pub enforced: bool,
    /// The length of one period, in microseconds.
    pub period: i64,
}

impl Default for CpuQuota {
    fn default() -> Self {
        Self { enforced: true, period: 100_000 }
    }
}

impl CpuQuota {
    /// Microseconds of CPU time per period; zero means no limit.
    pub(crate) fn of(self, milli: i64) -> i64 {
        match self.enforced && milli > 0 {
            true => (milli.saturating_mul(self.period) / 1000).max(MIN_QUOTA),
            false => 0,
        }
    }
}

/// The use of swap by containers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SwapBehavior {
    /// Containers have no swap.
    #[default]
    NoSwap,
    /// Containers of Burstable pods have a part of the node's swap, in proportion to their requests of memory.
    LimitedSwap,
}

/// The node's swap, where its kernel can limit the swap of each container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeSwap {
    pub behavior: SwapBehavior,
    /// Bytes of memory and of swap that the machine has.
    pub memory: i64,
    pub swap: i64,
}

impl NodeSwap {
    /// Bytes of swap that a container may use, by upstream's rules.
    pub(crate) fn of(self, pod: &Pod, container: &Container) -> i64 {
        let resources = container.resources.as_ref();
        let amount = |list: Option<&BTreeMap<String, _>>| quantity::value_of(list, "memory").unwrap_or(0);
        let request = amount(resources.and_then(|r| r.requests.as_ref()));
        let limit = amount(resources.and_then(|r| r.limits.as_ref()));
        let has_part = self.behavior == SwapBehavior::LimitedSwap
            && model::qos_class(pod) == QosClass::Burstable
            && !is_critical(pod)
            && request != limit
            && (1..=self.memory).contains(&request);
        match has_part {
            true => (request as f64 / self.memory as f64 * self.swap as f64) as i64,
            false => 0,
        }
    }
}

fn is_critical(pod: &Pod) -> bool {
    labels::is_static(pod) || model::spec(pod).priority.is_some_and(|priority| priority >= 2_000_000_000)
}

/// The node's rules for the resources of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRules {
    /// Memory of the machine, in bytes.
    pub memory: i64,
    pub quota: CpuQuota,
    /// None where the kernel cannot limit a container's swap.
    pub swap: Option<NodeSwap>,
    /// The sizes of huge pages that the kernel has, in bytes.
    pub huge_pages: &'static [i64],
}

/// CPU shares for thousandths of a processor, in the range that the kernel takes.
pub(crate) fn cpu_shares(milli: i64) -> i64 {
    if milli <= 0 {
        return MIN_SHARES;
    }
    (milli.saturating_mul(SHARES_PER_CPU) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// Thousandths of a processor for CPU shares, as upstream rounds them.
pub(crate) fn milli_of_shares(shares: u64) -> i64 {
    let shares = i64::try_from(shares).unwrap_or(MAX_SHARES).clamp(0, MAX_SHARES);
    if shares < MIN_SHARES { 0 } else { (shares * 1000 + SHARES_PER_CPU - 1) / SHARES_PER_CPU }
}

/// The resource limits of one container.
pub(crate) fn container_resources(
    pod: &Pod,
    container: &Container,
    rules: &NodeRules,
) -> LinuxContainerResources {
    let resources = container.resources.as_ref();
    let (requests, limits) =
        (resources.and_then(|r| r.requests.as_ref()), resources.and_then(|r| r.limits.as_ref()));
    // A container without a limit of its own has the pod's limit.
    let of_pod = model::spec(pod).resources.as_ref().and_then(|r| r.limits.as_ref());
    let own = |name: &str| quantity::milli_of(limits, name).filter(|limit| *limit > 0);
    let limit = |name: &str| own(name).or_else(|| quantity::milli_of(of_pod, name)).unwrap_or(0);
    let cpu_limit = limit("cpu");
    // A limit without a request asks for as much as the limit, as defaulting does.
    let cpu_request = quantity::milli_of(requests, "cpu").unwrap_or(cpu_limit);
    let memory = (limit("memory") / 1000).max(0);
    let swap = rules.swap.map(|swap| ("memory.swap.max".to_owned(), swap.of(pod, container).to_string()));
    LinuxContainerResources {
        cpu_period: if rules.quota.enforced { rules.quota.period } else { 0 },
        cpu_quota: rules.quota.of(cpu_limit),
        cpu_shares: cpu_shares(cpu_request),
        memory_limit_in_bytes: memory,
        oom_score_adj: oom_score::adjustment(pod, container, rules.memory),
        hugepage_limits: huge_pages::of_container(pod, container, rules.huge_pages),
        unified: swap.into_iter().collect(),
        ..LinuxContainerResources::default()
    }
}

/// The same, on these processors. One that has them for itself has no quota, as upstream.
pub(crate) fn on_cpus(
    resources: LinuxContainerResources,
    cpus: Option<&ContainerCpus>,
) -> LinuxContainerResources {
    let Some(cpus) = cpus else { return resources };
    let cpu_quota = if cpus.exclusive { -1 } else { resources.cpu_quota };
    LinuxContainerResources {
        cpuset_cpus: cpus.set.clone(),
        cpuset_mems: cpus.mems.clone(),
        cpu_quota,
        ..resources
    }
}

/// The same, ended as a whole when its memory runs out. The file is one of cgroup v2.
pub(crate) fn in_oom_group(
    mut resources: LinuxContainerResources,
    as_a_whole: bool,
) -> LinuxContainerResources {
    if as_a_whole {
        resources.unified.insert("memory.oom.group".into(), "1".into());
    }
    resources
}

/// The requests and limits of a whole pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PodResources {
    pub cpu_request: i64,
    pub memory_request: i64,
    /// Nothing when a container has no limit.
    pub cpu_limit: Option<i64>,
    pub memory_limit: Option<i64>,
    pub ephemeral_request: i64,
}

/// The overhead of the sandbox beside the containers, from the pod's RuntimeClass.
pub(crate) fn overhead(pod: &Pod, quota: CpuQuota) -> Option<LinuxContainerResources> {
    let overhead = model::spec(pod).overhead.as_ref()?;
    let cpu = quantity::milli_of(Some(overhead), "cpu");
    Some(LinuxContainerResources {
        cpu_period: if cpu.is_some() && quota.enforced { quota.period } else { 0 },
        cpu_quota: quota.of(cpu.unwrap_or(0)),
        cpu_shares: cpu.map_or(0, cpu_shares),
        memory_limit_in_bytes: quantity::value_of(Some(overhead), "memory").unwrap_or(0),
        ..LinuxContainerResources::default()
    })
}

/// The resources of all containers together, of a pod with these resources: the overhead is told apart from them.
pub(crate) fn of_sandbox(pod: &Pod, total: &PodResources, quota: CpuQuota) -> LinuxContainerResources {
    let overhead = model::spec(pod).overhead.as_ref();
    let cpu = quantity::milli_of(overhead, "cpu").unwrap_or(0);
    let memory = quantity::value_of(overhead, "memory").unwrap_or(0);
    LinuxContainerResources {
        cpu_period: if quota.enforced { quota.period } else { 0 },
        cpu_quota: quota.of(total.cpu_limit.unwrap_or(0).saturating_sub(cpu)),
        cpu_shares: cpu_shares(total.cpu_request.saturating_sub(cpu)),
        memory_limit_in_bytes: total.memory_limit.unwrap_or(0).saturating_sub(memory).max(0),
        ..LinuxContainerResources::default()
    }
}

/// Every resource the pod's containers ask for together, in whole units.
pub(crate) fn requests(pod: &Pod) -> BTreeMap<String, i64> {
    let mut sums: BTreeMap<String, i64> = BTreeMap::new();
    for container in
        model::containers(pod).iter().filter(|c| c.kind == ContainerKind::Regular || c.is_sidecar())
    {
        let list = container.spec.resources.as_ref().and_then(|r| r.requests.as_ref());
        for (name, amount) in list.into_iter().flatten() {
            let sum = sums.entry(name.clone()).or_default();
            *sum = sum.saturating_add(quantity::value(amount).unwrap_or(0));
        }
    }
    for container in
        model::containers(pod).iter().filter(|c| c.kind == ContainerKind::Init && !c.is_sidecar())
    {
        let list = container.spec.resources.as_ref().and_then(|r| r.requests.as_ref());
        for (name, amount) in list.into_iter().flatten() {
            let sum = sums.entry(name.clone()).or_default();
            *sum = (*sum).max(quantity::value(amount).unwrap_or(0));
        }
    }
    sums
}

/// The larger of the containers' needs together and each init container's need at its turn beside the
/// sidecars started before it.
pub(crate) fn pod_resources(pod: &Pod) -> PodResources {
    let containers = model::containers(pod);
    let sum = |amount: &dyn Fn(&Container) -> i64| -> i64 {
        let (mut total, mut sidecars, mut init_peak) = (0i64, 0i64, 0i64);
        for c in &containers {
            let a = amount(&c.spec);
            match c.kind {
                ContainerKind::Regular => total = total.saturating_add(a),
                ContainerKind::Init if c.is_sidecar() => {
                    sidecars = sidecars.saturating_add(a);
                    init_peak = init_peak.max(sidecars);
                }
                ContainerKind::Init => init_peak = init_peak.max(sidecars.saturating_add(a)),
                ContainerKind::Ephemeral => {}
            }
        }
        total.saturating_add(sidecars).max(init_peak)
    };
    let limit = |name: &'static str| {
        move |c: &Container| quantity::milli_of(c.resources.as_ref().and_then(|r| r.limits.as_ref()), name)
    };
    let request = |name: &'static str| {
        move |c: &Container| {
            quantity::milli_of(c.resources.as_ref().and_then(|r| r.requests.as_ref()), name)
                .or_else(|| limit(name)(c))
                .unwrap_or(0)
        }
    };
    let limited = |name: &'static str| {
        let all = containers
            .iter()
            .filter(|c| c.kind != ContainerKind::Ephemeral)
            .all(|c| limit(name)(&c.spec).is_some_and(|l| l > 0));
        all.then(|| sum(&|c| limit(name)(c).unwrap_or(0)))
    };
    // Pod-level resources replace the sums of the containers; the sandbox's overhead is added.
    let whole = model::spec(pod).resources.as_ref();
    let overhead = |name: &str| quantity::milli_of(model::spec(pod).overhead.as_ref(), name).unwrap_or(0);
    let requested = |name: &'static str| {
        let of_pod = quantity::milli_of(whole.and_then(|r| r.requests.as_ref()), name)
            .or_else(|| quantity::milli_of(whole.and_then(|r| r.limits.as_ref()), name));
        of_pod.unwrap_or_else(|| sum(&request(name))).saturating_add(overhead(name))
    };
    let limit_of = |name: &'static str| {
        let of_pod = quantity::milli_of(whole.and_then(|r| r.limits.as_ref()), name);
        of_pod.or_else(|| limited(name)).map(|limit| limit.saturating_add(overhead(name)))
    };
    PodResources {
        cpu_request: requested("cpu"),
        memory_request: requested("memory") / 1000,
        cpu_limit: limit_of("cpu"),
        memory_limit: limit_of("memory").map(|m| m / 1000),
        ephemeral_request: requested("ephemeral-storage") / 1000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    #[test]
    fn cpu_numbers() {
        for (milli, shares, quota) in [(0, 2, 0), (1, 2, 1000), (100, 102, 10_000), (2500, 2560, 250_000)] {
            let usual = CpuQuota::default();
            assert_eq!((cpu_shares(milli), usual.of(milli)), (shares, quota), "{milli}m");
        }
        assert_eq!(CpuQuota { enforced: true, period: 10_000 }.of(500), 5000);
        assert_eq!(CpuQuota { enforced: true, period: 1000 }.of(500), 1000, "the kernel takes no less");
        assert_eq!(CpuQuota { enforced: false, ..CpuQuota::default() }.of(500), 0);
    }

    #[test]
    fn containers_have_swap_in_proportion_to_their_requests() {
        let limited = NodeSwap { behavior: SwapBehavior::LimitedSwap, memory: 1000, swap: 500 };
        let none = NodeSwap { behavior: SwapBehavior::NoSwap, ..limited };
        let burstable = json!({"requests": {"memory": "100"}, "limits": {"memory": "200"}});
        let guaranteed =
            json!({"requests": {"memory": "100", "cpu": "1"}, "limits": {"memory": "100", "cpu": "1"}});
        for (swap, resources, priority, expected) in [
            (limited, burstable.clone(), 0, 50),
            (limited, json!({"requests": {"memory": "1000"}}), 0, 500),
            (limited, burstable.clone(), 2_000_000_000, 0),
            (limited, guaranteed, 0, 0),
            (limited, json!({}), 0, 0),
            (limited, json!({"requests": {"cpu": "1"}}), 0, 0),
            (limited, json!({"requests": {"memory": "100", "cpu": "1"}, "limits": {"memory": "100"}}), 0, 0),
            (limited, json!({"requests": {"memory": "1001"}}), 0, 0),
            (none, burstable, 0, 0),
        ] {
            let p = pod(json!({"priority": priority, "containers": [{"name": "c", "resources": resources}]}));
            let rules =
                NodeRules { memory: 1000, quota: CpuQuota::default(), swap: Some(swap), huge_pages: &[] };
            let shown = container_resources(&p, &p.spec.as_ref().unwrap().containers[0], &rules);
            assert_eq!(shown.unified["memory.swap.max"], expected.to_string(), "{resources} {priority}");
            let without = NodeRules { swap: None, ..rules };
            assert!(
                container_resources(&p, &p.spec.as_ref().unwrap().containers[0], &without).unified.is_empty()
            );
        }
    }

    #[test]
    fn a_pod_speaks_before_its_containers_and_pays_for_its_sandbox() {
        let p = pod(json!({
            "resources": {"limits": {"cpu": "2", "memory": "2Mi"}, "requests": {"cpu": "500m"}},
            "overhead": {"cpu": "250m", "memory": "1Mi"},
            "containers": [{"name": "a", "resources": {"limits": {"cpu": "1"}}}, {"name": "b"}],
        }));
        let r = pod_resources(&p);
        assert_eq!((r.cpu_request, r.cpu_limit), (750, Some(2250)));
        assert_eq!((r.memory_request, r.memory_limit), (3 << 20, Some(3 << 20)));
        let containers = &p.spec.as_ref().unwrap().containers;
        let rules = NodeRules { memory: 1 << 30, quota: CpuQuota::default(), swap: None, huge_pages: &[] };
        let [a, b] = [0, 1].map(|i: usize| container_resources(&p, &containers[i], &rules));
        assert_eq!((a.cpu_quota, a.memory_limit_in_bytes), (100_000, 2 << 20));
        assert_eq!((b.cpu_quota, b.memory_limit_in_bytes, b.cpu_shares), (200_000, 2 << 20, 2048));
        let o = overhead(&p, CpuQuota::default()).unwrap();
        assert_eq!((o.cpu_quota, o.memory_limit_in_bytes), (25_000, 1 << 20));
        let s = of_sandbox(&p, &r, CpuQuota::default());
        assert_eq!((s.cpu_quota, s.memory_limit_in_bytes, s.cpu_shares), (200_000, 2 << 20, 512));
    }

    #[test]
    fn a_pod_asks_for_the_larger_of_init_and_run() {
        let p = pod(json!({
            "initContainers": [
                {"name": "i", "resources": {"requests": {"cpu": "2"}}},
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}}],
            "containers": [{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}}],
        }));
        let r = pod_resources(&p);
        assert_eq!((r.cpu_request, r.memory_request, r.cpu_limit), (2000, 1 << 20, None));
    }
}
