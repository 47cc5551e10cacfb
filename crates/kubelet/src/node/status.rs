//! The Node's status: a pure function of the machine and of the runtime's reports.

use super::features::RuntimeFeatures;
use super::machine::Machine;
use crate::config::Config;
use crate::container::fields::NodeLimits;
use ferrite_api::version::KUBERNETES_VERSION;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeStatus,
    NodeSystemInfo,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::collections::BTreeMap;

const MAX_NAMES_PER_IMAGE: usize = 5;

/// Features that pods may depend on, in order: the scheduler keeps such pods from older nodes.
const DECLARED_FEATURES: &[&str] = &[
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];

/// The part of this machine that pods may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocatable {
    pub cpu_milli: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
}

impl Allocatable {
    pub(crate) fn of(machine: &Machine, config: &Config) -> Self {
        let hugepages: i64 = machine.hugepages.iter().map(|(_, bytes)| bytes).sum();
        let memory = machine.memory - config.reserved_memory - config.eviction_memory - hugepages;
        Self {
            cpu_milli: (machine.cpus * 1000 - config.reserved_cpu_milli).max(0),
            memory: memory.max(0),
            // A tenth stays free: the default threshold below which pods are evicted.
            ephemeral_storage: match config.local_storage_isolation {
                true => (machine.ephemeral_storage / 10 * 9 - config.reserved_ephemeral_storage).max(0),
                // Nothing is counted, and nothing refused.
                false => i64::MAX,
            },
        }
    }

    pub(crate) fn limits(&self) -> NodeLimits {
        NodeLimits {
            cpu_milli: self.cpu_milli,
            memory: self.memory,
            ephemeral_storage: self.ephemeral_storage,
        }
    }
}

/// The observations since the last report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// Why the node cannot run pods; nothing when it can.
    pub problem: Option<String>,
    pub memory_pressure: bool,
    pub disk_pressure: bool,
    pub pid_pressure: bool,
    /// Capacity and allocatable amount of the resources of device plugins.
    pub devices: BTreeMap<String, (usize, usize)>,
    pub runtime_version: String,
    pub features: RuntimeFeatures,
    pub images: Vec<(Vec<String>, i64)>,
}

pub(crate) fn node_status(
    config: &Config,
    machine: &Machine,
    observed: &Observed,
    before: &NodeStatus,
    port: u16,
    now: Timestamp,
) -> NodeStatus {
    let quantity = |text: String| Quantity(text);
    let allocatable = Allocatable::of(machine, config);
    let mut capacity = BTreeMap::from([
        ("cpu".to_string(), quantity(machine.cpus.to_string())),
        ("memory".to_string(), quantity(format!("{}Ki", machine.memory / 1024))),
        ("ephemeral-storage".to_string(), quantity(format!("{}Ki", machine.ephemeral_storage / 1024))),
        ("pods".to_string(), quantity(config.max_pods.to_string())),
    ]);
    let mut usable = BTreeMap::from([
        ("cpu".to_string(), quantity(cpu(allocatable.cpu_milli))),
        ("memory".to_string(), quantity(format!("{}Ki", allocatable.memory / 1024))),
        ("ephemeral-storage".to_string(), quantity(allocatable.ephemeral_storage.to_string())),
        ("pods".to_string(), quantity(config.max_pods.to_string())),
    ]);
    if !config.local_storage_isolation {
        capacity.remove("ephemeral-storage");
        usable.remove("ephemeral-storage");
    }
    for (size, bytes) in &machine.hugepages {
        let amount = if bytes % (1 << 20) == 0 && *bytes > 0 {
            format!("{}Mi", bytes >> 20)
        } else {
            bytes.to_string()
        };
        capacity.insert(format!("hugepages-{size}"), quantity(amount.clone()));
        usable.insert(format!("hugepages-{size}"), quantity(amount));
    }
    for (name, (all, healthy)) in &observed.devices {
        capacity.insert(name.clone(), quantity(all.to_string()));
        usable.insert(name.clone(), quantity(healthy.to_string()));
    }
    // Entries that others (administrators, plugins that are gone) added stay.
    for (name, amount) in before.capacity.iter().flatten() {
        capacity.entry(name.clone()).or_insert_with(|| amount.clone());
    }
    for (name, amount) in before.allocatable.iter().flatten() {
        usable.entry(name.clone()).or_insert_with(|| amount.clone());
    }
    let (features, runtime_handlers) = observed.features.shown();
    NodeStatus {
        features,
        runtime_handlers,
        addresses: Some(addresses(config, before)),
        capacity: Some(capacity),
        allocatable: Some(usable),
        conditions: Some(conditions(observed, before, now)),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: i32::from(port) }),
        }),
        node_info: Some(NodeSystemInfo {
            architecture: machine.architecture.into(),
            boot_id: machine.boot_id.clone(),
            container_runtime_version: observed.runtime_version.clone(),
            kernel_version: machine.kernel_version.clone(),
            kube_proxy_version: String::new(),
            kubelet_version: KUBERNETES_VERSION.into(),
            machine_id: machine.machine_id.clone(),
            operating_system: "linux".into(),
            os_image: machine.os_image.clone(),
            system_uuid: machine.system_uuid.clone(),
            swap: (machine.swap > 0)
                .then_some(k8s_openapi::api::core::v1::NodeSwapStatus { capacity: Some(machine.swap) }),
        }),
        declared_features: Some(DECLARED_FEATURES.iter().map(|name| (*name).to_owned()).collect()),
        images: Some(images(&observed.images, config.node_status_max_images)),
        ..before.clone()
    }
}

fn cpu(milli: i64) -> String {
    if milli % 1000 == 0 { (milli / 1000).to_string() } else { format!("{milli}m") }
}

/// The largest first.
fn images(found: &[(Vec<String>, i64)], most: Option<usize>) -> Vec<ContainerImage> {
    let mut images: Vec<ContainerImage> = found
        .iter()
        .map(|(names, size)| ContainerImage {
            names: Some(names.iter().take(MAX_NAMES_PER_IMAGE).cloned().collect()),
            size_bytes: Some(*size),
        })
        .collect();
    images.sort_by_key(|i| std::cmp::Reverse((i.size_bytes, i.names.clone())));
    images.truncate(most.unwrap_or(usize::MAX));
    images
}

fn conditions(observed: &Observed, before: &NodeStatus, now: Timestamp) -> Vec<NodeCondition> {
    let pressure = |present: bool, type_: &str, yes: (&str, &str), no: (&str, &str)| {
        let (status, (reason, message)) = if present { ("True", yes) } else { ("False", no) };
        (type_.to_string(), status, reason.to_string(), message.to_string())
    };
    let wanted = [
        pressure(
            observed.memory_pressure,
            "MemoryPressure",
            ("KubeletHasInsufficientMemory", "kubelet has insufficient memory available"),
            ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        ),
        pressure(
            observed.disk_pressure,
            "DiskPressure",
            ("KubeletHasDiskPressure", "kubelet has disk pressure"),
            ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        ),
        pressure(
            observed.pid_pressure,
            "PIDPressure",
            ("KubeletHasInsufficientPID", "kubelet has insufficient PID available"),
            ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        ),
        match &observed.problem {
            None => ("Ready".into(), "True", "KubeletReady".into(), "kubelet is posting ready status".into()),
            Some(problem) => ("Ready".into(), "False", "KubeletNotReady".into(), problem.clone()),
        },
    ];
    let old = before.conditions.as_deref().unwrap_or_default();
    let mut conditions: Vec<NodeCondition> = wanted
        .into_iter()
        .map(|(type_, status, reason, message)| {
            let known = old.iter().find(|c| c.type_ == type_ && c.status == status);
            NodeCondition {
                last_heartbeat_time: Some(Time(now)),
                last_transition_time: known.and_then(|c| c.last_transition_time.clone()).or(Some(Time(now))),
                message: Some(message),
                reason: Some(reason),
                status: status.into(),
                type_,
            }
        })
        .collect();
    let foreign = old.iter().filter(|c| conditions.iter().all(|own| own.type_ != c.type_)).cloned();
    let foreign: Vec<NodeCondition> = foreign.collect();
    conditions.extend(foreign);
    conditions
}

/// The node's addresses, the primary family's first, and its name. As upstream, those of a cloud provider stay.
fn addresses(config: &Config, before: &NodeStatus) -> Vec<NodeAddress> {
    if let (Some(_), Some(given)) =
        (&config.cloud_provider, before.addresses.as_ref().filter(|a| !a.is_empty()))
    {
        return given.clone();
    }
    let is_known = config.cloud_provider.as_ref().is_none_or(|provider| !provider.without_address);
    let internal = config.node_ips.iter().filter(|_| is_known);
    let internal = internal.map(|ip| NodeAddress { type_: "InternalIP".into(), address: ip.to_string() });
    let name = NodeAddress { type_: "Hostname".into(), address: config.node_name.clone() };
    internal.chain([name]).collect()
}

/// Equal but for the times of heartbeats, which alone are not worth a write.
pub(crate) fn same_but_heartbeat(a: &NodeStatus, b: &NodeStatus) -> bool {
    let still = |status: &NodeStatus| {
        let mut status = status.clone();
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_heartbeat_time = None;
        }
        ferrite_json::to_value(status).ok()
    };
    still(a) == still(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ExternalCloudProvider;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    fn machine() -> Machine {
        Machine {
            cpus: 4,
            memory: 8 << 30,
            ephemeral_storage: 100 << 30,
            architecture: "amd64",
            ..Machine::default()
        }
    }

    #[test]
    fn status_of_a_healthy_node_and_what_changes_it() {
        let mut config = Config::new("n", "192.0.2.1".parse().unwrap());
        config.reserved_cpu_milli = 500;
        let first =
            node_status(&config, &machine(), &Observed::default(), &NodeStatus::default(), 10250, at(0));
        assert_eq!(first.capacity.as_ref().unwrap()["memory"].0, "8388608Ki");
        assert_eq!(first.allocatable.as_ref().unwrap()["cpu"].0, "3500m");
        assert_eq!(first.allocatable.as_ref().unwrap()["memory"].0, format!("{}Ki", (8 << 20) - (100 << 10)));
        let ready = |s: &NodeStatus| {
            s.conditions.as_ref().unwrap().iter().find(|c| c.type_ == "Ready").unwrap().clone()
        };
        assert_eq!(ready(&first).reason.as_deref(), Some("KubeletReady"));

        let later = node_status(&config, &machine(), &Observed::default(), &first, 10250, at(60));
        assert!(same_but_heartbeat(&first, &later));
        assert_eq!(ready(&later).last_transition_time, ready(&first).last_transition_time);

        let broken = Observed { problem: Some("container runtime is down".into()), ..Observed::default() };
        let down = node_status(&config, &machine(), &broken, &later, 10250, at(90));
        assert!(!same_but_heartbeat(&later, &down));
        assert_eq!(
            (ready(&down).status.as_str(), ready(&down).reason.as_deref()),
            ("False", Some("KubeletNotReady"))
        );
        assert_eq!(ready(&down).last_transition_time, Some(Time(at(90))));
    }

    #[test]
    fn addresses_of_a_cloud_provider_stay() {
        let config =
            |provider| Config { cloud_provider: provider, ..Config::new("n", "192.0.2.1".parse().unwrap()) };
        let provider =
            |without_address| Some(ExternalCloudProvider { provided: Vec::new(), without_address });
        let external = NodeAddress { type_: "ExternalIP".into(), address: "198.51.100.1".into() };
        let theirs = NodeStatus { addresses: Some(vec![external]), ..NodeStatus::default() };
        for (config, before, expected) in [
            (config(None), &theirs, "192.0.2.1 n"),
            (config(provider(false)), &NodeStatus::default(), "192.0.2.1 n"),
            (config(provider(true)), &NodeStatus::default(), "n"),
            (config(provider(true)), &theirs, "198.51.100.1"),
        ] {
            let shown: Vec<String> = addresses(&config, before).into_iter().map(|a| a.address).collect();
            assert_eq!(shown.join(" "), expected);
        }
    }

    #[test]
    fn local_storage_that_is_not_counted_is_not_offered() {
        let mut config = Config::new("n", "192.0.2.1".parse().unwrap());
        config.reserved_ephemeral_storage = 1 << 30;
        let status = |config: &Config| {
            node_status(config, &machine(), &Observed::default(), &NodeStatus::default(), 1, at(0))
        };
        let offered = status(&config).allocatable.unwrap()["ephemeral-storage"].0.clone();
        assert_eq!(offered, (100i64 * (1 << 30) / 10 * 9 - (1 << 30)).to_string());
        config.local_storage_isolation = false;
        assert!(!status(&config).allocatable.unwrap().contains_key("ephemeral-storage"));
        assert!(!status(&config).capacity.unwrap().contains_key("ephemeral-storage"));
    }

    #[test]
    fn the_largest_images_are_named() {
        let found: Vec<(Vec<String>, i64)> = (0..60).map(|n| (vec![format!("i{n}")], n)).collect();
        for (most, count) in [(Some(50), 50), (Some(0), 0), (None, 60)] {
            let shown = images(&found, most);
            assert_eq!(shown.len(), count);
            assert!(shown.first().is_none_or(|image| image.size_bytes == Some(59)));
        }
    }

    #[test]
    fn conditions_of_others_stay() {
        let config = Config::new("n", "192.0.2.1".parse().unwrap());
        let before = NodeStatus {
            conditions: Some(vec![NodeCondition {
                type_: "NetworkUnavailable".into(),
                status: "False".into(),
                ..NodeCondition::default()
            }]),
            ..NodeStatus::default()
        };
        let status = node_status(&config, &machine(), &Observed::default(), &before, 1, at(0));
        assert!(status.conditions.unwrap().iter().any(|c| c.type_ == "NetworkUnavailable"));
    }
}
