//! Facts about this machine.

use std::fs;
use std::path::Path;

/// Facts about the machine. They are read once: none changes while it runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    pub hostname: String,
    pub machine_id: String,
    pub system_uuid: String,
    pub boot_id: String,
    pub kernel_version: String,
    pub os_image: String,
    pub architecture: &'static str,
    pub cpus: i64,
    pub memory: i64,
    pub swap: i64,
    /// Size of the file system pods write to.
    pub ephemeral_storage: i64,
    /// Page size (as in `hugepages-2Mi`) and bytes of each pool.
    pub hugepages: Vec<(String, i64)>,
}

impl Machine {
    pub(crate) fn read(root_dir: &Path) -> Self {
        let line = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_string();
        let meminfo = line("/proc/meminfo");
        let os_release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let machine_id = line("/etc/machine-id");
        Self {
            hostname: line("/proc/sys/kernel/hostname"),
            system_uuid: Some(line("/sys/class/dmi/id/product_uuid"))
                .filter(|u| !u.is_empty())
                .unwrap_or_else(|| machine_id.clone()),
            machine_id,
            boot_id: line("/proc/sys/kernel/random/boot_id"),
            kernel_version: line("/proc/sys/kernel/osrelease"),
            os_image: pretty_name(&os_release).unwrap_or_else(|| "Linux".into()),
            architecture: go_arch(),
            cpus: std::thread::available_parallelism().map_or(1, |n| i64::try_from(n.get()).unwrap_or(1)),
            memory: meminfo_bytes(&meminfo, "MemTotal").unwrap_or(0),
            swap: meminfo_bytes(&meminfo, "SwapTotal").unwrap_or(0),
            ephemeral_storage: nix::sys::statvfs::statvfs(root_dir)
                .map(|s| (s.blocks() as i64).saturating_mul(s.fragment_size() as i64))
                .unwrap_or(0),
            hugepages: hugepages(Path::new("/sys/kernel/mm/hugepages")),
        }
    }
}

/// The architecture by the name Kubernetes has for it.
fn go_arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

pub(crate) fn meminfo_bytes(text: &str, key: &str) -> Option<i64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    let kilobytes: i64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

fn pretty_name(os_release: &str) -> Option<String> {
    let value = os_release.lines().find_map(|l| l.strip_prefix("PRETTY_NAME="))?;
    Some(value.trim_matches('"').to_string())
}

pub(crate) fn hugepages(dir: &Path) -> Vec<(String, i64)> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut pools: Vec<(String, i64)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let kilobytes: i64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let count: i64 =
                fs::read_to_string(entry.path().join("nr_hugepages")).ok()?.trim().parse().ok()?;
            let size = match kilobytes {
                k if k % (1 << 20) == 0 => format!("{}Gi", k >> 20),
                k if k % (1 << 10) == 0 => format!("{}Mi", k >> 10),
                k => format!("{k}Ki"),
            };
            Some((size, count.saturating_mul(kilobytes).saturating_mul(1024)))
        })
        .collect();
    pools.sort();
    pools
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read() {
        let text = "MemTotal:       16384 kB\nMemFree:  1 kB\n";
        assert_eq!(meminfo_bytes(text, "MemTotal"), Some(16 << 20));
        assert_eq!(meminfo_bytes(text, "SwapTotal"), None);
        assert_eq!(pretty_name("ID=x\nPRETTY_NAME=\"Some Linux 1\"\n").as_deref(), Some("Some Linux 1"));
        let machine = Machine::read(Path::new("/"));
        assert!(machine.memory > 0 && machine.cpus > 0 && machine.ephemeral_storage > 0);
        assert!(!machine.kernel_version.is_empty() && !machine.hostname.is_empty());
    }
}
