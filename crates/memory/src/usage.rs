//! The memory and processor time of a process, for measurements.

use std::fs;
use std::time::Duration;

/// The sum of the lines of a process' `smaps_rollup` that begin with `key` (`Pss:`, `Private_`), in KiB, without huge
/// pages. Zero if the process is gone.
pub fn rollup(pid: u32, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let lines = text.lines().filter(|line| line.starts_with(key) && !line.contains("Hugetlb"));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

/// The processor time of a process, in steps of ten milliseconds. Zero if the process is gone.
pub fn processor_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Fields 14 and 15 of the file, in hundredths of a second. The name in parentheses may have spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_uses_time() {
        let own = std::process::id();
        assert!(rollup(own, "Pss:") > 0);
        let before = processor_time(own);
        while processor_time(own) == before {}
        assert_eq!((rollup(0, "Pss:"), processor_time(0)), (0, Duration::ZERO));
    }
}
