//! `stats`.

use std::time::Duration;

use clap::Args;
use ferrite_runtime::standalone::{Task, Usage};
use serde_json::{Value, json};

use super::Outcome;
use super::table::{self, Columns};
use crate::engine::{Engine, View};
use crate::units::{binary_size, human_size};

/// Time over which a percentage is measured.
const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub struct Stats {
    /// Show all containers (default shows just running)
    #[arg(short, long)]
    all: bool,
    /// Disable streaming stats and only pull the first result
    #[arg(long)]
    no_stream: bool,
    /// Do not truncate output
    #[arg(long)]
    no_trunc: bool,
    /// Pretty-print using a Go template
    #[arg(long)]
    format: Option<String>,
    containers: Vec<String>,
}

const COLUMNS: Columns = &[
    ("CONTAINER ID", "ID"),
    ("NAME", "Name"),
    ("CPU %", "CPUPerc"),
    ("MEM USAGE / LIMIT", "MemUsage"),
    ("MEM %", "MemPerc"),
    ("NET I/O", "NetIO"),
    ("BLOCK I/O", "BlockIO"),
    ("PIDS", "PIDs"),
];

const HEADINGS: &[(&str, &str)] = &[
    ("Container", "CONTAINER"),
    ("ID", "CONTAINER ID"),
    ("Name", "NAME"),
    ("CPUPerc", "CPU %"),
    ("MemUsage", "MEM USAGE / LIMIT"),
    ("MemPerc", "MEM %"),
    ("NetIO", "NET I/O"),
    ("BlockIO", "BLOCK I/O"),
    ("PIDs", "PIDS"),
];

/// Bytes received and sent, by `/proc/<pid>/net/dev`.
fn network(text: &str) -> (u64, u64) {
    let mut total = (0, 0);
    for line in text.lines() {
        let Some((name, rest)) = line.split_once(':') else { continue };
        if name.trim() == "lo" {
            continue;
        }
        let numbers: Vec<u64> = rest.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        total.0 += numbers.first().copied().unwrap_or(0);
        total.1 += numbers.get(8).copied().unwrap_or(0);
    }
    total
}

fn machine_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    total.unwrap_or(0) * 1024
}

struct Sample {
    view: View,
    task: Option<Task>,
    usage: Option<Usage>,
}

impl Stats {
    fn sample(&self, engine: &Engine) -> Result<Vec<Sample>, super::Failure> {
        let views = if self.containers.is_empty() {
            engine.list()?.into_iter().filter(|view| self.all || view.state.status.runs()).collect()
        } else {
            self.containers.iter().map(|name| engine.find(name)).collect::<Result<Vec<_>, _>>()?
        };
        Ok(views
            .into_iter()
            .map(|view| {
                let task = view.state.task.clone().filter(|_| view.state.status.runs());
                let usage = task.as_ref().and_then(Task::usage);
                Sample { view, task, usage }
            })
            .collect())
    }

    fn row(&self, before: &[Sample], now: &Sample, elapsed: Duration) -> Value {
        let container = &now.view.container;
        let usage = now.usage.unwrap_or_default();
        let earlier = before
            .iter()
            .find(|sample| sample.view.container.id == container.id)
            .and_then(|sample| sample.usage)
            .unwrap_or(usage);
        let cpu = usage.cpu_nanoseconds.saturating_sub(earlier.cpu_nanoseconds) as f64
            / elapsed.as_nanos().max(1) as f64
            * 100.0;
        let limit = usage.memory_limit.unwrap_or_else(machine_memory);
        let memory = if limit == 0 { 0.0 } else { usage.memory as f64 / limit as f64 * 100.0 };
        let devices = now
            .task
            .as_ref()
            .and_then(|task| std::fs::read_to_string(format!("/proc/{}/net/dev", task.pid)).ok())
            .unwrap_or_default();
        let (received, sent) = network(&devices);
        let id = if self.no_trunc { container.id.clone() } else { container.id.chars().take(12).collect() };
        json!({
            "Container": id, "ID": id, "Name": container.name,
            "CPUPerc": format!("{cpu:.2}%"),
            "MemUsage": format!("{} / {}", binary_size(usage.memory), binary_size(limit)),
            "MemPerc": format!("{memory:.2}%"),
            "NetIO": format!("{} / {}", human_size(received), human_size(sent)),
            "BlockIO": format!("{} / {}", human_size(usage.read_bytes), human_size(usage.written_bytes)),
            "PIDs": usage.processes.to_string(),
        })
    }

    pub async fn run(self, engine: &Engine) -> Outcome {
        let mut before = self.sample(engine)?;
        loop {
            let started = std::time::Instant::now();
            tokio::time::sleep(INTERVAL).await;
            let now = self.sample(engine)?;
            let elapsed = started.elapsed();
            let rows: Vec<Value> = now.iter().map(|sample| self.row(&before, sample, elapsed)).collect();
            if !self.no_stream && self.format.is_none() {
                // To the beginning of an empty screen.
                super::say("\x1b[H\x1b[2J")?;
            }
            table::show(&rows, self.format.as_deref(), COLUMNS, HEADINGS)?;
            if self.no_stream {
                return Ok(0);
            }
            before = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  eth0: 100 1 0 0 0 0 0 0 200 1 0 0 0 0 0 0\n";
        assert_eq!(network(text), (100, 200));
    }
}
