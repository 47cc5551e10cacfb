//! emptyDir volumes.

use super::kernel::{self, Tmpfs};
use super::plugins::{SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError, blocking};
use crate::quantity;
use ferrite_hostfs::Dir;
use futures_util::FutureExt;
use std::ffi::OsString;
use std::io;
use std::path::Path;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.empty_dir.is_some(),
    set_up: |request: SetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: SetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.volume.empty_dir.as_ref().ok_or(SourceError::Unsupported)?;
    let path = request.dir("empty-dir");
    let limit = source.size_limit.as_ref().and_then(quantity::value).filter(|l| *l > 0);
    let memory = source.medium.as_deref() == Some("Memory");
    let (target, group) = (path.clone(), request.group);
    blocking(&path, move || ensure(&target, memory, limit, group)).await?;
    Ok(ReadyVolume::writable(path))
}

/// Makes an empty directory that every user of the pod may write. One that is there stays as the containers made
/// it: its mode and its owner are theirs to change, as upstream.
pub(crate) fn ensure(path: &Path, memory: bool, size: Option<i64>, group: Option<u32>) -> io::Result<()> {
    let mode = if group.is_some() { 0o2777 } else { 0o777 };
    if memory {
        return kernel::ensure_tmpfs(path, Tmpfs { mode, group, size });
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    std::fs::create_dir_all(parent)?;
    let parent = Dir::open(parent)?;
    match parent.is_dir(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Ok(true) => return Ok(()),
        Ok(false) => return Err(io::ErrorKind::NotADirectory.into()),
        Err(e) => return Err(e),
    }
    // Made complete under another name, so that one that is found is never half made.
    let mut fresh = OsString::from(".new-");
    fresh.push(name);
    parent.remove_tree(&fresh)?;
    let made = parent.create_dir(&fresh, 0o700)?;
    made.set_owner(None, group)?;
    made.set_mode(mode)?;
    parent.rename(&fresh, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn made_once_and_then_the_containers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volumes/v");
        ensure(&path, false, None, Some(1234)).expect("this test needs root");
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.gid(), meta.mode() & 0o7777), (1234, 0o2777));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(path.join("f"), "x").unwrap();
        fs::create_dir(dir.path().join("volumes/.new-v")).unwrap();
        ensure(&path, false, None, Some(1234)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o700);
        assert!(path.join("f").exists());
    }
}
