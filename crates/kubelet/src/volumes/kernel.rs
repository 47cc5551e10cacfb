//! Mounts the kubelet makes itself: tmpfs volumes and bind mounts of sub-paths.

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, mkdirat};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// Mount points at or below `dir`, deepest first.
pub(crate) fn mounts_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let mut found: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescape)
        .filter(|point| point.starts_with(dir))
        .collect();
    found.sort();
    found.reverse();
    Ok(found)
}

/// mountinfo writes blanks and backslashes as octal.
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let octal = bytes.get(i + 1..i + 4).and_then(|d| std::str::from_utf8(d).ok());
        match octal.filter(|_| bytes[i] == b'\\').and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 4;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from(String::from_utf8_lossy(&out).into_owned()))
}

fn is_mount_point(dir: &Path) -> io::Result<bool> {
    Ok(mounts_below(dir)?.iter().any(|p| p == dir))
}

/// A memory file system at `dir`; one that is there already stays.
pub(crate) fn ensure_tmpfs(dir: &Path, size: Option<i64>) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    if is_mount_point(dir)? {
        return Ok(());
    }
    let options = match size {
        Some(size) => format!("mode=0777,size={size}"),
        None => "mode=0777".to_string(),
    };
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(options.as_str()))?;
    Ok(())
}

/// Unmounts everything at or below `dir`, then removes it.
pub(crate) fn remove_tree(dir: &Path) -> io::Result<()> {
    for point in mounts_below(dir)? {
        match umount2(&point, MntFlags::MNT_DETACH) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(e) => return Err(e.into()),
        }
    }
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Opens `sub` beneath `volume`, never leaving it through a link, and makes missing directories.
fn open_beneath(volume: &Path, sub: &Path) -> io::Result<OwnedFd> {
    let root = fs::File::open(volume)?;
    let how = |flags| {
        OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS)
    };
    match openat2(root.as_fd(), sub, how(OFlag::O_PATH)) {
        Ok(fd) => return Ok(fd),
        Err(Errno::ENOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let mut done = PathBuf::new();
    let mut parent: OwnedFd = root.into();
    for part in sub.components() {
        let Component::Normal(name) = part else { continue };
        match mkdirat(parent.as_fd(), name, Mode::from_bits_truncate(0o750)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(e) => return Err(e.into()),
        }
        done.push(name);
        let root = fs::File::open(volume)?;
        parent = openat2(root.as_fd(), &done, how(OFlag::O_PATH | OFlag::O_DIRECTORY))?;
    }
    Ok(parent)
}

/// Binds `sub` of `volume` to `point`, so that nobody who can write the volume can later swap what a
/// container is given.
pub(crate) fn bind_sub_path(volume: &Path, sub: &str, point: &Path) -> io::Result<()> {
    let sub = Path::new(sub);
    if sub.is_absolute() || sub.components().any(|c| matches!(c, Component::ParentDir)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "subPath must be relative and without \"..\"",
        ));
    }
    let fd = open_beneath(volume, sub)?;
    let source = format!("/proc/self/fd/{}", fd.as_raw_fd());
    if is_mount_point(point)? {
        return Ok(());
    }
    if let Some(parent) = point.parent() {
        fs::create_dir_all(parent)?;
    }
    if fs::metadata(&source)?.is_dir() {
        fs::create_dir_all(point)?;
    } else {
        fs::OpenOptions::new().create(true).append(true).open(point)?;
    }
    mount(Some(source.as_str()), point, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(tempfile::TempDir);
    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = remove_tree(self.0.path());
        }
    }

    #[test]
    fn tmpfs_is_mounted_once_and_goes_with_the_tree() {
        let tree = Tree(tempfile::tempdir().unwrap());
        let dir = tree.0.path().join("a b");
        if ensure_tmpfs(&dir, Some(1 << 20)).is_err() {
            return; // not root
        }
        ensure_tmpfs(&dir, Some(1 << 20)).unwrap();
        assert_eq!(mounts_below(tree.0.path()).unwrap(), std::slice::from_ref(&dir));
        remove_tree(&dir).unwrap();
        assert!(!dir.exists() && mounts_below(tree.0.path()).unwrap().is_empty());
    }

    #[test]
    fn sub_paths_stay_beneath_their_volume() {
        let tree = Tree(tempfile::tempdir().unwrap());
        let volume = tree.0.path().join("v");
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("f"), "x").unwrap();
        std::os::unix::fs::symlink("/etc", volume.join("escape")).unwrap();
        std::os::unix::fs::symlink("f", volume.join("inside")).unwrap();
        let point = tree.0.path().join("p");
        assert!(bind_sub_path(&volume, "escape/passwd", &point).is_err());
        assert!(bind_sub_path(&volume, "../v", &point).is_err());
        assert!(bind_sub_path(&volume, "/etc", &point).is_err());
        if bind_sub_path(&volume, "inside", &point).is_err() {
            return; // not root
        }
        assert_eq!(fs::read_to_string(&point).unwrap(), "x");
        bind_sub_path(&volume, "new/dir", &tree.0.path().join("q")).unwrap();
        assert!(volume.join("new/dir").is_dir());
    }
}
