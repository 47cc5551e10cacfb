//! Named health checks, answered as upstream's components answer them.

use std::fmt::Write;
use std::sync::{Arc, LazyLock};

use crate::metrics::{Counter, Family, Gauge, Registry};

/// A check: its name, and the function that says why it fails.
#[derive(Clone)]
pub struct Check {
    name: &'static str,
    run: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

impl std::fmt::Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Check").field(&self.name).finish()
    }
}

impl Check {
    pub fn new(name: &'static str, run: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self { name, run: Arc::new(run) }
    }

    /// Upstream's check that always passes: the process answers.
    pub fn ping() -> Self {
        Self::new("ping", || Ok(()))
    }
}

/// The status code and the body of a health endpoint.
#[derive(Debug, PartialEq, Eq)]
pub struct Report {
    pub code: u16,
    pub body: String,
}

/// As [`report`], with the query of the request: `exclude=NAME` as often as one likes, and `verbose`.
pub fn respond(endpoint: &str, checks: &[Check], single: Option<&str>, query: &str) -> Report {
    let pairs = || query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let excluded: Vec<String> =
        pairs().filter(|(key, _)| *key == "exclude").map(|(_, value)| value.to_owned()).collect();
    let verbose = pairs().any(|(key, _)| key == "verbose");
    report(endpoint, checks, single.filter(|name| !name.is_empty()), &excluded, verbose)
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

/// `/metrics/slis`: the results so far.
pub fn results() -> String {
    RESULTS.registry.text()
}

impl Check {
    fn result(&self, endpoint: &str) -> Result<(), String> {
        let result = (self.run)();
        let status = if result.is_ok() { "success" } else { "error" };
        RESULTS.last.with(&[self.name, endpoint]).set(i64::from(result.is_ok()));
        RESULTS.total.with(&[self.name, status, endpoint]).increment();
        result
    }
}

/// Runs the checks of `endpoint` (`healthz`, `livez` or `readyz`), or only the one that `single` names. Checks in
/// `excluded` are not run. The body is short unless a check fails or `verbose` asks for all of it.
pub fn report(
    endpoint: &str,
    checks: &[Check],
    single: Option<&str>,
    excluded: &[String],
    verbose: bool,
) -> Report {
    if let Some(name) = single {
        return match checks.iter().find(|check| check.name == name) {
            None => Report { code: 404, body: "404 page not found\n".to_owned() },
            Some(check) => match check.result(endpoint) {
                Ok(()) => Report { code: 200, body: "ok".to_owned() },
                Err(reason) => Report { code: 500, body: format!("internal server error: {reason}\n") },
            },
        };
    }
    let mut body = String::new();
    let mut failed = false;
    for check in checks {
        let line = if excluded.iter().any(|name| name == check.name) {
            format!("[+]{} excluded: ok", check.name)
        } else if check.result(endpoint).is_ok() {
            format!("[+]{} ok", check.name)
        } else {
            failed = true;
            // The reason may name things that not everybody may see: it is in the single check.
            format!("[-]{} failed: reason withheld", check.name)
        };
        // Writing to a string cannot fail.
        let _ = writeln!(body, "{line}");
    }
    match (failed, verbose) {
        (true, _) => Report { code: 500, body: format!("{body}{endpoint} check failed\n") },
        (false, true) => Report { code: 200, body: format!("{body}{endpoint} check passed\n") },
        (false, false) => Report { code: 200, body: "ok".to_owned() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_reported_as_upstream_does() {
        let checks = [Check::ping(), Check::new("leaderElection", || Err("lost the lease".to_owned()))];
        let (good, none) = (&checks[..1], &[][..]);
        let ok = |body: &str| Report { code: 200, body: body.to_owned() };
        assert_eq!(report("healthz", good, None, none, false), ok("ok"));
        assert_eq!(report("healthz", good, None, none, true), ok("[+]ping ok\nhealthz check passed\n"));
        assert_eq!(report("livez", &checks, Some("ping"), none, false), ok("ok"));
        assert_eq!(report("livez", &checks, Some("x"), none, false).code, 404);
        let single = report("livez", &checks, Some("leaderElection"), none, false);
        assert_eq!((single.code, single.body.as_str()), (500, "internal server error: lost the lease\n"));
        let all = report("readyz", &checks, None, none, false);
        let expected = "[+]ping ok\n[-]leaderElection failed: reason withheld\nreadyz check failed\n";
        assert_eq!((all.code, all.body.as_str()), (500, expected));
        let excluded = ["leaderElection".to_owned()];
        assert_eq!(report("readyz", &checks, None, &excluded, false), ok("ok"));
        assert_eq!(respond("readyz", &checks, Some(""), "exclude=leaderElection"), ok("ok"));
        let verbose = respond("readyz", &checks, None, "verbose&exclude=leaderElection");
        assert_eq!(verbose, ok("[+]ping ok\n[+]leaderElection excluded: ok\nreadyz check passed\n"));
        let results = results();
        for line in [
            "kubernetes_healthcheck{name=\"ping\",type=\"readyz\"} 1\n",
            "kubernetes_healthcheck{name=\"leaderElection\",type=\"readyz\"} 0\n",
            "kubernetes_healthchecks_total{name=\"leaderElection\",status=\"error\",type=\"readyz\"} 1\n",
        ] {
            assert!(results.contains(line), "{line} in {results}");
        }
    }
}
