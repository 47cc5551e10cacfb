//! Usage statistics of a group.

use std::fs;

use crate::layout::{Layout, Version};

/// Processor time of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuStat {
    pub usage_nanoseconds: u64,
}

/// Memory of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStat {
    pub usage: u64,
    /// Usage without the file pages the kernel can drop first.
    pub working_set: u64,
    pub rss: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    /// `None` when there is no limit.
    pub limit: Option<u64>,
}

/// Swap of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SwapStat {
    pub usage: u64,
    /// `None` when there is no limit.
    pub limit: Option<u64>,
}

/// The number after `key` in a flat keyed file.
pub(crate) fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Version 1 has `8:0 Read 4096` lines, version 2 `8:0 rbytes=4096 wbytes=0 …`.
fn transferred(text: &str) -> (u64, u64) {
    let (mut read, mut written) = (0u64, 0u64);
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [_, "Read", count] => read += count.parse::<u64>().unwrap_or(0),
            [_, "Write", count] => written += count.parse::<u64>().unwrap_or(0),
            _ => {
                for word in words {
                    match word.split_once('=') {
                        Some(("rbytes", count)) => read += count.parse::<u64>().unwrap_or(0),
                        Some(("wbytes", count)) => written += count.parse::<u64>().unwrap_or(0),
                        _ => {}
                    }
                }
            }
        }
    }
    (read, written)
}

impl Layout {
    /// Processor time; `None` if the group is gone.
    pub fn cpu(&self, path: &str) -> Option<CpuStat> {
        let usage_nanoseconds = match self.version() {
            Version::V1 => {
                let directory = self.directory("cpuacct", path)?;
                fs::read_to_string(directory.join("cpuacct.usage")).ok()?.trim().parse().ok()?
            }
            Version::V2 => {
                let text = fs::read_to_string(self.directory("cpu", path)?.join("cpu.stat")).ok()?;
                field(&text, "usage_usec")?.saturating_mul(1000)
            }
        };
        Some(CpuStat { usage_nanoseconds })
    }

    /// Memory in use; `None` if the group is gone.
    pub fn memory(&self, path: &str) -> Option<MemoryStat> {
        let directory = self.directory("memory", path)?;
        let read = |file: &str| fs::read_to_string(directory.join(file)).ok();
        let stat = read("memory.stat")?;
        let (usage, limit, inactive, rss, faults, major) = match self.version() {
            Version::V1 => (
                "memory.usage_in_bytes",
                "memory.limit_in_bytes",
                "total_inactive_file",
                "total_rss",
                "total_pgfault",
                "total_pgmajfault",
            ),
            Version::V2 => ("memory.current", "memory.max", "inactive_file", "anon", "pgfault", "pgmajfault"),
        };
        let usage: u64 = read(usage)?.trim().parse().ok()?;
        // "Unlimited" is the word max, or on version 1 the largest page-aligned number.
        let limit = read(limit).and_then(|v| v.trim().parse().ok()).filter(|v: &u64| *v < 1 << 62);
        let get = |key| field(&stat, key).unwrap_or(0);
        Some(MemoryStat {
            usage,
            working_set: usage.saturating_sub(get(inactive)),
            rss: get(rss),
            page_faults: get(faults),
            major_page_faults: get(major),
            limit,
        })
    }

    /// Bytes read from and written to block devices.
    pub fn transferred(&self, path: &str) -> (u64, u64) {
        let controller = if self.is_v2() { "io" } else { "blkio" };
        let file = if self.is_v2() { "io.stat" } else { "blkio.throttle.io_service_bytes" };
        let text = self
            .directory(controller, path)
            .and_then(|directory| fs::read_to_string(directory.join(file)).ok())
            .unwrap_or_default();
        transferred(&text)
    }

    /// `None` where the kernel does not account for swap.
    pub fn swap(&self, path: &str) -> Option<SwapStat> {
        let directory = self.directory("memory", path)?;
        let read = |file: &str| -> Option<u64> {
            fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok().filter(|v| *v < 1 << 62)
        };
        Some(match self.version() {
            Version::V1 => SwapStat {
                // The two are read one after the other: the difference may come out below zero.
                usage: read("memory.memsw.usage_in_bytes")?
                    .saturating_sub(read("memory.usage_in_bytes").unwrap_or(0)),
                limit: read("memory.memsw.limit_in_bytes")
                    .zip(read("memory.limit_in_bytes"))
                    .map(|(both, memory)| both.saturating_sub(memory)),
            },
            Version::V2 => SwapStat { usage: read("memory.swap.current")?, limit: read("memory.swap.max") },
        })
    }
}
