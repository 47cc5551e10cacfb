//! `/healthz`, `/livez`, `/readyz`, with upstream's names of checks.

use crate::http::{self, Response};
use crate::options::Query;
use crate::request::Health;
use ferrite_component::metrics::{Counter, Family, Gauge, Registry};
use futures_util::future::BoxFuture;
use std::sync::{Arc, LazyLock};

/// The first checks of every endpoint.
const FIRST: &[&str] = &["ping", "log"];
/// The parts that must have started before the server is ready.
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

/// The checks of the APIServices of the server's own groups. The server serves before these are stored.
const REGISTERED: &[&str] = &[
    "poststarthook/apiservice-registration-controller",
    "poststarthook/kube-apiserver-autoregistration",
    "autoregister-completion",
];

/// The checks of an endpoint in upstream's order.
pub(crate) fn checks(endpoint: Health, extra: &[HealthCheck]) -> Vec<&'static str> {
    let (middle, last): (&[&str], &[&str]) = match endpoint {
        Health::Healthz | Health::Livez => (&["loopback-serving-certificate", "etcd"], &[]),
        Health::Readyz => (&["etcd", "etcd-readiness", "informer-sync"], &["shutdown"]),
    };
    let extra: Vec<&str> = extra.iter().map(|check| check.name).collect();
    [FIRST, middle, &extra, STARTED, last].concat()
}

/// Checks of the store. A store that takes no more changes fails them for good: the server is not alive.
const STORE: &[&str] = &["etcd", "etcd-readiness"];

/// A check of something that the server depends on.
#[derive(Clone)]
pub struct HealthCheck {
    pub name: &'static str,
    /// Answers why it is not well.
    pub check: Arc<dyn Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync>,
}

impl std::fmt::Debug for HealthCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("HealthCheck").field(&self.name).finish()
    }
}

/// The facts about the server that its checks report.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub started: bool,
    /// The APIServices of the server's own groups are stored.
    pub registered: bool,
    /// The server is shutting down.
    pub draining: bool,
    /// Why the store takes no changes.
    pub store: Result<(), String>,
    /// The results of further checks.
    pub extra: Vec<(&'static str, Result<(), String>)>,
}

impl State {
    fn check(&self, endpoint: Health, check: &str) -> Result<(), &str> {
        if let Some((_, result)) = self.extra.iter().find(|(name, _)| *name == check) {
            return result.as_ref().copied().map_err(String::as_str);
        }
        let started = self.started || endpoint == Health::Livez;
        match check {
            "shutdown" if self.draining => Err("process is shutting down"),
            // A server that is still starting is alive.
            _ if !self.registered && endpoint != Health::Livez && REGISTERED.contains(&check) => {
                Err("not finished")
            }
            _ if !started && !FIRST.contains(&check) && check != "shutdown" => Err("not finished"),
            _ if STORE.contains(&check) => self.store.as_ref().copied().map_err(String::as_str),
            _ => Ok(()),
        }
    }
}

/// The results of checks, for service levels. They have a registry of their own, as upstream.
struct Results {
    registry: Registry,
    last: Arc<Family<Gauge>>,
    total: Arc<Family<Counter>>,
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let registry = Registry::default();
    let last = registry.gauge(
        "kubernetes_healthcheck",
        "Whether a check passed when it was last made.",
        &["name", "type"],
    );
    let total = registry.counter(
        "kubernetes_healthchecks_total",
        "Checks that were made, by their result.",
        &["name", "status", "type"],
    );
    Results { registry, last, total }
});

impl Results {
    fn record(&self, endpoint: Health, check: &str, passed: bool) {
        let status = if passed { "success" } else { "error" };
        self.last.with(&[check, endpoint.as_str()]).set(i64::from(passed));
        self.total.with(&[check, status, endpoint.as_str()]).increment();
    }
}

/// `/metrics/slis`: the results so far.
pub(crate) fn results() -> String {
    RESULTS.registry.text()
}

/// Returns true if the answer depends on the store.
pub(crate) fn asks_store(check: Option<&str>, query: &Query) -> bool {
    match check {
        Some(check) => STORE.contains(&check),
        None => !STORE.iter().all(|check| query.all("exclude").any(|excluded| excluded == *check)),
    }
}

/// Tells whether the answer depends on a further check.
pub(crate) fn asks(name: &str, check: Option<&str>, query: &Query) -> bool {
    check.map_or_else(|| query.all("exclude").all(|excluded| excluded != name), |check| check == name)
}

pub(crate) fn answer(
    endpoint: Health,
    check: Option<&str>,
    query: &Query,
    state: &State,
    extra: &[HealthCheck],
) -> Response {
    let name = endpoint.as_str();
    let checks = checks(endpoint, extra);
    let run = |check: &str| {
        let result = state.check(endpoint, check);
        RESULTS.record(endpoint, check, result.is_ok());
        result
    };
    let passes = |check: &str| run(check).is_ok();
    if let Some(check) = check {
        return match checks.contains(&check) {
            false => http::text(404, "404 page not found\n"),
            true => match run(check) {
                Ok(()) => http::text(200, "ok"),
                Err(reason) => http::text(500, format!("internal server error: {reason}\n")),
            },
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_tell_what_is_not_well() {
        let well =
            State { started: true, registered: true, draining: false, store: Ok(()), extra: Vec::new() };
        let check = Arc::new(|| -> BoxFuture<'static, Result<(), String>> { Box::pin(async { Ok(()) }) });
        let extra = [HealthCheck { name: "kms-providers", check }];
        let locked = State { extra: vec![("kms-providers", Err("no answer".into()))], ..well.clone() };
        let stopping = State { draining: true, ..well.clone() };
        let starting = State { started: false, ..well.clone() };
        let stuck = State { store: Err("no space left".into()), ..well.clone() };
        let unregistered = State { registered: false, ..well.clone() };
        let rows = [
            (Health::Readyz, None, "", &unregistered, 500),
            (Health::Readyz, Some("autoregister-completion"), "", &unregistered, 500),
            (Health::Readyz, Some("etcd"), "", &unregistered, 200),
            (Health::Livez, None, "", &unregistered, 200),
            (Health::Readyz, None, "", &stuck, 500),
            (Health::Livez, None, "", &stuck, 500),
            (Health::Healthz, None, "", &stuck, 500),
            (Health::Healthz, Some("etcd"), "", &stuck, 500),
            (Health::Readyz, Some("etcd-readiness"), "", &stuck, 500),
            (Health::Livez, None, "exclude=etcd", &stuck, 200),
            (Health::Livez, Some("ping"), "", &stuck, 200),
            (Health::Readyz, None, "", &locked, 500),
            (Health::Healthz, Some("kms-providers"), "", &locked, 500),
            (Health::Livez, None, "exclude=kms-providers", &locked, 200),
            (Health::Healthz, Some("kms-providers"), "", &well, 200),
            (Health::Readyz, None, "", &well, 200),
            (Health::Readyz, None, "", &stopping, 500),
            (Health::Readyz, None, "exclude=shutdown", &stopping, 200),
            (Health::Readyz, Some("ping"), "", &stopping, 200),
            (Health::Readyz, Some("shutdown"), "", &stopping, 500),
            (Health::Livez, None, "", &stopping, 200),
            (Health::Livez, None, "", &starting, 200),
            (Health::Healthz, None, "", &starting, 500),
            (Health::Readyz, Some("etcd"), "", &starting, 500),
            (Health::Readyz, Some("bogus"), "", &well, 404),
        ];
        for (endpoint, check, query, state, code) in rows {
            let answer = answer(endpoint, check, &Query::parse(Some(query)), state, &extra);
            assert_eq!(answer.status(), code, "{endpoint:?} {check:?} {query} {state:?}");
        }
    }
}
