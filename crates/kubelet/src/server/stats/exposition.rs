//! The same figures as text for Prometheus.

use super::node::node_use;
use super::{PodFigures, PodKey, Pods, cpu_nanoseconds, number, pods, swap, working_set};
use crate::pod::context::Context;
use crate::server::{Answer, answer, full, text};
use crate::volumes::stats::{MeasuredVolume, VolumeFigures};
use ferrite_component::metrics::escaped;
use ferrite_cri::v1::{ContainerStats, NetworkInterfaceUsage, UInt64Value};
use hyper::StatusCode;
use std::collections::BTreeMap;
use std::fmt::Write;

fn exposition(body: String) -> Answer {
    answer(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", full(body))
}

/// A family: its head once, then its lines. A family without lines is not written.
fn family(out: &mut String, name: &str, kind: &str, help: &str, lines: impl Iterator<Item = (String, f64)>) {
    for (index, (labels, value)) in lines.enumerate() {
        if index == 0 {
            let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        }
        let _ = match labels.is_empty() {
            true => writeln!(out, "{name} {value}"),
            false => writeln!(out, "{name}{{{labels}}} {value}"),
        };
    }
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// A family with a line for each container.
fn by_container(
    out: &mut String,
    pods: &Pods,
    (name, kind, help): (&str, &str, &str),
    with_id: bool,
    read: impl Fn(&ContainerStats) -> Option<f64>,
) {
    by_container_of(out, pods, (name, kind, help), with_id, |_, _, stats| read(stats));
}

/// The same, where the line needs the pod's figures or the container's id.
fn by_container_of(
    out: &mut String,
    pods: &Pods,
    (name, kind, help): (&str, &str, &str),
    with_id: bool,
    read: impl Fn(&PodFigures, &str, &ContainerStats) -> Option<f64>,
) {
    let lines = pods.iter().flat_map(|(pod, figures)| {
        let read = &read;
        figures.containers.iter().filter_map(move |(container, stats)| {
            let PodKey { namespace, name, .. } = pod;
            let container_id = stats.attributes.as_ref().map(|a| a.id.as_str()).unwrap_or_default();
            let id = container_id;
            let id = if with_id { format!("name=\"{id}\",") } else { String::new() };
            let labels = format!("container=\"{container}\",{id}namespace=\"{namespace}\",pod=\"{name}\"");
            Some((labels, read(figures, container_id, stats)?))
        })
    });
    family(out, name, kind, help, lines);
}

/// A family with a line for each pod.
fn by_pod(
    out: &mut String,
    pods: &Pods,
    (name, kind, help): (&str, &str, &str),
    read: impl Fn(&PodFigures) -> Option<f64>,
) {
    let lines = pods.iter().filter_map(|(pod, figures)| {
        Some((format!("namespace=\"{}\",pod=\"{}\"", pod.namespace, pod.name), read(figures)?))
    });
    family(out, name, kind, help, lines);
}

pub(in crate::server) async fn metrics(context: &Context) -> Answer {
    let pods = pods(context).await.unwrap_or_default();
    let containers: usize = pods.values().map(|pod| pod.containers.len()).sum();
    let mut out = String::new();
    let one = |labels: String, value: f64| std::iter::once((labels, value));
    let help = "Number of pods that have a running pod sandbox";
    family(&mut out, "kubelet_running_pods", "gauge", help, one(String::new(), pods.len() as f64));
    let help = "Number of containers currently running";
    let state = "container_state=\"running\"".to_owned();
    family(&mut out, "kubelet_running_containers", "gauge", help, one(state, containers as f64));
    let help = "The node's name. The count is always 1.";
    let node = format!("node=\"{}\"", context.node_name);
    family(&mut out, "kubelet_node_name", "gauge", help, one(node, 1.0));
    volume_metrics(&mut out, &pods, &context.volumes.figures().await);
    out.push_str(&ferrite_component::metrics::registry().text());
    exposition(out)
}

/// The results of the kubelet's own health checks.
pub(in crate::server) fn slis() -> Answer {
    exposition(ferrite_component::health::results())
}

type VolumeFigure = fn(&VolumeFigures) -> Option<u64>;

/// The space in volumes that pods use through claims. Two pods that share a claim have one line.
fn volume_metrics(out: &mut String, pods: &Pods, volumes: &BTreeMap<String, Vec<MeasuredVolume>>) {
    let families: [(&str, &str, VolumeFigure); 6] = [
        ("kubelet_volume_stats_available_bytes", "Number of available bytes in the volume", |f| f.available),
        ("kubelet_volume_stats_capacity_bytes", "Capacity in bytes of the volume", |f| f.capacity),
        ("kubelet_volume_stats_inodes", "Maximum number of inodes in the volume", |f| f.inodes),
        ("kubelet_volume_stats_inodes_free", "Number of free inodes in the volume", |f| f.inodes_free),
        ("kubelet_volume_stats_inodes_used", "Number of used inodes in the volume", |f| f.inodes_used),
        ("kubelet_volume_stats_used_bytes", "Number of used bytes in the volume", |f| f.used),
    ];
    let mut claims: BTreeMap<(&str, &str), &VolumeFigures> = BTreeMap::new();
    for pod in pods.keys() {
        for volume in volumes.get(&pod.uid).into_iter().flatten() {
            if let Some(claim) = &volume.claim {
                claims.insert((&pod.namespace, claim), &volume.figures);
            }
        }
    }
    for (name, help, figure) in families {
        let lines = claims.iter().filter_map(|((namespace, claim), figures)| {
            let labels = format!("namespace=\"{namespace}\",persistentvolumeclaim=\"{claim}\"");
            Some((labels, figure(figures)? as f64))
        });
        let lines: Vec<(String, f64)> = lines.collect();
        if !lines.is_empty() {
            family(out, name, "gauge", help, lines.into_iter());
        }
    }
}

const CPU: (&str, &str, &str) =
    ("container_cpu_usage_seconds_total", "counter", "Processor time used by the container");
const WORKING_SET: (&str, &str, &str) = (
    "container_memory_working_set_bytes",
    "gauge",
    "Memory of the container that cannot be given back easily",
);

pub(in crate::server) async fn resource_metrics(context: &Context) -> Answer {
    // As upstream: the node's figures are served even if reading those of pods fails.
    let (pods, failed) = match pods(context).await {
        Ok(pods) => (pods, false),
        Err(error) => {
            tracing::warn!(%error, "cannot read the figures of pods");
            (Pods::new(), true)
        }
    };
    exposition(resource_text(&pods, failed))
}

fn resource_text(pods: &Pods, failed: bool) -> String {
    let used = node_use();
    let mut out = String::new();
    for (name, kind, help, value) in [
        (
            "node_cpu_usage_seconds_total",
            "counter",
            "Processor time used by the node",
            seconds(used.cpu_nanos),
        ),
        (
            "node_memory_working_set_bytes",
            "gauge",
            "Memory of the node that cannot be given back easily",
            used.memory_working_set as f64,
        ),
        ("node_swap_usage_bytes", "gauge", "Swap used by the node", used.swap_used as f64),
    ] {
        family(&mut out, name, kind, help, std::iter::once((String::new(), value)));
    }
    let out = &mut out;
    by_container(out, pods, CPU, false, |s| cpu_nanoseconds(s).map(seconds));
    by_container(out, pods, WORKING_SET, false, |s| working_set(s).map(|b| b as f64));
    let start =
        ("container_start_time_seconds", "gauge", "When the container was made, in seconds since 1970");
    by_container_of(out, pods, start, false, |pod, id, _| pod.created.get(id).map(|at| *at as f64 / 1e9));
    let swap_limit = ("container_swap_limit_bytes", "gauge", "Swap that the container may use");
    by_container(out, pods, swap_limit, false, |s| {
        let swap = s.swap?;
        Some(number(&swap.swap_available_bytes)?.checked_add(number(&swap.swap_usage_bytes)?)? as f64)
    });
    let swap_usage = ("container_swap_usage_bytes", "gauge", "Swap used by the container");
    by_container(out, pods, swap_usage, false, |s| swap(s).map(|b| b as f64));
    let cpu = ("pod_cpu_usage_seconds_total", "counter", "Processor time used by the pod");
    by_pod(out, pods, cpu, |p| p.cpu_nanoseconds().map(seconds));
    let memory =
        ("pod_memory_working_set_bytes", "gauge", "Memory of the pod that cannot be given back easily");
    by_pod(out, pods, memory, |p| p.working_set().map(|b| b as f64));
    by_pod(out, pods, ("pod_swap_usage_bytes", "gauge", "Swap used by the pod"), |p| {
        p.swap().map(|b| b as f64)
    });
    for name in ["scrape_error", "resource_scrape_error"] {
        family(
            out,
            name,
            "gauge",
            "1 if the figures could not be read",
            std::iter::once((String::new(), f64::from(u8::from(failed)))),
        );
    }
    std::mem::take(out)
}

pub(in crate::server) async fn cadvisor(context: &Context) -> Answer {
    match pods(context).await {
        Ok(pods) => exposition(cadvisor_text(&pods)),
        Err(e) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    }
}

type ReadContainer = fn(&ContainerStats) -> Option<u64>;
type ReadInterface = fn(&NetworkInterfaceUsage) -> &Option<UInt64Value>;

const CONTAINERS: &[(&str, &str, ReadContainer)] = &[
    ("container_memory_usage_bytes", "Memory in use, including the page cache", |s| {
        number(&s.memory?.usage_bytes)
    }),
    ("container_memory_rss", "Anonymous memory in use", |s| number(&s.memory?.rss_bytes)),
    ("container_memory_swap", "Swap in use", swap),
    ("container_fs_usage_bytes", "Space taken by the writable layer", |s| {
        number(&s.writable_layer.as_ref()?.used_bytes)
    }),
];

const INTERFACES: &[(&str, &str, ReadInterface)] = &[
    ("container_network_receive_bytes_total", "Bytes received", |i| &i.rx_bytes),
    ("container_network_receive_errors_total", "Errors while receiving", |i| &i.rx_errors),
    ("container_network_transmit_bytes_total", "Bytes sent", |i| &i.tx_bytes),
    ("container_network_transmit_errors_total", "Errors while sending", |i| &i.tx_errors),
];

fn cadvisor_text(pods: &Pods) -> String {
    let mut text = String::new();
    let out = &mut text;
    by_container(out, pods, CPU, true, |s| cpu_nanoseconds(s).map(seconds));
    by_container(out, pods, WORKING_SET, true, |s| working_set(s).map(|b| b as f64));
    for (name, help, read) in CONTAINERS {
        by_container(out, pods, (name, "gauge", help), true, |s| read(s).map(|v| v as f64));
    }
    let processes = ("container_processes", "gauge", "Processes of the pod");
    by_pod(
        out,
        pods,
        processes,
        |p| Some(number(&p.whole.as_ref()?.process.as_ref()?.process_count)? as f64),
    );
    for (name, help, read) in INTERFACES {
        let lines = pods.iter().flat_map(|(pod, figures)| {
            let network = figures.whole.as_ref().and_then(|w| w.network.as_ref());
            network.into_iter().flat_map(|n| &n.interfaces).filter_map(move |interface| {
                let labels = format!(
                    "interface=\"{}\",namespace=\"{}\",pod=\"{}\"",
                    // A pod with CAP_NET_ADMIN chooses it.
                    escaped(&interface.name),
                    pod.namespace,
                    pod.name
                );
                Some((labels, number(read(interface))? as f64))
            })
        });
        family(out, name, "counter", help, lines);
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = crate::node::meminfo_bytes(&meminfo, "MemTotal").map(|b| (String::new(), b as f64));
    family(out, "machine_memory_bytes", "gauge", "Memory of the machine", memory.into_iter());
    let cores = std::thread::available_parallelism().ok().map(|n| (String::new(), n.get() as f64));
    family(out, "machine_cpu_cores", "gauge", "Processors of the machine", cores.into_iter());
    text
}

pub(in crate::server) fn probes(context: &Context) -> Answer {
    let mut out = String::new();
    let counted = context.probes.counts.lines();
    let help = "Probes of a container by their result";
    family(&mut out, "prober_probe_total", "counter", help, counted.into_iter().map(|(l, n)| (l, n as f64)));
    exposition(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cri::v1::{ContainerAttributes, CpuUsage, LinuxPodSandboxStats, NetworkUsage};

    fn value(value: u64) -> Option<UInt64Value> {
        Some(UInt64Value { value })
    }

    fn figures() -> Pods {
        let stats = ContainerStats {
            attributes: Some(ContainerAttributes { id: "abc".into(), ..Default::default() }),
            cpu: Some(CpuUsage { usage_core_nano_seconds: value(1_500_000_000), ..Default::default() }),
            ..Default::default()
        };
        let eth0 = NetworkInterfaceUsage { name: "eth0".into(), tx_bytes: value(9), ..Default::default() };
        let odd =
            NetworkInterfaceUsage { name: "x\",pod=\"y".into(), tx_bytes: value(8), ..Default::default() };
        let network = Some(NetworkUsage { interfaces: vec![eth0, odd], ..Default::default() });
        let whole = Some(LinuxPodSandboxStats { network, ..Default::default() });
        let created = [("abc".to_owned(), 2_500_000_000)].into();
        let key = PodKey { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        Pods::from([(key, PodFigures { whole, containers: vec![("c".into(), stats)], created })])
    }

    #[test]
    fn families_of_resources() {
        let text = resource_text(&figures(), false);
        for line in [
            "container_cpu_usage_seconds_total{container=\"c\",namespace=\"n\",pod=\"p\"} 1.5\n",
            "pod_cpu_usage_seconds_total{namespace=\"n\",pod=\"p\"} 1.5\n",
            "# TYPE node_swap_usage_bytes gauge\n",
            "container_start_time_seconds{container=\"c\",namespace=\"n\",pod=\"p\"} 2.5\n",
            "scrape_error 0\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!text.contains("memory_working_set_bytes{"), "not measured, not said: {text}");
        let failed = resource_text(&Pods::new(), true);
        assert!(
            failed.contains("resource_scrape_error 1\n") && failed.contains("node_cpu_usage"),
            "{failed}"
        );
    }

    #[test]
    fn families_of_cadvisor() {
        let text = cadvisor_text(&figures());
        for line in [
            "container_cpu_usage_seconds_total{container=\"c\",name=\"abc\",namespace=\"n\",pod=\"p\"} 1.5\n",
            "container_network_transmit_bytes_total{interface=\"eth0\",namespace=\"n\",pod=\"p\"} 9\n",
            "container_network_transmit_bytes_total{interface=\"x\\\",pod=\\\"y\",namespace=\"n\",pod=\"p\"} 8\n",
            "# TYPE machine_memory_bytes gauge\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!text.contains("container_memory_rss"), "{text}");
    }
}
