//! Files of the kubelet that are mounted into containers, which can write their content.

use ferrite_hostfs::Dir;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Writes the pod's hosts file. Containers hold the file itself, so it is rewritten in place, and only when it
/// differs.
pub(super) fn hosts_file(dir: &Path, text: &str) -> io::Result<PathBuf> {
    std::fs::create_dir_all(dir)?;
    let path = dir.join("etc-hosts");
    // A container may have made the file large: one byte more than expected shows that it differs.
    let found = ferrite_hostfs::read_head(&path, text.len() as u64 + 1);
    if found.is_ok_and(|found| found == text.as_bytes()) {
        return Ok(path);
    }
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let mut options = std::fs::OpenOptions::new();
    let mut file =
        options.create(true).write(true).truncate(true).mode(0o644).custom_flags(flags).open(&path)?;
    // Every user of the pod reads it; the umask must not take that away.
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.write_all(text.as_bytes())?;
    Ok(path)
}

/// Makes an empty file for the container's last words. An earlier one of the same name is another container's.
pub(super) fn message_file(pod_dir: &Path, container: &str, attempt: u32) -> io::Result<PathBuf> {
    let path = pod_dir.join("containers").join(container);
    std::fs::create_dir_all(&path)?;
    let (dir, name) = (Dir::open(&path)?, attempt.to_string());
    dir.remove_tree(&name)?;
    // Every user of the container may write its last words.
    dir.create_file(&name)?.set_permissions(Permissions::from_mode(0o666))?;
    Ok(path.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_hosts_file_is_rewritten_in_place() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = hosts_file(dir.path(), "a\n").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        fs::write(&path, "a\nand what the container added").unwrap();
        hosts_file(dir.path(), "a\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\n");
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        let victim = dir.path().join("victim");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        assert!(hosts_file(dir.path(), "a\n").is_err() && !victim.exists());
    }

    #[test]
    fn the_message_file_is_new_and_for_everybody() {
        let dir = tempfile::tempdir().unwrap();
        let path = message_file(dir.path(), "c", 3).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let victim = dir.path().join("victim");
        fs::write(&victim, "kept").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        message_file(dir.path(), "c", 3).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }
}
