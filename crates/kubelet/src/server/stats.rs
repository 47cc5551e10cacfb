//! `/stats/summary`, `/metrics` and `/metrics/resource`.

use super::{Answer, answer, full, json, text};
use crate::node::meminfo_bytes;
use crate::pod::context::Context;
use crate::pod::labels;
use ferrite_cri::v1::{ContainerStats, ContainerStatsFilter, ListContainerStatsRequest, UInt64Value};
use ferrite_json::{Value, json};
use hyper::StatusCode;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::fmt::Write;

/// One node's use of processor and memory.
#[derive(Debug, Clone, Copy, Default)]
struct NodeUse {
    cpu_nanos: u64,
    memory_available: i64,
    memory_working_set: i64,
}

fn node_use() -> NodeUse {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo_bytes(&meminfo, "MemTotal").unwrap_or(0);
    let available = meminfo_bytes(&meminfo, "MemAvailable").unwrap_or(0);
    NodeUse {
        cpu_nanos: cpu_nanos(&stat),
        memory_available: available,
        memory_working_set: (total - available).max(0),
    }
}

/// Busy time of all processors: user, nice, system, irq, softirq and steal, in ticks of 10 ms.
fn cpu_nanos(stat: &str) -> u64 {
    let Some(line) = stat.lines().find_map(|l| l.strip_prefix("cpu ")) else { return 0 };
    let ticks: Vec<u64> = line.split_whitespace().map(|t| t.parse().unwrap_or(0)).collect();
    let busy: u64 = [0, 1, 2, 5, 6, 7].iter().filter_map(|i| ticks.get(*i)).sum();
    busy.saturating_mul(10_000_000)
}

fn number(value: &Option<UInt64Value>) -> Option<u64> {
    value.as_ref().map(|v| v.value)
}

type Pods = BTreeMap<(String, String, String), Vec<(String, ContainerStats)>>;

async fn pods(context: &Context) -> ferrite_cri::Result<Pods> {
    let request = ListContainerStatsRequest { filter: Some(ContainerStatsFilter::default()) };
    let mut pods = Pods::new();
    for stats in context.runtime.list_container_stats(request).await?.stats {
        let Some(attributes) = &stats.attributes else { continue };
        let label = |key: &str| attributes.labels.get(key).cloned().unwrap_or_default();
        let key = (label(labels::POD_NAMESPACE), label(labels::POD_NAME), label(labels::POD_UID));
        let container = label(labels::CONTAINER_NAME);
        pods.entry(key).or_default().push((container, stats));
    }
    Ok(pods)
}

fn time(nanos: i64) -> String {
    crate::clock::from_nanos(nanos).unwrap_or_else(Timestamp::now).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn container_json(name: &str, stats: &ContainerStats) -> Value {
    let cpu = stats.cpu.unwrap_or_default();
    let memory = stats.memory.unwrap_or_default();
    json!({
        "name": name,
        "cpu": {
            "time": time(cpu.timestamp),
            "usageNanoCores": number(&cpu.usage_nano_cores),
            "usageCoreNanoSeconds": number(&cpu.usage_core_nano_seconds),
        },
        "memory": {
            "time": time(memory.timestamp),
            "workingSetBytes": number(&memory.working_set_bytes),
            "usageBytes": number(&memory.usage_bytes),
            "rssBytes": number(&memory.rss_bytes),
            "availableBytes": number(&memory.available_bytes),
        },
    })
}

pub(super) async fn summary(context: &Context) -> Answer {
    let pods = match pods(context).await {
        Ok(pods) => pods,
        Err(e) => return text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    };
    let now = time(0);
    let used = node_use();
    let pods: Vec<Value> = pods
        .iter()
        .map(|((namespace, name, uid), containers)| {
            let sum = |of: &dyn Fn(&ContainerStats) -> Option<u64>| -> u64 {
                containers.iter().filter_map(|(_, s)| of(s)).sum()
            };
            json!({
                "podRef": {"name": name, "namespace": namespace, "uid": uid},
                "containers": containers.iter().map(|(n, s)| container_json(n, s)).collect::<Vec<_>>(),
                "cpu": {
                    "time": now,
                    "usageNanoCores": sum(&|s| number(&s.cpu.as_ref()?.usage_nano_cores)),
                    "usageCoreNanoSeconds": sum(&|s| number(&s.cpu.as_ref()?.usage_core_nano_seconds)),
                },
                "memory": {
                    "time": now,
                    "workingSetBytes": sum(&|s| number(&s.memory.as_ref()?.working_set_bytes)),
                    "usageBytes": sum(&|s| number(&s.memory.as_ref()?.usage_bytes)),
                },
            })
        })
        .collect();
    json(&json!({
        "node": {
            "nodeName": context.node_name,
            "cpu": {"time": now, "usageCoreNanoSeconds": used.cpu_nanos},
            "memory": {
                "time": now,
                "availableBytes": used.memory_available,
                "workingSetBytes": used.memory_working_set,
            },
        },
        "pods": pods,
    }))
}

fn exposition(body: String) -> Answer {
    answer(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", full(body))
}

pub(super) async fn metrics(context: &Context) -> Answer {
    let pods = pods(context).await.unwrap_or_default();
    let containers: usize = pods.values().map(Vec::len).sum();
    let mut out = String::new();
    let _ = writeln!(out, "# HELP kubelet_running_pods Number of pods that have a running pod sandbox");
    let _ = writeln!(out, "# TYPE kubelet_running_pods gauge");
    let _ = writeln!(out, "kubelet_running_pods {}", pods.len());
    let _ = writeln!(out, "# HELP kubelet_running_containers Number of containers currently running");
    let _ = writeln!(out, "# TYPE kubelet_running_containers gauge");
    let _ = writeln!(out, "kubelet_running_containers{{container_state=\"running\"}} {containers}");
    let _ = writeln!(out, "# HELP kubelet_node_name The node's name. The count is always 1.");
    let _ = writeln!(out, "# TYPE kubelet_node_name gauge");
    let _ = writeln!(out, "kubelet_node_name{{node=\"{}\"}} 1", context.node_name);
    exposition(out)
}

pub(super) async fn resource_metrics(context: &Context) -> Answer {
    let pods = match pods(context).await {
        Ok(pods) => pods,
        Err(e) => return text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    };
    let used = node_use();
    let mut out = String::new();
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let _ = writeln!(out, "# TYPE node_cpu_usage_seconds_total counter");
    let _ = writeln!(out, "node_cpu_usage_seconds_total {}", seconds(used.cpu_nanos));
    let _ = writeln!(out, "# TYPE node_memory_working_set_bytes gauge");
    let _ = writeln!(out, "node_memory_working_set_bytes {}", used.memory_working_set);
    let (mut cpu, mut memory) = (String::new(), String::new());
    for ((namespace, pod, _), containers) in &pods {
        for (container, stats) in containers {
            let of = format!("{{container=\"{container}\",namespace=\"{namespace}\",pod=\"{pod}\"}}");
            if let Some(nanos) = stats.cpu.as_ref().and_then(|c| number(&c.usage_core_nano_seconds)) {
                let _ = writeln!(cpu, "container_cpu_usage_seconds_total{of} {}", seconds(nanos));
            }
            if let Some(bytes) = stats.memory.as_ref().and_then(|m| number(&m.working_set_bytes)) {
                let _ = writeln!(memory, "container_memory_working_set_bytes{of} {bytes}");
            }
        }
    }
    let _ = write!(out, "# TYPE container_cpu_usage_seconds_total counter\n{cpu}");
    let _ = write!(out, "# TYPE container_memory_working_set_bytes gauge\n{memory}");
    let _ = writeln!(out, "# TYPE scrape_error gauge\nscrape_error 0");
    exposition(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_leaves_out_idle_and_wait() {
        assert_eq!(cpu_nanos("cpu  1 2 3 100 200 4 5 6 0 0\ncpu0 1 1 1\n"), 21 * 10_000_000);
        assert_eq!(cpu_nanos(""), 0);
    }
}
