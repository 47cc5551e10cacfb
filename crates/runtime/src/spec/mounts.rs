//! The mounts of a container, in order.

use std::path::{Path, PathBuf};

use ferrite_cri::v1::{Mount as CriMount, MountPropagation};
use oci_spec::runtime::Mount;

use super::{Input, SpecError};

/// Type of a mount whose source is the image of that number in the bundle.
pub const IMAGE_MOUNT: &str = "image";

fn entry(destination: &str, typ: &str, source: impl Into<PathBuf>, options: &[&str]) -> Mount {
    let mut mount = Mount::default();
    mount
        .set_destination(PathBuf::from(destination))
        .set_typ(Some(typ.to_owned()))
        .set_source(Some(source.into()))
        .set_options(Some(options.iter().map(|option| (*option).to_owned()).collect()));
    mount
}

pub fn mounts(input: &Input<'_>, privileged: bool) -> Result<Vec<Mount>, SpecError> {
    let mode = if privileged { "rw" } else { "ro" };
    let mut standard = vec![
        entry("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        entry("/dev", "tmpfs", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        entry(
            "/dev/pts",
            "devpts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        entry("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        entry("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", mode]),
        entry("/sys/fs/cgroup", "cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", mode]),
        entry("/dev/shm", "bind", input.shm.clone(), &["rbind", "rw"]),
    ];
    let files = [
        ("/etc/resolv.conf", &input.resolv_conf),
        ("/etc/hostname", &input.hostname_file),
        ("/etc/hosts", &input.hosts_file),
    ];
    for (path, file) in files {
        if let Some(file) = file {
            let mut options = vec!["rbind", "rprivate", "rw"];
            // The pod's root owns them, as it does the kubelet's mounts.
            if input.user_namespace.is_some() {
                options.push("idmap");
            }
            standard.push(entry(path, "bind", file.clone(), &options));
        }
    }
    let given = &input.config.mounts;
    standard.retain(|mount| !given.iter().any(|g| clean(&g.container_path) == *mount.destination()));
    let mut images = 0;
    let mut own = given
        .iter()
        .map(|mount| if is_image(mount) { image(mount, &mut images) } else { bind(mount) })
        .collect::<Result<Vec<_>, _>>()?;
    // A mount below another must come after it, whatever order they were given in.
    own.sort_by_key(|mount| mount.destination().components().count());
    standard.extend(own);
    Ok(standard)
}

fn clean(path: &str) -> PathBuf {
    Path::new(path).components().collect()
}

/// Returns true if the mount's source is an image and not a path of the host.
pub fn is_image(mount: &CriMount) -> bool {
    mount.image.as_ref().is_some_and(|image| !image.image.is_empty())
}

/// As the API promises: read-only, and nothing in it can be run.
fn image(mount: &CriMount, number: &mut usize) -> Result<Mount, SpecError> {
    if !mount.container_path.starts_with('/') {
        return Err(SpecError::MountPath(mount.container_path.clone()));
    }
    let source = number.to_string();
    *number += 1;
    let destination = clean(&mount.container_path).display().to_string();
    Ok(entry(&destination, IMAGE_MOUNT, source, &["ro", "nosuid", "nodev", "noexec"]))
}

fn bind(mount: &CriMount) -> Result<Mount, SpecError> {
    if !mount.container_path.starts_with('/') {
        return Err(SpecError::MountPath(mount.container_path.clone()));
    }
    let propagation = match mount.propagation() {
        MountPropagation::PropagationPrivate => "rprivate",
        MountPropagation::PropagationHostToContainer => "rslave",
        MountPropagation::PropagationBidirectional => "rshared",
    };
    let mode = match (mount.readonly, mount.recursive_read_only) {
        (true, true) => "rro",
        (true, false) => "ro",
        (false, _) => "rw",
    };
    let destination = clean(&mount.container_path);
    let mut out = Mount::default();
    out.set_destination(destination)
        .set_typ(Some("bind".to_owned()))
        .set_source(Some(PathBuf::from(&mount.host_path)))
        .set_options(Some(vec!["rbind".to_owned(), propagation.to_owned(), mode.to_owned()]));
    if !mount.uid_mappings.is_empty()
        && let Some(options) = out.options_mut()
    {
        options.push("idmap".to_owned());
    }
    Ok(out)
}
