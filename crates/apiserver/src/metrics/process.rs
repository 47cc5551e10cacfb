//! The program and its process.

use super::{head, put};
use crate::version;

pub(super) fn put_build(out: &mut String) {
    let info = version::info();
    let text = |key: &str| info.get(key).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
    let labels: Vec<String> = [
        ("build_date", "buildDate"),
        ("compiler", "compiler"),
        ("git_commit", "gitCommit"),
        ("git_tree_state", "gitTreeState"),
        ("git_version", "gitVersion"),
        ("go_version", "goVersion"),
        ("major", "major"),
        ("minor", "minor"),
        ("platform", "platform"),
    ]
    .iter()
    .map(|(label, key)| format!("{label}={:?}", text(key)))
    .collect();
    head(out, "kubernetes_build_info", "gauge", "What this server is.");
    put(out, &format!("kubernetes_build_info{{{}}} 1", labels.join(",")));
    let name = "version_info";
    head(out, name, "gauge", "The versions of the API this server speaks.");
    let (binary, emulation) =
        (text("minor"), format!("{}.{}", text("emulationMajor"), text("emulationMinor")));
    let least = format!("{}.{}", text("minCompatibilityMajor"), text("minCompatibilityMinor"));
    let labels = format!(
        "binary=\"{}.{binary}\",component=\"kube\",emulation={emulation:?},min_compat={least:?}",
        text("major")
    );
    put(out, &format!("{name}{{{labels}}} 1"));
}

/// Ticks of a second and bytes of a page, as the kernel counts for user space on every architecture served.
const TICKS: f64 = 100.0;
const PAGE: u64 = 4096;

/// The kernel's figures of this process.
pub(super) fn put_process(out: &mut String) {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{name}")).unwrap_or_default();
    let gauge = |out: &mut String, name: &str, help: &str, value: Option<f64>| {
        let Some(value) = value else { return };
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        head(out, name, kind, help);
        put(out, &format!("{name} {value}"));
    };
    let stat = read("self/stat");
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> =
        stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
    let number = |index: usize| fields.get(index).and_then(|f| f.parse::<u64>().ok());
    let cpu = number(11).zip(number(12)).map(|(user, system)| (user + system) as f64 / TICKS);
    let started = number(19).zip(keyed(&read("stat"), "btime")).map(|(at, boot)| boot + at as f64 / TICKS);
    let limits = read("self/limits");
    let open = std::fs::read_dir("/proc/self/fd").ok().map(|open| open.count() as f64);
    let network = transferred(&read("self/net/dev"));
    gauge(out, "process_cpu_seconds_total", "Processor time used.", cpu);
    gauge(out, "process_max_fds", "Most open file descriptors.", limit(&limits, "Max open files"));
    let (received, sent) = network.unzip();
    gauge(
        out,
        "process_network_receive_bytes_total",
        "Bytes received by the process's network namespace.",
        received,
    );
    gauge(
        out,
        "process_network_transmit_bytes_total",
        "Bytes sent by the process's network namespace.",
        sent,
    );
    gauge(out, "process_open_fds", "Open file descriptors.", open);
    gauge(out, "process_resident_memory_bytes", "Resident memory.", number(21).map(|n| (n * PAGE) as f64));
    gauge(out, "process_start_time_seconds", "When the process started, since 1970.", started);
    gauge(out, "process_virtual_memory_bytes", "Virtual memory.", number(20).map(|n| n as f64));
    let most = limit(&limits, "Max address space");
    gauge(out, "process_virtual_memory_max_bytes", "Most virtual memory; -1 is no limit.", most);
}

fn keyed(text: &str, key: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok())
}

/// The soft limit of a row of `/proc/self/limits`; no limit is -1, as upstream says it.
fn limit(text: &str, name: &str) -> Option<f64> {
    let row = text.lines().find_map(|line| line.strip_prefix(name))?;
    match row.split_whitespace().next()? {
        "unlimited" => Some(-1.0),
        soft => soft.parse().ok(),
    }
}

/// Bytes received and sent by all interfaces of `/proc/self/net/dev` together.
fn transferred(text: &str) -> Option<(f64, f64)> {
    let rows = text.lines().filter_map(|line| {
        let numbers: Vec<f64> =
            line.split_once(':')?.1.split_whitespace().map_while(|n| n.parse().ok()).collect();
        Some((*numbers.first()?, *numbers.get(8)?))
    });
    rows.reduce(|(received, sent), (r, s)| (received + r, sent + s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max open files            1024                 4096                 files     \n\
                      Max address space         unlimited            unlimited            bytes     \n";
        assert_eq!(limit(limits, "Max open files"), Some(1024.0));
        assert_eq!(limit(limits, "Max address space"), Some(-1.0));
        assert_eq!(limit(limits, "Max anything"), None);
        let dev = "Inter-|   Receive  |  Transmit\n face |bytes packets|bytes\n    lo: 10 1 0 0 0 0 0 0 20 1\n  eth0: 5 1 0 0 0 0 0 0 7 1\n";
        assert_eq!(transferred(dev), Some((15.0, 27.0)));
        assert_eq!(keyed("cpu 1\nbtime 1700000000\n", "btime"), Some(1_700_000_000.0));
    }

    #[test]
    fn every_figure_of_this_process() {
        let mut out = String::new();
        put_process(&mut out);
        for name in [
            "process_cpu_seconds_total",
            "process_max_fds",
            "process_open_fds",
            "process_resident_memory_bytes",
            "process_start_time_seconds",
            "process_virtual_memory_bytes",
            "process_virtual_memory_max_bytes",
        ] {
            assert!(out.contains(&format!("\n{name} ")), "{name} in {out}");
        }
    }
}
