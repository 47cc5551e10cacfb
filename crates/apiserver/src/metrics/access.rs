//! Metrics of authentication, authorization and admission.

use super::histogram::Timing;
use super::{head, put};
use crate::auth::User;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upstream's buckets of the two filters.
const FILTER_SECONDS: &[f64] = &[
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384,
];
/// Upstream's buckets of admission.
const ADMISSION_SECONDS: &[f64] = &[0.005, 0.025, 0.1, 0.5, 1.0, 2.5];

/// Attempts that end in one of a few results, and how long they took.
struct Attempts {
    results: [(&'static str, Timing); 2],
}

impl Attempts {
    fn new(good: &'static str, bad: &'static str) -> Self {
        Self { results: [(good, Timing::new(FILTER_SECONDS)), (bad, Timing::new(FILTER_SECONDS))] }
    }

    fn observe(&self, good: bool, elapsed: Duration) {
        self.results[usize::from(!good)].1.observe(elapsed);
    }

    fn put(&self, out: &mut String, counter: &str, histogram: &str, what: &str) {
        head(out, counter, "counter", &format!("Attempts of {what} by their result."));
        for (result, timing) in self.seen() {
            put(out, &format!("{counter}{{result={result:?}}} {}", timing.count()));
        }
        head(out, histogram, "histogram", &format!("How long {what} took."));
        for (result, timing) in self.seen() {
            timing.put(out, histogram, &format!("result={result:?}"));
        }
    }

    fn seen(&self) -> impl Iterator<Item = &(&'static str, Timing)> {
        self.results.iter().filter(|(_, timing)| timing.count() > 0)
    }
}

/// Users as upstream counts them: a few by name, all others in two classes, so that nobody can make new series.
const USERS: [&str; 7] = [
    "admin",
    "client",
    "kube_proxy",
    "kubelet",
    "system:serviceaccount:kube-system:default",
    "email_id",
    "other",
];

fn class_of(name: &str) -> usize {
    let other = USERS.len() - 1;
    match USERS[..other - 1].iter().position(|known| *known == name) {
        Some(known) => known,
        None if name.contains('@') => other - 1,
        None => other,
    }
}

/// The operations of writes, in admission's words.
const OPERATIONS: [&str; 4] = ["CREATE", "UPDATE", "DELETE", "CONNECT"];
const STEPS: [&str; 2] = ["admit", "validate"];

/// Durations of the steps of admission.
pub(crate) struct AdmissionTimes {
    /// By step, operation, and whether the step refused.
    steps: [[[Timing; 2]; 4]; 2],
}

impl Default for AdmissionTimes {
    fn default() -> Self {
        let timing = |_| Timing::new(ADMISSION_SECONDS);
        let by_result = || std::array::from_fn(timing);
        let by_operation = || std::array::from_fn(|_| by_result());
        Self { steps: std::array::from_fn(|_| by_operation()) }
    }
}

impl AdmissionTimes {
    /// `operation` is one of admission's four; others are not counted.
    pub fn observe(&self, validating: bool, operation: &str, rejected: bool, elapsed: Duration) {
        if let Some(index) = OPERATIONS.iter().position(|known| *known == operation) {
            self.steps[usize::from(validating)][index][usize::from(rejected)].observe(elapsed);
        }
    }

    pub fn put(&self, out: &mut String) {
        let name = "apiserver_admission_step_admission_duration_seconds";
        head(out, name, "histogram", "How long a step of admission took, all plugins together.");
        for (step, operations) in STEPS.iter().zip(&self.steps) {
            for (operation, results) in OPERATIONS.iter().zip(operations) {
                for (rejected, timing) in [false, true].iter().zip(results) {
                    if timing.count() > 0 {
                        let labels = format!("operation={operation:?},rejected=\"{rejected}\",type={step:?}");
                        timing.put(out, name, &labels);
                    }
                }
            }
        }
    }
}

pub(crate) struct Access {
    authentication: Attempts,
    authorization: Attempts,
    users: [AtomicU64; USERS.len()],
    tokens: AtomicU64,
}

impl Default for Access {
    fn default() -> Self {
        Self {
            authentication: Attempts::new("success", "failure"),
            authorization: Attempts::new("allowed", "denied"),
            users: Default::default(),
            tokens: AtomicU64::new(0),
        }
    }
}

impl Access {
    /// Counts an authentication; `None` is one with bad credentials.
    pub fn authenticated(&self, user: Option<&User>, elapsed: Duration) {
        self.authentication.observe(user.is_some(), elapsed);
        if let Some(user) = user {
            self.users[class_of(&user.name)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A service account's token was good.
    pub fn token_used(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
    }

    pub fn authorized(&self, allowed: bool, elapsed: Duration) {
        self.authorization.observe(allowed, elapsed);
    }

    pub fn put(&self, out: &mut String) {
        self.authentication.put(
            out,
            "authentication_attempts",
            "authentication_duration_seconds",
            "authentication",
        );
        let name = "authenticated_user_requests";
        head(out, name, "counter", "Authenticated requests by user.");
        for (user, count) in USERS.iter().zip(&self.users) {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                put(out, &format!("{name}{{username={user:?}}} {count}"));
            }
        }
        self.authorization.put(
            out,
            "authorization_attempts_total",
            "authorization_duration_seconds",
            "authorization",
        );
        let name = "serviceaccount_valid_tokens_total";
        head(out, name, "counter", "Valid tokens of service accounts that were used.");
        put(out, &format!("{name} {}", self.tokens.load(Ordering::Relaxed)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_few() {
        for (name, class) in [
            ("admin", "admin"),
            ("system:serviceaccount:kube-system:default", "system:serviceaccount:kube-system:default"),
            ("system:serviceaccount:a:b", "other"),
            ("system:node:n", "other"),
            ("email_id", "other"),
            ("a@example.com", "email_id"),
        ] {
            assert_eq!(USERS[class_of(name)], class, "{name}");
        }
    }

    #[test]
    fn attempts_are_counted_by_result() {
        let access = Access::default();
        access.authenticated(Some(&User::new("a@b", ["g"])), Duration::from_millis(1));
        access.authenticated(None, Duration::from_millis(3));
        access.authorized(false, Duration::from_millis(5));
        let mut out = String::new();
        access.put(&mut out);
        for line in [
            "authentication_attempts{result=\"success\"} 1\n",
            "authentication_attempts{result=\"failure\"} 1\n",
            "authenticated_user_requests{username=\"email_id\"} 1\n",
            "authorization_attempts_total{result=\"denied\"} 1\n",
            "authorization_duration_seconds_bucket{result=\"denied\",le=\"0.008\"} 1\n",
        ] {
            assert!(out.contains(line), "{line} in {out}");
        }
        assert!(!out.contains("allowed"), "nothing that did not happen: {out}");
    }

    #[test]
    fn admission_is_timed_by_step() {
        let times = AdmissionTimes::default();
        times.observe(true, "CREATE", true, Duration::from_millis(1));
        times.observe(false, "NONSENSE", false, Duration::from_millis(1));
        let mut out = String::new();
        times.put(&mut out);
        let line = "apiserver_admission_step_admission_duration_seconds_count{operation=\"CREATE\",rejected=\"true\",type=\"validate\"} 1\n";
        assert!(out.contains(line) && !out.contains("admit\""), "{out}");
    }
}
