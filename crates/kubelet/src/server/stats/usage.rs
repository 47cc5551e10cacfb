//! Resource usage of pods, for eviction.

use super::{Pods, number, pods, working_set};
use crate::eviction::PodUsage;
use crate::pod::PodId;
use crate::pod::context::Context;
use crate::pod::model;
use ferrite_hostfs::{Usage, usage as counted};
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most files counted for one figure. A pod could hide large files behind as many empty ones.
const MAX_COUNTED: u64 = 16 << 20;

/// Resource usage of each of these pods, by its UID. Files are counted only `with_disk`: that may take
/// long.
pub(crate) async fn usage(
    context: &Context,
    of: &[Arc<Pod>],
    with_disk: bool,
) -> ferrite_cri::Result<BTreeMap<String, PodUsage>> {
    let figures = pods(context).await?;
    let (root, logs, of) = (context.volumes.root().to_path_buf(), context.log_dir.clone(), of.to_vec());
    let measured = tokio::task::spawn_blocking(move || {
        of.iter()
            .map(|pod| (PodId::of(pod).uid, measure(pod, &figures, with_disk.then_some((&root, &logs)))))
            .collect()
    });
    measured.await.map_err(|e| ferrite_cri::Error::internal(e.to_string()))
}

fn measure(pod: &Pod, figures: &Pods, places: Option<(&PathBuf, &PathBuf)>) -> PodUsage {
    let id = PodId::of(pod);
    let Some((_, found)) = figures.iter().find(|(key, _)| key.uid == id.uid) else {
        return PodUsage::default();
    };
    let mut usage = PodUsage {
        memory: found.working_set(),
        processes: found.whole.as_ref().and_then(|w| number(&w.process.as_ref()?.process_count)),
        ..PodUsage::default()
    };
    for (name, stats) in &found.containers {
        if let Some(bytes) = working_set(stats) {
            usage.container_memory.insert(name.clone(), bytes);
        }
    }
    let Some((root, logs)) = places else { return usage };
    let count = |path: &Path| counted(path, MAX_COUNTED).unwrap_or_default();
    let (mut bytes, mut inodes) = (0u64, 0u64);
    for (name, stats) in &found.containers {
        let layer = stats.writable_layer.clone().unwrap_or_default();
        let log = count(&logs.join(id.log_directory()).join(name));
        let used = number(&layer.used_bytes).unwrap_or(0).saturating_add(log.bytes);
        inodes = inodes.saturating_add(number(&layer.inodes_used).unwrap_or(0)).saturating_add(log.inodes);
        bytes = bytes.saturating_add(used);
        usage.container_disk.insert(name.clone(), used);
    }
    let below = root.join("pods").join(&id.uid).join("volumes/kubernetes.io~empty-dir");
    for volume in model::spec(pod).volumes.iter().flatten() {
        let Some(empty) = &volume.empty_dir else { continue };
        if empty.medium.as_deref() == Some("Memory") {
            continue;
        }
        let found = count(&below.join(&volume.name));
        bytes = bytes.saturating_add(found.bytes);
        inodes = inodes.saturating_add(found.inodes);
        usage.empty_dirs.insert(volume.name.clone(), found.bytes);
    }
    let own = own_files(&root.join("pods").join(&id.uid));
    bytes = bytes.saturating_add(own.bytes);
    inodes = inodes.saturating_add(own.inodes);
    usage.disk = Some(bytes);
    usage.inodes = Some(inodes);
    usage
}

/// Usage of the files of the kubelet that a pod's containers write: the hosts file, as upstream, and their last words.
pub(super) fn own_files(pod_dir: &Path) -> Usage {
    use std::os::unix::fs::MetadataExt;
    let mut own = counted(&pod_dir.join("containers"), MAX_COUNTED).unwrap_or_default();
    if let Ok(hosts) = pod_dir.join("etc-hosts").symlink_metadata() {
        own.bytes = own.bytes.saturating_add(hosts.blocks().saturating_mul(512));
        own.inodes += 1;
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::stats::{PodFigures, PodKey};
    use ferrite_json::json;

    #[test]
    fn files_of_the_kubelet_that_containers_write_are_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let pod_dir = dir.path().join("pods/u");
        std::fs::create_dir_all(pod_dir.join("containers/c")).unwrap();
        let pod: Pod = ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}}))
        .unwrap();
        let key = PodKey { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let figures = Pods::from_iter([(key, PodFigures::default())]);
        let (root, logs) = (dir.path().to_owned(), dir.path().join("logs"));
        let used = || measure(&pod, &figures, Some((&root, &logs))).disk.unwrap();
        let before = used();
        for file in ["etc-hosts", "containers/c/0"] {
            std::fs::write(pod_dir.join(file), vec![1; 1 << 20]).unwrap();
        }
        assert!(used() - before >= 2 << 20, "{}", used() - before);
    }
}
