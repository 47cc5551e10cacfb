//! The mount table, and unmounting everything below a directory.

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Mount points at or below `dir`, in the order in which they can be unmounted: the last one mounted first.
pub fn below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let dir = match std::fs::canonicalize(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mut found: Vec<PathBuf> = points(&table).filter(|point| point.starts_with(&dir)).collect();
    found.reverse();
    Ok(found)
}

/// Returns true if something is mounted at exactly `dir`.
pub fn is_mount_point(dir: &Path) -> io::Result<bool> {
    let Ok(canonical) = std::fs::canonicalize(dir) else { return Ok(false) };
    Ok(below(dir)?.contains(&canonical))
}

/// Returns true if something is mounted at exactly `point`, without asking the mounted file system: one
/// that does not answer blocks nobody. The directory of `point` must be on the host's own file systems.
pub fn is_mounted_at(point: &Path) -> io::Result<bool> {
    let (Some(parent), Some(name)) = (point.parent(), point.file_name()) else { return Ok(false) };
    let parent = match std::fs::canonicalize(parent) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let point = parent.join(name);
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(points(&table).any(|found| found == point))
}

/// Unmounts everything that is mounted at exactly `point`; nothing there is not an error.
pub fn unmount_at(point: &Path) -> io::Result<()> {
    while is_mounted_at(point)? {
        unmount(point)?;
    }
    Ok(())
}

/// Unmounts everything at or below `dir`. Fails when something is still mounted there afterwards.
///
/// Each mount is made private first: an unmount below a shared mount would reach the mount's peers, among them the
/// host's own.
pub fn unmount_below(dir: &Path) -> io::Result<()> {
    for point in below(dir)? {
        unmount(&point)?;
    }
    match below(dir)?.first() {
        None => Ok(()),
        Some(point) => Err(io::Error::other(format!("{} is still mounted", point.display()))),
    }
}

fn unmount(point: &Path) -> io::Result<()> {
    let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
    match mount(None::<&str>, point, None::<&str>, private, None::<&str>) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(e) => return Err(failed(point, e)),
    }
    match umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(e) => Err(failed(point, e)),
    }
}

fn failed(point: &Path, source: Errno) -> io::Error {
    let source = io::Error::from(source);
    io::Error::new(source.kind(), format!("cannot unmount {}: {source}", point.display()))
}

/// The mount points of a mountinfo table, in its order.
fn points(table: &[u8]) -> impl Iterator<Item = PathBuf> + '_ {
    let lines = table.split(|byte| *byte == b'\n');
    lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4)).map(unescape)
}

/// mountinfo writes blanks, tabs, newlines and backslashes as three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => {
                out.push(first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out).into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone() {
        let table =
            b"36 35 98:0 / /mnt/a\\040b\\134c rw - ext4 /dev/root rw\n37 35 98:0 / /x\\09 rw - t t rw\n";
        let found: Vec<PathBuf> = points(table).collect();
        assert_eq!(found, [PathBuf::from("/mnt/a b\\c"), PathBuf::from("/x\\09")]);
    }

    #[test]
    fn mounts_in_a_directory_with_a_blank_are_found_and_unmounted() {
        let root = tempfile::tempdir().unwrap();
        let point = root.path().join("a b");
        std::fs::create_dir(&point).unwrap();
        for _ in 0..2 {
            mount(Some("tmpfs"), &point, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        }
        assert!(is_mount_point(&point).unwrap() && !is_mount_point(root.path()).unwrap());
        assert!(is_mounted_at(&point).unwrap() && !is_mounted_at(&root.path().join("none/x")).unwrap());
        assert_eq!(below(root.path()).unwrap().len(), 2);
        unmount_at(&point).unwrap();
        assert!(!is_mounted_at(&point).unwrap());
        mount(Some("tmpfs"), &point, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        unmount_below(root.path()).unwrap();
        assert!(below(root.path()).unwrap().is_empty());
    }
}
