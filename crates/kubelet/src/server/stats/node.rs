//! The kernel's counters for the node as a whole.

use crate::node::meminfo_bytes;
use nix::sys::statvfs::statvfs;
use std::path::Path;

/// One node's use of processor and memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NodeUse {
    pub cpu_nanos: u64,
    pub memory_available: i64,
    pub memory_working_set: i64,
    pub swap_used: i64,
    pub swap_free: i64,
    /// When the machine started, in seconds since 1970.
    pub boot_time: i64,
}

pub(crate) fn node_use() -> NodeUse {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |key: &str| meminfo_bytes(&meminfo, key).unwrap_or(0);
    let (total, available) = (bytes("MemTotal"), bytes("MemAvailable"));
    NodeUse {
        cpu_nanos: cpu_nanos(&stat),
        memory_available: available,
        memory_working_set: (total - available).max(0),
        swap_used: (bytes("SwapTotal") - bytes("SwapFree")).max(0),
        swap_free: bytes("SwapFree"),
        boot_time: stat
            .lines()
            .find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
            .unwrap_or(0),
    }
}

/// Busy time of all processors: user, nice, system, irq, softirq and steal, in ticks of 10 ms.
fn cpu_nanos(stat: &str) -> u64 {
    let Some(line) = stat.lines().find_map(|l| l.strip_prefix("cpu ")) else { return 0 };
    let ticks: Vec<u64> = line.split_whitespace().map(|t| t.parse().unwrap_or(0)).collect();
    let busy: u64 = [0, 1, 2, 5, 6, 7].iter().filter_map(|i| ticks.get(*i)).sum();
    busy.saturating_mul(10_000_000)
}

/// The kernel's limit of processes, and their number.
pub(crate) fn processes() -> Option<(u64, u64)> {
    let most = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok()?.trim().parse().ok()?;
    Some((most, running(&std::fs::read_to_string("/proc/loadavg").ok()?)?))
}

/// The second number of `1/234` in `/proc/loadavg`.
fn running(loadavg: &str) -> Option<u64> {
    loadavg.split(' ').nth(3)?.split_once('/')?.1.parse().ok()
}

/// One file system, in bytes and inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub available: u64,
    pub capacity: u64,
    pub used: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

pub(crate) fn file_system(path: &Path) -> Option<FileSystem> {
    let stat = statvfs(path).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
    Some(FileSystem {
        available: bytes(stat.blocks_available()),
        capacity: bytes(stat.blocks()),
        used: bytes(stat.blocks().saturating_sub(stat.blocks_free())),
        inodes: stat.files(),
        inodes_free: stat.files_free(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_leaves_out_idle_and_wait() {
        assert_eq!(cpu_nanos("cpu  1 2 3 100 200 4 5 6 0 0\ncpu0 1 1 1\n"), 21 * 10_000_000);
        assert_eq!(cpu_nanos(""), 0);
    }

    #[test]
    fn the_kernels_figures() {
        assert_eq!(running("0.00 0.01 0.05 2/345 6789\n"), Some(345));
        assert_eq!(running("nonsense"), None);
        let root = file_system(Path::new("/")).unwrap();
        assert!(root.capacity >= root.used && root.capacity > 0);
        let used = node_use();
        assert!(used.boot_time > 0 && used.cpu_nanos > 0 && used.memory_working_set > 0);
    }
}
