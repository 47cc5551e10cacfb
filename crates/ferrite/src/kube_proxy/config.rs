//! KubeProxyConfiguration v1alpha1, as far as a proxy in nftables mode acts on it.

use ferrite_apiserver::go_duration;
use ferrite_proxy::model::Cidr;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

pub const HEALTHZ_PORT: u16 = 10256;
pub const METRICS_PORT: u16 = 10249;

/// The file, or the flags in its form. Sections of other modes (`iptables`, `ipvs`, `winkernel`) are read and not used,
/// as upstream does in nftables mode.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KubeProxyConfiguration {
    pub api_version: Option<String>,
    pub kind: Option<String>,
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
    pub iptables: serde::de::IgnoredAny,
    pub ipvs: serde::de::IgnoredAny,
    pub logging: serde::de::IgnoredAny,
    pub metrics_bind_address: Option<String>,
    pub mode: Option<String>,
    pub nftables: Nftables,
    pub node_port_addresses: Option<Vec<String>>,
    pub oom_score_adj: Option<i32>,
    /// Has no effect in any mode, as upstream.
    pub port_range: Option<String>,
    pub show_hidden_metrics_for_version: Option<String>,
    pub windows_run_as_service: Option<bool>,
    pub winkernel: serde::de::IgnoredAny,
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

/// A duration as Go writes it: `1m30s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoDuration(pub Duration);

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        go_duration(&text).map(Self).map_err(serde::de::Error::custom)
    }
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

/// A value of `/proc/sys` that connection tracking needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sysctl {
    pub name: &'static str,
    pub value: u64,
    /// A larger value that is there already stays.
    pub at_least: bool,
}

/// The configuration with upstream's defaults, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub kubeconfig: Option<PathBuf>,
    pub hostname_override: Option<String>,
    pub bind_address: Option<IpAddr>,
    pub bind_address_hard_fail: bool,
    pub healthz: SocketAddr,
    pub metrics: SocketAddr,
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
    #[error("detectLocalMode {mode} needs {field}")]
    Missing { mode: &'static str, field: &'static str },
}

impl KubeProxyConfiguration {
    /// Reads the text of a file, JSON or YAML.
    pub fn parse(text: &str) -> Result<Self, serde_saphyr::Error> {
        serde_saphyr::from_str(text)
    }

    /// Checks and completes the configuration for a machine with this number of processors.
    pub fn settings(&self, processors: u32) -> Result<Settings, ConfigError> {
        let bad =
            |field, value: &str, expected| ConfigError::Bad { field, value: value.to_owned(), expected };
        let told = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(version) = told(&self.api_version).filter(|v| v != "kubeproxy.config.k8s.io/v1alpha1") {
            return Err(bad("apiVersion", &version, "kubeproxy.config.k8s.io/v1alpha1"));
        }
        if let Some(kind) = told(&self.kind).filter(|kind| kind != "KubeProxyConfiguration") {
            return Err(bad("kind", &kind, "KubeProxyConfiguration"));
        }
        if let Some(mode) = told(&self.mode).filter(|mode| mode != "nftables") {
            return Err(ConfigError::Mode(mode));
        }
        if self.enable_profiling == Some(true) {
            return Err(ConfigError::Unsupported("enableProfiling".into()));
        }
        if let Some(gate) = self.feature_gates.iter().flatten().next() {
            return Err(ConfigError::Unsupported(format!("feature gate {}", gate.0)));
        }
        let bind_address = match told(&self.bind_address) {
            None => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Some(text) => text.parse().map_err(|_| bad("bindAddress", &text, "an IP address"))?,
        };
        let (any, loopback): (IpAddr, IpAddr) = match bind_address {
            IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
        };
        let listen = |field, text: &Option<String>, usual: SocketAddr| match told(text) {
            None => Ok(usual),
            Some(text) => {
                let with_port =
                    text.parse().or_else(|_| text.parse().map(|ip| SocketAddr::new(ip, usual.port())));
                with_port.map_err(|_: std::net::AddrParseError| {
                    bad(field, &text, "an IP address, or one with a port")
                })
            }
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
            given.map(|given| given.0).filter(|given| !given.is_zero()).unwrap_or(usual)
        };
        Ok(Settings {
            kubeconfig: self.client_connection.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty()),
            hostname_override: told(&self.hostname_override),
            bind_address: Some(bind_address).filter(|address| !address.is_unspecified()),
            bind_address_hard_fail: self.bind_address_hard_fail.unwrap_or(false),
            healthz: listen(
                "healthzBindAddress",
                &self.healthz_bind_address,
                SocketAddr::new(any, HEALTHZ_PORT),
            )?,
            metrics: listen(
                "metricsBindAddress",
                &self.metrics_bind_address,
                SocketAddr::new(loopback, METRICS_PORT),
            )?,
            detect_local: self.detect_local()?,
            node_ports: self.node_ports()?,
            masquerade_all: self.nftables.masquerade_all.unwrap_or(false),
            masquerade_bit,
            min_sync_period: period(self.nftables.min_sync_period, Duration::from_secs(1)),
            sync_period: period(self.nftables.sync_period, Duration::from_secs(30)),
            oom_score_adj,
            sysctls: self.conntrack.sysctls(processors),
        })
    }

    fn detect_local(&self) -> Result<DetectLocalMode, ConfigError> {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let need =
            |text: &Option<String>, mode, field| given(text).ok_or(ConfigError::Missing { mode, field });
        let ranges = ranges("clusterCIDR", self.cluster_cidr.iter().flat_map(|text| text.split(',')))?;
        match self.detect_local_mode.as_deref().unwrap_or_default() {
            "" if ranges.is_empty() => Ok(DetectLocalMode::None),
            "" | "ClusterCIDR" if !ranges.is_empty() => Ok(DetectLocalMode::ClusterCidr(ranges)),
            "ClusterCIDR" => Err(ConfigError::Missing { mode: "ClusterCIDR", field: "clusterCIDR" }),
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
        if texts == ["primary"] {
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

impl Conntrack {
    /// Zero leaves the kernel's value alone.
    fn sysctls(&self, processors: u32) -> Vec<Sysctl> {
        const DAY: Duration = Duration::from_hours(24);
        const HOUR: Duration = Duration::from_hours(1);
        let per_core = self.max_per_core.unwrap_or(32 * 1024);
        let max = match per_core {
            0 => 0,
            per_core => u64::from(per_core)
                .saturating_mul(processors.into())
                .max(self.min.unwrap_or(128 * 1024).into()),
        };
        let seconds =
            |given: Option<GoDuration>, usual: Duration| given.map_or(usual, |given| given.0).as_secs();
        let rows = [
            ("nf_conntrack_max", max, true),
            ("nf_conntrack_tcp_timeout_established", seconds(self.tcp_established_timeout, DAY), false),
            ("nf_conntrack_tcp_timeout_close_wait", seconds(self.tcp_close_wait_timeout, HOUR), false),
            ("nf_conntrack_tcp_be_liberal", u64::from(self.tcp_be_liberal.unwrap_or(false)), false),
            ("nf_conntrack_udp_timeout", seconds(self.udp_timeout, Duration::ZERO), false),
            ("nf_conntrack_udp_timeout_stream", seconds(self.udp_stream_timeout, Duration::ZERO), false),
        ];
        let wanted = rows.into_iter().filter(|(_, value, _)| *value > 0);
        wanted.map(|(name, value, at_least)| Sysctl { name, value, at_least }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file that kubeadm writes.
    const KUBEADM: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: \"\"
  burst: 0
  contentType: \"\"
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: \"\"
  interfaceNamePrefix: \"\"
detectLocalMode: \"\"
enableProfiling: false
healthzBindAddress: \"\"
hostnameOverride: \"\"
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: \"\"
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  verbosity: 0
metricsBindAddress: \"\"
mode: \"\"
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: \"\"
showHiddenMetricsForVersion: \"\"
winkernel:
  enableDSR: false
  networkName: \"\"
";

    #[test]
    fn the_file_of_kubeadm_gives_upstreams_defaults() {
        let settings = KubeProxyConfiguration::parse(KUBEADM).unwrap().settings(2).unwrap();
        let sysctl = |name, value, at_least| Sysctl { name, value, at_least };
        assert_eq!(
            settings,
            Settings {
                kubeconfig: Some("/var/lib/kube-proxy/kubeconfig.conf".into()),
                hostname_override: None,
                bind_address: None,
                bind_address_hard_fail: false,
                healthz: "0.0.0.0:10256".parse().unwrap(),
                metrics: "127.0.0.1:10249".parse().unwrap(),
                detect_local: DetectLocalMode::ClusterCidr(vec!["10.244.0.0/16".parse().unwrap()]),
                node_ports: NodePortRanges::Ranges(Vec::new()),
                masquerade_all: false,
                masquerade_bit: 14,
                min_sync_period: Duration::from_secs(1),
                sync_period: Duration::from_secs(30),
                oom_score_adj: -999,
                sysctls: vec![
                    sysctl("nf_conntrack_max", 131_072, true),
                    sysctl("nf_conntrack_tcp_timeout_established", 86_400, false),
                    sysctl("nf_conntrack_tcp_timeout_close_wait", 3600, false),
                ],
            }
        );
    }

    #[test]
    fn fields_that_matter() {
        let text = "bindAddress: '::'\nnodePortAddresses: [primary]\ndetectLocalMode: BridgeInterface\n\
            detectLocal: {bridgeInterface: cni0}\nconntrack: {maxPerCore: 0, udpTimeout: 30s}\n\
            nftables: {minSyncPeriod: 100ms, masqueradeBit: 20}\nmode: nftables\nhealthzBindAddress: 127.0.0.1\n";
        let settings = KubeProxyConfiguration::parse(text).unwrap().settings(2).unwrap();
        assert_eq!(settings.healthz.to_string(), "127.0.0.1:10256");
        assert_eq!(settings.metrics.to_string(), "[::1]:10249");
        assert_eq!(settings.node_ports, NodePortRanges::Primary);
        assert_eq!(settings.detect_local, DetectLocalMode::BridgeInterface("cni0".into()));
        assert_eq!((settings.min_sync_period, settings.masquerade_bit), (Duration::from_millis(100), 20));
        assert!(settings.sysctls.iter().all(|sysctl| sysctl.name != "nf_conntrack_max"));
        assert!(settings.sysctls.iter().any(|s| s.name == "nf_conntrack_udp_timeout" && s.value == 30));
    }

    #[test]
    fn refused() {
        let rows = [
            ("mode: iptables", "has the mode nftables"),
            ("mode: ipvs", "has the mode nftables"),
            ("clusterCIDR: nonsense", "is not a CIDR"),
            ("detectLocalMode: ClusterCIDR", "needs clusterCIDR"),
            ("detectLocalMode: Guess", "ClusterCIDR, NodeCIDR"),
            ("healthzBindAddress: here", "an IP address"),
            ("featureGates: {Magic: true}", "feature gate Magic"),
            ("enableProfiling: true", "enableProfiling is not supported"),
            ("apiVersion: v2", "kubeproxy.config.k8s.io/v1alpha1"),
            ("nodePortAddresses: [primary, 10.0.0.0/8]", "is not a CIDR"),
        ];
        for (text, want) in rows {
            let error = KubeProxyConfiguration::parse(text).unwrap().settings(1).unwrap_err().to_string();
            assert!(error.contains(want), "{text}: {error}");
        }
        assert!(
            KubeProxyConfiguration::parse("clusterCidr: 10.0.0.0/8").is_err(),
            "a field that does not exist"
        );
    }
}
