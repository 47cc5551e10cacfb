//! Regular files by a path of which only the last part is untrusted, and private directories.

use crate::dir::{by_descriptor, require_regular};
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// Opens the regular file at `path` for reading. A link, a FIFO or a device there is an error: nothing is opened
/// that could block or act.
///
/// The directory of `path` is trusted. The file may be a mount point: a container's file is often bound there.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let found = openat2(AT_FDCWD, path, how)?;
    require_regular(&found, path)?;
    File::open(by_descriptor(&found))
}

/// Reads the regular file at `path`, at most its first `limit` bytes.
pub fn read_head(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut data = Vec::new();
    open_regular(path)?.take(limit).read_to_end(&mut data)?;
    Ok(data)
}

/// Reads the regular file at `path`, at most its last `limit` bytes.
pub fn read_tail(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut file = open_regular(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(limit)))?;
    let mut data = Vec::new();
    // The file may grow meanwhile.
    file.take(limit).read_to_end(&mut data)?;
    Ok(data)
}

/// Makes the directory `path` and its missing parents for root alone. One that exists is closed to others, too:
/// an earlier version may have made it.
pub fn private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let meta = std::fs::symlink_metadata(path)?;
    // An administrator may have put the directory elsewhere with a link; the directory behind it is then meant.
    let mode = if meta.is_symlink() { std::fs::metadata(path)?.mode() } else { meta.mode() };
    if mode & 0o077 != 0 {
        std::fs::set_permissions(path, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_regular_files_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::write(path("file"), "0123456789").unwrap();
        std::os::unix::fs::symlink(path("file"), path("link")).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read_head(&path("file"), 4).unwrap(), b"0123");
        assert_eq!(read_tail(&path("file"), 4).unwrap(), b"6789");
        assert_eq!(read_tail(&path("file"), 400).unwrap(), b"0123456789");
        for name in ["link", "pipe", "."] {
            assert!(open_regular(&path(name)).is_err(), "{name}");
        }
        assert!(open_regular(Path::new("/dev/null")).is_err());
    }

    #[test]
    fn private_directories_are_repaired() {
        let root = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let new = root.path().join("a/b");
        private_dir(&new).unwrap();
        assert_eq!((mode(&new), mode(&root.path().join("a"))), (0o700, 0o700));
        fs::set_permissions(&new, Permissions::from_mode(0o755)).unwrap();
        private_dir(&new).unwrap();
        assert_eq!(mode(&new), 0o700);
    }
}
