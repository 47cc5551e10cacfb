//! A directory held by descriptor.

use nix::errno::Errno;
use nix::fcntl::{
    AT_FDCWD, AtFlags, OFlag, OpenHow, RenameFlags, ResolveFlag, openat2, readlinkat, renameat2,
};
use nix::sys::stat::{FileStat, Mode, fchmod, fstat, fstatat, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, fchownat, symlinkat, unlinkat};
use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

/// Attempts for a look-up that the kernel asks to repeat because names moved meanwhile.
const ATTEMPTS: usize = 16;

/// A directory held by descriptor. Every name is resolved beneath it, without following a link and without
/// crossing into another mount.
#[derive(Debug)]
pub struct Dir(OwnedFd);

impl Dir {
    /// Opens a directory by a path that only root can write. The last part must not be a link.
    pub fn open(path: &Path) -> io::Result<Self> {
        let how =
            OpenHow::new().flags(DIRECTORY | OFlag::O_NOFOLLOW).resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
        Ok(Self(openat2(AT_FDCWD, path, how)?))
    }

    /// Opens the directory at `path` beneath this one.
    pub fn open_dir(&self, path: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self(self.resolve(relative(path.as_ref())?, DIRECTORY)?))
    }

    /// Makes the directory `name`, which must not exist, with exactly this mode.
    pub fn create_dir(&self, name: impl AsRef<OsStr>, mode: u32) -> io::Result<Self> {
        let name = plain(name.as_ref())?;
        mkdirat(self.0.as_fd(), name, Mode::S_IRWXU)?;
        let made = Self(self.resolve(Path::new(name), DIRECTORY)?);
        made.set_mode(mode)?;
        Ok(made)
    }

    /// Opens the directory `name`, making it when it is missing.
    pub fn ensure_dir(&self, name: impl AsRef<OsStr>, mode: u32) -> io::Result<Self> {
        match self.create_dir(name.as_ref(), mode) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => self.open_dir(name.as_ref()),
            other => other,
        }
    }

    /// Makes the file `name`, which must not exist, for writing, readable by nobody else.
    pub fn create_file(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
        let how = confined(flags).mode(Mode::S_IRUSR | Mode::S_IWUSR);
        Ok(File::from(openat2(self.0.as_fd(), plain(name.as_ref())?, how)?))
    }

    /// Opens the regular file at `path` for reading. Anything else there is an error.
    pub fn open_file(&self, path: impl AsRef<Path>) -> io::Result<File> {
        File::open(by_descriptor(&self.regular(relative(path.as_ref())?)?))
    }

    /// Finds the regular file at `path`. A FIFO blocks on open and a device acts on it, so this only gets a
    /// handle (`O_PATH`); the caller opens the file through it.
    fn regular(&self, path: &Path) -> io::Result<OwnedFd> {
        let found = self.resolve(path, OFlag::O_PATH)?;
        require_regular(&found, path)?;
        Ok(found)
    }

    /// Reads the regular file at `path`, at most `limit` bytes of it.
    pub fn read(&self, path: impl AsRef<Path>, limit: u64) -> io::Result<Vec<u8>> {
        let mut data = Vec::new();
        self.open_file(path)?.take(limit).read_to_end(&mut data)?;
        Ok(data)
    }

    /// Writes `data` to the regular file `name`, which must exist, in place of its content.
    pub fn write_file(&self, name: impl AsRef<OsStr>, data: &[u8]) -> io::Result<()> {
        let found = self.regular(Path::new(plain(name.as_ref())?))?;
        File::options().write(true).truncate(true).open(by_descriptor(&found))?.write_all(data)
    }

    /// Describes `name` itself, not the target of a link.
    pub fn stat(&self, name: impl AsRef<OsStr>) -> io::Result<FileStat> {
        Ok(fstatat(self.0.as_fd(), plain(name.as_ref())?, AtFlags::AT_SYMLINK_NOFOLLOW)?)
    }

    /// Describes the directory itself.
    pub fn stat_self(&self) -> io::Result<FileStat> {
        Ok(fstat(&self.0)?)
    }

    /// Describes the entry at `path` beneath this directory; a link on the way to it is an error.
    pub fn stat_path(&self, path: impl AsRef<Path>) -> io::Result<FileStat> {
        let path = relative(path.as_ref())?;
        // Opened with O_NOFOLLOW, a link itself is described; RESOLVE_NO_SYMLINKS would refuse it.
        let how = confined(OFlag::O_PATH);
        match (path.parent().filter(|above| !above.as_os_str().is_empty()), path.file_name()) {
            (Some(above), Some(name)) => {
                let above = openat2(self.0.as_fd(), above, how)?;
                Ok(fstatat(above.as_fd(), name, AtFlags::AT_SYMLINK_NOFOLLOW)?)
            }
            _ => self.stat(path),
        }
    }

    pub fn is_dir(&self, name: impl AsRef<OsStr>) -> io::Result<bool> {
        Ok(self.stat(name)?.st_mode & file_type::TYPE == file_type::DIRECTORY)
    }

    pub fn read_link(&self, name: impl AsRef<OsStr>) -> io::Result<PathBuf> {
        Ok(readlinkat(self.0.as_fd(), plain(name.as_ref())?)?.into())
    }

    /// Makes a link `name` with the text `target`; nothing is resolved.
    pub fn symlink(&self, target: impl AsRef<Path>, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(symlinkat(target.as_ref(), self.0.as_fd(), plain(name.as_ref())?)?)
    }

    /// Renames within this directory, replacing the entry at `to`.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        let (from, to) = (plain(from.as_ref())?, plain(to.as_ref())?);
        Ok(renameat2(self.0.as_fd(), from, self.0.as_fd(), to, RenameFlags::empty())?)
    }

    /// Moves `name` to `to` in another directory, where nothing of that name may be.
    pub(crate) fn move_to(&self, name: &OsStr, other: &Self, to: &OsStr) -> io::Result<()> {
        let (name, to) = (plain(name)?, plain(to)?);
        Ok(renameat2(self.0.as_fd(), name, other.0.as_fd(), to, RenameFlags::RENAME_NOREPLACE)?)
    }

    /// Removes anything but a directory.
    pub fn remove_file(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(unlinkat(self.0.as_fd(), plain(name.as_ref())?, UnlinkatFlags::NoRemoveDir)?)
    }

    /// Removes an empty directory.
    pub fn remove_dir(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(unlinkat(self.0.as_fd(), plain(name.as_ref())?, UnlinkatFlags::RemoveDir)?)
    }

    /// The names in this directory, without `.` and `..`. Fails when there are more than `limit`.
    pub fn names(&self, limit: usize) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in self.entries()?.iter() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            if names.len() == limit {
                return Err(io::Error::other(format!("more than {limit} entries")));
            }
            names.push(OsString::from_vec(name.to_vec()));
        }
        Ok(names)
    }

    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        Ok(fchmod(self.0.as_fd(), Mode::from_bits_truncate(mode))?)
    }

    pub fn set_owner(&self, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
        Ok(fchown(self.0.as_fd(), user.map(Uid::from_raw), group.map(Gid::from_raw))?)
    }

    /// Gives `name` to a group and adds `bits` to its mode. A link is given itself and keeps its mode; a mount point is
    /// another file system's and is left alone.
    pub fn give_to_group(&self, name: impl AsRef<OsStr>, group: u32, bits: u32) -> io::Result<()> {
        let found = match self.resolve(Path::new(plain(name.as_ref())?), OFlag::O_PATH) {
            Ok(found) => found,
            Err(e) if matches!(e.kind(), io::ErrorKind::CrossesDevices | io::ErrorKind::NotFound) => {
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        fchownat(&found, "", None, Some(Gid::from_raw(group)), AtFlags::AT_EMPTY_PATH)?;
        // After the change of owner, which takes the right to act as the owner away from a program.
        let mode = fstat(&found)?.st_mode;
        if mode & file_type::TYPE == file_type::LINK {
            return Ok(());
        }
        std::fs::set_permissions(by_descriptor(&found), Permissions::from_mode(mode & 0o7777 | bits))
    }

    /// Another descriptor of the same directory.
    pub fn try_clone(&self) -> io::Result<Self> {
        Self::from_descriptor(self)
    }

    /// The directory above, wherever that is now: a directory can be moved.
    pub(crate) fn parent(&self) -> io::Result<Self> {
        Ok(Self(nix::fcntl::openat(self.0.as_fd(), "..", DIRECTORY | OFlag::O_NOFOLLOW, Mode::empty())?))
    }

    /// Another descriptor of the same directory.
    pub(crate) fn from_descriptor(other: &Self) -> io::Result<Self> {
        Ok(Self(other.0.try_clone()?))
    }

    /// A descriptor of its own for reading entries: an iterator moves the descriptor's position.
    pub(crate) fn entries(&self) -> io::Result<nix::dir::Dir> {
        Ok(nix::dir::Dir::from_fd(openat2(self.0.as_fd(), ".", confined(DIRECTORY))?)?)
    }

    /// Opens whatever is at `path` beneath this directory.
    fn resolve(&self, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
        for _ in 0..ATTEMPTS {
            match openat2(self.0.as_fd(), path, confined(flags)) {
                Err(Errno::EAGAIN) => {}
                other => return Ok(other?),
            }
        }
        Err(Errno::EAGAIN.into())
    }
}

impl From<OwnedFd> for Dir {
    /// A directory that was opened for reading.
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl From<Dir> for OwnedFd {
    fn from(dir: Dir) -> Self {
        dir.0
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// File types in the words of `stat(2)`.
mod file_type {
    use nix::sys::stat::SFlag;
    pub const TYPE: u32 = SFlag::S_IFMT.bits();
    pub const REGULAR: u32 = SFlag::S_IFREG.bits();
    pub const DIRECTORY: u32 = SFlag::S_IFDIR.bits();
    pub const LINK: u32 = SFlag::S_IFLNK.bits();
}

fn confined(flags: OFlag) -> OpenHow {
    OpenHow::new().flags(flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW).resolve(
        ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_MAGICLINKS
            | ResolveFlag::RESOLVE_NO_XDEV,
    )
}

/// A path by which this process opens the file of `fd` again.
pub(crate) fn by_descriptor(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Fails when `found`, opened without access, is anything but a regular file.
pub(crate) fn require_regular(found: &OwnedFd, path: &Path) -> io::Result<()> {
    if fstat(found)?.st_mode & file_type::TYPE == file_type::REGULAR {
        return Ok(());
    }
    let text = format!("{} is not a regular file", path.display());
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// One part of a path.
fn plain(name: &OsStr) -> io::Result<&OsStr> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} is not a plain file name"),
        ));
    }
    Ok(name)
}

/// A path that names something beneath a directory.
fn relative(path: &Path) -> io::Result<&Path> {
    if path.as_os_str().is_empty() || !path.components().all(|part| matches!(part, Component::Normal(_))) {
        let text = format!("{} does not stay beneath its directory", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(path)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_not_followed() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret"), "s").unwrap();
        let inside = tempfile::tempdir().unwrap();
        symlink(outside.path(), inside.path().join("dir")).unwrap();
        symlink(outside.path().join("secret"), inside.path().join("file")).unwrap();
        let dir = Dir::open(inside.path()).unwrap();
        assert!(dir.open_dir("dir").is_err());
        assert!(dir.open_file("dir/secret").is_err());
        assert!(dir.open_file("file").is_err());
        assert!(dir.create_file("file").is_err(), "a dangling or living link is not written through");
        assert!(dir.ensure_dir("dir", 0o755).is_err());
        assert!(Dir::open(&inside.path().join("dir")).is_err());
    }

    #[test]
    fn names_stay_beneath() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Dir::open(dir.path()).unwrap();
        for name in ["", ".", "..", "a/b", "/etc"] {
            assert!(dir.create_dir(name, 0o755).is_err(), "{name}");
            assert!(dir.remove_file(name).is_err(), "{name}");
        }
        for path in ["", "..", "a/../..", "/etc/passwd"] {
            assert!(dir.open_file(path).is_err(), "{path}");
        }
    }

    #[test]
    fn only_regular_files_are_opened() {
        let root = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&root.path().join("pipe"), Mode::S_IRWXU).unwrap();
        fs::write(root.path().join("file"), "0123456789").unwrap();
        let dir = Dir::open(root.path()).unwrap();
        let refused = dir.open_file("pipe").unwrap_err().to_string();
        assert_eq!(refused, "pipe is not a regular file");
        assert_eq!(dir.read("file", 4).unwrap(), b"0123");
    }

    #[test]
    fn a_listing_is_bounded() {
        let root = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            fs::write(root.path().join(name), "").unwrap();
        }
        let dir = Dir::open(root.path()).unwrap();
        assert_eq!(dir.names(3).unwrap().len(), 3);
        assert!(dir.names(2).is_err());
    }
}
