//! What is mounted in a container, and in which order.

use std::path::{Path, PathBuf};

use ferrite_cri::v1::{Mount as CriMount, MountPropagation};
use oci_spec::runtime::Mount;

use super::{Input, SpecError};

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
    for (path, file) in [("/etc/resolv.conf", &input.resolv_conf), ("/etc/hostname", &input.hostname_file)] {
        if let Some(file) = file {
            standard.push(entry(path, "bind", file.clone(), &["rbind", "rprivate", "rw"]));
        }
    }
    let given = &input.config.mounts;
    standard.retain(|mount| !given.iter().any(|g| clean(&g.container_path) == *mount.destination()));
    let mut own = given.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
    // A mount below another must come after it, whatever order they were given in.
    own.sort_by_key(|mount| mount.destination().components().count());
    standard.extend(own);
    Ok(standard)
}

fn clean(path: &str) -> PathBuf {
    Path::new(path).components().collect()
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
    Ok(out)
}
