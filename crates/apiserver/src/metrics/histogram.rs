//! Histograms that are observed without a lock, and the text they become.

use super::put;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A histogram of times. The buckets are fixed, so that an observation is three additions.
pub(crate) struct Timing {
    limits: &'static [f64],
    counts: Box<[AtomicU64]>,
    count: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Timing {
    pub fn new(limits: &'static [f64]) -> Self {
        let counts = limits.iter().map(|_| AtomicU64::new(0)).collect();
        Self { limits, counts, count: AtomicU64::new(0), nanoseconds: AtomicU64::new(0) }
    }

    pub fn observe(&self, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let bucket = self.limits.partition_point(|limit| *limit < seconds);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub fn put(&self, out: &mut String, name: &str, labels: &str) {
        let mut below = 0;
        for (limit, count) in self.limits.iter().zip(&self.counts) {
            below += count.load(Ordering::Relaxed);
            put(out, &format!("{name}_bucket{{{labels},le=\"{limit}\"}} {below}"));
        }
        // An observation may be under way: the total is never less than a bucket.
        let count = self.count().max(below);
        put(out, &format!("{name}_bucket{{{labels},le=\"+Inf\"}} {count}"));
        let seconds = self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        put(out, &format!("{name}_sum{{{labels}}} {seconds}"));
        put(out, &format!("{name}_count{{{labels}}} {count}"));
    }
}

/// A histogram whose owner holds a lock.
pub(crate) struct Histogram {
    limits: &'static [f64],
    counts: Vec<u64>,
    pub count: u64,
    sum: f64,
}

impl Histogram {
    pub fn new(limits: &'static [f64]) -> Self {
        Self { limits, counts: vec![0; limits.len()], count: 0, sum: 0.0 }
    }

    pub fn observe(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        let bucket = self.limits.partition_point(|limit| *limit < value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
    }

    /// Adds the observations of another histogram with the same buckets.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.count += other.count;
        self.sum += other.sum;
    }

    pub fn put(&self, out: &mut String, name: &str, labels: &str) {
        self.put_from(out, name, labels, f64::NEG_INFINITY);
    }

    /// Writes the buckets from `least` on: of two families that observe the same values, one may have fewer.
    pub fn put_from(&self, out: &mut String, name: &str, labels: &str, least: f64) {
        let mut below = 0;
        for (limit, count) in self.limits.iter().zip(&self.counts) {
            below += count;
            if *limit >= least {
                put(out, &format!("{name}_bucket{{{labels},le=\"{limit}\"}} {below}"));
            }
        }
        put(out, &format!("{name}_bucket{{{labels},le=\"+Inf\"}} {}", self.count));
        put(out, &format!("{name}_sum{{{labels}}} {}", self.sum));
        put(out, &format!("{name}_count{{{labels}}} {}", self.count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let timing = Timing::new(&[0.1, 1.0]);
        for milliseconds in [50, 100, 500, 5000] {
            timing.observe(Duration::from_millis(milliseconds));
        }
        let mut out = String::new();
        timing.put(&mut out, "t", "a=\"b\"");
        let expected = "t_bucket{a=\"b\",le=\"0.1\"} 2\nt_bucket{a=\"b\",le=\"1\"} 3\nt_bucket{a=\"b\",le=\"+Inf\"} 4\n\
                        t_sum{a=\"b\"} 5.65\nt_count{a=\"b\"} 4\n";
        assert_eq!(out, expected);
    }

    #[test]
    fn a_family_may_begin_later() {
        let mut histogram = Histogram::new(&[0.1, 1.0]);
        histogram.observe(0.05);
        let mut out = String::new();
        histogram.put_from(&mut out, "h", "a=\"b\"", 0.5);
        assert!(out.starts_with("h_bucket{a=\"b\",le=\"1\"} 1\n"), "{out}");
    }
}
