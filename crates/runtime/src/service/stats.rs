//! Usage statistics of containers and pods.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferrite_cri::v1::*;
use ferrite_cri::{Error, Result};

use super::Inner;
use super::client::blocking;
use super::files;
use super::sandbox::host_network;
use super::state::{Container, LayerUsage, Sandbox, Status};
use crate::supervisor::sandbox::{IDENTITY, alive};
use crate::sys;
use ferrite_cgroup::Layout;
use ferrite_hostfs::Usage;

/// Age up to which a count of a writable layer is reused: walking the layer is the most expensive step
/// here.
const LAYER_AGE: Duration = Duration::from_secs(10);

fn value(value: u64) -> Option<UInt64Value> {
    Some(UInt64Value { value })
}

fn cpu(cgroups: &Layout, group: &str, timestamp: i64) -> Option<CpuUsage> {
    cgroups.cpu(group).map(|cpu| CpuUsage {
        timestamp,
        usage_core_nano_seconds: value(cpu.usage_nanoseconds),
        ..Default::default()
    })
}

fn memory(cgroups: &Layout, group: &str, timestamp: i64) -> Option<MemoryUsage> {
    cgroups.memory(group).map(|memory| MemoryUsage {
        timestamp,
        working_set_bytes: value(memory.working_set),
        available_bytes: memory.limit.and_then(|limit| value(limit.saturating_sub(memory.working_set))),
        usage_bytes: value(memory.usage),
        rss_bytes: value(memory.rss),
        page_faults: value(memory.page_faults),
        major_page_faults: value(memory.major_page_faults),
        psi: None,
    })
}

/// Measures a container. The files that it shares with its pod are its own as well as the others': each of them can make
/// them large.
fn measure(cgroups: &Layout, container: &Arc<Container>, sandbox: Option<&Sandbox>) -> ContainerStats {
    let timestamp = sys::now();
    let group = container.record().cgroup;
    let layer = layer_usage(container);
    let shared = sandbox.map_or(0, |sandbox| files::space(&sandbox.state_dir));
    ContainerStats {
        attributes: Some(ContainerAttributes {
            id: container.id.clone(),
            metadata: container.config.metadata.clone(),
            labels: container.config.labels.clone(),
            annotations: container.config.annotations.clone(),
        }),
        cpu: cpu(cgroups, &group, timestamp),
        memory: memory(cgroups, &group, timestamp),
        writable_layer: Some(FilesystemUsage {
            timestamp,
            fs_id: Some(FilesystemIdentifier { mountpoint: container.bundle.display().to_string() }),
            used_bytes: value(layer.bytes.saturating_add(shared)),
            inodes_used: value(layer.inodes),
        }),
        swap: cgroups.swap(&group).map(|swap| SwapUsage {
            timestamp,
            swap_usage_bytes: value(swap.usage),
            swap_available_bytes: swap.limit.and_then(|limit| value(limit.saturating_sub(swap.usage))),
        }),
        io: None,
    }
}

/// Most files of a writable layer that are counted: a figure must not cost minutes.
const MAX_COUNTED: u64 = 16 << 20;
/// Files that are counted while somebody waits. More are counted beside: a container with very many files would hold up
/// the figures of all others, and evictions.
const COUNTED_AT_ONCE: u64 = 20_000;

/// The way in which a layer's usage is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Count {
    /// The last count is recent.
    Recent,
    /// The layer had few files, or was never counted.
    AtOnce,
    /// It has many.
    Beside,
}

fn how_to_count(last: Option<(Duration, u64)>) -> Count {
    match last {
        Some((age, _)) if age < LAYER_AGE => Count::Recent,
        Some((_, inodes)) if inodes >= COUNTED_AT_ONCE => Count::Beside,
        _ => Count::AtOnce,
    }
}

/// Counts the files of a layer. Unreadable files count as nothing; a file with several names counts once per name.
fn count(container: &Container, limit: u64) -> LayerUsage {
    let counted = ferrite_hostfs::usage(&container.bundle.join("upper"), limit);
    let counted = counted.unwrap_or(Usage { is_whole: true, ..Usage::default() });
    let usage =
        LayerUsage { at: Instant::now(), bytes: counted.bytes, inodes: files_counted(&counted, limit) };
    container.note_layer_usage(usage);
    usage
}

/// The number of files to show. A container that moves directories uses up the limit with few files: a count that ended early
/// shows the limit at least, so that more are counted beside, and kubelets know.
fn files_counted(counted: &Usage, limit: u64) -> u64 {
    if counted.is_whole { counted.inodes } else { counted.inodes.max(limit) }
}

/// Disk usage of the container's writable layer, counted anew when the last count is old. The figures of a layer with
/// many files are those of the last count, as other runtimes have them, until the next one has ended.
fn layer_usage(container: &Arc<Container>) -> LayerUsage {
    let last = container.layer_usage();
    let known = match (how_to_count(last.map(|last| (last.at.elapsed(), last.inodes))), last) {
        (Count::Recent, Some(last)) => return last,
        (Count::Beside, Some(last)) => last,
        _ => count(container, COUNTED_AT_ONCE),
    };
    if known.inodes >= COUNTED_AT_ONCE && !container.counting.swap(true, Ordering::AcqRel) {
        let container = container.clone();
        tokio::task::spawn_blocking(move || {
            count(&container, MAX_COUNTED);
            container.counting.store(false, Ordering::Release);
        });
    }
    known
}

/// The interfaces of `/proc/<pid>/net/dev` but loopback.
fn interfaces(text: &str) -> Vec<NetworkInterfaceUsage> {
    let parse = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let numbers: Vec<u64> = numbers.split_whitespace().map_while(|n| n.parse().ok()).collect();
        let at = |index: usize| numbers.get(index).copied().and_then(value);
        Some(NetworkInterfaceUsage {
            name: name.trim().to_owned(),
            rx_bytes: at(0),
            rx_errors: at(2),
            tx_bytes: at(8),
            tx_errors: at(10),
        })
    };
    text.lines().filter_map(parse).filter(|interface| interface.name != "lo").collect()
}

/// Traffic of the pod's interfaces; `None` for a pod on the node's network.
fn network(sandbox: &Sandbox, timestamp: i64) -> Option<NetworkUsage> {
    if host_network(&sandbox.config) {
        return None;
    }
    let identity = std::fs::read_to_string(sandbox.run_dir.join(IDENTITY)).ok()?;
    let text = std::fs::read_to_string(format!("/proc/{}/net/dev", alive(&identity)?)).ok()?;
    let interfaces = interfaces(&text);
    Some(NetworkUsage { timestamp, default_interface: interfaces.first().cloned(), interfaces })
}

/// A figure of a pod's interface.
struct InterfaceFigure {
    name: &'static str,
    help: &'static str,
    read: fn(&NetworkInterfaceUsage) -> Option<UInt64Value>,
}

const INTERFACE_FIGURES: &[InterfaceFigure] = &[
    InterfaceFigure {
        name: "container_network_receive_bytes_total",
        help: "Bytes received by an interface of the pod",
        read: |interface| interface.rx_bytes,
    },
    InterfaceFigure {
        name: "container_network_receive_errors_total",
        help: "Errors while receiving on an interface of the pod",
        read: |interface| interface.rx_errors,
    },
    InterfaceFigure {
        name: "container_network_transmit_bytes_total",
        help: "Bytes sent by an interface of the pod",
        read: |interface| interface.tx_bytes,
    },
    InterfaceFigure {
        name: "container_network_transmit_errors_total",
        help: "Errors while sending on an interface of the pod",
        read: |interface| interface.tx_errors,
    },
];

/// The label of a pod's own metrics, and of its containers'.
const INTERFACE: &str = "interface";
const CONTAINER: &str = "container";
const PROCESSES: &str = "container_processes";

/// The metrics of a pod as a whole.
fn pod_figures(linux: &LinuxPodSandboxStats) -> Vec<Metric> {
    let metric = |name: &str, kind: MetricType, labels: Vec<String>, value| Metric {
        name: name.to_owned(),
        timestamp: sys::now(),
        metric_type: kind.into(),
        label_values: labels,
        value,
    };
    let interfaces = linux.network.iter().flat_map(|network| &network.interfaces);
    let mut metrics: Vec<Metric> = interfaces
        .flat_map(|interface| {
            INTERFACE_FIGURES.iter().filter_map(move |figure| {
                let value = (figure.read)(interface)?;
                Some(metric(figure.name, MetricType::Counter, vec![interface.name.clone()], Some(value)))
            })
        })
        .collect();
    if let Some(count) = linux.process.and_then(|process| process.process_count) {
        metrics.push(metric(PROCESSES, MetricType::Gauge, Vec::new(), Some(count)));
    }
    metrics
}

/// A figure of [`Inner::list_metrics`]: its name and its source.
struct Figure {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    read: fn(&ContainerStats) -> Option<u64>,
}

const FIGURES: &[Figure] = &[
    Figure {
        name: "container_cpu_usage_nanoseconds_total",
        help: "CPU time used, in nanoseconds",
        kind: MetricType::Counter,
        read: |stats| Some(stats.cpu?.usage_core_nano_seconds?.value),
    },
    Figure {
        name: "container_memory_usage_bytes",
        help: "Memory in use, including the page cache",
        kind: MetricType::Gauge,
        read: |stats| Some(stats.memory?.usage_bytes?.value),
    },
    Figure {
        name: "container_memory_working_set_bytes",
        help: "Memory in use that cannot be given back easily",
        kind: MetricType::Gauge,
        read: |stats| Some(stats.memory?.working_set_bytes?.value),
    },
    Figure {
        name: "container_memory_rss",
        help: "Anonymous memory in use",
        kind: MetricType::Gauge,
        read: |stats| Some(stats.memory?.rss_bytes?.value),
    },
    Figure {
        name: "container_memory_swap",
        help: "Swap in use",
        kind: MetricType::Gauge,
        read: |stats| Some(stats.swap?.swap_usage_bytes?.value),
    },
    Figure {
        name: "container_fs_usage_bytes",
        help: "Space taken by the container's writable layer",
        kind: MetricType::Gauge,
        read: |stats| Some(stats.writable_layer.as_ref()?.used_bytes?.value),
    },
];

fn figures(stats: &ContainerStats) -> Vec<Metric> {
    let name = stats.attributes.as_ref().and_then(|a| a.metadata.as_ref()).map(|m| m.name.clone());
    FIGURES
        .iter()
        .filter_map(|figure| {
            Some(Metric {
                name: figure.name.to_owned(),
                timestamp: sys::now(),
                metric_type: figure.kind.into(),
                label_values: vec![name.clone().unwrap_or_default()],
                value: value((figure.read)(stats)?),
            })
        })
        .collect()
}

impl Inner {
    async fn measure_all(&self, containers: Vec<Arc<Container>>) -> Result<Vec<ContainerStats>> {
        let cgroups = self.cgroups.clone();
        let sandboxes: Vec<_> = containers.iter().map(|c| self.index.sandbox(&c.sandbox).ok()).collect();
        let all = move || {
            let pairs = containers.iter().zip(&sandboxes);
            Ok(pairs.map(|(container, sandbox)| measure(&cgroups, container, sandbox.as_deref())).collect())
        };
        blocking(all).await.map_err(|error| Error::internal(format!("read statistics: {error}")))
    }

    /// Disk usage of all writable layers together.
    pub(super) async fn layers_usage(&self) -> Result<FilesystemUsage> {
        let containers: Vec<_> = self.index.read().containers.values().cloned().collect();
        let mountpoint = self.config.root.display().to_string();
        let count = move || {
            let layers = containers.iter().map(layer_usage);
            let (bytes, inodes) = layers.fold((0, 0), |(b, i), layer| (b + layer.bytes, i + layer.inodes));
            Ok(FilesystemUsage {
                timestamp: sys::now(),
                fs_id: Some(FilesystemIdentifier { mountpoint }),
                used_bytes: value(bytes),
                inodes_used: value(inodes),
            })
        };
        blocking(count).await.map_err(|error| Error::internal(format!("read statistics: {error}")))
    }

    pub(super) async fn container_stats(&self, id: &str) -> Result<ContainerStatsResponse> {
        let container = self.index.container(id)?;
        Ok(ContainerStatsResponse { stats: self.measure_all(vec![container]).await?.pop() })
    }

    pub(super) async fn list_container_stats(
        &self,
        filter: &ContainerStatsFilter,
    ) -> Result<ListContainerStatsResponse> {
        let containers: Vec<_> = self
            .index
            .read()
            .containers
            .values()
            .filter(|c| matches!(c.status(), Status::Running { .. }))
            .filter(|c| filter.id.is_empty() || c.id.starts_with(&filter.id))
            .filter(|c| filter.pod_sandbox_id.is_empty() || c.sandbox.starts_with(&filter.pod_sandbox_id))
            .filter(|c| filter.label_selector.iter().all(|(k, v)| c.config.labels.get(k) == Some(v)))
            .cloned()
            .collect();
        Ok(ListContainerStatsResponse { stats: self.measure_all(containers).await? })
    }

    async fn measure_sandbox(&self, sandbox: Arc<Sandbox>) -> Result<PodSandboxStats> {
        let running = |c: &Arc<Container>| matches!(c.status(), Status::Running { .. });
        let containers = self.index.containers_of(&sandbox.id).into_iter().filter(running).collect();
        let containers = self.measure_all(containers).await?;
        let (cgroups, group) = (self.cgroups.clone(), sandbox.cgroup_parent(&self.config.cgroup_parent));
        blocking(move || {
            let timestamp = sys::now();
            let linux = LinuxPodSandboxStats {
                cpu: cpu(&cgroups, &group, timestamp),
                memory: memory(&cgroups, &group, timestamp),
                network: network(&sandbox, timestamp),
                process: Some(ProcessUsage {
                    timestamp,
                    process_count: value(cgroups.processes(&group).len() as u64),
                }),
                containers,
                io: None,
            };
            Ok(PodSandboxStats {
                attributes: Some(PodSandboxAttributes {
                    id: sandbox.id.clone(),
                    metadata: sandbox.config.metadata.clone(),
                    labels: sandbox.config.labels.clone(),
                    annotations: sandbox.config.annotations.clone(),
                }),
                linux: Some(linux),
                windows: None,
            })
        })
        .await
        .map_err(|error| Error::internal(format!("read statistics: {error}")))
    }

    pub(super) async fn sandbox_stats(&self, id: &str) -> Result<PodSandboxStatsResponse> {
        let sandbox = self.index.sandbox(id)?;
        Ok(PodSandboxStatsResponse { stats: Some(self.measure_sandbox(sandbox).await?) })
    }

    pub(super) async fn list_sandbox_stats(
        &self,
        filter: &PodSandboxStatsFilter,
    ) -> Result<ListPodSandboxStatsResponse> {
        let sandboxes: Vec<_> = self
            .index
            .read()
            .sandboxes
            .values()
            .filter(|s| s.record().ready)
            .filter(|s| filter.id.is_empty() || s.id.starts_with(&filter.id))
            .filter(|s| filter.label_selector.iter().all(|(k, v)| s.config.labels.get(k) == Some(v)))
            .cloned()
            .collect();
        let mut stats = Vec::with_capacity(sandboxes.len());
        for sandbox in sandboxes {
            stats.push(self.measure_sandbox(sandbox).await?);
        }
        Ok(ListPodSandboxStatsResponse { stats })
    }

    pub(super) fn metric_descriptors() -> ListMetricDescriptorsResponse {
        let describe = |name: &str, help: &str, labels: &[&str]| MetricDescriptor {
            name: name.to_owned(),
            help: help.to_owned(),
            label_keys: labels.iter().map(|label| (*label).to_owned()).collect(),
        };
        let containers = FIGURES.iter().map(|f| describe(f.name, f.help, &[CONTAINER]));
        let interfaces = INTERFACE_FIGURES.iter().map(|f| describe(f.name, f.help, &[INTERFACE]));
        let processes = describe(PROCESSES, "Processes of the pod", &[]);
        let descriptors = containers.chain(interfaces).chain([processes]).collect();
        ListMetricDescriptorsResponse { descriptors }
    }

    pub(super) async fn list_metrics(&self) -> Result<ListPodSandboxMetricsResponse> {
        let stats = self.list_sandbox_stats(&PodSandboxStatsFilter::default()).await?.stats;
        let id_of = |stats: &ContainerStats| stats.attributes.as_ref().map(|a| a.id.clone());
        let pod_metrics = stats.into_iter().map(|pod| PodSandboxMetrics {
            pod_sandbox_id: pod.attributes.map(|attributes| attributes.id).unwrap_or_default(),
            metrics: pod.linux.as_ref().map(pod_figures).unwrap_or_default(),
            container_metrics: pod
                .linux
                .unwrap_or_default()
                .containers
                .iter()
                .map(|container| ContainerMetrics {
                    container_id: id_of(container).unwrap_or_default(),
                    metrics: figures(container),
                })
                .collect(),
        });
        Ok(ListPodSandboxMetricsResponse { pod_metrics: pod_metrics.collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_ended_early_is_known_by_its_files() {
        for (inodes, is_whole, expected) in [(5, true, 5), (5, false, 20), (20, false, 20), (25, true, 25)] {
            let counted = Usage { inodes, is_whole, ..Usage::default() };
            assert_eq!(files_counted(&counted, 20), expected, "{counted:?}");
        }
    }

    #[test]
    fn nobody_waits_for_many_files() {
        let (young, old) = (Duration::from_secs(1), LAYER_AGE);
        for (last, expected) in [
            (None, Count::AtOnce),
            (Some((young, 5)), Count::Recent),
            (Some((young, COUNTED_AT_ONCE)), Count::Recent),
            (Some((old, 5)), Count::AtOnce),
            (Some((old, COUNTED_AT_ONCE)), Count::Beside),
            (Some((old, MAX_COUNTED)), Count::Beside),
        ] {
            assert_eq!(how_to_count(last), expected, "{last:?}");
        }
    }

    #[test]
    fn interface_counters() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop\n    \
            lo:     100       1    0    0    0     0          0         0      100       1    0    0\n  \
            eth0: 1234      10    2    0    0     0          0         0     5678      20    3    0\n";
        let found = interfaces(text);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "eth0");
        let numbers = [found[0].rx_bytes, found[0].rx_errors, found[0].tx_bytes, found[0].tx_errors];
        assert_eq!(numbers.map(|n| n.unwrap().value), [1234, 2, 5678, 3]);
        assert!(interfaces("garbage\n:::\n").iter().all(|i| i.rx_bytes.is_none()));
    }

    #[test]
    fn metrics_of_a_pod_are_described() {
        let interfaces = interfaces("eth0: 1234 10 2 0 0 0 0 0 5678 20 3 0\nnet1: 1 1 0 0 0 0 0 0 2 1 0 0\n");
        let linux = LinuxPodSandboxStats {
            network: Some(NetworkUsage { interfaces, ..Default::default() }),
            process: Some(ProcessUsage { timestamp: 0, process_count: value(7) }),
            ..Default::default()
        };
        let metrics = pod_figures(&linux);
        assert_eq!(metrics.len(), 2 * INTERFACE_FIGURES.len() + 1);
        let described = Inner::metric_descriptors().descriptors;
        for metric in &metrics {
            let descriptor = described.iter().find(|d| d.name == metric.name).expect("a descriptor");
            assert_eq!(descriptor.label_keys.len(), metric.label_values.len(), "{}", metric.name);
        }
        let received = metrics.iter().find(|m| m.name == "container_network_receive_bytes_total").unwrap();
        assert_eq!((received.label_values[0].as_str(), received.value.unwrap().value), ("eth0", 1234));
    }
}
