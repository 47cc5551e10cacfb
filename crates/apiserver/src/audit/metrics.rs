//! Upstream's metrics of auditing.

use super::event::Level;
use ferrite_component::metrics::{Counter, Family, registry};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock};

static EVENTS: LazyLock<Arc<Counter>> = LazyLock::new(|| {
    let help = "Audit events that were made and given to the backends.";
    registry().counter("apiserver_audit_event_total", help, &[]).with(&[])
});

static ERRORS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Audit events that were not stored as they should be, by the plugin that failed.";
    registry().counter("apiserver_audit_error_total", help, &["plugin"])
});

static LEVELS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Requests by the level that the audit policy has for them.";
    registry().counter("apiserver_audit_level_total", help, &["level"])
});

static REJECTED: LazyLock<Arc<Counter>> = LazyLock::new(|| {
    let help = "Requests that were rejected because their audit event could not be stored.";
    registry().counter("apiserver_audit_requests_rejected_total", help, &[]).with(&[])
});

/// Makes the families visible before the first event.
pub(crate) fn register() {
    LazyLock::force(&EVENTS);
    LazyLock::force(&ERRORS);
    LazyLock::force(&LEVELS);
    LazyLock::force(&REJECTED);
}

pub(super) fn event() {
    EVENTS.increment();
}

pub(super) fn level(level: Level) {
    LEVELS.with(&[level.name()]).increment();
}

pub(crate) fn rejected() {
    REJECTED.increment();
}

/// Counts events that a plugin lost, and says why: once a second, so that clients cannot flood the server's log.
pub(super) fn failed(plugin: &'static str, events: usize, why: &dyn std::fmt::Display) {
    static REPORTED: AtomicI64 = AtomicI64::new(0);
    ERRORS.with(&[plugin]).add(events as u64);
    let now = jiff::Timestamp::now().as_second();
    if REPORTED.swap(now, Ordering::Relaxed) != now {
        tracing::error!(plugin, events, %why, "audit events were not stored");
    }
}
