//! Layers made into one tree: the container's root, and images mounted as volumes.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use oci_spec::runtime::Mount;

use super::{Source, existing};
use crate::supervisor::bundle::Bundle;
use crate::supervisor::error::{Context, SetupError};
use crate::supervisor::userns::UserNamespace;
use crate::sys::{self, MountAttributes};

fn open(path: &Path) -> Result<OwnedFd, SetupError> {
    nix::fcntl::open(
        path,
        nix::fcntl::OFlag::O_PATH | nix::fcntl::OFlag::O_DIRECTORY | nix::fcntl::OFlag::O_CLOEXEC,
        nix::sys::stat::Mode::empty(),
    )
    .with(|| format!("open layer {}", path.display()))
}

/// Layers as descriptors. In a user namespace each is seen through a mount that maps its identities; it
/// is put up at `place`, which nobody else sees, because overlayfs takes only mounts of this namespace.
fn open_layers(
    paths: &[PathBuf],
    place: &OwnedFd,
    user: Option<&UserNamespace>,
) -> Result<Vec<OwnedFd>, SetupError> {
    let Some(user) = user else { return paths.iter().map(|path| open(path)).collect() };
    let map = |path: &PathBuf| -> Result<OwnedFd, SetupError> {
        let what = || format!("map the identities of layer {}", path.display());
        let layer = sys::clone_mount(path, false).with(what)?;
        sys::map_mount(layer.as_fd(), user.as_fd()).with(what)?;
        sys::attach_mount(layer.as_fd(), place.as_fd()).with(what)?;
        Ok(layer)
    };
    paths.iter().map(map).collect()
}

fn joined(layers: &[OwnedFd]) -> String {
    layers.iter().map(sys::fd_path).collect::<Vec<_>>().join(":")
}

/// Mounts the layers. Directories go in by descriptor: the option string is limited to a page, which a
/// few dozen real paths fill.
pub fn mount_root(bundle: &Bundle, user: Option<&UserNamespace>) -> Result<OwnedFd, SetupError> {
    let place = open(&bundle.rootfs)?;
    let lowers = open_layers(&bundle.lowers, &place, user)?;
    let (upper, work) = (open(&bundle.upper)?, open(&bundle.work)?);
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        joined(&lowers),
        sys::fd_path(&upper),
        sys::fd_path(&work)
    );
    mount(Some("overlay"), &bundle.rootfs, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .with(|| format!("mount the image's {} layers", lowers.len()))?;
    open(&bundle.rootfs)
}

/// The image a mount of type `image` asks for, as a detached mount.
pub fn image_volume(
    bundle: &Bundle,
    entry: &Mount,
    user: Option<&UserNamespace>,
) -> Result<Source, SetupError> {
    let number = entry.source().as_ref().and_then(|source| source.to_str()?.parse::<usize>().ok());
    let volume = number
        .and_then(|number| bundle.images.get(number))
        .ok_or_else(|| SetupError::plain("the bundle does not have the image of a mount"))?;
    let what = || format!("mount an image at {}", entry.destination().display());
    // Mounted for a moment where the root will be; the bare directory serves as the empty layer that
    // overlayfs wants below a single one.
    let place = open(&bundle.rootfs)?;
    let mut lowers = open_layers(&volume.lowers, &place, user)?;
    lowers.push(place);
    let options = format!("lowerdir={}", joined(&lowers));
    mount(Some("overlay"), &bundle.rootfs, Some("overlay"), MsFlags::MS_RDONLY, Some(options.as_str()))
        .with(what)?;
    let shown = show(bundle, &volume.sub_path).with(what);
    umount2(&bundle.rootfs, MntFlags::MNT_DETACH).with(what)?;
    shown
}

fn show(bundle: &Bundle, sub_path: &str) -> Result<Source, SetupError> {
    let root = open(&bundle.rootfs)?;
    let wanted = existing(root.as_fd(), Path::new(sub_path))
        .context("look for the sub path")?
        .ok_or_else(|| SetupError::plain(format!("the image has no {sub_path:?}")))?;
    let mount = sys::clone_mount(Path::new(&sys::fd_path(&wanted)), false).context("copy the mount")?;
    let set =
        libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    let attributes = MountAttributes { set, propagation: libc::MS_PRIVATE, ..Default::default() };
    sys::set_mount_attributes(mount.as_fd(), false, attributes).context("make it read-only")?;
    let stat = nix::sys::stat::fstat(&wanted).context("look at the sub path")?;
    Ok(Source { mount, directory: stat.st_mode & libc::S_IFMT == libc::S_IFDIR })
}
