//! What the server counts, in the format and with the names of upstream.

use crate::registry::{Table, stored};
use crate::request::{self, Route, Verb};
use ::http::{Method, Uri};
use ferrite_store::Snapshot;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Requests served at once, as upstream's `--max-requests-inflight` and `--max-mutating-requests-inflight`.
const MAX_READING: usize = 400;
const MAX_MUTATING: usize = 200;
/// Label values come from paths: a client must not make the table grow without end.
const MAX_SERIES: usize = 4096;

const BUCKETS: [f64; 12] = [0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 10.0, 60.0];

/// What a request is, for counting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestKind {
    verb: &'static str,
    group: String,
    version: String,
    resource: String,
    subresource: String,
    scope: &'static str,
}

impl RequestKind {
    pub fn of(method: &Method, uri: &Uri) -> Self {
        let route = request::route(uri.path());
        let Route::Resource(target) = route else {
            let verb = if method == Method::GET { "GET" } else { "POST" };
            return Self {
                verb,
                group: String::new(),
                version: String::new(),
                resource: String::new(),
                subresource: String::new(),
                scope: "",
            };
        };
        let watch = target.watch_prefix
            || uri
                .query()
                .is_some_and(|q| q.split('&').any(|p| matches!(p, "watch" | "watch=1" | "watch=true")));
        let named = target.name.is_some();
        let verb = match Verb::of(method, named, watch && !named || target.watch_prefix) {
            Some(Verb::Get) => "GET",
            Some(Verb::List) => "LIST",
            Some(Verb::Watch) => "WATCH",
            Some(Verb::Create) => "POST",
            Some(Verb::Update) => "PUT",
            Some(Verb::Patch) => "PATCH",
            Some(Verb::Delete) => "DELETE",
            Some(Verb::DeleteCollection) => "DELETECOLLECTION",
            None => "other",
        };
        let scope = match (&target.name, &target.namespace) {
            (Some(_), _) => "resource",
            (None, Some(_)) => "namespace",
            (None, None) => "cluster",
        };
        Self {
            verb,
            group: target.group,
            version: target.version,
            resource: target.resource,
            subresource: target.subresource.unwrap_or_default(),
            scope,
        }
    }

    /// Streams have no deadline and are not counted among those in flight.
    pub fn is_long_running(&self) -> bool {
        self.verb == "WATCH"
            || matches!(self.subresource.as_str(), "attach" | "exec" | "log" | "portforward" | "proxy")
    }

    fn is_mutating(&self) -> bool {
        !matches!(self.verb, "GET" | "LIST" | "WATCH")
    }

    fn labels(&self) -> String {
        format!(
            "group={:?},resource={:?},scope={:?},subresource={:?},verb={:?},version={:?}",
            self.group, self.resource, self.scope, self.subresource, self.verb, self.version
        )
    }
}

#[derive(Default)]
struct Series {
    codes: BTreeMap<u16, u64>,
    buckets: [u64; BUCKETS.len()],
    count: u64,
    sum: f64,
}

#[derive(Default)]
pub(crate) struct Metrics {
    reading: AtomicUsize,
    mutating: AtomicUsize,
    watching: AtomicUsize,
    series: Mutex<BTreeMap<RequestKind, Series>>,
}

/// A request that is being served.
pub(crate) struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Takes a request in, or none when too many are being served.
    pub fn enter(&self, kind: &RequestKind) -> Option<Running<'_>> {
        let (counter, limit) = match kind {
            kind if kind.is_long_running() => (&self.watching, usize::MAX),
            kind if kind.is_mutating() => (&self.mutating, MAX_MUTATING),
            _ => (&self.reading, MAX_READING),
        };
        let running = counter.fetch_add(1, Ordering::Relaxed);
        let entered = Running(counter);
        (running < limit).then_some(entered)
    }

    pub fn record(&self, kind: &RequestKind, code: u16, elapsed: Duration) {
        let mut all = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.contains_key(kind) && (all.len() >= MAX_SERIES || code == 404) {
            // Paths that name nothing would otherwise fill the table.
            return;
        }
        let series = all.entry(kind.clone()).or_default();
        *series.codes.entry(code).or_default() += 1;
        if !kind.is_long_running() {
            let seconds = elapsed.as_secs_f64();
            series.count += 1;
            series.sum += seconds;
            for (bucket, limit) in series.buckets.iter_mut().zip(BUCKETS) {
                *bucket += u64::from(seconds <= limit);
            }
        }
    }

    pub fn text(&self) -> String {
        let all = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = String::new();
        head(&mut out, "apiserver_request_total", "counter", "Requests by verb, resource and code.");
        for (kind, series) in all.iter() {
            for (code, count) in &series.codes {
                let labels = kind.labels();
                put(&mut out, &format!("apiserver_request_total{{code=\"{code}\",{labels}}} {count}"));
            }
        }
        let name = "apiserver_request_duration_seconds";
        head(&mut out, name, "histogram", "How long requests took.");
        for (kind, series) in all.iter().filter(|(_, s)| s.count > 0) {
            let labels = kind.labels();
            for (limit, count) in BUCKETS.iter().zip(series.buckets) {
                put(&mut out, &format!("{name}_bucket{{{labels},le=\"{limit}\"}} {count}"));
            }
            put(&mut out, &format!("{name}_bucket{{{labels},le=\"+Inf\"}} {}", series.count));
            put(&mut out, &format!("{name}_sum{{{labels}}} {}", series.sum));
            put(&mut out, &format!("{name}_count{{{labels}}} {}", series.count));
        }
        drop(all);
        let name = "apiserver_current_inflight_requests";
        head(&mut out, name, "gauge", "Requests being served.");
        for (kind, counter) in [("mutating", &self.mutating), ("readOnly", &self.reading)] {
            put(&mut out, &format!("{name}{{request_kind=\"{kind}\"}} {}", counter.load(Ordering::Relaxed)));
        }
        put_process(&mut out);
        out
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    put(out, &format!("# HELP {name} {help}"));
    put(out, &format!("# TYPE {name} {kind}"));
}

fn put(out: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "{line}");
}

/// How many objects of each resource are stored.
pub(crate) fn put_storage(out: &mut String, table: &Table, snapshot: &Snapshot) {
    let name = "apiserver_resource_objects";
    head(out, name, "gauge", "Stored objects by resource.");
    for resource in table.rows().iter().filter(|r| r.storage.is_none() && r.verbs.contains(&"list")) {
        let prefix = stored::prefix(resource);
        let count = snapshot.range(prefix.as_bytes(), None).count();
        put(out, &format!("{name}{{group={:?},resource={:?}}} {count}", resource.group, resource.plural));
    }
}

/// What the kernel knows about this process.
fn put_process(out: &mut String) {
    const PAGE: u64 = 4096;
    const TICKS: f64 = 100.0;
    let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return };
    // The name, in parentheses, may hold anything.
    let Some((_, rest)) = stat.rsplit_once(") ") else { return };
    let fields: Vec<&str> = rest.split(' ').collect();
    let number = |index: usize| fields.get(index).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    head(out, "process_cpu_seconds_total", "counter", "Processor time used.");
    put(out, &format!("process_cpu_seconds_total {}", (number(11) + number(12)) as f64 / TICKS));
    head(out, "process_resident_memory_bytes", "gauge", "Resident memory.");
    put(out, &format!("process_resident_memory_bytes {}", number(21) * PAGE));
    head(out, "process_virtual_memory_bytes", "gauge", "Virtual memory.");
    put(out, &format!("process_virtual_memory_bytes {}", number(20)));
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        head(out, "process_open_fds", "gauge", "Open file descriptors.");
        put(out, &format!("process_open_fds {}", open.count()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_what_they_are() {
        let metrics = Metrics::default();
        let list = RequestKind::of(&Method::GET, &Uri::from_static("/api/v1/pods?limit=5"));
        metrics.record(&list, 200, Duration::from_millis(30));
        let text = metrics.text();
        let labels = r#"group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1""#;
        assert!(text.contains(&format!("apiserver_request_total{{code=\"200\",{labels}}} 1\n")), "{text}");
        assert!(text.contains(&format!("{labels},le=\"0.025\"}} 0\n")), "{text}");
        assert!(text.contains(&format!("{labels},le=\"0.05\"}} 1\n")), "{text}");
        let watch = RequestKind::of(&Method::GET, &Uri::from_static("/api/v1/pods?watch=1"));
        assert!(watch.is_long_running() && !list.is_long_running());
    }

    #[test]
    fn too_many_at_once_are_turned_away() {
        let metrics = Metrics::default();
        let create = RequestKind::of(&Method::POST, &Uri::from_static("/api/v1/nodes"));
        let running: Vec<_> = (0..MAX_MUTATING).map(|_| metrics.enter(&create).expect("room")).collect();
        assert!(metrics.enter(&create).is_none());
        drop(running);
        assert!(metrics.enter(&create).is_some());
    }
}
