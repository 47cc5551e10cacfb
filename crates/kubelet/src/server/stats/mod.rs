//! Resource usage of pods and the node: `/stats/summary`, `/metrics`, `/metrics/resource`,
//! `/metrics/cadvisor` and `/metrics/probes`.

mod exposition;
pub(crate) mod node;
mod summary;
mod usage;

pub(super) use exposition::{cadvisor, metrics, probes, resource_metrics, slis};
pub(super) use summary::summary;
pub(crate) use usage::usage;

use crate::pod::context::Context;
use crate::pod::labels;
use ferrite_cri::Code;
use ferrite_cri::v1::{
    ContainerStats, ContainerStatsFilter, LinuxPodSandboxStats, ListContainerStatsRequest,
    ListContainersRequest, ListPodSandboxStatsRequest, UInt64Value,
};
use std::collections::BTreeMap;

fn number(value: &Option<UInt64Value>) -> Option<u64> {
    value.as_ref().map(|v| v.value)
}

/// The pod that figures are about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct PodKey {
    namespace: String,
    name: String,
    uid: String,
}

/// Resource usage of a pod: as a whole if the runtime measures that, and by container.
#[derive(Debug, Default)]
struct PodFigures {
    whole: Option<LinuxPodSandboxStats>,
    containers: Vec<(String, ContainerStats)>,
    /// When each container was made, in nanoseconds since 1970, by its id.
    created: BTreeMap<String, i64>,
}

impl PodFigures {
    /// A figure of the pod's own group, which includes processes outside of containers; else the
    /// containers' sum.
    fn total(
        &self,
        whole: impl Fn(&LinuxPodSandboxStats) -> Option<u64>,
        part: impl Fn(&ContainerStats) -> Option<u64>,
    ) -> Option<u64> {
        let sum = || self.containers.iter().map(|(_, stats)| part(stats)).sum::<Option<u64>>();
        self.whole.as_ref().and_then(whole).or_else(sum)
    }

    fn cpu_nanoseconds(&self) -> Option<u64> {
        self.total(|pod| number(&pod.cpu?.usage_core_nano_seconds), cpu_nanoseconds)
    }

    fn working_set(&self) -> Option<u64> {
        self.total(|pod| number(&pod.memory?.working_set_bytes), working_set)
    }

    fn swap(&self) -> Option<u64> {
        self.total(|_| None, swap)
    }
}

fn cpu_nanoseconds(stats: &ContainerStats) -> Option<u64> {
    number(&stats.cpu?.usage_core_nano_seconds)
}

fn working_set(stats: &ContainerStats) -> Option<u64> {
    number(&stats.memory?.working_set_bytes)
}

fn swap(stats: &ContainerStats) -> Option<u64> {
    number(&stats.swap?.swap_usage_bytes)
}

type Pods = BTreeMap<PodKey, PodFigures>;

fn key_of(labels: &BTreeMap<String, String>) -> PodKey {
    let label = |key: &str| labels.get(key).cloned().unwrap_or_default();
    PodKey {
        namespace: label(labels::POD_NAMESPACE),
        name: label(labels::POD_NAME),
        uid: label(labels::POD_UID),
    }
}

fn named(stats: ContainerStats) -> Option<(PodKey, String, ContainerStats)> {
    let labels = &stats.attributes.as_ref()?.labels;
    let container = labels.get(labels::CONTAINER_NAME).cloned().unwrap_or_default();
    Some((key_of(labels), container, stats))
}

async fn pods(context: &Context) -> ferrite_cri::Result<Pods> {
    let mut pods = Pods::new();
    match context.runtime.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).await {
        Ok(listed) => {
            for stats in listed.stats {
                let Some(attributes) = &stats.attributes else { continue };
                let pod = pods.entry(key_of(&attributes.labels)).or_default();
                let mut whole = stats.linux.unwrap_or_default();
                let containers = std::mem::take(&mut whole.containers);
                pod.containers.extend(containers.into_iter().filter_map(named).map(|(_, name, s)| (name, s)));
                pod.whole = Some(whole);
            }
        }
        // A runtime may measure containers alone.
        Err(e) if e.code == Code::Unimplemented => {
            let request = ListContainerStatsRequest { filter: Some(ContainerStatsFilter::default()) };
            let listed = context.runtime.list_container_stats(request).await?;
            for (key, name, stats) in listed.stats.into_iter().filter_map(named) {
                pods.entry(key).or_default().containers.push((name, stats));
            }
        }
        Err(e) => return Err(e),
    }
    let listed = context.runtime.list_containers(ListContainersRequest { filter: None }).await?;
    for container in listed.containers {
        if let Some(pod) = pods.get_mut(&key_of(&container.labels)) {
            pod.created.insert(container.id, container.created_at);
        }
    }
    pods.values_mut().for_each(|pod| pod.containers.sort_by(|a, b| a.0.cmp(&b.0)));
    Ok(pods)
}
