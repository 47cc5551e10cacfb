//! Takes volumes back: unpublishes those of a pod, and unstages those that no pod uses.

use super::data::{self, Data, State};
use super::ledger::{VolumeId, names};
use super::mount::text;
use super::{Csi, CsiError, blocking};
use ferrite_client::Backoff;
use ferrite_csi::v1::{NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest};
use ferrite_hostfs::{Dir, mounts};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A publication that an earlier set-up left in a pod's directory.
struct Published {
    data: Data,
    target: PathBuf,
    /// Removed once the driver has taken the volume back.
    leftovers: Leftovers,
}

enum Leftovers {
    /// The volume's directory, with its data file.
    Directory(PathBuf),
    /// The pod's link to the device.
    Link(PathBuf),
}

impl Csi {
    /// Unpublishes every CSI volume of the pod. Whatever fails is tried again with the pod.
    pub(crate) async fn unpublish(&self, uid: &str) -> Result<(), CsiError> {
        let (paths, pod) = (self.shared.paths.clone(), uid.to_owned());
        let found = blocking(&self.shared.paths.pods().join(uid), move || published(&paths, &pod)).await?;
        for one in found {
            let id = VolumeId::new(&one.data.driver, &one.data.handle);
            let service = self.shared.drivers.wait(&one.data.driver).await;
            let _alone = self.exclusive(&id).await;
            if one.data.state != Some(State::Failed) {
                let request = NodeUnpublishVolumeRequest {
                    volume_id: one.data.handle.clone(),
                    target_path: text(&one.target),
                };
                let answer = service?.node_unpublish_volume(request).await;
                answer.map_err(|source| CsiError::Call { step: "NodeUnpublishVolume", source })?;
            }
            let target = one.target.clone();
            blocking(&one.target, move || {
                if mounts::is_mounted_at(&target)? {
                    tracing::warn!(path = %target.display(), "the driver left a volume mounted; unmounting it");
                    mounts::unmount_at(&target)?;
                }
                remove_target(&target)?;
                match one.leftovers {
                    Leftovers::Directory(dir) => data::remove(&dir),
                    Leftovers::Link(link) => std::fs::remove_file(link),
                }
            })
            .await?;
            self.shared.republished.end(uid, &one.data.spec_name);
        }
        Ok(())
    }

    /// Nothing of the pod is left: volumes that only it used are unstaged, in the background.
    pub(crate) fn release(&self, uid: &str) {
        for id in self.with_ledger(|ledger| ledger.drop_pod(uid)) {
            self.unstage_later(id);
        }
    }

    /// Unstages volumes that an earlier kubelet left and no pod uses.
    pub(crate) fn release_unused(&self) {
        for id in self.with_ledger(|ledger| ledger.unused()) {
            self.unstage_later(id);
        }
    }

    fn unstage_later(&self, id: VolumeId) {
        let csi = self.clone();
        self.shared.scope.spawn(async move {
            let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(120), 0.1);
            loop {
                let Err(error) = csi.unstage(&id).await else { return };
                tracing::warn!(driver = id.driver, volume = id.handle, %error, "could not unstage a volume; will try again");
                let mut changes = csi.shared.drivers.changes();
                changes.mark_unchanged();
                tokio::select! {
                    () = tokio::time::sleep(backoff.next_delay()) => {}
                    _ = changes.changed() => {}
                }
            }
        });
    }

    async fn unstage(&self, id: &VolumeId) -> Result<(), CsiError> {
        let _alone = self.exclusive(id).await;
        let (used, stage) = self.with_ledger(|ledger| (ledger.is_used(id), ledger.stage_of(id)));
        if used {
            return Ok(());
        }
        if let Some(stage) = stage {
            let service = self.shared.drivers.wait(&id.driver).await?;
            let failed = |step| move |source| CsiError::Call { step, source };
            let able = service.capabilities().await.map_err(failed("NodeGetCapabilities"))?;
            if able.stage() {
                let request = NodeUnstageVolumeRequest {
                    volume_id: id.handle.clone(),
                    staging_target_path: text(&stage.path),
                };
                service.node_unstage_volume(request).await.map_err(failed("NodeUnstageVolume"))?;
            }
            let path = stage.path.clone();
            blocking(&path, move || {
                mounts::unmount_at(&stage.path)?;
                remove_target(&stage.path)?;
                data::remove(&stage.data)
            })
            .await?;
            tracing::debug!(driver = id.driver, volume = id.handle, path = %path.display(), "unstaged");
        }
        self.with_ledger(|ledger| ledger.forget(id));
        Ok(())
    }
}

/// The volumes published for the pod, according to the files on disk.
fn published(paths: &super::paths::Paths, uid: &str) -> io::Result<Vec<Published>> {
    let mut found = Vec::new();
    for name in names(&paths.pod_volumes(uid)) {
        let dir = paths.pod_volume(uid, &name);
        // Without data nothing was asked of a driver.
        if let Some(data) = data::read(&dir)? {
            let target = paths.target(uid, &name);
            found.push(Published { data, target, leftovers: Leftovers::Directory(dir) });
        }
    }
    for name in names(&paths.pod_devices(uid)) {
        if let Some(data) = data::read(&paths.block_data(&name))? {
            let link = paths.pod_devices(uid).join(&name);
            let target = paths.block_target(uid, &name);
            found.push(Published { data, target, leftovers: Leftovers::Link(link) });
        }
    }
    Ok(found)
}

/// Removes a target that the driver should have removed: an empty directory, or a file. Nothing below it is touched.
pub(super) fn remove_target(target: &Path) -> io::Result<()> {
    let (Some(above), Some(name)) = (target.parent(), target.file_name()) else { return Ok(()) };
    let gone = |result: io::Result<()>| match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    let above = match Dir::open(above) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    match above.is_dir(name) {
        Ok(true) => gone(above.remove_dir(name)),
        Ok(false) => gone(above.remove_file(name)),
        Err(e) => gone(Err(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_with_content_are_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("mount");
        remove_target(&target).unwrap();
        std::fs::create_dir(&target).unwrap();
        std::fs::write(target.join("data"), "kept").unwrap();
        assert!(remove_target(&target).is_err(), "this may be somebody's data");
        std::fs::remove_file(target.join("data")).unwrap();
        remove_target(&target).unwrap();
        assert!(!target.exists());
        std::os::unix::fs::symlink("/etc", &target).unwrap();
        remove_target(&target).unwrap();
        assert!(Path::new("/etc").exists() && target.symlink_metadata().is_err());
    }
}
