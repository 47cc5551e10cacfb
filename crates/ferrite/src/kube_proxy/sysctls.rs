//! Settings of connection tracking, as upstream's.

use super::config::Conntrack;
use ferrite_component::GoDuration;
use std::path::Path;
use std::time::Duration;

/// A value of `/proc/sys/net/netfilter`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sysctl {
    pub name: &'static str,
    pub value: u64,
}

const MAX: &str = "nf_conntrack_max";
/// As upstream: machines with many processors do not get a table without bound.
const MOST: u64 = 1 << 20;
/// The number of connections for each bucket of the kernel's hash table.
const PER_BUCKET: u64 = 4;

/// The values for a machine with this number of processors. Zero leaves the kernel's value alone.
pub fn sysctls(conntrack: &Conntrack, processors: u32) -> Vec<Sysctl> {
    const DAY: Duration = Duration::from_hours(24);
    const HOUR: Duration = Duration::from_hours(1);
    let max = match conntrack.max_per_core.unwrap_or(32 * 1024) {
        0 => 0,
        per_core => {
            let scaled = u64::from(per_core).saturating_mul(processors.into());
            if scaled > MOST { MOST } else { scaled.max(conntrack.min.unwrap_or(128 * 1024).into()) }
        }
    };
    let seconds = |given: Option<GoDuration>, usual: Duration| given.map_or(usual, |given| given.0).as_secs();
    let rows = [
        (MAX, max),
        ("nf_conntrack_tcp_timeout_established", seconds(conntrack.tcp_established_timeout, DAY)),
        ("nf_conntrack_tcp_timeout_close_wait", seconds(conntrack.tcp_close_wait_timeout, HOUR)),
        ("nf_conntrack_tcp_be_liberal", u64::from(conntrack.tcp_be_liberal.unwrap_or(false))),
        ("nf_conntrack_udp_timeout", seconds(conntrack.udp_timeout, Duration::ZERO)),
        ("nf_conntrack_udp_timeout_stream", seconds(conntrack.udp_stream_timeout, Duration::ZERO)),
    ];
    let wanted = rows.into_iter().filter(|(_, value)| *value > 0);
    wanted.map(|(name, value)| Sysctl { name, value }).collect()
}

/// Sets the values. In a container `/proc/sys` may be read-only: that is not a reason to fail.
pub fn set(sysctls: &[Sysctl]) {
    set_in(sysctls, Path::new("/proc/sys/net/netfilter"), Path::new("/sys/module/nf_conntrack/parameters"));
}

fn set_in(sysctls: &[Sysctl], values: &Path, module: &Path) {
    for sysctl in sysctls {
        let file = values.join(sysctl.name);
        if read(&file) != Some(sysctl.value) {
            write(&file, sysctl.value);
        }
        let (file, buckets) = (module.join("hashsize"), sysctl.value / PER_BUCKET);
        if sysctl.name == MAX && read(&file).is_some_and(|size| size < buckets) {
            write(&file, buckets);
        }
    }
}

fn read(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn write(file: &Path, value: u64) {
    if let Err(error) = std::fs::write(file, value.to_string()) {
        tracing::warn!(%error, "cannot set {}", file.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_connections_follows_the_processors() {
        let max = |per_core: Option<u32>, min: Option<u32>, processors| {
            let conntrack = Conntrack { max_per_core: per_core, min, ..Conntrack::default() };
            sysctls(&conntrack, processors).into_iter().find(|s| s.name == MAX).map(|s| s.value)
        };
        assert_eq!(max(None, None, 2), Some(131_072), "the least");
        assert_eq!(max(None, None, 8), Some(262_144));
        assert_eq!(max(None, None, 64), Some(MOST), "the most");
        assert_eq!(max(Some(100), Some(5_000_000), 1), Some(5_000_000), "the least may be more");
        assert_eq!(max(Some(0), Some(7), 8), None);
    }

    #[test]
    fn values_are_set_as_they_are_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at(MAX), "500000\n").unwrap();
        std::fs::write(at("hashsize"), "1000\n").unwrap();
        set_in(&[Sysctl { name: MAX, value: 131_072 }], dir.path(), dir.path());
        assert_eq!(read(&at(MAX)), Some(131_072), "a larger value is lowered");
        assert_eq!(read(&at("hashsize")), Some(32_768));
        std::fs::write(at("hashsize"), "65536").unwrap();
        set_in(&[Sysctl { name: MAX, value: 131_072 }], dir.path(), dir.path());
        assert_eq!(read(&at("hashsize")), Some(65_536), "a larger hash table stays");
    }
}
