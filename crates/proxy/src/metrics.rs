//! Counters of the proxy, with upstream's names where upstream has them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;

use crate::model::IpFamily;
use crate::sync::Synced;

#[derive(Debug, Default, Clone, Copy)]
struct FamilyCounters {
    full: u64,
    partial: u64,
    elements: u64,
    last: i64,
    failures: u64,
}

/// The proxy's counters.
#[derive(Debug, Default)]
pub struct Metrics {
    families: Mutex<BTreeMap<IpFamily, FamilyCounters>>,
}

impl Metrics {
    pub fn synced(&self, family: IpFamily, synced: &Synced, now: Timestamp) {
        let mut families = self.families.lock().unwrap_or_else(PoisonError::into_inner);
        let counters = families.entry(family).or_default();
        match synced.rebuilt {
            true => counters.full += 1,
            false => counters.partial += 1,
        }
        counters.elements += u64::try_from(synced.added + synced.deleted).unwrap_or(0);
        counters.last = now.as_second();
    }

    pub fn failed(&self, family: IpFamily) {
        let mut families = self.families.lock().unwrap_or_else(PoisonError::into_inner);
        families.entry(family).or_default().failures += 1;
    }

    /// The text format of Prometheus.
    pub fn render(&self) -> String {
        let families = self.families.lock().unwrap_or_else(PoisonError::into_inner).clone();
        type Read = fn(&FamilyCounters) -> i128;
        let rows: [(&str, &str, &str, Read); 5] = [
            (
                "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
                "gauge",
                "The last time proxy rules were successfully synced",
                |c| c.last.into(),
            ),
            (
                "kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
                "counter",
                "Cumulative proxy nftables sync failures",
                |c| c.failures.into(),
            ),
            ("ferrite_proxy_full_syncs_total", "counter", "Tables that were made as a whole", |c| {
                c.full.into()
            }),
            ("ferrite_proxy_partial_syncs_total", "counter", "Transactions that changed a table", |c| {
                c.partial.into()
            }),
            (
                "ferrite_proxy_changed_elements_total",
                "counter",
                "Elements added to or deleted from tables",
                |c| c.elements.into(),
            ),
        ];
        let mut text = String::new();
        for (name, kind, help, read) in rows {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (family, counters) in &families {
                let _ = writeln!(text, "{name}{{ip_family=\"{}\"}} {}", family.api_name(), read(counters));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_the_label_of_upstream() {
        let metrics = Metrics::default();
        metrics.failed(IpFamily::V4);
        metrics.failed(IpFamily::V4);
        metrics.failed(IpFamily::V6);
        let text = metrics.render();
        let name = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total";
        for line in [format!("{name}{{ip_family=\"IPv4\"}} 2\n"), format!("{name}{{ip_family=\"IPv6\"}} 1\n")]
        {
            assert!(text.contains(&line), "{text}");
        }
    }
}
