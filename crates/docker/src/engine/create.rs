//! A container that does not run yet: image and request become a record.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ferrite_runtime::image::{ImageRecord, ImageView};

use super::{Engine, EngineError, Result, blocking};
use crate::names;
use crate::ports::parse_exposed;
use crate::record::{Config, Container, HostConfig, Joined, MountKind, MountPoint, State};
use crate::units;

/// Less than this no program starts in.
const MIN_MEMORY: i64 = 4 << 20;

/// The description of a container to make. The image supplies what `config` leaves empty.
#[derive(Debug, Clone, Default)]
pub struct CreateRequest {
    /// Empty for a generated one.
    pub name: String,
    pub config: Config,
    /// `--entrypoint`: replaces the image's entrypoint and drops its command.
    pub entrypoint: Option<Vec<String>>,
    pub host: HostConfig,
    pub mounts: Vec<VolumeRequest>,
    /// By name or id; with none the container is on `host.network`.
    pub networks: Vec<Joined>,
}

/// `-v` or `--mount`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeRequest {
    /// An absolute path of the host, a volume's name, or empty for an anonymous volume.
    pub source: String,
    pub destination: String,
    pub read_only: bool,
    pub propagation: String,
    /// `--mount type=bind` refuses a source that is not there; `-v` makes it.
    pub must_exist: bool,
    /// Files of the image are copied into a new volume.
    pub copy: bool,
}

pub(super) fn new_id() -> String {
    rand::random::<[u8; 32]>().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Image variables, with the user's in their place.
fn merge_env(image: &[String], own: &[String]) -> Vec<String> {
    let key = |entry: &str| entry.split('=').next().unwrap_or_default().to_owned();
    let mut merged: Vec<String> = own.to_vec();
    merged.extend(image.iter().filter(|entry| !own.iter().any(|o| key(o) == key(entry))).cloned());
    merged
}

/// The image's configuration with the requested changes.
fn merge(request: &CreateRequest, image: &ImageRecord) -> Result<Config> {
    let from = image.config.config().clone().unwrap_or_default();
    let list = |values: &Option<Vec<String>>| values.clone().unwrap_or_default();
    let mut config = request.config.clone();
    match &request.entrypoint {
        Some(entrypoint) => config.entrypoint = entrypoint.clone(),
        None => {
            config.entrypoint = list(from.entrypoint());
            if config.cmd.is_empty() {
                config.cmd = list(from.cmd());
            }
        }
    }
    if config.command().first().is_none_or(String::is_empty) {
        return Err(EngineError::Invalid("No command specified".into()));
    }
    config.env = merge_env(&list(from.env()), &config.env);
    let or = |own: &mut String, image: &Option<String>| {
        if own.is_empty() {
            *own = image.clone().unwrap_or_default();
        }
    };
    or(&mut config.user, from.user());
    or(&mut config.working_dir, from.working_dir());
    or(&mut config.stop_signal, from.stop_signal());
    let labels: BTreeMap<String, String> =
        from.labels().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
    for (key, value) in labels {
        config.labels.entry(key).or_insert(value);
    }
    for port in list(from.exposed_ports()) {
        config.exposed.extend(parse_exposed(&port).unwrap_or_default());
    }
    config.exposed.extend(request.host.ports.iter().map(|port| (port.container, port.protocol)));
    config.exposed.sort_unstable();
    config.exposed.dedup();
    config.volumes.extend(list(from.volumes()));
    config.volumes.sort();
    config.volumes.dedup();
    if !config.stop_signal.is_empty()
        && ferrite_runtime::standalone::signal_from_name(&config.stop_signal).is_none()
    {
        return Err(EngineError::Invalid(format!("Invalid signal: {}", config.stop_signal)));
    }
    if !config.working_dir.is_empty() && !config.working_dir.starts_with('/') {
        return Err(EngineError::Invalid(format!(
            "the working directory '{}' is invalid, it needs to be an absolute path",
            config.working_dir
        )));
    }
    Ok(config)
}

fn check(host: &HostConfig) -> Result<()> {
    let fail = |text: &str| Err(EngineError::Invalid(text.to_owned()));
    if host.memory != 0 && host.memory < MIN_MEMORY {
        return fail("Minimum memory limit allowed is 4MB");
    }
    if host.memory_swap > 0 && host.memory == 0 {
        return fail("You should always set the Memory limit when using Memoryswap limit, see usage");
    }
    if host.memory_swap > 0 && host.memory_swap < host.memory {
        return fail("Minimum memoryswap limit should be larger than memory limit, see usage");
    }
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as i64;
    if host.nano_cpus < 0 || host.nano_cpus > cpus.saturating_mul(1_000_000_000) {
        return Err(EngineError::Invalid(format!(
            "Range of CPUs is from 0.01 to {cpus}.00, as there are only {cpus} CPUs available"
        )));
    }
    let restarts = host.restart != crate::restart::RestartPolicy::No;
    if host.auto_remove && restarts {
        return fail("can't create 'AutoRemove' container with restart policy");
    }
    if host.shm_size < 0 {
        return fail("SHM size can not be less than 0");
    }
    for (option, mode, allowed) in [
        ("pid", &host.pid, &["", "host"][..]),
        ("ipc", &host.ipc, &["", "host", "private", "shareable", "none"]),
        ("uts", &host.uts, &["", "host"]),
    ] {
        let target = mode.strip_prefix("container:").is_some_and(|name| !name.is_empty() && option != "uts");
        if !allowed.contains(&mode.as_str()) && !target {
            return Err(EngineError::Invalid(format!("invalid {} mode: {mode}", option.to_uppercase())));
        }
    }
    let shares = host.network.starts_with("container:");
    if shares && !host.ports.is_empty() {
        return fail("conflicting options: port publishing and the container type network mode");
    }
    if shares && !host.extra_hosts.is_empty() {
        return fail("conflicting options: custom host-to-IP mapping and the container type network mode");
    }
    if shares && !(host.dns.is_empty() && host.dns_search.is_empty()) {
        return fail("conflicting options: dns and the network mode");
    }
    for entry in &host.extra_hosts {
        let good = entry.split_once([':', '=']).is_some_and(|(name, address)| {
            !name.is_empty() && (address == "host-gateway" || address.parse::<std::net::IpAddr>().is_ok())
        });
        if !good {
            return Err(EngineError::Invalid(format!("invalid IP address in add-host: {entry:?}")));
        }
    }
    Ok(())
}

impl Engine {
    /// Makes a container of an image that is here. Returns its id and the warnings for the user.
    pub async fn create(&self, mut request: CreateRequest) -> Result<(String, Vec<String>)> {
        check(&request.host)?;
        if !request.name.is_empty() && !names::is_valid(&request.name) {
            return Err(EngineError::Invalid(format!(
                "Invalid container name ({}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed",
                request.name
            )));
        }
        let named = |mode: &str| -> Result<String> {
            match mode.strip_prefix("container:") {
                Some(target) => Ok(format!("container:{}", self.find(target)?.container.id)),
                None => Ok(mode.to_owned()),
            }
        };
        let host = &mut request.host;
        for mode in [&mut host.network, &mut host.pid, &mut host.ipc] {
            *mode = named(mode)?;
        }
        if matches!(host.network.as_str(), "" | "default") {
            host.network = "bridge".into();
        }
        request.networks = if host.is_on_networks() {
            self.resolve_networks(&host.network, request.networks)?
        } else {
            Vec::new()
        };
        // Nobody may remove the image between its lookup and the record of its use.
        let _lock = self.registry_lock().await?;
        let engine = self.clone();
        blocking(move || engine.create_locked(&request)).await
    }

    fn create_locked(&self, request: &CreateRequest) -> Result<(String, Vec<String>)> {
        let images = ImageView::of(self.paths.images())?;
        let named = &request.config.image;
        let image = images.find(named)?.ok_or_else(|| EngineError::NoSuchImage(named.clone()))?;
        let existing = self.list()?;
        let taken = |name: &str| existing.iter().find(|view| view.container.name == name);
        let name = if request.name.is_empty() {
            names::random(|name| taken(name).is_some())
        } else if let Some(view) = taken(&request.name) {
            return Err(EngineError::Conflict(format!(
                "Conflict. The container name \"/{}\" is already in use by container \"{}\". You have to remove \
                 (or rename) that container to be able to reuse that name.",
                request.name, view.container.id
            )));
        } else {
            request.name.clone()
        };
        let id = new_id();
        let mut config = merge(request, &image)?;
        if config.hostname.is_empty() {
            config.hostname = if request.host.network == "host" || request.host.uts == "host" {
                nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default()
            } else {
                id[..12].to_owned()
            };
        }
        let lowers = images.lower_dirs(&image.id);
        let mut container = Container {
            id: id.clone(),
            name,
            created: units::now(),
            image_id: image.id.to_string(),
            lowers,
            config,
            host: request.host.clone(),
            mounts: Vec::new(),
            networks: request.networks.clone(),
        };
        container.mounts = self.make_mounts(request, &container)?;
        let directory = self.directory(&id);
        let make = || {
            std::fs::DirBuilder::new().mode(0o710).create(&directory)?;
            State::default().write(&directory)?;
            // Written last: without it there is no container.
            container.write(&directory)
        };
        make().map_err(EngineError::io("create container"))?;
        self.note(&container, "create", &[]);
        Ok((id, Vec::new()))
    }

    fn make_mounts(&self, request: &CreateRequest, container: &Container) -> Result<Vec<MountPoint>> {
        let mut mounts: Vec<MountPoint> = Vec::new();
        let anonymous = container.config.volumes.iter().map(|destination| VolumeRequest {
            source: String::new(),
            destination: destination.clone(),
            read_only: false,
            propagation: String::new(),
            must_exist: false,
            copy: true,
        });
        for wanted in request.mounts.iter().cloned().chain(anonymous) {
            let destination: PathBuf = Path::new(&wanted.destination).components().collect();
            let destination = destination.display().to_string();
            if !destination.starts_with('/') || destination == "/" {
                return Err(EngineError::Invalid(format!(
                    "invalid mount config for type \"volume\": invalid mount path: '{}' mount path must be absolute \
                     and not '/'",
                    wanted.destination
                )));
            }
            let known = mounts.iter().any(|mount| mount.destination == destination)
                || container.host.tmpfs.contains_key(&destination);
            if known {
                // The user's mounts go before the image's; a destination given twice is an error.
                if wanted.source.is_empty() {
                    continue;
                }
                return Err(EngineError::Invalid(format!("Duplicate mount point: {destination}")));
            }
            let propagation =
                if wanted.propagation.is_empty() { "rprivate".into() } else { wanted.propagation.clone() };
            if wanted.source.starts_with('/') {
                let source = PathBuf::from(&wanted.source);
                if !source.exists() {
                    if wanted.must_exist {
                        return Err(EngineError::Invalid(format!(
                            "invalid mount config for type \"bind\": bind source path does not exist: {}",
                            wanted.source
                        )));
                    }
                    std::fs::create_dir_all(&source).map_err(EngineError::io(format!(
                        "error while creating mount source path '{}'",
                        wanted.source
                    )))?;
                }
                mounts.push(MountPoint {
                    kind: MountKind::Bind,
                    name: String::new(),
                    source,
                    destination,
                    read_only: wanted.read_only,
                    propagation,
                    anonymous: false,
                });
                continue;
            }
            let anonymous = wanted.source.is_empty();
            let name = if anonymous { new_id() } else { wanted.source.clone() };
            let (volume, new) = self.create_volume(&name)?;
            if new && wanted.copy {
                self.seed_volume(container, &destination, &volume.mountpoint)?;
            }
            mounts.push(MountPoint {
                kind: MountKind::Volume,
                name,
                source: volume.mountpoint,
                destination,
                read_only: wanted.read_only,
                propagation: String::new(),
                anonymous,
            });
        }
        Ok(mounts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments() {
        let list = |entries: &[&str]| entries.iter().map(|e| (*e).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            merge_env(&list(&["PATH=/bin", "A=1"]), &list(&["A=2", "B=3"])),
            list(&["A=2", "B=3", "PATH=/bin"])
        );
    }

    #[test]
    fn hosts_that_cannot_be() {
        let good = HostConfig::default();
        check(&good).unwrap();
        let rows = [
            ("4MB", HostConfig { memory: 1 << 20, ..good.clone() }),
            ("Memoryswap", HostConfig { memory_swap: 1 << 30, ..good.clone() }),
            ("larger", HostConfig { memory: 1 << 30, memory_swap: 1 << 20, ..good.clone() }),
            ("Range of CPUs", HostConfig { nano_cpus: i64::MAX, ..good.clone() }),
            (
                "AutoRemove",
                HostConfig {
                    auto_remove: true,
                    restart: crate::restart::RestartPolicy::Always,
                    ..good.clone()
                },
            ),
            ("PID mode", HostConfig { pid: "container:".into(), ..good.clone() }),
            ("IPC mode", HostConfig { ipc: "what".into(), ..good.clone() }),
            ("UTS mode", HostConfig { uts: "container:a".into(), ..good.clone() }),
            ("add-host", HostConfig { extra_hosts: vec!["a:b".into()], ..good.clone() }),
        ];
        for (want, host) in rows {
            let text = check(&host).unwrap_err().to_string();
            assert!(text.contains(want), "{text}");
        }
    }
}
