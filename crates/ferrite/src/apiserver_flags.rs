//! Flags of upstream's kube-apiserver that have nothing to act on here.

use crate::accepted::Values::{Any, Only, Switch};
use crate::accepted::{Accepted, AcceptedTable, row};

/// See [`ACCEPTED`].
#[derive(Debug, Clone, Default)]
pub struct ApiServerFlags;

impl AcceptedTable for ApiServerFlags {
    const FLAGS: &'static [Accepted] = ACCEPTED;
}

const METRICS: &str = "all metrics are always shown";
const LOGS: &str = "there is one form of log; -v says how much";
const PROFILING: &str = "only --profiling turns profiles on";
const ELECTION: &str = "leaders are not elected by the API server";
const PEERS: &str = "requests are not passed to servers of other versions";
const MEMORY: &str = "all objects are in memory, and their number and state are always known";
const VERSION: &str = "this program is v1.36";

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("allow-metric-labels", Only(&["", "[]"]), METRICS),
    row("allow-metric-labels-manifest", Only(&[""]), METRICS),
    row("apiserver-count", Any, "the addresses of servers are kept by leases"),
    row("cert-dir", Only(&["", "/var/run/kubernetes"]), "certificates that the server makes are below --data-dir; --tls-cert-file names another"),
    row("contention-profiling", Only(&["false"]), PROFILING),
    row("coordinated-leadership-lease-duration", Any, ELECTION),
    row("coordinated-leadership-renew-deadline", Any, ELECTION),
    row("coordinated-leadership-retry-period", Any, ELECTION),
    row("debug-socket-path", Only(&[""]), PROFILING),
    row("default-watch-cache-size", Any, MEMORY),
    row("delete-collection-workers", Any, "one task deletes a collection"),
    row("disabled-metrics", Only(&[""]), METRICS),
    row("egress-selector-config-file", Only(&[""]), "the server connects to nodes, webhooks and etcd itself"),
    row("emulated-version", Only(&["", "1.36", "kube=1.36"]), VERSION),
    row("emulation-forward-compatible", Only(&["false"]), VERSION),
    row("enable-logs-handler", Only(&["false"]), "logs of the machine are not served"),
    row("etcd-count-metric-poll-period", Any, MEMORY),
    row("etcd-db-metric-poll-interval", Any, MEMORY),
    row("etcd-healthcheck-timeout", Any, MEMORY),
    row("etcd-readycheck-timeout", Any, MEMORY),
    row("etcd-servers-overrides", Only(&["", "[]"]), "all objects are in one etcd"),
    row("kubelet-port", Only(&["10250"]), "Nodes say the port of their kubelets"),
    row("kubelet-read-only-port", Any, "the server never uses that port"),
    row("kubelet-timeout", Any, "a connection to a kubelet has ten seconds to begin"),
    row("lease-reuse-duration-seconds", Only(&["60"]), "events of one minute share a lease of etcd"),
    row("livez-grace-period", Any, "the server serves when its start is over"),
    row("log-flush-frequency", Any, LOGS),
    row("log-json-info-buffer-size", Only(&["0"]), LOGS),
    row("log-json-split-stream", Only(&["false"]), LOGS),
    row("log-text-info-buffer-size", Only(&["0"]), LOGS),
    row("log-text-split-stream", Only(&["false"]), LOGS),
    row("logging-format", Only(&["text"]), LOGS),
    row("max-connection-bytes-per-sec", Only(&["0"]), "connections are not slowed down"),
    row("min-compatibility-version", Only(&["", "1.36", "kube=1.36", "1.35", "kube=1.35"]), VERSION),
    row("peer-advertise-ip", Only(&[""]), PEERS),
    row("peer-advertise-port", Only(&[""]), PEERS),
    row("peer-ca-file", Only(&[""]), PEERS),
    row("permit-address-sharing", Switch, "ports are always opened with SO_REUSEADDR"),
    row("runtime-config-emulation-forward-compatible", Only(&["false"]), VERSION),
    row("service-account-signing-endpoint", Only(&[""]), "tokens are signed with a key of a file"),
    row("show-hidden-metrics-for-version", Only(&[""]), METRICS),
    row("shutdown-send-retry-after", Only(&["false"]), "a server that ends takes no more connections"),
    row("shutdown-watch-termination-grace-period", Only(&["0s", "0"]), "watches end when the server ends"),
    row("storage-initialization-timeout", Any, "the server serves when its store is read"),
    row("tls-curve-preferences", Only(&["", "[]"]), "the TLS library chooses among its curves"),
    row("tracing-config-file", Only(&[""]), "requests are not traced to another server"),
    row("vmodule", Only(&[""]), LOGS),
    row("watch-cache-sizes", Any, MEMORY),
];
