//! Where an OCI runtime finds a container's files when the pod has a user namespace.
//!
//! The runtime works on them as a member of that namespace, which cannot enter our directories: they belong
//! to the host's root. So everything the container is to see is put up below one directory every process
//! may enter, in this mount namespace only, with identities mapped already. The runtime needs to know
//! nothing of ID-mapped mounts, which runc has only since 1.2.

use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use oci_spec::runtime::{Mount, Spec};

use crate::supervisor::bundle::Bundle;
use crate::supervisor::error::{Context, SetupError};
use crate::supervisor::mounts::{self, Source};
use crate::supervisor::userns::UserNamespace;
use crate::sys;

/// Directories machines have and OCI runtimes do without.
const PLACES: &[&str] = &["/mnt", "/media", "/srv", "/dev/shm", "/tmp"];
const ROOTFS: &str = "rootfs";

/// A directory anybody can walk into, empty at first.
pub struct Stage {
    pub directory: PathBuf,
}

impl Stage {
    /// Covers a directory none of `needed` is below.
    pub fn cover(needed: &[&Path]) -> Result<Self, SetupError> {
        let directory = choose(PLACES.iter().map(Path::new).filter(|place| is_open(place)), needed)
            .ok_or_else(|| SetupError::plain(format!("a user namespace under an OCI runtime needs one of the directories {PLACES:?}, not a link and with nothing of ours below it")))?
            .to_owned();
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("tmpfs"), &directory, Some("tmpfs"), flags, Some("mode=0711,size=64k"))
            .with(|| format!("cover {}", directory.display()))?;
        Ok(Self { directory })
    }

    /// An empty directory for the container's root file system.
    pub fn rootfs(&self) -> Result<PathBuf, SetupError> {
        let path = self.directory.join(ROOTFS);
        make_directory(&path)?;
        Ok(path)
    }

    /// Shows the sources of the description's mounts, and has them bound from there.
    pub fn show_all(&self, sources: Vec<Option<Source>>, spec: &mut Spec) -> Result<(), SetupError> {
        for (number, (entry, source)) in spec.mounts_mut().iter_mut().flatten().zip(sources).enumerate() {
            let Some(source) = source else { continue };
            let path = self.directory.join(format!("mount-{number}"));
            show(&path, &source)?;
            entry.set_source(Some(path));
            // Mapped already.
            if let Some(options) = entry.options_mut() {
                options.retain(|option| option != "idmap" && option != "ridmap");
            }
        }
        Ok(())
    }
}

fn is_open(place: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    // The directory itself is covered; the directories above it must let others pass.
    let above = place.ancestors().skip(1);
    place.symlink_metadata().is_ok_and(|meta| meta.is_dir())
        && above.into_iter().all(|path| path.metadata().is_ok_and(|m| m.permissions().mode() & 0o001 != 0))
}

fn choose<'a>(mut places: impl Iterator<Item = &'a Path>, needed: &[&Path]) -> Option<&'a Path> {
    places.find(|place| !needed.iter().any(|path| path.starts_with(place)))
}

fn make_directory(path: &Path) -> Result<(), SetupError> {
    std::fs::DirBuilder::new().mode(0o711).create(path).with(|| format!("make {}", path.display()))
}

/// Puts a detached mount up at `target`, which is made.
fn show(target: &Path, source: &Source) -> Result<(), SetupError> {
    let what = || format!("show a mount at {}", target.display());
    if source.directory {
        make_directory(target)?;
    } else {
        std::fs::write(target, "").with(what)?;
    }
    let handle = nix::fcntl::open(target, nix::fcntl::OFlag::O_PATH, nix::sys::stat::Mode::empty());
    sys::attach_mount(source.mount.as_fd(), handle.with(what)?.as_fd()).with(what)
}

/// Copies of the description's bind mounts, in its order, where there is a user namespace to copy them for.
/// Taken while the host's mounts still propagate.
pub fn copy_binds(spec: &Spec, user: Option<&UserNamespace>) -> Result<Vec<Option<Source>>, SetupError> {
    let copy = |entry: &Mount| match user {
        Some(_) if mounts::is_bind(entry) => mounts::copy_source(entry, user).map(Some),
        _ => Ok(None),
    };
    spec.mounts().iter().flatten().map(copy).collect()
}

/// Adds the images that are mounted somewhere to the sources, and describes them as binds: mounts of that
/// type are ours alone.
pub fn mount_images(
    bundle: &Bundle,
    spec: &mut Spec,
    sources: &mut [Option<Source>],
    user: Option<&UserNamespace>,
) -> Result<(), SetupError> {
    for (entry, source) in spec.mounts_mut().iter_mut().flatten().zip(sources) {
        if entry.typ().as_deref() == Some(crate::spec::IMAGE_MOUNT) {
            *source = Some(mounts::image_volume(bundle, entry, user)?);
            let mut options = vec!["rbind".to_owned(), "rprivate".to_owned()];
            options.extend(entry.options().iter().flatten().cloned());
            entry.set_typ(Some("bind".to_owned())).set_options(Some(options));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_nothing_needed_is_below() {
        let places = || ["/mnt", "/media", "/srv"].into_iter().map(Path::new);
        for (needed, chosen) in [
            (&["/var/lib/ferrite/x"][..], Some("/mnt")),
            (&["/mnt/disk/ferrite/x"], Some("/media")),
            (&["/mnt2/x"], Some("/mnt")),
            (&["/mnt/x", "/srv/y"], Some("/media")),
            (&["/mnt/x", "/srv/y", "/media"], None),
        ] {
            let needed: Vec<&Path> = needed.iter().map(Path::new).collect();
            assert_eq!(choose(places(), &needed), chosen.map(Path::new), "{needed:?}");
        }
    }
}
