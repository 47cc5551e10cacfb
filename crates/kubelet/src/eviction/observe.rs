//! Measures the resources that are left.

use super::decide::{Observation, Observations};
use super::signals::{Signal, Threshold};
use crate::pod::context::Context;
use crate::server::stats::node;
use ferrite_cri::ImageService;
use ferrite_cri::v1::{FilesystemUsage, ImageFsInfoRequest};
use std::path::{Path, PathBuf};

pub(super) struct Observer<'a> {
    pub context: &'a Context,
    pub images: &'a dyn ImageService,
    pub pods_memory: i64,
    pub thresholds: &'a [Threshold],
}

fn whole(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

impl Observer<'_> {
    fn watches(&self, signals: &[Signal]) -> bool {
        self.thresholds.iter().any(|t| signals.contains(&t.signal))
    }

    /// Measures the signals that thresholds use, and nothing else.
    pub(super) async fn observe(&self) -> Observations {
        use Signal::*;
        let mut seen = Observations::new();
        let used = node::node_use();
        let capacity = used.memory_available.saturating_add(used.memory_working_set);
        seen.insert(MemoryAvailable, Observation { available: used.memory_available, capacity });
        if let Some(taken) = self.context.cgroups.pods_working_set() {
            let available = self.pods_memory.saturating_sub(taken);
            seen.insert(AllocatableMemoryAvailable, Observation { available, capacity: self.pods_memory });
        }
        if let Some((most, running)) = node::processes() {
            let available = whole(most).saturating_sub(whole(running));
            seen.insert(PidAvailable, Observation { available, capacity: whole(most) });
        }
        if self.watches(&[NodeFsAvailable, NodeFsInodesFree]) {
            insert(&mut seen, self.context.volumes.root(), NodeFsAvailable, NodeFsInodesFree);
        }
        let (images, containers) =
            ([ImageFsAvailable, ImageFsInodesFree], [ContainerFsAvailable, ContainerFsInodesFree]);
        if self.watches(&images) || self.watches(&containers) {
            match self.images.image_fs_info(ImageFsInfoRequest {}).await {
                Ok(info) => {
                    if let Some(path) = mount_point(info.image_filesystems) {
                        insert(&mut seen, &path, ImageFsAvailable, ImageFsInodesFree);
                    }
                    if let Some(path) = mount_point(info.container_filesystems) {
                        insert(&mut seen, &path, ContainerFsAvailable, ContainerFsInodesFree);
                    }
                }
                Err(error) => tracing::warn!(%error, "the runtime does not tell where images are"),
            }
        }
        seen
    }
}

fn mount_point(file_systems: Vec<FilesystemUsage>) -> Option<PathBuf> {
    file_systems.into_iter().find_map(|f| f.fs_id).map(|id| PathBuf::from(id.mountpoint))
}

fn insert(seen: &mut Observations, path: &Path, space: Signal, inodes: Signal) {
    let Some(found) = node::file_system(path) else { return };
    seen.insert(space, Observation { available: whole(found.available), capacity: whole(found.capacity) });
    // Some file systems have no fixed number.
    if found.inodes > 0 {
        seen.insert(
            inodes,
            Observation { available: whole(found.inodes_free), capacity: whole(found.inodes) },
        );
    }
}
