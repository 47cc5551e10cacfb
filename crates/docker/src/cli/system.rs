//! `inspect`, `events`, `volume`, `info` and `version`.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{Failure, Outcome, say, table};
use crate::engine::{Engine, EngineError, Event};
use crate::record::Status;
use crate::template::Template;
use crate::units;

#[derive(Debug, Args)]
pub struct Inspect {
    /// Format the output using the given Go template
    #[arg(short, long)]
    format: Option<String>,
    /// Return JSON for specified type
    #[arg(long = "type", value_parser = ["container", "image", "volume", "network"])]
    kind: Option<String>,
    /// Display total file sizes if the type is container
    #[arg(short, long)]
    size: bool,
    #[arg(required = true)]
    names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Format {
    /// Format the output using the given Go template
    #[arg(short, long)]
    format: Option<String>,
}

#[derive(Debug, Args)]
pub struct Events {
    /// Show all events created since timestamp
    #[arg(long)]
    since: Option<String>,
    /// Stream events until this timestamp
    #[arg(long)]
    until: Option<String>,
    /// Filter output based on conditions provided
    #[arg(short, long)]
    filter: Vec<String>,
    /// Format the output using the given Go template
    #[arg(long)]
    format: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create a volume
    Create { name: Option<String> },
    /// List volumes
    Ls {
        /// Only display volume names
        #[arg(short, long)]
        quiet: bool,
        /// Pretty-print volumes using a Go template
        #[arg(long)]
        format: Option<String>,
    },
    /// Display detailed information on one or more volumes
    Inspect {
        /// Format the output using the given Go template
        #[arg(short, long)]
        format: Option<String>,
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove one or more volumes
    Rm {
        /// Absent volumes are no failure
        #[arg(short, long)]
        force: bool,
        #[arg(required = true)]
        names: Vec<String>,
    },
}

fn volume_json(volume: &crate::engine::Volume) -> Value {
    json!({"Name": volume.name, "Driver": "local", "Mountpoint": volume.mountpoint, "Scope": "local", "Labels": null, "Options": null})
}

/// Prints the found objects, in a list or each by a template, and reports the missing ones.
pub(super) fn show_found(found: &[Value], missing: &[String], format: Option<&str>) -> Outcome {
    match format {
        None => say(&serde_json::to_string_pretty(&found).unwrap_or_default())?,
        Some(format) => {
            let format = if format == "json" { "{{json .}}" } else { format };
            let template = Template::parse(format)?;
            for value in found {
                say(&template.render(value)?)?;
            }
        }
    }
    for message in missing {
        complain!("{message}");
    }
    Ok(u8::from(!missing.is_empty()))
}

impl Inspect {
    pub fn run(self, engine: &Engine) -> Outcome {
        let kind = self.kind.as_deref();
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for name in &self.names {
            let container = || match engine.inspect(name) {
                Ok(mut value) => {
                    if self.size {
                        value["SizeRw"] = value["Id"].as_str().map_or(0, |id| engine.written(id)).into();
                    }
                    Ok(Some(value))
                }
                Err(EngineError::NoSuchContainer(_)) => Ok(None),
                Err(error) => Err(error),
            };
            let image = || match engine.inspect_image(name) {
                Ok(value) => Ok(Some(value)),
                Err(EngineError::NoSuchImage(_)) => Ok(None),
                Err(error) => Err(error),
            };
            let volume = || engine.find_volume(name).ok().map(|volume| volume_json(&volume));
            let network = || engine.inspect_network(name).ok();
            let value = match kind {
                Some("container") => container()?,
                Some("image") => image()?,
                Some("volume") => volume(),
                Some("network") => network(),
                _ => match container()? {
                    Some(value) => Some(value),
                    None => image()?.or_else(network).or_else(volume),
                },
            };
            match value {
                Some(value) => found.push(value),
                None => missing.push(format!("Error: No such {}: {name}", kind.unwrap_or("object"))),
            }
        }
        show_found(&found, &missing, self.format.as_deref())
    }
}

impl VolumeCommand {
    pub fn run(self, engine: &Engine) -> Outcome {
        match self {
            Self::Create { name } => {
                let name = name.unwrap_or_else(|| {
                    rand::random::<[u8; 32]>().iter().map(|byte| format!("{byte:02x}")).collect()
                });
                say(&engine.create_volume(&name)?.0.name)?;
                Ok(0)
            }
            Self::Ls { quiet, format } => {
                let volumes = engine.volumes()?;
                if quiet {
                    for volume in volumes {
                        say(&volume.name)?;
                    }
                    return Ok(0);
                }
                let rows: Vec<Value> = volumes.iter().map(volume_json).collect();
                let columns = &[("DRIVER", "Driver"), ("VOLUME NAME", "Name")];
                table::show(
                    &rows,
                    format.as_deref(),
                    columns,
                    &[("Driver", "DRIVER"), ("Name", "VOLUME NAME")],
                )?;
                Ok(0)
            }
            Self::Inspect { format, names } => {
                let (mut found, mut missing) = (Vec::new(), Vec::new());
                for name in names {
                    match engine.find_volume(&name) {
                        Ok(volume) => found.push(volume_json(&volume)),
                        Err(error) => missing.push(format!("Error response from daemon: {error}")),
                    }
                }
                show_found(&found, &missing, format.as_deref())
            }
            Self::Rm { force, names } => {
                let mut code = 0;
                for name in names {
                    match engine.remove_volume(&name) {
                        Ok(()) => say(&name)?,
                        Err(EngineError::NoSuchVolume(_)) if force => {}
                        Err(error) => {
                            complain!("Error response from daemon: {error}");
                            code = 1;
                        }
                    }
                }
                Ok(code)
            }
        }
    }
}

fn event_line(event: &Event) -> String {
    let attributes: Vec<String> =
        event.attributes.iter().map(|(key, value)| format!("{key}={value}")).collect();
    format!(
        "{} {} {} {} ({})",
        units::rfc3339(event.time),
        event.kind,
        event.action,
        event.id,
        attributes.join(", ")
    )
}

impl Events {
    fn wanted(&self, event: &Event) -> bool {
        let one = |filter: &str| {
            let (key, value) = filter.split_once('=').unwrap_or((filter, ""));
            match key {
                "type" => event.kind == value,
                "event" => event.action == value,
                "container" => {
                    event.kind == "container"
                        && (event.id.starts_with(value)
                            || event.attributes.get("name").is_some_and(|n| n == value))
                }
                "image" => {
                    event.attributes.get("image").or(event.attributes.get("name")).is_some_and(|n| n == value)
                }
                "label" => match value.split_once('=') {
                    Some((key, value)) => event.attributes.get(key).is_some_and(|known| known == value),
                    None => event.attributes.contains_key(value),
                },
                _ => false,
            }
        };
        let key = |filter: &str| filter.split('=').next().unwrap_or_default().to_owned();
        self.filter.iter().all(|filter| {
            self.filter.iter().filter(|other| key(other) == key(filter)).any(|other| one(other))
        })
    }

    pub fn run(self, engine: &Engine) -> Outcome {
        let now = units::now();
        let moment =
            |text: &Option<String>| text.as_deref().map(|text| units::parse_moment(text, now)).transpose();
        let until = moment(&self.until)?;
        let since = moment(&self.since)?.unwrap_or(now);
        let template = match self.format.as_deref() {
            None => None,
            Some("json") => Some(Template::parse("{{json .}}")?),
            Some(format) => Some(Template::parse(format)?),
        };
        let show = |event: &Event| -> Result<(), Failure> {
            if !self.wanted(event) || until.is_some_and(|until| event.time > until) {
                return Ok(());
            }
            match &template {
                None => say(&event_line(event)),
                Some(template) => {
                    let value = json!({
                        "Type": event.kind, "Action": event.action, "status": event.action, "id": event.id,
                        "ID": event.id, "Status": event.action, "scope": "local",
                        "Actor": {"ID": event.id, "Attributes": event.attributes},
                        "time": event.time / 1_000_000_000, "timeNano": event.time,
                        "Time": event.time / 1_000_000_000, "TimeNano": event.time,
                        "from": event.attributes.get("image"),
                    });
                    say(&template.render(&value)?)
                }
            }
        };
        let mut follow = engine.events(since)?;
        for event in std::mem::take(&mut follow.past) {
            show(&event)?;
        }
        loop {
            if until.is_some_and(|until| units::now() >= until) {
                return Ok(0);
            }
            for event in follow.next(until)? {
                show(&event)?;
            }
        }
    }
}

pub fn version(format: &Format) -> Outcome {
    let kernel = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    let (version, arch) = (env!("CARGO_PKG_VERSION"), architecture());
    let value = json!({
        "Client": {"Version": version, "ApiVersion": "1.40", "Os": "linux", "Arch": arch},
        "Server": {
            "Version": version, "ApiVersion": "1.40", "MinAPIVersion": "1.12", "Os": "linux", "Arch": arch,
            "KernelVersion": kernel,
        },
    });
    if format.format.is_some() {
        return show_found(&[value], &[], format.format.as_deref());
    }
    for part in ["Client", "Server"] {
        say(&format!("{part}: Ferrite"))?;
        say(&format!(" Version:           {version}"))?;
        say(" API version:       1.40")?;
        say(&format!(" OS/Arch:           linux/{arch}"))?;
    }
    Ok(0)
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub fn info(engine: &Engine, format: &Format) -> Outcome {
    let views = engine.list()?;
    let count = |wanted: &[Status]| views.iter().filter(|view| wanted.contains(&view.state.status)).count();
    let images: std::collections::BTreeSet<String> =
        engine.images()?.into_iter().map(|image| image.id).collect();
    let name = nix::sys::utsname::uname().ok();
    let text =
        |value: Option<&std::ffi::OsStr>| value.map(|v| v.to_string_lossy().into_owned()).unwrap_or_default();
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let system = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map_or_else(|| "Linux".into(), |name| name.trim_matches('"').to_owned());
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory: u64 = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let unified = ferrite_cgroup::Layout::detect().is_ok_and(|layout| layout.is_v2());
    let version = if unified { "2" } else { "1" };
    let value = json!({
        "Containers": views.len(),
        "ContainersRunning": count(&[Status::Running, Status::Restarting]),
        "ContainersPaused": count(&[Status::Paused]),
        "ContainersStopped": count(&[Status::Created, Status::Exited, Status::Dead]),
        "Images": images.len(),
        "ServerVersion": env!("CARGO_PKG_VERSION"),
        "Driver": "overlay2",
        "LoggingDriver": "cri",
        "CgroupDriver": "cgroupfs",
        "CgroupVersion": version,
        "Runtimes": {"ferrite": {"path": "built-in"}},
        "DefaultRuntime": "ferrite",
        "InitBinary": "built-in",
        "SecurityOptions": ["name=seccomp,profile=default"],
        "KernelVersion": text(name.as_ref().map(|name| name.release())),
        "OperatingSystem": system,
        "OSType": "linux",
        "Architecture": text(name.as_ref().map(|name| name.machine())),
        "NCPU": cpus,
        "MemTotal": memory * 1024,
        "Name": text(name.as_ref().map(|name| name.nodename())),
        "DockerRootDir": engine.paths().root(),
        "Debug": false,
        "ExperimentalBuild": false,
        "LiveRestoreEnabled": true,
        "Plugins": {"Volume": ["local"], "Network": ["bridge", "host", "null"]},
    });
    if format.format.is_some() {
        return show_found(&[value], &[], format.format.as_deref());
    }
    let show = |key: &str| match &value[key] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    for (label, key) in [
        ("Containers", "Containers"),
        (" Running", "ContainersRunning"),
        (" Paused", "ContainersPaused"),
        (" Stopped", "ContainersStopped"),
        ("Images", "Images"),
        ("Server Version", "ServerVersion"),
        ("Storage Driver", "Driver"),
        ("Logging Driver", "LoggingDriver"),
        ("Cgroup Driver", "CgroupDriver"),
        ("Cgroup Version", "CgroupVersion"),
        ("Default Runtime", "DefaultRuntime"),
        ("Init Binary", "InitBinary"),
        ("Kernel Version", "KernelVersion"),
        ("Operating System", "OperatingSystem"),
        ("OSType", "OSType"),
        ("Architecture", "Architecture"),
        ("CPUs", "NCPU"),
    ] {
        say(&format!(" {label}: {}", show(key)))?;
    }
    say(&format!(" Total Memory: {}", units::binary_size(memory * 1024)))?;
    for (label, key) in [
        ("Name", "Name"),
        ("Docker Root Dir", "DockerRootDir"),
        ("Live Restore Enabled", "LiveRestoreEnabled"),
    ] {
        say(&format!(" {label}: {}", show(key)))?;
    }
    Ok(0)
}
