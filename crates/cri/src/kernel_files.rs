//! Parts of `/proc` and `/sys` that containers are kept from, unless they ask for an unmasked view.

use std::path::Path;
use std::sync::OnceLock;

const CPUS: &str = "/sys/devices/system/cpu";

/// Not to be seen at all: the fixed paths and, as upstream, the counters of throttling of each processor, by which a
/// container watches the work of others.
pub fn masked_paths() -> &'static [String] {
    static PATHS: OnceLock<Vec<String>> = OnceLock::new();
    PATHS.get_or_init(|| {
        let fixed = MASKED_PATHS.iter().map(|path| (*path).to_owned());
        fixed.chain(throttle_counters(Path::new(CPUS))).collect()
    })
}

fn throttle_counters(cpus: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(cpus).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("cpu")?.parse().ok())
        .filter(|number| cpus.join(format!("cpu{number}/thermal_throttle")).exists())
        .collect();
    numbers.sort_unstable();
    numbers.into_iter().map(|number| format!("{CPUS}/cpu{number}/thermal_throttle")).collect()
}

const MASKED_PATHS: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// To be read only.
pub const READONLY_PATHS: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_processors_are_masked_where_they_are() {
        let cpus = tempfile::tempdir().unwrap();
        for made in ["cpu10/thermal_throttle", "cpu2/thermal_throttle", "cpu3", "cpufreq/thermal_throttle"] {
            std::fs::create_dir_all(cpus.path().join(made)).unwrap();
        }
        let masked = throttle_counters(cpus.path());
        assert_eq!(masked, [2, 10].map(|cpu| format!("{CPUS}/cpu{cpu}/thermal_throttle")));
        assert!(masked_paths().iter().any(|path| path == "/proc/kcore"));
    }
}
