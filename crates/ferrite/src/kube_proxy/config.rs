//! KubeProxyConfiguration v1alpha1, as far as a proxy in nftables mode acts on it.

use super::sysctls::{Sysctl, sysctls};
use ferrite_component::{FeatureGates, GoDuration, TypeMeta};
use ferrite_proxy::model::Cidr;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const HEALTHZ_PORT: u16 = 10256;
pub const METRICS_PORT: u16 = 10249;
pub const TYPE: TypeMeta =
    TypeMeta { api_version: "kubeproxy.config.k8s.io/v1alpha1", kind: "KubeProxyConfiguration" };

/// The file, or the flags in its form. Sections of other modes (`iptables`, `ipvs`, `winkernel`) are read and not used,
/// as upstream does in nftables mode.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KubeProxyConfiguration {
    pub bind_address: Option<String>,
    pub bind_address_hard_fail: Option<bool>,
    pub client_connection: ClientConnection,
    #[serde(rename = "clusterCIDR")]
    pub cluster_cidr: Option<String>,
    /// Informers are always up to date: there is nothing to do periodically.
    pub config_sync_period: Option<GoDuration>,
    pub conntrack: Conntrack,
    pub detect_local: DetectLocal,
    pub detect_local_mode: Option<String>,
    pub enable_profiling: Option<bool>,
    pub feature_gates: Option<BTreeMap<String, bool>>,
    pub healthz_bind_address: Option<String>,
    pub hostname_override: Option<String>,
    pub iptables: IgnoredAny,
    pub ipvs: IgnoredAny,
    pub logging: Logging,
    pub metrics_bind_address: Option<String>,
    pub mode: Option<String>,
    pub nftables: Nftables,
    pub node_port_addresses: Option<Vec<String>>,
    pub oom_score_adj: Option<i32>,
    /// Has no effect in any mode, as upstream.
    pub port_range: Option<String>,
    pub show_hidden_metrics_for_version: Option<String>,
    pub windows_run_as_service: Option<bool>,
    pub winkernel: IgnoredAny,
}

/// Logs are text, and lines are written at once.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Logging {
    pub format: Option<String>,
    pub flush_frequency: IgnoredAny,
    pub verbosity: Option<u8>,
    pub vmodule: Option<Vec<IgnoredAny>>,
    pub options: IgnoredAny,
}

/// The proxy lists, watches and writes a few events: limits and encodings of requests have nothing to limit.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ClientConnection {
    pub kubeconfig: Option<PathBuf>,
    pub accept_content_types: Option<String>,
    pub content_type: Option<String>,
    pub burst: Option<i32>,
    pub qps: Option<f32>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Conntrack {
    pub max_per_core: Option<u32>,
    pub min: Option<u32>,
    pub tcp_be_liberal: Option<bool>,
    pub tcp_close_wait_timeout: Option<GoDuration>,
    pub tcp_established_timeout: Option<GoDuration>,
    pub udp_stream_timeout: Option<GoDuration>,
    pub udp_timeout: Option<GoDuration>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DetectLocal {
    pub bridge_interface: Option<String>,
    pub interface_name_prefix: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Nftables {
    pub masquerade_all: Option<bool>,
    pub masquerade_bit: Option<u8>,
    pub min_sync_period: Option<GoDuration>,
    pub sync_period: Option<GoDuration>,
}

/// The way to recognise local traffic, before the node is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetectLocalMode {
    None,
    ClusterCidr(Vec<Cidr>),
    NodeCidr,
    BridgeInterface(String),
    InterfaceNamePrefix(String),
}

/// Where node ports answer, before the node is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodePortRanges {
    Primary,
    Ranges(Vec<Cidr>),
}

/// The configuration with upstream's defaults, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub kubeconfig: Option<PathBuf>,
    pub hostname_override: Option<String>,
    pub bind_address: Option<IpAddr>,
    pub bind_address_hard_fail: bool,
    /// None if nothing is served.
    pub healthz: Option<SocketAddr>,
    pub metrics: Option<SocketAddr>,
    pub detect_local: DetectLocalMode,
    pub node_ports: NodePortRanges,
    pub masquerade_all: bool,
    pub masquerade_bit: u8,
    pub min_sync_period: Duration,
    pub sync_period: Duration,
    pub oom_score_adj: i32,
    pub sysctls: Vec<Sysctl>,
}

/// A configuration that cannot work, or asks for something that is not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{field}: {value:?} is not {expected}")]
    Bad { field: &'static str, value: String, expected: &'static str },
    #[error("mode: {0:?} is not supported; this proxy has the mode nftables")]
    Mode(String),
    #[error("{0} is not supported")]
    Unsupported(String),
    #[error(transparent)]
    Gate(#[from] ferrite_component::GateError),
    #[error("detectLocalMode {mode} needs {field}")]
    Missing { mode: &'static str, field: &'static str },
}

/// The origin of a configuration: flags have ports of their own, which are deprecated, and may turn a server off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    File,
    Flags { healthz_port: u16, metrics_port: u16 },
}

impl KubeProxyConfiguration {
    /// Reads a file, JSON or YAML.
    pub fn read(path: &Path) -> Result<Self, ferrite_component::ConfigError> {
        ferrite_component::read_config(path, TYPE)
    }

    /// Checks and completes the configuration for a machine with this number of processors.
    pub fn settings(&self, processors: u32, origin: Origin) -> Result<Settings, ConfigError> {
        let bad =
            |field, value: &str, expected| ConfigError::Bad { field, value: value.to_owned(), expected };
        let told = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(mode) = told(&self.mode).filter(|mode| mode != "nftables") {
            return Err(ConfigError::Mode(mode));
        }
        if self.enable_profiling == Some(true) {
            return Err(ConfigError::Unsupported("enableProfiling".into()));
        }
        self.check_unused()?;
        let bind_address = match told(&self.bind_address) {
            None => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Some(text) => text.parse().map_err(|_| bad("bindAddress", &text, "an IP address"))?,
        };
        let (any, loopback): (IpAddr, IpAddr) = match bind_address {
            IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
        };
        // As upstream: a port of a flag counts for an address without one, and zero turns the server off.
        let listen = |field, text: &Option<String>, usual: SocketAddr, flag: Option<u16>| {
            if flag == Some(0) || (flag.is_some() && text.as_deref() == Some("")) {
                return Ok(None);
            }
            let Some(text) = told(text) else { return Ok(Some(usual)) };
            let port = flag.unwrap_or(usual.port());
            let with_port = text.parse().or_else(|_| text.parse().map(|ip| SocketAddr::new(ip, port)));
            with_port
                .map(Some)
                .map_err(|_: std::net::AddrParseError| bad(field, &text, "an IP address, or one with a port"))
        };
        let (healthz_port, metrics_port) = match origin {
            Origin::File => (None, None),
            Origin::Flags { healthz_port, metrics_port } => (Some(healthz_port), Some(metrics_port)),
        };
        let masquerade_bit = self.nftables.masquerade_bit.unwrap_or(14);
        if masquerade_bit > 31 {
            return Err(bad("nftables.masqueradeBit", &masquerade_bit.to_string(), "between 0 and 31"));
        }
        let oom_score_adj = self.oom_score_adj.unwrap_or(-999);
        if !(-1000..=1000).contains(&oom_score_adj) {
            return Err(bad("oomScoreAdj", &oom_score_adj.to_string(), "between -1000 and 1000"));
        }
        let period = |given: Option<GoDuration>, usual| {
            given.map(|given| given.0).filter(|given| !given.is_zero()).unwrap_or(Duration::from_secs(usual))
        };
        let sync_period = period(self.nftables.sync_period, 30);
        let min_sync_period = match (origin, self.nftables.min_sync_period) {
            // A flag may say zero: every change is a transaction of its own.
            (Origin::Flags { .. }, Some(given)) => given.0,
            (_, given) => period(given, 1),
        };
        if min_sync_period > sync_period {
            let value = GoDuration(sync_period).to_string();
            return Err(bad("nftables.syncPeriod", &value, "as long as nftables.minSyncPeriod or longer"));
        }
        Ok(Settings {
            kubeconfig: self.client_connection.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty()),
            hostname_override: told(&self.hostname_override),
            bind_address: Some(bind_address).filter(|address| !address.is_unspecified()),
            bind_address_hard_fail: self.bind_address_hard_fail.unwrap_or(false),
            healthz: listen(
                "healthzBindAddress",
                &self.healthz_bind_address,
                SocketAddr::new(any, HEALTHZ_PORT),
                healthz_port,
            )?,
            metrics: listen(
                "metricsBindAddress",
                &self.metrics_bind_address,
                SocketAddr::new(loopback, METRICS_PORT),
                metrics_port,
            )?,
            detect_local: self.detect_local()?,
            node_ports: self.node_ports()?,
            masquerade_all: self.nftables.masquerade_all.unwrap_or(false),
            masquerade_bit,
            min_sync_period,
            sync_period,
            oom_score_adj,
            sysctls: sysctls(&self.conntrack, processors),
        })
    }

    /// Refuses fields on which nobody would act.
    fn check_unused(&self) -> Result<(), ConfigError> {
        let unsupported = |what: String| Err(ConfigError::Unsupported(what));
        let is_given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if is_given(&self.show_hidden_metrics_for_version) {
            return unsupported("showHiddenMetricsForVersion".into());
        }
        if self.windows_run_as_service == Some(true) {
            return unsupported("windowsRunAsService".into());
        }
        if self.logging.format.as_ref().is_some_and(|format| !matches!(format.as_str(), "" | "text")) {
            return unsupported("logging.format other than text".into());
        }
        if self.logging.vmodule.as_ref().is_some_and(|levels| !levels.is_empty()) {
            return unsupported("logging.vmodule".into());
        }
        let pairs = self.feature_gates.iter().flatten().map(|(name, value)| (name.as_str(), *value));
        let gates = FeatureGates::new(pairs)?;
        let usual = FeatureGates::default();
        match gates.given().iter().find(|(name, value)| usual.enabled(name) != **value) {
            Some((name, value)) => unsupported(format!("feature gate {name}={value}")),
            None => Ok(()),
        }
    }

    fn detect_local(&self) -> Result<DetectLocalMode, ConfigError> {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let need =
            |text: &Option<String>, mode, field| given(text).ok_or(ConfigError::Missing { mode, field });
        let ranges = ranges("clusterCIDR", self.cluster_cidr.iter().flat_map(|text| text.split(',')))?;
        match self.detect_local_mode.as_deref().unwrap_or_default() {
            // As upstream: without a range nothing is known about pods.
            "" | "ClusterCIDR" if ranges.is_empty() => Ok(DetectLocalMode::None),
            "" | "ClusterCIDR" => Ok(DetectLocalMode::ClusterCidr(ranges)),
            "NodeCIDR" => Ok(DetectLocalMode::NodeCidr),
            "BridgeInterface" => {
                need(&self.detect_local.bridge_interface, "BridgeInterface", "detectLocal.bridgeInterface")
                    .map(DetectLocalMode::BridgeInterface)
            }
            "InterfaceNamePrefix" => {
                let field = "detectLocal.interfaceNamePrefix";
                need(&self.detect_local.interface_name_prefix, "InterfaceNamePrefix", field)
                    .map(DetectLocalMode::InterfaceNamePrefix)
            }
            other => Err(ConfigError::Bad {
                field: "detectLocalMode",
                value: other.to_owned(),
                expected: "ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix",
            }),
        }
    }

    fn node_ports(&self) -> Result<NodePortRanges, ConfigError> {
        let texts = self.node_port_addresses.as_deref().unwrap_or_default();
        // As upstream in mode nftables: nothing means the primary addresses. Ranges of everything mean all.
        if texts.is_empty() || texts == ["primary"] {
            return Ok(NodePortRanges::Primary);
        }
        ranges("nodePortAddresses", texts.iter().map(String::as_str)).map(NodePortRanges::Ranges)
    }
}

fn ranges<'a>(field: &'static str, texts: impl Iterator<Item = &'a str>) -> Result<Vec<Cidr>, ConfigError> {
    let texts = texts.map(str::trim).filter(|text| !text.is_empty());
    let parse = |text: &str| {
        text.parse().map_err(|_| ConfigError::Bad { field, value: text.to_owned(), expected: "a CIDR" })
    };
    texts.map(parse).collect()
}

#[cfg(test)]
mod tests;
