//! The server's metrics, in the format and with the names of upstream.

mod access;
mod bounded;
mod histogram;
mod labels;
mod process;
mod request_kind;

use crate::encode::WatchEncoder;
use crate::filters::InFlight;
use crate::registry::{ResourceMap, stored};
use ferrite_api::resource::Resource;
use ferrite_store::{Snapshot, Usage};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

pub(crate) use access::{Access, AdmissionTimes};
pub(crate) use bounded::BoundedSeries;
use histogram::Histogram;
pub(crate) use histogram::Timing;
use labels::{Labels, ResourceName};
use request_kind::ONE;
pub(crate) use request_kind::RequestKind;

pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores";

/// Upstream's buckets.
const SECONDS: &[f64] = &[
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0,
    20.0, 30.0, 45.0, 60.0,
];
/// The first bucket of the service level's family: it has none for faster requests.
const SLI_FROM: f64 = 0.05;
const ANSWER_BYTES: &[f64] = &[1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9];
/// The server takes no larger body than the last of these.
const BODY_BYTES: &[f64] = &{
    let mut limits = [50_000.0; 31];
    let mut index = 1;
    while index < limits.len() {
        limits[index] = limits[index - 1] + 100_000.0;
        index += 1;
    }
    limits
};
/// The name that the family of body sizes has for a verb with a body.
fn body_verb(verb: &str, scope: &str) -> Option<&'static str> {
    Some(match (verb, scope) {
        ("DELETE", ONE) => "delete",
        ("DELETE", _) => "delete_collection",
        ("APPLY" | "PATCH", _) => "patch",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        _ => return None,
    })
}

const EVENT_BYTES: &[f64] = &[1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131_072.0];

/// A number for a resource: the same for every table that has it.
fn name_hash(resource: &Resource) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    static STATE: std::sync::LazyLock<RandomState> = std::sync::LazyLock::new(RandomState::new);
    STATE.hash_one((&*resource.group, &*resource.version, &*resource.plural))
}

impl RequestKind {
    fn key(&self) -> Key {
        Key {
            resource: self.resource.as_ref().map_or(0, |resource| name_hash(resource)),
            verb: self.verb,
            subresource: self.subresource,
            scope: self.scope,
            dry_run: self.dry_run,
        }
    }
}

/// The part of a [`RequestKind`] that identifies its series.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    resource: u64,
    verb: &'static str,
    subresource: &'static str,
    scope: &'static str,
    dry_run: bool,
}

struct Series {
    labels: Labels,
    long_running: bool,
    codes: BTreeMap<u16, u64>,
    seconds: Histogram,
    bytes: Histogram,
    running: u64,
    terminations: BTreeMap<u16, u64>,
    /// Bytes of the bodies that were sent with it.
    bodies: Histogram,
}

impl Series {
    fn new(kind: &RequestKind) -> Self {
        Self {
            labels: Labels::of(kind),
            long_running: kind.long_running,
            codes: BTreeMap::new(),
            seconds: Histogram::new(SECONDS),
            bytes: Histogram::new(ANSWER_BYTES),
            running: 0,
            terminations: BTreeMap::new(),
            bodies: Histogram::new(BODY_BYTES),
        }
    }
}

/// Durations of changes until they were durable, under upstream's names, whatever the store is.
#[derive(Default)]
pub(crate) struct StoreTimes(Mutex<BTreeMap<(String, String, &'static str), Histogram>>);

impl StoreTimes {
    pub fn observe(&self, resource: &Resource, operation: &'static str, elapsed: Duration) {
        let key = (resource.group.to_string(), resource.plural.to_string(), operation);
        let mut all = lock(&self.0);
        all.entry(key).or_insert_with(|| Histogram::new(SECONDS)).observe(elapsed.as_secs_f64());
    }

    /// Drops the durations of resources that a table does not have in any version.
    pub fn retain_served(&self, table: &ResourceMap) {
        let served: BTreeSet<(&str, &str)> = table.rows().iter().map(|r| (&*r.group, &*r.plural)).collect();
        lock(&self.0).retain(|(group, plural, _), _| served.contains(&(group.as_str(), plural.as_str())));
    }

    pub fn put(&self, out: &mut String) {
        let all = lock(&self.0);
        let labels = |group: &str, resource: &str, operation: &str| {
            format!("group={group:?},operation={operation:?},resource={resource:?}")
        };
        let name = "etcd_request_duration_seconds";
        head(out, name, "histogram", "How long the store took.");
        for ((group, resource, operation), seconds) in all.iter() {
            seconds.put(out, name, &labels(group, resource, operation));
        }
        let name = "etcd_requests_total";
        head(out, name, "counter", "Requests to the store.");
        for ((group, resource, operation), seconds) in all.iter() {
            put(out, &format!("{name}{{{}}} {}", labels(group, resource, operation), seconds.count));
        }
    }
}

struct Watched {
    resource: ResourceName,
    bytes: Histogram,
}

impl Watched {
    fn labels(&self) -> String {
        let ResourceName { group, version, plural } = &self.resource;
        format!("group={group:?},resource={plural:?},version={version:?}")
    }
}

#[derive(Default)]
pub(crate) struct Metrics {
    series: Mutex<BTreeMap<Key, Series>>,
    /// By the number of the resource's name.
    watched: Mutex<BTreeMap<u64, Watched>>,
    pub handshake_errors: AtomicU64,
    pub access: Access,
    /// Frames of changes made for watchers; without it, nobody would notice a watcher that does not share.
    pub watch_encodings: Arc<AtomicU64>,
}

/// A stream that is being served, for as long as it is held.
pub(crate) struct Streaming {
    server: Arc<crate::server::ApiServer>,
    key: Key,
    started: Instant,
}

impl Drop for Streaming {
    fn drop(&mut self) {
        if let Some(series) = lock(&self.server.metrics.series).get_mut(&self.key) {
            series.running = series.running.saturating_sub(1);
            // As upstream: the duration of a stream is that of the request.
            series.seconds.observe(self.started.elapsed().as_secs_f64());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Metrics {
    /// `bytes` is the length of the answer, `body` that of the request's body, where they are known beforehand.
    pub fn record(
        &self,
        kind: &RequestKind,
        code: u16,
        elapsed: Duration,
        bytes: Option<u64>,
        body: Option<u64>,
    ) {
        let mut all = lock(&self.series);
        let series = all.entry(kind.key()).or_insert_with(|| Series::new(kind));
        *series.codes.entry(code).or_default() += 1;
        if !kind.long_running {
            series.seconds.observe(elapsed.as_secs_f64());
            // As upstream: the sizes of responses to reads, not to writes.
            if let Some(bytes) = bytes.filter(|_| matches!(kind.verb, "GET" | "LIST")) {
                series.bytes.observe(bytes as f64);
            }
            if let Some(body) = body.filter(|_| kind.mutating && kind.resource.is_some()) {
                series.bodies.observe(body as f64);
            }
        }
    }

    /// A request that was ended before it was done.
    pub fn terminated(&self, kind: &RequestKind, code: u16) {
        let mut all = lock(&self.series);
        let series = all.entry(kind.key()).or_insert_with(|| Series::new(kind));
        *series.terminations.entry(code).or_default() += 1;
    }

    /// Counts a stream until the answer is dropped.
    pub fn streaming(
        server: &Arc<crate::server::ApiServer>,
        kind: &RequestKind,
        started: Instant,
    ) -> Streaming {
        let key = kind.key();
        lock(&server.metrics.series).entry(kind.key()).or_insert_with(|| Series::new(kind)).running += 1;
        Streaming { server: Arc::clone(server), key, started }
    }

    /// A frame sent to a watcher.
    pub fn watch_event(&self, encoder: &WatchEncoder, bytes: usize) {
        let resource = encoder.resource();
        let mut watched = lock(&self.watched);
        let counted = watched.entry(name_hash(resource)).or_insert_with(|| Watched {
            resource: ResourceName::of(resource),
            bytes: Histogram::new(EVENT_BYTES),
        });
        counted.bytes.observe(bytes as f64);
    }

    /// Drops the series of resources that a table does not have. A stream of such a resource that still runs stays
    /// counted until it ends and the table changes again.
    pub fn retain_served(&self, table: &ResourceMap) {
        lock(&self.series).retain(|_, series| {
            series.running > 0 || series.labels.resource.as_ref().is_none_or(|name| name.is_served(table))
        });
        lock(&self.watched).retain(|_, watched| watched.resource.is_served(table));
    }

    pub fn text(&self, in_flight: &InFlight) -> String {
        let mut out = String::new();
        self.put_requests(&mut out);
        self.put_watches(&mut out);
        let name = "apiserver_current_inflight_requests";
        head(&mut out, name, "gauge", "Requests being served.");
        for (kind, count) in [("mutating", in_flight.mutating()), ("readOnly", in_flight.reading())] {
            put(&mut out, &format!("{name}{{request_kind=\"{kind}\"}} {count}"));
        }
        let name = "apiserver_tls_handshake_errors_total";
        head(&mut out, name, "counter", "Connections that did not get past the TLS handshake.");
        put(&mut out, &format!("{name} {}", self.handshake_errors.load(Ordering::Relaxed)));
        self.access.put(&mut out);
        process::put_build(&mut out);
        process::put_process(&mut out);
        out
    }

    fn put_requests(&self, out: &mut String) {
        let all = lock(&self.series);
        let counted = all.values().filter(|s| !s.codes.is_empty());
        head(out, "apiserver_request_total", "counter", "Requests by verb, resource and code.");
        for series in counted.clone() {
            let labels = series.labels.text(true);
            for (code, count) in &series.codes {
                put(out, &format!("apiserver_request_total{{code=\"{code}\",{labels}}} {count}"));
            }
        }
        let name = "apiserver_request_duration_seconds";
        head(out, name, "histogram", "How long requests took.");
        for series in counted.clone().filter(|s| s.seconds.count > 0) {
            series.seconds.put(out, name, &series.labels.text(true));
        }
        let name = "apiserver_request_sli_duration_seconds";
        head(out, name, "histogram", "How long requests took, without what webhooks and queues took.");
        for series in counted.clone().filter(|s| s.seconds.count > 0 && !s.labels.dry_run) {
            series.seconds.put_from(out, name, &series.labels.text(false), SLI_FROM);
        }
        let name = "apiserver_response_sizes";
        head(out, name, "histogram", "Bytes of answers.");
        for series in counted.filter(|s| s.bytes.count > 0 && !s.labels.dry_run) {
            series.bytes.put(out, name, &series.labels.text(false));
        }
        put_bodies(out, all.values());
        let name = "apiserver_request_terminations_total";
        head(out, name, "counter", "Requests ended before they were done.");
        for series in all.values() {
            for (code, count) in &series.terminations {
                put(out, &format!("{name}{{code=\"{code}\",{}}} {count}", series.labels.text(false)));
            }
        }
        let name = "apiserver_longrunning_requests";
        head(out, name, "gauge", "Streams being served.");
        for series in all.values().filter(|s| s.long_running) {
            put(out, &format!("{name}{{{}}} {}", series.labels.text(false), series.running));
        }
    }

    fn put_watches(&self, out: &mut String) {
        let watched = lock(&self.watched);
        let name = "apiserver_watch_events_total";
        head(out, name, "counter", "Events sent to watchers.");
        for watched in watched.values() {
            put(out, &format!("{name}{{{}}} {}", watched.labels(), watched.bytes.count));
        }
        let name = "apiserver_watch_events_sizes";
        head(out, name, "histogram", "Bytes of events sent to watchers.");
        for watched in watched.values() {
            watched.bytes.put(out, name, &watched.labels());
        }
        let name = "ferrite_watch_encodings_total";
        head(out, name, "counter", "Events encoded for watchers, which share what is encoded.");
        put(out, &format!("{name} {}", self.watch_encodings.load(Ordering::Relaxed)));
    }
}

/// The sizes of bodies are not separated by version and scope.
fn put_bodies<'a>(out: &mut String, all: impl Iterator<Item = &'a Series>) {
    let mut merged: BTreeMap<(&str, &str, &str), Histogram> = BTreeMap::new();
    for series in all.filter(|s| s.bodies.count > 0) {
        let Some(verb) = body_verb(series.labels.verb, series.labels.scope) else { continue };
        let (group, _, plural) = series.labels.names();
        let key = (group, plural, verb);
        merged.entry(key).or_insert_with(|| Histogram::new(BODY_BYTES)).add(&series.bodies);
    }
    let name = "apiserver_request_body_size_bytes";
    head(out, name, "histogram", "Bytes of the bodies of requests.");
    for ((group, resource, verb), bodies) in &merged {
        bodies.put(out, name, &format!("group={group:?},resource={resource:?},verb={verb:?}"));
    }
}

pub(crate) fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    put(out, &format!("# HELP {name} {help}"));
    put(out, &format!("# TYPE {name} {kind}"));
}

pub(crate) fn put(out: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "{line}");
}

/// The number of stored objects of each resource, and the store's other usage.
pub(crate) fn put_storage(out: &mut String, table: &ResourceMap, snapshot: &Snapshot, usage: &Usage) {
    let counts: Vec<(&Resource, usize, usize)> = table
        .rows()
        .iter()
        .filter(|r| r.is_written_as_served() && r.verbs.contains(&"list"))
        .map(|resource| {
            let prefix = stored::prefix(resource);
            let entries = snapshot.range(prefix.as_bytes(), None);
            let (count, bytes) = entries.fold((0, 0), |(c, b), (_, e)| (c + 1, b + e.value.len()));
            (&**resource, count, bytes)
        })
        .collect();
    let name = "apiserver_resource_objects";
    head(out, name, "gauge", "Stored objects by resource.");
    for (resource, count, _) in &counts {
        put(out, &format!("{name}{{group={:?},resource={:?}}} {count}", resource.group, resource.plural));
    }
    let name = "apiserver_storage_objects";
    head(out, name, "gauge", "Stored objects by resource and group.");
    for (resource, count, _) in &counts {
        let dot = if resource.group.is_empty() { "" } else { "." };
        put(out, &format!("{name}{{resource=\"{}{dot}{}\"}} {count}", resource.plural, resource.group));
    }
    let name = "apiserver_resource_size_estimate_bytes";
    head(out, name, "gauge", "Bytes of stored objects by resource.");
    for (resource, _, bytes) in &counts {
        put(out, &format!("{name}{{group={:?},resource={:?}}} {bytes}", resource.group, resource.plural));
    }
    let name = "apiserver_storage_size_bytes";
    head(out, name, "gauge", "Bytes of stored objects and of their recent past.");
    let total: usize = counts.iter().map(|(_, _, bytes)| bytes).sum::<usize>() + usage.history_bytes;
    put(out, &format!("{name}{{storage_cluster_id=\"etcd-0\"}} {total}"));
}

#[cfg(test)]
mod tests {
    use super::request_kind::APPLY;
    use super::*;
    use crate::encode::IncludeObject;
    use crate::negotiate::PLAIN_JSON;
    use crate::request::Verb;
    use ::http::Method;

    #[test]
    fn requests_are_counted_by_what_they_are() {
        let table = ResourceMap::new(ferrite_api::kinds::built_in());
        let metrics = Metrics::default();
        let list = RequestKind::sample("GET", "/api/v1/pods?limit=5", &table);
        metrics.record(&list, 200, Duration::from_millis(30), Some(1500), None);
        for path in ["/api/v1/namespaces/a/pods", "/api/v1/namespaces/a/pods?dryRun=All"] {
            let create = RequestKind::sample("POST", path, &table);
            metrics.record(&create, 201, Duration::from_millis(1), Some(99), Some(60_000));
        }
        let text = metrics.text(&InFlight::new(1, 1));
        let tail = r#"group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1""#;
        let labels = format!("component=\"apiserver\",{tail}");
        let body = |bucket: &str, count: u64| {
            format!(
                "apiserver_request_body_size_bytes_bucket{{group=\"\",resource=\"pods\",verb=\"create\",{bucket}}} {count}\n"
            )
        };
        let with_dry_run = format!("component=\"apiserver\",dry_run=\"\",{tail}");
        for line in [
            format!("apiserver_request_total{{code=\"200\",{with_dry_run}}} 1\n"),
            format!("{with_dry_run},le=\"0.025\"}} 0\n"),
            format!("{with_dry_run},le=\"0.05\"}} 1\n"),
            format!("apiserver_response_sizes_bucket{{{labels},le=\"10000\"}} 1\n"),
            format!("apiserver_response_sizes_sum{{{labels}}} 1500\n"),
            format!("apiserver_request_sli_duration_seconds_bucket{{{labels},le=\"0.05\"}} 1\n"),
            body("le=\"50000\"", 0),
            body("le=\"150000\"", 2),
        ] {
            assert!(text.contains(&line), "{line} in {text}");
        }
        for absent in [
            format!("apiserver_request_sli_duration_seconds_bucket{{{labels},le=\"0.025\"}}"),
            "apiserver_response_sizes_sum{component=\"apiserver\",group=\"\",resource=\"pods\",scope=\"namespace\"".into(),
        ] {
            assert!(!text.contains(&absent), "{absent} in {text}");
        }
    }

    #[test]
    fn series_of_removed_resources_are_dropped() {
        let table = ResourceMap::new(ferrite_api::kinds::built_in());
        let (metrics, times) = (Metrics::default(), StoreTimes::default());
        for path in ["/api/v1/pods", "/api/v1/nodes", "/version"] {
            let kind = RequestKind::sample("GET", path, &table);
            metrics.record(&kind, 200, Duration::from_millis(1), None, None);
        }
        for plural in ["pods", "nodes"] {
            let resource = table.find("", "v1", plural).unwrap();
            times.observe(resource, "create", Duration::from_millis(1));
            let made = Arc::default();
            let encoder = WatchEncoder::new(Arc::clone(resource), PLAIN_JSON, IncludeObject::Object, made);
            metrics.watch_event(&encoder.unwrap(), 10);
        }
        let text = || {
            let mut text = metrics.text(&InFlight::new(1, 1));
            times.put(&mut text);
            text
        };
        let lines = |text: &str, plural: &str| text.matches(&format!(",resource=\"{plural}\"")).count();
        let before = text();
        metrics.retain_served(&table);
        times.retain_served(&table);
        assert_eq!(lines(&text(), "pods"), lines(&before, "pods"));
        let others = ferrite_api::kinds::built_in().into_iter().filter(|row| row.plural != "pods");
        let without_pods = ResourceMap::new(others.collect());
        metrics.retain_served(&without_pods);
        times.retain_served(&without_pods);
        let after = text();
        assert_ne!(lines(&before, "pods"), 0);
        assert_eq!((lines(&after, "pods"), lines(&after, "nodes")), (0, lines(&before, "nodes")));
        assert_eq!(lines(&after, ""), lines(&before, ""), "requests for no resource");
    }

    #[test]
    fn verbs_and_scopes_are_upstreams() {
        let table = ResourceMap::new(ferrite_api::kinds::built_in());
        let (all, pod) = ("/api/v1/namespaces/a/pods", "/api/v1/namespaces/a/pods/b");
        for (method, path, verb, scope, body) in [
            ("POST", all, "POST", "resource", Some("create")),
            ("POST", "/api/v1/nodes", "POST", "resource", Some("create")),
            ("DELETE", all, "DELETE", "namespace", Some("delete_collection")),
            ("DELETE", pod, "DELETE", "resource", Some("delete")),
            ("GET", all, "LIST", "namespace", None),
            ("PATCH", pod, "PATCH", "resource", Some("patch")),
        ] {
            let kind = RequestKind::sample(method, path, &table);
            assert_eq!((kind.verb, kind.scope), (verb, scope), "{method} {path}");
            assert_eq!(body_verb(kind.verb, kind.scope), body, "{method} {path}");
        }
        let route = crate::request::route(pod);
        let (method, verb) = (Method::PATCH, Some(Verb::Patch));
        let applied = RequestKind::of(&method, &route, verb, &table, None, Some(APPLY.as_bytes()));
        assert_eq!((applied.verb, body_verb(applied.verb, applied.scope)), ("APPLY", Some("patch")));
    }

    /// A definition that is replaced or removed must be freed, though requests for it were counted.
    #[test]
    fn metrics_do_not_hold_resources() {
        let table = ResourceMap::new(ferrite_api::kinds::built_in());
        let pods = table.find("", "v1", "pods").unwrap();
        let holders = Arc::strong_count(pods);
        let metrics = Metrics::default();
        let kind = RequestKind::sample("GET", "/api/v1/pods", &table);
        metrics.record(&kind, 200, Duration::from_millis(1), None, None);
        drop(kind);
        assert_eq!(Arc::strong_count(pods), holders);
    }

    #[test]
    fn streams_are_told_from_requests() {
        let table = ResourceMap::new(ferrite_api::kinds::built_in());
        let pod = "/api/v1/namespaces/a/pods/b";
        let rows = [
            ("GET", "/api/v1/pods".to_owned(), "LIST", false),
            ("GET", "/api/v1/pods?watch=1".to_owned(), "WATCH", true),
            ("GET", format!("{pod}/log"), "CONNECT", true),
            ("POST", format!("{pod}/exec"), "CONNECT", true),
            ("PUT", format!("{pod}/status"), "PUT", false),
            ("GET", "/nonsense".to_owned(), "GET", false),
        ];
        for (method, path, verb, long) in rows {
            let kind = RequestKind::sample(method, &path, &table);
            assert_eq!((kind.verb, kind.is_long_running()), (verb, long), "{path}");
        }
    }
}
