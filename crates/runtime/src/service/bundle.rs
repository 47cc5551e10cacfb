//! From a container's configuration to the files its supervisor works from.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use ferrite_cri::v1::{
    ContainerConfig, KeyValue, LinuxContainerSecurityContext, Mount, MountPropagation, NamespaceMode,
    SeLinuxOption, SupplementalGroupsPolicy, security_profile::ProfileType,
};
use ferrite_cri::{Code, Error, Result};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType};

use super::container::{failed, image_error, security_of};
use super::records::{self, ContainerRecord};
use super::sandbox::{host_ipc, host_network, user_map};
use super::state::Sandbox;
use super::{Inner, files};
use crate::cgroup;
use crate::rootfs::ImageConfigView;
use crate::spec::{self, GivenDevice, IdMap, Identity, IdentityRequest};
use crate::supervisor::bundle::{BUNDLE, Bundle, CONFIG, ImageVolume};
use crate::supervisor::protocol::PidNamespace;
use crate::supervisor::sandbox::{NETNS, SHM, USERNS};
use crate::sys;

/// Refuses unsupported settings: a container that silently lacks what it asked for is worse than none.
fn refuse_unsupported(config: &ContainerConfig, map: Option<&IdMap>) -> Result<()> {
    let labelled =
        security_of(config).selinux_options.is_some_and(|options| options != SeLinuxOption::default());
    if labelled && Path::new(SELINUX).exists() {
        let message = "SELinux options cannot be applied: this runtime labels no processes";
        return Err(Error::new(Code::Unimplemented, message));
    }
    for mount in &config.mounts {
        let mapped = !mount.uid_mappings.is_empty() || !mount.gid_mappings.is_empty();
        if mapped && !map.is_some_and(|map| map.matches(&mount.uid_mappings, &mount.gid_mappings)) {
            let message = format!(
                "mount {}: its ID mappings are not those of the pod's user namespace",
                mount.container_path
            );
            return Err(Error::new(Code::Unimplemented, message));
        }
    }
    Ok(())
}

/// There where the kernel has SELinux enabled.
const SELINUX: &str = "/sys/fs/selinux/enforce";
/// Changes when the compiler makes another program of the same profile.
const SECCOMP_COMPILER: &str = "3";
/// Reading, writing and making a node.
const ALL_ACCESS: &str = "rwm";
/// Directories of device descriptions; a later one overrides an earlier one.
const CDI_DIRECTORIES: &[&str] = &["/etc/cdi", "/var/run/cdi"];
/// Largest device description we read.
const MAX_CDI_FILE: u64 = 1 << 20;

fn cdi_registry(directories: &[impl AsRef<Path>]) -> spec::CdiRegistry {
    let mut registry = spec::CdiRegistry::default();
    for directory in directories {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let known = path.extension().is_some_and(|e| e == "json" || e == "yaml" || e == "yml");
            let small = path.metadata().is_ok_and(|m| m.is_file() && m.len() <= MAX_CDI_FILE);
            if known
                && small
                && let Ok(content) = std::fs::read_to_string(&path)
            {
                registry.add(&path.display().to_string(), &content);
            }
        }
    }
    registry
}

/// Makes the changes the container's CDI devices ask for; answers the nodes they consist of.
fn add_cdi_devices(
    config: &mut ContainerConfig,
    identity: &mut Identity,
    registry: &spec::CdiRegistry,
) -> Result<Vec<GivenDevice>> {
    let names: Vec<String> = config.cdi_devices.iter().map(|device| device.name.clone()).collect();
    let edits = registry.edits(&names)?;
    for entry in &edits.env {
        let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
        config.envs.push(KeyValue { key: key.to_owned(), value: value.as_bytes().to_vec() });
    }
    for mount in &edits.mounts {
        config.mounts.push(Mount {
            container_path: mount.container_path.clone(),
            host_path: mount.host_path.clone(),
            readonly: mount.options.iter().any(|option| option == "ro"),
            ..Default::default()
        });
    }
    for gid in &edits.additional_gids {
        if !identity.groups.contains(gid) {
            identity.groups.push(*gid);
        }
    }
    let mut nodes = Vec::new();
    for node in &edits.device_nodes {
        let access = if node.permissions.is_empty() { ALL_ACCESS } else { &node.permissions };
        let host = if node.host_path.is_empty() { &node.path } else { &node.host_path };
        let found =
            look_at_device(Path::new(host), Path::new(&node.path)).map_err(failed("look at device"))?;
        let mut device =
            found.ok_or_else(|| Error::invalid(format!("CDI device node {host} is not a device")))?;
        if let Some(uid) = node.uid {
            device.set_uid(Some(uid));
        }
        if let Some(gid) = node.gid {
            device.set_gid(Some(gid));
        }
        nodes.push(GivenDevice { node: device, access: access.to_owned() });
    }
    Ok(nodes)
}

/// The mount point of a path, and true if mounts below it show elsewhere, by `mountinfo`.
fn mount_of(mountinfo: &str, path: &Path) -> Option<(PathBuf, bool)> {
    let parse = |line: &str| {
        let mut fields = line.split(' ');
        let place = fields.nth(4)?.replace("\\040", " ");
        let shared = fields.skip(1).take_while(|field| *field != "-").any(|f| f.starts_with("shared:"));
        Some((PathBuf::from(place), shared))
    };
    let holding = mountinfo.lines().filter_map(parse).filter(|(place, _)| path.starts_with(place));
    // Of several mounts on one place the last is the one that is seen.
    holding.max_by_key(|(place, _)| place.components().count())
}

/// Mounts made in the container can only reach the host from a mount that is shared there.
fn check_propagation(config: &ContainerConfig) -> Result<()> {
    let bidirectional = |mount: &&Mount| mount.propagation() == MountPropagation::PropagationBidirectional;
    for mount in config.mounts.iter().filter(bidirectional) {
        let info = std::fs::read_to_string("/proc/self/mountinfo").map_err(failed("read mounts"))?;
        let path = std::fs::canonicalize(&mount.host_path)
            .map_err(|error| Error::invalid(format!("mount source {}: {error}", mount.host_path)))?;
        if let Some((place, false)) = mount_of(&info, &path) {
            let message = format!(
                "path {:?} is mounted on {:?} but it is not a shared mount",
                mount.host_path,
                place.display().to_string()
            );
            return Err(Error::invalid(message));
        }
    }
    Ok(())
}

fn pid_namespace(security: &LinuxContainerSecurityContext) -> PidNamespace {
    let options = security.namespace_options.clone().unwrap_or_default();
    match options.pid() {
        NamespaceMode::Pod => PidNamespace::Pod,
        NamespaceMode::Container => PidNamespace::Own,
        NamespaceMode::Node => PidNamespace::Host,
        NamespaceMode::Target => PidNamespace::Target(options.target_id),
    }
}

impl Inner {
    /// Writes everything the supervisor needs; the record comes last and makes the container exist.
    pub(super) fn make_bundle(
        &self,
        sandbox: &Sandbox,
        config: &ContainerConfig,
        id: &str,
        directory: &Path,
    ) -> Result<ContainerRecord> {
        let image_spec = config.image.clone().unwrap_or_default();
        let images = &self.config.images;
        let image = images.image(&image_spec.image).map_err(image_error)?;
        let lowers = images.lower_dirs(&image.id).map_err(image_error)?;
        let security = security_of(config);
        let map = user_map(&sandbox.config)?;
        refuse_unsupported(config, map.as_ref())?;
        let pid = match pid_namespace(&security) {
            PidNamespace::Target(target) => {
                let target = self.index.container(&target)?;
                if target.sandbox != sandbox.id {
                    let message = format!("target container {} is not of this pod", target.id);
                    return Err(Error::invalid(message));
                }
                PidNamespace::Target(target.id.clone())
            }
            other => other,
        };
        let mut identity = identify(&security, &image, &lowers)?;
        let mut devices = devices(config, security.privileged).map_err(failed("look at devices"))?;
        let mut edited = config.clone();
        if !config.cdi_devices.is_empty() {
            let registry = cdi_registry(CDI_DIRECTORIES);
            devices.extend(add_cdi_devices(&mut edited, &mut identity, &registry)?);
        }
        let original = config;
        let config = &edited;
        let volumes = self.image_volumes(config)?;
        let handler = self.handler_of(sandbox)?;
        if handler.is_some() && map.is_some() && pid == PidNamespace::Host {
            let message = "a container in a user namespace cannot use the node's PID namespace under an OCI runtime: it could not mount /proc";
            return Err(Error::new(Code::Unimplemented, message));
        }
        let parent = sandbox.cgroup_parent(&self.config.cgroup_parent);
        let cgroup = cgroup::systemd::container_path(&parent, id);
        for mount in config.mounts.iter().filter(|mount| !spec::is_image(mount)) {
            // As other runtimes do: a missing host path becomes a directory.
            let path = Path::new(&mount.host_path);
            if !path.exists() {
                std::fs::create_dir_all(path).map_err(|error| {
                    Error::internal(format!("make mount source {}: {error}", path.display()))
                })?;
            }
        }
        check_propagation(config)?;
        let own = |name: &str| Some(sandbox.state_dir.join(name)).filter(|path| path.exists());
        let input = spec::Input {
            config,
            image: &image,
            identity: &identity,
            hostname: &self.hostname(&sandbox.config),
            cgroup: cgroup.clone(),
            rootfs: directory.join("rootfs"),
            shm: match &self.config.extras.join_ipc {
                _ if host_ipc(&sandbox.config) => "/dev/shm".into(),
                Some(join) => join.shared_memory.clone(),
                None => sandbox.run_dir.join(SHM),
            },
            resolv_conf: own(files::RESOLV_CONF),
            hostname_file: own(files::HOSTNAME),
            hosts_file: own(files::HOSTS),
            network_namespace: (!host_network(&sandbox.config)).then(|| sandbox.run_dir.join(NETNS)),
            own_pid: pid == PidNamespace::Own,
            cgroup_v2: self.cgroups.is_v2(),
            devices,
            user_namespace: map.clone().map(|map| (sandbox.run_dir.join(USERNS), map)),
            apparmor: self.apparmor_profile(&security)?,
        };
        let mut description = spec::build(&input)?;
        let profile = seccomp_profile(&security)?;
        if let Some(linux) = description.linux_mut() {
            linux.set_seccomp(profile.clone());
        }
        if let Some(adjust) = &self.config.extras.adjust {
            adjust(&mut description);
        }
        if handler.is_some() {
            // The pod's UTS namespace is inherited and has its name already.
            description.set_hostname(None);
        }
        let writable = self.config.extras.writable.as_deref().unwrap_or(directory);
        let bundle = Bundle {
            lowers,
            upper: writable.join("upper"),
            work: writable.join("work"),
            rootfs: directory.join("rootfs"),
            seccomp: profile
                .as_ref()
                .map(|profile| self.seccomp_programs(profile))
                .transpose()?
                .unwrap_or_default(),
            images: volumes.iter().map(|(_, volume)| volume.clone()).collect(),
        };
        let record = ContainerRecord {
            created_at: sys::now(),
            image_id: image.id.clone(),
            image_ref: if image.reference.is_empty() { image.id } else { image.reference },
            identity,
            stop_signal: stop_signal(config, &image.stop_signal),
            cgroup,
            pid,
            log_path: log_path(&sandbox.config.log_directory, &config.log_path),
            start_failure: None,
            volume_images: volumes.into_iter().map(|(id, _)| id).collect(),
        };
        let write = || -> io::Result<()> {
            for path in [&bundle.upper, &bundle.work, &bundle.rootfs] {
                std::fs::create_dir_all(path)?;
            }
            if let Some(map) = &map {
                // The root of the container's file system belongs to the container's root.
                std::os::unix::fs::chown(&bundle.upper, map.host_uid(0), map.host_gid(0))?;
            }
            sys::write_atomic(&directory.join(CONFIG), &serde_json::to_vec(&description)?, false)?;
            sys::write_atomic(&directory.join(BUNDLE), &serde_json::to_vec(&bundle)?, false)?;
            records::write(directory, original, &record)
        };
        write().map_err(failed("write container"))?;
        Ok(record)
    }

    /// The images the container mounts: their identities and layers.
    fn image_volumes(&self, config: &ContainerConfig) -> Result<Vec<(String, ImageVolume)>> {
        let images = &self.config.images;
        let find = |mount: &Mount| {
            let name = mount.image.as_ref().map(|image| image.image.as_str()).unwrap_or_default();
            let image = images.image(name).map_err(image_error)?;
            let lowers = images.lower_dirs(&image.id).map_err(image_error)?;
            Ok((image.id, ImageVolume { lowers, sub_path: mount.image_sub_path.clone() }))
        };
        config.mounts.iter().filter(|mount| spec::is_image(mount)).map(find).collect()
    }

    /// Programs are shared by every container with the same profile and named by their content.
    fn seccomp_programs(&self, profile: &oci_spec::runtime::LinuxSeccomp) -> Result<Vec<PathBuf>> {
        let mut text = serde_json::to_vec(profile).map_err(|error| Error::internal(error.to_string()))?;
        // Programs of an earlier compiler are not ours.
        text.extend(SECCOMP_COMPILER.as_bytes());
        let digest = ring::digest::digest(&ring::digest::SHA256, &text);
        let name: String = digest.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let directory = self.config.root.join("seccomp").join(name);
        let done = directory.join("done");
        let write = |programs: &[Vec<u8>]| -> io::Result<()> {
            std::fs::create_dir_all(&directory)?;
            for (index, program) in programs.iter().enumerate() {
                sys::write_atomic(&directory.join(index.to_string()), program, false)?;
            }
            sys::write_atomic(&done, programs.len().to_string().as_bytes(), false)
        };
        let count = match std::fs::read_to_string(&done).ok().and_then(|text| text.parse::<usize>().ok()) {
            Some(count) => count,
            None => {
                let programs = spec::compile(profile)?;
                write(&programs).map_err(failed("write seccomp programs"))?;
                programs.len()
            }
        };
        Ok((0..count).map(|index| directory.join(index.to_string())).collect())
    }
}

fn log_path(directory: &str, path: &str) -> Option<PathBuf> {
    (!directory.is_empty() && !path.is_empty()).then(|| Path::new(directory).join(path))
}

/// The pod's signal, the image's, SIGTERM.
fn stop_signal(config: &ContainerConfig, image: &str) -> i32 {
    spec::signal_from_cri(config.stop_signal())
        .or_else(|| spec::signal_from_name(image))
        .unwrap_or(libc::SIGTERM)
}

/// Looks users and groups up in the topmost layer that has the file.
fn identify(
    security: &LinuxContainerSecurityContext,
    image: &ImageConfigView,
    lowers: &[PathBuf],
) -> Result<Identity> {
    let policy = security.supplemental_groups_policy();
    let request = IdentityRequest {
        image_user: &image.user,
        run_as_user: security.run_as_user.as_ref().map(|user| user.value),
        run_as_username: &security.run_as_username,
        run_as_group: security.run_as_group.as_ref().map(|group| group.value),
        supplemental_groups: &security.supplemental_groups,
        strict_groups: policy == SupplementalGroupsPolicy::Strict,
    };
    let passwd = read_from_layers(lowers, Path::new("/etc/passwd"));
    let group = read_from_layers(lowers, Path::new("/etc/group"));
    Ok(spec::resolve_identity(&request, &passwd, &group)?)
}

/// Largest passwd or group file we read from an image.
const MAX_FILE: u64 = 4 << 20;

fn read_from_layers(lowers: &[PathBuf], path: &Path) -> String {
    use std::io::Read;
    for lower in lowers {
        let Ok(root) = std::fs::File::open(lower) else { continue };
        let Ok(file) = sys::open_regular_in_root(root.as_fd(), path) else { continue };
        let mut bytes = Vec::new();
        if file.take(MAX_FILE).read_to_end(&mut bytes).is_ok() {
            return String::from_utf8_lossy(&bytes).into_owned();
        }
    }
    String::new()
}

/// Largest seccomp profile we read.
const MAX_PROFILE: u64 = 1 << 20;

fn seccomp_profile(
    security: &LinuxContainerSecurityContext,
) -> Result<Option<oci_spec::runtime::LinuxSeccomp>> {
    if security.privileged {
        return Ok(None);
    }
    // Without a word about it a container runs unconfined, as upstream.
    let Some(profile) = &security.seccomp else { return Ok(None) };
    match profile.profile_type() {
        ProfileType::Unconfined => Ok(None),
        ProfileType::RuntimeDefault => {
            Ok(Some(spec::default_profile(&spec::capabilities(security)?.bounding)))
        }
        ProfileType::Localhost => {
            let path = Path::new(&profile.localhost_ref);
            let load =
                |problem: String| Error::invalid(format!("cannot load seccomp profile {path:?}: {problem}"));
            if !path.is_absolute() {
                return Err(load("the path must be absolute".into()));
            }
            let bytes =
                ferrite_hostfs::read_head(path, MAX_PROFILE + 1).map_err(|error| load(error.to_string()))?;
            if bytes.len() as u64 > MAX_PROFILE {
                return Err(load(format!("it has more than {MAX_PROFILE} bytes")));
            }
            Ok(Some(spec::parse_profile(&bytes)?))
        }
    }
}

/// The devices a container asked for, or every device of the node for a privileged one.
fn devices(config: &ContainerConfig, privileged: bool) -> io::Result<Vec<GivenDevice>> {
    let mut given = Vec::new();
    let mut give = |nodes: Vec<LinuxDevice>, access: &str| {
        given.extend(nodes.into_iter().map(|node| GivenDevice { node, access: access.to_owned() }));
    };
    if privileged {
        let mut found = Vec::new();
        collect_devices(Path::new("/dev"), Path::new("/dev"), 0, &mut found)?;
        give(found, ALL_ACCESS);
    }
    for device in &config.devices {
        let (host, inside) = (Path::new(&device.host_path), Path::new(&device.container_path));
        let mut found = Vec::new();
        if let Some(node) = look_at_device(host, inside)? {
            found.push(node);
        } else if host.is_dir() {
            collect_devices(host, inside, 0, &mut found)?;
        }
        give(found, if device.permissions.is_empty() { ALL_ACCESS } else { &device.permissions });
    }
    Ok(given)
}

fn look_at_device(host: &Path, inside: &Path) -> io::Result<Option<LinuxDevice>> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let metadata = std::fs::metadata(host)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", host.display())))?;
    let typ = match metadata.file_type() {
        kind if kind.is_char_device() => LinuxDeviceType::C,
        kind if kind.is_block_device() => LinuxDeviceType::B,
        _ => return Ok(None),
    };
    let mut device = LinuxDevice::default();
    device
        .set_path(inside.to_owned())
        .set_typ(typ)
        .set_major(i64::from(libc::major(metadata.rdev())))
        .set_minor(i64::from(libc::minor(metadata.rdev())))
        .set_file_mode(Some(metadata.mode() & 0o7777))
        .set_uid(Some(metadata.uid()))
        .set_gid(Some(metadata.gid()));
    Ok(Some(device))
}

fn collect_devices(host: &Path, inside: &Path, depth: u32, found: &mut Vec<LinuxDevice>) -> io::Result<()> {
    // These are the container's own, or mounts.
    const SKIPPED: &[&str] =
        &["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev", "console", "ptmx"];
    for entry in std::fs::read_dir(host)?.flatten() {
        let name = entry.file_name();
        if SKIPPED.iter().any(|skipped| name == *skipped) {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if depth < 8 {
                collect_devices(&entry.path(), &inside.join(&name), depth + 1, found)?;
            }
        } else if !kind.is_symlink()
            && let Some(device) = look_at_device(&entry.path(), &inside.join(&name))?
        {
            found.push(device);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cri::v1::CdiDevice;

    #[test]
    fn the_mount_that_holds_a_path() {
        let info = "20 1 0:1 / / rw - ext4 /dev/a rw\n\
            21 20 0:2 / /srv rw shared:7 - tmpfs t rw\n\
            22 21 0:3 / /srv/a\\040b rw master:3 - tmpfs t rw\n";
        for (path, expected) in [
            ("/etc", ("/", false)),
            ("/srv", ("/srv", true)),
            ("/srv/x/y", ("/srv", true)),
            ("/srvx", ("/", false)),
            ("/srv/a b/c", ("/srv/a b", false)),
        ] {
            let found = mount_of(info, Path::new(path));
            assert_eq!(found, Some((PathBuf::from(expected.0), expected.1)), "{path}");
        }
    }

    #[test]
    fn cdi_devices_change_the_container() {
        let directory = tempfile::tempdir().unwrap();
        let text = r#"{"cdiVersion":"0.6.0","kind":"test.org/dev","devices":[{"name":"a","containerEdits":{
            "env":["X=1"],"deviceNodes":[{"path":"/dev/mynull","hostPath":"/dev/null","gid":44}],
            "mounts":[{"hostPath":"/h","containerPath":"/c","options":["ro"]}],"additionalGids":[44]}}]}"#;
        std::fs::write(directory.path().join("dev.json"), text).unwrap();
        std::fs::write(directory.path().join("notes.txt"), "{").unwrap();
        let registry = cdi_registry(&[directory.path()]);
        let mut config = ContainerConfig {
            cdi_devices: vec![CdiDevice { name: "test.org/dev=a".into() }],
            ..Default::default()
        };
        let mut identity = Identity::default();
        let nodes = add_cdi_devices(&mut config, &mut identity, &registry).unwrap();
        assert_eq!(nodes[0].node.path(), Path::new("/dev/mynull"));
        assert_eq!((nodes[0].node.major(), nodes[0].node.minor(), nodes[0].node.gid()), (1, 3, Some(44)));
        assert_eq!(config.envs[0].value, b"1");
        assert!(config.mounts[0].readonly);
        assert_eq!(identity.groups, [44]);
    }
}
