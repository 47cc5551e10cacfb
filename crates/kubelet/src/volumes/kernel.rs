//! Mounts the kubelet makes itself: tmpfs volumes and bind mounts of sub-paths.

use ferrite_hostfs::mounts;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, fchmod, fstat, mkdirat};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

const DIRECTORY: OFlag =
    OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// The options of a new tmpfs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tmpfs {
    pub mode: u32,
    pub group: Option<u32>,
    /// In bytes; the kernel's default when absent.
    pub size: Option<i64>,
}

/// A memory file system at `dir`; one that is there already stays. Its content is never written to swap, where the kernel
/// knows of that: it may be secret.
pub(crate) fn ensure_tmpfs(dir: &Path, wanted: Tmpfs) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    if mounts::is_mount_point(dir)? {
        return Ok(());
    }
    let mut options = format!("mode=0{:o}", wanted.mode);
    if let Some(group) = wanted.group {
        options.push_str(&format!(",gid={group}"));
    }
    if let Some(size) = wanted.size {
        options.push_str(&format!(",size={size}"));
    }
    let mounted = |options: &str| {
        mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(options))
    };
    match mounted(&format!("{options},noswap")) {
        // Kernels before 6.4 do not know the option, and in a user namespace nobody may set it.
        Err(Errno::EINVAL | Errno::EPERM) => mounted(&options)?,
        done => done?,
    }
    Ok(())
}

/// A file system of huge pages at `dir`; one that is there already stays.
pub(crate) fn ensure_huge_pages(dir: &Path, options: &str, group: Option<u32>) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    if mounts::is_mount_point(dir)? {
        return Ok(());
    }
    let options = match group {
        Some(group) => format!("{options},gid={group}"),
        None => options.to_owned(),
    };
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("nodev"), dir, Some("hugetlbfs"), flags, Some(options.as_str()))?;
    Ok(())
}

/// Unmounts everything at or below `dir`, then removes it. Nothing is removed while something is mounted.
pub(crate) fn remove_tree(dir: &Path) -> io::Result<()> {
    mounts::unmount_below(dir)?;
    ferrite_hostfs::remove_tree(dir)
}

/// Opens `sub` beneath `volume`, never leaving it through a link, and makes missing directories, which get the
/// mode of the volume, as upstream.
fn open_beneath(volume: &Path, sub: &Path) -> io::Result<OwnedFd> {
    // Opened without access: a FIFO or a device of a hostPath volume is left alone. The path may have links, which
    // are the node's own.
    let place = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC);
    let root = openat2(AT_FDCWD, volume, place)?;
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
    let mode = Mode::from_bits_truncate(fstat(&root)?.st_mode);
    let mut done = PathBuf::new();
    let mut parent = root.try_clone()?;
    for part in sub.components() {
        let Component::Normal(name) = part else { continue };
        match mkdirat(parent.as_fd(), name, Mode::S_IRWXU) {
            Ok(()) => {
                let made = openat(parent.as_fd(), name, DIRECTORY, Mode::empty())?;
                fchmod(&made, mode)?;
            }
            Err(Errno::EEXIST) => {}
            Err(e) => return Err(e.into()),
        }
        done.push(name);
        parent = openat2(root.as_fd(), &done, how(OFlag::O_PATH | OFlag::O_DIRECTORY))?;
    }
    Ok(parent)
}

/// Binds `sub` of `volume` to `point`, so that a writer of the volume cannot later exchange the container's
/// files.
///
/// The mounts below `sub` are not part of it, as upstream, and the new mount is private: unmounting it reaches no
/// mount of the host.
pub(crate) fn bind_sub_path(volume: &Path, sub: &str, point: &Path) -> io::Result<()> {
    let sub = Path::new(sub);
    if sub.is_absolute() || sub.components().any(|c| matches!(c, Component::ParentDir)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "subPath must be relative and without \"..\"",
        ));
    }
    let fd = open_beneath(volume, sub)?;
    leave_other(&fd, point)?;
    bind(&fd, point).map(drop)
}

/// Unmounts and removes `point` if it shows another file than `fd`. A restarted container gets the file that is at its
/// sub-path now, as upstream: one of a ConfigMap is replaced when it changes.
fn leave_other(fd: &OwnedFd, point: &Path) -> io::Result<()> {
    let shown = match open_point(point) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => fstat(opened?)?,
    };
    let wanted = fstat(fd)?;
    if (shown.st_dev, shown.st_ino) == (wanted.st_dev, wanted.st_ino) {
        return Ok(());
    }
    mounts::unmount_below(point)?;
    // A directory cannot be the place of a file, and the other way round.
    ferrite_hostfs::remove_tree(point)
}

fn open_point(point: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(openat2(AT_FDCWD, point, OpenHow::new().flags(flags))?)
}

/// Binds the file of `fd` at `point`, without the mounts below it, as a private mount. Returns true if it
/// was not mounted yet.
pub(crate) fn bind(fd: &OwnedFd, point: &Path) -> io::Result<bool> {
    if mounts::is_mount_point(point)? {
        return Ok(false);
    }
    if let Some(parent) = point.parent() {
        fs::create_dir_all(parent)?;
    }
    if SFlag::from_bits_truncate(fstat(fd)?.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFDIR {
        fs::create_dir_all(point)?;
    } else {
        fs::OpenOptions::new().create(true).append(true).open(point)?;
    }
    let source = format!("/proc/self/fd/{}", fd.as_raw_fd());
    mount(Some(source.as_str()), point, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    if let Err(e) = mount(None::<&str>, point, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>) {
        let _ = umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        return Err(e.into());
    }
    Ok(true)
}

/// Opens a place on the node without access: nothing that is there can block or act.
pub(crate) fn open_place(path: &Path) -> io::Result<OwnedFd> {
    Ok(openat2(AT_FDCWD, path, OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Tree(tempfile::TempDir);
    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = remove_tree(self.0.path());
        }
    }

    fn tmpfs(size: i64) -> Tmpfs {
        Tmpfs { mode: 0o755, group: None, size: Some(size) }
    }

    #[test]
    fn tmpfs_is_mounted_once_and_goes_with_the_tree() {
        let tree = Tree(tempfile::tempdir().unwrap());
        let dir = tree.0.path().join("a b");
        ensure_tmpfs(&dir, tmpfs(1 << 20)).expect("this test needs root");
        ensure_tmpfs(&dir, tmpfs(1 << 20)).unwrap();
        assert_eq!(mounts::below(tree.0.path()).unwrap(), std::slice::from_ref(&dir));
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o7777, 0o755);
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        if crate::container::sysctl::kernel_version(&release) >= (6, 4) {
            let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let line = table.lines().find(|line| line.contains(tree.0.path().to_str().unwrap())).unwrap();
            assert!(line.contains("noswap"), "{line}");
        }
        remove_tree(&dir).unwrap();
        assert!(!dir.exists() && mounts::below(tree.0.path()).unwrap().is_empty());
    }

    #[test]
    fn sub_paths_stay_beneath_their_volume() {
        let tree = Tree(tempfile::tempdir().unwrap());
        let volume = tree.0.path().join("v");
        fs::create_dir(&volume).unwrap();
        fs::set_permissions(&volume, fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(volume.join("f"), "x").unwrap();
        std::os::unix::fs::symlink("/etc", volume.join("escape")).unwrap();
        std::os::unix::fs::symlink("f", volume.join("inside")).unwrap();
        let point = tree.0.path().join("p");
        assert!(bind_sub_path(&volume, "escape/passwd", &point).is_err());
        assert!(bind_sub_path(&volume, "../v", &point).is_err());
        assert!(bind_sub_path(&volume, "/etc", &point).is_err());
        bind_sub_path(&volume, "inside", &point).expect("this test needs root");
        assert_eq!(fs::read_to_string(&point).unwrap(), "x");
        bind_sub_path(&volume, "new/dir", &tree.0.path().join("q")).unwrap();
        let made = fs::metadata(volume.join("new/dir")).unwrap();
        assert_eq!(made.permissions().mode() & 0o7777, 0o777, "as the volume");
    }

    /// A FIFO as the volume itself must not block the setup of the pod.
    #[test]
    fn a_fifo_is_no_volume() {
        let tree = Tree(tempfile::tempdir().unwrap());
        let volume = tree.0.path().join("v");
        nix::unistd::mkfifo(&volume, Mode::S_IRWXU).unwrap();
        assert!(bind_sub_path(&volume, "x", &tree.0.path().join("p")).is_err());
    }

    #[test]
    fn a_sub_path_is_what_is_there_now() {
        let tree = Tree(tempfile::tempdir().expect("this test needs root"));
        let (volume, point) = (tree.0.path().join("v"), tree.0.path().join("p"));
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("f"), "old").unwrap();
        bind_sub_path(&volume, "f", &point).unwrap();
        fs::write(volume.join("new"), "new").unwrap();
        fs::rename(volume.join("new"), volume.join("f")).unwrap();
        assert_eq!(fs::read_to_string(&point).unwrap(), "old", "running containers keep their file");
        for _ in 0..2 {
            bind_sub_path(&volume, "f", &point).unwrap();
            assert_eq!(fs::read_to_string(&point).unwrap(), "new");
        }
        assert_eq!(mounts::below(tree.0.path()).unwrap().len(), 1);
        fs::remove_file(volume.join("f")).unwrap();
        fs::create_dir_all(volume.join("f/d")).unwrap();
        bind_sub_path(&volume, "f", &point).unwrap();
        assert!(point.join("d").is_dir());
    }

    #[test]
    fn mounts_of_the_host_below_a_sub_path_survive_its_removal() {
        let tree = Tree(tempfile::tempdir().unwrap());
        let (host, pod) = (tree.0.path().join("host"), tree.0.path().join("pod"));
        let submount = host.join("data/disk");
        fs::create_dir_all(&submount).unwrap();
        // A shared tree, as systemd makes the root of most machines.
        ensure_tmpfs(&host, tmpfs(1 << 20)).expect("this test needs root");
        let shared = MsFlags::MS_SHARED | MsFlags::MS_REC;
        mount(None::<&str>, &host, None::<&str>, shared, None::<&str>).unwrap();
        ensure_tmpfs(&submount, tmpfs(1 << 20)).unwrap();
        fs::write(submount.join("kept"), "x").unwrap();
        bind_sub_path(&host, "data", &pod.join("volume-subpaths/v/c/0")).unwrap();
        remove_tree(&pod).unwrap();
        assert!(!pod.exists());
        assert_eq!(fs::read_to_string(submount.join("kept")).unwrap(), "x");
        assert!(mounts::is_mount_point(&submount).unwrap());
    }
}
