//! A volume's files for the pod's `fsGroup`.

use ferrite_hostfs::{Dir, Visit, walk};
use std::io;
use std::path::Path;

/// The change of a volume's group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupChange {
    pub group: u32,
    /// `fsGroupChangePolicy: OnRootMismatch`: nothing is done when the root of the volume is as wanted.
    pub only_on_mismatch: bool,
}

/// Group read and write, as upstream; directories can be entered, and new files in them have their group.
const FILE_MODE: u32 = 0o660;
const DIRECTORY_MODE: u32 = 0o2770;
/// The bits of a mode that can be set.
const PERMISSIONS: u32 = 0o7777;

/// Gives everything below `root`, and `root` itself, to the group. Links are changed themselves, and never followed.
pub(super) fn apply(root: &Path, change: GroupChange) -> io::Result<()> {
    let dir = Dir::open(root)?;
    let stat = dir.stat_self()?;
    let right = stat.st_gid == change.group && stat.st_mode & DIRECTORY_MODE == DIRECTORY_MODE;
    if change.only_on_mismatch && right {
        return Ok(());
    }
    walk(dir.try_clone()?, u64::MAX, |entry: Visit<'_>| match entry.is_dir() {
        true => give_directory(&entry.dir.open_dir(entry.name)?, change.group),
        false => entry.dir.give_to_group(entry.name, change.group, FILE_MODE),
    })?;
    // The root is last: one that was interrupted is not taken for done.
    give_directory(&dir, change.group)
}

fn give_directory(dir: &Dir, group: u32) -> io::Result<()> {
    let mode = dir.stat_self()?.st_mode;
    dir.set_owner(None, Some(group))?;
    dir.set_mode(mode & PERMISSIONS | DIRECTORY_MODE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn files_are_given_and_links_are_not_followed() {
        let tree = tempfile::tempdir().unwrap();
        let (volume, outside) = (tree.path().join("v"), tree.path().join("outside"));
        fs::create_dir_all(volume.join("sub")).unwrap();
        fs::write(volume.join("sub/file"), "").unwrap();
        fs::write(&outside, "").unwrap();
        for (path, mode) in
            [(volume.join("sub/file"), 0o600), (outside.clone(), 0o600), (volume.clone(), 0o755)]
        {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        symlink(&outside, volume.join("link")).unwrap();
        let change = GroupChange { group: 4321, only_on_mismatch: true };
        apply(&volume, change).expect("this test needs root");
        let of = |path: &Path| {
            let meta = fs::symlink_metadata(path).unwrap();
            (meta.gid(), meta.mode() & 0o7777)
        };
        assert_eq!(of(&volume), (4321, 0o2775));
        assert_eq!(of(&volume.join("sub")).0, 4321);
        assert_eq!(of(&volume.join("sub/file")), (4321, 0o660));
        assert_eq!(of(&volume.join("link")).0, 4321);
        assert_eq!(of(&outside), (0, 0o600), "what a link points at is somebody else's");
        fs::write(volume.join("late"), "").unwrap();
        fs::set_permissions(volume.join("late"), fs::Permissions::from_mode(0o600)).unwrap();
        apply(&volume, change).unwrap();
        assert_eq!(of(&volume.join("late")).1, 0o600, "the root was right");
        apply(&volume, GroupChange { only_on_mismatch: false, ..change }).unwrap();
        assert_eq!(of(&volume.join("late")).1, 0o660);
    }
}
