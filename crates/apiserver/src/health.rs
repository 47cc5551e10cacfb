//! `/healthz`, `/livez`, `/readyz`.

use crate::http::{self, Answer};
use crate::options::Query;
use crate::request::Health;

/// The checks of each endpoint. All but readiness hold as long as the process answers.
const LIVE: [&str; 2] = ["ping", "log"];
const READY: [&str; 3] = ["ping", "log", "poststarthook/bootstrap-controller"];

pub(crate) fn answer(endpoint: Health, check: Option<&str>, query: &Query, ready: bool) -> Answer {
    let (name, checks): (&str, &[&str]) = match endpoint {
        Health::Healthz => ("healthz", &READY),
        Health::Livez => ("livez", &LIVE),
        Health::Readyz => ("readyz", &READY),
    };
    let excluded: Vec<&str> = query.all("exclude").collect();
    let passes = |check: &str| endpoint == Health::Livez || ready || LIVE.contains(&check);
    if let Some(check) = check {
        return match checks.contains(&check) {
            false => http::text(404, "404 page not found\n"),
            true if passes(check) => http::text(200, "ok"),
            true => http::text(500, "internal server error: not ready\n"),
        };
    }
    let mut report = String::new();
    let mut healthy = true;
    for check in checks {
        let line = if excluded.contains(check) {
            format!("[+]{check} excluded: ok\n")
        } else if passes(check) {
            format!("[+]{check} ok\n")
        } else {
            healthy = false;
            format!("[-]{check} failed: reason withheld\n")
        };
        report.push_str(&line);
    }
    match (healthy, query.get("verbose").is_some()) {
        (true, false) => http::text(200, "ok"),
        (true, true) => http::text(200, format!("{report}{name} check passed\n")),
        (false, _) => http::text(500, format!("{report}{name} check failed\n")),
    }
}
