//! Flags of upstream's kube-proxy that have nothing to act on here.

use crate::accepted::Values::{Any, Only, Switch};
use crate::accepted::{Accepted, AcceptedTable, row};

const IPTABLES: &str = "it is of mode iptables";
const IPVS: &str = "it is of mode ipvs";
const LOGS: &str = "there is one form of log; -v says how much";
const REQUESTS: &str = "the proxy lists, watches and writes a few events";
const MACHINE: &str = "the proxy reads no identity of the machine";

/// See [`ACCEPTED`].
#[derive(Debug, Clone, Default)]
pub struct KubeProxyFlags;

impl AcceptedTable for KubeProxyFlags {
    const GROUPS: &'static [&'static [Accepted]] = &[ACCEPTED];
}

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("boot-id-file", Any, MACHINE),
    row("config-sync-period", Any, "changes arrive as events, nothing is synced by time"),
    row("iptables-localhost-nodeports", Switch, IPTABLES),
    row("iptables-masquerade-bit", Any, IPTABLES),
    row("ipvs-exclude-cidrs", Any, IPVS),
    row("ipvs-min-sync-period", Any, IPVS),
    row("ipvs-scheduler", Any, IPVS),
    row("ipvs-strict-arp", Switch, IPVS),
    row("ipvs-sync-period", Any, IPVS),
    row("ipvs-tcp-timeout", Any, IPVS),
    row("ipvs-tcpfin-timeout", Any, IPVS),
    row("ipvs-udp-timeout", Any, IPVS),
    row("kube-api-burst", Any, REQUESTS),
    row("kube-api-content-type", Any, REQUESTS),
    row("kube-api-qps", Any, REQUESTS),
    row("log-flush-frequency", Any, LOGS),
    row("log-json-info-buffer-size", Only(&["0"]), LOGS),
    row("log-json-split-stream", Only(&["false"]), LOGS),
    row("log-text-info-buffer-size", Only(&["0"]), LOGS),
    row("log-text-split-stream", Only(&["false"]), LOGS),
    row("logging-format", Only(&["text"]), LOGS),
    row("machine-id-file", Any, MACHINE),
    row("profiling", Only(&["false"]), "the program is not profiled through its port"),
    row("show-hidden-metrics-for-version", Only(&[""]), "all metrics are always shown"),
    row("vmodule", Only(&[""]), LOGS),
];
