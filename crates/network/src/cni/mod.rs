//! Networks by plugins of the Container Network Interface: the caller's side, versions 0.3.0 to 1.1.0.
//!
//! The configuration is read again for every pod, so a file that is put into the directory counts from the next pod on.
//! The result of every addition is kept with the configuration that made it: a pod leaves by the plugins it came by.

mod config;
mod plugin;
pub mod plugins;

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use ferrite_netlink::Connection;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::bridge::open_netns;
use crate::guard::GuardSlot;
use crate::host_ports::PortProtocol;
use crate::state::write_atomic;
use crate::{Attachment, Failures, NetworkError, NotReady, PodGuard, PodNetwork, PodRef};
pub use config::{ConfigError, NetworkConfig, PluginConfig, discover};
pub use plugin::PluginError;
use plugin::{Invocation, call};

/// The interface of a pod.
const INTERFACE: &str = "eth0";

/// Where plugins and their configurations are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CniConfig {
    /// `/etc/cni/net.d` by custom.
    pub configurations: PathBuf,
    /// `/opt/cni/bin` by custom.
    pub programs: Vec<PathBuf>,
    /// A directory for results.
    pub cache: PathBuf,
    /// Time limit of one plugin call.
    pub patience: Duration,
}

impl CniConfig {
    /// Upstream's limit for the network of a pod.
    pub const PATIENCE: Duration = Duration::from_secs(220);
}

/// A failure of a network of plugins.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CniError {
    #[error("no network configuration in {}: put a .conflist file there", .0.display())]
    Unconfigured(PathBuf),
    #[error("network configuration")]
    Config(#[from] ConfigError),
    #[error("network {network}")]
    Plugin {
        network: String,
        #[source]
        source: PluginError,
    },
    #[error("network {network}: the result of its plugins has no address")]
    NoAddress { network: String },
    #[error("result of an addition at {}", path.display())]
    Cache {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl From<CniError> for NetworkError {
    fn from(error: CniError) -> Self {
        Self::Cni(Box::new(error))
    }
}

/// An addition that was made: enough to take it back.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Cached {
    kind: String,
    container_id: String,
    if_name: String,
    network_name: String,
    netns: PathBuf,
    cni_args: String,
    capability_args: Map<String, Value>,
    /// Where the plugins were.
    programs: Vec<PathBuf>,
    /// The whole configuration, as a list.
    config: Value,
    result: Option<Value>,
}

/// The network of pods by plugins.
pub struct CniNetwork {
    config: CniConfig,
    /// Why the plugins of the network refuse pods, by the configuration that was asked about.
    status: Mutex<Option<(Value, Option<String>)>>,
    guard: GuardSlot,
}

impl CniNetwork {
    pub fn new(config: CniConfig) -> Self {
        Self { config, status: Mutex::new(None), guard: GuardSlot::default() }
    }

    /// Pods that are attached from now on are covered by the guard before they start. The first one stays.
    pub fn set_guard(&self, guard: Arc<dyn PodGuard>) {
        self.guard.set(guard);
    }

    /// Refuses pods until there is a guard.
    pub fn require_guard(&self) {
        self.guard.require();
    }

    fn network(&self) -> Result<NetworkConfig, CniError> {
        let dir = &self.config.configurations;
        discover(dir)?.ok_or_else(|| CniError::Unconfigured(dir.clone()))
    }

    fn cache_path(&self, container: &str) -> PathBuf {
        self.config.cache.join(format!("{container}-{INTERFACE}.json"))
    }

    fn cached(&self, container: &str) -> Result<Option<Cached>, CniError> {
        let path = self.cache_path(container);
        let fail = |source| CniError::Cache { path: path.clone(), source };
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| fail(error.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(fail(error)),
        }
    }

    fn remember(&self, cached: &Cached) -> Result<(), NetworkError> {
        let path = self.cache_path(&cached.container_id);
        let fail = |source| CniError::Cache { path: path.clone(), source };
        ferrite_hostfs::private_dir(&self.config.cache).map_err(fail)?;
        let bytes = serde_json::to_vec(cached).map_err(|error| fail(error.into()))?;
        write_atomic(&path, &bytes)
    }

    fn forget(&self, container: &str) -> Result<(), CniError> {
        let path = self.cache_path(container);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(CniError::Cache { path, source }),
            _ => Ok(()),
        }
    }

    /// Calls one plugin of a network.
    async fn call(
        &self,
        network: &NetworkConfig,
        plugin: &PluginConfig,
        command: &'static str,
        cached: Option<&Cached>,
        extra: &[(&str, Value)],
    ) -> Result<Option<Value>, CniError> {
        let mut input = plugin.object.clone();
        input.insert("name".into(), network.name.clone().into());
        input.insert("cniVersion".into(), network.version.clone().into());
        let capabilities = cached.map(|cached| &cached.capability_args).into_iter().flatten();
        let wanted: Map<String, Value> = capabilities
            .filter(|(key, _)| plugin.has(key))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        if !wanted.is_empty() {
            input.insert("runtimeConfig".into(), wanted.into());
        }
        input.remove("capabilities");
        for (key, value) in extra {
            input.insert((*key).into(), value.clone());
        }
        let none = (String::new(), PathBuf::new(), String::new());
        let (container, netns, args) = cached.map_or(none, |cached| {
            (cached.container_id.clone(), cached.netns.clone(), cached.cni_args.clone())
        });
        let invocation = Invocation {
            command,
            container: &container,
            netns: &netns,
            interface: INTERFACE,
            args: &args,
            dirs: cached.map_or(&self.config.programs, |cached| &cached.programs),
            patience: self.config.patience,
        };
        let called = call(&plugin.kind, &Value::Object(input), &invocation).await;
        called.map_err(|source| CniError::Plugin { network: network.name.clone(), source })
    }

    async fn add(&self, sandbox: &str, netns: &Path, pod: &PodRef) -> Result<Attachment, NetworkError> {
        let network = self.network()?;
        // An addition that a crash interrupted is taken back first: plugins need not bear a second one.
        if self.cached(sandbox)?.is_some() {
            self.delete(sandbox).await?;
        }
        let mut cached = Cached {
            kind: "cniCacheV1".into(),
            container_id: sandbox.to_owned(),
            if_name: INTERFACE.into(),
            network_name: network.name.clone(),
            netns: netns.to_owned(),
            cni_args: args(sandbox, pod),
            capability_args: capabilities(pod),
            programs: self.config.programs.clone(),
            config: network.to_json(),
            result: None,
        };
        self.remember(&cached)?;
        for plugin in &network.plugins {
            let previous: Vec<(&str, Value)> =
                cached.result.iter().map(|result| ("prevResult", result.clone())).collect();
            let result = self.call(&network, plugin, "ADD", Some(&cached), &previous).await?;
            if let Some(mut result) = result {
                if let Value::Object(object) = &mut result {
                    object.entry("cniVersion").or_insert_with(|| network.version.clone().into());
                }
                cached.result = Some(result);
            }
        }
        self.remember(&cached)?;
        let ips = cached.result.as_ref().map(addresses).unwrap_or_default();
        match ips.is_empty() {
            true => Err(CniError::NoAddress { network: network.name }.into()),
            false => Ok(Attachment { ips }),
        }
    }

    async fn delete(&self, sandbox: &str) -> Result<(), NetworkError> {
        let Some(cached) = self.cached(sandbox)? else { return Ok(()) };
        let network = NetworkConfig::parse(cached.config.to_string().as_bytes()).map_err(CniError::from)?;
        let mut previous: Vec<(&str, Value)> = Vec::new();
        if network.is_at_least("0.4.0") {
            previous.extend(cached.result.iter().map(|result| ("prevResult", result.clone())));
        }
        for plugin in network.plugins.iter().rev() {
            self.call(&network, plugin, "DEL", Some(&cached), &previous).await?;
        }
        Ok(self.forget(sandbox)?)
    }

    /// Takes everything back that a process which does not run any more has added, by its cache alone.
    pub async fn purge(cache: &Path) -> Result<(), NetworkError> {
        let config = CniConfig {
            configurations: PathBuf::new(),
            programs: Vec::new(),
            cache: cache.to_owned(),
            patience: CniConfig::PATIENCE,
        };
        Self::new(config).collect_garbage(&[]).await
    }

    /// Asks the plugins if a pod still has its network.
    pub async fn check(&self, sandbox: &str) -> Result<(), NetworkError> {
        let Some(cached) = self.cached(sandbox)? else { return Ok(()) };
        let network = NetworkConfig::parse(cached.config.to_string().as_bytes()).map_err(CniError::from)?;
        if !network.is_at_least("0.4.0") || network.disable_check {
            return Ok(());
        }
        let previous: Vec<(&str, Value)> =
            cached.result.iter().map(|result| ("prevResult", result.clone())).collect();
        for plugin in &network.plugins {
            self.call(&network, plugin, "CHECK", Some(&cached), &previous).await?;
        }
        Ok(())
    }

    /// Detaches sandboxes that are not in `live`, and lets plugins of version 1.1.0 look for more. A failure, such as that
    /// of a plugin whose program is gone, does not keep the others from their turn.
    pub async fn collect_garbage(&self, live: &[String]) -> Result<(), NetworkError> {
        let suffix = format!("-{INTERFACE}.json");
        let entries = fs::read_dir(&self.config.cache).into_iter().flatten().flatten();
        let known: Vec<String> = entries
            .filter_map(|entry| {
                entry.file_name().into_string().ok()?.strip_suffix(&suffix).map(str::to_owned)
            })
            .collect();
        let mut failures = Failures::new("remove pods that are gone from networks of plugins");
        for sandbox in known.iter().filter(|sandbox| !live.contains(sandbox)) {
            failures.note(sandbox, self.delete(sandbox).await);
        }
        let Ok(network) = self.network() else { return failures.result() };
        if !network.is_at_least("1.1.0") || network.disable_gc {
            return failures.result();
        }
        let valid: Vec<Value> = known
            .iter()
            .filter(|sandbox| live.contains(sandbox))
            .map(|sandbox| json!({"containerID": sandbox, "ifname": INTERFACE}))
            .collect();
        for plugin in &network.plugins {
            let extra = [("cni.dev/valid-attachments", valid.clone().into())];
            let called = self.call(&network, plugin, "GC", None, &extra).await;
            failures.note(&plugin.kind, called.map(drop).map_err(NetworkError::from));
        }
        failures.result()
    }

    /// Asks the plugins of version 1.1.0 if they take pods; [`ready`](PodNetwork::ready) returns the
    /// result.
    pub async fn ask_status(&self) -> Result<(), NetworkError> {
        let network = self.network()?;
        let mut refused = None;
        if network.is_at_least("1.1.0") {
            for plugin in &network.plugins {
                if let Err(error) = self.call(&network, plugin, "STATUS", None, &[]).await {
                    refused = Some(with_causes(&error));
                    break;
                }
            }
        }
        let mut status = self.status.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *status = Some((network.to_json(), refused));
        Ok(())
    }
}

#[async_trait]
impl PodNetwork for CniNetwork {
    async fn attach(&self, sandbox: &str, netns: &Path, pod: &PodRef) -> Result<Attachment, NetworkError> {
        if !crate::ipam::is_sandbox_id(sandbox) {
            return Err(NetworkError::BadSandbox(sandbox.to_owned()));
        }
        self.guard.check(pod)?;
        // Bring up the loopback interface, as the loopback plugin does.
        let fail = NetworkError::netlink(format!("loopback of sandbox {sandbox}"));
        let conn = Connection::new_in(&open_netns(netns)?);
        let conn = conn.map_err(NetworkError::netlink("open a netlink socket"))?;
        conn.set_link_up("lo").await.map_err(fail)?;
        let attachment = self.add(sandbox, netns, pod).await?;
        // The addresses are the plugins' to choose. Nothing of the pod runs yet, so that this is before its first packet.
        self.guard.cover(sandbox, pod, &attachment.ips).await?;
        Ok(attachment)
    }

    async fn detach(&self, sandbox: &str, _netns: &Path) -> Result<(), NetworkError> {
        self.delete(sandbox).await?;
        self.guard.uncover(sandbox).await;
        Ok(())
    }

    fn ready(&self) -> Result<(), NotReady> {
        let network = self.network().map_err(|error| NotReady(with_causes(&error)))?;
        let status = self.status.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match &*status {
            Some((asked, Some(refused))) if *asked == network.to_json() => Err(NotReady(refused.clone())),
            _ => self.guard.ready(),
        }
    }
}

impl NetworkConfig {
    /// The configuration as a list that [`parse`](Self::parse) reads.
    fn to_json(&self) -> Value {
        let plugins: Vec<Value> = self.plugins.iter().map(|plugin| plugin.object.clone().into()).collect();
        json!({
            "name": self.name, "cniVersion": self.version, "disableCheck": self.disable_check,
            "disableGC": self.disable_gc, "plugins": plugins,
        })
    }
}

/// The pod's facts for plugins. A name of Kubernetes has no `;` and no `=`.
fn args(sandbox: &str, pod: &PodRef) -> String {
    let clean = |text: &str| text.replace([';', '='], "");
    format!(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={sandbox};K8S_POD_UID={}",
        clean(&pod.namespace),
        clean(&pod.name),
        clean(&pod.uid)
    )
}

/// The pod's requests; each plugin gets the part for which it has a capability.
fn capabilities(pod: &PodRef) -> Map<String, Value> {
    let mut all = Map::new();
    if !pod.host_ports.is_empty() {
        let ports = pod.host_ports.iter().map(|port| {
            let protocol = match port.protocol {
                PortProtocol::Tcp => "tcp",
                PortProtocol::Udp => "udp",
                PortProtocol::Sctp => "sctp",
            };
            let ip = port.host_ip.map(|ip| ip.to_string()).unwrap_or_default();
            json!({
                "hostPort": port.host_port, "containerPort": port.container_port, "protocol": protocol, "hostIP": ip,
            })
        });
        all.insert("portMappings".into(), ports.collect());
    }
    let mut limits = Map::new();
    // The plugin wants a burst with each rate, both in bits.
    for (bits, rate, burst) in [
        (pod.bandwidth.ingress, "ingressRate", "ingressBurst"),
        (pod.bandwidth.egress, "egressRate", "egressBurst"),
    ] {
        if let Some(bits) = bits {
            limits.insert(rate.into(), bits.into());
            limits.insert(burst.into(), (bits / 10).clamp(1 << 18, u64::from(u32::MAX)).into());
        }
    }
    if !limits.is_empty() {
        all.insert("bandwidth".into(), limits.into());
    }
    all
}

/// The addresses of a result, without their prefixes.
fn addresses(result: &Value) -> Vec<IpAddr> {
    let ips = result.get("ips").and_then(Value::as_array);
    let texts = ips.into_iter().flatten().filter_map(|ip| ip.get("address").and_then(Value::as_str));
    texts.filter_map(|text| text.split('/').next().and_then(|address| address.parse().ok())).collect()
}

fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
