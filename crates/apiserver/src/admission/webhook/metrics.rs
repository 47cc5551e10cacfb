//! Durations and decisions of webhooks, by their names.

use crate::metrics::{Timing, head, put};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Upstream's buckets.
const SECONDS: &[f64] = &[0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 25.0];
/// Most series of one metric. Only users who may configure webhooks can make new ones, but they may do so
/// for ever.
const SERIES: usize = 2048;

/// Why a webhook refused a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rejection {
    Calling,
    Internal,
    No,
}

impl Rejection {
    fn name(self) -> &'static str {
        match self {
            Self::Calling => "calling_webhook_error",
            Self::Internal => "apiserver_internal_error",
            Self::No => "no_error",
        }
    }
}

#[derive(Default)]
struct Series {
    times: BTreeMap<String, Timing>,
    counters: BTreeMap<(&'static str, String), u64>,
}

/// All series.
#[derive(Default)]
pub(crate) struct WebhookMetrics(Mutex<Series>);

const COUNTERS: [(&str, &str); 5] = [
    ("apiserver_admission_webhook_request_total", "Calls of admission webhooks."),
    ("apiserver_admission_webhook_rejection_count", "Requests that admission webhooks refused."),
    ("apiserver_admission_webhook_fail_open_count", "Calls that failed and were ignored."),
    (
        "apiserver_admission_match_condition_evaluation_errors_total",
        "Match conditions that could not be evaluated.",
    ),
    ("apiserver_admission_match_condition_exclusions_total", "Requests that match conditions excluded."),
];

impl WebhookMetrics {
    fn lock(&self) -> MutexGuard<'_, Series> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, counter: usize, labels: String) {
        let mut series = self.lock();
        let full = series.counters.len() >= SERIES * COUNTERS.len();
        let key = (COUNTERS[counter].0, labels);
        if let Some(count) = series.counters.get_mut(&key) {
            *count += 1;
        } else if !full {
            series.counters.insert(key, 1);
        }
    }

    /// A call has ended.
    pub(super) fn called(
        &self,
        name: &str,
        step: &str,
        operation: &str,
        rejected: bool,
        code: u16,
        elapsed: Duration,
    ) {
        let code = code.min(600);
        self.count(
            0,
            format!(
                "code=\"{code}\",name={name:?},operation={operation:?},rejected=\"{rejected}\",type={step:?}"
            ),
        );
        let labels = format!("name={name:?},operation={operation:?},rejected=\"{rejected}\",type={step:?}");
        let mut series = self.lock();
        let full = series.times.len() >= SERIES;
        if let Some(timing) = series.times.get(&labels) {
            timing.observe(elapsed);
        } else if !full {
            let timing = Timing::new(SECONDS);
            timing.observe(elapsed);
            series.times.insert(labels, timing);
        }
    }

    pub(super) fn rejected(&self, name: &str, step: &str, operation: &str, why: Rejection, code: u16) {
        let (why, code) = (why.name(), code.min(600));
        self.count(
            1,
            format!("error_type={why:?},name={name:?},operation={operation:?},rejection_code=\"{code}\",type={step:?}"),
        );
    }

    pub(super) fn failed_open(&self, name: &str, step: &str) {
        self.count(2, format!("name={name:?},type={step:?}"));
    }

    pub(super) fn condition_failed(&self, name: &str, step: &str, operation: &str) {
        self.count(3, format!("kind=\"webhook\",name={name:?},operation={operation:?},type={step:?}"));
    }

    pub(super) fn condition_excluded(&self, name: &str, step: &str, operation: &str) {
        self.count(4, format!("kind=\"webhook\",name={name:?},operation={operation:?},type={step:?}"));
    }

    pub fn put(&self, out: &mut String) {
        let series = self.lock();
        if !series.times.is_empty() {
            let name = "apiserver_admission_webhook_admission_duration_seconds";
            head(out, name, "histogram", "How long admission webhooks took.");
            series.times.iter().for_each(|(labels, timing)| timing.put(out, name, labels));
        }
        for (counter, help) in COUNTERS {
            let mut found = series.counters.iter().filter(|((name, _), _)| *name == counter).peekable();
            if found.peek().is_some() {
                head(out, counter, "counter", help);
            }
            for ((_, labels), count) in found {
                put(out, &format!("{counter}{{{labels}}} {count}"));
            }
        }
    }
}
