//! The configuration in use, in the form of a file: for `/configz` and `--write-config-to`.

use super::config::{DetectLocalMode, KubeProxyConfiguration, NodePortRanges, Settings, TYPE};
use ferrite_component::GoDuration;
use ferrite_json::{Value, json};
use std::time::Duration;

fn duration(value: Duration) -> String {
    GoDuration(value).to_string()
}

/// The configuration with its defaults. Sections of other modes are left out: nobody acts on them.
pub fn written(given: &KubeProxyConfiguration, settings: &Settings) -> Value {
    let text = |given: &Option<String>| given.clone().unwrap_or_default();
    let address =
        |address: Option<std::net::SocketAddr>| address.map(|at| at.to_string()).unwrap_or_default();
    let or = |given: Option<GoDuration>, usual: u64| {
        duration(given.map_or(Duration::from_secs(usual), |given| given.0))
    };
    let conntrack = &given.conntrack;
    let mode = match &settings.detect_local {
        DetectLocalMode::None | DetectLocalMode::ClusterCidr(_) => "ClusterCIDR",
        DetectLocalMode::NodeCidr => "NodeCIDR",
        DetectLocalMode::BridgeInterface(_) => "BridgeInterface",
        DetectLocalMode::InterfaceNamePrefix(_) => "InterfaceNamePrefix",
    };
    let node_ports = match &settings.node_ports {
        NodePortRanges::Primary => vec!["primary".to_owned()],
        NodePortRanges::Ranges(ranges) => ranges.iter().map(ToString::to_string).collect(),
    };
    let kubeconfig = settings.kubeconfig.as_ref().map(|path| path.display().to_string());
    let mut gates = json!({});
    for (name, value) in given.feature_gates.iter().flatten() {
        gates[name.as_str()] = Value::from(*value);
    }
    json!({
        "apiVersion": TYPE.api_version,
        "kind": TYPE.kind,
        "bindAddress": given.bind_address.clone().filter(|text| !text.is_empty()).unwrap_or("0.0.0.0".into()),
        "bindAddressHardFail": settings.bind_address_hard_fail,
        "clientConnection": {"kubeconfig": kubeconfig.unwrap_or_default()},
        "clusterCIDR": text(&given.cluster_cidr),
        "conntrack": {
            "maxPerCore": conntrack.max_per_core.unwrap_or(32 * 1024),
            "min": conntrack.min.unwrap_or(128 * 1024),
            "tcpBeLiberal": conntrack.tcp_be_liberal.unwrap_or(false),
            "tcpCloseWaitTimeout": or(conntrack.tcp_close_wait_timeout, 3600),
            "tcpEstablishedTimeout": or(conntrack.tcp_established_timeout, 86_400),
            "udpStreamTimeout": or(conntrack.udp_stream_timeout, 0),
            "udpTimeout": or(conntrack.udp_timeout, 0),
        },
        "detectLocal": {
            "bridgeInterface": text(&given.detect_local.bridge_interface),
            "interfaceNamePrefix": text(&given.detect_local.interface_name_prefix),
        },
        "detectLocalMode": mode,
        "enableProfiling": false,
        "featureGates": gates,
        "healthzBindAddress": address(settings.healthz),
        "hostnameOverride": settings.hostname_override.clone().unwrap_or_default(),
        "logging": {"format": "text", "verbosity": given.logging.verbosity.unwrap_or(0)},
        "metricsBindAddress": address(settings.metrics),
        "mode": "nftables",
        "nftables": {
            "masqueradeAll": settings.masquerade_all,
            "masqueradeBit": settings.masquerade_bit,
            "minSyncPeriod": duration(settings.min_sync_period),
            "syncPeriod": duration(settings.sync_period),
        },
        "nodePortAddresses": node_ports,
        "oomScoreAdj": settings.oom_score_adj,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube_proxy::config::Origin;

    #[test]
    fn a_file_that_was_written_gives_the_same_settings() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.yaml");
        let given = KubeProxyConfiguration {
            cluster_cidr: Some("10.244.0.0/16".into()),
            bind_address: Some("::".into()),
            node_port_addresses: Some(vec!["10.0.0.0/8".into()]),
            ..KubeProxyConfiguration::default()
        };
        for given in [KubeProxyConfiguration::default(), given] {
            let settings = given.settings(4, Origin::File).unwrap();
            std::fs::write(&file, serde_saphyr::to_string(&written(&given, &settings)).unwrap()).unwrap();
            let read = KubeProxyConfiguration::read(&file).unwrap();
            assert_eq!(read.settings(4, Origin::File).unwrap(), settings);
            assert_eq!(written(&read, &settings), written(&given, &settings));
        }
    }
}
