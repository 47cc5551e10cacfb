//! Flags of upstream's kube-apiserver that have nothing to act on here.

use crate::accepted::Values::{Any, Only, Switch};
use crate::accepted::{Accepted, AcceptedTable, COMMON, VERSION, row};

/// See [`ACCEPTED`] and the groups that components share.
#[derive(Debug, Clone, Default)]
pub struct ApiServerFlags;

impl AcceptedTable for ApiServerFlags {
    const GROUPS: &'static [&'static [Accepted]] = &[COMMON, ACCEPTED];
}

const PROFILING: &str = "only --profiling turns profiles on";
const ELECTION: &str = "leaders are not elected by the API server";
const PEERS: &str = "requests are not passed to servers of other versions";
const MEMORY: &str = "all objects are in memory, and their number and state are always known";

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("apiserver-count", Any, "the addresses of servers are kept by leases"),
    row("cert-dir", Only(&["", "/var/run/kubernetes"]), "certificates that the server makes are below --data-dir; --tls-cert-file names another"),
    row("contention-profiling", Only(&["false"]), PROFILING),
    row("coordinated-leadership-lease-duration", Any, ELECTION),
    row("coordinated-leadership-renew-deadline", Any, ELECTION),
    row("coordinated-leadership-retry-period", Any, ELECTION),
    row("debug-socket-path", Only(&[""]), PROFILING),
    row("default-watch-cache-size", Any, MEMORY),
    row("delete-collection-workers", Any, "one task deletes a collection"),
    row("egress-selector-config-file", Only(&[""]), "the server connects to nodes, webhooks and etcd itself"),
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
    row("max-connection-bytes-per-sec", Only(&["0"]), "connections are not slowed down"),
    row("peer-advertise-ip", Only(&[""]), PEERS),
    row("peer-advertise-port", Only(&[""]), PEERS),
    row("peer-ca-file", Only(&[""]), PEERS),
    row("permit-address-sharing", Switch, "ports are always opened with SO_REUSEADDR"),
    row("runtime-config-emulation-forward-compatible", Only(&["false"]), VERSION),
    row("service-account-signing-endpoint", Only(&[""]), "tokens are signed with a key of a file"),
    row("shutdown-send-retry-after", Only(&["false"]), "a server that ends takes no more connections"),
    row("shutdown-watch-termination-grace-period", Only(&["0s", "0"]), "watches end when the server ends"),
    row("storage-initialization-timeout", Any, "the server serves when its store is read"),
    row("tracing-config-file", Only(&[""]), "requests are not traced to another server"),
    row("watch-cache-sizes", Any, MEMORY),
];
