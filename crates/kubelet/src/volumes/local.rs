//! PersistentVolumes of kind `local`: directories and block devices of the node.

use super::format::{DeviceMount, FormatError, format_and_mount};
use super::kernel;
use super::local_path;
use super::ownership::{self, GroupChange};
use super::plugins::{PersistentPlugin, PersistentSetUp};
use super::stats::Measure;
use super::{ReadyVolume, SourceError, blocking};
use crate::pod::model;
use ferrite_hostfs::mounts;
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::LocalVolumeSource;
use nix::sys::stat::{SFlag, fstat};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub(crate) enum LocalError {
    #[error("path {0:?} does not exist")]
    Missing(PathBuf),
    #[error("path {path:?} is {found}, and the volume has volumeMode {mode}")]
    WrongKind { path: PathBuf, found: &'static str, mode: &'static str },
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

pub(super) const PLUGIN: PersistentPlugin = PersistentPlugin {
    matches: |spec| spec.local.is_some(),
    set_up: |request: PersistentSetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: PersistentSetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.spec.local.as_ref().ok_or(SourceError::Unsupported)?;
    let path = PathBuf::from(&source.path);
    let block = request.spec.volume_mode.as_deref() == Some("Block");
    let provisioned = local_path::directory_of(request.pod.volumes.local_volumes.as_deref(), &request);
    if block {
        let device = path.clone();
        let found = tokio::task::spawn_blocking(move || open(&device, true)).await;
        found.unwrap_or_else(|e| Err(io_error(&path, io::Error::other(e))))?;
        return Ok(ReadyVolume::writable(path));
    }
    let point = request.pod.place("local-volume", request.name);
    let policy = model::spec(request.pod.pod).security_context.as_ref();
    let policy = policy.and_then(|context| context.fs_group_change_policy.clone());
    let change = request
        .pod
        .group
        .filter(|_| !request.read_only)
        .map(|group| GroupChange { group, only_on_mismatch: policy.as_deref() == Some("OnRootMismatch") });
    if is_device(&path, provisioned.is_none()).await? {
        return on_device(&request, source, &path, point, change).await;
    }
    let target = point.clone();
    let made = tokio::task::spawn_blocking(move || {
        let place = match provisioned {
            // Nobody but us makes these directories, and no link leads to them.
            Some((root, name)) => local_path::ensure(&root, &name).map_err(|e| io_error(&path, e))?,
            None => open(&path, false)?,
        };
        let fresh = kernel::bind(&place, &target).map_err(|e| io_error(&path, e))?;
        // A pod that runs already keeps the result of its first mount.
        if let Some(change) = change.filter(|_| fresh) {
            ownership::apply(&target, change).map_err(|e| io_error(&path, e))?;
        }
        Ok::<_, LocalError>(())
    });
    made.await.unwrap_or_else(|e| Err(io_error(&point, io::Error::other(e))))?;
    Ok(ReadyVolume { measure: Some(Measure::FileSystem), ..ReadyVolume::writable(point) })
}

async fn is_device(path: &Path, may_be: bool) -> Result<bool, SourceError> {
    let place = path.to_owned();
    let found = tokio::task::spawn_blocking(move || match std::fs::metadata(&place) {
        Ok(found) => Ok(std::os::unix::fs::FileTypeExt::is_block_device(&found.file_type())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(io_error(&place, e)),
    });
    Ok(may_be && found.await.unwrap_or_else(|e| Err(io_error(path, io::Error::other(e))))?)
}

/// Mounts the file system of a device in the pod's directory; a device without one gets one first.
async fn on_device(
    request: &PersistentSetUp<'_>,
    source: &LocalVolumeSource,
    path: &Path,
    point: PathBuf,
    change: Option<GroupChange>,
) -> Result<ReadyVolume, SourceError> {
    let target = point.clone();
    let mounted = blocking(&point, move || {
        std::fs::create_dir_all(&target)?;
        mounts::is_mount_point(&target)
    })
    .await?;
    if !mounted {
        // Two pods must not format one device at the same time.
        let _alone = request.pod.volumes.formatting.lock().await;
        let wanted = DeviceMount {
            device: path,
            point: &point,
            kind: source.fs_type.as_deref().unwrap_or_default(),
            read_only: request.read_only,
            options: request.spec.mount_options.as_deref().unwrap_or_default(),
        };
        format_and_mount(&wanted).await.map_err(LocalError::Format)?;
        if let Some(change) = change {
            let target = point.clone();
            blocking(&point, move || ownership::apply(&target, change)).await?;
        }
    }
    Ok(ReadyVolume { measure: Some(Measure::FileSystem), ..ReadyVolume::writable(point) })
}

fn io_error(path: &Path, source: io::Error) -> LocalError {
    LocalError::Io { path: path.to_owned(), source }
}

/// Opens the administrator's path, which must be of the right kind.
fn open(path: &Path, block: bool) -> Result<OwnedFd, LocalError> {
    let place = kernel::open_place(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => LocalError::Missing(path.to_owned()),
        _ => io_error(path, e),
    })?;
    let stat = fstat(&place).map_err(|e| io_error(path, e.into()))?;
    let kind = SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits());
    let wrong = |found, mode| Err(LocalError::WrongKind { path: path.to_owned(), found, mode });
    match (kind, block) {
        (SFlag::S_IFDIR, false) | (SFlag::S_IFBLK, true) => Ok(place),
        (SFlag::S_IFDIR, true) => wrong("a directory", "Block"),
        (_, true) => wrong("no block device", "Block"),
        (_, false) => wrong("no directory", "Filesystem"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_and_devices_are_volumes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(open(dir.path(), false).is_ok());
        assert!(matches!(open(dir.path(), true), Err(LocalError::WrongKind { .. })));
        assert!(matches!(open(&file, false), Err(LocalError::WrongKind { .. })));
        assert!(matches!(open(&file, true), Err(LocalError::WrongKind { .. })));
        assert!(matches!(open(&dir.path().join("none"), false), Err(LocalError::Missing(_))));
    }
}
