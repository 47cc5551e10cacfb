//! Turns a layer's tar stream into a directory that overlayfs can use as a lower layer.
//!
//! Every name is resolved beneath the layer's root with symlinks forbidden, so an entry can only ever touch
//! files of earlier entries of the same layer. Whiteouts get overlayfs's form: a
//! character device 0:0 hides a name, the attribute `trusted.overlay.opaque` hides a directory's lower
//! content.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{
    FchmodatFlags, Mode, SFlag, UtimensatFlags, fchmod, fchmodat, futimens, makedev, mkdirat, mknodat,
    utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, fchownat, linkat, symlinkat, unlinkat};

use super::ImageError;
use super::tar_reader::{Entry, Kind, TarReader, read_error};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Notes of the union filesystem that invented whiteouts; they say nothing about the image.
const AUFS_NOTES: &[u8] = b".wh..wh.";
const OPAQUE_XATTR: &[u8] = b"trusted.overlay.opaque";
const MAX_XATTR: usize = 64 << 10;
/// Bytes of the paths of all directories of a layer, which are kept in memory until its end.
const MAX_DIRECTORY_NAMES: u64 = 64 << 20;

/// Limits for the contents of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the uncompressed archive.
    pub bytes: u64,
    /// Files, directories, links and devices.
    pub entries: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 4 << 20 }
    }
}

/// The size of an unpacked layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extracted {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

/// Fails once more than `left` bytes were read: a small file must not unpack to a full disk.
pub(crate) struct LimitedReader<R> {
    inner: R,
    left: u64,
    limit: u64,
}

impl<R: Read> LimitedReader<R> {
    pub(crate) fn new(inner: R, limit: u64) -> Self {
        Self { inner, left: limit, limit }
    }
}

impl<R: Read> Read for LimitedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.left = self
            .left
            .checked_sub(read as u64)
            .ok_or(ImageError::Limit { what: "unpacked size in bytes", limit: self.limit })?;
        Ok(read)
    }
}

/// Unpacks `archive` into the empty directory `root` and reads it to its end.
pub(crate) fn extract(archive: impl Read, root: &Path, limits: &Limits) -> Result<Extracted, ImageError> {
    let directory = File::open(root).map_err(ImageError::io("open", root))?;
    let mut extractor = Extractor {
        root: OwnedFd::from(directory),
        parent: None,
        times: HashMap::new(),
        remembered: 0,
        done: Extracted::default(),
        buffer: vec![0; 256 << 10],
    };
    let mut reader = TarReader::new(LimitedReader::new(archive, limits.bytes));
    let mut entries = 0;
    while let Some(entry) = reader.next()? {
        entries += 1;
        if entries > limits.entries {
            return Err(ImageError::Limit { what: "number of entries", limit: limits.entries });
        }
        extractor.entry(&entry, &mut reader)?;
    }
    extractor.finish()?;
    // The diff id covers the bytes behind the end marker too.
    io::copy(&mut reader.into_inner(), &mut io::sink()).map_err(read_error)?;
    Ok(extractor.done)
}

struct Extractor {
    root: OwnedFd,
    /// The directory the last entry was in: entries come grouped by directory.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Directories get their times last, because making their content changes them.
    times: HashMap<Vec<u8>, (i64, u32)>,
    /// Bytes of the paths in `times`.
    remembered: u64,
    done: Extracted,
    buffer: Vec<u8>,
}

impl Extractor {
    fn entry(&mut self, entry: &Entry, content: &mut impl Read) -> Result<(), ImageError> {
        let path = clean(&entry.path)?;
        let (parent, name) = split(&path);
        if name.is_empty() {
            return match entry.kind {
                Kind::Directory => self.dress_directory(&path, entry),
                _ => Err(hostile(&entry.path, "only a directory can be the root")),
            };
        }
        if parent.split(|byte| *byte == b'/').any(|component| component.starts_with(WHITEOUT)) {
            return Err(hostile(&entry.path, "a whiteout has no content"));
        }
        self.enter(parent)?;
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            return self.whiteout(entry, name, hidden);
        }
        let fail = |errno: Errno| ImageError::Io { what: "unpack", path: shown(&path), source: errno.into() };
        match entry.kind {
            Kind::Directory => return self.directory(&path, name, entry),
            Kind::File => {
                self.vacate(name).map_err(fail)?;
                self.file(&path, name, entry, content)?;
            }
            Kind::HardLink => {
                // The link may replace its own target's name only after the target was found.
                let target = clean(&entry.link)?;
                let (target_parent, target_name) = split(&target);
                if target_name.is_empty() || target_name.starts_with(WHITEOUT) {
                    return Err(hostile(&entry.path, "its link target is no file of this layer"));
                }
                if target == path {
                    return Ok(());
                }
                let target_parent =
                    self.open_directory(target_parent).map_err(|errno| link_error(entry, errno))?;
                self.vacate(name).map_err(fail)?;
                let (from, to) = (os(target_name), os(name));
                linkat(&target_parent, from, self.here(), to, AtFlags::empty())
                    .map_err(|errno| link_error(entry, errno))?;
                return Ok(());
            }
            Kind::Symlink => {
                if entry.link.is_empty() || entry.link.contains(&0) {
                    return Err(hostile(&entry.path, "its link target is empty or has a zero byte"));
                }
                self.vacate(name).map_err(fail)?;
                symlinkat(os(&entry.link), self.here(), os(name)).map_err(fail)?;
                self.own(name, entry).map_err(fail)?;
                self.xattrs(name, entry)?;
                self.time(name, entry).map_err(fail)?;
            }
            Kind::Char | Kind::Block | Kind::Fifo => {
                let (major, minor) = entry.device;
                if entry.kind == Kind::Char && (major, minor) == (0, 0) {
                    return Err(hostile(&entry.path, "device 0:0 is a whiteout to overlayfs"));
                }
                let kind = match entry.kind {
                    Kind::Char => SFlag::S_IFCHR,
                    Kind::Block => SFlag::S_IFBLK,
                    _ => SFlag::S_IFIFO,
                };
                self.vacate(name).map_err(fail)?;
                let device = makedev(major.into(), minor.into());
                mknodat(self.here(), os(name), kind, Mode::empty(), device).map_err(fail)?;
                self.own(name, entry).map_err(fail)?;
                let mode = Mode::from_bits_truncate(entry.mode);
                fchmodat(self.here(), os(name), mode, FchmodatFlags::FollowSymlink).map_err(fail)?;
                self.xattrs(name, entry)?;
                self.time(name, entry).map_err(fail)?;
            }
        }
        self.done.inodes += 1;
        Ok(())
    }

    fn file(
        &mut self,
        path: &[u8],
        name: &[u8],
        entry: &Entry,
        content: &mut impl Read,
    ) -> Result<(), ImageError> {
        let fail = |errno: Errno| ImageError::Io { what: "unpack", path: shown(path), source: errno.into() };
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let how = OpenHow::new().flags(flags).mode(Mode::S_IRUSR | Mode::S_IWUSR).resolve(resolve());
        let mut file = File::from(openat2(self.here(), os(name), how).map_err(fail)?);
        let mut left = entry.size;
        while left > 0 {
            let want = self.buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let read = content.read(&mut self.buffer[..want]).map_err(read_error)?;
            if read == 0 {
                return Err(ImageError::invalid(shown(path).display().to_string(), "its content ends early"));
            }
            file.write_all(&self.buffer[..read]).map_err(ImageError::io("write", shown(path)))?;
            left -= read as u64;
        }
        self.done.bytes += entry.size;
        fchown(&file, Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid))).map_err(fail)?;
        // A change of owner clears capabilities and set-uid bits, so they follow it.
        self.xattrs(name, entry)?;
        fchmod(&file, Mode::from_bits_truncate(entry.mode)).map_err(fail)?;
        futimens(&file, &spec(entry.mtime), &spec(entry.mtime)).map_err(fail)
    }

    fn directory(&mut self, path: &[u8], name: &[u8], entry: &Entry) -> Result<(), ImageError> {
        let fail = |errno: Errno| ImageError::Io { what: "unpack", path: shown(path), source: errno.into() };
        match self.kind_of(name).map_err(fail)? {
            Some(Found::Directory) => {}
            Some(found) => {
                self.vacate(name).map_err(fail)?;
                self.make_directory(name).map_err(fail)?;
                // Removed and made anew in one layer: the entries of lower layers stay hidden.
                if found == Found::Whiteout {
                    self.set_xattr(name, OPAQUE_XATTR, b"y").map_err(fail)?;
                }
            }
            None => self.make_directory(name).map_err(fail)?,
        }
        self.dress_directory(path, entry)
    }

    fn dress_directory(&mut self, path: &[u8], entry: &Entry) -> Result<(), ImageError> {
        let fail = |errno: Errno| ImageError::Io { what: "unpack", path: shown(path), source: errno.into() };
        let directory = File::from(self.open_readable(path).map_err(fail)?);
        fchown(&directory, Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid))).map_err(fail)?;
        fchmod(&directory, Mode::from_bits_truncate(entry.mode)).map_err(fail)?;
        for (key, value) in allowed_xattrs(entry)? {
            set_xattr_at(format!("/proc/self/fd/{}", directory.as_raw_fd()), key, value, true)
                .or_else(ignore_unsupported)
                .map_err(fail)?;
        }
        self.remember(path, entry.mtime)
    }

    /// Remembers a directory's time. An archive names a directory with few bytes as often as it likes.
    fn remember(&mut self, path: &[u8], time: (i64, u32)) -> Result<(), ImageError> {
        if let Some(known) = self.times.get_mut(path) {
            *known = time;
            return Ok(());
        }
        self.remembered += path.len() as u64;
        if self.remembered > MAX_DIRECTORY_NAMES {
            return Err(ImageError::Limit {
                what: "length of all names of directories",
                limit: MAX_DIRECTORY_NAMES,
            });
        }
        self.times.insert(path.to_vec(), time);
        Ok(())
    }

    fn whiteout(&mut self, entry: &Entry, name: &[u8], hidden: &[u8]) -> Result<(), ImageError> {
        let fail =
            |errno: Errno| ImageError::Io { what: "unpack", path: shown(&entry.path), source: errno.into() };
        if name == OPAQUE {
            return self.set_xattr(b"", OPAQUE_XATTR, b"y").map_err(fail);
        }
        if name.starts_with(AUFS_NOTES) {
            return Ok(());
        }
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(hostile(&entry.path, "it hides no name"));
        }
        match self.kind_of(hidden).map_err(fail)? {
            Some(Found::Directory) => self.set_xattr(hidden, OPAQUE_XATTR, b"y").map_err(fail),
            // A whiteout is about lower layers: an entry that this layer adds under the name stays.
            Some(_) => Ok(()),
            None => {
                self.done.inodes += 1;
                mknodat(self.here(), os(hidden), SFlag::S_IFCHR, Mode::empty(), makedev(0, 0)).map_err(fail)
            }
        }
    }

    fn finish(&mut self) -> Result<(), ImageError> {
        self.parent = None;
        for (path, time) in &std::mem::take(&mut self.times) {
            match self.open_readable(path) {
                Ok(directory) => futimens(&directory, &spec(*time), &spec(*time)).map_err(|errno| {
                    ImageError::Io { what: "unpack", path: shown(path), source: errno.into() }
                })?,
                // A later entry put something else in its place.
                Err(_) => continue,
            }
        }
        Ok(())
    }

    /// The directory of the current entry.
    fn here(&self) -> std::os::fd::BorrowedFd<'_> {
        self.parent.as_ref().map_or(self.root.as_fd(), |(_, fd)| fd.as_fd())
    }

    /// The directory of the current entry, for reading.
    fn here_readable(&self) -> io::Result<ferrite_hostfs::Dir> {
        let path = self.parent.as_ref().map_or(&b""[..], |(path, _)| path);
        Ok(ferrite_hostfs::Dir::from(self.open_readable(path)?))
    }

    /// Makes `path` the current directory, creating its missing parts.
    fn enter(&mut self, path: &[u8]) -> Result<(), ImageError> {
        if self.parent.as_ref().is_some_and(|(current, _)| current == path) {
            return Ok(());
        }
        self.parent = None;
        if path.is_empty() {
            return Ok(());
        }
        let opened = match self.open_directory(path) {
            Err(Errno::ENOENT) => self.create_path(path),
            other => other,
        };
        match opened {
            Ok(fd) => {
                self.parent = Some((path.to_vec(), fd));
                Ok(())
            }
            Err(Errno::ELOOP) => Err(hostile(path, "a symlink stands where a directory is needed")),
            Err(Errno::ENOTDIR) => Err(hostile(path, "a file stands where a directory is needed")),
            Err(errno) => Err(ImageError::Io { what: "unpack", path: shown(path), source: errno.into() }),
        }
    }

    fn create_path(&mut self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let mut end = 0;
        while end < path.len() {
            end = path[end + 1..].iter().position(|byte| *byte == b'/').map_or(path.len(), |n| end + 1 + n);
            let part = &path[..end];
            let (parent, name) = split(part);
            match self.open_directory(part) {
                Ok(_) => continue,
                Err(Errno::ENOENT) => {
                    let parent = self.open_directory(parent)?;
                    mkdirat(&parent, os(name), Mode::S_IRWXU)?;
                    let mode = Mode::from_bits_truncate(0o755);
                    fchmodat(&parent, os(name), mode, FchmodatFlags::FollowSymlink)?;
                    self.done.inodes += 1;
                }
                Err(errno) => return Err(errno),
            }
        }
        self.open_directory(path)
    }

    fn open_directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        self.open_beneath(path, OFlag::O_PATH)
    }

    fn open_readable(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        self.open_beneath(path, OFlag::O_RDONLY)
    }

    fn open_beneath(&self, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
        let path: &[u8] = if path.is_empty() { b"." } else { path };
        let flags = flags | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat2(&self.root, os(path), OpenHow::new().flags(flags).resolve(resolve()))
    }

    fn make_directory(&mut self, name: &[u8]) -> Result<(), Errno> {
        self.done.inodes += 1;
        mkdirat(self.here(), os(name), Mode::S_IRWXU)
    }

    fn kind_of(&self, name: &[u8]) -> Result<Option<Found>, Errno> {
        match nix::sys::stat::fstatat(self.here(), os(name), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(match SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) {
                SFlag::S_IFDIR => Found::Directory,
                SFlag::S_IFCHR if stat.st_rdev == 0 => Found::Whiteout,
                _ => Found::Other,
            })),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Removes the entry at `name`: of several entries with one name, the last counts.
    fn vacate(&mut self, name: &[u8]) -> Result<(), Errno> {
        match unlinkat(self.here(), os(name), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            // The layer may have made the directory as deep as it liked.
            Err(Errno::EISDIR | Errno::EPERM) => {
                let removed = self.here_readable().and_then(|here| here.remove_tree(os(name)));
                removed.map_err(|e| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
            }
            Err(errno) => Err(errno),
        }
    }

    fn own(&self, name: &[u8], entry: &Entry) -> Result<(), Errno> {
        let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
        fchownat(self.here(), os(name), Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW)
    }

    fn time(&self, name: &[u8], entry: &Entry) -> Result<(), Errno> {
        let time = spec(entry.mtime);
        utimensat(self.here(), os(name), &time, &time, UtimensatFlags::NoFollowSymlink)
    }

    fn xattrs(&self, name: &[u8], entry: &Entry) -> Result<(), ImageError> {
        for (key, value) in allowed_xattrs(entry)? {
            self.set_xattr(name, key, value).or_else(ignore_unsupported).map_err(|errno| ImageError::Io {
                what: "set attributes of",
                path: shown(&entry.path),
                source: errno.into(),
            })?;
        }
        Ok(())
    }

    /// Sets an attribute of `name` in the current directory, or of that directory when empty.
    fn set_xattr(&self, name: &[u8], key: &[u8], value: &[u8]) -> Result<(), Errno> {
        set_xattr_at(self.place(name), key, value, name.is_empty())
    }

    /// A path to `name` in the current directory that no symlink can divert: its only links are the
    /// kernel's own and, at most, `name` itself.
    fn place(&self, name: &[u8]) -> PathBuf {
        let directory = PathBuf::from(format!("/proc/self/fd/{}", self.here().as_raw_fd()));
        if name.is_empty() { directory } else { directory.join(os(name)) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Directory,
    Whiteout,
    Other,
}

fn set_xattr_at(path: impl AsRef<Path>, key: &[u8], value: &[u8], follow: bool) -> Result<(), Errno> {
    let path = CString::new(path.as_ref().as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    let key = CString::new(key).map_err(|_| Errno::EINVAL)?;
    let set = if follow { libc::setxattr } else { libc::lsetxattr };
    // SAFETY: both strings end with a zero byte and the value is valid for the length given with it.
    Errno::result(unsafe { set(path.as_ptr(), key.as_ptr(), value.as_ptr().cast(), value.len(), 0) })
        .map(drop)
}

/// An extended attribute's name and value.
type Xattr<'a> = (&'a [u8], &'a [u8]);

/// Images may bring capabilities and user attributes. `trusted.*` would speak to overlayfs, and security
/// labels belong to the machine that made the image.
fn allowed_xattrs(entry: &Entry) -> Result<Vec<Xattr<'_>>, ImageError> {
    let mut allowed = Vec::new();
    for (key, value) in &entry.xattrs {
        if value.len() > MAX_XATTR {
            return Err(ImageError::Limit { what: "size of an extended attribute", limit: MAX_XATTR as u64 });
        }
        let user = key.starts_with(b"user.") && !key.starts_with(b"user.overlay.");
        if key == b"security.capability" || user {
            allowed.push((key.as_slice(), value.as_slice()));
        }
    }
    Ok(allowed)
}

/// The filesystem may know no user attributes, as symlinks and devices never do.
fn ignore_unsupported(errno: Errno) -> Result<(), Errno> {
    match errno {
        Errno::EOPNOTSUPP | Errno::EPERM => Ok(()),
        other => Err(other),
    }
}

fn resolve() -> ResolveFlag {
    ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS
}

/// The name's components joined by single slashes, empty for the root.
fn clean(path: &[u8]) -> Result<Vec<u8>, ImageError> {
    if path.is_empty() || path.contains(&0) {
        return Err(hostile(path, "the name is empty or has a zero byte"));
    }
    if path.starts_with(b"/") {
        return Err(hostile(path, "the name is absolute"));
    }
    let mut cleaned = Vec::with_capacity(path.len());
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return Err(hostile(path, "the name leaves the layer")),
            component => {
                if !cleaned.is_empty() {
                    cleaned.push(b'/');
                }
                cleaned.extend_from_slice(component);
            }
        }
    }
    Ok(cleaned)
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

fn spec((seconds, nanos): (i64, u32)) -> TimeSpec {
    TimeSpec::new(seconds, nanos.into())
}

fn os(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

fn shown(path: &[u8]) -> PathBuf {
    PathBuf::from(os(path))
}

fn hostile(entry: &[u8], why: &'static str) -> ImageError {
    ImageError::Hostile { entry: String::from_utf8_lossy(&entry[..entry.len().min(256)]).into_owned(), why }
}

fn link_error(entry: &Entry, errno: Errno) -> ImageError {
    match errno {
        Errno::ENOENT | Errno::ELOOP | Errno::ENOTDIR | Errno::EPERM | Errno::EXDEV => {
            hostile(&entry.path, "its link target is no file of this layer")
        }
        errno => ImageError::Io { what: "link", path: shown(&entry.path), source: errno.into() },
    }
}

#[cfg(test)]
mod tests;
