//! Flags of upstream's scheduler that have nothing to act on here.

use crate::accepted::Values::{Any, Only, Switch};
use crate::accepted::{Accepted, AcceptedTable, row};

/// See [`ACCEPTED`].
#[derive(Debug, Clone, Default)]
pub struct SchedulerFlags;

impl AcceptedTable for SchedulerFlags {
    const FLAGS: &'static [Accepted] = ACCEPTED;
}

const TOKENS: &str = "callers show bearer tokens, and nothing else is trusted";
const SERVING: &str = "the port has one certificate and the TLS settings of the program";
const METRICS: &str = "all metrics are always shown";
const LOGS: &str = "there is one form of log; -v says how much";
const PROFILING: &str = "the program is not profiled through its port";

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("allow-metric-labels", Only(&["", "[]"]), METRICS),
    row("allow-metric-labels-manifest", Only(&[""]), METRICS),
    row("authentication-skip-lookup", Switch, TOKENS),
    row("authentication-tolerate-lookup-failure", Switch, TOKENS),
    row("cert-dir", Any, "a certificate that is made at the start is kept in memory"),
    row("client-ca-file", Any, TOKENS),
    row("contention-profiling", Switch, PROFILING),
    row("disable-http2-serving", Only(&["false"]), SERVING),
    row("disabled-metrics", Only(&[""]), METRICS),
    row("emulated-version", Only(&["", "1.36", "kube=1.36"]), "this program is v1.36"),
    row("http2-max-streams-per-connection", Any, SERVING),
    row("kube-api-burst", Any, "the API server limits requests"),
    row("kube-api-content-type", Any, "requests are JSON"),
    row("kube-api-qps", Any, "the API server limits requests"),
    row("log-flush-frequency", Any, LOGS),
    row("log-json-info-buffer-size", Only(&["0"]), LOGS),
    row("log-json-split-stream", Only(&["false"]), LOGS),
    row("log-text-info-buffer-size", Only(&["0"]), LOGS),
    row("log-text-split-stream", Only(&["false"]), LOGS),
    row("logging-format", Only(&["text"]), LOGS),
    row("min-compatibility-version", Only(&["", "1.36", "kube=1.36", "1.35", "kube=1.35"]), "this program is v1.36"),
    row("permit-address-sharing", Only(&["false"]), SERVING),
    row("permit-port-sharing", Only(&["false"]), SERVING),
    row("pod-max-in-unschedulable-pods-duration", Only(&["5m0s", "5m", "300s"]), "pods that no node fits wait for a change, and five minutes at most"),
    row("profiling", Switch, PROFILING),
    row("requestheader-allowed-names", Any, TOKENS),
    row("requestheader-client-ca-file", Any, TOKENS),
    row("requestheader-extra-headers-prefix", Any, TOKENS),
    row("requestheader-group-headers", Any, TOKENS),
    row("requestheader-uid-headers", Any, TOKENS),
    row("requestheader-username-headers", Any, TOKENS),
    row("show-hidden-metrics-for-version", Only(&[""]), METRICS),
    row("tls-cipher-suites", Only(&[""]), SERVING),
    row("tls-curve-preferences", Only(&["", "[]"]), SERVING),
    row("tls-min-version", Only(&["", "VersionTLS12"]), SERVING),
    row("tls-sni-cert-key", Only(&["", "[]"]), SERVING),
    row("vmodule", Only(&[""]), LOGS),
    row("write-config-to", Only(&[""]), "the configuration in use is at /configz"),
];
