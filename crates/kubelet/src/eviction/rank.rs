//! Ranks pods for eviction, and finds pods that exceed their disk limits.

use super::signals::{Signal, binary};
use crate::container::resources::pod_resources;
use crate::pod::PodContainer;
use crate::pod::model;
use crate::quantity;
use k8s_openapi::api::core::v1::Pod;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Resource usage of a pod; `None` for values that were not measured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodUsage {
    pub memory: Option<u64>,
    pub processes: Option<u64>,
    /// Writable layers, logs and emptyDir volumes together.
    pub disk: Option<u64>,
    pub inodes: Option<u64>,
    /// Memory by container.
    pub container_memory: BTreeMap<String, u64>,
    /// Writable layer and logs by container.
    pub container_disk: BTreeMap<String, u64>,
    /// By the name of the volume.
    pub empty_dirs: BTreeMap<String, u64>,
}

impl PodUsage {
    fn of(&self, signal: Signal) -> Option<u64> {
        match signal.resource() {
            "memory" => self.memory,
            "pids" => self.processes,
            "inodes" => self.inodes,
            _ => self.disk,
        }
    }
}

/// A pod that may be ended.
#[derive(Debug, Clone)]
pub(crate) struct Evictable<'a> {
    pub pod: &'a Pod,
    pub usage: PodUsage,
}

fn request(pod: &Pod, signal: Signal) -> i64 {
    let sums = pod_resources(pod);
    match signal.resource() {
        "memory" => sums.memory_request,
        "ephemeral-storage" => sums.ephemeral_request,
        _ => 0,
    }
}

/// Sorts pods so that the first one goes first, as upstream: those that were not measured, those that use
/// more than their request, those of low priority, those that exceed their request most.
pub(crate) fn rank(pods: &mut [Evictable<'_>], signal: Signal) {
    let by_requests = signal.resource() != "pids";
    pods.sort_by_key(|candidate| {
        let requested = request(candidate.pod, signal);
        let used = candidate.usage.of(signal).map(|used| i64::try_from(used).unwrap_or(i64::MAX));
        let priority = model::spec(candidate.pod).priority.unwrap_or(0);
        let exceeds = by_requests && used.is_some_and(|used| used > requested);
        let beyond = used.map_or(0, |used| used.saturating_sub(requested));
        (used.is_some(), !exceeds, priority, Reverse(beyond))
    });
}

/// Upstream's words about a pod that ends for a resource of the node.
pub(crate) fn message(candidate: &Evictable<'_>, signal: Signal, threshold: i64, available: i64) -> String {
    let resource = signal.resource();
    let shown = |amount: i64| {
        if matches!(resource, "memory" | "ephemeral-storage") { binary(amount) } else { amount.to_string() }
    };
    let mut text = format!(
        "The node was low on resource: {resource}. Threshold quantity: {}, available: {}. ",
        shown(threshold),
        shown(available)
    );
    let by_container = match resource {
        "memory" => &candidate.usage.container_memory,
        "ephemeral-storage" => &candidate.usage.container_disk,
        _ => return text,
    };
    for container in model::containers(candidate.pod) {
        let Some(used) = by_container.get(container.name()) else { continue };
        let used = i64::try_from(*used).unwrap_or(i64::MAX);
        let requested = requested_by(&container, resource);
        if used > requested {
            text.push_str(&format!(
                "Container {} was using {}, request is {}, has larger consumption of {resource}. ",
                container.name(),
                binary(used),
                binary(requested)
            ));
        }
    }
    text
}

fn requested_by(container: &PodContainer, resource: &str) -> i64 {
    let requests = container.spec.resources.as_ref().and_then(|r| r.requests.as_ref());
    quantity::value_of(requests, resource).unwrap_or(0)
}

fn limit_of(container: &PodContainer) -> Option<i64> {
    let limits = container.spec.resources.as_ref().and_then(|r| r.limits.as_ref());
    quantity::value_of(limits, "ephemeral-storage")
}

/// Returns true if anything limits the pod's disk usage; others need not be measured.
pub(crate) fn has_disk_limit(pod: &Pod) -> bool {
    let volumes = model::spec(pod).volumes.iter().flatten();
    let sized =
        |v: &k8s_openapi::api::core::v1::Volume| v.empty_dir.as_ref().is_some_and(|e| e.size_limit.is_some());
    volumes.into_iter().any(sized) || model::containers(pod).iter().any(|c| limit_of(c).is_some())
}

/// Why a pod has more on disk than it may, in upstream's words.
pub(crate) fn disk_excess(pod: &Pod, usage: &PodUsage) -> Option<String> {
    let spec = model::spec(pod);
    for volume in spec.volumes.iter().flatten() {
        let Some(limit) = volume.empty_dir.as_ref().and_then(|e| e.size_limit.as_ref()) else { continue };
        let used = usage.empty_dirs.get(&volume.name).copied().unwrap_or(0);
        if quantity::value(limit)
            .is_some_and(|bytes| bytes > 0 && i64::try_from(used).unwrap_or(i64::MAX) > bytes)
        {
            return Some(format!(
                "Usage of EmptyDir volume {:?} exceeds the limit {:?}. ",
                volume.name, limit.0
            ));
        }
    }
    let containers = model::containers(pod);
    let total = containers.iter().filter_map(limit_of).fold(0i64, i64::saturating_add);
    let total = Some(total).filter(|total| *total > 0);
    if let (Some(limit), Some(used)) = (total, usage.disk)
        && i64::try_from(used).unwrap_or(i64::MAX) > limit
    {
        return Some(format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {}. ",
            binary(limit)
        ));
    }
    for container in &containers {
        let used = usage.container_disk.get(container.name()).copied().unwrap_or(0);
        if let Some(limit) =
            limit_of(container).filter(|limit| i64::try_from(used).unwrap_or(i64::MAX) > *limit)
        {
            let name = container.name();
            return Some(format!(
                "Container {name} exceeded its local ephemeral storage limit {:?}. ",
                binary(limit)
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(name: &str, priority: i32, requests: Value) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": name}, "spec": {"priority": priority,
            "containers": [{"name": "c", "resources": {"requests": requests}}]}}))
        .unwrap()
    }

    #[test]
    fn ranking() {
        let mi = |n: u64| n << 20;
        let pods = [
            pod("within-low", 0, json!({"memory": "100Mi", "ephemeral-storage": "100Mi"})),
            pod("within-high", 10, json!({"memory": "100Mi", "ephemeral-storage": "100Mi"})),
            pod("over-low", 0, json!({"memory": "10Mi"})),
            pod("over-low-more", 0, json!({"memory": "10Mi"})),
            pod("over-high", 10, json!({})),
            pod("unmeasured", 100, json!({})),
        ];
        let used = [Some(mi(50)), Some(mi(90)), Some(mi(20)), Some(mi(30)), Some(mi(500)), None];
        let order = |signal: Signal| {
            let mut all: Vec<Evictable<'_>> = pods
                .iter()
                .zip(used)
                .map(|(pod, used)| {
                    let usage = PodUsage {
                        memory: used,
                        disk: used,
                        processes: used,
                        inodes: used,
                        ..PodUsage::default()
                    };
                    Evictable { pod, usage }
                })
                .collect();
            rank(&mut all, signal);
            all.iter().filter_map(|e| e.pod.metadata.name.clone()).collect::<Vec<_>>().join(" ")
        };
        for (signal, expected) in [
            (Signal::MemoryAvailable, "unmeasured over-low-more over-low over-high within-low within-high"),
            (Signal::NodeFsAvailable, "unmeasured over-low-more over-low over-high within-low within-high"),
            // Nobody asks for processes: priority decides, then how many there are.
            (Signal::PidAvailable, "unmeasured within-low over-low-more over-low over-high within-high"),
            // Nobody asks for inodes either, so everybody has more than it asked for.
            (Signal::NodeFsInodesFree, "unmeasured within-low over-low-more over-low over-high within-high"),
        ] {
            assert_eq!(order(signal), expected, "{signal:?}");
        }
    }

    #[test]
    fn messages_are_upstreams() {
        let pod = pod("p", 0, json!({"memory": "10Mi"}));
        let usage = PodUsage { container_memory: [("c".to_owned(), 20 << 20)].into(), ..PodUsage::default() };
        assert_eq!(
            message(&Evictable { pod: &pod, usage }, Signal::MemoryAvailable, 100 << 20, 50 << 20),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. \
             Container c was using 20Mi, request is 10Mi, has larger consumption of memory. "
        );
    }

    #[test]
    fn limits_on_disk() {
        let pod: Pod = ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
            "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Mi"}}, {"name": "w", "emptyDir": {}}],
            "containers": [
                {"name": "a", "resources": {"limits": {"ephemeral-storage": "2Mi"}}},
                {"name": "b", "resources": {"limits": {"ephemeral-storage": "4Mi"}}}]}}))
        .unwrap();
        assert!(has_disk_limit(&pod) && !has_disk_limit(&Pod::default()));
        let usage = |dir: u64, a: u64, b: u64| PodUsage {
            disk: Some((dir + a + b) << 10),
            container_disk: [("a".to_owned(), a << 10), ("b".to_owned(), b << 10)].into(),
            empty_dirs: [("v".to_owned(), dir << 10)].into(),
            ..PodUsage::default()
        };
        for (usage, expected) in [
            (usage(1024, 100, 100), None),
            (usage(1025, 0, 0), Some("Usage of EmptyDir volume \"v\" exceeds the limit \"1Mi\". ")),
            (
                usage(0, 2000, 4200),
                Some("Pod ephemeral local storage usage exceeds the total limit of containers 6Mi. "),
            ),
            (usage(0, 2049, 0), Some("Container a exceeded its local ephemeral storage limit \"2Mi\". ")),
            (PodUsage::default(), None),
        ] {
            assert_eq!(disk_excess(&pod, &usage).as_deref(), expected);
        }
    }
}
