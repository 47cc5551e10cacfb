//! `/healthz`, `/livez`, `/readyz`, with upstream's names of checks.

use crate::http::{self, Answer};
use crate::options::Query;
use crate::request::Health;

/// What every endpoint checks first.
const FIRST: &[&str] = &["ping", "log"];
/// What must have started. All of it has, or the server is not ready.
const STARTED: &[&str] = &[
    "poststarthook/start-apiserver-admission-initializer",
    "poststarthook/generic-apiserver-start-informers",
    "poststarthook/priority-and-fairness-config-consumer",
    "poststarthook/priority-and-fairness-filter",
    "poststarthook/storage-object-count-tracker-hook",
    "poststarthook/start-apiextensions-informers",
    "poststarthook/start-apiextensions-controllers",
    "poststarthook/crd-informer-synced",
    "poststarthook/start-system-namespaces-controller",
    "poststarthook/peer-endpoint-reconciler-controller",
    "poststarthook/start-cluster-authentication-info-controller",
    "poststarthook/start-kube-apiserver-identity-lease-controller",
    "poststarthook/start-kube-apiserver-identity-lease-garbage-collector",
    "poststarthook/storage-readiness",
    "poststarthook/start-legacy-token-tracking-controller",
    "poststarthook/start-service-ip-repair-controllers",
    "poststarthook/rbac/bootstrap-roles",
    "poststarthook/scheduling/bootstrap-system-priority-classes",
    "poststarthook/priority-and-fairness-config-producer",
    "poststarthook/bootstrap-controller",
    "poststarthook/start-kubernetes-service-cidr-controller",
    "poststarthook/aggregator-reload-proxy-client-cert",
    "poststarthook/start-kube-aggregator-informers",
    "poststarthook/apiservice-status-local-available-controller",
    "poststarthook/apiservice-status-remote-available-controller",
    "poststarthook/apiservice-registration-controller",
    "poststarthook/apiservice-discovery-controller",
    "poststarthook/kube-apiserver-autoregistration",
    "autoregister-completion",
    "poststarthook/apiservice-openapi-controller",
    "poststarthook/apiservice-openapiv3-controller",
];

/// The checks of an endpoint in upstream's order.
pub(crate) fn checks(endpoint: Health) -> Vec<&'static str> {
    let (middle, last): (&[&str], &[&str]) = match endpoint {
        Health::Healthz | Health::Livez => (&["loopback-serving-certificate", "etcd"], &[]),
        Health::Readyz => (&["etcd", "etcd-readiness", "informer-sync"], &["shutdown"]),
    };
    [FIRST, middle, STARTED, last].concat()
}

pub(crate) fn answer(endpoint: Health, check: Option<&str>, query: &Query, ready: bool) -> Answer {
    let name = endpoint.as_str();
    let checks = checks(endpoint);
    let passes = |check: &str| endpoint == Health::Livez || ready || FIRST.contains(&check);
    if let Some(check) = check {
        return match checks.contains(&check) {
            false => http::text(404, "404 page not found\n"),
            true if passes(check) => http::text(200, "ok"),
            true => http::text(500, format!("internal server error: {check} is not ready\n")),
        };
    }
    let excluded: Vec<&str> = query.all("exclude").filter(|e| !e.is_empty()).collect();
    let mut report = String::new();
    let mut failed = Vec::new();
    for check in &checks {
        report.push_str(&if excluded.contains(check) {
            format!("[+]{check} excluded: ok\n")
        } else if passes(check) {
            format!("[+]{check} ok\n")
        } else {
            failed.push(*check);
            format!("[-]{check} failed: reason withheld\n")
        });
    }
    let unknown: Vec<&str> = excluded.iter().copied().filter(|e| !checks.contains(e)).collect();
    if !unknown.is_empty() {
        let quoted: Vec<String> = unknown.iter().map(|e| format!("{e:?}")).collect();
        report.push_str(&format!(
            "warn: some health checks cannot be excluded: no matches for {}\n",
            quoted.join(",")
        ));
    }
    match (failed.is_empty(), query.get("verbose").is_some()) {
        (true, false) => http::text(200, "ok"),
        (true, true) => http::text(200, format!("{report}{name} check passed\n")),
        (false, _) => http::text(500, format!("{report}{name} check failed\n")),
    }
}
