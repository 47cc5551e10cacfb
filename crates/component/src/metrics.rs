//! The metrics of a process, in the text format of Prometheus and with upstream's names.
//!
//! A family is registered once, where its values arise, and keeps one value for each combination of labels. Values are
//! changed without a lock; only the first use of a combination takes one.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The `Content-Type` of [`Registry::text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Upstream's buckets for times between a nanosecond and ten seconds, each ten times the one before.
pub const DECADES: &[f64] = &[1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn increment(&self) {
        self.add(1);
    }

    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub fn add(&self, amount: i64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The distribution of times over fixed buckets.
#[derive(Debug)]
pub struct Histogram {
    limits: &'static [f64],
    /// Observations up to each limit and beyond the one before; the last ones are beyond all limits.
    counts: Box<[AtomicU64]>,
    /// The sum in seconds, as the bits of a float: lifetimes of certificates in nanoseconds soon exceed an integer.
    seconds: AtomicU64,
}

impl Histogram {
    fn new(limits: &'static [f64]) -> Self {
        let counts = (0..=limits.len()).map(|_| AtomicU64::new(0)).collect();
        Self { limits, counts, seconds: AtomicU64::new(0) }
    }

    pub fn observe(&self, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let bucket = self.limits.partition_point(|limit| *limit < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let add = |sum: u64| Some((f64::from_bits(sum) + seconds).to_bits());
        // The closure always answers, so the update cannot fail.
        let _ = self.seconds.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// A kind of value that a family can have.
pub trait Value: Send + Sync + 'static {
    const TYPE: &'static str;
    /// Writes the lines of one value; `labels` are written out, without braces.
    fn write(&self, out: &mut String, name: &str, labels: &str);
}

fn sample(out: &mut String, name: &str, labels: &str, value: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = if labels.is_empty() {
        writeln!(out, "{name} {value}")
    } else {
        writeln!(out, "{name}{{{labels}}} {value}")
    };
}

impl Value for Counter {
    const TYPE: &'static str = "counter";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        sample(out, name, labels, self.get());
    }
}

impl Value for Gauge {
    const TYPE: &'static str = "gauge";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        sample(out, name, labels, self.get());
    }
}

impl Value for Histogram {
    const TYPE: &'static str = "histogram";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (limit, count) in self.limits.iter().zip(&self.counts) {
            below += count.load(Ordering::Relaxed);
            sample(out, &bucket, &format!("{labels}{comma}le=\"{}\"", number(*limit)), below);
        }
        let count = below + self.counts[self.limits.len()].load(Ordering::Relaxed);
        sample(out, &bucket, &format!("{labels}{comma}le=\"+Inf\""), count);
        sample(out, &format!("{name}_sum"), labels, f64::from_bits(self.seconds.load(Ordering::Relaxed)));
        sample(out, &format!("{name}_count"), labels, count);
    }
}

/// As Go prints a number: with an exponent where it is very small.
fn number(value: f64) -> String {
    if value == 0.0 || value.abs() >= 1e-4 {
        return value.to_string();
    }
    let text = format!("{value:e}");
    match text.split_once("e-") {
        Some((digits, exponent)) if exponent.len() == 1 => format!("{digits}e-0{exponent}"),
        _ => text,
    }
}

/// A metric with one value for each combination of its labels.
pub struct Family<V> {
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    make: Box<dyn Fn() -> V + Send + Sync>,
    values: Mutex<BTreeMap<Vec<String>, Arc<V>>>,
}

impl<V> std::fmt::Debug for Family<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Family").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<V: Value> Family<V> {
    /// The value for these labels, in the order in which the family names them. Keep it where it is changed often.
    pub fn with(&self, labels: &[&str]) -> Arc<V> {
        debug_assert_eq!(labels.len(), self.labels.len(), "labels of {}", self.name);
        let mut values = lock(&self.values);
        let labels: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
        values.entry(labels).or_insert_with(|| Arc::new((self.make)())).clone()
    }

    /// Forgets the value for these labels: it was that of something that is gone.
    pub fn remove(&self, labels: &[&str]) {
        let labels: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
        lock(&self.values).remove(&labels);
    }
}

trait Exposed: Send + Sync {
    fn name(&self) -> &'static str;
    fn write(&self, out: &mut String);
}

impl<V: Value> Exposed for Family<V> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn write(&self, out: &mut String) {
        let values = lock(&self.values);
        if values.is_empty() {
            return;
        }
        let _ = writeln!(out, "# HELP {} {}", self.name, self.help);
        let _ = writeln!(out, "# TYPE {} {}", self.name, V::TYPE);
        for (labels, value) in values.iter() {
            let pairs =
                self.labels.iter().zip(labels).map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
            value.write(out, self.name, &pairs.collect::<Vec<_>>().join(","));
        }
    }
}

/// A label's value as the text format writes it between quotation marks.
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The families of a process.
#[derive(Default)]
pub struct Registry {
    families: Mutex<BTreeMap<&'static str, Arc<dyn Exposed>>>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

/// The registry of this process.
pub fn registry() -> &'static Registry {
    static REGISTRY: std::sync::LazyLock<Registry> = std::sync::LazyLock::new(Registry::default);
    &REGISTRY
}

impl Registry {
    fn register<V: Value>(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        make: impl Fn() -> V + Send + Sync + 'static,
    ) -> Arc<Family<V>> {
        let family = Arc::new(Family { name, help, labels, make: Box::new(make), values: Mutex::default() });
        let previous = lock(&self.families).insert(name, family.clone());
        debug_assert!(previous.is_none(), "{name} is registered twice");
        family
    }

    pub fn counter(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Arc<Family<Counter>> {
        self.register(name, help, labels, Counter::default)
    }

    pub fn gauge(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Arc<Family<Gauge>> {
        self.register(name, help, labels, Gauge::default)
    }

    pub fn histogram(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        buckets: &'static [f64],
    ) -> Arc<Family<Histogram>> {
        self.register(name, help, labels, move || Histogram::new(buckets))
    }

    /// A family of values of a type that the caller brings.
    pub fn family<V: Value + Default>(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Arc<Family<V>> {
        self.register(name, help, labels, V::default)
    }

    /// All families that have a value, ordered by name.
    pub fn text(&self) -> String {
        let families: Vec<_> = lock(&self.families).values().cloned().collect();
        let mut out = String::new();
        for family in families {
            debug_assert!(!family.name().is_empty());
            family.write(&mut out);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_long_times_do_not_overflow() {
        let registry = Registry::default();
        let lifetimes = registry.histogram("lifetime_seconds", "Lifetimes.", &[], &[3600.0]);
        let ten_years = Duration::from_secs(315_360_000);
        for _ in 0..1000 {
            lifetimes.with(&[]).observe(ten_years);
        }
        assert!(registry.text().contains("lifetime_seconds_sum 315360000000\n"), "{}", registry.text());
    }

    #[test]
    fn families_are_written_in_the_text_format() {
        let registry = Registry::default();
        let adds = registry.counter("workqueue_adds_total", "Adds.", &["name"]);
        let depth = registry.gauge("depth", "Depth.", &[]);
        let times = registry.histogram("times_seconds", "Times.", &["name"], &[1e-8, 0.001, 10.0]);
        assert_eq!(registry.text(), "");
        adds.with(&["b"]).increment();
        adds.with(&["a\"\\\n"]).add(2);
        adds.with(&["b"]).increment();
        depth.with(&[]).set(-3);
        times.with(&["x"]).observe(Duration::from_millis(2));
        times.with(&["x"]).observe(Duration::from_secs(20));
        let expected = "# HELP depth Depth.\n# TYPE depth gauge\ndepth -3\n\
            # HELP times_seconds Times.\n# TYPE times_seconds histogram\n\
            times_seconds_bucket{name=\"x\",le=\"1e-08\"} 0\ntimes_seconds_bucket{name=\"x\",le=\"0.001\"} 0\n\
            times_seconds_bucket{name=\"x\",le=\"10\"} 1\ntimes_seconds_bucket{name=\"x\",le=\"+Inf\"} 2\n\
            times_seconds_sum{name=\"x\"} 20.002\ntimes_seconds_count{name=\"x\"} 2\n\
            # HELP workqueue_adds_total Adds.\n# TYPE workqueue_adds_total counter\n\
            workqueue_adds_total{name=\"a\\\"\\\\\\n\"} 2\nworkqueue_adds_total{name=\"b\"} 2\n";
        assert_eq!(registry.text(), expected);
    }
}
