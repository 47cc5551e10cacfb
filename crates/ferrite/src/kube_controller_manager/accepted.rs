//! Flags of upstream's controller manager that have nothing to act on here.

use crate::accepted::Values::{Any, Only, Switch};
use crate::accepted::{Accepted, AcceptedTable, row};

const EVENTS: &str = "changes arrive as events, nothing is synced by time";
const CLOUD: &str = "there is no cloud provider in this manager";
const RECYCLER: &str = "nobody recycles volumes";
const TOKENS: &str = "callers show bearer tokens, and nothing else is trusted";
const SERVING: &str = "the port has one certificate and the TLS settings of the program";
const METRICS: &str = "all metrics are always shown";
const LOGS: &str = "there is one form of log; -v says how much";

/// See [`ACCEPTED`].
#[derive(Debug, Clone, Default)]
pub struct ControllerManagerFlags;

impl AcceptedTable for ControllerManagerFlags {
    const FLAGS: &'static [Accepted] = ACCEPTED;
}

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("allow-metric-labels", Only(&["", "[]"]), METRICS),
    row("allow-metric-labels-manifest", Only(&[""]), METRICS),
    row("allow-untagged-cloud", Switch, CLOUD),
    row("attach-detach-reconcile-sync-period", Any, EVENTS),
    row("authentication-skip-lookup", Switch, TOKENS),
    row("authentication-tolerate-lookup-failure", Switch, TOKENS),
    row("cert-dir", Any, "a certificate that is made at the start is kept in memory"),
    row("cidr-allocator-type", Only(&["RangeAllocator"]), CLOUD),
    row("client-ca-file", Any, TOKENS),
    row("cloud-config", Only(&[""]), CLOUD),
    row("cloud-provider", Only(&["", "external"]), CLOUD),
    row("cluster-name", Any, CLOUD),
    row("concurrent-service-syncs", Any, CLOUD),
    row("configure-cloud-routes", Switch, CLOUD),
    row("contention-profiling", Only(&["false"]), "the program is not profiled through its port"),
    row("controller-shutdown-timeout", Any, "controllers end at once: nothing is lost by that"),
    row("controller-start-interval", Any, "controllers start together"),
    row("disable-attach-detach-reconcile-sync", Switch, EVENTS),
    row("disable-http2-serving", Only(&["false"]), SERVING),
    row("disabled-metrics", Only(&[""]), METRICS),
    row("emulated-version", Only(&["", "1.36", "kube=1.36"]), "this program is v1.36"),
    row("enable-hostpath-provisioner", Only(&["false"]), "the provisioner of local volumes is part of `ferrite up`"),
    row("enable-leader-migration", Only(&["false"]), "there is one lease for all controllers"),
    row("endpoint-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("endpointslice-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("external-cloud-volume-plugin", Only(&[""]), CLOUD),
    row("flex-volume-plugin-dir", Any, "controllers call no FlexVolume plugins"),
    row("http2-max-streams-per-connection", Any, SERVING),
    row("kube-api-burst", Any, "the API server limits requests"),
    row("kube-api-content-type", Any, "requests are JSON"),
    row("kube-api-qps", Any, "the API server limits requests"),
    row("leader-migration-config", Only(&[""]), "there is one lease for all controllers"),
    row("log-flush-frequency", Any, LOGS),
    row("log-json-info-buffer-size", Only(&["0"]), LOGS),
    row("log-json-split-stream", Only(&["false"]), LOGS),
    row("log-text-info-buffer-size", Only(&["0"]), LOGS),
    row("log-text-split-stream", Only(&["false"]), LOGS),
    row("logging-format", Only(&["text"]), LOGS),
    row("min-compatibility-version", Only(&["", "1.36", "kube=1.36", "1.35", "kube=1.35"]), "this program is v1.36"),
    row("min-resync-period", Any, EVENTS),
    row("mirroring-endpointslice-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("namespace-sync-period", Any, EVENTS),
    row("node-monitor-period", Any, EVENTS),
    row("node-sync-period", Any, EVENTS),
    row("permit-address-sharing", Only(&["false"]), SERVING),
    row("permit-port-sharing", Only(&["false"]), SERVING),
    row("profiling", Switch, "the program is not profiled through its port"),
    row("pv-recycler-increment-timeout-nfs", Any, RECYCLER),
    row("pv-recycler-minimum-timeout-hostpath", Any, RECYCLER),
    row("pv-recycler-minimum-timeout-nfs", Any, RECYCLER),
    row("pv-recycler-pod-template-filepath-hostpath", Any, RECYCLER),
    row("pv-recycler-pod-template-filepath-nfs", Any, RECYCLER),
    row("pv-recycler-timeout-increment-hostpath", Any, RECYCLER),
    row("pvclaimbinder-sync-period", Any, EVENTS),
    row("requestheader-allowed-names", Any, TOKENS),
    row("requestheader-client-ca-file", Any, TOKENS),
    row("requestheader-extra-headers-prefix", Any, TOKENS),
    row("requestheader-group-headers", Any, TOKENS),
    row("requestheader-uid-headers", Any, TOKENS),
    row("requestheader-username-headers", Any, TOKENS),
    row("route-reconciliation-period", Any, CLOUD),
    row("show-hidden-metrics-for-version", Only(&[""]), METRICS),
    row("tls-cipher-suites", Only(&[""]), SERVING),
    row("tls-curve-preferences", Only(&[""]), SERVING),
    row("tls-min-version", Only(&["", "VersionTLS12"]), SERVING),
    row("tls-sni-cert-key", Only(&["", "[]"]), SERVING),
    row("vmodule", Only(&[""]), LOGS),
];
