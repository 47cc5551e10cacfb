//! The container's file system: overlay root, kernel file systems, devices, binds, masks.
//!
//! Runs in a new mount namespace whose root is still the host's, so `/proc` here is the host's. Every
//! target is resolved beneath the new root: an image's symlinks cannot lead a mount outside.

mod overlay;

pub use overlay::{image_volume, mount_root};

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType, Mount, Spec};

use super::bundle::Bundle;
use super::error::{Context, SetupError};
use super::userns::UserNamespace;
use crate::sys::{self, Beneath, MountAttributes};
use ferrite_cgroup::{Layout, Version};

/// As many symlinks as the kernel follows in one path.
const MAX_SYMLINKS: u32 = 40;

/// Builds the file system and makes it the root of this process.
pub fn enter_root(
    bundle: &Bundle,
    spec: &Spec,
    cgroups: &Layout,
    user: Option<&UserNamespace>,
    console: &mut dyn FnMut(BorrowedFd<'_>) -> Result<(), SetupError>,
) -> Result<(), SetupError> {
    let linux =
        spec.linux().as_ref().ok_or_else(|| SetupError::plain("the description has no linux section"))?;
    let mounts: &[Mount] = spec.mounts().as_deref().unwrap_or_default();

    // Bind sources are copied while they still propagate to and from the host, and then cut as asked.
    let mut binds = Vec::new();
    for entry in mounts {
        binds.push(if is_bind(entry) { Some(copy_source(entry, user)?) } else { None });
    }
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("make mounts private")?;

    for (entry, bind) in mounts.iter().zip(&mut binds) {
        if entry.typ().as_deref() == Some(crate::spec::IMAGE_MOUNT) {
            *bind = Some(overlay::image_volume(bundle, entry, user)?);
        }
    }
    let root = overlay::mount_root(bundle, user)?;
    // The kernel's own file systems come first and are masked at once: a later volume may hide a path to
    // them.
    let is_guarded = |entry: &Mount| Guarded::of(entry).is_some();
    for entry in mounts.iter().filter(|entry| is_guarded(entry)) {
        mount_kernel(root.as_fd(), entry, cgroups, spec, user)
            .with(|| format!("mount {}", entry.destination().display()))?;
    }
    for guarded in mounts.iter().filter_map(Guarded::of) {
        guarded.guard(root.as_fd(), linux)?;
    }
    for (entry, bind) in mounts.iter().zip(binds).filter(|(entry, _)| !is_guarded(entry)) {
        let what = || format!("mount {}", entry.destination().display());
        match bind {
            Some(source) => attach_volume(root.as_fd(), &source, entry.destination()).with(what)?,
            None => mount_kernel(root.as_fd(), entry, cgroups, spec, user).with(what)?,
        }
    }
    // As with runc, a volume at /dev is as its owner made it: it may be the node's own.
    if !mounts.iter().any(|entry| is_bind(entry) && entry.destination() == Path::new("/dev")) {
        let devices = linux.devices().as_deref().unwrap_or_default();
        make_devices(root.as_fd(), devices, user).context("make /dev")?;
    }
    console(root.as_fd())?;
    check_proc(root.as_fd())?;

    let elsewhere = |path: &&String| !mounts.iter().filter_map(Guarded::of).any(|g| g.has(Path::new(path)));
    for path in linux.readonly_paths().iter().flatten().filter(elsewhere) {
        let target = existing(root.as_fd(), Path::new(path)).with(|| format!("find {path}"))?;
        make_read_only(target).with(|| format!("make {path} read-only"))?;
    }
    for path in linux.masked_paths().iter().flatten().filter(elsewhere) {
        let target = existing(root.as_fd(), Path::new(path)).with(|| format!("find {path}"))?;
        mask(target).with(|| format!("mask {path}"))?;
    }
    if let Some(cwd) = spec.process().as_ref().map(|process| process.cwd()) {
        make_working_directory(root.as_fd(), cwd, user)
            .with(|| format!("make working directory {}", cwd.display()))?;
    }
    if spec.root().as_ref().is_some_and(|root| root.readonly().unwrap_or(false)) {
        let attributes = MountAttributes { set: libc::MOUNT_ATTR_RDONLY, ..Default::default() };
        sys::set_mount_attributes(root.as_fd(), false, attributes).context("make the root read-only")?;
    }
    pivot(root)
}

fn pivot(root: OwnedFd) -> Result<(), SetupError> {
    nix::unistd::fchdir(&root).context("enter the root")?;
    nix::unistd::pivot_root(".", ".").context("pivot_root")?;
    // The old root is stacked on the new one: unmount it and stay on the new one.
    umount2(".", MntFlags::MNT_DETACH).context("leave the host's root")?;
    nix::unistd::chdir("/").context("enter the root")?;
    Ok(())
}

/// A working directory the image lacks belongs to the container's root.
fn make_working_directory(root: BorrowedFd<'_>, path: &Path, user: Option<&UserNamespace>) -> io::Result<()> {
    let missing = existing(root, path)?.is_none();
    let directory = make_directory(root, path, 0)?;
    if let Some(user) = user.filter(|_| missing) {
        let (uid, gid) = user.root();
        let flags = nix::fcntl::AtFlags::AT_EMPTY_PATH;
        nix::unistd::fchownat(&directory, "", Some(uid.into()), Some(gid.into()), flags)?;
    }
    Ok(())
}

pub fn is_bind(entry: &Mount) -> bool {
    entry.typ().as_deref() == Some("bind")
        || entry.options().iter().flatten().any(|option| option == "bind" || option == "rbind")
}

/// A detached copy of a bind mount's source with its attributes set, and whether it is a directory.
pub struct Source {
    pub mount: OwnedFd,
    pub directory: bool,
}

pub fn copy_source(entry: &Mount, user: Option<&UserNamespace>) -> Result<Source, SetupError> {
    let path = entry
        .source()
        .as_deref()
        .ok_or_else(|| SetupError::plain(format!("mount {} has no source", entry.destination().display())))?;
    let what = || format!("bind {} at {}", path.display(), entry.destination().display());
    let options: Vec<&str> = entry.options().iter().flatten().map(String::as_str).collect();
    let recursive = !options.contains(&"bind");
    let source = sys::clone_mount(path, recursive).with(what)?;
    let mut attributes = MountAttributes::default();
    let mut everything = false;
    let mut propagation = libc::MS_PRIVATE;
    if options.iter().any(|option| matches!(*option, "idmap" | "ridmap")) {
        let user =
            user.ok_or_else(|| SetupError::plain("an ID-mapped mount needs a user namespace")).with(what)?;
        sys::map_mount(source.as_fd(), user.as_fd()).with(|| format!("{}: map its identities", what()))?;
    }
    for option in options {
        match option {
            "ro" => attributes.set |= libc::MOUNT_ATTR_RDONLY,
            "rro" => {
                attributes.set |= libc::MOUNT_ATTR_RDONLY;
                everything = true;
            }
            "nosuid" => attributes.set |= libc::MOUNT_ATTR_NOSUID,
            "nodev" => attributes.set |= libc::MOUNT_ATTR_NODEV,
            "noexec" => attributes.set |= libc::MOUNT_ATTR_NOEXEC,
            "rslave" | "slave" => propagation = libc::MS_SLAVE,
            "rshared" | "shared" => propagation = libc::MS_SHARED,
            _ => {}
        }
    }
    if attributes != MountAttributes::default() {
        sys::set_mount_attributes(source.as_fd(), everything, attributes).with(what)?;
    }
    let attributes = MountAttributes { propagation, ..Default::default() };
    sys::set_mount_attributes(source.as_fd(), true, attributes).with(what)?;
    let stat = nix::sys::stat::fstat(&source).with(what)?;
    let directory = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    Ok(Source { mount: source, directory })
}

fn attach(root: BorrowedFd<'_>, source: &Source, destination: &Path) -> io::Result<()> {
    let target =
        if source.directory { make_directory(root, destination, 0)? } else { make_file(root, destination)? };
    sys::attach_mount(source.mount.as_fd(), target.as_fd())
}

/// Attaches a volume. It must not hide the kernel's files about processes, except files that are known to
/// be replaced, as in runc, and the host's own procfs.
fn attach_volume(root: BorrowedFd<'_>, source: &Source, destination: &Path) -> io::Result<()> {
    let target =
        if source.directory { make_directory(root, destination, 0)? } else { make_file(root, destination)? };
    let replaceable = PROC_FILES.iter().any(|file| Path::new(file) == destination);
    if is_procfs(&target)? && !replaceable && !is_procfs(&source.mount)? {
        return Err(io::Error::other("nothing may be mounted inside /proc"));
    }
    sys::attach_mount(source.mount.as_fd(), target.as_fd())
}

/// Files of procfs that file systems like lxcfs replace.
const PROC_FILES: &[&str] = &[
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/slabinfo",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/sys/crypto/fips_enabled",
];

pub(super) fn is_procfs(file: &OwnedFd) -> io::Result<bool> {
    Ok(nix::sys::statfs::fstatfs(file)?.filesystem_type() == nix::sys::statfs::PROC_SUPER_MAGIC)
}

/// Fails if something else than procfs is at /proc, as with runc. The container's processes write there what
/// confines them, and a tree of the container's own would swallow it.
fn check_proc(root: BorrowedFd<'_>) -> Result<(), SetupError> {
    let proc = sys::open_beneath(root, Path::new("/proc"), libc::O_PATH, Beneath::NoSymlinks)
        .and_then(|found| is_procfs(&found))
        .context("find /proc")?;
    if proc {
        return Ok(());
    }
    Err(SetupError::plain("\"/proc\" cannot be mounted because it is not of type proc"))
}

/// procfs and sysfs: parts of them are masked or read-only, so it must be certain where they are.
struct Guarded<'a> {
    at: &'a Path,
}

impl<'a> Guarded<'a> {
    fn of(entry: &'a Mount) -> Option<Self> {
        matches!(entry.typ().as_deref(), Some("proc" | "sysfs")).then(|| Self { at: entry.destination() })
    }

    fn has(&self, path: &Path) -> bool {
        path.starts_with(self.at)
    }

    /// The directory to mount at. An image's links are not followed, as with runc: a mount behind a link
    /// would have another name than the guarded one.
    fn make_directory(&self, root: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let relative = self.at.strip_prefix("/").unwrap_or(self.at);
        let open = |path: &Path| {
            let found = sys::open_beneath(root, path, libc::O_PATH | libc::O_DIRECTORY, Beneath::NoSymlinks);
            found.map_err(|e| match e.raw_os_error() {
                Some(libc::ELOOP | libc::ENOTDIR) => io::Error::other(format!(
                    "{} must be a directory of the image, not a link",
                    self.at.display()
                )),
                _ => e,
            })
        };
        let mut made = PathBuf::new();
        for part in relative.components() {
            let parent = if made.as_os_str().is_empty() { None } else { Some(open(&made)?) };
            let parent = parent.as_ref().map_or(root, |parent| parent.as_fd());
            let mode = nix::sys::stat::Mode::from_bits_truncate(0o755);
            match nix::sys::stat::mkdirat(parent, part.as_os_str(), mode) {
                Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
                Err(error) => return Err(error.into()),
            }
            made.push(part);
        }
        open(relative)
    }

    /// Masks paths and makes them read-only as the description says, on the file system itself. A path that
    /// the kernel does not have needs no guard.
    fn guard(&self, root: BorrowedFd<'_>, linux: &oci_spec::runtime::Linux) -> Result<(), SetupError> {
        let what = || format!("guard {}", self.at.display());
        let mounted = self.make_directory(root).with(what)?;
        let find = |path: &Path| -> Result<Option<OwnedFd>, SetupError> {
            let relative = path.strip_prefix(self.at).unwrap_or(path);
            if relative.as_os_str().is_empty() {
                return Ok(Some(mounted.try_clone().with(what)?));
            }
            match sys::open_beneath(mounted.as_fd(), relative, libc::O_PATH, Beneath::NoSymlinks) {
                Ok(found) => Ok(Some(found)),
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
                Err(e) => Err(e).with(|| format!("find {}", path.display())),
            }
        };
        for path in linux.readonly_paths().iter().flatten().filter(|path| self.has(Path::new(path))) {
            make_read_only(find(Path::new(path))?).with(|| format!("make {path} read-only"))?;
        }
        for path in linux.masked_paths().iter().flatten().filter(|path| self.has(Path::new(path))) {
            mask(find(Path::new(path))?).with(|| format!("mask {path}"))?;
        }
        Ok(())
    }
}

/// Mounts a file system the kernel makes: proc, sysfs, tmpfs, devpts, mqueue, cgroup.
fn mount_kernel(
    root: BorrowedFd<'_>,
    entry: &Mount,
    cgroups: &Layout,
    spec: &Spec,
    user: Option<&UserNamespace>,
) -> io::Result<()> {
    let target = match Guarded::of(entry) {
        Some(guarded) => guarded.make_directory(root)?,
        None => {
            let target = make_directory(root, entry.destination(), 0)?;
            // An image may have a link to /proc at the place.
            if is_procfs(&target)? {
                return Err(io::Error::other("nothing may be mounted inside /proc"));
            }
            target
        }
    };
    let kind = entry.typ().as_deref().unwrap_or("none");
    let (flags, mut data) = parse_options(entry.options().iter().flatten());
    if let Some(user) = user {
        // Mounted from outside the namespace: the host's numbers count.
        data = user.translate(kind, &data);
    }
    if kind == "cgroup" {
        return match cgroups.version() {
            Version::V1 => mount_cgroups(root, entry.destination(), cgroups, spec),
            Version::V2 => {
                mount(Some("cgroup"), sys::fd_path(&target).as_str(), Some("cgroup2"), flags, None::<&str>)?;
                Ok(())
            }
        };
    }
    let source = entry.source().as_deref().unwrap_or(Path::new(kind));
    mount(Some(source), sys::fd_path(&target).as_str(), Some(kind), flags, Some(data.as_str()))?;
    Ok(())
}

/// A tmpfs with the container's own group of every hierarchy, read-only.
fn mount_cgroups(root: BorrowedFd<'_>, at: &Path, cgroups: &Layout, spec: &Spec) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let target = make_directory(root, at, 0)?;
    mount(Some("tmpfs"), sys::fd_path(&target).as_str(), Some("tmpfs"), flags, Some("mode=755,size=64k"))?;
    let group = spec.linux().as_ref().and_then(|linux| linux.cgroups_path().clone()).unwrap_or_default();
    for hierarchy in cgroups.mounts() {
        let Some(name) = hierarchy.file_name() else { continue };
        let source = hierarchy.join(group.strip_prefix("/").unwrap_or(&group));
        let Ok(copy) = sys::clone_mount(&source, false) else { continue };
        let set = libc::MOUNT_ATTR_RDONLY
            | libc::MOUNT_ATTR_NOSUID
            | libc::MOUNT_ATTR_NODEV
            | libc::MOUNT_ATTR_NOEXEC;
        sys::set_mount_attributes(copy.as_fd(), false, MountAttributes { set, ..Default::default() })?;
        attach(root, &Source { mount: copy, directory: true }, &at.join(name))?;
    }
    let target = sys::open_beneath(root, at, libc::O_PATH, Beneath::InRoot)?;
    let read_only = MountAttributes { set: libc::MOUNT_ATTR_RDONLY, ..Default::default() };
    sys::set_mount_attributes(target.as_fd(), false, read_only)
}

fn parse_options<'a>(options: impl Iterator<Item = &'a String>) -> (MsFlags, String) {
    let mut flags = MsFlags::empty();
    let mut data: Vec<&str> = Vec::new();
    for option in options {
        match option.as_str() {
            "ro" => flags |= MsFlags::MS_RDONLY,
            "nosuid" => flags |= MsFlags::MS_NOSUID,
            "nodev" => flags |= MsFlags::MS_NODEV,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "relatime" => flags |= MsFlags::MS_RELATIME,
            "strictatime" => flags |= MsFlags::MS_STRICTATIME,
            "rw" | "rprivate" | "private" => {}
            other => data.push(other),
        }
    }
    (flags, data.join(","))
}

/// Device nodes and the links every program expects. The node is made by us on our own tmpfs.
fn make_devices(
    root: BorrowedFd<'_>,
    devices: &[LinuxDevice],
    user: Option<&UserNamespace>,
) -> io::Result<()> {
    use nix::sys::stat::{Mode, SFlag, makedev, mknodat};
    let previous = nix::sys::stat::umask(Mode::empty());
    for device in devices {
        let kind = match device.typ() {
            LinuxDeviceType::B => SFlag::S_IFBLK,
            LinuxDeviceType::P => SFlag::S_IFIFO,
            _ => SFlag::S_IFCHR,
        };
        let (parent, name) = split(root, device.path())?;
        let mode = Mode::from_bits_truncate(device.file_mode().unwrap_or(0o666));
        let number = makedev(device.major() as u64, device.minor() as u64);
        match mknodat(&parent, name.as_str(), kind, mode, number) {
            Ok(()) => {}
            // A volume's file: its owner stays.
            Err(nix::errno::Errno::EEXIST) => continue,
            Err(error) => return Err(error.into()),
        }
        // A device of the host keeps its owner: the root of a user namespace gets no more of it than strangers do.
        let (uid, gid) = match (user, device.uid(), device.gid()) {
            (Some(user), None, None) => {
                let (uid, gid) = user.root();
                (Some(uid), Some(gid))
            }
            (_, uid, gid) => (uid, gid),
        };
        if uid.is_some() || gid.is_some() {
            nix::unistd::fchownat(
                &parent,
                name.as_str(),
                uid.map(Into::into),
                gid.map(Into::into),
                nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW,
            )?;
        }
    }
    nix::sys::stat::umask(previous);
    let dev = sys::open_beneath(root, Path::new("/dev"), libc::O_PATH | libc::O_DIRECTORY, Beneath::InRoot)?;
    for (target, link) in [
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
        ("/proc/kcore", "core"),
        ("pts/ptmx", "ptmx"),
    ] {
        match nix::unistd::symlinkat(target, &dev, link) {
            Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn make_read_only(target: Option<OwnedFd>) -> io::Result<()> {
    let Some(target) = target else { return Ok(()) };
    let copy = sys::clone_mount(Path::new(&sys::fd_path(&target)), true)?;
    let attributes = MountAttributes { set: libc::MOUNT_ATTR_RDONLY, ..Default::default() };
    sys::set_mount_attributes(copy.as_fd(), true, attributes)?;
    sys::attach_mount(copy.as_fd(), target.as_fd())
}

/// Hides a file behind /dev/null and a directory behind an empty one.
fn mask(target: Option<OwnedFd>) -> io::Result<()> {
    let Some(target) = target else { return Ok(()) };
    let stat = nix::sys::stat::fstat(&target)?;
    if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        let place = sys::fd_path(&target);
        mount(Some("tmpfs"), place.as_str(), Some("tmpfs"), MsFlags::MS_RDONLY, Some("size=0k"))?;
        return Ok(());
    }
    sys::attach_mount(null_view()?.as_fd(), target.as_fd())
}

/// A detached view of the node's /dev/null. It is read-only: data can be written, but the mode and the owner of the
/// node's file cannot be changed through it.
pub fn null_view() -> io::Result<OwnedFd> {
    let null = sys::clone_mount(Path::new("/dev/null"), false)?;
    let attributes = MountAttributes { set: libc::MOUNT_ATTR_RDONLY, ..Default::default() };
    sys::set_mount_attributes(null.as_fd(), false, attributes)?;
    Ok(null)
}

fn existing(root: BorrowedFd<'_>, path: &Path) -> io::Result<Option<OwnedFd>> {
    match sys::open_beneath(root, path, libc::O_PATH, Beneath::InRoot) {
        Ok(fd) => Ok(Some(fd)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens a directory beneath the root, making missing ones on the way.
pub fn make_directory(root: BorrowedFd<'_>, path: &Path, symlinks: u32) -> io::Result<OwnedFd> {
    match sys::open_beneath(root, path, libc::O_PATH | libc::O_DIRECTORY, Beneath::InRoot) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        result => return result,
    }
    let Some(name) = last(path) else { return Err(io::ErrorKind::InvalidInput.into()) };
    let parent_path = path.parent().unwrap_or(Path::new("/"));
    let parent = make_directory(root, parent_path, symlinks)?;
    if let Some(target) = dangling(&parent, &name, parent_path, symlinks)? {
        return make_directory(root, &target, symlinks + 1);
    }
    match nix::sys::stat::mkdirat(&parent, name.as_path(), nix::sys::stat::Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
        Err(error) => return Err(error.into()),
    }
    sys::open_beneath(root, path, libc::O_PATH | libc::O_DIRECTORY, Beneath::InRoot)
}

/// Opens a file beneath the root as a mount target, making an empty one if nothing is there.
pub fn make_file(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    make_file_at(root, path, 0)
}

fn make_file_at(root: BorrowedFd<'_>, path: &Path, symlinks: u32) -> io::Result<OwnedFd> {
    if let Some(file) = existing(root, path)? {
        return Ok(file);
    }
    let Some(name) = last(path) else { return Err(io::ErrorKind::InvalidInput.into()) };
    let parent_path = path.parent().unwrap_or(Path::new("/"));
    let parent = make_directory(root, parent_path, symlinks)?;
    if let Some(target) = dangling(&parent, &name, parent_path, symlinks)? {
        return make_file_at(root, &target, symlinks + 1);
    }
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_NOFOLLOW;
    drop(sys::open_beneath(parent.as_fd(), &name, flags, Beneath::NoSymlinks)?);
    sys::open_beneath(root, path, libc::O_PATH, Beneath::InRoot)
}

/// Where a symlink to something that does not exist yet points, seen from the root.
fn dangling(parent: &OwnedFd, name: &Path, parent_path: &Path, symlinks: u32) -> io::Result<Option<PathBuf>> {
    let target = match nix::fcntl::readlinkat(parent, name) {
        Ok(target) => PathBuf::from(target),
        Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if symlinks >= MAX_SYMLINKS {
        return Err(io::Error::from_raw_os_error(libc::ELOOP));
    }
    Ok(Some(if target.is_absolute() { target } else { parent_path.join(target) }))
}

fn last(path: &Path) -> Option<PathBuf> {
    match path.components().next_back()? {
        Component::Normal(name) => Some(PathBuf::from(name)),
        _ => None,
    }
}

fn split(root: BorrowedFd<'_>, path: &Path) -> io::Result<(OwnedFd, String)> {
    let name = last(path).ok_or(io::ErrorKind::InvalidInput)?;
    let parent = make_directory(root, path.parent().unwrap_or(Path::new("/")), 0)?;
    let name = String::from_utf8(name.as_os_str().as_bytes().to_vec())
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    Ok((parent, name))
}

/// Puts the container's terminal at /dev/console.
pub fn mount_console(root: BorrowedFd<'_>, terminal: BorrowedFd<'_>) -> io::Result<()> {
    let target = make_file(root, Path::new("/dev/console"))?;
    let copy = sys::clone_mount(Path::new(&format!("/proc/self/fd/{}", terminal.as_raw_fd())), false);
    match copy {
        Ok(copy) => sys::attach_mount(copy.as_fd(), target.as_fd()),
        Err(error) => Err(error),
    }
}
