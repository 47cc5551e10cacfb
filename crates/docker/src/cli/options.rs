//! The options of `run` and `create`, and the engine's requests for them.

use std::collections::BTreeMap;

use clap::Args;

use crate::engine::{CreateRequest, VolumeRequest};
use crate::ports::{parse_binding, parse_exposed};
use crate::record::{Config, Device, HostConfig, Joined, Ulimit};
use crate::restart::RestartPolicy;
use crate::units::parse_bytes;

/// Options of a new container.
#[derive(Debug, Clone, Args)]
#[command(disable_help_flag = true)]
pub struct ContainerOptions {
    /// Print usage
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Assign a name to the container
    #[arg(long, default_value = "")]
    pub name: String,
    /// Allocate a pseudo-TTY
    #[arg(short, long)]
    pub tty: bool,
    /// Keep STDIN open even if not attached
    #[arg(short, long)]
    pub interactive: bool,
    /// Set environment variables
    #[arg(short, long)]
    env: Vec<String>,
    /// Read in a file of environment variables
    #[arg(long)]
    env_file: Vec<String>,
    /// Set meta data on a container
    #[arg(short, long)]
    label: Vec<String>,
    /// Read in a line delimited file of labels
    #[arg(long)]
    label_file: Vec<String>,
    /// Bind mount a volume
    #[arg(short, long)]
    volume: Vec<String>,
    /// Attach a filesystem mount to the container
    #[arg(long)]
    mount: Vec<String>,
    /// Mount a tmpfs directory
    #[arg(long)]
    tmpfs: Vec<String>,
    /// Publish a container's port(s) to the host
    #[arg(short, long)]
    publish: Vec<String>,
    /// Publish all exposed ports to random ports
    #[arg(short = 'P', long)]
    publish_all: bool,
    /// Expose a port or a range of ports
    #[arg(long)]
    expose: Vec<String>,
    /// Connect a container to a network: its name, bridge, host, none or container:<name|id>
    #[arg(long, visible_alias = "net")]
    network: Vec<String>,
    /// Add network-scoped alias for the container
    #[arg(long, visible_alias = "net-alias")]
    network_alias: Vec<String>,
    /// IPv4 address (e.g., 172.30.100.104)
    #[arg(long)]
    ip: Option<std::net::Ipv4Addr>,
    /// Add a custom host-to-IP mapping (host:ip)
    #[arg(long)]
    add_host: Vec<String>,
    /// Set custom DNS servers
    #[arg(long)]
    dns: Vec<String>,
    /// Set custom DNS search domains
    #[arg(long)]
    dns_search: Vec<String>,
    /// Set DNS options
    #[arg(long, visible_alias = "dns-opt")]
    dns_option: Vec<String>,
    /// Container host name
    #[arg(short = 'h', long, default_value = "")]
    hostname: String,
    /// Username or UID (format: <name|uid>[:<group|gid>])
    #[arg(short, long, default_value = "")]
    user: String,
    /// Add additional groups to join
    #[arg(long)]
    group_add: Vec<String>,
    /// Working directory inside the container
    #[arg(short, long, default_value = "")]
    workdir: String,
    /// Overwrite the default ENTRYPOINT of the image
    #[arg(long)]
    entrypoint: Option<String>,
    /// Automatically remove the container when it exits
    #[arg(long)]
    pub rm: bool,
    /// Run an init inside the container that reaps processes
    #[arg(long)]
    init: bool,
    /// Restart policy to apply when a container exits: no, on-failure[:max], always, unless-stopped
    #[arg(long, default_value = "no")]
    restart: String,
    /// Signal to stop the container
    #[arg(long, default_value = "")]
    stop_signal: String,
    /// Timeout (in seconds) to stop a container
    #[arg(long)]
    stop_timeout: Option<u64>,
    /// Memory limit
    #[arg(short, long)]
    memory: Option<String>,
    /// Swap limit equal to memory plus swap: '-1' to enable unlimited swap
    #[arg(long, allow_hyphen_values = true)]
    memory_swap: Option<String>,
    /// Number of CPUs
    #[arg(long)]
    cpus: Option<String>,
    /// CPU shares (relative weight)
    #[arg(short, long, default_value_t = 0)]
    cpu_shares: i64,
    /// CPUs in which to allow execution (0-3, 0,1)
    #[arg(long, default_value = "")]
    cpuset_cpus: String,
    /// MEMs in which to allow execution (0-3, 0,1)
    #[arg(long, default_value = "")]
    cpuset_mems: String,
    /// Tune container pids limit (set -1 for unlimited)
    #[arg(long, default_value_t = 0, allow_hyphen_values = true)]
    pids_limit: i64,
    /// Ulimit options
    #[arg(long)]
    ulimit: Vec<String>,
    /// Tune host's OOM preferences (-1000 to 1000)
    #[arg(long, default_value_t = 0, allow_hyphen_values = true)]
    oom_score_adj: i64,
    /// Size of /dev/shm
    #[arg(long)]
    shm_size: Option<String>,
    /// Add Linux capabilities
    #[arg(long)]
    cap_add: Vec<String>,
    /// Drop Linux capabilities
    #[arg(long)]
    cap_drop: Vec<String>,
    /// Give extended privileges to this container
    #[arg(long)]
    privileged: bool,
    /// Security Options
    #[arg(long)]
    security_opt: Vec<String>,
    /// Mount the container's root filesystem as read only
    #[arg(long)]
    read_only: bool,
    /// Add a host device to the container
    #[arg(long)]
    device: Vec<String>,
    /// Sysctl options
    #[arg(long)]
    sysctl: Vec<String>,
    /// PID namespace to use: host or container:<name|id>
    #[arg(long, default_value = "")]
    pid: String,
    /// IPC mode to use: host, private, shareable, none or container:<name|id>
    #[arg(long, default_value = "")]
    ipc: String,
    /// UTS namespace to use: host
    #[arg(long, default_value = "")]
    uts: String,
    /// Pull image before running: always, missing or never
    #[arg(long, default_value = "missing", value_parser = ["always", "missing", "never"])]
    pub pull: String,
    /// Set platform if the image is multi-platform capable
    #[arg(long)]
    pub platform: Option<String>,
    /// Write the container ID to the file
    #[arg(long)]
    pub cidfile: Option<std::path::PathBuf>,
    /// Override the key sequence for detaching a container
    #[arg(long, default_value = "ctrl-p,ctrl-q")]
    pub detach_keys: String,
    /// Image to run
    pub image: String,
    /// Command and arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

impl ContainerOptions {
    /// Translates these options to a request. `attached`: somebody reads the container's output.
    pub fn request(&self, attached: bool) -> Result<CreateRequest, String> {
        let mut env = Vec::new();
        for path in &self.env_file {
            let text = std::fs::read_to_string(path).map_err(|error| format!("open {path}: {error}"))?;
            env.extend(parse_env_file(&text, &host_env)?);
        }
        for entry in &self.env {
            env.extend(parse_env(entry, &host_env)?);
        }
        let mut labels = BTreeMap::new();
        for path in &self.label_file {
            let text = std::fs::read_to_string(path).map_err(|error| format!("open {path}: {error}"))?;
            labels.extend(text.lines().filter(|line| !line.is_empty()).map(split_label));
        }
        labels.extend(self.label.iter().map(|label| split_label(label)));
        let exposed: Vec<_> =
            self.expose.iter().map(|port| parse_exposed(port)).collect::<Result<Vec<_>, _>>()?.concat();
        let mut mounts =
            self.volume.iter().map(|volume| parse_volume(volume)).collect::<Result<Vec<_>, _>>()?;
        let mut tmpfs: BTreeMap<String, String> = BTreeMap::new();
        for entry in &self.tmpfs {
            let (path, options) = entry.split_once(':').unwrap_or((entry, ""));
            tmpfs.insert(path.to_owned(), options.to_owned());
        }
        for entry in &self.mount {
            match parse_mount(entry)? {
                Mounted::Files(mount) => mounts.push(mount),
                Mounted::Memory(path, options) => {
                    tmpfs.insert(path, options);
                }
            }
        }
        if let Some(path) = tmpfs.keys().find(|path| !path.starts_with('/')) {
            return Err(format!("invalid mount path: '{path}' mount path must be absolute"));
        }
        let (network, networks) = self.networks()?;
        let publishes = self.publish_all || !self.publish.is_empty();
        if network == "host" && publishes {
            complain!("WARNING: Published ports are discarded when using host network mode");
        }
        if network.starts_with("container:") && !self.hostname.is_empty() {
            return Err("conflicting options: hostname and the network mode".into());
        }
        if self.uts == "host" && !self.hostname.is_empty() {
            return Err("conflicting options: hostname and the UTS mode".into());
        }
        let ports: Vec<_> =
            self.publish.iter().map(|port| parse_binding(port)).collect::<Result<Vec<_>, _>>()?.concat();
        let restart: RestartPolicy = self.restart.parse()?;
        if self.rm && restart != RestartPolicy::No {
            return Err("Conflicting options: --restart and --rm".into());
        }
        let size = |text: &Option<String>| text.as_deref().map_or(Ok(0), parse_bytes);
        let memory_swap = match self.memory_swap.as_deref() {
            Some("-1") => -1,
            _ => size(&self.memory_swap)?,
        };
        let host = HostConfig {
            ports: if network == "host" { Vec::new() } else { ports },
            network,
            publish_all: self.publish_all,
            auto_remove: self.rm,
            restart,
            init: self.init,
            privileged: self.privileged,
            read_only: self.read_only,
            pid: self.pid.clone(),
            ipc: self.ipc.clone(),
            uts: self.uts.clone(),
            memory: size(&self.memory)?,
            memory_swap,
            nano_cpus: self.cpus.as_deref().map_or(Ok(0), parse_cpus)?,
            cpu_shares: self.cpu_shares,
            cpuset_cpus: self.cpuset_cpus.clone(),
            cpuset_mems: self.cpuset_mems.clone(),
            pids_limit: self.pids_limit,
            oom_score_adj: self.oom_score_adj,
            shm_size: size(&self.shm_size)?,
            ulimits: self.ulimit.iter().map(|limit| parse_ulimit(limit)).collect::<Result<_, _>>()?,
            cap_add: self.cap_add.clone(),
            cap_drop: self.cap_drop.clone(),
            security_opt: self.security_opt.clone(),
            devices: self.device.iter().map(|device| parse_device(device)).collect::<Result<_, _>>()?,
            group_add: self.group_add.clone(),
            extra_hosts: self.add_host.clone(),
            dns: self.dns.clone(),
            dns_search: self.dns_search.clone(),
            dns_options: self.dns_option.clone(),
            sysctls: self
                .sysctl
                .iter()
                .map(|entry| {
                    let (key, value) =
                        entry.split_once('=').ok_or_else(|| format!("sysctl '{entry}' is not key=value"))?;
                    Ok::<_, String>((key.to_owned(), value.to_owned()))
                })
                .collect::<Result<_, _>>()?,
            tmpfs,
            binds: self.volume.clone(),
        };
        Ok(CreateRequest {
            name: self.name.clone(),
            config: Config {
                image: self.image.clone(),
                hostname: self.hostname.clone(),
                user: self.user.clone(),
                tty: self.tty,
                open_stdin: self.interactive,
                stdin_once: self.interactive && attached,
                env,
                cmd: self.command.clone(),
                working_dir: self.workdir.clone(),
                labels,
                exposed,
                stop_signal: self.stop_signal.clone(),
                stop_timeout: self.stop_timeout,
                ..Default::default()
            },
            entrypoint: self
                .entrypoint
                .as_ref()
                .map(|program| if program.is_empty() { Vec::new() } else { vec![program.clone()] }),
            host,
            mounts,
            networks,
        })
    }

    /// The network the container is made for, and all it is to be on.
    fn networks(&self) -> Result<(String, Vec<Joined>), String> {
        let mut all = self.network.iter().map(|text| parse_network(text)).collect::<Result<Vec<_>, _>>()?;
        if all.is_empty() {
            all.push(Joined { network: "default".into(), ..Default::default() });
        }
        for joined in &mut all {
            if joined.network == "default" {
                joined.network = "bridge".into();
            }
        }
        let alone = |joined: &Joined| {
            matches!(joined.network.as_str(), "host" | "none") || joined.network.starts_with("container:")
        };
        if all.len() > 1
            && let Some(joined) = all.iter().find(|joined| alone(joined))
        {
            return Err(format!("conflicting options: {} and other networks", joined.network));
        }
        let first = &mut all[0];
        if !(self.network_alias.is_empty() && self.ip.is_none()) {
            if alone(first) {
                return Err(
                    "network-scoped alias is supported only for containers in user defined networks".into()
                );
            }
            first.aliases.extend(self.network_alias.iter().cloned());
            first.ip = self.ip.or(first.ip);
        }
        let mode = first.network.clone();
        if alone(first) {
            all.clear();
        }
        Ok((mode, all))
    }
}

/// A network's name, or `name=…,alias=…,ip=…`.
pub fn parse_network(text: &str) -> Result<Joined, String> {
    if !text.contains('=') {
        return Ok(Joined { network: text.to_owned(), ..Default::default() });
    }
    let mut joined = Joined::default();
    for field in text.split(',') {
        let (key, value) = field.split_once('=').unwrap_or((field, ""));
        match key {
            "name" => joined.network = value.to_owned(),
            "alias" => joined.aliases.push(value.to_owned()),
            "ip" => joined.ip = Some(value.parse().map_err(|_| format!("invalid IP address: {value}"))?),
            _ => {
                return Err(format!(
                    "invalid argument \"{text}\" for \"--network\" flag: invalid field {key}"
                ));
            }
        }
    }
    if joined.network.is_empty() {
        return Err(format!(
            "invalid argument \"{text}\" for \"--network\" flag: network name/id is required"
        ));
    }
    Ok(joined)
}

fn host_env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

pub fn split_label(text: &str) -> (String, String) {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    (key.to_owned(), value.to_owned())
}

/// `A=b`, or `A` for the value it has here; a name that has none is left out.
pub fn parse_env(entry: &str, host: &dyn Fn(&str) -> Option<String>) -> Result<Option<String>, String> {
    match entry.split_once('=') {
        Some(("", _)) => Err(format!("invalid environment variable: {entry}")),
        Some(_) => Ok(Some(entry.to_owned())),
        None if entry.is_empty() => Err("invalid environment variable: ".into()),
        None => Ok(host(entry).map(|value| format!("{entry}={value}"))),
    }
}

/// A file of variables: one a line, `#` begins a comment.
pub fn parse_env_file(text: &str, host: &dyn Fn(&str) -> Option<String>) -> Result<Vec<String>, String> {
    let mut out = Vec::new();
    for line in text.lines() {
        let line = line.trim_start();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let name = line.split('=').next().unwrap_or_default();
        if name.contains(char::is_whitespace) {
            return Err(format!("poorly formatted environment: variable '{name}' contains whitespaces"));
        }
        out.extend(parse_env(line, host)?);
    }
    Ok(out)
}

/// `[source:]destination[:options]`.
pub fn parse_volume(text: &str) -> Result<VolumeRequest, String> {
    let bad = || format!("invalid volume specification: '{text}'");
    let parts: Vec<&str> = text.split(':').collect();
    let (source, destination, options) = match parts.as_slice() {
        [destination] => ("", *destination, ""),
        [source, destination] => (*source, *destination, ""),
        [source, destination, options] => (*source, *destination, *options),
        _ => return Err(bad()),
    };
    if parts.len() > 1 && source.is_empty() || destination.is_empty() {
        return Err(bad());
    }
    let mut volume = VolumeRequest {
        source: absolute_source(source)?,
        destination: destination.to_owned(),
        read_only: false,
        propagation: String::new(),
        must_exist: false,
        copy: true,
    };
    for option in options.split(',').filter(|option| !option.is_empty()) {
        match option {
            "ro" => volume.read_only = true,
            "nocopy" => volume.copy = false,
            "rprivate" | "private" | "rslave" | "slave" | "rshared" | "shared" => {
                volume.propagation = option.to_owned();
            }
            "rw" | "z" | "Z" | "cached" | "delegated" | "consistent" => {}
            _ => return Err(format!("invalid mode: {options}")),
        }
    }
    Ok(volume)
}

/// `./x` is a path here; a bare word is a volume.
fn absolute_source(source: &str) -> Result<String, String> {
    if source.starts_with('.') || source.starts_with('~') {
        let path = std::path::absolute(source).map_err(|error| error.to_string())?;
        let clean: std::path::PathBuf = path.components().collect();
        return Ok(clean.display().to_string());
    }
    Ok(source.to_owned())
}

/// The mount that `--mount` asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Mounted {
    Files(VolumeRequest),
    /// A path and the options of a tmpfs.
    Memory(String, String),
}

/// `type=bind,source=/a,target=/b,readonly`.
pub fn parse_mount(text: &str) -> Result<Mounted, String> {
    let mut kind = "volume";
    let mut options = Vec::new();
    let mut volume = VolumeRequest {
        source: String::new(),
        destination: String::new(),
        read_only: false,
        propagation: String::new(),
        must_exist: false,
        copy: true,
    };
    for field in text.split(',') {
        let (key, value) = field.split_once('=').unwrap_or((field, ""));
        match key {
            "type" => kind = value,
            "source" | "src" => volume.source = absolute_source(value)?,
            "target" | "destination" | "dst" => volume.destination = value.to_owned(),
            "readonly" | "ro" => volume.read_only = !matches!(value, "false" | "0"),
            "bind-propagation" => volume.propagation = value.to_owned(),
            "volume-nocopy" => volume.copy = matches!(value, "false" | "0"),
            "tmpfs-size" => options.push(format!("size={}", parse_bytes(value)?)),
            "tmpfs-mode" => options.push(format!("mode={value}")),
            _ => {
                return Err(format!(
                    "invalid argument \"{text}\" for \"--mount\" flag: unexpected key '{key}' in '{field}'"
                ));
            }
        }
    }
    if volume.destination.is_empty() {
        return Err(format!("invalid argument \"{text}\" for \"--mount\" flag: target is required"));
    }
    match kind {
        "tmpfs" => Ok(Mounted::Memory(volume.destination, options.join(","))),
        "bind" if volume.source.is_empty() => {
            Err("invalid mount config for type \"bind\": field Source must not be empty".into())
        }
        "bind" if !volume.source.starts_with('/') => Err(format!(
            "invalid mount config for type \"bind\": invalid mount path: '{}' mount path must be absolute",
            volume.source
        )),
        "bind" => Ok(Mounted::Files(VolumeRequest { must_exist: true, ..volume })),
        "volume" => Ok(Mounted::Files(volume)),
        other => Err(format!("invalid mount type {other:?}")),
    }
}

fn parse_cpus(text: &str) -> Result<i64, String> {
    let cpus: f64 = text.parse().map_err(|_| format!("failed to parse {text} as a rational number"))?;
    if cpus.is_finite() && (0.0..1e6).contains(&cpus) {
        Ok((cpus * 1e9) as i64)
    } else {
        Err(format!("invalid number of CPUs: {text}"))
    }
}

/// `nofile=1024:2048`.
fn parse_ulimit(text: &str) -> Result<Ulimit, String> {
    const KNOWN: &[&str] = &[
        "as",
        "core",
        "cpu",
        "data",
        "fsize",
        "locks",
        "memlock",
        "msgqueue",
        "nice",
        "nofile",
        "nproc",
        "rss",
        "rtprio",
        "rttime",
        "sigpending",
        "stack",
    ];
    let bad = || format!("invalid ulimit argument: {text}");
    let (name, values) = text.split_once('=').ok_or_else(bad)?;
    if !KNOWN.contains(&name) {
        return Err(format!("invalid ulimit type: {name}"));
    }
    let (soft, hard) = values.split_once(':').unwrap_or((values, values));
    let (soft, hard): (i64, i64) = (soft.parse().map_err(|_| bad())?, hard.parse().map_err(|_| bad())?);
    if hard >= 0 && (soft > hard || soft < 0) {
        return Err(format!("ulimit soft limit must be less than or equal to hard limit: {soft} > {hard}"));
    }
    Ok(Ulimit { name: name.to_owned(), soft, hard })
}

/// `/dev/a[:/dev/b][:rwm]`.
fn parse_device(text: &str) -> Result<Device, String> {
    let is_permissions = |text: &str| !text.is_empty() && text.chars().all(|c| "rwm".contains(c));
    let parts: Vec<&str> = text.split(':').collect();
    let (host, container, permissions) = match parts.as_slice() {
        [host] => (*host, *host, "rwm"),
        [host, second] if is_permissions(second) => (*host, *host, *second),
        [host, container] => (*host, *container, "rwm"),
        [host, container, permissions] if is_permissions(permissions) => (*host, *container, *permissions),
        _ => return Err(format!("invalid device specification: {text}")),
    };
    if !host.starts_with('/') || !container.starts_with('/') {
        return Err(format!("invalid device specification: {text}: paths must be absolute"));
    }
    Ok(Device { host: host.to_owned(), container: container.to_owned(), permissions: permissions.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments() {
        let host = |name: &str| (name == "HERE").then(|| "x".to_owned());
        assert_eq!(parse_env("A=b", &host), Ok(Some("A=b".into())));
        assert_eq!(parse_env("HERE", &host), Ok(Some("HERE=x".into())));
        assert_eq!(parse_env("GONE", &host), Ok(None));
        assert!(parse_env("=b", &host).is_err());
        assert_eq!(parse_env_file("# c\n\nA=b c\nHERE\n", &host), Ok(vec!["A=b c".into(), "HERE=x".into()]));
        assert!(parse_env_file("A B=c", &host).is_err());
    }

    #[test]
    fn volumes() {
        let volume = |source: &str, destination: &str| VolumeRequest {
            source: source.into(),
            destination: destination.into(),
            read_only: false,
            propagation: String::new(),
            must_exist: false,
            copy: true,
        };
        let rows = vec![
            ("/a:/b", Some(volume("/a", "/b"))),
            ("/b", Some(volume("", "/b"))),
            ("data:/b:ro", Some(VolumeRequest { read_only: true, ..volume("data", "/b") })),
            ("/a:/b:ro,z", Some(VolumeRequest { read_only: true, ..volume("/a", "/b") })),
            ("/a:/b:rslave", Some(VolumeRequest { propagation: "rslave".into(), ..volume("/a", "/b") })),
            (":/b", None),
            ("/a:", None),
            ("/a:/b:what", None),
            ("a:b:c:d", None),
        ];
        for (text, want) in rows {
            assert_eq!(parse_volume(text).ok(), want, "{text}");
        }
        assert_eq!(
            parse_mount("type=bind,src=/a,dst=/b,readonly"),
            Ok(Mounted::Files(VolumeRequest { read_only: true, must_exist: true, ..volume("/a", "/b") }))
        );
        assert_eq!(
            parse_mount("type=tmpfs,target=/t,tmpfs-size=1m"),
            Ok(Mounted::Memory("/t".into(), "size=1048576".into()))
        );
        for bad in ["type=bind,src=/a", "type=x,target=/a", "what=1", "type=bind,target=/b"] {
            assert!(parse_mount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn networks() {
        let joined = parse_network("name=own,alias=a,alias=b,ip=10.1.0.5").unwrap();
        assert_eq!((joined.network.as_str(), joined.aliases.len()), ("own", 2));
        assert_eq!(joined.ip, "10.1.0.5".parse().ok());
        assert_eq!(parse_network("own").unwrap().network, "own");
        for bad in ["alias=a", "name=a,ip=x", "name=a,what=1"] {
            assert!(parse_network(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn limits_and_devices() {
        assert_eq!(parse_cpus("1.5"), Ok(1_500_000_000));
        assert!(parse_cpus("x").is_err() && parse_cpus("-1").is_err());
        assert_eq!(parse_ulimit("nofile=1:2"), Ok(Ulimit { name: "nofile".into(), soft: 1, hard: 2 }));
        assert!(parse_ulimit("nofile=2:1").is_err() && parse_ulimit("what=1").is_err());
        assert_eq!(parse_device("/dev/null:rw").unwrap().permissions, "rw");
        assert_eq!(parse_device("/dev/a:/dev/b:r").unwrap().container, "/dev/b");
        assert!(parse_device("x").is_err());
    }
}
