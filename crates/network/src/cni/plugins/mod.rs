//! The plugins that this program is when it is called by their names: `bridge`, `ptp`, `loopback`, `host-local`,
//! `portmap`, `bandwidth` and `flannel`, with the configurations of the reference plugins of the same names.

mod bandwidth;
mod bridge;
mod flannel;
mod host_local;
mod links;
mod loopback;
mod portmap;
mod ptp;
mod refused;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};

use self::refused::Refused;
use super::config::VERSIONS;
use super::plugin::{self, Invocation, PluginError};

/// One plugin.
#[async_trait]
trait Plugin: Sync {
    /// Keys of the reference plugin of the same name on which this one does not act.
    fn refused(&self) -> &'static [Refused] {
        &[]
    }

    /// Gives the container its part of the network and answers the result.
    async fn add(&self, call: &Call) -> Result<Value, Failure>;

    /// Takes it back. Succeeds when it is gone already.
    async fn del(&self, call: &Call) -> Result<(), Failure>;

    /// Fails if a part of the result of [`add`](Self::add) is missing.
    async fn check(&self, call: &Call) -> Result<(), Failure>;

    /// Removes resources that belong to no valid attachment.
    async fn gc(&self, _call: &Call, _valid: &[(String, String)]) -> Result<(), Failure> {
        Ok(())
    }
}

/// All plugins, by the names of their programs.
const PLUGINS: &[(&str, &dyn Plugin)] = &[
    ("bandwidth", &bandwidth::Bandwidth),
    ("bridge", &bridge::Bridge),
    ("flannel", &flannel::Flannel),
    ("host-local", &host_local::HostLocal),
    ("loopback", &loopback::Loopback),
    ("portmap", &portmap::PortMap),
    ("ptp", &ptp::PointToPoint),
];

/// Time limit of a plugin that another one delegates to.
const PATIENCE: Duration = Duration::from_secs(120);
/// No configuration is larger.
const MAX_BYTES: u64 = 1 << 20;

/// Returns true if a program of that name is one of ours.
pub fn is_plugin(name: &str) -> bool {
    find(name).is_some()
}

fn find(name: &str) -> Option<&'static dyn Plugin> {
    PLUGINS.iter().find(|(known, _)| *known == name).map(|(_, plugin)| *plugin)
}

/// Codes of the specification.
mod code {
    pub(super) const VERSION: u32 = 1;
    pub(super) const UNKNOWN_CONTAINER: u32 = 3;
    pub(super) const ENVIRONMENT: u32 = 4;
    pub(super) const DECODE: u32 = 6;
    pub(super) const CONFIG: u32 = 7;
    pub(super) const TRY_AGAIN: u32 = 11;
    pub(super) const OTHER: u32 = 100;
}

/// A failure of a plugin, in the form of the specification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub code: u32,
    pub message: String,
}

impl Failure {
    fn new(code: u32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    fn config(message: impl Into<String>) -> Self {
        Self::new(code::CONFIG, message)
    }

    /// A failure of the kernel or of the disk.
    fn of<E: std::error::Error>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |error| {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            Self::new(code::OTHER, format!("{what}: {error}{cause}"))
        }
    }

    fn to_json(&self, version: &str) -> Value {
        json!({"cniVersion": version, "code": self.code, "msg": self.message})
    }
}

/// The caller's settings in environment variables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment {
    pub command: String,
    pub container: String,
    pub netns: PathBuf,
    pub interface: String,
    pub args: String,
    pub path: Vec<PathBuf>,
}

impl Environment {
    pub fn read(get: impl Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        let text =
            |name: &str| get(name).map(|value| value.to_string_lossy().into_owned()).unwrap_or_default();
        let found = Self {
            command: text("CNI_COMMAND"),
            container: text("CNI_CONTAINERID"),
            netns: get("CNI_NETNS").map(PathBuf::from).unwrap_or_default(),
            interface: text("CNI_IFNAME"),
            args: text("CNI_ARGS"),
            path: get("CNI_PATH").map(|value| std::env::split_paths(&value).collect()).unwrap_or_default(),
        };
        let needed: &[(&str, bool)] = &[
            ("CNI_CONTAINERID", found.container.is_empty()),
            ("CNI_IFNAME", found.interface.is_empty()),
            ("CNI_NETNS", found.netns.as_os_str().is_empty() && found.command != "DEL"),
        ];
        let missing: Vec<&str> = match found.command.as_str() {
            "" => vec!["CNI_COMMAND"],
            "ADD" | "DEL" | "CHECK" => {
                needed.iter().filter(|(_, missing)| *missing).map(|(name, _)| *name).collect()
            }
            "VERSION" | "STATUS" | "GC" => Vec::new(),
            other => return Err(Failure::new(code::ENVIRONMENT, format!("unknown CNI_COMMAND: {other}"))),
        };
        if !missing.is_empty() {
            let text = format!("required env variables [{}] missing", missing.join(","));
            return Err(Failure::new(code::ENVIRONMENT, text));
        }
        let good_id = found.container.is_empty() || crate::ipam::is_sandbox_id(&found.container);
        let good_link =
            |name: &str| !name.contains(['/', ':']) && !name.contains(char::is_whitespace) && name != "..";
        if !good_id || found.interface.len() > 15 || !good_link(&found.interface) || found.interface == "." {
            return Err(Failure::new(
                code::ENVIRONMENT,
                "invalid characters in CNI_CONTAINERID or CNI_IFNAME",
            ));
        }
        Ok(found)
    }
}

/// The whole program: reads environment and standard input, writes to standard output.
pub fn main(name: &str) -> ExitCode {
    let mut input = Vec::new();
    let read = std::io::stdin().lock().take(MAX_BYTES).read_to_end(&mut input);
    let done = match (read, tokio::runtime::Builder::new_current_thread().enable_all().build()) {
        (Ok(_), Ok(runtime)) => {
            let environment = Environment::read(|name| std::env::var_os(name));
            runtime.block_on(async { run(name, environment?, &input).await })
        }
        (Err(error), _) | (_, Err(error)) => Err(Failure::new(code::OTHER, error.to_string())),
    };
    let (text, exit) = match done {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(result)) => (result, ExitCode::SUCCESS),
        Err(failure) => (failure.to_json(VERSIONS[VERSIONS.len() - 1]), ExitCode::FAILURE),
    };
    // A caller that is gone needs no answer.
    let _ = writeln!(std::io::stdout(), "{text}");
    exit
}

/// One call of a plugin. Returns its output.
pub async fn run(name: &str, environment: Environment, input: &[u8]) -> Result<Option<Value>, Failure> {
    let plugin = find(name).ok_or_else(|| Failure::new(code::OTHER, format!("there is no plugin {name}")))?;
    if environment.command == "VERSION" {
        let newest = VERSIONS[VERSIONS.len() - 1];
        return Ok(Some(json!({"cniVersion": newest, "supportedVersions": VERSIONS})));
    }
    let config: Map<String, Value> = serde_json::from_slice(input).map_err(|error| {
        Failure::new(code::DECODE, format!("the configuration is no JSON object: {error}"))
    })?;
    let version = config.get("cniVersion").and_then(Value::as_str).unwrap_or("0.1.0").to_owned();
    if !VERSIONS.contains(&version.as_str()) {
        let text = format!(
            "incompatible CNI versions: the configuration is {version}, the plugin supports {VERSIONS:?}"
        );
        return Err(Failure::new(code::VERSION, text));
    }
    let call = Call { environment, config, version };
    match call.environment.command.as_str() {
        "ADD" => {
            refused::check(&call, plugin.refused())?;
            let mut result = plugin.add(&call).await?;
            if let Value::Object(object) = &mut result {
                object.insert("cniVersion".into(), call.version.clone().into());
            }
            Ok(Some(result))
        }
        "DEL" => plugin.del(&call).await.map(|()| None),
        "CHECK" => {
            if call.previous().is_none() {
                return Err(Failure::config("CHECK needs a prevResult"));
            }
            plugin.check(&call).await.map(|()| None)
        }
        "GC" => {
            let valid = call.config.get("cni.dev/valid-attachments").and_then(Value::as_array);
            let text = |object: &Value, key: &str| {
                object.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
            };
            let valid: Vec<(String, String)> = valid
                .into_iter()
                .flatten()
                .map(|object| (text(object, "containerID"), text(object, "ifname")))
                .collect();
            plugin.gc(&call, &valid).await.map(|()| None)
        }
        _ => Ok(None),
    }
}

/// The inputs of a plugin.
struct Call {
    environment: Environment,
    config: Map<String, Value>,
    version: String,
}

/// An address that IPAM gave.
#[derive(Debug, Clone, PartialEq, Eq)]
struct IpConfig {
    address: IpAddr,
    prefix: u8,
    gateway: Option<IpAddr>,
}

impl Call {
    fn text(&self, key: &str) -> Option<&str> {
        self.config.get(key).and_then(Value::as_str).filter(|text| !text.is_empty())
    }

    fn flag(&self, key: &str) -> bool {
        self.config.get(key).and_then(Value::as_bool).unwrap_or(false)
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.config.get(key).and_then(Value::as_u64)
    }

    /// The name of the network, which becomes a part of paths.
    fn network(&self) -> Result<&str, Failure> {
        let name = self.text("name").ok_or_else(|| Failure::config("the configuration has no name"))?;
        match crate::ipam::is_sandbox_id(name) && !name.starts_with('.') {
            true => Ok(name),
            false => Err(Failure::config(format!("{name:?} is no name of a network"))),
        }
    }

    fn previous(&self) -> Option<&Value> {
        self.config.get("prevResult").filter(|result| result.is_object())
    }

    /// The result of the plugin before, which a plugin that only adds to it passes on.
    fn needs_previous(&self) -> Result<&Value, Failure> {
        self.previous().ok_or_else(|| Failure::config("must be called as chained plugin"))
    }

    fn netns(&self) -> &Path {
        &self.environment.netns
    }

    fn interface(&self) -> &str {
        &self.environment.interface
    }

    /// The value of the caller's capability.
    fn capability(&self, name: &str) -> Option<&Value> {
        self.config.get("runtimeConfig").and_then(|all| all.get(name))
    }

    /// Calls the plugin that manages addresses.
    async fn ipam(&self, command: &'static str) -> Result<Value, Failure> {
        let ipam = self.config.get("ipam").and_then(|ipam| ipam.get("type")).and_then(Value::as_str);
        let Some(kind) = ipam.filter(|kind| !kind.is_empty()) else { return Ok(json!({})) };
        Ok(self.delegate(kind, command, &self.config).await?.unwrap_or_else(|| json!({})))
    }

    /// Calls another plugin. One of ours needs no program of its own.
    async fn delegate(
        &self,
        kind: &str,
        command: &'static str,
        config: &Map<String, Value>,
    ) -> Result<Option<Value>, Failure> {
        if !crate::ipam::is_sandbox_id(kind) {
            return Err(Failure::config(format!("{kind:?} is no name of a plugin")));
        }
        let environment = &self.environment;
        let invocation = Invocation {
            command,
            container: &environment.container,
            netns: &environment.netns,
            interface: &environment.interface,
            args: &environment.args,
            dirs: &environment.path,
            patience: PATIENCE,
        };
        let input = Value::Object(config.clone());
        match plugin::call(kind, &input, &invocation).await {
            Err(PluginError::Missing { .. }) if is_plugin(kind) => {
                let environment = Environment { command: command.to_owned(), ..environment.clone() };
                Box::pin(run(kind, environment, input.to_string().as_bytes())).await
            }
            Err(PluginError::Failed { code, message, .. }) => {
                let code = code.and_then(|code| u32::try_from(code).ok()).unwrap_or(code::OTHER);
                Err(Failure::new(code, format!("{kind}: {message}")))
            }
            other => other.map_err(Failure::of(kind)),
        }
    }
}

/// The addresses of a result.
fn ips(result: &Value) -> Vec<IpConfig> {
    let list = result.get("ips").and_then(Value::as_array);
    let parse = |ip: &Value| {
        let (address, prefix) = ip.get("address")?.as_str()?.split_once('/')?;
        let gateway = ip.get("gateway").and_then(Value::as_str).and_then(|text| text.parse().ok());
        Some(IpConfig { address: address.parse().ok()?, prefix: prefix.parse().ok()?, gateway })
    };
    list.into_iter().flatten().filter_map(parse).collect()
}

/// An address of a result, in the form of its version.
fn ip_json(ip: &IpConfig, interface: Option<usize>, version: &str) -> Value {
    let mut object = json!({"address": format!("{}/{}", ip.address, ip.prefix)});
    if let Some(gateway) = ip.gateway {
        object["gateway"] = gateway.to_string().into();
    }
    if let Some(interface) = interface {
        object["interface"] = interface.into();
    }
    if version.starts_with("0.") {
        object["version"] = if ip.address.is_ipv4() { "4" } else { "6" }.into();
    }
    object
}
