//! `/stats/summary`.

use super::node::{self, FileSystem};
use super::{PodFigures, PodKey, Pods, number, pods};
use crate::pod::context::Context;
use crate::pod::model::{self, PodId};
use crate::server::{Answer, json, text};
use crate::volumes::stats::{MeasuredVolume, VolumeFigures};
use ferrite_cri::v1::{ContainerStats, CpuUsage, MemoryUsage, NetworkInterfaceUsage};
use ferrite_json::{Value, json};
use hyper::StatusCode;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most files counted for one figure: it must not cost minutes.
const MAX_COUNTED: u64 = 1 << 20;

fn stamp(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn time(nanos: i64) -> String {
    stamp(crate::clock::from_nanos(nanos).unwrap_or_else(Timestamp::now))
}

fn cpu_json(cpu: &CpuUsage) -> Value {
    json!({
        "time": time(cpu.timestamp),
        "usageNanoCores": number(&cpu.usage_nano_cores),
        "usageCoreNanoSeconds": number(&cpu.usage_core_nano_seconds),
    })
}

fn memory_json(memory: &MemoryUsage) -> Value {
    json!({
        "time": time(memory.timestamp),
        "availableBytes": number(&memory.available_bytes),
        "usageBytes": number(&memory.usage_bytes),
        "workingSetBytes": number(&memory.working_set_bytes),
        "rssBytes": number(&memory.rss_bytes),
        "pageFaults": number(&memory.page_faults),
        "majorPageFaults": number(&memory.major_page_faults),
    })
}

/// Space used by something on a file system.
fn fs_json(now: &str, on: Option<FileSystem>, used: Option<u64>, inodes_used: Option<u64>) -> Value {
    json!({
        "time": now,
        "availableBytes": on.map(|f| f.available),
        "capacityBytes": on.map(|f| f.capacity),
        "usedBytes": used,
        "inodesFree": on.map(|f| f.inodes_free),
        "inodes": on.map(|f| f.inodes),
        "inodesUsed": inodes_used,
    })
}

fn volume_json(volume: &MeasuredVolume, namespace: &str) -> Value {
    let VolumeFigures { available, capacity, used, inodes, inodes_free, inodes_used } = volume.figures;
    json!({
        "time": stamp(volume.at),
        "availableBytes": available,
        "capacityBytes": capacity,
        "usedBytes": used,
        "inodesFree": inodes_free,
        "inodes": inodes,
        "inodesUsed": inodes_used,
        "name": volume.name,
        "pvcRef": volume.claim.as_ref().map(|name| json!({"name": name, "namespace": namespace})),
    })
}

fn interface_json(interface: &NetworkInterfaceUsage) -> Value {
    json!({
        "name": interface.name,
        "rxBytes": number(&interface.rx_bytes),
        "rxErrors": number(&interface.rx_errors),
        "txBytes": number(&interface.tx_bytes),
        "txErrors": number(&interface.tx_errors),
    })
}

/// Nothing that is not known is said: a null is not a figure.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.into_iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k, without_nulls(v)));
            Value::Object(kept.collect())
        }
        Value::Array(list) => Value::Array(list.into_iter().map(without_nulls).collect()),
        other => other,
    }
}

/// The directories and facts of pods: all that counting needs.
struct Places {
    kubelet: PathBuf,
    logs: PathBuf,
    pods: Vec<Arc<Pod>>,
    /// By UID of the pod.
    volumes: BTreeMap<String, Vec<MeasuredVolume>>,
}

struct Space {
    bytes: u64,
    inodes: u64,
}

fn used(path: &Path) -> Space {
    let counted = ferrite_hostfs::usage(path, MAX_COUNTED).unwrap_or_default();
    Space { bytes: counted.bytes, inodes: counted.inodes }
}

impl Places {
    fn container(
        &self,
        key: &PodKey,
        pod: Option<&Pod>,
        name: &str,
        stats: &ContainerStats,
    ) -> (Value, Space) {
        let now = time(0);
        let layer = stats.writable_layer.clone().unwrap_or_default();
        let on = layer.fs_id.as_ref().and_then(|id| node::file_system(Path::new(&id.mountpoint)));
        let id = PodId { namespace: key.namespace.clone(), name: key.name.clone(), uid: key.uid.clone() };
        let logs = used(&self.logs.join(id.log_directory()).join(name));
        let started = pod
            .and_then(|pod| pod.status.as_ref())
            .into_iter()
            .flat_map(|s| {
                s.container_statuses.iter().flatten().chain(s.init_container_statuses.iter().flatten())
            })
            .find(|s| s.name == name)
            .and_then(|s| s.state.as_ref()?.running.as_ref()?.started_at.clone());
        let swap = stats.swap.map(|swap| {
            json!({
                "time": time(swap.timestamp),
                "swapAvailableBytes": number(&swap.swap_available_bytes),
                "swapUsageBytes": number(&swap.swap_usage_bytes),
            })
        });
        let (bytes, inodes) = (number(&layer.used_bytes), number(&layer.inodes_used));
        let shown = json!({
            "name": name,
            "startTime": started.map(|t| stamp(t.0)),
            "cpu": stats.cpu.as_ref().map(cpu_json),
            "memory": stats.memory.as_ref().map(memory_json),
            "rootfs": fs_json(&now, on, bytes, inodes),
            "logs": fs_json(&now, node::file_system(&self.logs), Some(logs.bytes), Some(logs.inodes)),
            "swap": swap,
        });
        let space =
            Space { bytes: bytes.unwrap_or(0) + logs.bytes, inodes: inodes.unwrap_or(0) + logs.inodes };
        (shown, space)
    }

    /// The emptyDir volumes on disk.
    fn empty_dirs(&self, pod: &Pod) -> Vec<Space> {
        let uid = PodId::of(pod).uid;
        let below = self.kubelet.join("pods").join(uid).join("volumes/kubernetes.io~empty-dir");
        let volumes = model::spec(pod).volumes.iter().flatten();
        volumes
            .filter(|v| v.empty_dir.as_ref().is_some_and(|e| e.medium.as_deref() != Some("Memory")))
            .map(|v| used(&below.join(&v.name)))
            .collect()
    }

    fn pod(&self, key: &PodKey, figures: &PodFigures) -> Value {
        let now = time(0);
        let pod = self.pods.iter().find(|p| p.metadata.uid.as_deref() == Some(&key.uid));
        let pod = pod.map(|p| &**p);
        let whole = figures.whole.as_ref();
        let measured: Vec<(Value, Space)> =
            figures.containers.iter().map(|(name, stats)| self.container(key, pod, name, stats)).collect();
        let volumes = pod.map(|pod| self.empty_dirs(pod)).unwrap_or_default();
        let own = super::usage::own_files(&self.kubelet.join("pods").join(&key.uid));
        let own = [Space { bytes: own.bytes, inodes: own.inodes }];
        let spaces = || measured.iter().map(|(_, space)| space).chain(&volumes).chain(&own);
        let network = whole.and_then(|w| w.network.as_ref()).map(|network| {
            let mut shown = network.default_interface.as_ref().map_or_else(|| json!({}), interface_json);
            shown["time"] = json!(time(network.timestamp));
            shown["interfaces"] = network.interfaces.iter().map(interface_json).collect();
            shown
        });
        let sum = |of: &dyn Fn(&ContainerStats) -> Option<u64>| -> Option<u64> {
            figures.containers.iter().map(|(_, s)| of(s)).sum()
        };
        let cpu = whole
            .and_then(|w| w.cpu.as_ref())
            .map(cpu_json)
            .unwrap_or_else(|| json!({"time": now, "usageCoreNanoSeconds": figures.cpu_nanoseconds()}));
        let memory = whole.and_then(|w| w.memory.as_ref()).map(memory_json).unwrap_or_else(|| {
            json!({
                "time": now,
                "workingSetBytes": figures.working_set(),
                "usageBytes": sum(&|s| number(&s.memory.as_ref()?.usage_bytes)),
            })
        });
        let started = pod.and_then(|pod| pod.status.as_ref()?.start_time.clone()).map(|t| stamp(t.0));
        let processes = whole.and_then(|w| number(&w.process.as_ref()?.process_count));
        json!({
            "podRef": {"name": key.name, "namespace": key.namespace, "uid": key.uid},
            "startTime": started,
            "cpu": cpu,
            "memory": memory,
            "network": network,
            "ephemeral-storage": fs_json(
                &now,
                node::file_system(&self.kubelet),
                Some(spaces().map(|s| s.bytes).sum()),
                Some(spaces().map(|s| s.inodes).sum()),
            ),
            "volume": self.volumes.get(&key.uid).map(|all| {
                all.iter().map(|volume| volume_json(volume, &key.namespace)).collect::<Vec<_>>()
            }),
            "process_stats": processes.map(|count| json!({"process_count": count})),
            "swap": figures.swap().map(|bytes| json!({"time": now, "swapUsageBytes": bytes})),
            "containers": measured.into_iter().map(|(shown, _)| shown).collect::<Vec<_>>(),
        })
    }

    fn summary(&self, node_name: &str, pods: &Pods) -> Value {
        let (now, used) = (time(0), node::node_use());
        let fs = node::file_system(&self.kubelet);
        let boot = Timestamp::from_second(used.boot_time).ok().map(stamp);
        without_nulls(json!({
            "node": {
                "nodeName": node_name,
                "startTime": boot,
                "cpu": {"time": now, "usageCoreNanoSeconds": used.cpu_nanos},
                "memory": {
                    "time": now,
                    "availableBytes": used.memory_available,
                    "workingSetBytes": used.memory_working_set,
                },
                "fs": fs.map(|f| fs_json(&now, Some(f), Some(f.used), Some(f.inodes.saturating_sub(f.inodes_free)))),
                "rlimit": node::processes().map(|(most, running)| json!({
                    "time": now, "maxpid": most, "curproc": running,
                })),
                "swap": {
                    "time": now,
                    "swapAvailableBytes": used.swap_free,
                    "swapUsageBytes": used.swap_used,
                },
            },
            "pods": pods.iter().map(|(key, figures)| self.pod(key, figures)).collect::<Vec<_>>(),
        }))
    }
}

pub(in crate::server) async fn summary(context: &Context) -> Answer {
    let pods = match pods(context).await {
        Ok(pods) => pods,
        Err(e) => return text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    };
    let places = Places {
        kubelet: context.volumes.root().to_path_buf(),
        logs: context.log_dir.clone(),
        pods: context.pods.list(),
        volumes: context.volumes.figures().await,
    };
    let name = context.node_name.clone();
    // Files of containers are counted: that may take a while.
    match tokio::task::spawn_blocking(move || places.summary(&name, &pods)).await {
        Ok(summary) => json(&summary),
        Err(e) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cri::v1::{
        FilesystemIdentifier, FilesystemUsage, LinuxPodSandboxStats, NetworkUsage, ProcessUsage, UInt64Value,
    };

    fn value(value: u64) -> Option<UInt64Value> {
        Some(UInt64Value { value })
    }

    #[test]
    fn a_pod_and_what_it_uses() {
        let dir = tempfile::tempdir().unwrap();
        let pod: Pod = ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "c"}], "volumes": [
                {"name": "disk", "emptyDir": {}}, {"name": "memory", "emptyDir": {"medium": "Memory"}}]},
            "status": {"startTime": "2026-01-01T00:00:00Z"},
        }))
        .unwrap();
        let volumes = dir.path().join("pods/u/volumes/kubernetes.io~empty-dir");
        for (path, bytes) in [
            (volumes.join("disk/f"), 8192),
            (volumes.join("memory/f"), 1 << 20),
            (dir.path().join("logs/n_p_u/c/0.log"), 4096),
        ] {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, vec![1; bytes]).unwrap();
        }
        let eth0 = NetworkInterfaceUsage { name: "eth0".into(), rx_bytes: value(7), ..Default::default() };
        let whole = LinuxPodSandboxStats {
            network: Some(NetworkUsage {
                default_interface: Some(eth0.clone()),
                interfaces: vec![eth0],
                ..Default::default()
            }),
            process: Some(ProcessUsage { timestamp: 0, process_count: value(3) }),
            ..Default::default()
        };
        let layer = FilesystemUsage {
            fs_id: Some(FilesystemIdentifier { mountpoint: "/".into() }),
            used_bytes: value(1000),
            inodes_used: value(2),
            ..Default::default()
        };
        let stats = ContainerStats { writable_layer: Some(layer), ..Default::default() };
        let figures =
            PodFigures { whole: Some(whole), containers: vec![("c".into(), stats)], ..PodFigures::default() };
        let key = PodKey { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let places = Places {
            kubelet: dir.path().to_path_buf(),
            logs: dir.path().join("logs"),
            pods: vec![Arc::new(pod)],
            volumes: BTreeMap::from([(
                "u".to_owned(),
                vec![MeasuredVolume {
                    name: "data".into(),
                    claim: Some("claim".into()),
                    at: Timestamp::UNIX_EPOCH,
                    figures: VolumeFigures { used: Some(7), ..VolumeFigures::default() },
                }],
            )]),
        };
        let summary = places.summary("node", &Pods::from([(key, figures)]));
        let pod = &summary["pods"][0];
        assert_eq!(pod["startTime"], "2026-01-01T00:00:00Z");
        assert_eq!((&pod["network"]["name"], &pod["network"]["rxBytes"]), (&json!("eth0"), &json!(7)));
        assert_eq!(pod["network"]["interfaces"][0]["rxBytes"], 7);
        let volume = &pod["volume"][0];
        assert_eq!(volume["pvcRef"], json!({"name": "claim", "namespace": "n"}));
        assert_eq!((&volume["usedBytes"], volume.get("inodes")), (&json!(7), None));
        assert_eq!(pod["process_stats"]["process_count"], 3);
        let container = &pod["containers"][0];
        assert_eq!(container["rootfs"]["usedBytes"], 1000);
        assert!(container["rootfs"]["capacityBytes"].as_u64().unwrap() > 0);
        let logs = container["logs"]["usedBytes"].as_u64().unwrap();
        assert!(logs >= 4096, "{container:?}");
        let all = pod["ephemeral-storage"]["usedBytes"].as_u64().unwrap();
        assert!((1000 + logs + 8192..1 << 20).contains(&all), "without memory: {all}");
        for absent in ["cpu", "memory", "swap", "startTime"] {
            assert!(container.get(absent).is_none(), "{absent} was not measured");
        }
        assert!(summary["node"]["fs"]["capacityBytes"].as_u64().unwrap() > 0);
        assert!(summary["node"]["rlimit"]["maxpid"].as_u64().unwrap() > 0);
    }
}
