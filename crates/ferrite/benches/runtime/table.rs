//! The printed table.

use std::time::Duration;

/// Prints a row as soon as it is known.
pub struct Table;

impl Table {
    pub fn begin() -> Self {
        println!("load average {}", load());
        println!("{:<60} {:>10} {:>10} {:>10} {:>8}", "", "ferrite", "containerd", "runc", "ratio");
        Self
    }

    /// One row; the ratio is how many times ours the other's is.
    pub fn row(&mut self, what: &str, ours: f64, containerd: Option<f64>, runc: Option<f64>) {
        let cell = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
        let ratio = containerd.map_or("-".into(), |theirs| format!("{:.1}x", theirs / ours));
        println!("{what:<60} {ours:>10.1} {:>10} {:>10} {ratio:>8}", cell(containerd), cell(runc));
    }

    /// The rows of times: middle and tail.
    pub fn times(&mut self, what: &str, ours: &Times, containerd: Option<&Times>, runc: Option<&Times>) {
        for (name, share) in [("p50", 0.5), ("p90", 0.9)] {
            let at = |times: &Times| times.at(share);
            let label = format!("{what}, {name} of {}, ms", ours.0.len());
            self.row(&label, at(ours), containerd.map(at), runc.map(at));
        }
    }

    pub fn end(self) {
        println!("load average {}", load());
    }
}

fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_owned()
}

/// Times of the same thing done again and again.
#[derive(Default)]
pub struct Times(Vec<Duration>);

impl Times {
    pub fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The time, in milliseconds, that this share of all did not exceed.
    pub fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort();
        sorted[((sorted.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e3
    }
}
