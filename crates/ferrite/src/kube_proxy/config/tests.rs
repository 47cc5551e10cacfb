//! Files and flags, and the settings that they give.

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

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

fn read(text: &str) -> Result<KubeProxyConfiguration, ferrite_component::ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, text).unwrap();
    KubeProxyConfiguration::read(&file)
}

fn with_head(text: &str) -> KubeProxyConfiguration {
    read(&format!("{HEAD}{text}\n")).unwrap()
}

#[test]
fn the_file_of_kubeadm_gives_upstreams_defaults() {
    let settings = read(KUBEADM).unwrap().settings(2, Origin::File).unwrap();
    let sysctl = |name, value| Sysctl { name, value };
    assert_eq!(
        settings,
        Settings {
            kubeconfig: Some("/var/lib/kube-proxy/kubeconfig.conf".into()),
            hostname_override: None,
            bind_address: None,
            bind_address_hard_fail: false,
            healthz: Some("0.0.0.0:10256".parse().unwrap()),
            metrics: Some("127.0.0.1:10249".parse().unwrap()),
            detect_local: DetectLocalMode::ClusterCidr(vec!["10.244.0.0/16".parse().unwrap()]),
            node_ports: NodePortRanges::Primary,
            masquerade_all: false,
            masquerade_bit: 14,
            min_sync_period: Duration::from_secs(1),
            sync_period: Duration::from_secs(30),
            oom_score_adj: -999,
            sysctls: vec![
                sysctl("nf_conntrack_max", 131_072),
                sysctl("nf_conntrack_tcp_timeout_established", 86_400),
                sysctl("nf_conntrack_tcp_timeout_close_wait", 3600),
            ],
        }
    );
}

#[test]
fn fields_that_matter() {
    let text = "bindAddress: '::'\nnodePortAddresses: [primary]\ndetectLocalMode: BridgeInterface\n\
        detectLocal: {bridgeInterface: cni0}\nconntrack: {maxPerCore: 0, udpTimeout: 30s}\n\
        nftables: {minSyncPeriod: 100ms, masqueradeBit: 20}\nmode: nftables\nhealthzBindAddress: 127.0.0.1\n";
    let settings = with_head(text).settings(2, Origin::File).unwrap();
    assert_eq!(settings.healthz.unwrap().to_string(), "127.0.0.1:10256");
    assert_eq!(settings.metrics.unwrap().to_string(), "[::1]:10249");
    assert_eq!(settings.node_ports, NodePortRanges::Primary);
    assert_eq!(settings.detect_local, DetectLocalMode::BridgeInterface("cni0".into()));
    assert_eq!((settings.min_sync_period, settings.masquerade_bit), (Duration::from_millis(100), 20));
    assert!(settings.sysctls.iter().all(|sysctl| sysctl.name != "nf_conntrack_max"));
    assert!(settings.sysctls.iter().any(|s| s.name == "nf_conntrack_udp_timeout" && s.value == 30));
}

#[test]
fn node_ports_answer_at_the_primary_addresses_by_default() {
    let of = |text: &str| with_head(text).settings(1, Origin::File).unwrap().node_ports;
    assert_eq!(of("mode: nftables"), NodePortRanges::Primary);
    assert_eq!(of("nodePortAddresses: []"), NodePortRanges::Primary);
    assert_eq!(of("nodePortAddresses: [primary]"), NodePortRanges::Primary);
    let all = NodePortRanges::Ranges(vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()]);
    assert_eq!(of("nodePortAddresses: [0.0.0.0/0, '::/0']"), all);
}

#[test]
fn values_that_change_nothing_are_accepted() {
    for text in [
        "detectLocalMode: ClusterCIDR",
        "featureGates: {ContextualLogging: true}",
        "logging: {format: text, flushFrequency: 5s, verbosity: 2, vmodule: [], options: {json: {}}}",
        "iptables: {masqueradeBit: 3}\nipvs: {scheduler: rr}\nportRange: ''",
    ] {
        let settings = with_head(text).settings(1, Origin::File);
        assert!(settings.is_ok(), "{text}: {settings:?}");
    }
    let none = with_head("detectLocalMode: ClusterCIDR").settings(1, Origin::File).unwrap();
    assert_eq!(none.detect_local, DetectLocalMode::None);
}

#[test]
fn ports_of_flags() {
    let ports = |healthz: Option<&str>, healthz_port, metrics_port| {
        let configuration = KubeProxyConfiguration {
            healthz_bind_address: healthz.map(str::to_owned),
            ..KubeProxyConfiguration::default()
        };
        let settings = configuration.settings(1, Origin::Flags { healthz_port, metrics_port }).unwrap();
        let text = |address: Option<SocketAddr>| address.map(|address| address.to_string());
        (text(settings.healthz), text(settings.metrics))
    };
    let some = |text: &str| Some(text.to_owned());
    let usual = some("127.0.0.1:10249");
    assert_eq!(ports(None, HEALTHZ_PORT, METRICS_PORT), (some("0.0.0.0:10256"), usual.clone()));
    assert_eq!(ports(None, 0, 0), (None, None));
    assert_eq!(ports(Some(""), HEALTHZ_PORT, METRICS_PORT), (None, usual.clone()));
    assert_eq!(ports(Some("192.0.2.1"), 7, METRICS_PORT), (some("192.0.2.1:7"), usual.clone()));
    assert_eq!(ports(Some("192.0.2.1:8"), 7, METRICS_PORT), (some("192.0.2.1:8"), usual));
}

#[test]
fn refused() {
    let rows = [
        ("mode: iptables", "has the mode nftables"),
        ("mode: ipvs", "has the mode nftables"),
        ("clusterCIDR: nonsense", "is not a CIDR"),
        ("nftables: {syncPeriod: 1s, minSyncPeriod: 2s}", "as long as nftables.minSyncPeriod"),
        ("showHiddenMetricsForVersion: '1.35'", "showHiddenMetricsForVersion is not supported"),
        ("logging: {format: json}", "logging.format other than text"),
        ("logging: {vmodule: [{filePattern: x, verbosity: 4}]}", "logging.vmodule is not supported"),
        ("windowsRunAsService: true", "windowsRunAsService"),
        ("detectLocalMode: Guess", "ClusterCIDR, NodeCIDR"),
        ("healthzBindAddress: here", "an IP address"),
        ("featureGates: {Magic: true}", "Magic"),
        ("featureGates: {ContextualLogging: false}", "ContextualLogging"),
        ("enableProfiling: true", "enableProfiling is not supported"),
        ("nodePortAddresses: [primary, 10.0.0.0/8]", "is not a CIDR"),
    ];
    for (text, want) in rows {
        let error = with_head(text).settings(1, Origin::File).unwrap_err().to_string();
        assert!(error.contains(want), "{text}: {error}");
    }
    for (text, want) in [
        ("clusterCidr: 10.0.0.0/8", "did you mean"),
        ("apiVersion: v2", "kubeproxy.config.k8s.io/v1alpha1"),
        ("nftables: {syncPeriod: -1s}", "is not a duration"),
    ] {
        let whole = if text.starts_with("apiVersion") { text.to_owned() } else { format!("{HEAD}{text}\n") };
        let error = read(&whole).unwrap_err().to_string();
        assert!(error.contains(want), "{text}: {error}");
    }
}
