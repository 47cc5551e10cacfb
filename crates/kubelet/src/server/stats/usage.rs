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

/// Most files counted for one figure.
const MAX_COUNTED: u64 = 16 << 20;

/// The usage of a directory that containers write. One that was not counted whole counts as everything: a pod could hide
/// large files behind very many empty ones, or behind directories that it moves while they are counted.
fn space(path: &Path, limit: u64) -> Usage {
    match counted(path, limit) {
        Ok(found) if !found.is_whole => Usage { bytes: u64::MAX, ..found },
        Ok(found) => found,
        // Errors are the node's, not the pod's.
        Err(_) => Usage { is_whole: true, ..Usage::default() },
    }
}

/// Bytes of a writable layer, which the runtime counts. Ours shows at least as many files as it counts at most where there
/// are more.
fn layer_bytes(bytes: u64, inodes: u64) -> u64 {
    if inodes >= MAX_COUNTED { u64::MAX } else { bytes }
}

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
    let count = |path: &Path| space(path, MAX_COUNTED);
    let (mut bytes, mut inodes) = (0u64, 0u64);
    for (name, stats) in &found.containers {
        let layer = stats.writable_layer.clone().unwrap_or_default();
        let log = count(&logs.join(id.log_directory()).join(name));
        let files = number(&layer.inodes_used).unwrap_or(0);
        let written = layer_bytes(number(&layer.used_bytes).unwrap_or(0), files);
        let used = written.saturating_add(log.bytes);
        inodes = inodes.saturating_add(files).saturating_add(log.inodes);
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
    fn nothing_hides_behind_many_files() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let root = tempfile::tempdir().unwrap();
        for (path, limit, expected) in [
            (dir.path().to_owned(), 3, 0),
            (dir.path().to_owned(), 2, u64::MAX),
            (root.path().join("none"), 2, 0),
            (dir.path().join("a"), 2, 0),
        ] {
            assert_eq!(space(&path, limit).bytes, expected, "{path:?} {limit}");
        }
        for (inodes, expected) in [(0, 7), (MAX_COUNTED - 1, 7), (MAX_COUNTED, u64::MAX)] {
            assert_eq!(layer_bytes(7, inodes), expected, "{inodes}");
        }
    }

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
